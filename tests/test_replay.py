"""Replay of recorded inputs: its numbers and their places, what it refuses, on every backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dump_cases import LEAK_ROUNDING as ROUNDING
from dump_cases import draw_dump, draw_layer, measure, parse

from driftgate.accuracy.dump import Dump, save_dump
from driftgate.accuracy.replay_dump import replay_dump, steps_for_flushes
from driftgate.accuracy.replay_layer import LayerRun
from driftgate.accuracy.replay_track import find_flushes, reference_of
from driftgate.errors import EmptyRunError, InputError, UsageError
from driftgate.kernels.contract import Backend, Fold, Readout, ReplayOptions
from driftgate.kernels.gdn import reference
from driftgate.kernels.pool import StatePool

CASES = Path(__file__).parent / "dump_cases.py"


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


# numbers that are not finite, arguments that do not fit


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


# other backends


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
