"""What may be treated as independent: sequences, or ten batches of one sequence; and what n is worth.

Notable: steps of one stream are autocorrelated, so no interval here is formed from steps. Several sequences:
the unit is the sequence. One sequence: ten equal non-overlapping batches. The owner of this choice is this
file alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from statsmodels.stats.proportion import proportion_confint
from statsmodels.tsa.stattools import acf

__all__ = [
    "N_BATCHES", "Interval", "Share", "Steps", "Unit", "Units", "clustered_share", "count_effective",
    "exact_bounds", "form_clusters", "form_units", "t_interval",
]  # fmt: skip

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

N_BATCHES = 10
"""Batches of one sequence. Simulated coverage of the 95 % interval 93-96 % where n_effective >= 100."""


class Unit(StrEnum):
    """What an interval resamples."""

    SEQUENCE = "sequence"
    BATCH = "batch"


@dataclass(frozen=True)
class Interval:
    """A two-sided interval, or, by its ends, two one-sided bounds at half the error each."""

    low: float
    high: float


@dataclass(frozen=True)
class Steps:
    """Per-step values of some sequences, with the steps that count.

    Attributes:
        values: [n_sequences, n_steps] FP64.
        valid: the same shape, bool; False for padding, which enters nothing.
    """

    values: Floats
    valid: Bools

    @classmethod
    def of(cls, values: object, mask: object = None, *, name: str = "values") -> Steps:
        """Check and convert; one-dimensional input is one sequence; ``mask`` is True where a step counts.

        Raises:
            ValueError: not one or two axes, or the mask has another shape.
        """
        array = np.atleast_2d(np.asarray(values, dtype=np.float64))
        if array.ndim != 2:
            raise ValueError(f"{name}: expected [n_sequences, n_steps], got {array.ndim} axes")
        if mask is None:
            return cls(array, np.ones(array.shape, dtype=bool))
        valid = np.atleast_2d(np.asarray(mask, dtype=bool))
        if valid.shape != array.shape:
            raise ValueError(f"mask: expected shape {array.shape}, got {valid.shape}")
        return cls(array, valid)

    def finite(self) -> Steps:
        """The same values with non-finite steps no longer valid."""
        return Steps(self.values, self.valid & np.isfinite(self.values))

    def sequences(self) -> list[Floats]:
        """The valid steps of each sequence that has any, in order."""
        rows = [row[keep] for row, keep in zip(self.values, self.valid, strict=True)]
        return [row for row in rows if row.size]

    def flat(self) -> Floats:
        """All valid steps, sequence after sequence."""
        return self.values[self.valid]


@dataclass(frozen=True)
class Units:
    """Values that may be treated as independent and whose plain mean is the mean over all valid steps.

    Attributes:
        values: [n_units] FP64; empty where one sequence has fewer than ten steps.
        unit: what one of them is.
    """

    values: Floats
    unit: Unit


def form_units(steps: Steps) -> Units:
    """Sequence means if there are several sequences, else the means of ten batches of the one.

    With sequences of unequal length the mean over steps is a ratio estimate, so sequence s enters as
    ``mean + (sum_s - mean·n_s)·S/N``, its linearised share [Cochran 1977, section 6]; with equal lengths that
    is its mean. Of one sequence the leading ``n mod 10`` steps enter no batch, and the batch means are
    centred on the mean over all steps.
    """
    rows = steps.sequences()
    if len(rows) > 1:
        sizes = np.array([row.size for row in rows], dtype=np.float64)
        sums = np.array([row.sum() for row in rows])
        mean = sums.sum() / sizes.sum()
        return Units(mean + (sums - mean * sizes) * len(rows) / sizes.sum(), Unit.SEQUENCE)
    if not rows or rows[0].size < N_BATCHES:
        return Units(np.empty(0), Unit.BATCH)
    row = rows[0]
    means = row[row.size % N_BATCHES :].reshape(N_BATCHES, -1).mean(axis=1)
    return Units(means + (row.mean() - means.mean()), Unit.BATCH)


def form_clusters(steps: Steps) -> tuple[Floats, Floats]:
    """Sums and sizes [n_units] of the units that ``form_units`` would take; empty where it has none."""
    rows = steps.sequences()
    if len(rows) == 1 and rows[0].size >= N_BATCHES:
        rows = np.array_split(rows[0], N_BATCHES)
    if len(rows) < 2:
        return np.empty(0), np.empty(0)
    return np.array([row.sum() for row in rows]), np.array([float(row.size) for row in rows])


def t_interval(values: Floats, *, confidence: float = 0.95) -> Interval | None:
    """Student's interval of the mean of independent values (``scipy.stats.ttest_1samp``).

    Returns:
        None below two values. Equal values give an interval of no width.
    """
    if values.size < 2:
        return None
    mean = float(values.mean())
    if np.ptp(values) <= 1e-12 * abs(mean):
        return Interval(mean, mean)
    interval = stats.ttest_1samp(values, 0.0).confidence_interval(confidence)
    return Interval(float(interval.low), float(interval.high))


def count_effective(steps: Steps) -> float:
    """How many independent steps the valid steps are worth: Σ over sequences of n / (1 + 2 Σ_k rho_k).

    The sum over lags runs over pairs rho_2k + rho_2k+1 and stops at the first pair that is not positive
    [Geyer 1992], so that noise of far lags does not enter. At most n a sequence; a constant sequence counts
    n. Unit: steps.
    """
    return float(sum(_effective_of_one(row) for row in steps.sequences()))


def _effective_of_one(row: Floats) -> float:
    if row.size < 4 or np.ptp(row) == 0.0:
        return float(row.size)
    scaled = row / np.abs(row).max()  # squares of a KL of 1e-200 would be 0
    if np.var(scaled) == 0.0:
        return float(row.size)
    correlations = acf(scaled, nlags=row.size - 1, fft=True)
    pairs = correlations[: 2 * (row.size // 2)].reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0.0)
    time = 2.0 * pairs[: ends[0] if ends.size else pairs.size].sum() - 1.0
    return float(row.size / max(time, 1.0))


@dataclass(frozen=True)
class Share:
    """A share of items with one-sided bounds, for many replicates at once: all [n_replicates] FP64.

    Attributes:
        share: counted items over all items.
        low: lower bound; ``high`` the upper, each at the error asked for.
        design_effect: variance of the share between clusters over that of independent items; 1 where the
            share is 0 or 1.
    """

    share: Floats
    low: Floats
    high: Floats
    design_effect: Floats


def clustered_share(counts: Floats, sizes: Floats, *, alpha: float) -> Share:
    """Korn and Graubard's bounds of a share whose items come in clusters [Survey Methodology 24, 1998].

    The exact binomial bounds at the effective number of items ``n / deff · (t_{n-1} / t_{S-1})²``, at most n.
    deff is the design effect, and the ratio of t quantiles at error alpha pays for estimating it from S
    clusters. Where all clusters agree at 0 or 1 these are the exact bounds of n items.

    Args:
        counts: [n_replicates, S] items of each cluster that count, fractions allowed.
        sizes: [S] items of each cluster, S >= 2.
        alpha: error of each bound, below 0.5.
    """
    n, clusters = float(sizes.sum()), sizes.size
    share = counts.sum(axis=1) / n
    free = share * (1.0 - share) / n
    between = ((counts - share[:, None] * sizes) ** 2).sum(axis=1) / n**2 * (clusters / max(clusters - 1, 1))
    effect = np.divide(between, free, out=np.ones_like(free), where=free > 0.0)
    full, few = stats.t.isf(alpha, [max(n - 1.0, 1.0), max(clusters - 1, 1)])
    effective = np.where(free > 0.0, np.minimum(n, n / np.maximum(effect, 1e-12) * (full / few) ** 2), n)
    low, high = exact_bounds(share * effective, effective, alpha=alpha)
    return Share(share, low, high, effect)


def exact_bounds(count: object, n: Floats | int, *, alpha: float) -> tuple[Floats, Floats]:
    """Clopper and Pearson's bounds at error ``alpha`` each, also for fractional counts."""
    low, high = proportion_confint(np.asarray(count, dtype=np.float64), n, alpha=2.0 * alpha, method="beta")
    return np.asarray(low), np.asarray(high)
