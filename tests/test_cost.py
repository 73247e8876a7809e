"""Costs by formula: published values, sums counted by hand, and what a pool really holds."""

from __future__ import annotations

import pytest

from driftgate.accuracy.plans import PrecisionPlan
from driftgate.kernels.contract import HeadShape, Recurrence, ReplayOptions
from driftgate.kernels.cost import (
    conv_bytes,
    end_to_end_gain,
    greatest_batch,
    ideal_ratio,
    mean_operations,
    sequence_bytes,
    step_operations,
)
from driftgate.kernels.pool import StatePool
from driftgate.kernels.traffic import EntryBytes, compute_traffic

KIB, MIB = 2**10, 2**20
HEAD = HeadShape(key_heads=1, value_heads=1, d_k=128, d_v=128)
LARGE = HeadShape(key_heads=16, value_heads=32, d_k=128, d_v=128)
MAMBA2_LARGE = HeadShape(key_heads=8, value_heads=128, d_k=128, d_v=64)
ODD = HeadShape(key_heads=2, value_heads=4, d_k=5, d_v=3)


def options(text: str) -> ReplayOptions:
    return PrecisionPlan.parse(text).options


def test_a_head_of_128_by_128_takes_64_kib():
    found = sequence_bytes(Recurrence.GDN, HEAD, options("baseline"), activation_bytes=2)
    assert (found.checkpoint, found.read_copy, found.buffer) == (64 * KIB, 0, 0)


def test_a_mamba2_layer_of_128_heads_of_64_by_128_takes_4_mib():
    found = sequence_bytes(Recurrence.MAMBA2, MAMBA2_LARGE, options("baseline"), activation_bytes=2)
    assert found.total == 4 * MIB


@pytest.mark.parametrize(
    ("length", "passes", "ratio"), [(16, 1, 0.53125), (8, 1, 0.5625), (8, 2, 0.625), (16, 2, 0.5625), (1, 1, 1.0)]
)
def test_ideal_traffic(length, passes, ratio):
    assert ideal_ratio(length, passes=passes) == ratio


def test_ideal_traffic_is_that_of_replay_with_free_buffers():
    free = EntryBytes(adds=0, readout=0, fold=0)
    assert compute_traffic(LARGE, options("fp32@8"), free).ratio == ideal_ratio(8)
    # a copy as wide as the checkpoint, FP16 beside BF16: what a flush writes besides is a second pass
    halves = compute_traffic(LARGE, options("fp16/bf16@8"), free).ratio
    assert halves == pytest.approx(ideal_ratio(8, passes=2) / 2)


@pytest.mark.parametrize(("length", "passes"), [(0, 1), (8, 3)])
def test_no_buffer_has_no_ideal_traffic(length, passes):
    with pytest.raises(ValueError, match="length and passes"):
        ideal_ratio(length, passes=passes)


@pytest.mark.parametrize("recurrence", Recurrence)
@pytest.mark.parametrize(
    "text",
    ["baseline", "fp32@1", "fp32@16", "fp8/fp32@4", "nvfp4/fp8@8+cached", "fp32@5+exact_readout",
     "fp32@8+cached+buf=bf16", "fp32@8+spec=4", "mxfp4/int16@4+state_output"],
)  # fmt: skip
def test_bytes_are_those_that_a_pool_holds(recurrence, text):
    """Of one layer; a pool starts every layer's tensor at a multiple of 16 bytes, slots in it are not padded."""
    import torch

    shape = HeadShape(key_heads=2, value_heads=2, d_k=32, d_v=8)
    pool = StatePool(shape, options(text), recurrence=recurrence, n_slots=1, activation_dtype=torch.bfloat16)
    held = pool.bytes_per_sequence()
    found = sequence_bytes(recurrence, shape, options(text), activation_bytes=2)
    assert {"checkpoint": found.checkpoint, "read_copy": found.read_copy, "buffer": found.buffer} == held
    assert found.total == sum(held.values()) == found.state + found.buffer


