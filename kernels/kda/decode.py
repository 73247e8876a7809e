"""Kimi Delta Attention decode in Triton: baseline, replay and flush; the kernels are those of ``../replay.py``."""

from __future__ import annotations

import torch

from driftgate.kernels.arguments import check_delta, check_flush
from driftgate.kernels.contract import Recurrence
from driftgate.kernels.dispatch import fold_now, require, take_baseline_step, take_replay_step
from driftgate.kernels.launch import Launch
from driftgate.kernels.pool import PAD_SLOT, StatePool
from driftgate.kernels.verify import take_window
from driftgate.kernels.window import check_window

__all__ = ["decode_step", "flush_now", "replay_step", "require", "verify_window"]

RECURRENCE = Recurrence.KDA


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
    launch: Launch | None = None,
    alternative: bool = False,
) -> torch.Tensor:
    """Take one step per row with the step-by-step baseline kernel.

    Recurrence: S = S·Diag(exp(g)); u = β(v − S k); S = S + u kᵀ; o = S q (arXiv 2510.26692, eq. 1), in FP32; the state
    is rounded once, when it is stored in the pool's recurrence format. Twin: ``reference.decode_step``.

    Args:
        q, k: [B, H, d_k] of the pool's activation type, any strides (staged when not contiguous and aligned).
        v: [B, HV, d_v], likewise.
        g: [B, HV, d_k] float32, log decay. beta: [B, HV] float32, β.
        pool: its checkpoint is updated in place; cursors are left to ``pool.advance``.
        layer: recurrent layer, counted from 0.
        slots: [B] int32 or int64, each slot at most once.
        pad_slot: rows with this slot write zeros to their output and nothing else.
        scale: multiplies q; None for d_k^-1/2.
        qk_l2norm: divide q and k by sqrt(sum x² + 1e-6).
        launch: None for the table's configuration.
        alternative: the table's other legal configuration, which adds in another order (for the noise floor).

    Returns:
        o [B, HV, d_v] of v's type.

    Raises:
        ValueError: an argument that does not fit; nothing is written.
    """
    arguments = check_delta(
        RECURRENCE, q, k, v, g, beta, pool=pool, layer=layer, slots=slots, pad_slot=pad_slot, scale=scale,
        qk_l2norm=qk_l2norm, step_by_step=True,
    )  # fmt: skip
    return take_baseline_step(pool, layer, slots, arguments, pad_slot=pad_slot, launch=launch, alternative=alternative)


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
    launch: Launch | None = None,
) -> torch.Tensor:
    """Take one step per row with the replay kernel: a flush where ``pool.flush`` says so, else a buffered step.

    A flush reads the checkpoint, folds the buffer, takes the step as the baseline does, outputs from the FP32 state
    and writes checkpoint and copy (the copy from what the checkpoint reads back as). Any other step reads the copy,
    or the checkpoint where there is none, and writes its buffer entry only. Arguments, result, errors: ``decode_step``.
    """
    arguments = check_delta(
        RECURRENCE, q, k, v, g, beta, pool=pool, layer=layer, slots=slots, pad_slot=pad_slot, scale=scale,
        qk_l2norm=qk_l2norm, step_by_step=False,
    )  # fmt: skip
    return take_replay_step(pool, layer, slots, arguments, pad_slot=pad_slot, launch=launch)


def flush_now(pool: StatePool, slots: torch.Tensor, *, qk_l2norm: bool = True, launch: Launch | None = None) -> None:
    """Fold the buffers of slots [n] without a step, in every layer; a slot at cursor 0 is left as it is.

    For prefix snapshots and prompt continuation. Requantising is not idempotent to the bit, hence the exception.
    """
    check_flush(RECURRENCE, pool, slots)
    fold_now(pool, slots, rates=None, normalise=qk_l2norm, launch=launch)


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
    launch: Launch | None = None,
) -> torch.Tensor:
    """Verify a speculative window per row in one call: outputs of all its tokens, their entries behind the buffer.

    Tokens of a row: the last sampled one and its drafts. Each call is followed by one ``pool.commit`` once all layers
    verified: until then cursors stand, and a row that flushed would be folded twice. A row with
    h + lengths + T_max > L, T_max = ``pool.options.window``, flushes: its h entries, never a draft, are folded from
    the checkpoint into checkpoint and copy, and its outputs come from the folded FP32 state. ``pool.flush`` and
    ``pool.force_flush`` concern single steps alone. Twin: ``reference.verify_window``.

    Args:
        q, k, v, g, beta: as ``decode_step`` has them, with an axis T behind B; T is 1 to T_max.
        lengths: [B] int32, tokens of each row's window, 1 to T; behind them inputs may be anything, NaN too,
            outputs are zero and nothing is written. Their values are checked on a CPU only.
        pool: its plan has a window.
        layer, slots, pad_slot, scale, qk_l2norm, launch: as ``decode_step`` has them.

    Returns:
        o [B, T, HV, d_v] of v's type.

    Raises:
        ValueError: an argument that does not fit; nothing is written.
    """
    window = check_window(pool, q, slots, lengths, pad_slot)
    arguments = check_delta(
        RECURRENCE, q, k, v, g, beta, pool=pool, layer=layer, slots=slots, pad_slot=pad_slot, scale=scale,
        qk_l2norm=qk_l2norm, step_by_step=False, window=window,
    )  # fmt: skip
    return take_window(pool, layer, slots, lengths, arguments, pad_slot=pad_slot, launch=launch)
