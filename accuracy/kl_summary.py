"""KL per step turned into one summary: means with intervals, quantiles, and what they may decide.

Notable: an interval is formed from sequences, or from ten batches of one sequence, never from steps as if
they were independent (that one covers 41 % of the time at an AR(1) of 0.9). Undefined numbers are None, never
NaN. What a verdict may rest on is said by ``KlSummary.pass_blocked``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from driftgate.accuracy.resampling import Interval, Steps, Unit, count_effective, form_units, t_interval
from driftgate.errors import EmptyRunError

__all__ = ["N_EFFECTIVE_MIN", "SD_LN_MAX", "KlSummary", "summarize_kl"]

Floats = NDArray[np.float64]

N_EFFECTIVE_MIN = 100
"""Below it the interval of a mean KL is marked and cannot decide PASS (coverage was checked from here on)."""

SD_LN_MAX = 1.0
"""sd(ln KL) of the steps up to which the interval of the mean holds (at 2 it covers 78-87 %, not 95)."""

_QUANTILES = {
    "p99_9": 0.999, "p99": 0.99, "p95": 0.95, "p90": 0.90, "median": 0.50,
    "p10": 0.10, "p5": 0.05, "p1": 0.01, "p0_1": 0.001,
}  # fmt: skip
_KL_KEYS = (
    "mean", "ci_low", "ci_high", "geo_mean", "geo_ci_low", "geo_ci_high",
    "max", "p99_9", "p99", "p95", "p90", "median", "p10", "p5", "p1", "p0_1", "min",
    "n_steps", "n_effective", "n_nonfinite", "first_nonfinite_step", "n_negative",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KlSummary:
    """KL of one plan over all steps; nats per step. The first block of fields is what results.json holds.

    Non-finite steps are counted, named by the first of them, and left out of every other figure; they enter
    no mean and no denominator. A plan that has one fails by the rule for non-finite steps and cannot pass
    here.

    Attributes:
        mean: token mean: over all finite steps, each step counts once.
        ci_low: lower end of the two-sided 95 % interval of ``mean``, >= 0; ``ci_high`` is the upper.
        geo_mean: exp(mean of ln KL) over the steps, with the interval of that mean on the log scale; None
            where a step has KL <= 0.
        max: and the quantiles down to ``min``: of the finite steps, linear interpolation as numpy's default.
        n_steps: valid steps, non-finite ones included.
        n_effective: independent steps that the finite ones are worth.
        n_negative: steps below 0; ``kl_divergence`` makes none.
        sequence_mean: mean of the sequences' means, each sequence counts once; differs from ``mean`` where
            lengths do.
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

    Intervals: several sequences, Student's t on their means; one sequence, on ten equal non-overlapping
    batches. The geometric mean has the same units on the log scale. Two-sided coverage of the mean in
    simulation 93-96 % for AR(1) steps with sd(ln KL) <= 1 and n_effective >= 100; as KL is skewed to the
    right the upper one-sided bound alone covers 90-95 %.

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
