"""Argument checks shared by the kernels and twins of all recurrences: ValueError before anything is written."""

from __future__ import annotations

import torch

from driftgate.kernels.contract import Recurrence
from driftgate.kernels.pool import StatePool

__all__ = ["check_inputs", "check_kind", "check_recurrence", "check_rows", "check_slots"]


def check_kind(pool: StatePool, *, step_by_step: bool) -> None:
    """Check that a pool belongs to the baseline or to replay: a step of the other kind would ignore buffer and copy.

    Raises:
        ValueError: says which function the pool is for.
    """
    if pool.options.step_by_step is not step_by_step:
        wanted, other = ("the step-by-step baseline (L = 0)", "replay_step") if step_by_step else (
            "a replay plan with L >= 1", "decode_step"
        )  # fmt: skip
        raise ValueError(f"pool: expected {wanted}, got L = {pool.options.length}; call {other}")


def check_rows(pool: StatePool, layer: int, slots: torch.Tensor, pad_slot: int) -> None:
    """Check layer and slots of a step.

    Raises:
        ValueError: names argument, expected and got.
    """
    if not 0 <= layer < pool.n_layers:
        raise ValueError(f"layer: expected 0 to {pool.n_layers - 1}, got {layer}")
    if 0 <= pad_slot < pool.n_slots and pad_slot != 0:
        raise ValueError(f"pad_slot: expected a number that is no slot, or 0, got {pad_slot}")
    check_slots(pool, slots, pad_slot)


def check_slots(pool: StatePool, slots: torch.Tensor, pad_slot: int | None) -> None:
    """Check the slots of a batch; pad_slot None: rows without a slot have no place in it.

    Slot numbers are compared with the pool on a CPU only: on a GPU it would cost a synchronisation.

    Raises:
        ValueError: what was expected and got.
    """
    if slots.ndim != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots: expected [B] int32 or int64, got {tuple(slots.shape)} {slots.dtype}")
    if not slots.is_contiguous():
        raise ValueError(f"slots: expected contiguous, got stride {slots.stride(0)}; call slots.contiguous()")
    if slots.device.type != pool.device.type:
        raise ValueError(f"slots: expected device {pool.device}, got {slots.device}")
    if slots.device.type == "cpu" and len(slots):
        real = slots if pad_slot is None else slots[slots != pad_slot]
        if len(real) and (int(real.min()) < 0 or int(real.max()) >= pool.n_slots):
            padding = "" if pad_slot is None else f" or pad_slot {pad_slot}"
            raise ValueError(f"slots: expected 0 to {pool.n_slots - 1}{padding}, got {real.tolist()}")
        if len(real) != len(real.unique()):
            raise ValueError(f"slots: expected each slot once, got {real.tolist()}")


def check_recurrence(pool: StatePool, recurrence: Recurrence) -> None:
    """Check that a pool was made for a recurrence.

    Raises:
        ValueError: names the recurrence of the pool.
    """
    if pool.recurrence is not recurrence:
        raise ValueError(
            f"pool: expected recurrence {recurrence.value}, got {pool.recurrence.value}; "
            f"make it with StatePool(..., recurrence=Recurrence.{recurrence.name})"
        )


def check_inputs(pool: StatePool, **inputs: tuple[torch.Tensor, tuple[int, ...], torch.dtype]) -> None:
    """Check shapes, types and devices of one step's inputs.

    Args:
        pool: the pool on whose device they have to be.
        inputs: by argument name, the tensor with the shape and type that it must have.

    Raises:
        ValueError: names argument, expected and got.
    """
    for name, (tensor, expected, dtype) in inputs.items():
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(tensor.shape)}")
        if tensor.dtype != dtype:
            raise ValueError(f"{name}: expected {dtype}, got {tensor.dtype}")
        if tensor.device.type != pool.device.type:
            raise ValueError(f"{name}: expected device {pool.device}, got {tensor.device}")
