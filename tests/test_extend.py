"""Plans added to a finished run: the figures of a run with them from the start, or a refusal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from driftgate.accuracy.merge import merge_runs
from driftgate.accuracy.records import load_run, save_run
from driftgate.errors import InputError, UsageError
from driftgate.extend import extend
from driftgate.main_job import prepare

SMALL = {
    "controls": ["nvfp4@4"], "tasks": ["gpqa"], "mode": "loglikelihood", "repeats": 1, "limit": 3, "batch": 2,
    "steps": 63, "sequences": 2,
}  # fmt: skip
OLD, NEW, CONTROL = "nvfp4/fp32@4", "fp8/fp32@4", "nvfp4@4"
COMMAND = ["driftgate", "run"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("extend")


@pytest.fixture(scope="module")
def base(folder) -> Path:
    prepare("quick", out=folder / "base", command=COMMAND, plans=[OLD], **SMALL).execute()
    return folder / "base"


@pytest.fixture(scope="module")
def extended(folder, base):
    before = {p.name: p.read_bytes() for p in base.iterdir() if p.is_file()}
    extend(base, out=folder / "extended", plans=[NEW], command=COMMAND).execute()
    assert {p.name: p.read_bytes() for p in base.iterdir() if p.is_file()} == before
    return load_run(folder / "extended")


def rows(frame: pd.DataFrame, plan: str) -> pd.DataFrame:
    return frame[frame["plan"] == plan].assign(plan=plan).reset_index(drop=True)


def test_a_plan_that_is_added_has_the_figures_of_one_that_was_there(folder, extended):
    prepare("quick", out=folder / "other", command=COMMAND, plans=[NEW], **SMALL).execute()
    other = load_run(folder / "other")
    for frame, whole in ((extended.steps, other.steps), (extended.items, other.items)):
        pd.testing.assert_frame_equal(rows(frame, NEW), rows(whole, NEW))
    assert extended.results.plans[NEW] == other.results.plans[NEW]
    assert extended.manifest.digests == other.manifest.digests


def test_what_was_there_stays(base, extended):
    before = load_run(base)
    assert list(extended.results.plans) == [OLD, CONTROL, NEW]
    for plan in (OLD, CONTROL):
        pd.testing.assert_frame_equal(rows(extended.steps, plan), rows(before.steps, plan))
        assert extended.results.plans[plan] == before.results.plans[plan]
    assert len(rows(extended.items, "baseline")) == len(rows(before.items, "baseline")) == 3


def test_every_plan_is_decided_anew(extended):
    assert {v.plan for v in extended.results.verdicts} >= {OLD, NEW}
    assert extended.manifest.plans.keys() == extended.results.plans.keys()
    assert list(extended.steps["plan"].cat.categories) == list(extended.results.plans)


@pytest.mark.parametrize(
    ("part", "name", "says"),
    [
        ("versions", "torch", "versions torch differ"),
        ("device", "type", "device type differ"),
        ("hashes", "model/model.safetensors", r"hashes model/model\.safetensors differ"),
        ("tasks", "gpqa", "tasks gpqa differ"),
        ("streams", "prefill", "streams prefill differ"),
        ("digests", "lock step", "logits of the baseline in lock step differ"),
    ],
)
def test_runs_whose_baselines_differ_are_not_joined(base, extended, part, name, says):
    one, other = load_run(base), load_run(base)
    other.results.plans = {NEW: other.results.plans[OLD]}
    getattr(other.manifest, part)[name] = "another"
    with pytest.raises(InputError, match=says):
        merge_runs(one, other)


def test_a_run_without_digests_is_too_old(base):
    one = load_run(base)
    one.manifest.digests = {}
    with pytest.raises(InputError, match="keeps no digest"):
        merge_runs(one, one)


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({}, "name them with --plan or --control"),
        ({"plans": [OLD]}, f"plan {OLD} is in .* already"),
        ({"plans": ["fp8@4", "fp8/fp16@4", "int8@4"]}, "adds at most as many plans as the run has, 2"),
        ({"plans": ["fp9@4"]}, "fp9"),
    ],
)
def test_plans_that_cannot_be_added_are_one_line(base, tmp_path, choices, says):
    with pytest.raises(UsageError, match=says):
        extend(base, out=tmp_path / "out", **choices)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_run_is_one_line(tmp_path, base):
    with pytest.raises(InputError, match="does not exist"):
        extend(tmp_path / "nowhere", out=tmp_path / "out", plans=[NEW])
    shutil.copytree(base, tmp_path / "old")
    run = load_run(tmp_path / "old")
    run.manifest.suite["colour"] = "blue"
    save_run(tmp_path / "old", run)
    assert json.loads((tmp_path / "old" / "manifest.json").read_text())["suite"]["colour"] == "blue"
    with pytest.raises(InputError, match="is of another version"):
        extend(tmp_path / "old", out=tmp_path / "out", plans=[NEW])
