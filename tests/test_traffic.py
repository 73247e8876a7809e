"""Bytes a step moves: the published check values, and sums counted by hand."""

from __future__ import annotations

import pytest
import torch

from driftgate.accuracy.plans import PrecisionPlan
from driftgate.kernels.contract import HeadShape, Recurrence
from driftgate.kernels.pool import StatePool
from driftgate.kernels.traffic import EntryBytes, Traffic, compute_traffic, entry_bytes, step_bytes
from driftgate.quant.formats import get_format

LARGE = HeadShape(key_heads=16, value_heads=32, d_k=128, d_v=128)
KDA_LARGE = HeadShape(key_heads=32, value_heads=32, d_k=128, d_v=128)
MAMBA2_LARGE = HeadShape(key_heads=8, value_heads=128, d_k=128, d_v=64)
NO_ENTRY = EntryBytes(adds=0, readout=0, fold=0)


def traffic(text: str, shape: HeadShape = LARGE, recurrence: Recurrence = Recurrence.GDN) -> Traffic:
    options = PrecisionPlan.parse(text).options
    return compute_traffic(shape, options, entry_bytes(recurrence, shape, options, 2))


@pytest.mark.parametrize(
    ("recurrence", "shape", "text", "state_ratio", "ratio"),
    [
        (Recurrence.GDN, LARGE, "fp32@16", 0.531, 0.573),
        (Recurrence.GDN, LARGE, "fp8/fp32@16", 0.191, 0.233),
        (Recurrence.GDN, LARGE, "nvfp4/fp32@16", 0.137, 0.178),
        (Recurrence.MAMBA2, MAMBA2_LARGE, "fp32@16", 0.531, 0.550),
        (Recurrence.MAMBA2, MAMBA2_LARGE, "fp8/fp32@16", 0.191, 0.210),
        (Recurrence.MAMBA2, MAMBA2_LARGE, "nvfp4/fp32@16", 0.137, 0.156),
        (Recurrence.KDA, KDA_LARGE, "fp32@16", 0.531, 0.614),
        (Recurrence.KDA, KDA_LARGE, "fp8/fp32@16", 0.191, 0.274),
        (Recurrence.KDA, KDA_LARGE, "nvfp4/fp32@16", 0.137, 0.219),
    ],
)
def test_check_values_of_large_layers(recurrence, shape, text, state_ratio, ratio):
    """With the row scales, as they are stored."""
    found = traffic(text, shape, recurrence)
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
    """In KDA g is 8 times as large, 128; in Mamba-2 B takes the place of k, x of v, and dt of g and beta."""
    shape = HeadShape(key_heads=2, value_heads=4, d_k=8, d_v=16)
    options = PrecisionPlan.parse(f"fp32@4{options}").options
    assert entry_bytes(Recurrence.GDN, shape, options, 2) == EntryBytes(adds=adds, readout=readout, fold=fold)
    kda = EntryBytes(adds=adds + 112, readout=readout + 112, fold=fold + 112)
    assert entry_bytes(Recurrence.KDA, shape, options, 2) == kda
    assert entry_bytes(Recurrence.MAMBA2, shape, options, 2) == EntryBytes(adds=176, readout=176, fold=176)


@pytest.mark.parametrize(
    "options",
    ["", "+cached", "+exact_readout", "+cached+exact_readout", "+buf=bf16", "+cached+exact_readout+buf=bf16"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recurrence", Recurrence)
def test_what_an_entry_adds_is_what_the_pool_stores(recurrence, options, dtype):
    options = PrecisionPlan.parse(f"fp32@5{options}").options
    shape = HeadShape(key_heads=2, value_heads=4, d_k=16, d_v=16)
    pool = StatePool(shape, options, recurrence=recurrence, n_slots=1, activation_dtype=dtype)
    entry = entry_bytes(recurrence, shape, options, dtype.itemsize)
    assert pool.bytes_per_sequence()["buffer"] == options.places * entry.adds


def test_steps_of_a_cycle_counted_by_hand():
    """L = 3, one head of 16 x 16; a row of NVFP4 is 8 + 1 + 4 bytes, of FP8 16 + 4."""
    head = HeadShape(key_heads=1, value_heads=1, d_k=16, d_v=16)
    options = PrecisionPlan.parse("nvfp4/fp8@3").options
    entry = EntryBytes(adds=1000, readout=10, fold=1)
    steps = [step_bytes(head, options, entry, offset=h) for h in range(3)]
    assert steps == [16 * 13 + 1000, 16 * 13 + 1010, 2 * 16 * 20 + 2 + 16 * 13]


@pytest.mark.parametrize("text", ["baseline", "fp32@1", "fp32@2", "nvfp4@7", "fp8/fp32@16+cached"])
@pytest.mark.parametrize("recurrence", Recurrence)
def test_steps_of_a_cycle_add_up_to_its_traffic(recurrence, text):
    """traffic = [sum over h < L - 1 of (R + h r + a) + 2C + (L - 1) f + (R if split)] / L"""
    options = PrecisionPlan.parse(text).options
    n, entry = options.length, entry_bytes(recurrence, LARGE, options, 2)
    rows = LARGE.value_heads * LARGE.d_v
    C, R = (rows * get_format(name).bytes_per_row(128) for name in (options.recurrence, options.read))
    total = 2 * C
    if n:
        between = (n - 1) * (R + entry.adds) + entry.readout * (n - 1) * (n - 2) / 2
        total = (between + 2 * C + (n - 1) * entry.fold + (R if options.split else 0)) / n
    steps = [step_bytes(LARGE, options, entry, offset=h) for h in range(max(n, 1))]
    assert sum(steps) / len(steps) == pytest.approx(total, rel=1e-12)
    assert traffic(text, LARGE, recurrence).per_step == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(("text", "offset"), [("fp32@4", 4), ("fp32@4", -1), ("baseline", 1)])
def test_an_offset_outside_the_cycle_is_refused(text, offset):
    options = PrecisionPlan.parse(text).options
    with pytest.raises(ValueError, match=f"offset: expected 0 to {max(options.length - 1, 0)}, got {offset}"):
        step_bytes(LARGE, options, NO_ENTRY, offset=offset)


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
