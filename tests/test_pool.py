"""StatePool: what is stored where, cursors and flushes, slots that change hands, bytes."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import pytest
import torch

from driftgate.accuracy.step_data import draw_inputs
from driftgate.kernels import HeadShape, ReplayOptions, StatePool
from driftgate.kernels.contract import Fold, Readout, Recurrence
from driftgate.quant import decode_rows, encode_rows, get_format
from driftgate.quant.formats import FORMATS

SHAPE = HeadShape(key_heads=2, value_heads=4, d_k=24, d_v=16)


def make_pool(n_slots: int = 4, n_layers: int = 1, **options: object) -> StatePool:
    return StatePool(SHAPE, ReplayOptions(**options), n_slots=n_slots, n_layers=n_layers)


def draw_states(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, SHAPE.value_heads, SHAPE.d_v, SHAPE.d_k, generator=generator)


def flushes(pool: StatePool, n_steps: int, slot: int = 0) -> list[int]:
    """Steps, counted from 0, at which a slot flushes."""
    slots = torch.tensor([slot], dtype=torch.int32)
    seen = []
    for t in range(n_steps):
        if int(pool.flush[slot]):
            seen.append(t)
        pool.advance(slots)
    return seen


@pytest.mark.parametrize("name", FORMATS)
def test_checkpoint_holds_what_the_codec_stores(name: str) -> None:
    pool = make_pool(recurrence=name, read=name, length=4)
    states, slots = draw_states(2), torch.tensor([3, 1])
    pool.write(0, slots, states)
    fmt = get_format(name)
    encoded = encode_rows(fmt, states)
    assert torch.equal(pool.checkpoint.codes[0, slots], encoded.codes)
    assert torch.equal(pool.checkpoint.read(0, slots), decode_rows(fmt, *encoded, SHAPE.d_k))
    assert not pool.checkpoint.read(0, torch.tensor([0, 2])).any()


@pytest.mark.parametrize("recurrence", FORMATS)
@pytest.mark.parametrize("read", FORMATS)
def test_copy_is_made_from_what_the_checkpoint_reads_back_as(recurrence: str, read: str) -> None:
    if read == recurrence or FORMATS[read].bits > FORMATS[recurrence].bits:
        with pytest.raises(ValueError, match="read") if read != recurrence else pytest.raises(AttributeError):
            make_pool(recurrence=recurrence, read=read, length=4).copy.read(0, torch.tensor([0]))
        return
    pool = make_pool(recurrence=recurrence, read=read, length=4)
    slots = torch.tensor([2])
    pool.write(0, slots, draw_states(1))
    checkpoint = pool.checkpoint.read(0, slots)
    fmt = get_format(read)
    assert torch.equal(pool.copy.read(0, slots), decode_rows(fmt, *encode_rows(fmt, checkpoint), SHAPE.d_k))
    assert pool.read_states is pool.copy


@pytest.mark.parametrize("length", [1, 2, 3, 5, 13, 16])
def test_natural_flush_at_the_last_place(length: int) -> None:
    assert flushes(make_pool(length=length), 3 * length) == [length - 1, 2 * length - 1, 3 * length - 1]


def test_baseline_writes_at_every_step_and_keeps_no_buffer() -> None:
    pool = make_pool()
    assert flushes(pool, 3) == [0, 1, 2]
    assert pool.cursor[0] == 0
    assert pool.keys is None
    assert pool.bytes_per_sequence()["buffer"] == 0


def test_tracked_flush_where_the_position_is_a_multiple() -> None:
    pool = make_pool(length=5, track=3)
    assert flushes(pool, 12) == [2, 5, 8, 11]
    pool.start(torch.tensor([1]), tokens=7)  # two more steps make nine tokens
    assert flushes(pool, 6, slot=1) == [1, 4]


def test_forced_flush_restarts_the_count() -> None:
    pool = make_pool(length=4)
    slot = torch.tensor([0], dtype=torch.int32)
    pool.advance(slot)
    pool.force_flush(slot)
    assert flushes(pool, 9) == [0, 4, 8]
    assert int(pool.tokens[0]) == 10


def test_rows_have_their_own_cursors_and_padding_moves_nothing() -> None:
    pool = make_pool(length=4)
    pool.advance(torch.tensor([2, -1, 0], dtype=torch.int32))
    pool.advance(torch.tensor([-1, 0, -1], dtype=torch.int32))
    assert pool.cursor[:4].tolist() == [2, 0, 1, 0]
    assert pool.tokens[:4].tolist() == [2, 0, 1, 0]
    pool.advance(torch.tensor([0, 1], dtype=torch.int32), pad_slot=0)
    assert pool.cursor[:4].tolist() == [2, 1, 1, 0]


def test_reset_hands_over_a_zero_state() -> None:
    pool = make_pool(length=3, recurrence="fp8", read="nvfp4", n_layers=2)
    slots = torch.tensor([1, 2])
    for layer in range(2):
        pool.write(layer, slots, draw_states(2, seed=layer))
    pool.advance(slots.int())
    pool.error[1] = 1
    kept = pool.checkpoint.read(0, torch.tensor([2]))
    pool.reset(torch.tensor([1]))
    for layer in range(2):
        assert not pool.checkpoint.read(layer, torch.tensor([1])).any()
        assert not pool.copy.read(layer, torch.tensor([1])).any()
    assert torch.equal(pool.checkpoint.read(0, torch.tensor([2])), kept)
    assert (int(pool.cursor[1]), int(pool.tokens[1]), int(pool.error[1]), int(pool.cursor[2])) == (0, 0, 0, 1)


def test_copying_a_slot_with_buffered_entries_is_refused() -> None:
    pool = make_pool(length=4)
    pool.write(0, torch.tensor([0]), draw_states(1))
    pool.advance(torch.tensor([0], dtype=torch.int32))
    with pytest.raises(ValueError, match="1 buffered entries; give flush_now"):
        pool.copy_slot(0, 1)
    with pytest.raises(ValueError, match="1 buffered entries; give flush_now"):
        pool.copy_slot(0, 1, flush_now=lambda pool, slots: None)  # folds nothing
    assert not pool.checkpoint.read(0, torch.tensor([1])).any()


@pytest.mark.parametrize("recurrence", list(Recurrence), ids=lambda r: r.value)
def test_copying_a_slot_can_flush_it(recurrence: Recurrence) -> None:
    """The source is flushed as well, and both are what a flush before the copy gives."""
    data = draw_inputs(SHAPE, torch.float32, n_rows=1, n_steps=3, seed=0, recurrence=recurrence)
    twin = import_module(f"driftgate.kernels.{recurrence.value}.reference")
    flush_now = partial(twin.flush_now, **data.fold_constants())
    pools = []
    for _ in range(2):
        pool = StatePool(SHAPE, ReplayOptions(length=8, read="nvfp4"), recurrence=recurrence, n_slots=3)
        pool.write(0, torch.arange(3), data.states)
        for t in range(3):
            twin.replay_step(**data.inputs(t), pool=pool, layer=0, slots=data.slots)
            pool.advance(data.slots)
        pools.append(pool)
    at_once, before = pools
    source = int(data.slots[data.live_rows[0]])
    target = (source + 1) % 3
    flush_now(before, torch.tensor([source]))
    before.copy_slot(source, target)
    at_once.copy_slot(source, target, flush_now=flush_now)
    for pool in pools:
        assert pool.cursor[[source, target]].tolist() == [0, 0]
        assert pool.tokens[[source, target]].tolist() == [3, 3]
    for a, b in ((at_once.checkpoint, before.checkpoint), (at_once.copy, before.copy)):
        for x, y in zip(a.tensors(), b.tensors(), strict=True):
            assert torch.equal(x, y)
            assert torch.equal(x[:, source], x[:, target])
    assert not torch.equal(at_once.checkpoint.codes[0, source], data.states[source])


def test_a_copied_slot_keeps_its_error_word() -> None:
    """What was saturated is copied with the rest."""
    pool = make_pool(length=4, n_slots=3)
    pool.error[0] = 1
    pool.copy_slot(0, 2)
    assert pool.error[:3].tolist() == [1, 0, 1]


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_number_that_is_no_slot_is_refused(slot: int) -> None:
    """-1 would be the last slot in torch: padding must not reach it."""
    pool = make_pool(length=4)
    pool.write(0, torch.arange(4), draw_states(4))
    before = pool.checkpoint.codes.clone()
    slots = torch.tensor([0, slot])
    calls = [
        lambda: pool.reset(slots),
        lambda: pool.write(0, slots, draw_states(2)),
        lambda: pool.start(slots, tokens=3),
        lambda: pool.force_flush(slots),
        lambda: pool.copy_slot(0, slot),
        lambda: pool.copy_slot(slot, 0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="slots: expected 0 to 3"):
            call()
    assert torch.equal(pool.checkpoint.codes, before)
    assert not pool.tokens.any()
    assert not pool.flush.any()


@pytest.mark.parametrize("name", ["fp32", "nvfp4"])
def test_a_copied_slot_is_its_own(name: str) -> None:
    pool = make_pool(length=4, recurrence="fp32", read=name, n_layers=2)
    source, target = torch.tensor([0]), torch.tensor([3])
    for layer in range(2):
        pool.write(layer, source, draw_states(1, seed=layer))
    pool.start(source, tokens=11)
    pool.copy_slot(0, 3)
    before = [pool.checkpoint.read(layer, target).clone() for layer in range(2)]
    assert (int(pool.tokens[3]), int(pool.cursor[3])) == (11, 0)
    for layer in range(2):
        pool.write(layer, source, draw_states(1, seed=9))
        assert torch.equal(pool.checkpoint.read(layer, target), before[layer])
        assert torch.equal(before[layer], draw_states(1, seed=layer))
        assert not torch.equal(pool.read_states.read(layer, target), pool.read_states.read(layer, source))


@pytest.mark.parametrize("recurrence", FORMATS)
def test_formats_survive_a_reset(recurrence: str) -> None:
    """A format belongs to a whole pool and lies outside what a reset clears: no table per head that could be zeroed."""
    read = "nvfp4" if FORMATS[recurrence].bits > FORMATS["nvfp4"].bits else recurrence
    pool = make_pool(recurrence=recurrence, read=read, length=4)
    every, states = torch.arange(4), draw_states(4)
    pool.write(0, every, states)
    before = [t.clone() for t in pool.checkpoint.tensors()]
    pool.reset(every)
    pool.audit()
    assert not pool.checkpoint.read(0, every).any()
    pool.write(0, every, states)
    assert (pool.checkpoint.format.name, pool.read_states.format.name) == (recurrence, read)
    assert all(torch.equal(a, b) for a, b in zip(before, pool.checkpoint.tensors(), strict=True))
    assert len(pool.checkpoint.read(0, every).flatten(2).unique(dim=1)[0]) == SHAPE.value_heads, "heads stay apart"


def test_a_write_takes_no_hold_of_the_callers_tensor() -> None:
    pool, states = make_pool(length=2), draw_states(1)
    pool.write(0, torch.tensor([0]), states)
    states.zero_()
    assert pool.checkpoint.read(0, torch.tensor([0])).any()


def test_nonfinite_states_are_refused_by_slot_and_head() -> None:
    pool, states = make_pool(recurrence="fp8", read="fp8", length=2), draw_states(2)
    states[1, 3, 4, 5] = torch.nan
    with pytest.raises(ValueError, match="slot 1, head 3"):
        pool.write(0, torch.tensor([0, 2]), states)
    assert not pool.checkpoint.read(0, torch.tensor([0, 2])).any()


def test_states_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="states: expected shape"):
        make_pool(length=2).write(0, torch.tensor([0, 1]), draw_states(1))


def test_audit_finds_a_type_that_the_plan_does_not_name() -> None:
    pool = make_pool(length=2)
    pool.checkpoint.codes = pool.checkpoint.codes.bfloat16()
    with pytest.raises(ValueError, match=r"checkpoint: expected torch.float32 for fp32, got torch.bfloat16"):
        pool.audit()


def test_audit_finds_a_pool_off_by_eight_bytes() -> None:
    pool = make_pool(length=2)
    codes = pool.checkpoint.codes
    moved = torch.zeros(codes.numel() + 2)[2:].view(codes.shape)
    pool.checkpoint.codes = moved
    with pytest.raises(ValueError, match="16-byte aligned"):
        pool.audit()


def test_buffers_hold_what_the_plan_needs() -> None:
    exact = make_pool(length=4, readout=Readout.EXACT_READOUT)
    assert exact.corrections is None
    assert exact.values is not None
    cached = make_pool(length=4, fold=Fold.CACHED, buffer="bf16")
    assert (cached.values, cached.beta) == (None, None)
    assert cached.corrections.dtype == torch.bfloat16
    assert cached.keys.shape == (1, 4, SHAPE.key_heads, 3, SHAPE.d_k)


@pytest.mark.parametrize(
    ("name", "per_row"), [("fp32", 4 * 24), ("bf16", 48), ("fp16", 48), ("fp8", 24 + 4), ("nvfp4", 16 + 2 + 4)]
)
def test_bytes_of_a_sequence(name: str, per_row: int) -> None:
    pool = make_pool(recurrence=name, read=name, length=5, n_layers=3, n_slots=2)
    places = 4
    raw = 4 * (2 * 24 + 4 * 16) + 8 * 4 + 4 * 4 * 16  # k and v in FP32, g and β, û
    assert pool.bytes_per_sequence() == {
        "checkpoint": 3 * 4 * 16 * per_row,
        "read_copy": 0,
        "buffer": 3 * places * raw,
    }


@pytest.mark.parametrize(("n_slots", "n_layers"), [(0, 1), (1, 0)])
def test_an_empty_pool_is_refused(n_slots: int, n_layers: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_pool(n_slots=n_slots, n_layers=n_layers)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("d_k", [16, 24, 20, 17])
def test_layers_are_aligned_alike(name: str, d_k: int) -> None:
    """A kernel sees one layer: were its address less aligned than another's, its loads and its sums would differ."""
    shape = HeadShape(key_heads=1, value_heads=1, d_k=d_k, d_v=16)
    pool = StatePool(
        shape, ReplayOptions(recurrence=name, read=name, length=4), n_slots=1, n_layers=3,
        activation_dtype=torch.bfloat16,
    )  # fmt: skip
    tensors = (*pool.checkpoint.tensors(), pool.keys, pool.values, pool.log_decay, pool.beta, pool.corrections)
    for tensor in tensors:
        assert {tensor[layer].data_ptr() % 16 for layer in range(3)} == {0}


