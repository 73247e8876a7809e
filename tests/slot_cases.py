"""Cases of slots, padding and storage for every recurrence: which bytes a step may read and which it may write.

Run under Triton's interpreter through ``kernel_cases.run_edge`` (test_kernel_faults.py); most run on a GPU as well.
A case is a function that raises AssertionError where the kernel is wrong.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from kernel_cases import choose_rows, draw_steps, find_kernels, make_options, make_pool, take_steps

from driftgate.accuracy.step_data import StepData
from driftgate.kernels.contract import ReplayOptions
from driftgate.kernels.pool import StatePool


def step_of(data: StepData, options: ReplayOptions, kernels: str | None = None) -> Any:
    """The function that takes one step; ``kernels`` is the path of a mutant."""
    module = find_kernels(data.recurrence.value, kernels)
    return module.decode_step if options.step_by_step else module.replay_step


def run_rows(
    data: StepData, pool: StatePool, rows: list[int], slots: torch.Tensor, *, n_steps: int | None = None
) -> torch.Tensor:
    """The first steps of some rows in slots of their own; outputs [steps, rows, HV, d_v]."""
    take, outs = step_of(data, pool.options), []
    for t in range(data.n_steps if n_steps is None else n_steps):
        outs.append(take(**choose_rows(data, t, rows), pool=pool, layer=0, slots=slots))
        pool.advance(slots)
    return torch.stack(outs)


def stored(pool: StatePool, slots: Any = slice(None)) -> list[torch.Tensor]:
    """Copies of all that is stored for some slots: states, buffers, cursors."""
    states = [t for s in (pool.checkpoint, pool.copy) if s is not None for t in s.tensors()]
    counts = [x[: pool.n_slots][None] for x in (pool.cursor, pool.flush, pool.base, pool.tokens, pool.error)]
    return [x[:, slots].clone() for x in (*states, *pool.buffers().values(), *counts)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Equality of bytes: NaN equals itself."""
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(a, b, strict=True)
    )


def pad_slot_zero(*, recurrence: str, length: int, kernels: str | None = None) -> None:
    """Row 11: with pad_slot 0 slot 0 is no slot, with -1 it is one: the same rows, the same bits, slot 0 untouched."""
    data, plan = draw_steps(recurrence), make_options(length=length)
    pool, other = make_pool(data, plan), make_pool(data, plan)
    zero = stored(other, slice(0, 1))
    expected = take_steps(data, pool, torch.tensor([1, -1, 2], dtype=torch.int32))
    slots = torch.tensor([1, 0, 2], dtype=torch.int32)
    got = take_steps(data, other, slots, pad_slot=0, kernels=kernels)
    assert torch.equal(expected, got)
    assert same(zero, stored(other, slice(0, 1)))
    assert same(stored(pool, [3]), stored(other, [3])), "the last slot is no place for padding"
    real = make_pool(data, plan)
    inputs = choose_rows(data, 0, [0, 0, 2])  # the padded row's own inputs are NaN
    out = step_of(data, plan, kernels)(**inputs, pool=real, layer=0, slots=slots)
    assert bool(out[1].abs().sum() > 0), "slot 0 is a real slot where pad_slot is -1"


def nothing_to_do(*, recurrence: str, length: int) -> None:
    """Batch 0, and a batch of padded rows alone: zeros, nothing written."""
    data, plan = draw_steps(recurrence), make_options(length=length)
    pool = make_pool(data, plan)
    before = stored(pool)
    take = step_of(data, plan)
    out = take(**choose_rows(data, 0, []), pool=pool, layer=0, slots=torch.zeros(0, dtype=torch.int32))
    assert out.shape == (0, 2, 16)
    padded = torch.full((3,), -1, dtype=torch.int32)
    out = take(**data.inputs(0), pool=pool, layer=0, slots=padded)
    pool.advance(padded)
    assert bool((out == 0).all())
    find_kernels(recurrence).flush_now(pool, torch.zeros(0, dtype=torch.int32), **data.fold_constants())
    assert same(before, stored(pool))


def padding_reads_nothing(*, recurrence: str, length: int, kernels: str | None = None) -> None:
    """Rows 9, 10: slots of no row full of Inf, padded rows of NaN: zeros there, the live rows' bits, Inf left as it is.

    Outputs come from fresh memory that torch fills with NaN.
    """
    data, plan = draw_steps(recurrence, shape=(1, 2, 24, 80)), make_options(length=length)
    clean, poisoned = make_pool(data, plan), make_pool(data, plan)
    poisoned.checkpoint.codes[0, data.unused_slots] = torch.inf
    before = stored(poisoned, data.unused_slots)
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(4).isnan().all())
        expected, out = take_steps(data, clean), take_steps(data, poisoned, kernels=kernels)
    finally:
        torch.use_deterministic_algorithms(False)
    assert bool(out[:, data.live_rows].isfinite().all())
    assert bool((out[:, data.padded_rows] == 0).all())
    assert torch.equal(expected, out)
    assert same(before, stored(poisoned, data.unused_slots))


