"""Bounds on the loss of paired answers, for many replicates at once: shared by verdict and power study.

Notable: the verdict of one run is the same code with one replicate, so the simulated error rates are those of
the rule that is used. ``loss`` = baseline accuracy - plan accuracy, a fraction; an upper bound of it decides
PASS, a lower FAIL.

Two rules. Answers that are independent items (each question its own prompt): Student's t where at least five
items gained, else the exact binomial bound on the share of items that lost. Answers that share streams:
``_bound_by_streams``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from driftgate.accuracy.resampling import clustered_share, exact_bounds

__all__ = ["GAINED_MIN", "LossBounds", "as_fraction", "bound_loss", "stream_units"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

GAINED_MIN = 5
"""Gained items from which Student's t is used. Simulated: worst false PASS 5.9 %; by "10 flips" 8.6 %."""


def as_fraction(points: float) -> float:
    """Points (percent of the items) as a fraction; the only place that converts a margin."""
    return points / 100.0


@dataclass(frozen=True)
class LossBounds:
    """One-sided bounds of the loss, each [n_replicates], at error ``alpha`` each; and which rule gave them.

    Attributes:
        upper: the loss is below it.
        lower: the loss is above it.
        upper_exact: [n_replicates] bool, the upper bound is a binomial one and not Student's t;
            ``lower_exact`` likewise.
        design_effect: [n_replicates] variance of the lost share over that of independent items; 1 without
            streams.
    """

    upper: Floats
    lower: Floats
    upper_exact: NDArray[np.bool_]
    lower_exact: NDArray[np.bool_]
    design_effect: Floats


def bound_loss(d: Floats, streams: Integers | None, *, alpha: float) -> LossBounds:
    """One-sided bounds of the loss for each replicate.

    Without ``streams`` every item is a unit of its own. With them the unit is the stream; answers given once
    (every d is -1, 0 or 1) go by ``_bound_by_streams``, means over repeats, which vary far less than single
    answers, by the rule for items with the stream's mean as the item, where at least five streams gained.

    Args:
        d: [n_replicates, n_items], plan_correct - baseline_correct, -1 … 1, means over repeats.
        streams: [n_items] index 0 … S-1 of each item's stream; None where items are independent.
        alpha: error of each bound, below 0.5.
    """
    if streams is None:
        return _bound_by_items(d, alpha=alpha)
    member = (streams[:, None] == np.arange(streams.max() + 1)).astype(np.float64)
    sizes = member.sum(axis=0)
    bounds = _bound_by_streams(np.maximum(-d, 0.0) @ member, np.maximum(d, 0.0) @ member, sizes, alpha=alpha)
    units = stream_units(d @ member, sizes)
    smooth = ~np.isin(d, (-1.0, 0.0, 1.0)).all(axis=1) & ((units > 0.0).sum(axis=1) >= GAINED_MIN)
    if not smooth.any():
        return bounds
    by_means = _bound_by_items(units, alpha=alpha)
    return LossBounds(
        upper=np.where(smooth, by_means.upper, bounds.upper),
        lower=np.where(smooth, by_means.lower, bounds.lower),
        upper_exact=np.where(smooth, by_means.upper_exact, bounds.upper_exact),
        lower_exact=np.where(smooth, by_means.lower_exact, bounds.lower_exact),
        design_effect=bounds.design_effect,
    )


def stream_units(sums: Floats, sizes: Floats) -> Floats:
    """Values of streams whose plain mean is the mean over items: the means, where all are of one size.

    Args:
        sums: [n_replicates, n_streams] sum of d over a stream's items.
        sizes: [n_streams] items of each stream.
    """
    mean = sums.sum(axis=1, keepdims=True) / sizes.sum()
    units: Floats = mean + (sums - mean * sizes) * sizes.size / sizes.sum()
    return units


