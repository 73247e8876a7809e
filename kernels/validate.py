"""Argument checks shared by the kernels and twins of all recurrences: ValueError before anything is written."""

from __future__ import annotations

import torch

from driftgate.kernels.pool import StatePool

__all__ = ["check_gates", "check_kind", "check_rows"]


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

    Slot numbers are compared with the pool on a CPU only: on a GPU it would cost a synchronisation.

    Raises:
        ValueError: names argument, expected and got.
    """
    if not 0 <= layer < pool.n_layers:
        raise ValueError(f"layer: expected 0 to {pool.n_layers - 1}, got {layer}")
    if slots.ndim != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots: expected [B] int32 or int64, got {tuple(slots.shape)} {slots.dtype}")
    if slots.device.type != pool.device.type:
        raise ValueError(f"slots: expected device {pool.device}, got {slots.device}")
    if 0 <= pad_slot < pool.n_slots and pad_slot != 0:
        raise ValueError(f"pad_slot: expected a number that is no slot, or 0, got {pad_slot}")
    if slots.device.type == "cpu" and len(slots):
        real = slots[slots != pad_slot]
        if len(real) and (int(real.min()) < 0 or int(real.max()) >= pool.n_slots):
            raise ValueError(f"slots: expected 0 to {pool.n_slots - 1} or pad_slot {pad_slot}, got {real.tolist()}")
        if len(real) != len(real.unique()):
            raise ValueError(f"slots: expected each slot once, got {real.tolist()}")


def check_gates(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: dict[str, torch.Tensor], pool: StatePool, rows: int
) -> None:
    """Check shapes, types and devices of one step's inputs.

    Args:
        q, k: [B, H, d_k]; v: [B, HV, d_v], all of the pool's activation type.
        gates: float32 [B, HV] tensors by argument name.
        pool: the pool whose shape they have to fit.
        rows: B.

    Raises:
        ValueError: names argument, expected and got.
    """
    shape = pool.shape
    wanted = {
        "q": (q, (rows, shape.key_heads, shape.d_k), pool.activation_dtype),
        "k": (k, (rows, shape.key_heads, shape.d_k), pool.activation_dtype),
        "v": (v, (rows, shape.value_heads, shape.d_v), pool.activation_dtype),
    } | {name: (gate, (rows, shape.value_heads), torch.float32) for name, gate in gates.items()}
    for name, (tensor, expected, dtype) in wanted.items():
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(tensor.shape)}")
        if tensor.dtype != dtype:
            raise ValueError(f"{name}: expected {dtype}, got {tensor.dtype}")
        if tensor.device.type != pool.device.type:
            raise ValueError(f"{name}: expected device {pool.device}, got {tensor.device}")
