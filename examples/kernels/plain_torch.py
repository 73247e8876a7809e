"""Gated DeltaNet decode in plain torch, for `driftgate certify --kernel plain_torch:step` in this folder.

It keeps the tolerance and differs in bits: torch adds in another order than driftgate's baseline, and divides where
that multiplies. A matrix product in the place of the sums would add differently for each size of the batch (I4).
"""

from __future__ import annotations

import torch


def step(
    inputs: dict[str, torch.Tensor],
    state: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
    pad_slot: int,
) -> torch.Tensor:
    """One step per row; state [slots, HV, d_v, d_k] is updated in place, padded rows give zeros."""
    live = (slots != pad_slot).nonzero()[:, 0]
    places = slots[live].long()
    q, k, v, g, beta = (inputs[name][live].float() for name in ("q", "k", "v", "g", "beta"))
    if qk_l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q * scale, k))
    new = state[places].float() * g.exp()[..., None, None]
    u = beta[..., None] * (v - (new * k[..., None, :]).sum(-1))
    new = new + u[..., None] * k[..., None, :]
    state[places] = new.to(state.dtype)
    out = torch.zeros_like(inputs["v"])
    out[live] = (new * q[..., None, :]).sum(-1).to(out.dtype)
    return out


step.recurrence = "gdn"
step.formats = ("fp32", "bf16")
