"""Per-step figures turned into summaries with intervals: same top token, perplexity, Δp, quantiles.

Notable: units are sequences, or ten batches of one sequence (resampling.py); undefined numbers are None,
never NaN. The summary of KL is in kl_summary.py and can be had from here. Drift over position: drift_law.py;
tasks: noninferiority.py, and power.py for what they can show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from driftgate.accuracy.kl_summary import N_EFFECTIVE_MIN, SD_LN_MAX, KlSummary, summarize_kl
from driftgate.accuracy.resampling import Steps, Unit, clustered_share, form_clusters, form_units, t_interval
from driftgate.errors import EmptyRunError

__all__ = [
    "N_EFFECTIVE_MIN", "SD_LN_MAX", "DeltaPSummary", "KlSummary", "PerplexitySummary", "ProportionSummary",
    "perplexity_ratio", "proportion_ci", "quantile_interval", "summarize_delta_p", "summarize_kl",
]  # fmt: skip

Floats = NDArray[np.float64]


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

    Korn and Graubard's interval (``resampling.clustered_share``): exact and binomial, at the number of
    independent steps that the spread between sequences (ten batches of one sequence) leaves. It keeps its
    level near 1, where few steps differ, unlike Student's t; where all agree, 0 of n differ leaves about 3/n.

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
    sums, sizes = form_clusters(steps)
    if not sizes.size:  # fewer than ten steps of one sequence: nothing to see their dependence by
        sums, sizes = steps.flat(), np.ones(n)
    two, one = (clustered_share(sums[None], sizes, alpha=alpha) for alpha in (0.025, 0.05))
    return ProportionSummary(
        value=float(two.share[0]),
        ci_low=float(two.low[0]),
        ci_high=float(two.high[0]),
        lower_95=float(one.low[0]),
        upper_95=float(one.high[0]),
        n=n,
        unit=Unit.SEQUENCE if len(steps.sequences()) > 1 else Unit.BATCH,
    )


@dataclass(frozen=True, kw_only=True)
class PerplexitySummary:
    """Perplexities of plan and baseline and their ratio; None where a likelihood is 0 or NaN."""

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
    """Exponentials of the mean negative log likelihoods, and the ratio plan / baseline with its interval.

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
    """Mean, root mean square and extremes of Δp; non-finite steps are left out (KL counts them).

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
    """Interval of the p-quantile of steps (``scipy.stats.quantile_test``); None for an end out of reach of n.

    The upper end of the 99.9 % quantile needs 2,995 steps at 90 % confidence and 3,688 at 95 %. The test
    counts steps as independent; extremes of autocorrelated steps come in clusters, so treat the interval as
    too narrow there.

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
