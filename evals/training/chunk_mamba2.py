"""Mamba-2's recurrence over whole sequences, with a cheap backward pass; for training only.

Same values as the chunked function that transformers ships, with B and C kept by group, and the states between chunks
in one product with the triangle of their decays.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from driftgate.evals.training.delta_rule import disturb

__all__ = ["chunk_selective_scan"]

CHUNK = 64


def _decays(total: Tensor) -> Tensor:
    """exp(G[i] - G[j]) for j <= i, else 0: [..., n, n] for summed log decays [..., n]."""
    n = total.shape[-1]
    upper = torch.ones(n, n, dtype=torch.bool, device=total.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(upper, float("-inf")).exp()


def chunk_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = CHUNK,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    read_noise: Tensor | None = None,
    **_: object,
) -> Tensor:
    """Outputs y [B, T, H, P] float32 for x [B, T, H, P], dt [B, T, H], A [H], B and C [B, T, G, N], D and dt_bias [H].

    Takes the arguments of the function in transformers that it stands in for while training; it keeps no state, so a
    call with a state raises ValueError, and T must be a multiple of 64. ``chunk_size`` is of no effect on the values.
    With ``read_noise`` each chunk reads a disturbed copy of the state before it.
    """
    if initial_states is not None or return_final_states:
        raise ValueError("the training path keeps no state: call the model with use_cache=False")
    batch, length, heads, width = hidden_states.shape
    groups = B.shape[2]
    if length % CHUNK:
        raise ValueError(f"length must be a multiple of {CHUNK}, got {length}")
    with torch.autocast(hidden_states.device.type, enabled=False):
        step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)

        def split(x: Tensor, *heading: int) -> Tensor:
            """[B, T, heads, ...] -> [B, *heading, chunks, 64, ...]."""
            x = x.float().reshape(batch, length // CHUNK, CHUNK, *heading, *x.shape[3:])
            return x.movedim((1, 2), (1 + len(heading), 2 + len(heading)))

        per_group = heads // groups
        x = split(hidden_states, groups, per_group)
        dx = x * split(step, groups, per_group)[..., None]
        total = split(step * A.float(), groups, per_group).cumsum(-1)
        b, c = split(B, groups), split(C, groups)
        scores = (c @ b.transpose(-1, -2))[:, :, None]
        inner = (scores * _decays(total)) @ dx
        last = total[..., -1]
        added = (dx * (last[..., None] - total).exp()[..., None]).transpose(-1, -2) @ b[:, :, None]
        before = F.pad(last.cumsum(-1), (1, 0))  # log decay from the start to each chunk's start
        carried = _decays(before)[..., :-1, 1:]
        states = (carried @ added.flatten(-2)).reshape(added.shape)
        states = disturb(states, read_noise)
        outer = (c[:, :, None] @ states.transpose(-1, -2)) * total.exp()[..., None]
        y: Tensor = (inner + outer).movedim((1, 2), (3, 4)).reshape(batch, length, heads, width)
        return y if D is None else y + D.float()[:, None] * hidden_states.float()
