"""Torch twin of the Mamba-2 decode kernels, in any compute dtype; what twins share is in ``../twin.py``.

Recurrence (Dao, Gu, Transformers are SSMs, arXiv 2405.21060; per head, state S [d_head, d_state]):
    S = exp(A·dt)·S + x (dt·B)ᵀ;   y = S C + D·x, times silu(z)
"""

from __future__ import annotations

import torch

from driftgate.kernels.arguments import check_flush, check_mamba2
from driftgate.kernels.contract import Recurrence
from driftgate.kernels.pool import PAD_SLOT, StatePool
from driftgate.kernels.twin import add_outer, decay, twin_baseline, twin_flush, twin_replay
from driftgate.kernels.twin_verify import twin_window
from driftgate.kernels.window import check_window

__all__ = ["decode_step", "flush_now", "replay_step", "step", "verify_window"]


def step(
    state: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    by_matmul: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of the recurrence.

    Args:
        state: [..., d_head, d_state].
        k: dt·B [..., d_state]; v: x [..., d_head]; g: A·dt [...].
        beta, by_matmul: of no effect; the other recurrences use them.

    Returns:
        The new state and what was added, x.
    """
    return add_outer(decay(state, g), v, k), v


def decode_step(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    *,
    A: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    pad_slot: int = PAD_SLOT,
    compute_dtype: torch.dtype = torch.float32,
    alternative: bool = False,
) -> torch.Tensor:
    """Step-by-step baseline: reads and writes the checkpoint. Arguments and result as ``decode.decode_step``.

    ``alternative`` adds in another order (a matrix product), for the noise floor.
    """
    arguments = check_mamba2(
        x, B, C, dt, A=A, D=D, z=z, pool=pool, layer=layer, slots=slots, pad_slot=pad_slot, step_by_step=True
    )
    return twin_baseline(
        step, pool, layer, slots, arguments, pad_slot=pad_slot, compute_dtype=compute_dtype, alternative=alternative
    )


def replay_step(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    *,
    A: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    pad_slot: int = PAD_SLOT,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Replay step, a flush where ``pool.flush`` says so. Arguments and result as ``decode.replay_step``."""
    arguments = check_mamba2(
        x, B, C, dt, A=A, D=D, z=z, pool=pool, layer=layer, slots=slots, pad_slot=pad_slot, step_by_step=False
    )
    return twin_replay(step, pool, layer, slots, arguments, pad_slot=pad_slot, compute_dtype=compute_dtype)


def flush_now(
    pool: StatePool, slots: torch.Tensor, *, A: torch.Tensor, compute_dtype: torch.dtype = torch.float32
) -> None:
    """Fold the buffers of slots [n] without a step, in every layer; a slot at cursor 0 is left as it is."""
    check_flush(Recurrence.MAMBA2, pool, slots, A=A)
    twin_flush(step, pool, slots, rates=A, qk_l2norm=False, compute_dtype=compute_dtype)


def verify_window(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    *,
    A: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    pad_slot: int = PAD_SLOT,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Verify a speculative window per row, token by token. Arguments, result and errors as ``decode.verify_window``."""
    window = check_window(pool, x, slots, lengths, pad_slot)
    arguments = check_mamba2(
        x, B, C, dt, A=A, D=D, z=z, pool=pool, layer=layer, slots=slots, pad_slot=pad_slot, step_by_step=False,
        window=window,
    )  # fmt: skip
    return twin_window(step, pool, layer, slots, lengths, arguments, pad_slot=pad_slot, compute_dtype=compute_dtype)
