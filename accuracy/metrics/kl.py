"""KL divergence of next-token distributions, per step, in FP64.

Notable: the terms are written so that each is non-negative, so equal logits give exactly 0, a divergence of
1e-20 survives, and no step comes out negative. Reducing over steps is not done here (accuracy/statistics.py
does it): a mean taken per batch or per vocabulary entry is how other tools came to report another number.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["cut_vocabulary", "kl_divergence"]

CHUNK_ELEMENTS = 1 << 20
"""Logits treated at once: 8 MiB a temporary in FP64, about eight of them alive, whatever the vocabulary."""


def kl_divergence(baseline_logits: Tensor, plan_logits: Tensor, *, vocab_size: int | None = None) -> Tensor:
    """KL(baseline‖plan) of each step.

    ``KL = Σ_i p_i (ln p_i - ln q_i)`` with p = softmax(baseline), q = softmax(plan) [Kullback & Leibler
    1951]. As Σ p = Σ q = 1 it equals ``Σ_i p_i (exp(d_i) - 1 - d_i)`` with d_i = ln q_i - ln p_i: every term
    is >= 0, and an error ε in a log-sum-exp, which moves all d_i alike, enters as ε²/2 and not as ε.

    Args:
        baseline_logits: [..., V], any floating dtype; taken to FP64 before anything else.
        plan_logits: the same shape; a view made by ``expand`` is fine for either.
        vocab_size: the true vocabulary; columns from there on are padding of the embedding and are cut off.

    Returns:
        [...] FP64 on the device of the logits, nats per step, 0 … inf, lower is better. Exactly 0 for equal
        logits. A token that neither side can produce (-inf on both) adds 0; one that only the plan cannot
        produce gives inf; NaN, +inf or nothing but -inf on either side gives NaN.

    Raises:
        ValueError: shapes differ, an operand has no floating dtype, or ``vocab_size`` is outside 1 … V.
    """
    baseline, plan = cut_vocabulary(baseline_logits, plan_logits, vocab_size=vocab_size)
    lead = baseline.shape[:-1]
    if not lead:
        return _kl_rows(baseline[None], plan[None])[0]
    out = torch.empty(lead, dtype=torch.float64, device=baseline.device)
    for place in _blocks(lead, baseline.shape[-1]):
        out[place] = _kl_rows(baseline[place], plan[place])
    return out


def cut_vocabulary(*logits: Tensor, vocab_size: int | None) -> tuple[Tensor, ...]:
    """Check that logits [..., V] belong together and cut the padded columns off (views, nothing is copied).

    Raises:
        ValueError: shapes differ, a dtype is not floating, V = 0, or ``vocab_size`` is outside 1 … V.
    """
    shape = logits[0].shape
    for operand in logits:
        if operand.shape != shape:
            raise ValueError(f"logits: expected equal shapes, got {tuple(shape)} and {tuple(operand.shape)}")
        if not operand.is_floating_point():
            raise ValueError(f"logits: expected a floating dtype, got {operand.dtype}")
    if not shape or shape[-1] == 0:
        raise ValueError(f"logits: expected [..., V] with V >= 1, got {tuple(shape)}")
    if vocab_size is None:
        return logits
    if not 1 <= vocab_size <= shape[-1]:
        raise ValueError(f"vocab_size: expected 1 … {shape[-1]}, got {vocab_size}")
    return tuple(operand[..., :vocab_size] for operand in logits)


def _blocks(lead: torch.Size, width: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices that cut the leading axes into blocks of about CHUNK_ELEMENTS logits, without copying views."""
    rows = max(1, CHUNK_ELEMENTS // width)
    if lead.numel() <= rows:
        yield (slice(None),)
        return
    inner = lead[1:].numel()
    step = rows // inner if inner else lead[0]
    if step >= 1 or len(lead) == 1:
        step = max(1, step)
        for first in range(0, lead[0], step):
            yield (slice(first, first + step),)
        return
    for first in range(lead[0]):
        for rest in _blocks(lead[1:], width):
            yield (first, *rest)


def _kl_rows(baseline: Tensor, plan: Tensor) -> Tensor:
    log_p = torch.log_softmax(baseline.double(), dim=-1)
    log_q = torch.log_softmax(plan.double(), dim=-1)
    p, difference = log_p.exp(), log_q - log_p
    # Near 0, expm1 keeps the digits; far from it exp(d) may overflow while p·exp(d) = q cannot. Where p is 0
    # the term is q, and where both are 0 the difference is NaN and the term 0. The clamp removes an ulp of
    # expm1, no more.
    near = p * (torch.expm1(difference.clamp(max=1.0)) - difference)
    q = log_q.exp()
    far = q - p - p * difference
    terms = torch.where(difference <= 1.0, near, far).clamp_(min=0.0)
    terms = torch.where(p == 0.0, q, terms)
    total = terms.sum(dim=-1)
    broken = torch.isnan(log_p).any(dim=-1) | torch.isnan(log_q).any(dim=-1)
    return total.masked_fill_(broken, torch.nan)
