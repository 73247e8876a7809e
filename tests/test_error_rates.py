"""Simulated error rates of the paired verdict on items, with and without repeats and streams, and power of item tasks.

Asked: two-sided 95 % intervals cover 93-97 %, a plan that loses exactly the margin passes at most 6 %. A share of n
runs has a standard error of sqrt(p (1 - p) / n); limits below leave three of them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from driftgate.accuracy.noninferiority import paired_noninferiority
from driftgate.accuracy.paired_tests import bound_loss
from driftgate.accuracy.power import ItemPower, power_items, power_noninferiority, simulate_differences

RUNS = 2000


def spread(p: float, runs: int = RUNS) -> float:
    """Three standard errors of a share p of the runs."""
    return 3 * math.sqrt(p * (1 - p) / runs)


def bounds(d: np.ndarray, per_stream: int = 1, alpha: float = 0.05):
    streams = None if per_stream == 1 else np.repeat(np.arange(d.shape[1] // per_stream), per_stream)
    return bound_loss(d, streams, alpha=alpha)


def covered(d: np.ndarray, loss: float, per_stream: int = 1) -> float:
    two_sided = bounds(d, per_stream, alpha=0.025)
    return float(((two_sided.lower <= loss) & (loss <= two_sided.upper)).mean())


def uneven_items(n: int, repeats: int, loss: float, share: float, seed: int) -> tuple[np.ndarray, float]:
    """Sampled answers to items of very different difficulty, p of Beta(0.9, 1.1), of which a share loses; true loss."""
    rng = np.random.default_rng(seed)
    p = rng.beta(0.9, 1.1, (RUNS, n))
    lower = np.clip(p * (1 - loss / share / 0.45 * (rng.random((RUNS, n)) < share)), 0, 1)
    return (rng.binomial(repeats, lower) - rng.binomial(repeats, p)) / repeats, float((p - lower).mean())


# Flip rates of the single answer; 198 and 448 items are GPQA's diamond and main sets.
ITEMS = [
    (198, 0.10, 2, 1),
    (198, 0.20, 2, 1),
    (448, 0.10, 2, 1),
    (198, 0.10, 2, 4),
    (198, 0.34, 2, 16),
    (198, 0.24, 0, 32),
]
STREAMS = [(32, 16, 0.06, 4, 1), (16, 16, 0.06, 0, 1), (32, 16, 0.20, 2, 1), (32, 16, 0.20, 2, 4)]


@pytest.mark.parametrize(("n", "flips", "loss", "repeats"), ITEMS)
def test_the_interval_of_independent_items_covers(n, flips, loss, repeats):
    d = simulate_differences(n, 1, flips, loss, repeats=repeats, replicates=RUNS, seed=11)
    assert 0.93 - spread(0.93) <= covered(d, loss / 100) <= 0.97 + spread(0.97)


@pytest.mark.parametrize(("streams", "each", "flips", "loss", "repeats"), STREAMS)
def test_the_interval_of_items_in_streams_covers(streams, each, flips, loss, repeats):
    """From above: adding two exact bounds in quadrature is on the safe side where little flips; found 95 to 97 %."""
    d = simulate_differences(streams, each, flips, loss, repeats=repeats, replicates=RUNS, seed=12)
    assert 0.93 - spread(0.93) <= covered(d, loss / 100, each) <= 0.975 + spread(0.975)


@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("repeats", [1, 4, 16])
def test_items_of_uneven_difficulty_change_nothing(repeats, share):
    """The loss may sit in a tenth of the items: repeats of one item are no fresh items, and are not taken for them."""
    d, loss = uneven_items(198, repeats, 0.02, share, seed=repeats)
    found = bounds(d)
    assert 0.93 - spread(0.93) <= covered(d, loss) <= 0.97 + spread(0.97)
    assert (found.upper <= loss).mean() <= 0.06 + spread(0.06)
    assert (found.lower > loss).mean() <= 0.06 + spread(0.06)


def test_answers_taken_for_items_would_not_cover():
    """The case that repeats are for: an item that is lost at every repeat. As 16 x 198 items the level is far off."""
    rng = np.random.default_rng(5)
    lost, gained = (rng.random((RUNS, 198)) < 0.06 for _ in range(2))
    by_item = gained.astype(float) - lost
    assert covered(by_item, 0.0) >= 0.93 - spread(0.93)
    assert covered(np.repeat(by_item[:300], 16, axis=1), 0.0) < 0.6


@pytest.mark.parametrize("repeats", [2, 4, 16])
@pytest.mark.parametrize("flips", [0.0, 0.02, 0.10, 0.34])
def test_a_loss_of_the_margin_passes_at_most_as_often_as_the_test_errs(flips, repeats):
    d = simulate_differences(198, 1, flips, 2, repeats=repeats, replicates=RUNS, seed=13)
    found = bounds(d)
    assert (found.upper <= 0.02).mean() <= 0.06 + spread(0.06)
    assert (found.lower > 0.02).mean() <= 0.06 + spread(0.06)


@pytest.mark.parametrize("repeats", [2, 8])
@pytest.mark.parametrize("flips", [0.0, 0.06, 0.20])
def test_so_it_does_in_streams(flips, repeats):
    d = simulate_differences(16, 16, flips, 4, repeats=repeats, replicates=RUNS, seed=14)
    assert (bounds(d, 16).upper <= 0.04).mean() <= 0.06 + spread(0.06)


def test_a_harmless_plan_with_an_unlucky_small_sample_is_inconclusive():
    """40 items, 10 % flips, nothing lost: most runs that seem to lose 5 points or more decide nothing."""
    d = simulate_differences(40, 1, 0.10, 0, replicates=RUNS, seed=15)
    found, unlucky = bounds(d), d.mean(axis=1) <= -0.05
    assert (found.lower > 0.02).mean() <= 0.05 + spread(0.05)
    assert unlucky.sum() > 200
    assert ((found.lower > 0.02) | (found.upper <= 0.02))[unlucky].mean() < 0.5
    three_lost = paired_noninferiority(np.repeat([-1.0, 0.0], [3, 37]), 2)
    assert three_lost.delta == pytest.approx(-0.075)
    assert three_lost.verdict == "inconclusive"


def expected_power(n: int, flips: float, repeats: int) -> float:
    """Of the t test in the limit of many items: Phi(margin / s.e. - z), s.e. = sqrt(flips / (items x repeats))."""
    return float(stats.norm.cdf(0.02 / math.sqrt(flips / (n * repeats)) - stats.norm.isf(0.05)))


@pytest.mark.parametrize(
    ("flips", "repeats", "told"),
    [(0.10, 1, 0.23), (0.34, 16, 0.61), (0.24, 16, 0.74), (0.34, 32, 0.86), (0.24, 32, 0.95)],
)
def test_power_on_198_items_at_two_points_is_what_is_told(flips, repeats, told):
    """Nothing lost. Greedy answers flip in 10 %; sampled ones of the same model differ in 2 p (1 - p): 24 to 34 %.

    Told to two digits: half of the last one, three standard errors of 2,000 runs, and, once only, 2 points more for
    the exact bound of the few runs with fewer than five items gained.
    """
    assert expected_power(198, flips, repeats) == pytest.approx(told, abs=0.01 + 0.02 * (repeats == 1))
    found = power_items(198, repeats, flips, 2, replicates=RUNS).power
    assert found == pytest.approx(told, abs=0.005 + spread(told) + 0.02 * (repeats == 1))


@pytest.mark.parametrize(("flips", "margin"), [(0.10, 2), (0.34, 2), (0.24, 4)])
def test_the_repeats_that_are_told_have_that_power(flips, margin):
    """Other seeds at the answer; one repeat fewer is not enough. (z_80 + z_95)² flips / (n margin²) is the formula."""
    found = power_items(198, 1, flips, margin)
    for power, repeats in ((0.8, found.repeats_80), (0.9, found.repeats_90)):
        again = power_noninferiority(198, 1, flips, margin, repeats=repeats, replicates=RUNS, seed=77)
        assert again >= power - spread(power, 1000) - spread(power)
        z = stats.norm.isf(1 - power) + stats.norm.isf(0.05)
        assert repeats == pytest.approx(z**2 * flips / (198 * (margin / 100) ** 2), rel=0.08, abs=1)


def test_repeats_cannot_help_where_nothing_flips():
    """0 lost of 198 bounds the loss at 1.50 points whatever the repeats."""
    assert power_items(198, 1, 0.0, 2) == ItemPower(1.0, 1, 1)
    assert power_items(198, 1, 0.0, 1.5) == ItemPower(0.0, None, None)


def test_no_repeats_show_what_is_not_so():
    found = power_items(198, 4, 0.10, 2, true_loss=2)
    assert (found.repeats_80, found.repeats_90) == (None, None)
    assert found.power <= 0.06 + spread(0.06, 1000)


def test_power_of_items_is_seeded_and_refuses():
    assert power_items(60, 2, 0.2, 5, replicates=200) == power_items(60, 2, 0.2, 5, replicates=200)
    with pytest.raises(ValueError, match="expected"):
        power_items(0, 1, 0.1, 2)
