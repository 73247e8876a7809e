"""The gated delta rule over whole sequences, and the short convolution of all families; for training only.

Same values as the functions that transformers ships, with a cheap backward pass (``delta_rule.py``). The depthwise
convolution is a sum of shifted products, since the weight gradient of a grouped convolution is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from driftgate.evals.training.delta_rule import chunk_delta_rule

__all__ = ["causal_convolve", "chunk_gated_delta_rule"]


def _pair_products(queries: Sequence[Tensor], keys: Tensor, total: Tensor) -> list[Tensor]:
    """One decay for each pair of tokens; what lies above the diagonal would overflow and is left out before exp."""
    upper = torch.ones(2 * total.shape[-2:-1], dtype=torch.bool, device=total.device).triu(1)
    pair = (total - total.transpose(-1, -2)).masked_fill(upper, float("-inf")).exp()
    return [(x @ keys.transpose(-1, -2)) * pair for x in queries]


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Outputs [B, T, HV, d_v] for q, k [B, T, H or HV, d_k], v [B, T, HV, d_v], g and beta [B, T, HV].

    Takes the arguments of the function in transformers that it stands in for, and ``read_noise``: ``chunk_delta_rule``.
    """
    repeats = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
    return chunk_delta_rule(query, key, value, g[..., None], beta, pair_products=_pair_products, **options)


def causal_convolve(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: object
) -> Tensor:
    """Causal depthwise convolution of x [B, C, T] with weight [C, K], then SiLU; stands in for transformers' own."""
    if bias is not None or activation != "silu":
        raise ValueError(f"expected no bias and silu, got activation {activation!r}")
    width, length = weight.shape[-1], hidden_states.shape[-1]
    padded = F.pad(hidden_states, (width - 1, 0))
    taps = weight.to(hidden_states.dtype)
    out = sum(taps[:, i, None] * padded[..., i : i + length] for i in range(width))
    return F.silu(out)  # type: ignore[arg-type]
