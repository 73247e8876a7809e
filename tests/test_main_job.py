"""The main job on the embedded checkpoint: every file of the contract, and the same numbers for the same seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml

from driftgate import cli, load_run
from driftgate.accuracy.records import ITEM_COLUMNS, STEP_COLUMNS
from driftgate.errors import InputError
from driftgate.main_job import prepare

PROGRAM = Path(sys.executable).parent / "driftgate"
PLANS = {"fp32@2": "candidate", "fp32@1": "candidate", "fp32@2+exact_readout": "candidate", "nvfp4@2": "control"}
STEPS, SEQUENCES, TASKS = 63, 2, ("recall", "tracking")
FILES = {"manifest.json", "results.json", "steps.parquet", "items.parquet", "report.html", "report.md", "junit.xml"}
KEYS = {
    "": "schema_version verdict baseline model backend plans bitwise noise_floor verdicts",
    "backend": "drift tasks cross_check",
    "backend.cross_check": "steps max_abs_difference",
    "noise_floor": "kl_mean kl_max",
    "plans.*": "role kl same_top_p delta_p ppl drift state counters bytes free_running tasks",
    "plans.*.kl": "mean ci_low ci_high geo_mean geo_ci_low geo_ci_high max p99_9 p99 p95 p90 median p10 p5 p1 p0_1 min "
    "n_steps n_effective n_nonfinite first_nonfinite_step n_negative",
    "plans.*.same_top_p": "value ci_low ci_high",
    "plans.*.delta_p": "mean rms max min",
    "plans.*.ppl": "plan baseline ratio ratio_ci_low ratio_ci_high",
    "plans.*.drift": "slope slope_ci_low slope_ci_high excess_slope law by_window_offset by_position",
    "plans.*.state": "layers",
    "plans.*.state.layers.*": "layer read_error checkpoint_error trajectory_error output_error",
    "plans.*.counters": "low_precision_reads flushes requantizations",
    "plans.*.bytes": "checkpoint read_copy buffer traffic_per_step traffic_ratio state_ratio",
    "plans.*.tasks": "recall tracking",
    "plans.*.tasks.*": "n repeats accuracy baseline_accuracy delta ci_low ci_high lost gained p_value cap_hits "
    "unparsed verdict",
    "bitwise.*": "invariant recurrence case equal n_different max_ulp first_different",
    "verdicts.*": "plan check value limit verdict reason",
}
"""Keys of results.json that users may rely on, by place; more are allowed."""


def suite_file(folder: Path, **changes: object) -> str:
    fields = {
        "title": "Small", "model": "tiny-gdn", "plans": [{"plan": p, "role": r} for p, r in PLANS.items()],
        "tasks": list(TASKS), "sequences": SEQUENCES, "steps": STEPS, "batch": SEQUENCES, "seed": 3,
    }  # fmt: skip
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(fields | changes))
    return str(path)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[int, str, str, Path]:
    """``driftgate run --json`` in this process: exit code, output, errors, folder."""
    folder = tmp_path_factory.mktemp("main-job")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        streams = [(folder / name).open("w") for name in ("stdout", "stderr")]
        patch.setattr(sys, "argv", ["driftgate", "run", suite_file(folder), "--out", str(folder / "run"), "--json"])
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        try:
            cli.main()
        finally:
            for stream in streams:
                stream.close()
    out, err = ((folder / name).read_text() for name in ("stdout", "stderr"))
    return caught.value.code, out, err, folder / "run"


@pytest.fixture(scope="module")
def results(done) -> dict:
    return json.loads((done[3] / "results.json").read_text())


def test_every_file_of_the_contract_is_written_and_no_other(done):
    folder = done[3]
    assert {p.name for p in folder.iterdir()} == FILES | {"figures"}
    assert len(list((folder / "figures").glob("*.png"))) >= 3
    assert all(p.stat().st_size > 100 for p in folder.rglob("*") if p.is_file())


def test_json_on_standard_output_is_results_json_and_nothing_else(done, results):
    code, out, err, _ = done
    assert json.loads(out) == results
    assert err == ""
    assert code == {"pass": 0, "fail": 1, "inconclusive": 3}[results["verdict"]]


def pick(tree: object, path: list[str]) -> list[object]:
    """Every node at a dotted path; ``*`` is each entry."""
    if not path:
        return [tree]
    entries = tree.values() if isinstance(tree, dict) else tree
    below = list(entries) if path[0] == "*" else [tree[path[0]]]
    return [node for entry in below for node in pick(entry, path[1:])]


@pytest.mark.parametrize("place", KEYS)
def test_results_json_has_the_keys_of_the_contract(results, place):
    nodes = pick(results, place.split(".") if place else [])
    assert nodes
    for node in nodes:
        assert set(KEYS[place].split()) <= set(node)


def test_results_json_holds_no_nan(done):
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads((done[3] / "results.json").read_text(), parse_constant=refuse)


def test_exact_plans_have_a_kl_of_exactly_0(results):
    for name in ("fp32@1", "fp32@2+exact_readout"):
        kl = results["plans"][name]["kl"]
        assert (kl["max"], kl["mean"], kl["n_nonfinite"]) == (0.0, 0.0, 0)
    promised = {r["case"].get("plan"): r for r in results["bitwise"] if "plan" in r["case"] and r["case"].get("where")}
    assert {name: r["invariant"] for name, r in promised.items()} == {"fp32@1": "I1", "fp32@2+exact_readout": "I2"}


def test_every_bit_exact_case_is_equal_in_the_run_and_in_the_interpreted_kernels(results):
    assert all(r["equal"] for r in results["bitwise"])
    again = [r["case"]["where"] for r in results["bitwise"] if r["invariant"] == "A/A"]
    assert len(again) == 2 and "cross-check" in again[1]
    assert {r["case"].get("backend") for r in results["bitwise"]} >= {"triton-interpret"}


def test_the_control_drifts_far_above_the_noise_floor(results):
    assert results["plans"]["nvfp4@2"]["role"] == "control"
    assert results["plans"]["nvfp4@2"]["kl"]["mean"] > 1000 * results["noise_floor"]["kl_mean"] > 0
    assert "nvfp4@2" not in {v["plan"] for v in results["verdicts"]}


def test_the_cross_check_ran_two_cycles_and_agrees(results):
    """Logits are of the order of 10; four steps of FP32 rounding stay below 1e-3."""
    check = results["backend"]["cross_check"]
    assert check["steps"] == 4
    assert set(check["by_plan"]) == {"baseline", *PLANS}
    assert 0 < check["max_abs_difference"] < 1e-3
    assert (results["backend"]["drift"], results["backend"]["tasks"]) == ("torch", "torch")


def test_counters_are_those_of_the_formulas(results):
    """2 sequences, 63 steps and 3 recurrent layers of the embedded model: a flush at every second step."""
    layers = len(results["plans"]["fp32@2"]["state"]["layers"])
    counters = {name: plan["counters"] for name, plan in results["plans"].items()}
    assert counters["fp32@1"]["flushes"] == SEQUENCES * STEPS * layers
    assert counters["fp32@2"] == {
        "low_precision_reads": 0, "flushes": SEQUENCES * (STEPS // 2) * layers, "requantizations": 0,
        "nonfinite_states": 0,
    }  # fmt: skip
    assert counters["nvfp4@2"]["low_precision_reads"] == SEQUENCES * STEPS * layers
    assert counters["nvfp4@2"]["requantizations"] == SEQUENCES * (STEPS // 2) * layers


def test_frames_hold_every_plan_sequence_and_question(done, results):
    steps, items = (pd.read_parquet(done[3] / f"{name}.parquet") for name in ("steps", "items"))
    assert tuple(steps.columns) == STEP_COLUMNS
    assert set(ITEM_COLUMNS) <= set(items.columns)
    assert set(steps["plan"]) == set(PLANS)
    assert set(items["plan"]) == {"baseline", *PLANS}
    per_plan = steps.groupby("plan", observed=True).size().unique()
    assert list(per_plan) == [results["plans"]["fp32@2"]["kl"]["n_steps"]]
    assert per_plan[0] % SEQUENCES == 0 and steps["position"].min() == 1
    for task in TASKS:
        n = results["plans"]["fp32@2"]["tasks"][task]["n"]
        assert (items[items["task"] == task].groupby("plan").size() == n).all()


def test_the_manifest_says_what_is_needed_to_repeat_the_run(done):
    manifest = json.loads((done[3] / "manifest.json").read_text())
    assert manifest["seeds"] == {"streams": 3}
    assert manifest["plans"] == {name: {"role": role, "plan": name} for name, role in PLANS.items()}
    assert {"model/model.safetensors", "model/tokenizer.json", "streams"} <= set(manifest["hashes"])
    assert {"torch", "triton", "transformers", "driftgate", "python"} <= set(manifest["versions"])
    assert manifest["command"][1] == "run" and manifest["policy"]["name"] == "default"
    assert {"lock_step_s", "total_s", "cross_check_s"} <= set(manifest["timing"])


def test_load_run_reads_it_back(done, results):
    run = load_run(done[3])
    assert run.results.model_dump(mode="json") == results
    assert len(run.steps) and len(run.items)


def test_the_same_seed_gives_the_same_results(done, results, tmp_path):
    """To the last bit: times are in the manifest alone. The interpreted kernels are left to the long test."""
    experiment = replace(prepare(suite_file(tmp_path), out=tmp_path / "run").experiment, cross_check=False)
    seen: list[int] = []
    again = experiment.run(seen.append)
    found = again.results.model_dump(mode="json")
    assert set(found) == set(results)
    of_kernels = {"backend", "bitwise", "tolerance", "verdicts"}
    assert {k: found[k] for k in found.keys() - of_kernels} == {k: results[k] for k in results.keys() - of_kernels}
    of_plans = [[v for v in r["verdicts"] if v["plan"] != "baseline"] for r in (found, results)]
    assert of_plans[0] == of_plans[1] != []  # the baseline's are about the cross-check and count bit-exact cases
    pd.testing.assert_frame_equal(
        again.steps.astype({"plan": str}), load_run(done[3]).steps.astype({"plan": str}), check_exact=True
    )
    assert sum(seen) == experiment.n_steps == STEPS


def test_a_finished_run_is_not_written_over(done, tmp_path):
    before = (done[3] / "results.json").read_bytes()
    with pytest.raises(InputError, match="holds another run"):
        prepare(suite_file(tmp_path), out=done[3])
    assert (done[3] / "results.json").read_bytes() == before


def tree_rss(pid: int) -> int:
    """Resident bytes of a process and of all below it, from /proc."""
    total, waiting = 0, [pid]
    while waiting:
        one = Path(f"/proc/{waiting.pop()}")
        try:
            total += int((one / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for thread in (one / "task").iterdir():
                waiting += [int(child) for child in (thread / "children").read_text().split()]
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
    return total


def run_quick(folder: Path) -> tuple[int, float, int]:
    """Exit code, seconds and greatest resident bytes of ``driftgate run --out FOLDER``."""
    started, peak = time.monotonic(), 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen([PROGRAM, "run", "--out", str(folder), "--quiet"], env=environment) as process:
        while process.poll() is None:
            peak = max(peak, tree_rss(process.pid))
            time.sleep(0.5)
    return process.returncode, time.monotonic() - started, peak


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_quick_suite_passes_in_time_and_memory_and_repeats_itself(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    code, seconds, peak = run_quick(first)
    assert code == 0
    assert seconds < 360
    assert 1e8 < peak < 4e9
    assert run_quick(second)[0] == 0
    assert (first / "results.json").read_bytes() == (second / "results.json").read_bytes()
    plans = json.loads((first / "results.json").read_text())["plans"]
    assert plans["nvfp4@16"]["kl"]["mean"] >= 20 * plans["nvfp4/fp32@16"]["kl"]["mean"] > 0
