"""Mamba-2 decode in Triton: baseline step, replay step and flush; the kernels are those of ``../replay.py``."""

from __future__ import annotations

import torch

from driftgate.kernels.arguments import check_flush, check_mamba2
from driftgate.kernels.contract import Recurrence
from driftgate.kernels.dispatch import fold_now, require, take_baseline_step, take_replay_step
from driftgate.kernels.launch import Launch
from driftgate.kernels.pool import PAD_SLOT, StatePool
from driftgate.kernels.verify import take_window
from driftgate.kernels.window import check_window

__all__ = ["decode_step", "flush_now", "replay_step", "require", "verify_window"]


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
    launch: Launch | None = None,
    alternative: bool = False,
) -> torch.Tensor:
    """Take one step per row with the step-by-step baseline kernel.

    Recurrence: S = exp(A·dt)·S + x (dt·B)ᵀ; y = S C + D·x, times silu(z) where z is given (Dao, Gu, *Transformers are
    SSMs*, arXiv 2405.21060), all in FP32, dt·B included; the state is rounded once, when it is stored in the pool's
    recurrence format. Twin: ``reference.decode_step``.

    Args:
        x: [B, HV, d_head] of the pool's activation type, any strides (staged when not contiguous and aligned).
        B, C: [B, G, d_state], likewise; the pool's key heads are the G groups.
        dt: [B, HV] float32, after bias, softplus and limits (``compute_dt``).
        A: [HV] float32, -exp(A_log).
        D: [HV] float32, or None.
        z: as x, or None.
        pool: its checkpoint is updated in place; cursors are left to ``pool.advance``.
        layer: recurrent layer, counted from 0.
        slots: [B] int32 or int64, each slot at most once.
        pad_slot: rows with this slot write zeros to their output and nothing else.
        launch: None for the table's configuration.
        alternative: the table's other legal configuration, which adds in another order (for the noise floor).

    Returns:
        y [B, HV, d_head] of x's type.

    Raises:
        ValueError: an argument that does not fit; nothing is written.
    """
    arguments = check_mamba2(
        x, B, C, dt, A=A, D=D, z=z, pool=pool, layer=layer, slots=slots, pad_slot=pad_slot, step_by_step=True
    )
    return take_baseline_step(pool, layer, slots, arguments, pad_slot=pad_slot, launch=launch, alternative=alternative)


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
    launch: Launch | None = None,
) -> torch.Tensor:
    """Take one step per row with the replay kernel: a flush where ``pool.flush`` says so, else a buffered step.

    A flush reads the checkpoint, folds the buffer, takes the step as the baseline does, outputs from the FP32 state
    and writes checkpoint and copy (the copy from what the checkpoint reads back as). Any other step reads the copy,
    or the checkpoint where there is none, and writes its buffer entry only. Arguments, result, errors: ``decode_step``.
    """
    arguments = check_mamba2(
        x, B, C, dt, A=A, D=D, z=z, pool=pool, layer=layer, slots=slots, pad_slot=pad_slot, step_by_step=False
    )
    return take_replay_step(pool, layer, slots, arguments, pad_slot=pad_slot, launch=launch)


def flush_now(pool: StatePool, slots: torch.Tensor, *, A: torch.Tensor, launch: Launch | None = None) -> None:
    """Fold the buffers of slots [n] without a step, in every layer; a slot at cursor 0 is left as it is.

    For prefix snapshots and prompt continuation. Requantising is not idempotent to the bit, hence the exception.

    Args:
        pool, slots: as ``decode_step`` has them, without padding.
        A: [n_layers, HV] float32.
        launch: None for the table's configuration.
    """
    check_flush(Recurrence.MAMBA2, pool, slots, A=A)
    fold_now(pool, slots, rates=A, normalise=False, launch=launch)


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
    launch: Launch | None = None,
) -> torch.Tensor:
    """Verify a speculative window per row in one call: outputs of all its tokens, their entries behind the buffer.

    Tokens of a row: the last sampled one and its drafts. Each call is followed by one ``pool.commit`` once all layers
    verified: until then cursors stand, and a row that flushed would be folded twice. A row with
    h + lengths + T_max > L, T_max = ``pool.options.window``, flushes: its h entries, never a draft, are folded from
    the checkpoint into checkpoint and copy, and its outputs come from the folded FP32 state. ``pool.flush`` and
    ``pool.force_flush`` concern single steps alone. Twin: ``reference.verify_window``.

    Args:
        x, B, C, dt, z: as ``decode_step`` has them, with an axis T behind B; T is 1 to T_max.
        A, D: [HV] float32, as ``decode_step`` has them.
        lengths: [B] int32, tokens of each row's window, 1 to T; behind them inputs may be anything, NaN too,
            outputs are zero and nothing is written. Their values are checked on a CPU only.
        pool: its plan has a window.
        layer, slots, pad_slot, launch: as ``decode_step`` has them.

    Returns:
        y [B, T, HV, d_head] of x's type.

    Raises:
        ValueError: an argument that does not fit; nothing is written.
    """
    window = check_window(pool, x, slots, lengths, pad_slot)
    arguments = check_mamba2(
        x, B, C, dt, A=A, D=D, z=z, pool=pool, layer=layer, slots=slots, pad_slot=pad_slot, step_by_step=False,
        window=window,
    )  # fmt: skip
    return take_window(pool, layer, slots, lengths, arguments, pad_slot=pad_slot, launch=launch)
