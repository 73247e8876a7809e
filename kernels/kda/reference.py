"""Torch twin of the Kimi Delta Attention decode kernels, in any compute dtype; what twins share is in ``../twin.py``.

Recurrence (Kimi Linear, arXiv 2510.26692, eq. 1; per value head, state S [d_v, d_k]):
    S = S·Diag(exp(g));   u = β(v − S k);   S = S + u kᵀ;   o = S q
with k, q divided by sqrt(sum x² + 1e-6) where the model asks for it, and q multiplied by d_k^-1/2.
"""

from __future__ import annotations

import torch

from driftgate.kernels.arguments import check_delta, check_flush
from driftgate.kernels.contract import Recurrence
from driftgate.kernels.pool import PAD_SLOT, StatePool
from driftgate.kernels.twin import add_outer, contract, decay, twin_baseline, twin_flush, twin_replay
from driftgate.kernels.twin_verify import twin_window
from driftgate.kernels.window import check_window

__all__ = ["decode_step", "flush_now", "replay_step", "step", "verify_window"]

RECURRENCE = Recurrence.KDA


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
        state: [..., d_v, d_k].
        k: [..., d_k], already normalised; v: [..., d_v]; g: [..., d_k]; beta: [...].
        by_matmul: form S k as a matrix product, which adds in another order.

    Returns:
        The new state and the correction u [..., d_v].
    """
    state = decay(state, g)
    u = beta[..., None] * (v - contract(state, k, by_matmul=by_matmul))
    return add_outer(state, u, k), u


def decode_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    pad_slot: int = PAD_SLOT,
    scale: float | None = None,
    qk_l2norm: bool = True,
    compute_dtype: torch.dtype = torch.float32,
    alternative: bool = False,
) -> torch.Tensor:
    """Step-by-step baseline: reads and writes the checkpoint. Arguments and result as ``decode.decode_step``.

    ``alternative`` adds in another order (a matrix product), for the noise floor.
    """
    arguments = check_delta(
        RECURRENCE, q, k, v, g, beta, pool=pool, layer=layer, slots=slots, pad_slot=pad_slot, scale=scale,
        qk_l2norm=qk_l2norm, step_by_step=True,
    )  # fmt: skip
    return twin_baseline(
        step, pool, layer, slots, arguments, pad_slot=pad_slot, compute_dtype=compute_dtype, alternative=alternative
    )


def replay_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    pad_slot: int = PAD_SLOT,
    scale: float | None = None,
    qk_l2norm: bool = True,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Replay step, a flush where ``pool.flush`` says so. Arguments and result as ``decode.replay_step``."""
    arguments = check_delta(
        RECURRENCE, q, k, v, g, beta, pool=pool, layer=layer, slots=slots, pad_slot=pad_slot, scale=scale,
        qk_l2norm=qk_l2norm, step_by_step=False,
    )  # fmt: skip
    return twin_replay(step, pool, layer, slots, arguments, pad_slot=pad_slot, compute_dtype=compute_dtype)


def flush_now(
    pool: StatePool, slots: torch.Tensor, *, qk_l2norm: bool = True, compute_dtype: torch.dtype = torch.float32
) -> None:
    """Fold the buffers of slots [n] without a step, in every layer; a slot at cursor 0 is left as it is."""
    check_flush(RECURRENCE, pool, slots)
    twin_flush(step, pool, slots, rates=None, qk_l2norm=qk_l2norm, compute_dtype=compute_dtype)


def verify_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    pad_slot: int = PAD_SLOT,
    scale: float | None = None,
    qk_l2norm: bool = True,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Verify a speculative window per row, token by token. Arguments, result and errors as ``decode.verify_window``."""
    window = check_window(pool, q, slots, lengths, pad_slot)
    arguments = check_delta(
        RECURRENCE, q, k, v, g, beta, pool=pool, layer=layer, slots=slots, pad_slot=pad_slot, scale=scale,
        qk_l2norm=qk_l2norm, step_by_step=False, window=window,
    )  # fmt: skip
    return twin_window(step, pool, layer, slots, lengths, arguments, pad_slot=pad_slot, compute_dtype=compute_dtype)
