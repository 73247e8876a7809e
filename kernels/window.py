"""Speculative windows: the checks that kernel and twin share, ValueError before anything is written."""

from __future__ import annotations

import torch

from driftgate.kernels.pool import StatePool

__all__ = ["check_window"]


def check_window(
    pool: StatePool, first: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, pad_slot: int
) -> tuple[int, ...]:
    """Check what a window has beside the inputs of a step.

    The values of ``lengths`` are looked at on a CPU only: on a GPU it would cost a synchronisation.

    Args:
        pool: its plan has to have a window.
        first: first of the inputs, [B, T, heads, d].
        slots: [B] int32 or int64; ``check_rows`` looks at it.
        lengths: [B] int32, tokens of each row; those of padded rows may be anything.
        pad_slot: marks padded rows.

    Returns:
        (T,), what inputs have between B and the heads.

    Raises:
        ValueError: names argument, expected and got.
    """
    greatest = pool.options.window
    if not greatest:
        raise ValueError(f"pool: expected a plan with a window, got window = 0 at L = {pool.options.length}")
    if first.ndim != 4:
        raise ValueError(f"inputs: expected [B, T, heads, d], got {tuple(first.shape)}")
    n_tokens = first.shape[1]
    if not 1 <= n_tokens <= greatest:
        raise ValueError(f"inputs: expected T of 1 to the plan's window = {greatest}, got {n_tokens}")
    if lengths.shape != slots.shape or lengths.dtype != torch.int32:
        raise ValueError(
            f"lengths: expected {tuple(slots.shape)} int32 as slots has, got {tuple(lengths.shape)} {lengths.dtype}"
        )
    if lengths.device.type != pool.device.type:
        raise ValueError(f"lengths: expected device {pool.device}, got {lengths.device}")
    if not lengths.is_contiguous():
        raise ValueError(f"lengths: expected contiguous, got stride {lengths.stride(0)}; call lengths.contiguous()")
    if lengths.device.type == "cpu":
        live = lengths[slots != pad_slot]
        if bool(((live < 1) | (live > n_tokens)).any()):
            raise ValueError(f"lengths: expected 1 to T = {n_tokens}, got {live.tolist()}")
    return (n_tokens,)
