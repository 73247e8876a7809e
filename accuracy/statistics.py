"""Per-step figures turned into summaries with intervals: KL, agreement on the top token, perplexity, Δp, quantiles.

Notable: an interval is formed from sequences, or from ten batches of one sequence, never from steps as if they were
independent (that ± covers 41 % of the time at an AR(1) of 0.9). Undefined numbers are None, never NaN. What a verdict
may rest on is said by ``KlSummary.pass_blocked``. Drift over position: drift_law.py; tasks: noninferiority.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from driftgate.accuracy.resampling import Interval, Steps, Unit, count_effective, form_units, t_interval
from driftgate.errors import EmptyRunError

__all__ = [
    "N_EFFECTIVE_MIN", "SD_LN_MAX", "DeltaPSummary", "KlSummary", "PerplexitySummary", "ProportionSummary",
    "perplexity_ratio", "proportion_ci", "quantile_interval", "summarize_delta_p", "summarize_kl",
]  # fmt: skip

Floats = NDArray[np.float64]

N_EFFECTIVE_MIN = 100
"""Below it the interval of a mean KL is marked and cannot decide PASS (coverage was checked from here on)."""

SD_LN_MAX = 1.0
"""sd(ln KL) of the steps up to which the interval of the arithmetic mean holds (78-87 % instead of 95 % at 2)."""

_QUANTILES = {
    "p99_9": 0.999, "p99": 0.99, "p95": 0.95, "p90": 0.90, "median": 0.50, "p10": 0.10, "p5": 0.05, "p1": 0.01,
    "p0_1": 0.001,
}  # fmt: skip
_KL_KEYS = (
    "mean", "ci_low", "ci_high", "geo_mean", "geo_ci_low", "geo_ci_high", "max", "p99_9", "p99", "p95", "p90",
    "median", "p10", "p5", "p1", "p0_1", "min", "n_steps", "n_effective", "n_nonfinite", "first_nonfinite_step",
    "n_negative",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KlSummary:
    """KL of one plan over all steps; nats per step. The first block of fields is what results.json holds.

    Non-finite steps are counted, named by the first of them, and left out of every other figure; they enter no mean
    and no denominator. A plan that has one fails by the rule for non-finite steps and cannot pass here.

    Attributes:
        mean: token mean: over all finite steps, each step counts once.
        ci_low: lower end of the two-sided 95 % interval of ``mean``, >= 0; ``ci_high`` is the upper.
        geo_mean: exp(mean of ln KL) over the steps, with the interval of that mean on the log scale; None where a
            step has KL <= 0.
        max: and the quantiles down to ``min``: of the finite steps, linear interpolation as numpy's default.
        n_steps: valid steps, non-finite ones included.
        n_effective: independent steps that the finite ones are worth.
        n_negative: steps below 0; ``kl_divergence`` makes none.
        sequence_mean: mean of the sequences' means, each sequence counts once; differs from ``mean`` where lengths do.
        lower_95: one-sided 95 % bound of ``mean``, >= 0; ``upper_95`` is the other.
        geo_lower_95: one-sided 95 % bound of ``geo_mean``; ``geo_upper_95`` is the other.
        sd_ln: standard deviation of ln KL over the positive steps.
        unit: what the intervals resample.
        failed_sequences: row numbers of sequences with a non-finite step.
        pass_blocked: why no PASS may rest on ``mean``; None where one may.
    """

    mean: float | None
    ci_low: float | None
    ci_high: float | None
    geo_mean: float | None
    geo_ci_low: float | None
    geo_ci_high: float | None
    max: float | None
    p99_9: float | None
    p99: float | None
    p95: float | None
    p90: float | None
    median: float | None
    p10: float | None
    p5: float | None
    p1: float | None
    p0_1: float | None
    min: float | None
    n_steps: int
    n_effective: float | None
    n_nonfinite: int
    first_nonfinite_step: int | None
    n_negative: int

    sequence_mean: float | None
    lower_95: float | None
    upper_95: float | None
    geo_lower_95: float | None
    geo_upper_95: float | None
    sd_ln: float | None
    unit: Unit
    n_sequences: int
    failed_sequences: tuple[int, ...]
    pass_blocked: str | None

    def as_dict(self) -> dict[str, float | int | None]:
        """The keys of ``kl`` in results.json, in their order."""
        return {key: getattr(self, key) for key in _KL_KEYS}


def summarize_kl(kl: object, mask: object = None) -> KlSummary:
    """Summarise KL per step.

    Intervals: several sequences, Student's t on their means; one sequence, on ten equal non-overlapping batches. The
    geometric mean has the same units on the log scale. Two-sided coverage of the mean in simulation 93-96 % for AR(1)
    steps with sd(ln KL) <= 1 and n_effective >= 100; as KL is skewed to the right the upper one-sided bound alone
    covers 90-95 %.

    Args:
        kl: [n_sequences, n_steps], or [n_steps] for one sequence; nats.
        mask: the same shape, True where a step counts (padding: False).

    Raises:
        EmptyRunError: no step counts.
        ValueError: shapes do not match.
    """
    steps = Steps.of(kl, mask, name="kl")
    n_steps = int(steps.valid.sum())
    if n_steps == 0:
        raise EmptyRunError("KL: zero steps were measured; give --steps 1 or more")
    finite = steps.finite()
    broken = steps.valid & ~finite.valid
    values = finite.flat()
    quantiles = _quantiles(values)
    means = [row.mean() for row in finite.sequences()]
    units = form_units(finite)
    mean = float(values.mean()) if values.size else None
    two, one = (_not_negative(t_interval(units.values, confidence=level)) for level in (0.95, 0.90))
    geo_mean, geo_two, geo_one = _geometric(finite)
    positive = values[values > 0.0]
    sd_ln = float(np.log(positive).std(ddof=1)) if positive.size > 1 else None
    n_effective = count_effective(finite) if values.size else None
    return KlSummary(
        mean=mean,
        ci_low=two.low if two else None,
        ci_high=two.high if two else None,
        geo_mean=geo_mean,
        geo_ci_low=geo_two.low if geo_two else None,
        geo_ci_high=geo_two.high if geo_two else None,
        max=float(values.max()) if values.size else None,
        min=float(values.min()) if values.size else None,
        **quantiles,
        n_steps=n_steps,
        n_effective=n_effective,
        n_nonfinite=int(broken.sum()),
        first_nonfinite_step=int(np.flatnonzero(broken.any(axis=0))[0]) if broken.any() else None,
        n_negative=int((values < 0.0).sum()),
        sequence_mean=float(np.mean(means)) if means else None,
        lower_95=one.low if one else None,
        upper_95=one.high if one else None,
        geo_lower_95=geo_one.low if geo_one else None,
        geo_upper_95=geo_one.high if geo_one else None,
        sd_ln=sd_ln,
        unit=units.unit,
        n_sequences=int(steps.valid.any(axis=1).sum()),
        failed_sequences=tuple(int(row) for row in np.flatnonzero(broken.any(axis=1))),
        pass_blocked=_block_pass(int(broken.sum()), two, n_effective, sd_ln),
    )


def _quantiles(values: Floats) -> dict[str, float | None]:
    if not values.size:
        return dict.fromkeys(_QUANTILES)
    points = np.quantile(values, list(_QUANTILES.values()))
    return {name: float(point) for name, point in zip(_QUANTILES, points, strict=True)}


def _not_negative(interval: Interval | None) -> Interval | None:
    """A mean KL is >= 0: the part of an interval below 0 says nothing."""
    return interval and Interval(max(interval.low, 0.0), max(interval.high, 0.0))


def _geometric(steps: Steps) -> tuple[float | None, Interval | None, Interval | None]:
    values = steps.flat()
    if not values.size or values.min() <= 0.0:
        return None, None, None
    logs = Steps(np.log(np.where(steps.valid, steps.values, 1.0)), steps.valid)
    units = form_units(logs).values
    both = [t_interval(units, confidence=level) for level in (0.95, 0.90)]
    two, one = (found and Interval(math.exp(found.low), math.exp(found.high)) for found in both)
    return math.exp(float(logs.flat().mean())), two, one


def _block_pass(
    n_nonfinite: int, interval: Interval | None, n_effective: float | None, sd_ln: float | None
) -> str | None:
    if n_nonfinite:
        return f"{n_nonfinite} steps are not finite"
    if interval is None or n_effective is None:
        return "too few steps for an interval: give two sequences, or ten steps of one"
    if n_effective < N_EFFECTIVE_MIN:
        return f"the steps are worth {n_effective:.0f} independent ones, {N_EFFECTIVE_MIN} are needed"
    if sd_ln is not None and sd_ln > SD_LN_MAX:
        return f"sd(ln KL) = {sd_ln:.2f} is above {SD_LN_MAX:g}: the interval of the mean does not hold, see geo_mean"
    return None


@dataclass(frozen=True, kw_only=True)
class ProportionSummary:
    """A fraction of steps: value, two-sided 95 % interval, one-sided 95 % bounds; all within 0 … 1."""

    value: float
    ci_low: float
    ci_high: float
    lower_95: float
    upper_95: float
    n: int
    unit: Unit

    def as_dict(self) -> dict[str, float]:
        """The keys of ``same_top_p`` in results.json."""
        return {"value": self.value, "ci_low": self.ci_low, "ci_high": self.ci_high}


def proportion_ci(same: object, mask: object = None) -> ProportionSummary:
    """Fraction of steps that agree, with an interval that respects autocorrelation.

    The interval is the wider, end by end, of Student's t on sequences (batches of one sequence) and the exact
    binomial interval [Clopper & Pearson 1934] of the steps: the first is wider where steps hang together, the second
    where so few steps differ that the units all look alike (all agree: 0 of n differ still leaves 3/n).

    Args:
        same: [n_sequences, n_steps] bool, or [n_steps].
        mask: the same shape, True where a step counts.

    Raises:
        EmptyRunError: no step counts.
        ValueError: shapes do not match.
    """
    steps = Steps.of(same, mask, name="same")
    n = int(steps.valid.sum())
    if n == 0:
        raise EmptyRunError("agreement on the top token: zero steps were measured; give --steps 1 or more")
    count = float(steps.flat().sum())
    units = form_units(steps)
    ends = {}
    for level in (0.95, 0.90):
        low, high = proportion_confint(count, n, alpha=1.0 - level, method="beta")
        found = t_interval(units.values, confidence=level)
        if found:
            low, high = min(low, found.low), max(high, found.high)
        ends[level] = Interval(max(0.0, float(low)), min(1.0, float(high)))
    return ProportionSummary(
        value=count / n,
        ci_low=ends[0.95].low,
        ci_high=ends[0.95].high,
        lower_95=ends[0.90].low,
        upper_95=ends[0.90].high,
        n=n,
        unit=units.unit,
    )


@dataclass(frozen=True, kw_only=True)
class PerplexitySummary:
    """Perplexities of plan and baseline and their ratio; None where a likelihood of 0 or a NaN makes one undefined."""

    plan: float | None
    baseline: float | None
    ratio: float | None
    ratio_ci_low: float | None
    ratio_ci_high: float | None
    ratio_lower_95: float | None
    ratio_upper_95: float | None
    n: int
    unit: Unit

    def as_dict(self) -> dict[str, float | None]:
        """The keys of ``ppl`` in results.json."""
        keys = ("plan", "baseline", "ratio", "ratio_ci_low", "ratio_ci_high")
        return {key: getattr(self, key) for key in keys}


def perplexity_ratio(nll_plan: object, nll_baseline: object, mask: object = None) -> PerplexitySummary:
    """exp of the mean negative log likelihoods, and the ratio plan / baseline with its interval.

    The interval is Student's t of the paired differences nll_plan - nll_baseline, by sequence (batches of one
    sequence), on the log scale: pairing takes the difficulty of the text out.

    Args:
        nll_plan: [n_sequences, n_steps] or [n_steps], nats.
        nll_baseline: the same shape.
        mask: the same shape, True where a step counts.

    Raises:
        EmptyRunError: no step counts.
        ValueError: shapes do not match.
    """
    plan = Steps.of(nll_plan, mask, name="nll_plan")
    baseline = Steps.of(nll_baseline, mask, name="nll_baseline")
    if plan.values.shape != baseline.values.shape:
        raise ValueError(f"nll_baseline: expected shape {plan.values.shape}, got {baseline.values.shape}")
    n = int(plan.valid.sum())
    if n == 0:
        raise EmptyRunError("perplexity: zero steps were measured; give --steps 1 or more")
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, and NaN is reported as None
        difference = Steps(plan.values - baseline.values, plan.valid)
    units = form_units(difference) if np.isfinite(difference.flat()).all() else None
    two, one = (units and t_interval(units.values, confidence=level) for level in (0.95, 0.90))
    return PerplexitySummary(
        plan=_exp_mean(plan.flat()),
        baseline=_exp_mean(baseline.flat()),
        ratio=_exp_mean(difference.flat()),
        ratio_ci_low=_exp_mean(two.low) if two else None,
        ratio_ci_high=_exp_mean(two.high) if two else None,
        ratio_lower_95=_exp_mean(one.low) if one else None,
        ratio_upper_95=_exp_mean(one.high) if one else None,
        n=n,
        unit=units.unit if units else Unit.SEQUENCE,
    )


def _exp_mean(values: Floats | float) -> float | None:
    """Exp of the mean, or None where that is no finite number (709 is the last exponent of FP64)."""
    mean = float(np.mean(values))
    return math.exp(mean) if math.isfinite(mean) and mean < 709.0 else None


@dataclass(frozen=True, kw_only=True)
class DeltaPSummary:
    """p_plan - p_baseline of the true next token over the finite steps; fractions."""

    mean: float | None
    rms: float | None
    max: float | None
    min: float | None

    def as_dict(self) -> dict[str, float | None]:
        """The keys of ``delta_p`` in results.json."""
        return {"mean": self.mean, "rms": self.rms, "max": self.max, "min": self.min}


def summarize_delta_p(delta_p: object, mask: object = None) -> DeltaPSummary:
    """Mean, root mean square and extremes of Δp; non-finite steps are left out (``summarize_kl`` counts them).

    Args:
        delta_p: [n_sequences, n_steps] or [n_steps].
        mask: the same shape, True where a step counts.

    Raises:
        EmptyRunError: no step counts.
        ValueError: shapes do not match.
    """
    steps = Steps.of(delta_p, mask, name="delta_p")
    if not steps.valid.any():
        raise EmptyRunError("delta p: zero steps were measured; give --steps 1 or more")
    values = steps.finite().flat()
    if not values.size:
        return DeltaPSummary(mean=None, rms=None, max=None, min=None)
    return DeltaPSummary(
        mean=float(values.mean()),
        rms=float(np.sqrt(np.mean(values**2))),
        max=float(values.max()),
        min=float(values.min()),
    )


def quantile_interval(
    values: object, p: float, *, mask: object = None, confidence: float = 0.95
) -> tuple[float | None, float | None]:
    """Interval of the p-quantile of steps (``scipy.stats.quantile_test``); an end that n cannot support is None.

    The upper end of the 99.9 % quantile needs 2,995 steps at 90 % confidence and 3,688 at 95 %. The test counts steps
    as independent; extremes of autocorrelated steps come in clusters, so treat the interval as too narrow there.

    Args:
        values: [n_sequences, n_steps] or [n_steps].
        p: 0 < p < 1.
        mask: the same shape, True where a step counts; non-finite steps count as the greatest.
        confidence: of the two ends together; 0.90 gives one-sided 95 % bounds.

    Raises:
        EmptyRunError: no step counts.
        ValueError: shapes do not match.
    """
    steps = Steps.of(values, mask)
    if not steps.valid.any():
        raise EmptyRunError("quantile: zero steps were measured; give --steps 1 or more")
    flat = steps.flat()
    ranked = np.where(np.isfinite(flat), flat, np.finfo(np.float64).max)
    found = stats.quantile_test(ranked, q=0.0, p=p).confidence_interval(confidence)
    ends = (float(found.low), float(found.high))
    low, high = (end if math.isfinite(end) and end < np.finfo(np.float64).max else None for end in ends)
    return low, high
