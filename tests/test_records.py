"""Run folders: what is saved is loaded, damage is one line, and no half file is ever left."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from driftgate.accuracy import records as rec
from driftgate.errors import InputError

PLAN = "nvfp4/fp32@4"


def make_plan() -> rec.PlanRecord:
    kl = {name: 1e-3 for name, field in rec.KlRecord.model_fields.items() if "float" in str(field.annotation)}
    return rec.PlanRecord(
        role="candidate",
        kl=rec.KlRecord(**kl, n_steps=8, n_nonfinite=0, first_nonfinite_step=None, n_negative=0),
        same_top_p=rec.ProportionRecord(value=0.9, ci_low=0.8, ci_high=1.0),
        delta_p=rec.DeltaP(mean=0.0, rms=0.1, max=0.2, min=-0.2),
        ppl=rec.PerplexityRecord(plan=2.0, baseline=2.0, ratio=1.0, ratio_ci_low=0.9, ratio_ci_high=1.1),
        drift=rec.DriftRecord(
            slope=0.1,
            slope_ci_low=0.0,
            slope_ci_high=0.2,
            excess_slope=None,
            law="flat",
            by_window_offset=[rec.OffsetPoint(offset=0, mean=1e-3, n=2)],
            by_position=[rec.PositionPoint(low=1, high=8, mean=1e-3, n=8)],
        ),
        state=rec.StateRecord(layers=[]),
        counters=rec.CounterRecord(low_precision_reads=6, flushes=2, requantizations=2),
        bytes=rec.BytesRecord(
            checkpoint=64, read_copy=9, buffer=10, traffic_per_step=80.0, traffic_ratio=0.5, state_ratio=0.4
        ),
    )


def make_run() -> rec.RunData:
    results = rec.Results(
        verdict="pass",
        model={"name": "tiny"},
        backend=rec.Backends(
            drift="torch",
            tasks="torch",
            cross_check=rec.CrossCheck(steps=8, max_abs_difference=1e-6, by_plan={PLAN: 1e-6}),
        ),
        plans={PLAN: make_plan()},
        bitwise=[
            rec.BitwiseRecord(
                invariant="I1",
                recurrence="gdn",
                case={"L": 1},
                equal=True,
                n_different=0,
                max_ulp=0,
                first_different=None,
            )
        ],
        noise_floor=rec.NoiseFloor(kl_mean=1e-12, kl_max=1e-11),
        verdicts=[],
    )
    manifest = rec.Manifest(
        command=["driftgate", "run"],
        suite={"name": "quick"},
        policy={},
        versions={"python": "3"},
        device={"type": "cpu"},
        backend={"drift": "torch"},
        hashes={},
        seeds={"streams": 0},
        plans={PLAN: {"role": "candidate"}},
        streams={},
        timing={"total_s": 1.5},
        created="2026-01-01T00:00:00+00:00",
    )
    steps = pd.DataFrame(
        {
            "plan": pd.Categorical([PLAN] * 4),
            "sequence": np.zeros(4, dtype=np.int32),
            "position": np.arange(1, 5, dtype=np.int32),
            "window_offset": np.arange(4, dtype=np.int16),
            "kl": [0.0, 1e-9, np.inf, np.nan],
            "same_top": [True, True, False, False],
            "delta_p": [0.0, 0.1, np.nan, np.nan],
            "nll_plan": [1.0, 2.0, 3.0, np.nan],
            "nll_baseline": [1.0, 2.0, 3.0, np.nan],
        }
    )
    items = pd.DataFrame(
        [("baseline", "recall", "0-0", 0, "A", "A", True, 1, False, "ok", 0)],
        columns=[*rec.ITEM_COLUMNS, "stream"],
    )
    return rec.RunData(results=results, manifest=manifest, steps=steps, items=items)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A complete run folder."""
    rec.save_run(tmp_path, make_run())
    return tmp_path


def refusal(folder: Path) -> str:
    """The one line with which a run folder is refused."""
    with pytest.raises(InputError) as caught:
        rec.load_run(folder)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert message.splitlines() == [message]
    return message


def test_a_run_is_loaded_as_it_was_saved(stored):
    run, loaded = make_run(), rec.load_run(stored)
    assert loaded.results == run.results
    assert loaded.manifest.model_copy(update={"hashes": {}}) == run.manifest.model_copy(update={"hashes": {}})
    pd.testing.assert_frame_equal(loaded.steps, run.steps)
    pd.testing.assert_frame_equal(loaded.items, run.items)


@pytest.mark.parametrize("name", ["steps.parquet", "items.parquet", "results.json"])
def test_a_file_of_another_run_is_refused(stored, tmp_path, name):
    folder = shutil.copytree(stored, tmp_path / "run")
    if name == "results.json":
        document = json.loads((folder / name).read_text())
        document["noise_floor"]["kl_mean"] = 0.5
        (folder / name).write_text(json.dumps(document))
    else:
        frame = pd.read_parquet(folder / name)
        frame.iloc[:-1].to_parquet(folder / name, index=False)
    with pytest.raises(InputError, match=f"{name} is not the file that this run wrote"):
        rec.load_run(folder)


