"""The most probable token, with a rule for ties, and whether plan and baseline agree on it."""

from __future__ import annotations

import torch
from torch import Tensor

from driftgate.accuracy.metrics.kl import cut_vocabulary

__all__ = ["same_top", "top_token"]


def top_token(logits: Tensor, *, vocab_size: int | None = None) -> Tensor:
    """Id of the greatest logit; among equals the lowest id (``torch.argmax`` promises no order among equals).

    Args:
        logits: [..., V], any floating dtype, compared as stored.
        vocab_size: the true vocabulary; padded columns are cut off.

    Returns:
        [...] int64, 0 … V-1; -1 where a row holds NaN.

    Raises:
        ValueError: as ``cut_vocabulary``.
    """
    (logits,) = cut_vocabulary(logits, vocab_size=vocab_size)
    width = logits.shape[-1]
    ids = torch.arange(width, device=logits.device)
    greatest = logits.amax(dim=-1, keepdim=True)  # NaN if the row holds one, and NaN equals nothing
    first = torch.where(logits == greatest, ids, width).amin(dim=-1)
    return torch.where(first == width, -1, first)


def same_top(baseline_logits: Tensor, plan_logits: Tensor, *, vocab_size: int | None = None) -> Tensor:
    """Whether ``top_token`` is the same token on both sides (llama.cpp's "same top").

    Args:
        baseline_logits: [..., V], any floating dtype.
        plan_logits: the same shape.
        vocab_size: the true vocabulary; padded columns are cut off.

    Returns:
        [...] bool. False where either side holds NaN. The mean over steps is a fraction, higher is better;
        ``statistics.proportion_ci`` gives its interval (resampled unit: the sequence).

    Raises:
        ValueError: as ``cut_vocabulary``.
    """
    cut_vocabulary(baseline_logits, plan_logits, vocab_size=vocab_size)
    baseline = top_token(baseline_logits, vocab_size=vocab_size)
    return (baseline == top_token(plan_logits, vocab_size=vocab_size)) & (baseline >= 0)
