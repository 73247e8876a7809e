"""``driftgate replay`` and ``driftgate record``, option by option: refusals, verdicts, what is written and shown."""

from __future__ import annotations

import json
import os
import subprocess
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from cli_cases import PROGRAM, call_program, enter_empty_folder
from dump_cases import draw_dump, draw_layer, measure, parse
from rich.console import Console

from driftgate.accuracy.dump import Dump, load_dump, save_dump
from driftgate.accuracy.plans import Role
from driftgate.accuracy.replay_dump import replay_dump
from driftgate.accuracy.replay_records import Errors, ReplayDocument
from driftgate.kernels import twin
from driftgate.kernels.pool import StatePool
from driftgate.replay_command import draw_replay, format_notes, format_table


@pytest.fixture
def call(capfd, monkeypatch, tmp_path):
    """``call(*arguments)`` runs the command line in this process, in an empty folder: exit code, output, errors."""
    enter_empty_folder(monkeypatch, tmp_path)
    return lambda *arguments: call_program(capfd, monkeypatch, *arguments)


@pytest.fixture(scope="module")
def dump_file(tmp_path_factory) -> Path:
    """Random Gated DeltaNet, 2 sequences of 16 steps."""
    path = tmp_path_factory.mktemp("dump") / "a.safetensors"
    save_dump(path, draw_dump("gdn"))
    return path


def test_refusals_are_one_line_with_their_exit_codes(call, dump_file, tmp_path):
    plan = ("--plan", "nvfp4/fp32@4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    cases = [
        (("replay", dump_file), 2, "at least one --plan"),
        (("replay", dump_file, "--plan", "nvfp5@4"), 2, "nvfp5"),
        (("replay", dump_file, "--plan", "baseline"), 2, "always runs"),
        (("replay", dump_file, *plan, "--control", "nvfp4/fp32@4+exact"), 2, "listed twice"),
        (("replay", dump_file, *plan, "--backend", "trition"), 2, "did you mean triton"),
        (("replay", dump_file, *plan, "--backend", "triton", "--device", "cpu"), 2, "needs a GPU"),
        (("replay", dump_file, *plan, "--device", "warp"), 2, "unknown device"),
        (("replay", dump_file, *plan, "--seed", -1), 2, "seed"),
        (("replay", dump_file, *plan, "--steps", 7), 2, "--steps 7: plan nvfp4/fp32@4 needs 8 for 2 flushes"),
        (("replay", dump_file, *plan, "--steps", 0), 5, "give 1 or more"),
        (("replay", dump_file, *plan, "--steps", 17), 4, "--steps 17: the dump has 16"),
        (("replay", dump_file, "--plan", "nvfp4/fp32@16"), 4, "needs 32 steps for 2 flushes, there are 16"),
        (("replay", dump_file, "--plan", "nvfp4/fp32@300"), 2, "L must be 1 to 256"),
        (("replay", tmp_path / "none", *plan), 4, "no such file"),
        (("replay", __file__, *plan), 4, "not a readable"),
        (("replay", dump_file, *plan, "--out", tmp_path / "full"), 4, "choose another --out"),
        (("record", "tiny-gnd", "a.safetensors"), 2, "did you mean tiny-gdn"),
        (("record", "tiny-gdn", "a.safetensors", "--steps", 0), 5, "give 1 or more"),
        (("record", "tiny-gdn", "a.safetensors", "--sequences", 0), 2, "sequences"),
        (("record", "tiny-gdn", "a.safetensors", "--dtype", "fp8"), 2, "fp8"),
        (("record", "tiny-gdn", dump_file), 4, "exists"),
        (("record", "tiny-gdn", "none/a.safetensors"), 4, "its folder does not exist"),
    ]
    for arguments, expected, message in cases:
        code, out, err = call(*arguments)
        assert (code, out) == (expected, ""), (arguments, err)
        assert err.startswith("driftgate: ")
        assert err.count("\n") == 1
        assert message in err


# --plan, --control