def rows_that_became_padding(*, recurrence: str, options: dict[str, Any]) -> None:
    """Row 12: a batch of eight, then three live rows with the rest padded: slots of rows 3 to 7 keep every byte."""
    data, plan = draw_steps(recurrence, shape=(1, 1, 16, 16), n_rows=8, n_steps=3), make_options(**options)
    pool, take = make_pool(data, plan), step_of(data, plan)
    slots = torch.arange(8, dtype=torch.int32)
    for t in range(3):
        rows = slots if t == 0 else torch.where(slots < 3, slots, -1)
        take(**choose_rows(data, t, data.live_rows), pool=pool, layer=0, slots=rows)
        pool.advance(rows)
        if t == 0:
            before = stored(pool)
    now = stored(pool)
    assert same([x[:, 3:] for x in before], [x[:, 3:] for x in now])
    assert not same([x[:, :3] for x in before], [x[:, :3] for x in now])


def slot_reuse(*, recurrence: str, options: dict[str, Any]) -> None:
    """Rows 7, 8: after three steps of another request a slot gives the bits of a fresh one, whatever it held."""
    plan = make_options(**options)
    data, slot = draw_steps(recurrence, n_rows=1, n_steps=5), torch.tensor([2], dtype=torch.int32)
    used, fresh = make_pool(data, plan), make_pool(data, plan, poison=torch.inf)
    run_rows(data, used, data.live_rows, slot, n_steps=3)
    outs = []
    for pool in (used, fresh):
        pool.reset(slot)
        outs.append(run_rows(data, pool, data.live_rows, slot))
    assert torch.equal(*outs)
    assert bool(outs[0].isfinite().all())
    for a, b in zip(used.checkpoint.tensors(), fresh.checkpoint.tensors(), strict=True):
        assert torch.equal(a[0, 2], b[0, 2])


def stale_buffers(*, recurrence: str, options: dict[str, Any], n_steps: int = 4, kernels: str | None = None) -> None:
    """Row 7: what lies in the buffer beyond the cursor is not multiplied in: NaN, Inf and -Inf give the bits of 0."""
    data, plan = draw_steps(recurrence, n_steps=n_steps), make_options(**options)
    found = []
    for poison in (0.0, torch.nan, torch.inf, -torch.inf):
        pool = make_pool(data, plan, poison=poison)
        found.append([take_steps(data, pool, kernels=kernels), *pool.checkpoint.tensors()])
        assert bool(found[-1][0].isfinite().all()), f"{poison} in the buffer is seen"
    assert all(same(found[0], other) for other in found[1:])


def rows_do_not_meet(*, recurrence: str) -> None:
    """Rows 26, 27: a row alone, in far slots, in another order: the bits that it gives in the batch (I4)."""
    data = draw_steps(recurrence, n_rows=3, n_steps=5, shape=(2, 4, 24, 16))
    plan = make_options(length=3, read="fp8")
    together = make_pool(data, plan)
    expected = take_steps(data, together)
    one_by_one = [([row], [39]) for row in data.live_rows]
    for rows, slots in (*one_by_one, (data.live_rows[::-1], [37, 2, 20])):
        pool = StatePool(data.shape, plan, recurrence=data.recurrence, n_slots=40)
        index, home = torch.tensor(slots), data.slots[rows].long()
        pool.write(0, index, data.states[home])
        others = [slot for slot in range(40) if slot not in slots]
        before = stored(pool, others)
        assert torch.equal(run_rows(data, pool, rows, index), expected[:, rows])
        for a, b in zip(pool.checkpoint.tensors(), together.checkpoint.tensors(), strict=True):
            assert torch.equal(a[0, index], b[0, home])
        assert same(before, stored(pool, others))


def strided_inputs(*, recurrence: str, kernels: str | None = None) -> None:
    """Row 14: inputs as column slices of one packed tensor, off by 8 bytes: the bits of contiguous ones."""
    data, plan = draw_steps(recurrence, n_steps=3), make_options(length=2)
    pool, other = make_pool(data, plan), make_pool(data, plan)
    expected = take_steps(data, pool)
    take = step_of(data, plan, kernels)
    constants = {name: torch.stack((x, x), dim=1)[:, 0] for name, x in data.constants.items()}
    for t in range(3):
        streams = {name: stream[t] for name, stream in data.streams.items()}
        packed = torch.cat([torch.zeros(3, 2), *(x.flatten(1) for x in streams.values())], dim=1)
        sizes = [2, *(x[0].numel() for x in streams.values())]
        columns = packed.split(sizes, dim=1)[1:]
        parts = {n: c.unflatten(1, x.shape[1:]) for (n, x), c in zip(streams.items(), columns, strict=True)}
        assert not any(x.is_contiguous() for x in parts.values())
        assert next(iter(parts.values())).data_ptr() % 16 == 8
        assert torch.equal(take(**parts, **constants, pool=other, layer=0, slots=data.slots), expected[t])
        other.advance(data.slots)
    assert torch.equal(pool.checkpoint.codes, other.checkpoint.codes)