def test_saving_twice_gives_the_same_bytes(stored, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    rec.save_run(other, rec.load_run(stored))
    assert {p.name: p.read_bytes() for p in other.iterdir()} == {p.name: p.read_bytes() for p in stored.iterdir()}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null(tmp_path, value):
    run = make_run()
    results = run.results.model_copy(
        update={
            "noise_floor": rec.NoiseFloor(kl_mean=value, kl_max=1.0),
            "backend": rec.Backends(
                drift="torch",
                tasks="torch",
                cross_check=rec.CrossCheck(steps=1, max_abs_difference=value, by_plan={PLAN: value, "other": 0.5}),
            ),
            "model": {"nested": [1.0, {"x": value}]},
            "verdicts": [
                rec.VerdictRecord(plan=PLAN, check="kl_mean", value=value, limit=0.1, verdict="invalid", reason="")
            ],
        }
    )
    results = rec.Results(**{name: getattr(results, name) for name in rec.Results.model_fields})
    assert results.noise_floor.kl_mean is None
    rec.save_run(tmp_path, replace(run, results=results))
    document = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert document["noise_floor"] == {"kl_mean": None, "kl_max": 1.0}
    assert document["backend"]["cross_check"]["max_abs_difference"] is None
    assert document["backend"]["cross_check"]["by_plan"] == {PLAN: None, "other": 0.5}
    assert document["model"] == {"nested": [1.0, {"x": None}]}
    assert document["verdicts"][0]["value"] is None
    assert rec.load_run(tmp_path).results == results


@pytest.mark.parametrize("name", ["results.json", "manifest.json"])
def test_an_unknown_key_is_refused_by_name(stored, name):
    document = json.loads((stored / name).read_text())
    (stored / name).write_text(json.dumps(document | {"surplus": 1}))
    message = refusal(stored)
    assert str(stored / name) in message
    assert "surplus" in message


def test_a_key_deep_inside_is_named_with_its_path(stored):
    path = stored / "results.json"
    document = json.loads(path.read_text())
    del document["plans"][PLAN]["kl"]["mean"]
    path.write_text(json.dumps(document))
    assert f"{path}: plans.{PLAN}.kl.mean: Field required" in refusal(stored)


def test_another_schema_version_is_refused(stored):
    path = stored / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))
    assert "schema_version" in refusal(stored)


@pytest.mark.parametrize("name", ["results.json", "manifest.json", "steps.parquet", "items.parquet"])
@pytest.mark.parametrize("left", [0, 0.5, 0.95])
def test_a_cut_file_is_named(stored, name, left):
    path = stored / name
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * left)])
    assert str(path) in refusal(stored)


@pytest.mark.parametrize("name", ["results.json", "manifest.json", "steps.parquet", "items.parquet"])
def test_a_missing_file_is_named(stored, name):
    (stored / name).unlink()
    assert f"{stored / name} is missing" in refusal(stored)


def test_text_that_is_no_utf8_is_named(stored):
    path = stored / "results.json"
    path.write_bytes(b'{"verdict": "\xff\xfe"}')
    assert f"{path} is damaged" in refusal(stored)


@pytest.mark.parametrize("name", ["steps.parquet", "items.parquet"])
def test_a_frame_of_another_schema_is_refused(stored, name):
    pd.DataFrame({"plan": ["x"]}).to_parquet(stored / name)
    assert f"{stored / name} has no column" in refusal(stored)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    assert f"run folder {tmp_path / 'nowhere'} does not exist" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("stopped")])
def test_a_write_that_fails_leaves_the_old_files(stored, monkeypatch, error):
    before = {p.name: p.read_bytes() for p in stored.iterdir()}

    def half(_frame: pd.DataFrame, path: str, **_: object) -> None:
        Path(path).write_bytes(b"PAR1 half")
        raise error

    monkeypatch.setattr(pd.DataFrame, "to_parquet", half)
    expected = InputError if isinstance(error, OSError) else RuntimeError
    with pytest.raises(expected):
        rec.save_run(stored, make_run())
    assert {p.name: p.read_bytes() for p in stored.iterdir()} == before


def test_results_are_written_last(tmp_path, monkeypatch):
    def fail(_path: Path, _text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rec, "write_text", fail)
    with pytest.raises(KeyboardInterrupt):
        rec.save_run(tmp_path, make_run())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["items.parquet", "steps.parquet"]


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    was_root = os.geteuid() == 0
    if was_root:  # root writes everywhere
        os.seteuid(65534)
    try:
        with pytest.raises(InputError, match=r"^cannot write .*locked.steps\.parquet: Permission denied; choose"):
            rec.save_run(folder, make_run())
    finally:
        if was_root:
            os.seteuid(0)
        folder.chmod(0o755)
    assert list(folder.iterdir()) == []


def test_a_file_can_be_read_by_others(stored):
    assert {oct(p.stat().st_mode & 0o777) for p in stored.iterdir()} == {"0o644"}