def test_a_fold_that_is_off_by_little_fails(call, dump_file, monkeypatch):
    real = twin.fold_entries
    monkeypatch.setattr(twin, "fold_entries", lambda *arguments: real(*arguments) * (1 + 2.0**-22))
    code, out, _ = call("replay", dump_file, "--plan", "nvfp4/fp32@4", "--json")
    document = json.loads(out)
    assert (code, document["verdict"], document["plans"]["nvfp4/fp32@4"]["status"]) == (1, "fail", "bits")
    (broken,) = [r for r in document["bitwise"] if not r["equal"]]
    assert (broken["invariant"], broken["case"]["layer"], broken["first_different"]["what"]) == ("I2", 0, "checkpoint")
    code, out, _ = call("replay", dump_file, "--plan", "nvfp4/fp32@4")
    assert (code, "I2 nvfp4/fp32@4 layer 0:" in out, "verdict: fail" in out) == (1, True, True)


def test_a_copy_that_nobody_reads_is_invalid(call, dump_file, monkeypatch):
    code, out, _ = call("replay", dump_file, "--plan", "nvfp4/fp32@1")
    assert code == 3
    assert "nvfp4/fp32@1: invalid, its nvfp4 copy was never read" in out
    monkeypatch.setattr(StatePool, "read_states", property(lambda pool: pool.checkpoint))
    plan = measure(load_dump(dump_file), "nvfp4/fp32@4+exact_readout").document.plans["nvfp4/fp32@4+exact_readout"]
    assert (plan.status, plan.counters.low_precision_reads) == ("invalid", 24)
    assert "equal the baseline's" in plan.reason


def test_a_control_that_does_not_drift_is_no_control(call, dump_file):
    code, out, _ = call("replay", dump_file, "--plan", "nvfp4/fp32@4", "--control", "fp32@4")
    assert code == 3
    assert "fp32@4: no_sensitivity, control: mean output error" in out
    code, _, _ = call("replay", dump_file, "--plan", "nvfp4/fp32@4", "--control", "nvfp4@4")
    assert code == 0


# --json, --out, --steps


