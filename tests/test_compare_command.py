"""``driftgate compare``: every figure of two runs, and a refusal where they do not belong together."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import run_cases as cases
from cli_cases import PLAN, call_program, enter_empty_folder, is_one_line

from driftgate.accuracy.policy import decide, load_policy
from driftgate.accuracy.records import RunData, load_run, save_run
from driftgate.reports.comparison import compare_runs, flatten


@pytest.fixture
def call(capfd, monkeypatch, tmp_path):
    """``call(*arguments)`` runs the command line in this process, in an empty folder: exit code, output, errors."""
    enter_empty_folder(monkeypatch, tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return partial(call_program, capfd, monkeypatch)


def make(mean: float, *, seed: int = 0, others: tuple[str, ...] = (), **suite: object) -> RunData:
    plans = {
        name: cases.Measured(kl=cases.lognormal(mean, seed=seed, shape=(16, 64)), checkpoint_error=mean)
        for name in (PLAN, *others)
    }
    run = cases.make_run(plans)
    run.manifest.suite |= {"steps": 64, **suite}
    run.manifest.versions["torch"] = f"2.{seed}"
    decide(run, load_policy())
    return run


def store(folder: Path, run: RunData) -> Path:
    folder.mkdir()
    save_run(folder, run)
    return folder


@pytest.fixture
def two(tmp_path) -> tuple[Path, Path]:
    return store(tmp_path / "a", make(1e-3)), store(tmp_path / "b", make(3e-3, seed=1, others=("fp8/fp32@4",)))


def test_every_figure_of_both_runs_is_told_with_its_difference(call, two):
    code, out, err = call("compare", *two, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    a, b = (load_run(folder) for folder in two)
    left, right = (flatten(run.results.plans[PLAN].model_dump(mode="json")) for run in (a, b))
    assert set(document["plans"][PLAN]) == set(left) | set(right)
    mean = document["plans"][PLAN]["kl.mean"]
    assert mean["difference"] == b.results.plans[PLAN].kl.mean - a.results.plans[PLAN].kl.mean > 0
    assert mean["beyond"] is True
    assert document["plans"][PLAN]["kl.max"]["beyond"] is None, "a maximum has no interval"
    assert document["plans"][PLAN]["state.layers.2.checkpoint_error"]["b"] == 3e-3
    assert (document["only_a"], document["only_b"]) == ([], ["fp8/fp32@4"])
    assert document["manifest"]["versions.torch"] == {"a": "2.0", "b": "2.1"}
    assert not [name for name in document["manifest"] if name.startswith(("created", "timing", "hashes.run"))]


def test_the_text_shows_what_differs_in_eighty_columns(call, two):
    code, out, err = call("compare", *two)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines()[3:])) <= 80
    mean = next(line for line in out.splitlines() if line.startswith("kl.mean"))
    assert mean.split()[3].startswith("+0.00") and mean.split()[-1] == "*"
    assert "only in B: fp8/fp32@4" in out
    assert "lie outside the 95 % interval of A (*)" in out
    assert "kl.n_steps" not in out, "equal figures are counted, not listed"


def test_a_run_equals_itself(call, two):
    code, out, _ = call("compare", two[0], two[0])
    assert code == 0
    assert "the manifests say the same" in out and "no figure of B lies outside" in out
    found = compare_runs(load_run(two[0]), load_run(two[0]))
    assert all(change.equal for changes in found.plans.values() for change in changes)
    assert all(change.beyond in (False, None) for changes in found.plans.values() for change in changes)
    assert call("compare", two[0], two[0], "--quiet") == (0, "", "")


def test_of_many_plans_the_text_holds_a_line_each_in_eighty_columns(call, tmp_path):
    others = tuple(f"{formats}@{length}" for formats in ("fp8/fp32", "nvfp4/fp8", "fp8") for length in (4, 8, 16))
    folders = [store(tmp_path / name, make(mean, seed=i, others=others)) for i, (name, mean) in
               enumerate((("a", 1e-3), ("b", 3e-3)))]  # fmt: skip
    code, out, err = call("compare", *folders)
    assert (code, err) == (0, "")
    lines = out.splitlines()[3:]
    assert max(map(len, lines)) <= 80 and len(lines) < 60
    for name in (PLAN, *others):
        (line,) = [line for line in lines if line.startswith(f"{name} ") and "e-03" in line]
        a, b = (f"{load_run(folder).results.plans[name].kl.mean:.2e}" for folder in folders)
        assert line.split()[1:3] == [a, b]
        assert "kl.mean" in line
    assert "every figure of these plans is in --json" in out
    document = json.loads(call("compare", *folders, "--json")[1])
    assert len(document["plans"]) == 10 and "kl.p99" in document["plans"][PLAN]


UNLIKE = {
    "suite": (lambda: make(1e-3, steps=128), "suite.steps"),
    "seed": (lambda: make(1e-3, seed_of_suite=7), "suite.seed_of_suite"),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_unlike_runs_are_refused_unless_told(call, two, tmp_path, kind):
    make_other, says = UNLIKE[kind]
    other = store(tmp_path / "other", make_other())
    code, out, err = call("compare", two[0], other)
    assert (code, out) == (4, "")
    assert is_one_line(err) and says in err and "--unlike" in err
    code, out, err = call("compare", two[0], other, "--unlike")
    assert (code, err) == (0, "")
    assert f"unlike runs: they differ in {says}" in out


def test_runs_of_two_models_are_refused(call, two, tmp_path):
    run = make(1e-3)
    run.manifest.hashes["model/model.safetensors"] = "another"
    code, _, err = call("compare", two[0], store(tmp_path / "other", run))
    assert code == 4
    assert is_one_line(err) and "model (model.safetensors)" in err


def test_runs_without_a_common_plan_have_nothing_to_compare(call, two, tmp_path):
    other = cases.make_run({"fp8@4": cases.Measured(kl=cases.lognormal(1e-3, shape=(16, 64)))})
    other.manifest.suite |= {"steps": 64}
    code, out, err = call("compare", two[0], store(tmp_path / "other", other))
    assert (code, out) == (4, "")
    assert is_one_line(err) and "no plan in common" in err


def test_a_folder_that_is_no_run_is_exit_code_4(call, two):
    code, out, err = call("compare", two[0], "nothing")
    assert (code, out) == (4, "")
    assert is_one_line(err) and "nothing" in err
