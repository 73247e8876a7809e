"""Sampling with common random numbers: Gumbel-max, whose noise is a function of seed, item, repeat and index alone.

Notable: the noise depends neither on plan, row, batch nor device, so plans that have the same logits take the same
tokens, and the first token that differs is the plan's doing.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from driftgate.quant.philox import philox4x32

__all__ = ["gumbel_rows", "item_key", "sample"]

_MASK = 0xFFFFFFFF


def item_key(item_id: str, repeat: int) -> int:
    """63 bits that name one answer to one item, for sampling noise and for the draws of stochastic rounding."""
    digest = hashlib.blake2b(f"{repeat}/{item_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def gumbel_rows(seed: int, keys: Tensor, indices: Tensor, n: int) -> Tensor:
    """Standard Gumbel noise of some rows: Philox4x32-10 with counter (column / 4, index, key), a word for each column.

    Args:
        seed: 64 bits.
        keys: [rows] int64, ``item_key`` of each row.
        indices: [rows] int64, index of the generated token.
        n: columns.

    Returns:
        [rows, n] float64 on the device of ``keys``; -ln(-ln u) with u = (word + 1/2) / 2^32.
    """
    quads = torch.arange(-(-n // 4), dtype=torch.int64, device=keys.device)[None]
    key, index = keys[:, None], indices[:, None] & _MASK
    words = philox4x32(seed, (quads, index, key & _MASK, key >> 32 & _MASK))
    drawn = torch.stack([word.expand(len(keys), quads.shape[1]) for word in words], dim=-1).flatten(1)[:, :n]
    return -torch.log(-torch.log((drawn.double() + 0.5) * 2.0**-32))


def sample(logits: Tensor, noise: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The sampled token of each row, and how clearly it won.

    Args:
        logits: [..., rows, V], any floating dtype.
        noise: [rows, V] float64.
        temperature: [rows] float64; 0 takes the greatest logit.

    Returns:
        Tokens [..., rows] int64 (ties: the lower id; 0 where a row holds NaN), and the greatest score minus the second
        greatest [..., rows] float64, where the score is logit + temperature * noise.
    """
    scores = logits.double() + temperature[:, None] * noise
    two = scores.topk(min(2, scores.shape[-1]), dim=-1).values
    ids = torch.arange(scores.shape[-1], device=scores.device)
    first = torch.where(scores == two[..., :1], ids, scores.shape[-1]).amin(-1)
    tokens = torch.where(first == scores.shape[-1], 0, first)
    return tokens, two[..., 0] - two[..., -1]
