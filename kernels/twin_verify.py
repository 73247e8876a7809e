"""Torch twin of the speculative windows of all recurrences, in any compute dtype: token by token on a state.

``output_only`` never builds a state in the kernel; in exact arithmetic its products are those of the state that the
stored corrections û give, and the twin builds that one.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from driftgate.kernels.arguments import StepArguments
from driftgate.kernels.contract import Fold, Readout
from driftgate.kernels.pool import StatePool
from driftgate.kernels.twin import Entries, Rows, Step, contract, fold_entries, read_rows, write_back

__all__ = ["twin_window"]


def twin_window(
    step: Step,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    arguments: StepArguments,
    *,
    pad_slot: int,
    compute_dtype: torch.dtype,
) -> torch.Tensor:
    """Twin of ``verify.take_window``."""
    out = torch.zeros_like(arguments.v)
    live = slots != pad_slot
    if not bool(live.any()):
        return out
    lengths = torch.where(live, lengths, 0)
    rates = None if pool.recurrence.delta_rule else arguments.g.to(compute_dtype)
    state = _states_before(
        step, pool, layer, slots[live].long(), lengths[live], rates, arguments.normalise, compute_dtype
    )
    for i in range(int(lengths.max())):
        going = lengths[live] > i
        rows = read_rows(
            step, pool, layer, torch.where(lengths > i, slots, pad_slot), _take_token(arguments, i), pad_slot,
            compute_dtype,
        )  # fmt: skip
        state[going], u = step(state[going], rows.k, rows.v, rows.g, rows.beta)
        rows.write_output(contract(state[going], rows.q))
        out[:, i] = rows.out
        _append(rows, u, i)
    return out


def _states_before(
    step: Step,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    rates: torch.Tensor | None,
    qk_l2norm: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What a window's tokens meet, [slots, HV, d_v, d_k]; rows whose buffer has no room for another window flush."""
    options, shape = pool.options, pool.shape
    flushing = pool.cursor[slots] + lengths + options.window > options.length
    state = torch.empty(len(slots), shape.value_heads, shape.d_v, shape.d_k, dtype=dtype, device=slots.device)
    as_read = Fold.EXACT if options.readout is Readout.EXACT_READOUT else Fold.CACHED
    for rows, states, fold in (
        (flushing, pool.checkpoint, options.fold),
        (~flushing, pool.read_states, as_read),
    ):
        if bool(rows.any()):
            entries = Entries(pool, layer, slots[rows], rates, qk_l2norm, dtype)
            state[rows] = fold_entries(step, entries, states.read(layer, slots[rows]).to(dtype), fold)
    if bool(flushing.any()):
        write_back(pool, layer, slots[flushing], state[flushing], ahead=0)
    return state


def _take_token(arguments: StepArguments, i: int) -> StepArguments:
    """Inputs of token i of every row; A and D of Mamba-2 are the same for all."""
    a = arguments
    parts = {name: getattr(a, name)[:, i] for name in ("q", "k", "v", "beta", "z") if getattr(a, name) is not None}
    if a.g.ndim > 1:
        parts["g"] = a.g[:, i]
    return replace(a, **parts)


def _append(rows: Rows, u: torch.Tensor, i: int) -> None:
    """Write a token's inputs and correction i places behind each row's cursor."""
    pool = rows.pool
    place = (pool.base[rows.slots] + pool.cursor[rows.slots] + i).long() % pool.options.places
    for name, value in (rows.raw | {"corrections": u}).items():
        buffer = getattr(pool, name)
        if buffer is not None:
            buffer[rows.layer, rows.slots, :, place] = value.to(buffer.dtype)