def test_a_split_needs_more_memory_than_fp32_alone():
    alone, split = (
        sequence_bytes(Recurrence.GDN, LARGE, options(text), activation_bytes=2)
        for text in ("fp32@16", "nvfp4/fp32@16")
    )
    assert split.state - alone.state == split.read_copy > 0
    assert split.buffer == alone.buffer


def test_convolutions_keep_their_last_inputs():
    assert conv_bytes(LARGE, kernel=4, activation_bytes=2) == 4 * 2 * (2 * 16 * 128 + 32 * 128)


STATE, HEADS = 4 * 3 * 5, 4


@pytest.mark.parametrize(
    ("recurrence", "text", "offset", "count"),
    [
        (Recurrence.GDN, "baseline", 0, 7 * STATE),
        (Recurrence.MAMBA2, "baseline", 0, 5 * STATE),
        (Recurrence.GDN, "fp32@4+exact_readout", 2, (2 * 5 + 7) * STATE),
        (Recurrence.MAMBA2, "fp32@4+exact_readout", 2, (2 * 3 + 5) * STATE),
        (Recurrence.GDN, "fp32@4", 3, (3 * 5 + 7) * STATE),
        (Recurrence.GDN, "fp32@4+cached", 3, (3 * 3 + 7) * STATE),
        (Recurrence.GDN, "fp32@4+state_output", 2, (2 * 2 + 5) * STATE),
        (Recurrence.MAMBA2, "fp32@4+state_output", 2, (2 * 2 + 3) * STATE),
        (Recurrence.GDN, "fp32@4", 0, 4 * STATE),
        # two products with each of 2 entries: over d_k of a key head, over d_v of a value head
        (Recurrence.GDN, "fp32@4", 2, 4 * STATE + 2 * (2 * 2 * 2 * 5) + 2 * (2 * 2 * 4 * 3)),
        (Recurrence.KDA, "fp32@4", 2, 4 * STATE + 2 * (2 * 2 * 4 * 5) + 2 * (2 * 2 * 4 * 3)),
        (Recurrence.MAMBA2, "fp32@4", 2, 2 * STATE + 2 * (2 * 2 * 5) + 2 * (2 * 4 * 3)),
    ],
)
def test_operations_counted_by_hand(recurrence, text, offset, count):
    assert step_operations(recurrence, ODD, options(text), offset=offset) == count


def test_mean_operations_are_those_of_a_cycle():
    plan = options("fp32@4")
    steps = [step_operations(Recurrence.KDA, ODD, plan, offset=h) for h in range(4)]
    assert mean_operations(Recurrence.KDA, ODD, plan) == sum(steps) / 4
    assert mean_operations(Recurrence.GDN, ODD, options("baseline")) == 7 * STATE
    exact = mean_operations(Recurrence.GDN, LARGE, options("fp32@16+exact_readout"))
    assert exact > 4 * mean_operations(Recurrence.GDN, LARGE, options("fp32@16"))


@pytest.mark.parametrize("offset", [-1, 4])
def test_no_step_is_outside_its_cycle(offset):
    with pytest.raises(ValueError, match="expected 0 to 3"):
        step_operations(Recurrence.GDN, ODD, options("fp32@4"), offset=offset)


def test_a_batch_is_what_fits_beside_the_weights():
    assert greatest_batch(100, weights=10, per_sequence=9) == 10
    assert greatest_batch(100, weights=11, per_sequence=9) == 9
    assert greatest_batch(100, weights=100, per_sequence=9) == greatest_batch(1, weights=9, per_sequence=9) == 0
    with pytest.raises(ValueError, match="per_sequence"):
        greatest_batch(100, weights=0, per_sequence=0)


def test_gain_by_amdahl():
    assert end_to_end_gain(0.5, 0.5) == 1 / 0.75
    assert end_to_end_gain(1.0, 0.25) == 4.0
    assert end_to_end_gain(0.0, 0.25) == 1.0
    for share, ratio in ((1.5, 0.5), (-0.1, 0.5), (0.5, 0.0)):
        with pytest.raises(ValueError, match="share and ratio"):
            end_to_end_gain(share, ratio)
