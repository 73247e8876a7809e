"""The paired verdict: does the plan lose less than the margin on the baseline's own items?

Notable: three verdicts. "Not significantly worse" is never a pass: PASS needs the one-sided 95 % bound of the
loss inside the margin, FAIL the other bound outside, else INCONCLUSIVE with what would decide it. A bound
equal to the margin passes. The margin comes in points; ``as_fraction`` alone converts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import brentq
from statsmodels.stats.multitest import multipletests

from driftgate.accuracy.paired_tests import as_fraction, bound_loss, stream_units
from driftgate.accuracy.power import repeats_needed
from driftgate.errors import EmptyRunError

__all__ = [
    "HolmResult", "PairedVerdict", "bootstrap_interval", "decide", "exact_mcnemar", "holm_over_plans",
    "paired_noninferiority",
]  # fmt: skip

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Outcome = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True, kw_only=True)
class PairedVerdict:
    """Outcome of one paired comparison; all shares are fractions.

    Attributes:
        n: items.
        n_units: independent units that the tests count: streams if given, else items.
        delta: mean of d = plan accuracy - baseline accuracy.
        ci_low: two-sided 95 % interval of ``delta`` (``ci_high`` the other end), unadjusted, by the rule of
            ``bound``.
        lost: items with d < 0 (``gained``: d > 0).
        p_value: exact McNemar (sign) test of lost against gained, two-sided; counts items as independent.
        p_pass: of the test behind PASS: the least error at which the upper bound of the loss would be inside
            the margin; 1 where there is none below 0.49. ``p_fail`` the same for FAIL.
        verdict: "pass", "fail" or "inconclusive".
        bound: one-sided (1 - alpha) upper bound of the loss; PASS where it is <= ``margin``.
        fail_bound: one-sided lower bound of the loss; FAIL where it is > ``margin``.
        margin: as a fraction.
        design_effect: variance of the lost share between streams over that of independent items.
        repeats_needed: repeats in all that would decide if loss and spread stay as seen (90 % power); None
            where the verdict stands or no practical number would.
        reason: one line with bound, margin, test and its p.
    """

    n: int
    n_units: int
    delta: float
    ci_low: float
    ci_high: float
    lost: int
    gained: int
    p_value: float
    p_pass: float
    p_fail: float
    verdict: Outcome
    bound: float
    fail_bound: float
    margin: float
    design_effect: float
    repeats_needed: int | None
    reason: str


def paired_noninferiority(
    d: object, margin: float, *, clusters: object = None, alpha: float = 0.05, repeats: int = 1
) -> PairedVerdict:
    """Test that the plan loses less than ``margin`` points.

    Items that are independent: PASS by ``ttest_1samp`` of d against -margin where at least five items gained,
    else by the exact binomial bound on the share of items that lost; FAIL by ``ttest_1samp`` (paired_tests.py
    gives the rules and their simulated errors). Questions asked in one stream are not independent: given
    ``clusters``, the unit is the stream, and both bounds allow for the spread between streams; fewer than two
    streams are always inconclusive.

    Args:
        d: [n] plan_correct - baseline_correct of each item, means over repeats, -1 … 1.
        margin: the greatest loss that is acceptable, in points (percent of items), above 0.
        clusters: [n] the stream of each item, any labels.
        alpha: error of each one-sided bound.
        repeats: how many repeats each d averages; only ``repeats_needed`` uses it.

    Raises:
        EmptyRunError: no items.
        ValueError: d outside -1 … 1 or not finite, clusters of another length, margin, alpha or repeats out
            of range.
    """
    values, streams = _checked(d, clusters)
    if not 0.0 < margin < 100.0:
        raise ValueError(f"margin: expected points above 0 and below 100, got {margin}")
    if not 0.0 < alpha < 0.5 or repeats < 1:
        raise ValueError(f"alpha, repeats: expected 0 < alpha < 0.5 and repeats >= 1, got {alpha}, {repeats}")
    limit = as_fraction(margin)
    rows = values[None]
    bounds, two_sided = bound_loss(rows, streams, alpha=alpha), bound_loss(rows, streams, alpha=0.025)
    upper, lower = float(bounds.upper[0]), float(bounds.lower[0])
    lost, gained = int((values < 0.0).sum()), int((values > 0.0).sum())
    verdict = decide(upper, lower, limit)
    units = values if streams is None else _stream_means(values, streams)
    p_pass = _least_error(lambda error: float(bound_loss(rows, streams, alpha=error).upper[0]) <= limit)
    p_fail = _least_error(lambda error: float(bound_loss(rows, streams, alpha=error).lower[0]) > limit)
    more = _more_repeats(values, units, margin, repeats, alpha) if verdict == "inconclusive" else None
    exact = bool((bounds.lower_exact if verdict == "fail" else bounds.upper_exact)[0])
    if streams is not None:
        test = f"{units.size} streams as the units"
    else:
        test = f"exact on {units.size} items" if exact else f"t on {units.size} items"
    sure = f"one-sided {100.0 * (1.0 - alpha):g} %, {test}, p = {p_fail if verdict == 'fail' else p_pass:.2g}"
    reason = f"{_say_loss(verdict, upper, lower)} ({sure}), margin {margin:g}"
    if streams is not None and units.size < 2:
        reason = "one stream says nothing about the spread between streams: give two or more"
    return PairedVerdict(
        n=values.size,
        n_units=units.size,
        delta=float(values.mean()),
        ci_low=max(-1.0, -float(two_sided.upper[0])),
        ci_high=min(1.0, -float(two_sided.lower[0])),
        lost=lost,
        gained=gained,
        p_value=exact_mcnemar(lost, gained),
        p_pass=p_pass,
        p_fail=p_fail,
        verdict=verdict,
        bound=upper,
        fail_bound=lower,
        margin=limit,
        design_effect=float(bounds.design_effect[0]),
        repeats_needed=more,
        reason=reason + _say_more(verdict, more, repeats, units, streams=streams is not None),
    )


def decide(upper: float, lower: float, limit: float) -> Outcome:
    """PASS where the upper bound is <= limit, FAIL where the lower one is > limit, else inconclusive.

    The bounds are compared as they are: no rounding, no tolerance, so 1e-9 above the limit is above it.
    """
    if upper <= limit:
        return "pass"
    return "fail" if lower > limit else "inconclusive"


def _checked(d: object, clusters: object) -> tuple[Floats, Integers | None]:
    values = np.asarray(d, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"d: expected one axis, [n], got {values.ndim}")
    if values.size == 0:
        raise EmptyRunError("paired comparison: zero items were answered; give a --task that asks questions")
    if not (np.abs(values) <= 1.0).all():
        raise ValueError("d: expected differences of correctness within -1 … 1, got others or NaN")
    if clusters is None:
        return values, None
    labels = np.asarray(clusters)
    if labels.shape != values.shape:
        raise ValueError(f"clusters: expected one label for each of {values.size} items, got shape {labels.shape}")
    return values, np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _stream_means(values: Floats, streams: Integers) -> Floats:
    sums = np.bincount(streams, weights=values).astype(np.float64)
    units: Floats = stream_units(sums[None], np.bincount(streams).astype(np.float64))[0]
    return units


def _least_error(holds: Callable[[float], bool]) -> float:
    """The least alpha at which a bound decides, found on a log scale; 1 where it does not even at 0.49."""
    if not holds(0.49):
        return 1.0
    least = 1e-15
    if holds(least):
        return least
    root = brentq(lambda power: 1.0 if holds(math.exp(power)) else -1.0, math.log(least), math.log(0.49), xtol=1e-9)
    return math.exp(float(root))


def _more_repeats(values: Floats, units: Floats, margin: float, repeats: int, alpha: float) -> int | None:
    if units.size < 2:
        return None
    wanted: int | None = repeats_needed(
        float(units.std(ddof=1)),
        float(values.mean()) + as_fraction(margin),
        units.size,
        margin=margin,
        n_items=values.size,
        repeats=repeats,
        alpha=alpha,
    )
    return wanted


def _say_loss(verdict: Outcome, upper: float, lower: float) -> str:
    if verdict == "pass":
        return f"at most {100.0 * upper:.2f} points lost"
    if verdict == "fail":
        return f"at least {100.0 * lower:.2f} points lost"
    return f"{100.0 * lower:.2f} to {100.0 * upper:.2f} points lost"


def _say_more(verdict: Outcome, more: int | None, repeats: int, units: Floats, *, streams: bool) -> str:
    """What would decide: streams where they are the units, items where nothing flipped, else repeats."""
    if verdict != "inconclusive":
        return ""
    if more is None:
        return "; no practical number of answers would decide"
    wanted = math.ceil(units.size * more / repeats)
    if streams:
        return f"; {wanted} streams (now {units.size}) would decide if loss and spread stay as they are"
    if np.ptp(units) <= 1e-12:
        return f"; {wanted} items (now {units.size}) would decide if nothing flips among them either"
    return f"; {more} repeats (now {repeats}) would decide if loss and spread stay as they are"


def exact_mcnemar(lost: int, gained: int) -> float:
    """Two-sided exact McNemar test of discordant pairs; 1 where nothing flipped [McNemar 1947]."""
    flips = lost + gained
    return float(stats.binomtest(min(lost, gained), flips, 0.5).pvalue) if flips else 1.0


def bootstrap_interval(
    d: object, *, clusters: object = None, confidence: float = 0.95, n_resamples: int = 9999, seed: int = 0
) -> tuple[float, float] | None:
    """BCa bootstrap interval of the mean of d (``scipy.stats.bootstrap``), over streams or items.

    Returns:
        None where all units are equal or there are fewer than two: resampling them says nothing (the call
            gives NaN).

    Raises:
        EmptyRunError, ValueError: as ``paired_noninferiority``.
    """
    values, streams = _checked(d, clusters)
    units = values if streams is None else _stream_means(values, streams)
    if units.size < 2 or np.ptp(units) <= 1e-12:
        return None
    found = stats.bootstrap(
        (units,),
        np.mean,
        confidence_level=confidence,
        n_resamples=n_resamples,
        method="BCa",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    ends = float(found.low), float(found.high)
    return ends if all(map(math.isfinite, ends)) else None


@dataclass(frozen=True)
class HolmResult:
    """One plan among several: its greatest p over tasks, the same adjusted by Holm, and whether it passes."""

    p: float
    p_adjusted: float
    passes: bool


def holm_over_plans(p_pass: Mapping[str, Mapping[str, float]], *, alpha: float = 0.05) -> dict[str, HolmResult]:
    """Several plans x tasks: a plan passes when all its tasks do, so its p is the greatest; Holm over plans.

    Intersection-union within a plan needs no correction [Berger 1982]; over plans ``statsmodels``
    ``multipletests(method='holm')``. Reported intervals stay unadjusted.

    Args:
        p_pass: ``PairedVerdict.p_pass`` by plan and task.
        alpha: error over all plans together.

    Raises:
        EmptyRunError: no plans, or a plan without tasks.
    """
    if not p_pass or not all(p_pass.values()):
        raise EmptyRunError("Holm over plans: zero tasks were answered by some plan; give --task")
    greatest = [max(tasks.values()) for tasks in p_pass.values()]
    passes, adjusted, *_ = multipletests(greatest, alpha=alpha, method="holm")
    return {
        plan: HolmResult(p=p, p_adjusted=float(q), passes=bool(ok))
        for plan, p, q, ok in zip(p_pass, greatest, adjusted, passes, strict=True)
    }