def _bound_by_items(d: Floats, *, alpha: float) -> LossBounds:
    """Bounds where every item is independent of the others.

    Upper: ``ttest_1samp`` of d where at least five items have d > 0, else the exact binomial bound on the
    share of items with d < 0 (no item loses more than 1). Lower: ``ttest_1samp``. Where all d are equal,
    Student's t has no spread to go by: both bounds are exact ones then, the lower as (share of items that
    lost)·(their loss).

    Args:
        d: [n_replicates, n_items], plan_correct - baseline_correct, -1 … 1, means over repeats.
        alpha: error of each bound.
    """
    n = d.shape[1]
    lost, gained = (d < 0.0).sum(axis=1), (d > 0.0).sum(axis=1)
    constant = np.ptp(d, axis=1) <= 1e-12
    lost_low, lost_high = exact_bounds(lost, n, alpha=alpha)
    _, gained_high = exact_bounds(gained, n, alpha=alpha)
    t_low, t_high = _student(d, constant, alpha)
    exact = constant | (gained < GAINED_MIN)
    loss = -d.mean(axis=1)
    flat_low = np.where(loss > 0.0, loss * lost_low, -gained_high)
    return LossBounds(
        upper=np.where(exact, lost_high, t_high),
        lower=np.where(constant, flat_low, t_low),
        upper_exact=exact,
        lower_exact=constant,
        design_effect=np.ones(d.shape[0]),
    )


def _bound_by_streams(lost: Floats, gained: Floats, sizes: Floats, *, alpha: float) -> LossBounds:
    """Bounds where items share streams (clusters), so that the independent unit is the stream.

    Lost and gained share each get Korn and Graubard's interval (``resampling.clustered_share``): exact and
    binomial, at the effective number of items that S streams are worth. The bounds of loss = lost - gained
    follow by adding the two distances in quadrature [Newcombe 1998, Zou & Donner 2008]. With nothing gained
    this is the exact bound on the lost share; with many flips it is about Student's t on streams. It needs no
    threshold and, unlike t, allows for the skew of few losses.

    Simulated for 16-32 streams of 16 items, margins 3-6 points, 0-6 % flips each way: false PASS of a plan
    that loses exactly the margin at most 4.1 % where flips are independent, 5.7 % where those of a stream
    correlate with 0.05, 8 % with 0.1, 14 % with 0.2 (16 streams; 9 % for 32); false FAIL at most 4.5 %. The
    obvious alternatives were dropped: Student's t on stream means lets 7-10 % pass (18 % at 0.1); the exact
    bound on the number of *streams* that lost anything is valid, but of harmless plans on 16 streams it
    passes 0-35 % at a margin of 3 points.

    Args:
        lost: [n_replicates, n_streams] sum over a stream's items of max(-d, 0).
        gained: the same of max(d, 0).
        sizes: [n_streams] items of each stream.
        alpha: error of each bound, below 0.5.
    """
    away = clustered_share(lost, sizes, alpha=alpha)
    back = clustered_share(gained, sizes, alpha=alpha)
    loss = away.share - back.share
    one = np.ones(lost.shape[0])
    if sizes.size < 2:  # one stream says nothing about the next
        return LossBounds(upper=one, lower=-one, upper_exact=one > 0, lower_exact=one > 0, design_effect=one)
    return LossBounds(
        upper=loss + np.hypot(away.high - away.share, back.share - back.low),
        lower=loss - np.hypot(away.share - away.low, back.high - back.share),
        upper_exact=one > 0,
        lower_exact=one > 0,
        design_effect=away.design_effect,
    )


def _student(d: Floats, constant: NDArray[np.bool_], alpha: float) -> tuple[Floats, Floats]:
    """Bounds of the loss by t; (-1, 1), which decide nothing, where d has no spread."""
    low, high = np.full(d.shape[0], -1.0), np.ones(d.shape[0])
    spread = ~constant
    if spread.any() and d.shape[1] > 1:
        interval = stats.ttest_1samp(d[spread], 0.0, axis=1).confidence_interval(1.0 - 2.0 * alpha)
        low[spread], high[spread] = -interval.high, -interval.low
    return low, high
