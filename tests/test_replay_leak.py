"""Replay of recorded inputs: the law of the leak of a cached fold, and promises of bits where a fold is exact."""

from __future__ import annotations

import pytest
import torch
from dump_cases import LEAK_ROUNDING as ROUNDING
from dump_cases import draw_dump, draw_layer, measure

from driftgate.accuracy.replay_layer import LayerRun
from driftgate.kernels import twin
from driftgate.kernels.contract import Fold, ReplayOptions
from driftgate.kernels.gdn import reference
from driftgate.kernels.pool import StatePool


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


# exact folds


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


def test_a_copy_of_another_state_fails(monkeypatch):
    real = twin.write_back

    def write_back(pool, layer, slots, state, *, ahead):
        real(pool, layer, slots, state, ahead=ahead)
        if pool.copy is not None:
            pool.copy.write(layer, slots, state.float(), nonfinite="saturate")  # not what the checkpoint reads back as

    monkeypatch.setattr(twin, "write_back", write_back)
    (broken,) = [r for r in measure(draw_dump("gdn"), "nvfp4/fp8@4").document.bitwise if not r.equal]
    assert (broken.invariant, broken.first_different["what"]) == ("I3", "copy")