def test_json_is_one_document_and_the_same_each_time(call, dump_file, tmp_path):
    arguments = ("replay", dump_file, "--plan", "nvfp4/fp32@4+cached", "--control", "nvfp4@4")
    code, out, err = call(*arguments, "--json", "--out", tmp_path / "a")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert list(document) == [
        "schema_version", "verdict", "dump", "backend", "device", "seed", "baseline", "plans", "bitwise",
    ]  # fmt: skip
    assert document["schema_version"] == 1
    assert document["dump"] == {
        "file": str(dump_file), "schema_version": 1, "sha256": load_dump(dump_file).digest, "model": "random",
        "recorder": "tests", "activation_dtype": "float32", "layers": [0], "sequences": 2, "steps": 16,
        "steps_recorded": 16, "start": 0,
    }  # fmt: skip
    assert {name: (p["role"], p["status"]) for name, p in document["plans"].items()} == {
        "nvfp4/fp32@4+cached": ("candidate", "measured"), "nvfp4@4": ("control", "measured"),
    }  # fmt: skip
    layer = document["plans"]["nvfp4/fp32@4+cached"]["layers"][0]
    assert set(layer) == {*Errors.model_fields, "layer", "recurrence", "drift", "heads"}
    assert [set(head) for head in layer["heads"]] == [{*Errors.model_fields, "head"}] * 2
    assert ReplayDocument.model_validate_json(out).model_dump(mode="json") == document
    assert (tmp_path / "a" / "replay.json").read_text() == out
    again = call(*arguments, "--json", "--out", tmp_path / "b")
    assert again == (code, out, err)
    for name in ("replay.json", "steps.parquet", "output_error.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["output_error.png", "replay.json", "steps.parquet"]


def test_the_steps_frame_holds_every_step(call, dump_file, tmp_path):
    assert call("replay", dump_file, "--plan", "nvfp4/fp32@4", "-q", "--out", tmp_path / "o", "--steps", 8)[:2] == (
        0,
        "",
    )
    frame = pd.read_parquet(tmp_path / "o" / "steps.parquet")
    assert list(frame.columns) == ["plan", "layer", "head", "sequence", "position", "window_offset", "output_error"]
    assert len(frame) == 2 * 2 * 8
    assert (frame[frame["window_offset"] == 3]["output_error"] == 0).all()
    assert (frame[frame["window_offset"] != 3]["output_error"] > 0).all()


# what is shown without --json


def test_the_table_fits_80_columns():
    layers = tuple(draw_layer("gdn", layer=n, n_steps=64, seed=n) for n in (10, 11))
    plans = parse("nvfp4/fp32@4+cached+exact_readout+buf=bf16+track=9", "nvfp4@4", "fp32@4")
    roles = {"nvfp4@4": Role.CONTROL}
    document = replay_dump(Dump(layers=layers, model="", recorder=""), plans, roles=roles).document
    text = StringIO()
    Console(file=text, width=80).print(format_table(document))
    lines = text.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert [word in text.getvalue() for word in ("by law", "mean of 2 layers", "the worst", "nvfp4@4 (control)")] == [
        True
    ] * 4
    cells = [line.split() for line in lines if "mean of" in line]
    assert [len(c) for c in cells] == [11, 11, 11]  # mean of 2 layers, five errors, slope and law
    assert cells[2][5] == "0"  # checkpoint error of fp32@4
    assert cells[1][6:9] == ["-"] * 3
    notes = "\n".join(format_notes(document))
    assert "backend: torch on cpu" in notes
    assert "2 sequences of 64 steps" in notes


def test_the_figure_has_a_curve_for_each_plan_and_the_floor():
    measured = measure(draw_dump("gdn", n_steps=16), "nvfp4/fp32@4", "fp32@1")
    figure = draw_replay(measured)
    (axes,) = figure.axes
    split, exact, floor = axes.get_lines()
    assert len(split.get_xdata()) == 12  # flush steps are exactly 0
    assert len(exact.get_xdata()) == 0
    assert floor.get_ydata()[0] == measured.document.baseline.output_error
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        "nvfp4/fp32@4, exactly 0 at 4 of 16 steps", "fp32@1, exactly 0 at 16 of 16 steps", "baseline against FP64",
    ]  # fmt: skip


# --backend


@pytest.mark.timeout(120)
def test_the_interpreter_is_started_where_it_is_asked_for(dump_file, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    small = tmp_path / "a.safetensors"
    save_dump(small, draw_dump("gdn", heads=(1, 1, 16, 16), n_rows=1, n_steps=4))
    command = [PROGRAM, "replay", small, "--plan", "nvfp4/fp32@2", "--backend", "triton-interpret", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["backend"] == "triton-interpret"


# driftgate record


@pytest.mark.timeout(120)
def test_a_recorded_model_is_replayed(call):
    """tiny-gdn, 64 steps: the law on a trained model's inputs, and the same file again."""
    record = ("record", "tiny-gdn", "a.safetensors", "--steps", 64, "--sequences", 2, "--seed", 3)
    code, out, err = call(*record)
    assert (code, err) == (0, "")
    assert out.startswith("a.safetensors: 3 layers, 2 sequences of 64 steps")
    assert call("record", "tiny-gdn", "b.safetensors", *record[3:], "-q") == (0, "", "")
    assert Path("a.safetensors").read_bytes() == Path("b.safetensors").read_bytes()
    code, out, _ = call(
        "replay", "a.safetensors", "--plan", "nvfp4/fp32@16+cached", "--plan", "nvfp4/fp32@16", "--json"
    )
    document = json.loads(out)
    assert (code, document["dump"]["layers"], document["dump"]["start"]) == (0, [1, 2, 3], 1)
    cached, exact = (document["plans"][name] for name in ("nvfp4/fp32@16+cached", "nvfp4/fp32@16"))
    for layer in cached["layers"]:
        assert layer["leak_unexplained_max"] < 1e-5 < 1e-3 < layer["leak"]
    assert exact["mean"]["checkpoint_error_max"] == exact["mean"]["leak_max"] == 0
    assert 0.01 < exact["mean"]["output_error"] < 0.5
