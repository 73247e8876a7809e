"""A step's arguments, checked and under the names that kernels and twins share: one function per form of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from driftgate.kernels.contract import HeadShape, Recurrence
from driftgate.kernels.pool import StatePool
from driftgate.kernels.validate import check_inputs, check_kind, check_recurrence, check_rows, check_slots

__all__ = ["StepArguments", "check_delta", "check_flush", "check_mamba2", "split_mixed_qkv"]


@dataclass(frozen=True, kw_only=True)
class StepArguments:
    """Inputs of one step, or of a window where they have an axis T behind B.

    Attributes:
        q, k: [B, H, d_k]; v: [B, HV, d_v] of the pool's activation type (Mamba-2: C, B, x).
        g: [B, HV] float32, KDA [B, HV, d_k]; Mamba-2: A [HV].
        beta: [B, HV] float32, β or dt.
        D: [HV] float32 or None; z: as v or None.
        scale: multiplies q.
        normalise: divide q and k by sqrt(sum x² + 1e-6).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    D: torch.Tensor | None = None
    z: torch.Tensor | None = None
    scale: float = 1.0
    normalise: bool = False


def split_mixed_qkv(mixed_qkv: torch.Tensor, shape: HeadShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views q, k, v of what engines keep in one tensor after the convolution.

    Args:
        mixed_qkv: [..., 2·H·d_k + HV·d_v], all heads of q, then of k, then of v.
        shape: heads of the layer.

    Returns:
        q, k [..., H, d_k] and v [..., HV, d_v]; a step stages them, so that bits do not depend on the packing.

    Raises:
        ValueError: a last axis that does not fit.
    """
    keys, values = shape.key_heads * shape.d_k, shape.value_heads * shape.d_v
    if mixed_qkv.shape[-1] != 2 * keys + values:
        raise ValueError(f"mixed_qkv: expected a last axis of {2 * keys + values}, got {mixed_qkv.shape[-1]}")
    q, k, v = mixed_qkv.split((keys, keys, values), dim=-1)
    heads = (shape.key_heads, shape.d_k)
    return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, (shape.value_heads, shape.d_v))


def check_delta(
    recurrence: Recurrence,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    pad_slot: int,
    scale: float | None,
    qk_l2norm: bool,
    step_by_step: bool,
    window: tuple[int, ...] = (),
) -> StepArguments:
    """Arguments of Gated DeltaNet and Kimi Delta Attention; ``window`` is (T,) for a speculative window.

    Raises:
        ValueError: an argument that does not fit, before anything is written.
    """
    check_kind(pool, step_by_step=step_by_step)
    check_recurrence(pool, recurrence)
    check_rows(pool, layer, slots, pad_slot)
    shape, lead, kind = pool.shape, (len(slots), *window), pool.activation_dtype
    keys, heads = (*lead, shape.key_heads, shape.d_k), (*lead, shape.value_heads)
    gate = (*heads, shape.d_k) if recurrence.channel_decay else heads
    check_inputs(
        pool,
        q=(q, keys, kind),
        k=(k, keys, kind),
        v=(v, (*heads, shape.d_v), kind),
        g=(g, gate, torch.float32),
        beta=(beta, heads, torch.float32),
    )
    scale = shape.d_k**-0.5 if scale is None else scale
    return StepArguments(q=q, k=k, v=v, g=g, beta=beta, scale=scale, normalise=qk_l2norm)


def check_mamba2(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    *,
    A: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    pad_slot: int,
    step_by_step: bool,
    window: tuple[int, ...] = (),
) -> StepArguments:
    """Arguments of Mamba-2; ``window`` is (T,) for a speculative window.

    Raises:
        ValueError: an argument that does not fit, before anything is written.
    """
    check_kind(pool, step_by_step=step_by_step)
    check_recurrence(pool, Recurrence.MAMBA2)
    check_rows(pool, layer, slots, pad_slot)
    shape, lead, kind = pool.shape, (len(slots), *window), pool.activation_dtype
    keys, heads = (*lead, shape.key_heads, shape.d_k), (*lead, shape.value_heads)
    wanted = {
        "x": (x, (*heads, shape.d_v), kind),
        "B": (B, keys, kind),
        "C": (C, keys, kind),
        "dt": (dt, heads, torch.float32),
        "A": (A, (shape.value_heads,), torch.float32),
    }
    if D is not None:
        wanted["D"] = (D, (shape.value_heads,), torch.float32)
    if z is not None:
        wanted["z"] = (z, (*heads, shape.d_v), kind)
    check_inputs(pool, **wanted)
    return StepArguments(q=C, k=B, v=x, g=A, beta=dt, D=D, z=z)


def check_flush(recurrence: Recurrence, pool: StatePool, slots: torch.Tensor, *, A: torch.Tensor | None = None) -> None:
    """Arguments of ``flush_now``: slots [n] without padding; A [n_layers, HV] float32 of Mamba-2, else None.

    Raises:
        ValueError: an argument that does not fit, before anything is written.
    """
    check_recurrence(pool, recurrence)
    check_slots(pool, slots, None)
    if A is not None:
        check_inputs(pool, A=(A, (pool.n_layers, pool.shape.value_heads), torch.float32))
        if not A.is_contiguous():
            raise ValueError(f"A: expected contiguous, got strides {A.stride()}; call A.contiguous()")
