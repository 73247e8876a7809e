"""``driftgate replay`` and ``driftgate record``: the law of the leak, promises of bits, refusals, what is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from dump_cases import draw_dump, draw_layer, parse
from rich.console import Console

from driftgate import cli
from driftgate.accuracy.dump import Dump, load_dump, save_dump
from driftgate.accuracy.plans import Role
from driftgate.accuracy.replay_dump import replay_dump, steps_for_flushes
from driftgate.accuracy.replay_layer import LayerRun
from driftgate.accuracy.replay_records import Errors, ReplayDocument
from driftgate.accuracy.replay_track import find_flushes, reference_of
from driftgate.errors import EmptyRunError, InputError, UsageError
from driftgate.kernels import twin
from driftgate.kernels.contract import Fold, Readout, ReplayOptions
from driftgate.kernels.gdn import reference
from driftgate.kernels.pool import StatePool
from driftgate.replay_command import draw_replay, format_notes, format_table

CASES = Path(__file__).parent / "dump_cases.py"
PROGRAM = Path(sys.executable).parent / "driftgate"
ROUNDING = 1e-4
"""A state of 16 x 16 after n <= 8 steps: 2·n·(d_k + 8)·2^-24 of the greatest row's norm an element, 16 of it in all."""


@pytest.fixture
def call(capfd, monkeypatch, tmp_path):
    """``call(*arguments)`` runs the command line in this process, in an empty folder: exit code, output, errors."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["driftgate", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capfd.readouterr()
        return caught.value.code, out, err

    return run


@pytest.fixture(scope="module")
def dump_file(tmp_path_factory) -> Path:
    """Random Gated DeltaNet, 2 sequences of 16 steps."""
    path = tmp_path_factory.mktemp("dump") / "a.safetensors"
    save_dump(path, draw_dump("gdn"))
    return path


def measure(dump: Dump, *plans: str, **options: object):
    return replay_dump(dump, parse(*plans), **options)


# the law of the leak


@pytest.mark.parametrize("readout", ["", "+exact_readout"])
@pytest.mark.parametrize("activation", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recurrence", ["gdn", "kda"])
def test_the_law_foretells_the_leak_of_a_cached_fold(recurrence, activation, readout):
    name = f"nvfp4/fp32@4+cached{readout}"
    plan = measure(draw_dump(recurrence, activation=activation), name).document.plans[name]
    assert plan.mean.leak_unexplained_max < ROUNDING < 0.01 < plan.mean.leak
    assert plan.mean.leak == plan.mean.checkpoint_error  # FP32: the exact fold is the baseline
    for head in plan.layers[0].heads:
        assert abs(head.leak_predicted - head.leak) < ROUNDING


def test_the_law_is_the_one_with_matrices():
    """M_h, P_h and T_{h+1} written out, in FP64, against what is stored and against what replay says."""
    layer = draw_layer("gdn", n_steps=12)
    options = ReplayOptions(read="nvfp4", length=4, fold=Fold.CACHED)
    ((found,), _) = ([x] for x in LayerRun(layer, {"p": options}, n_steps=12).measure())
    pools = [StatePool(layer.shape, o, n_slots=2) for o in (options, ReplayOptions())]
    slots = torch.arange(2)
    for pool in pools:
        pool.write(0, slots, layer.initial_state)

    def states() -> list[torch.Tensor]:
        return [x.read(0, slots).double() for x in (pools[0].checkpoint, pools[0].copy, pools[1].checkpoint)]

    eye = torch.eye(16, dtype=torch.float64)
    for cycle in range(3):
        checkpoint, copy, exact = states()
        E, e = copy - checkpoint, checkpoint - exact
        M = P = eye
        for t in range(4 * cycle, 4 * cycle + 4):
            inputs = {name: x[:, t] for name, x in layer.streams.items()}
            k = twin.normalise(inputs["k"].double()).repeat_interleave(2, dim=1)
            beta, alpha = inputs["beta"].double()[..., None, None], inputs["g"].double().exp()[..., None, None]
            T = alpha * (eye - beta * k[..., :, None] * k[..., None, :])
            if t % 4 < 3:
                M, P = M @ T, P @ (alpha * eye)
            reference.replay_step(**inputs, pool=pools[0], layer=0, slots=slots)
            reference.decode_step(**inputs, pool=pools[1], layer=0, slots=slots)
            for pool in pools:
                pool.advance(slots)
        predicted = e @ M @ T + E @ (M - P) @ T
        checkpoint, _, exact = states()
        norm = exact.norm(dim=(-2, -1))
        assert float(((checkpoint - exact - predicted).norm(dim=(-2, -1)) / norm).max()) < ROUNDING
        told = found["p"].leak_predicted[..., cycle]
        assert torch.allclose(told, predicted.norm(dim=(-2, -1)) / norm, rtol=1e-6, atol=0)
        forgets = [cycle == 0 and row == 0 for row in range(2)]  # row 0 meets g = -inf in its first head at step 1
        assert [float(x) == 0 for x in told[:, 0]] == forgets
        assert float(told[:, 1].min()) > 0.005


def test_a_lower_recurrence_leaves_its_own_rounding_unexplained():
    mean = measure(draw_dump("gdn"), "nvfp4/fp8@4+cached").document.plans["nvfp4/fp8@4+cached"].mean
    assert ROUNDING < mean.leak_unexplained < mean.leak
    assert mean.leak_predicted > 0.01


def test_a_corrections_buffer_in_bf16_is_not_foretold():
    mean = measure(draw_dump("gdn"), "nvfp4/fp32@4+cached+buf=bf16").document.plans["nvfp4/fp32@4+cached+buf=bf16"].mean
    assert ROUNDING < mean.leak_unexplained < 2.0**-8


EXACT = ["fp32@4", "nvfp4/fp32@4", "nvfp4/fp32@4+exact_readout", "nvfp4/fp32@5+track=3", "nvfp4/fp8@4", "fp8/bf16@4"]


@pytest.mark.parametrize("recurrence", ["gdn", "kda", "mamba2"])
def test_exact_folds_leak_exactly_nothing(recurrence):
    document = measure(draw_dump(recurrence), *EXACT).document
    for name in EXACT:
        plan = document.plans[name]
        assert (plan.mean.leak_max, plan.mean.leak_predicted_max, plan.mean.leak_unexplained_max) == (0, 0, 0)
        assert plan.mean.checkpoint_error_max == 0 or "/fp32" not in name
        records = [r for r in document.bitwise if r.case["plan"] == name]
        assert {r.invariant for r in records} == (
            {"I2"} if name == "fp32@4" else {"I2", "I3"} if "fp32" in name else {"I3"}
        )
        assert all(r.equal and r.case["compared"] for r in records)
    assert document.verdict == "pass"


def test_mamba2_leaks_nothing_whatever_it_folds():
    names = ["nvfp4/fp32@4+cached", "nvfp4@4+cached", "nvfp4/fp8@4+cached"]
    document = measure(draw_dump("mamba2"), *names).document
    for name in names:
        assert document.plans[name].mean.leak_max == document.plans[name].mean.leak_predicted_max == 0
        assert document.plans[name].mean.output_error > 0.01
    assert {(r.case["plan"], r.invariant) for r in document.bitwise if "checkpoint" in r.case["compared"]} == {
        (names[0], "I2"), (names[1], "I3"), (names[2], "I3"),
    }  # fmt: skip


def test_plans_of_length_one_are_the_step_by_step_kernel():
    document = measure(draw_dump("gdn"), "fp32@1", "nvfp4/fp8@1", "nvfp4@1+cached").document
    assert [(r.invariant, r.equal) for r in document.bitwise if r.invariant == "I1"] == [("I1", True)] * 3
    assert document.plans["fp32@1"].mean.output_error_max == 0
    assert document.plans["nvfp4@1+cached"].mean.output_error > 0.01


# what has to be seen


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


def test_a_copy_of_another_state_fails(monkeypatch):
    real = twin.write_back

    def write_back(pool, layer, slots, state, *, ahead):
        real(pool, layer, slots, state, ahead=ahead)
        if pool.copy is not None:
            pool.copy.write(layer, slots, state.float(), nonfinite="saturate")  # not what the checkpoint reads back as

    monkeypatch.setattr(twin, "write_back", write_back)
    (broken,) = [r for r in measure(draw_dump("gdn"), "nvfp4/fp8@4").document.bitwise if not r.equal]
    assert (broken.invariant, broken.first_different["what"]) == ("I3", "copy")


def test_a_control_that_does_not_drift_is_no_control(call, dump_file):
    code, out, _ = call("replay", dump_file, "--plan", "nvfp4/fp32@4", "--control", "fp32@4")
    assert code == 3
    assert "fp32@4: no_sensitivity, control: mean output error" in out
    code, _, _ = call("replay", dump_file, "--plan", "nvfp4/fp32@4", "--control", "nvfp4@4")
    assert code == 0


def test_outputs_that_are_not_finite_are_counted():
    layer = draw_layer("gdn")
    layer.initial_state[0, 1] = 1e6  # the FP32 baseline copes, FP16 does not
    dump = Dump(layers=(layer,), model="", recorder="")
    document = measure(dump, "fp16@4").document
    plan = document.plans["fp16@4"]
    assert (plan.status, document.verdict) == ("invalid", "inconclusive")
    assert plan.n_nonfinite > 0
    assert plan.mean.output_error is None
    assert plan.layers[0].heads[0].output_error < 0.01
    assert "are not finite" in plan.reason
    with pytest.raises(InputError, match=r"^layers\.0\.initial_state: beyond fp16; leave such plans out"):
        measure(dump, "nvfp4/fp16@4")


def test_an_overflow_alike_is_no_difference_of_bits():
    layer = draw_layer("gdn")
    layer.streams["v"][0, 5] = 1e6
    document = measure(Dump(layers=(layer,), model="", recorder=""), "nvfp4/fp16@4").document
    plan = document.plans["nvfp4/fp16@4"]
    assert (plan.status, plan.counters.nonfinite_states) == ("invalid", 1)
    assert all(record.equal for record in document.bitwise)


def test_inputs_that_the_baseline_itself_does_not_survive_are_refused():
    layer = draw_layer("gdn", layer=6)
    layer.streams["v"][1, 5] = 3e38
    layer.streams["beta"][1, 5] = 1e4
    with pytest.raises(InputError, match=r"^layers\.6, step 5: the FP32 baseline's own output is not finite"):
        measure(Dump(layers=(layer,), model="", recorder=""), "fp32@4")


@pytest.mark.parametrize("recurrence", ["gdn", "kda", "mamba2"])
def test_the_interpreted_kernels_do_the_same(recurrence, interpreted, tmp_path):
    path = tmp_path / "a.safetensors"
    dump = draw_dump(recurrence, heads=(1, 2, 16, 16), n_rows=1, n_steps=4)
    save_dump(path, dump)
    names = ["nvfp4/fp32@2", "nvfp4/fp32@2+cached", "nvfp4/fp8@2"]
    found = interpreted(CASES, "replay_interpreted", path=str(path), plans=names, n_steps=4)
    assert (found["backend"], found["verdict"]) == ("triton-interpret", "pass")
    assert {r["invariant"] for r in found["bitwise"]} == {"I2", "I3"}
    expected = measure(dump, *names).document
    for name in names:
        mean = expected.plans[name].mean
        for field in ("output_error", "leak", "leak_predicted", "read_error"):
            assert found["plans"][name]["mean"][field] == pytest.approx(getattr(mean, field), rel=1e-3, abs=1e-6)
    leak = found["plans"]["nvfp4/fp32@2+cached"]["mean"]
    assert leak["leak_unexplained_max"] < ROUNDING
    assert (leak["leak"] > 0.001) == (recurrence != "mamba2")


@pytest.mark.gpu
@pytest.mark.parametrize("recurrence", ["gdn", "kda", "mamba2"])
def test_the_compiled_kernels_do_the_same(recurrence):
    from driftgate.kernels.contract import Backend

    dump = draw_dump(recurrence, heads=(2, 4, 64, 64), activation=torch.bfloat16, n_steps=64)
    names = ["fp32@8", "nvfp4/fp32@8", "nvfp4/fp32@8+cached", "nvfp4/fp8@8", "nvfp4/fp32@8+exact_readout"]
    document = measure(dump, *names, backend=Backend.TRITON, device="cuda").document
    assert document.verdict == "pass"
    expected = measure(dump, *names).document
    for name in names[1:]:
        mean = document.plans[name].mean
        assert mean.output_error == pytest.approx(expected.plans[name].mean.output_error, rel=0.02)
        assert mean.leak == pytest.approx(expected.plans[name].mean.leak, rel=0.02)
    assert document.plans["nvfp4/fp32@8+cached"].mean.leak_unexplained_max < 4 * ROUNDING


# numbers and their places


def test_errors_are_those_of_kernels_called_by_hand():
    layer = draw_layer("gdn", n_steps=8)
    options = ReplayOptions(read="nvfp4", length=4)
    measured = measure(Dump(layers=(layer,), model="", recorder="", start=3), "nvfp4/fp32@4")
    steps = measured.steps
    pools = [StatePool(layer.shape, o, n_slots=2) for o in (options, ReplayOptions())]
    slots = torch.arange(2)
    for pool in pools:
        pool.write(0, slots, layer.initial_state)
    for t in range(8):
        inputs = {name: x[:, t] for name, x in layer.streams.items()}
        got = reference.replay_step(**inputs, pool=pools[0], layer=0, slots=slots).double()
        expected = reference.decode_step(**inputs, pool=pools[1], layer=0, slots=slots).double()
        for pool in pools:
            pool.advance(slots)
        error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
        rows = steps[steps["position"] == t + 3]
        assert list(rows["window_offset"].unique()) == [t % 4]
        told = rows.pivot(index="sequence", columns="head", values="output_error").to_numpy()
        assert np.array_equal(told, error.numpy())
    plan = measured.document.plans["nvfp4/fp32@4"]
    copy, checkpoint = (x.read(0, slots).double() for x in (pools[0].copy, pools[0].checkpoint))
    last = ((copy - checkpoint).norm(dim=(-2, -1)) / checkpoint.norm(dim=(-2, -1))).max()
    assert plan.mean.read_error_max >= float(last) > 0.05
    assert plan.mean.output_error == pytest.approx(steps["output_error"].mean(), rel=1e-12)
    assert plan.counters.model_dump() == {
        "low_precision_reads": 12, "flushes": 4, "requantizations": 4, "nonfinite_states": 0,
    }  # fmt: skip


def test_layers_of_other_heads_and_recurrences_share_a_dump():
    layers = (
        draw_layer("gdn", layer=2, heads=(1, 2, 16, 16)),
        draw_layer("kda", layer=3, heads=(2, 2, 16, 8)),
        draw_layer("mamba2", layer=7, heads=(1, 4, 8, 16)),
    )
    measured = measure(Dump(layers=layers, model="", recorder=""), "nvfp4/fp32@4", "nvfp4@4")
    plan = measured.document.plans["nvfp4@4"]
    assert [(x.layer, x.recurrence, len(x.heads)) for x in plan.layers] == [
        (2, "gdn", 2),
        (3, "kda", 2),
        (7, "mamba2", 4),
    ]
    errors = [x.output_error for x in plan.layers]
    assert plan.mean.output_error == pytest.approx(np.mean(errors))
    assert plan.mean.checkpoint_error_max == max(x.checkpoint_error_max for x in plan.layers)
    assert plan.worst_layer == plan.layers[int(np.argmax(errors))].layer
    assert len(measured.steps) == 2 * 2 * 16 * (2 + 2 + 4)
    floor = measured.document.baseline
    assert [(x.layer, x.value_heads, x.d_k, x.d_v) for x in floor.layers] == [
        (2, 2, 16, 16),
        (3, 2, 16, 8),
        (7, 4, 8, 16),
    ]
    assert 1e-9 < floor.output_error < 1e-5
    assert 1e-9 < floor.state_error < 1e-5


def test_the_norm_and_scale_of_the_dump_are_used():
    layer = replace(draw_layer("gdn", n_steps=8), qk_l2norm=False, scale=2.0)
    layer.streams["k"].mul_(0.1)  # else the delta rule without a norm diverges
    other = replace(layer, scale=1.0)
    a, b = (measure(Dump(layers=(x,), model="", recorder=""), "nvfp4/fp32@4+cached").document for x in (layer, other))
    assert a.plans["nvfp4/fp32@4+cached"].mean.leak_unexplained_max < ROUNDING
    assert a.baseline.output_error < 1e-5
    assert a.plans["nvfp4/fp32@4+cached"].mean.output_error == b.plans["nvfp4/fp32@4+cached"].mean.output_error


def test_flushes_are_counted():
    assert find_flushes(ReplayOptions(length=3), 7) == [False, False, True, False, False, True, False]
    assert find_flushes(ReplayOptions(length=4, track=3), 6, start=1) == [False, True, False, False, True, False]
    assert find_flushes(ReplayOptions(), 2) == [True, True]
    assert steps_for_flushes(parse("nvfp4/fp32@16")["nvfp4/fp32@16"]) == 32
    assert steps_for_flushes(parse("nvfp4/fp32@16+track=5")["nvfp4/fp32@16+track=5"], start=3) == 7
    for options in (ReplayOptions(length=4, track=3), ReplayOptions(read="nvfp4", length=5)):
        layer = draw_layer("gdn", n_steps=12)
        pool = StatePool(layer.shape, options, n_slots=2)
        pool.start(torch.arange(2), tokens=1)
        seen = []
        for t in range(12):
            seen.append(bool(pool.flush[0]))
            inputs = {name: x[:, t] for name, x in layer.streams.items()}
            reference.replay_step(**inputs, pool=pool, layer=0, slots=torch.arange(2))
            pool.advance(torch.arange(2))
        assert seen == find_flushes(options, 12, start=1)


def test_exact_folds_to_compare_with():
    shared = ReplayOptions(read="fp8", recurrence="fp8", length=4)
    assert reference_of(ReplayOptions(read="nvfp4", length=4, fold=Fold.CACHED)) == ReplayOptions()
    assert (
        reference_of(ReplayOptions(read="nvfp4", recurrence="fp8", length=4, readout=Readout.EXACT_READOUT)) == shared
    )
    assert reference_of(shared) == shared
    assert reference_of(replace(shared, length=1)) == ReplayOptions(read="fp8", recurrence="fp8")


def test_draws_of_stochastic_rounding_follow_seed_layer_and_sequence():
    options = {"p": ReplayOptions(read="fp8", recurrence="fp8", length=4, stochastic=True)}

    def errors(layer: int, seed: int) -> torch.Tensor:
        found, _ = LayerRun(draw_layer("gdn", layer=layer), options, n_steps=16, seed=seed).measure()
        return found["p"].checkpoint_error

    assert torch.equal(errors(0, 5), errors(0, 5))
    assert not torch.equal(errors(0, 5), errors(0, 6))
    assert not torch.equal(errors(0, 5), errors(1, 5))


def test_drift_is_that_of_the_output_error():
    document = measure(draw_dump("gdn", n_steps=64), "nvfp4@2", "nvfp4/fp32@2").document
    shared, split = (document.plans[name] for name in ("nvfp4@2", "nvfp4/fp32@2"))
    assert shared.drift.law in ("flat", "saturating", "growing")
    assert shared.drift.excess_slope is not None
    assert split.drift.excess_slope is None
    assert shared.layers[0].drift.slope == shared.drift.slope  # one layer
    assert [p.offset for p in shared.drift.by_window_offset] == [0, 1]
    assert split.drift.by_window_offset[1].mean == 0  # a flush step has only the checkpoint's error
    assert measure(draw_dump("gdn", n_steps=8), "nvfp4@4").document.plans["nvfp4@4"].drift.law is None


# the command


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


def test_functions_refuse_what_the_command_refuses():
    dump = draw_dump("gdn", n_steps=4)
    with pytest.raises(UsageError, match="no plan"):
        replay_dump(dump, {})
    with pytest.raises(EmptyRunError, match="no step"):
        measure(dump, "fp32@2", n_steps=0)
    with pytest.raises(InputError, match="needs 6 steps for 2 flushes, there are 4"):
        measure(dump, "nvfp4/fp32@3")
    windows = parse("nvfp4/fp32@4")["nvfp4/fp32@4"]
    windows = replace(windows, options=replace(windows.options, window=2))
    with pytest.raises(UsageError, match=r"leave \+spec out"):
        replay_dump(dump, {"w": windows})


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


@pytest.mark.timeout(120)
def test_the_interpreter_is_started_where_it_is_asked_for(dump_file, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    small = tmp_path / "a.safetensors"
    save_dump(small, draw_dump("gdn", heads=(1, 1, 16, 16), n_rows=1, n_steps=4))
    command = [PROGRAM, "replay", small, "--plan", "nvfp4/fp32@2", "--backend", "triton-interpret", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["backend"] == "triton-interpret"