def spread(pool: StatePool, *, slot_stride: int, layer_stride: int, offset: int = 0) -> torch.Tensor:
    """Storage like an engine's, as a view with the shape of a pool's codes."""
    codes = pool.checkpoint.codes
    storage = torch.zeros(offset + 8 * (slot_stride + layer_stride) + codes[0, 0].numel(), dtype=codes.dtype)
    strides = (layer_stride, slot_stride, *codes.stride()[2:])
    return storage[offset:].as_strided(codes.shape, strides)


def test_adopted_storage_is_read_and_written_in_place() -> None:
    pool = make_pool(n_slots=3, n_layers=2, length=4)
    states, size = draw_states(3), SHAPE.value_heads * SHAPE.d_v * SHAPE.d_k
    pool.write(1, torch.arange(3), states)
    view = spread(pool, slot_stride=2 * size + 1024, layer_stride=size)  # layers of a slot side by side
    pool.checkpoint.adopt(view)
    pool.audit()
    assert torch.equal(view[1], states)
    assert not view[0].any()
    pool.write(0, torch.tensor([2]), draw_states(1, seed=5))
    assert torch.equal(view[0, 2], draw_states(1, seed=5)[0])
    assert torch.equal(view[1], states)


WRONG_STORAGE = {
    "off by 8 bytes": ({"offset": 2}, "multiples of 16 bytes"),
    "slot stride off by 8 bytes": ({"extra": 2}, "multiples of 16 bytes"),
    "one place for all slots": ({"slot_stride": 0}, "slots that lie apart"),
    "slots that overlap": ({"slot_stride": 64}, "slots that lie apart"),
    "layers that overlap": ({"layer_stride": 64}, "slots that lie apart"),
}


@pytest.mark.parametrize("wrong", WRONG_STORAGE)
def test_adopted_storage_that_does_not_fit_is_refused(wrong: str) -> None:
    change, message = WRONG_STORAGE[wrong]
    pool = make_pool(n_slots=3, n_layers=2, length=4)
    size = SHAPE.value_heads * SHAPE.d_v * SHAPE.d_k
    fields = {"slot_stride": size + change.get("extra", 0), "layer_stride": 4 * size}
    view = spread(pool, **(fields | {name: n for name, n in change.items() if name != "extra"}))
    kept = pool.checkpoint.codes
    with pytest.raises(ValueError, match=message):
        pool.checkpoint.adopt(view)
    assert pool.checkpoint.codes is kept


def test_adopted_storage_of_another_kind_is_refused() -> None:
    pool = make_pool(n_slots=3, length=4)
    codes = pool.checkpoint.codes
    for wrong, message in (
        (codes.bfloat16(), "codes: expected .* torch.float32 on cpu, got .* torch.bfloat16"),
        (codes[:, :2].clone(), "codes: expected"),
        (codes.transpose(3, 4).contiguous().transpose(3, 4), "codes: expected contiguous slots"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.checkpoint.adopt(wrong)
