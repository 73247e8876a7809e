"""Kimi Delta Attention over whole sequences, with a cheap backward pass; for training only.

Same values as the chunked function that transformers ships, which materialises a decay for every pair of tokens and
channel. Here a pair's decay is split into two factors, one of each token, relative to the first token of the reader's
block; a block is so short that neither factor overflows while no log decay is below ``LOWEST``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from driftgate.evals.training.chunk import invert_unit_lower

__all__ = ["LOWEST", "chunk_kimi_delta"]

BLOCK = 16
LOWEST = -5.0  # exp(BLOCK * 5) is within FP32; what decays faster than exp(-5) a token is gone within one token anyway


def _pair_products(queries: list[Tensor], keys: Tensor, total: Tensor) -> list[Tensor]:
    """sum_d x[i, d] k[j, d] exp(G[i, d] - G[j, d]) for j <= i of a chunk, anything above; [..., C, C] for each x.

    queries, keys, total: [..., C, d_k]; G = total are the summed log decays of the chunk.
    """
    size = total.shape[-2]
    rows: list[list[Tensor]] = [[] for _ in queries]
    for start in range(0, size, BLOCK):
        block = slice(start, start + BLOCK)
        reference = total[..., start : start + 1, :]
        near = (total[..., block, :] - reference).exp()
        far = keys * (reference - total).clamp_max(-BLOCK * LOWEST).exp()
        for row, x in zip(rows, queries, strict=True):
            row.append((x[..., block, :] * near) @ far.transpose(-1, -2))
    return [torch.cat(row, dim=-2) for row in rows]


def chunk_kimi_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """Outputs [B, T, H, d_v] for q, k, g [B, T, H, d_k], v [B, T, H, d_v], beta [B, T, H].

    Takes the arguments of the function in transformers that it stands in for while training; it keeps no state, so a
    call with a state raises ValueError, and T must be a multiple of the chunk size.
    """
    if initial_state is not None or output_final_state:
        raise ValueError("the training path keeps no state: call the model with use_cache=False")
    batch, length, heads, d_v = value.shape
    if length % chunk_size:
        raise ValueError(f"length must be a multiple of {chunk_size}, got {length}")
    with torch.autocast(value.device.type, enabled=False):

        def split(x: Tensor) -> Tensor:
            x = x.float().transpose(1, 2)
            return x.reshape(batch, heads, length // chunk_size, chunk_size, *x.shape[3:])

        q, k, v, decay, rate = (split(x) for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6)
            k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        q = q * q.shape[-1] ** -0.5
        total = decay.clamp_min(LOWEST).cumsum(-2)
        k_rate = k * rate[..., None]
        upper = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu(1)
        inner, own = _pair_products([q, k_rate], k, total)
        inner = inner.masked_fill(upper, 0.0)
        inverse = invert_unit_lower(own.tril(-1))
        grown = total.exp()
        new_values = inverse @ (v * rate[..., None])
        seen = inverse @ (k_rate * grown)
        q_state = q * grown
        k_state = (k * (total[..., -1:, :] - total).exp()).transpose(-1, -2)
        last = grown[..., -1, :, None]
        state = torch.zeros(batch, heads, k.shape[-1], d_v, dtype=q.dtype, device=q.device)
        reads, corrections = [], []
        for i in range(length // chunk_size):
            u = new_values[:, :, i] - seen[:, :, i] @ state
            reads.append(q_state[:, :, i] @ state)
            corrections.append(u)
            state = state * last[:, :, i] + k_state[:, :, i] @ u
        out = torch.stack(reads, dim=2) + inner @ torch.stack(corrections, dim=2)
        return out.reshape(batch, heads, length, d_v).transpose(1, 2).to(value.dtype), None