def spread(pool: StatePool, slot_stride: int, fill: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Storage of the caller's and a view of it for the codes of a pool of one layer, slots ``slot_stride`` apart."""
    codes = pool.checkpoint.codes
    size = (codes.shape[1] - 1) * slot_stride + codes[0, 0].numel()
    storage = torch.empty(size, dtype=codes.dtype, device=codes.device)
    if fill is not None:
        storage.fill_(fill)
    strides = (codes.shape[1] * slot_stride, slot_stride, *codes.stride()[2:])
    return storage, storage.as_strided(codes.shape, strides)


def strided_pool(*, recurrence: str, options: dict[str, Any], kernels: str | None = None, device: str = "cpu") -> None:
    """Rows 13, 36: a pool in an engine's pages, 1024 elements between slots: commits lie in the caller's view.

    The bits are those of a pool of its own, and nothing between the slots is written.
    """
    data, plan = draw_steps(recurrence, n_steps=5, device=device), make_options(**options)
    own, paged = make_pool(data, plan), make_pool(data, plan)
    codes = paged.checkpoint.codes
    storage, view = spread(paged, codes[0, 0].numel() + 1024, 42)
    paged.checkpoint.adopt(view)
    before = view.clone()
    assert torch.equal(take_steps(data, own), take_steps(data, paged, kernels=kernels))
    assert torch.equal(view, own.checkpoint.codes)
    assert not torch.equal(view, before), "no commit reached the caller's view"
    between = torch.ones(len(storage), dtype=torch.bool, device=device)
    between.as_strided(view.shape, view.stride()).fill_(False)
    assert int(between.sum()) == 3 * 1024
    assert bool((storage[between] == 42).all())


def far_offsets(*, recurrence: str, length: int) -> None:
    """A slot more than 2^31 elements behind the first: offsets have 64 bits. The memory between is never touched."""
    data, plan = draw_steps(recurrence, n_rows=1), make_options(length=length, recurrence="fp8", read="fp8")
    near, far = make_pool(data, plan), make_pool(data, plan)
    _, view = spread(far, 2**30 + 16, None)
    far.checkpoint.adopt(view)
    slots = torch.tensor([2], dtype=torch.int32)
    assert int(view.stride(1)) * 2 > 2**31
    assert int(view.stride(1)) < 2**31, "the stride itself is a 32-bit argument"
    outs = [run_rows(data, pool, data.live_rows, slots) for pool in (near, far)]
    assert torch.equal(*outs)
    assert same(stored(near), stored(far))


def snapshot(*, recurrence: str, options: dict[str, Any]) -> None:
    """Rows 28, 29: a copy of a slot with entries is refused or flushes it, starts at cursor 0 and is its own."""
    data, plan = draw_steps(recurrence, n_rows=1, n_steps=5), make_options(**options)
    pool, rows = make_pool(data, plan), data.live_rows
    source, target = torch.tensor([2]), torch.tensor([1])
    run_rows(data, pool, rows, source, n_steps=3)
    assert int(pool.cursor[2]) == 3
    before = stored(pool)
    try:
        pool.copy_slot(2, 1)
    except ValueError as error:
        assert "3 buffered entries" in str(error)
    else:
        raise AssertionError("a slot with entries was copied")
    assert same(before, stored(pool))
    pool.copy_slot(2, 1, flush_now=partial(find_kernels(recurrence).flush_now, **data.fold_constants()))
    assert pool.cursor[[1, 2]].tolist() == [0, 0]
    assert pool.tokens[[1, 2]].tolist() == [3, 3]
    held, old = stored(pool, target), copy.deepcopy(pool)
    first = run_rows(data, pool, rows, source)
    assert same(held, stored(pool, target)), "the snapshot moved with its source"
    assert torch.equal(run_rows(data, pool, rows, target), first)
    assert same(
        stored(pool, source)[: len(pool.checkpoint.tensors())], stored(pool, target)[: len(pool.checkpoint.tensors())]
    )
    assert not torch.equal(old.checkpoint.codes, pool.checkpoint.codes)
