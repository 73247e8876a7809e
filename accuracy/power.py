"""What a task can show before it is run: power of the paired verdict, and how much more data would decide.

Notable: power is simulated with the very rule that the verdict uses (paired_tests.py), seeded, so that
``--dry-run`` and the verdict cannot disagree about the rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from statsmodels.stats.power import TTestPower

from driftgate.accuracy.paired_tests import as_fraction, bound_loss

__all__ = ["ItemPower", "power_items", "power_noninferiority", "repeats_needed", "simulate_differences"]

Floats = NDArray[np.float64]

REPEATS_MAX = 10_000
"""More repeats than this are no practical advice: the answer is None."""
SEARCH_MAX = 1024
"""Repeats up to which ``power_items`` searches."""


def power_noninferiority(
    n_clusters: int,
    per_cluster: int,
    flip_rate: float,
    margin: float,
    true_loss: float = 0.0,
    *,
    icc: float = 0.0,
    repeats: int = 1,
    replicates: int = 2000,
    seed: int = 0,
    alpha: float = 0.05,
) -> float:
    """Probability that a plan with this true loss gets PASS; with ``true_loss = margin``: false PASS.

    Standard error of the answer at most 0.011 with 2,000 replicates. A flip rate of answers given once at
    temperature 0 (10 % of 198 items, margin 2: 0.23) is not the one of sampled answers: without shared noise
    two sampled answers of one model differ at 2·p·(1-p), 0.24 … 0.34 on hard questions (198 items, margin 2:
    16 repeats 0.61 … 0.74, 32 repeats 0.86 … 0.95).

    Args:
        n_clusters: streams; with ``per_cluster = 1`` independent items.
        per_cluster: items of each stream.
        flip_rate: fraction of answers that differ when nothing is lost, half of them each way.
        margin: points.
        true_loss: points; these answers are lost on top of the flips.
        icc: correlation of flips within a stream (beta-binomial), 0 … below 1.
        repeats: answers to each item, with independent flips.
        replicates: simulated runs.
        seed: of the simulation.
        alpha: error of the one-sided bound.

    Raises:
        ValueError: a count below 1, or rates outside 0 … 1.
    """
    d = simulate_differences(
        n_clusters,
        per_cluster,
        flip_rate,
        true_loss,
        icc=icc,
        repeats=repeats,
        replicates=replicates,
        seed=seed,
    )
    streams = None if per_cluster == 1 else np.repeat(np.arange(n_clusters), per_cluster)
    return float((bound_loss(d, streams, alpha=alpha).upper <= as_fraction(margin)).mean())


@dataclass(frozen=True)
class ItemPower:
    """What independent items can show of a plan.

    Attributes:
        power: probability of PASS with the repeats asked for.
        repeats_80: least repeats in all at which it is 80 %; None where 1,024 are too few. ``repeats_90`` the same.
    """

    power: float
    repeats_80: int | None
    repeats_90: int | None


def power_items(
    n_items: int,
    repeats: int,
    flip_rate: float,
    margin: float,
    true_loss: float = 0.0,
    *,
    replicates: int = 1000,
    seed: int = 0,
    alpha: float = 0.05,
) -> ItemPower:
    """Power of a task whose items are prompts of their own, and the repeats it needs.

    Standard error of ``power`` at most 0.016 with 1,000 replicates. Repeats count as fresh answers: what an item loses
    at every repeat does not average out. Where nothing flips (greedy answers of a harmless plan) they show nothing new,
    and more items are needed.

    Args:
        n_items: items.
        repeats: answers to each.
        flip_rate: fraction of answers that differ when nothing is lost, half of them each way (see
            ``power_noninferiority`` for greedy and for sampled answers).
        margin: points.
        true_loss: points; these answers are lost on top of the flips.
        replicates, seed: of the simulation.
        alpha: error of the one-sided bound.

    Raises:
        ValueError: a count below 1, or rates outside 0 … 1.
    """

    def power_at(wanted: int) -> float:
        return power_noninferiority(
            n_items, 1, flip_rate, margin, true_loss, repeats=wanted, replicates=replicates, seed=seed, alpha=alpha
        )

    known = {repeats: power_at(repeats)}

    def is_enough(wanted: int, power: float) -> bool:
        known[wanted] = known[wanted] if wanted in known else power_at(wanted)
        return known[wanted] >= power

    def least(power: float) -> int | None:
        high = 1
        while not is_enough(high, power):
            high *= 2
            if high > SEARCH_MAX:
                return None
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(middle, power) else (middle, high)
        return high

    hopeless = true_loss >= margin or (flip_rate == 0.0 and true_loss == 0.0 and not is_enough(1, 0.5))
    return ItemPower(known[repeats], *(None if hopeless else least(power) for power in (0.8, 0.9)))


def simulate_differences(
    n_clusters: int,
    per_cluster: int,
    flip_rate: float,
    true_loss: float,
    *,
    icc: float = 0.0,
    repeats: int = 1,
    replicates: int = 2000,
    seed: int = 0,
) -> Floats:
    """Paired differences d [replicates, n_clusters·per_cluster] by the model of ``power_noninferiority``."""
    lost_rate, gained_rate = flip_rate / 2.0 + as_fraction(true_loss), flip_rate / 2.0
    if min(n_clusters, per_cluster, repeats, replicates) < 1:
        raise ValueError("n_clusters, per_cluster, repeats, replicates: expected at least 1 each")
    if min(lost_rate, gained_rate) < 0.0 or lost_rate + gained_rate > 1.0 or not 0.0 <= icc < 1.0:
        raise ValueError(f"flip_rate, true_loss, icc: expected rates within 0 … 1, got {flip_rate}, {true_loss}, {icc}")
    rng = np.random.default_rng(seed)
    shape = (replicates, n_clusters)
    lost_of = np.repeat(_stream_rates(rng, lost_rate, icc, shape), per_cluster, axis=1)
    gained_of = np.repeat(_stream_rates(rng, gained_rate, icc, shape), per_cluster, axis=1)
    lost = rng.binomial(repeats, lost_of)
    rest = np.divide(gained_of, 1.0 - lost_of, out=np.zeros_like(gained_of), where=lost_of < 1.0)
    gained = rng.binomial(repeats - lost, np.minimum(rest, 1.0))
    return (gained - lost) / float(repeats)


def _stream_rates(rng: np.random.Generator, rate: float, icc: float, shape: tuple[int, int]) -> Floats:
    if icc == 0.0 or rate in (0.0, 1.0):
        return np.full(shape, rate)
    strength = 1.0 / icc - 1.0
    return rng.beta(rate * strength, (1.0 - rate) * strength, shape)


def repeats_needed(
    spread: float,
    distance: float,
    n_units: int,
    *,
    margin: float,
    n_items: int | None = None,
    repeats: int = 1,
    power: float = 0.9,
    alpha: float = 0.05,
) -> int | None:
    """Repeats in all at which a run like this one decides, if loss and spread stay as seen.

    ``TTestPower.solve_power`` gives the units for effect ``|distance| / spread``; a repeat counts as as many
    fresh answers as there are now, so the spread is taken to fall as 1/sqrt(repeats). That is the best case:
    differences that an item shows at every repeat do not average out. Where nothing flipped at all, the exact
    bound of 0 losses decides at ln(alpha) / ln(1 - margin) items, which must be fresh ones.

    Args:
        spread: standard deviation of d between units (items or streams), a fraction.
        distance: delta + margin, a fraction; above 0 PASS is sought, below 0 FAIL.
        n_units: units now.
        margin: points.
        n_items: items now; ``n_units`` if not given.
        repeats: repeats now.
        power: probability of a decision at the answer.
        alpha: error of the one-sided bound.

    Returns:
        More than ``repeats``; None where no practical number decides (loss at the margin, or more than
        10,000).
    """
    if spread <= 1e-12:
        delta = distance - as_fraction(margin)
        if abs(delta) > 1e-12:  # every unit lost or gained alike, and would again
            return None
        factor = math.log(alpha) / math.log1p(-as_fraction(margin)) / (n_items or n_units)
    else:
        effect = abs(distance) / spread
        if effect < 1e-3:
            return None
        if effect > 10.0:  # the solver's brackets end; so few units are wanted that one repeat more will do
            return repeats + 1
        units = TTestPower().solve_power(effect_size=effect, power=power, alpha=alpha, alternative="larger")
        factor = float(units) / n_units
    wanted = max(repeats + 1, math.ceil(factor * repeats))
    return wanted if wanted <= REPEATS_MAX else None
