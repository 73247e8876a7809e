"""Bytes a step moves: the published check values, and sums counted by hand."""

from __future__ import annotations

import pytest
import torch

from driftgate.accuracy.plans import PrecisionPlan
from driftgate.kernels.contract import HeadShape
from driftgate.kernels.pool import StatePool
from driftgate.kernels.traffic import EntryBytes, Traffic, compute_traffic, gdn_entry
from driftgate.quant.formats import get_format

LARGE = HeadShape(key_heads=16, value_heads=32, d_k=128, d_v=128)
NO_ENTRY = EntryBytes(adds=0, readout=0, fold=0)


def traffic(text: str, shape: HeadShape = LARGE, *, activation_bytes: int = 2) -> Traffic:
    options = PrecisionPlan.parse(text).options
    return compute_traffic(shape, options, gdn_entry(shape, options, activation_bytes=activation_bytes))


@pytest.mark.parametrize(
    ("text", "state_ratio", "ratio"),
    [("fp32@16", 0.531, 0.573), ("fp8/fp32@16", 0.191, 0.233), ("nvfp4/fp32@16", 0.137, 0.178)],
)
def test_check_values_of_a_large_gdn_layer(text, state_ratio, ratio):
    """With the row scales, as they are stored."""
    found = traffic(text)
    assert found.state_ratio == pytest.approx(state_ratio, abs=5e-4)
    assert found.ratio == pytest.approx(ratio, abs=5e-4)


def test_a_head_of_128_by_128_in_fp32_has_64_kib():
    head = HeadShape(key_heads=1, value_heads=1, d_k=128, d_v=128)
    baseline = traffic("baseline", head)
    assert baseline.per_step == 2 * 64 * 1024  # read and written
    assert (baseline.ratio, baseline.state_ratio) == (1.0, 1.0)
    pool = StatePool(head, PrecisionPlan.parse("baseline").options, n_slots=1)
    assert pool.bytes_per_sequence() == {"checkpoint": 64 * 1024, "read_copy": 0, "buffer": 0}


@pytest.mark.parametrize("length", [1, 2, 3, 8, 16, 64])
def test_fp32_reads_always_and_writes_once_a_cycle(length):
    assert traffic(f"fp32@{length}").state_ratio == pytest.approx((1 + 1 / length) / 2, rel=1e-12)


def test_length_one_has_no_buffer():
    assert traffic("fp32@1").ratio == 1.0
    assert traffic("fp32@1").per_step == traffic("baseline").per_step


def test_a_cycle_counted_by_hand():
    """L = 3, one head of 16 x 16, BF16 activations; a row of NVFP4 is 8 + 1 + 4 bytes, of FP8 16 + 4."""
    head = HeadShape(key_heads=1, value_heads=1, d_k=16, d_v=16)
    copy, checkpoint = 16 * 13, 16 * 20
    raw, correction = 2 * 16 + 2 * 16 + 8, 4 * 16
    readout = 2 * 16 + 4 + correction
    first = copy + (raw + correction)
    second = copy + readout + (raw + correction)
    flush = checkpoint + 2 * raw + checkpoint + copy
    assert traffic("nvfp4/fp8@3", head).per_step == pytest.approx((first + second + flush) / 3, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "adds", "readout", "fold"),
    [  # BF16 activations, H = 2 keys of 8, HV = 4 values of 16: k 32, v 128, g 16, beta 16, u 256 (BF16 128)
        ("", 448, 304, 192),
        ("+cached", 304, 304, 304),
        ("+exact_readout", 192, 192, 192),
        ("+exact_readout+cached", 448, 192, 304),
        ("+buf=bf16", 320, 176, 192),
        ("+cached+buf=bf16", 176, 176, 176),
    ],
)
def test_bytes_of_an_entry(options, adds, readout, fold):
    shape = HeadShape(key_heads=2, value_heads=4, d_k=8, d_v=16)
    entry = gdn_entry(shape, PrecisionPlan.parse(f"fp32@4{options}").options, activation_bytes=2)
    assert entry == EntryBytes(adds=adds, readout=readout, fold=fold)


@pytest.mark.parametrize(
    "options",
    ["", "+cached", "+exact_readout", "+cached+exact_readout", "+buf=bf16", "+cached+exact_readout+buf=bf16"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_an_entry_adds_is_what_the_pool_stores(options, dtype):
    options = PrecisionPlan.parse(f"fp32@5{options}").options
    shape = HeadShape(key_heads=2, value_heads=4, d_k=16, d_v=16)
    pool = StatePool(shape, options, n_slots=1, activation_dtype=dtype)
    entry = gdn_entry(shape, options, activation_bytes=dtype.itemsize)
    assert pool.bytes_per_sequence()["buffer"] == options.places * entry.adds


@pytest.mark.parametrize("text", ["fp32@16", "nvfp4@8", "fp8/fp32@4", "nvfp4/fp8@16"])
def test_states_are_counted_as_the_pool_stores_them(text):
    options = PrecisionPlan.parse(text).options
    shape = HeadShape(key_heads=2, value_heads=4, d_k=32, d_v=16)
    stored = StatePool(shape, options, n_slots=1).bytes_per_sequence()
    rows = shape.value_heads * shape.d_v
    assert stored["checkpoint"] == rows * get_format(options.recurrence).bytes_per_row(32)
    assert stored["read_copy"] == (rows * get_format(options.read).bytes_per_row(32) if options.split else 0)
    n, read = options.length, stored["read_copy"] or stored["checkpoint"]
    cycle = (n - 1) * read + 2 * stored["checkpoint"] + stored["read_copy"]
    found = compute_traffic(shape, options, NO_ENTRY)
    assert found.per_step == pytest.approx(cycle / n, rel=1e-12)
    assert found.ratio == found.state_ratio == found.per_step / (8 * rows * 32)
