"""Figures of free generation: where plans leave the baseline, how close the choice was there, and whether they loop.

All plans sample with the same noise, so until the first divergence a plan has written the baseline's text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from driftgate.accuracy.prompts import Decoded, Prompt

__all__ = ["N_GRAM", "free_running", "share_repeated"]

N_GRAM = 16
"""Tokens of the n-grams whose repetition is counted: 4-grams of words [Welleck et al. 2020], at four bytes a word."""


def free_running(prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Decoded]]) -> dict[str, dict[str, Any]]:
    """Figures of every plan over the prompts that generate.

    Args:
        prompts: what was decoded.
        answers: by plan, in the order of the prompts.

    Returns:
        By plan ``first_divergence``: ``share`` of the generations that leave the baseline's text, ``min`` and
        ``median`` of the index of the token where they do (the median over all generations, None where fewer than
        half do), ``tie_margin_median`` of the baseline's lead there, in nats; ``repetition_rate``: mean of
        ``share_repeated`` over the generations long enough to have one, None where none is; ``mean_length`` in tokens.
    """
    return {plan: _describe(prompts, decoded) for plan, decoded in answers.items()}


def share_repeated(token_ids: Sequence[int], *, apart: Sequence[int] = (), n: int = N_GRAM) -> float | None:
    """Share of n-grams that occurred before in the same text: 1 - unique / all, seq-rep-n of [Welleck et al. 2020].

    [Welleck et al. 2020] Neural Text Generation with Unlikelihood Training, ICLR. Sampled English at n = 4 words is
    at 0.01 … 0.1, a loop near 1. Range 0 to below 1, lower is better.

    Args:
        token_ids: generated tokens.
        apart: indices of tokens that were fed, not chosen; n-grams that hold one do not count.
        n: tokens of an n-gram.

    Returns:
        None where there is no n-gram.
    """
    ids = list(token_ids)
    edges = [-1, *sorted(i for i in set(apart) if i < len(ids)), len(ids)]
    grams = [tuple(ids[first : first + n]) for low, high in pairwise(edges) for first in range(low + 1, high - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else None


def _describe(prompts: Sequence[Prompt], decoded: Sequence[Decoded]) -> dict[str, Any]:
    pairs = [(p, d) for p, d in zip(prompts, decoded, strict=True) if p.max_new_tokens]
    places = np.array([np.inf if d.first_divergence is None else d.first_divergence for _, d in pairs])
    margins = [d.tie_margin for _, d in pairs if d.tie_margin is not None and np.isfinite(d.tie_margin)]
    repeated = [share_repeated(d.token_ids, apart=[i for i, _ in p.forced]) for p, d in pairs]
    shares = [share for share in repeated if share is not None]
    apart = np.isfinite(places)
    return {
        "first_divergence": {
            "median": _middle(places),
            "min": int(places.min()) if apart.any() else None,
            "share": float(apart.mean()) if len(pairs) else None,
            "tie_margin_median": float(np.median(margins)) if margins else None,
        },
        "repetition_rate": float(np.mean(shares)) if shares else None,
        "mean_length": float(np.mean([len(d.token_ids) for _, d in pairs])) if pairs else None,
    }


def _middle(places: np.ndarray) -> float | None:
    """Median of places, inf for none at all; the lower of the two middle ones where only that one is finite."""
    if not len(places):
        return None
    ranked = np.sort(places)
    low, high = ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
    middle = (low + high) / 2 if np.isfinite(high) else low
    return float(middle) if np.isfinite(middle) else None
