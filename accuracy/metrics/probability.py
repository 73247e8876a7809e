"""The probability of the true next token: its negative log likelihood, and how the plan moved it."""

from __future__ import annotations

import torch
from torch import Tensor

from driftgate.accuracy.metrics.kl import cut_vocabulary

__all__ = ["delta_p", "negative_log_likelihood"]


def negative_log_likelihood(logits: Tensor, targets: Tensor, *, vocab_size: int | None = None) -> Tensor:
    """``-ln softmax(logits)[target]`` of each step, in FP64.

    Args:
        logits: [..., V], any floating dtype; taken to FP64 first.
        targets: [...] integer ids of the true next tokens.
        vocab_size: the true vocabulary; padded columns are cut off.

    Returns:
        [...] FP64, nats, 0 … inf, lower is better; inf for a target at -inf; NaN where a row holds NaN.
        Exponential of the mean over steps = perplexity (``statistics.perplexity_ratio``; resampled unit: the
        sequence).

    Raises:
        ValueError: shapes do not match, or as ``cut_vocabulary``; on the CPU also where a target lies outside the
            vocabulary: reading ids back would stop a GPU at every step, so there its own index check ends the run.
    """
    (logits,) = cut_vocabulary(logits, vocab_size=vocab_size)
    return -_log_probability(logits, _checked(targets, logits))


def delta_p(baseline_logits: Tensor, plan_logits: Tensor, targets: Tensor, *, vocab_size: int | None = None) -> Tensor:
    """``p_plan - p_baseline`` of the true next token, in FP64 (llama.cpp's Δp, here as a fraction).

    Formed as p_baseline·(exp(ln p_plan - ln p_baseline) - 1), so that small differences keep their digits.

    Args:
        baseline_logits: [..., V], any floating dtype.
        plan_logits: the same shape.
        targets: [...] integer ids of the true next tokens.
        vocab_size: the true vocabulary; padded columns are cut off.

    Returns:
        [...] FP64, -1 … 1, nearer 0 is better; exactly 0 for equal logits; NaN where a row holds NaN.

    Raises:
        ValueError: as ``negative_log_likelihood``.
    """
    baseline, plan = cut_vocabulary(baseline_logits, plan_logits, vocab_size=vocab_size)
    targets = _checked(targets, baseline)
    log_p, log_q = _log_probability(baseline, targets), _log_probability(plan, targets)
    p = log_p.exp()
    small = p * torch.expm1((log_q - log_p).clamp(max=1.0))
    difference = torch.where(log_q - log_p <= 1.0, small, log_q.exp() - p)
    return torch.where(log_p == log_q, torch.zeros_like(difference), difference)


def _checked(targets: Tensor, logits: Tensor) -> Tensor:
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets: expected shape {tuple(logits.shape[:-1])}, got {tuple(targets.shape)}")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(f"targets: expected integer ids, got {targets.dtype}")
    width = logits.shape[-1]
    on_host = targets.device.type == "cpu"  # elsewhere one bool is a synchronisation at every step
    if on_host and targets.numel() and not bool(((targets >= 0) & (targets < width)).all()):
        raise ValueError(f"targets: expected ids 0 … {width - 1}, got {int(targets.min())} … {int(targets.max())}")
    return targets.to(torch.int64)


def _log_probability(logits: Tensor, targets: Tensor) -> Tensor:
    """Log probability of the target; the log-sum-exp runs over blocks of rows to bound FP64 temporaries."""
    chosen = logits.gather(-1, targets[..., None])[..., 0].double()
    if logits.dim() == 1:
        return chosen - torch.logsumexp(logits.double(), dim=-1)
    rows = logits.reshape(-1, logits.shape[-1])
    step = max(1, (1 << 21) // rows.shape[-1])
    firsts = range(0, rows.shape[0], step)
    totals = [torch.logsumexp(rows[first : first + step].double(), dim=-1) for first in firsts]
    return chosen - torch.cat(totals).reshape(targets.shape)
