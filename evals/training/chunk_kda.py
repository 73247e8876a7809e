"""Kimi Delta Attention over whole sequences, with a cheap backward pass; for training only.

Same values as the chunked function that transformers ships, which materialises a decay for every pair of tokens and
channel. Here a pair's decay is split into two factors, one of each token, relative to the first token of the reader's
block; a block is so short that neither factor overflows while no log decay is below ``LOWEST``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from driftgate.evals.training.delta_rule import chunk_delta_rule

__all__ = ["LOWEST", "chunk_kimi_delta"]

BLOCK = 16
LOWEST = -5.0  # exp(BLOCK * 5) is within FP32; what decays faster than exp(-5) a token is gone within one token anyway


def _pair_products(queries: Sequence[Tensor], keys: Tensor, total: Tensor) -> list[Tensor]:
    """One decay for each pair of tokens and channel, block by block of the readers."""
    rows: list[list[Tensor]] = [[] for _ in queries]
    for start in range(0, total.shape[-2], BLOCK):
        block = slice(start, start + BLOCK)
        reference = total[..., start : start + 1, :]
        near = (total[..., block, :] - reference).exp()
        far = keys * (reference - total).clamp_max(-BLOCK * LOWEST).exp()
        for row, x in zip(rows, queries, strict=True):
            row.append((x[..., block, :] * near) @ far.transpose(-1, -2))
    return [torch.cat(row, dim=-2) for row in rows]


def chunk_kimi_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Outputs [B, T, H, d_v] for q, k, g [B, T, H, d_k], v [B, T, H, d_v], beta [B, T, H].

    Takes the arguments of the function in transformers that it stands in for, and ``read_noise``: ``chunk_delta_rule``.
    """
    decay = g.float().clamp_min(LOWEST)
    return chunk_delta_rule(query, key, value, decay, beta, pair_products=_pair_products, **options)
