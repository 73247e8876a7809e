"""StatePool and plans with every format of the catalogue, on the torch twins."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from driftgate.accuracy.plans import PrecisionPlan
from driftgate.errors import UsageError
from driftgate.kernels import HeadShape, ReplayOptions, StatePool
from driftgate.kernels.gdn import reference
from driftgate.quant import FORMATS, decode_rows, encode_rows, get_format

SHAPES = {
    "even": HeadShape(key_heads=2, value_heads=4, d_k=64, d_v=16),
    "short": HeadShape(key_heads=1, value_heads=2, d_k=16, d_v=16),  # half an MX block
    "odd": HeadShape(key_heads=1, value_heads=2, d_k=40, d_v=24),
}
WIDTHS = [
    ("fp32",), ("bf16", "fp16", "int16"), ("fp8", "fp8_e5m2", "int8", "mxfp8"), ("nvfp4", "mxfp4"),
]  # fmt: skip
LEVEL = {name: level for level, names in enumerate(WIDTHS) for name in names}
PAIRS = [(read, kept) for read, kept in product(FORMATS, FORMATS) if LEVEL[read] >= LEVEL[kept]]


def draw(shape: HeadShape, n: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, shape.value_heads, shape.d_v, shape.d_k, generator=generator)


def test_every_format_has_a_width() -> None:
    assert set(LEVEL) == set(FORMATS)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_pool_stores_what_the_codec_gives(name: str, shape: HeadShape) -> None:
    fmt = get_format(name)
    pool = StatePool(shape, ReplayOptions(recurrence=name, read=name, length=4), n_slots=3, n_layers=2)
    states, slots = draw(shape), torch.tensor([2, 0])
    pool.write(1, slots, states)
    encoded = encode_rows(fmt, states)
    parts = (pool.checkpoint.codes, pool.checkpoint.block_scales, pool.checkpoint.row_scales)
    for stored, expected in zip(parts, encoded, strict=True):
        assert (stored is None) == (expected is None)
        assert stored is None or torch.equal(stored[1, slots], expected)
    assert torch.equal(pool.checkpoint.read(1, slots), decode_rows(fmt, *encoded, shape.d_k))
    assert not pool.checkpoint.read(0, slots).any()
    assert not pool.checkpoint.read(1, torch.tensor([1])).any()
    pool.audit()
    rows = shape.value_heads * shape.d_v
    assert pool.bytes_per_sequence()["checkpoint"] == 2 * rows * fmt.bytes_per_row(shape.d_k)


@pytest.mark.parametrize("name", ["int8", "int16"])
def test_the_audit_wants_the_integer_type(name: str) -> None:
    pool = StatePool(SHAPES["even"], ReplayOptions(recurrence=name, read=name, length=4), n_slots=2)
    pool.checkpoint.codes = pool.checkpoint.codes.to(torch.int32)
    with pytest.raises(ValueError, match=f"^checkpoint: expected torch.{name} for {name}, got torch.int32"):
        pool.audit()


@pytest.mark.parametrize(("read", "kept"), PAIRS)
def test_plans_of_every_pair_of_widths(read: str, kept: str) -> None:
    text = f"{read}@8" if read == kept else f"{read}/{kept}@8"
    plan = PrecisionPlan.parse(text)
    assert str(plan) == text
    assert (plan.options.read, plan.options.recurrence) == (read, kept)
    assert plan.options.split == (read != kept)


@pytest.mark.parametrize(
    ("read", "kept"), [pair for pair in product(FORMATS, FORMATS) if LEVEL[pair[0]] < LEVEL[pair[1]]]
)
def test_a_read_wider_than_the_recurrence_is_refused(read: str, kept: str) -> None:
    with pytest.raises(UsageError, match="is wider than RECURRENCE"):
        PrecisionPlan.parse(f"{read}/{kept}@8")


# The recurrence forgets and every write adds at most the error of one rounding of a state, so that after twelve
# steps with three writes the state is within four roundings of that of FP32; the copy is one rounding further.
@pytest.mark.parametrize("kept", FORMATS)
def test_a_state_in_a_format_stays_near_the_one_in_fp32(kept: str) -> None:
    shape = SHAPES["even"]
    pools = [
        StatePool(shape, ReplayOptions(recurrence=name, read=name, length=4), n_slots=2) for name in ("fp32", kept)
    ]
    slots = torch.arange(2, dtype=torch.int32)
    states = draw(shape)
    one_rounding = (get_format(kept).quantize(states).dequantize() - states).norm() / states.norm()
    for pool in pools:
        pool.write(0, slots.long(), states)
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        q, k = torch.randn(2, 2, shape.key_heads, shape.d_k, generator=generator)
        v = torch.randn(2, shape.value_heads, shape.d_v, generator=generator)
        g, beta = torch.full((2, shape.value_heads), -0.05), torch.full((2, shape.value_heads), 0.5)
        outputs = []
        for pool in pools:
            outputs.append(reference.replay_step(q, k, v, g, beta, pool=pool, layer=0, slots=slots))
            pool.advance(slots)
        assert torch.isfinite(outputs[1]).all()
    exact, stored = (pool.checkpoint.read(0, slots.long()) for pool in pools)
    error = (stored - exact).norm() / exact.norm()
    assert error <= 4 * one_rounding
    assert (error > 0) == (kept != "fp32")
    assert not pools[1].error.any()


@pytest.mark.parametrize(
    ("read", "kept"), [("int8", "int16"), ("mxfp4", "fp8_e5m2"), ("mxfp8", "bf16"), ("nvfp4", "int8")]
)
def test_the_copy_is_made_from_what_the_checkpoint_reads_back_as(read: str, kept: str) -> None:
    shape = SHAPES["odd"]
    pool = StatePool(shape, ReplayOptions(recurrence=kept, read=read, length=4), n_slots=2)
    slots = torch.tensor([1])
    pool.write(0, slots, draw(shape, 1))
    fmt = get_format(read)
    expected = decode_rows(fmt, *encode_rows(fmt, pool.checkpoint.read(0, slots)), shape.d_k)
    assert pool.copy is not None
    assert torch.equal(pool.copy.read(0, slots), expected)
