"""The paired verdict: values, edges, and its simulated error rates in the designs that the suites use."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from driftgate.accuracy.chance import above_chance, items_above_chance
from driftgate.accuracy.noninferiority import (
    bootstrap_interval,
    decide,
    exact_mcnemar,
    holm_over_plans,
    paired_noninferiority,
)
from driftgate.accuracy.paired_tests import bound_loss
from driftgate.accuracy.power import power_noninferiority, repeats_needed, simulate_differences
from driftgate.errors import EmptyRunError


def flips(n, lost, gained):
    d = np.zeros(n)
    d[:lost] = -1.0
    d[lost : lost + gained] = 1.0
    return d


class TestItems:
    def test_nothing_flipped(self):
        found = paired_noninferiority(flips(198, 0, 0), 2)
        assert found.verdict == "pass" and found.bound == pytest.approx(0.0150, abs=5e-5)
        assert found.p_value == 1.0 and (found.lost, found.gained) == (0, 0)
        assert found.ci_low == pytest.approx(-0.0185, abs=5e-5) and found.ci_high == -found.ci_low

    def test_ten_lost_four_gained_is_no_pass(self):
        found = paired_noninferiority(flips(198, 10, 4), 2)
        assert found.verdict == "inconclusive" and found.p_value == pytest.approx(0.1796, abs=5e-5)
        assert found.delta == pytest.approx(-6 / 198) and "repeats" in found.reason

    def test_clear_loss_fails(self):
        found = paired_noninferiority(flips(198, 30, 5), 2)
        assert found.verdict == "fail" and found.fail_bound > 0.02 and found.repeats_needed is None

    def test_is_the_library_t_from_five_gained_on(self):
        d = np.random.default_rng(0).permutation(flips(300, 12, 5))
        found = paired_noninferiority(d, 6)
        test = stats.ttest_1samp(d, -0.06, alternative="greater")
        assert found.p_pass == pytest.approx(test.pvalue, rel=1e-6)
        assert -found.bound == pytest.approx(test.confidence_interval(0.95).low, rel=1e-12)
        assert found.p_fail == 1.0

    def test_is_the_library_binomial_below_five_gained(self):
        found = paired_noninferiority(flips(300, 6, 4), 6)
        assert found.bound == pytest.approx(stats.binomtest(6, 300).proportion_ci(0.90, "exact").high, rel=1e-12)
        test = stats.binomtest(6, 300, 0.06, alternative="less")
        assert found.p_pass == pytest.approx(test.pvalue, rel=1e-6)

    def test_fail_is_the_library_t(self):
        d = flips(198, 20, 3)
        test = stats.ttest_1samp(d, -0.02, alternative="less")
        assert paired_noninferiority(d, 2).p_fail == pytest.approx(test.pvalue, rel=1e-6)

    @pytest.mark.parametrize("difference", [-1e-9, 0.0, 1e-9])
    def test_the_observed_loss_does_not_decide_at_the_margin(self, difference):
        found = paired_noninferiority(np.full(198, -0.02 + difference), 2)
        assert found.verdict == "inconclusive" and found.repeats_needed is None

    def test_baseline_that_is_never_right_can_lose_nothing(self):
        found = paired_noninferiority(np.zeros(198), 2)  # the gate by chance level is above_chance's
        assert found.verdict == "pass" and not above_chance(0, 198, 0.25)

    def test_everything_lost_fails(self):
        assert paired_noninferiority(np.full(50, -1.0), 2).verdict == "fail"

    def test_everything_gained_passes(self):
        assert paired_noninferiority(np.full(198, 1.0), 2).verdict == "pass"

    def test_means_over_repeats(self):
        rng = np.random.default_rng(0)
        d = (rng.binomial(16, 0.6, 198) - rng.binomial(16, 0.6, 198)) / 16
        found = paired_noninferiority(d, 4, repeats=16)
        assert found.p_pass == pytest.approx(stats.ttest_1samp(d, -0.04, alternative="greater").pvalue, rel=1e-6)

    @pytest.mark.parametrize(
        ("d", "options", "says"),
        [
            ([0.0, np.nan], {}, "NaN"),
            ([0.0, 1.5], {}, "-1 … 1"),
            ([[0.0]], {}, "one axis"),
            ([0.0], {"margin": 0.0}, "margin"),
            ([0.0], {"clusters": [1, 2]}, "clusters"),
            ([0.0], {"alpha": 0.5}, "alpha"),
            ([0.0], {"repeats": 0}, "repeats"),
        ],
    )
    def test_refuses(self, d, options, says):
        arguments = {"margin": 2.0} | options
        with pytest.raises(ValueError, match=says):
            paired_noninferiority(d, **arguments)

    def test_zero_items_are_an_error(self):
        with pytest.raises(EmptyRunError, match="zero items"):
            paired_noninferiority([], 2)


class TestDecide:
    """The documented side of the line: a bound equal to the limit passes, and nothing is rounded."""

    @pytest.mark.parametrize(
        ("upper", "lower", "verdict"),
        [
            (0.02, 0.0, "pass"),
            (0.02 - 1e-9, 0.0, "pass"),
            (0.02 + 1e-9, 0.0, "inconclusive"),
            (0.5, 0.02, "inconclusive"),
            (0.5, 0.02 + 1e-9, "fail"),
        ],
    )
    def test_sides(self, upper, lower, verdict):
        assert decide(upper, lower, 0.02) == verdict


class TestStreams:
    def test_nothing_flipped_is_the_exact_bound_of_the_items(self):
        found = paired_noninferiority(np.zeros(256), 2, clusters=np.repeat(np.arange(16), 16))
        assert found.bound == pytest.approx(1 - 0.05 ** (1 / 256), rel=1e-9)
        assert (found.verdict, found.n, found.n_units) == ("pass", 256, 16)
        assert "16 streams" in found.reason

    def test_losses_in_one_stream_weigh_more_than_spread_ones(self):
        streams = np.repeat(np.arange(16), 16)
        spread, heaped = np.zeros(256), np.zeros(256)
        spread[::32] = -1.0
        heaped[:8] = -1.0
        a, b = (paired_noninferiority(d, 6, clusters=streams) for d in (spread, heaped))
        assert a.delta == b.delta and a.bound < b.bound and b.design_effect > 5 > a.design_effect
        assert (a.verdict, b.verdict) == ("pass", "inconclusive")

    def test_labels_may_be_anything_in_any_order(self):
        rng = np.random.default_rng(0)
        d, streams = rng.choice([-1.0, 0.0, 1.0], 64, p=[0.1, 0.8, 0.1]), np.repeat(np.arange(8), 8)
        order = rng.permutation(64)
        names = np.array([f"s{7 - s}" for s in streams])
        a, b = (
            paired_noninferiority(d, 6, clusters=streams),
            paired_noninferiority(d[order], 6, clusters=names[order]),
        )
        assert a.bound == pytest.approx(b.bound, rel=1e-12) and a.lost == b.lost

    def test_one_stream_decides_nothing(self):
        found = paired_noninferiority(np.zeros(500), 2, clusters=np.zeros(500))
        assert found.verdict == "inconclusive" and "one stream" in found.reason

    def test_repeats_go_by_stream_means(self):
        rng = np.random.default_rng(0)
        d = (rng.binomial(8, 0.6, (16, 16)) - rng.binomial(8, 0.6, (16, 16))) / 8
        found = paired_noninferiority(d.ravel(), 5, clusters=np.repeat(np.arange(16), 16), repeats=8)
        test = stats.ttest_1samp(d.mean(axis=1), -0.05, alternative="greater")
        assert found.p_pass == pytest.approx(test.pvalue, rel=1e-6)

    def test_bound_and_p_agree(self):
        streams = np.repeat(np.arange(16), 16)
        for seed in range(20):
            d = np.random.default_rng(seed).choice([-1.0, 0.0, 1.0], 256, p=[0.04, 0.93, 0.03])
            found = paired_noninferiority(d, 4, clusters=streams)
            assert (found.p_pass <= 0.05) == (found.bound <= 0.04)
            assert found.ci_low <= -found.bound <= found.delta <= found.ci_high


def rates(streams, items, margin, *, churn, loss, icc=0.0, replicates=4000, seed=1):
    """Shares of PASS and FAIL; ``churn`` is the total flip rate at no loss."""
    d = simulate_differences(streams, items, churn, loss, icc=icc, replicates=replicates, seed=seed)
    of = None if items == 1 else np.repeat(np.arange(streams), items)
    bounds = bound_loss(d, of, alpha=0.05)
    return (bounds.upper <= margin / 100).mean(), (bounds.lower > margin / 100).mean()


class TestSimulatedErrorRates:
    """4,000 runs a cell, standard error 0.34 points; asked: false PASS <= 6 %, harmless plans pass >= 95 %.

    Worst over 0-12 % total flips, 10,000 runs a cell, false PASS of a plan that loses exactly the margin:

    ========  ==================  ==================  ===================
    design    independent flips   icc 0.05            icc 0.1
    ========  ==================  ==================  ===================
    16 x 16   3.1-3.6 %           4.9-5.2 %           6.4-7.9 %
    32 x 16   4.0-4.1 %           5.1-5.7 %           5.8-7.1 %
    ========  ==================  ==================  ===================

    PASS of a plan that loses nothing, independent flips, by total flip rate 1, 2, 4, 6, 12 %:

    ======== ===================== ===================== ===================== =====================
    design   margin 3              margin 4              margin 5              margin 6
    ======== ===================== ===================== ===================== =====================
    16 x 8   .58 .41 .30 .26 .16   .88 .73 .53 .42 .25   .97 .89 .69 .55 .37   .99 .94 .81 .69 .49
    16 x 16  .92 .79 .59 .47 .30   .99 .95 .83 .71 .47   1.  .99 .94 .87 .65   1.  1.  .99 .95 .79
    24 x 16  .99 .95 .81 .67 .43   1.  1.  .96 .88 .67   1.  1.  .99 .97 .83   1.  1.  1.  1.  .93
    32 x 8   .93 .83 .63 .50 .33   .99 .96 .85 .73 .52   1.  .99 .95 .89 .68   1.  1.  .99 .96 .82
    32 x 16  1.  .99 .91 .80 .56   1.  1.  .99 .96 .79   1.  1.  1.  .99 .92   1.  1.  1.  1.  .98
    64 x 16  1.  1.  1.  .98 .85   1.  1.  1.  1.  .97   1.  1.  1.  1.  1.    1.  1.  1.  1.  1.
    ======== ===================== ===================== ===================== =====================
    """

    @pytest.mark.parametrize("margin", [3, 6])
    @pytest.mark.parametrize("streams", [16, 32])
    @pytest.mark.parametrize("icc", [0.0, 0.05])
    def test_false_pass_at_the_margin(self, streams, margin, icc):
        worst = max(rates(streams, 16, margin, churn=c, loss=margin, icc=icc)[0] for c in (0, 0.02, 0.04, 0.06, 0.12))
        assert worst <= 0.06 + 2 * 0.0034

    @pytest.mark.parametrize("streams", [16, 32])
    def test_false_fail_at_the_margin(self, streams):
        worst = max(rates(streams, 16, 4, churn=c, loss=4)[1] for c in (0, 0.02, 0.06))
        assert worst <= 0.05 + 2 * 0.0034

    @pytest.mark.parametrize(
        ("streams", "margin", "churn"),
        [(16, 4, 0.01), (16, 5, 0.02), (16, 6, 0.04), (32, 3, 0.02), (32, 4, 0.06)],
    )
    def test_harmless_plan_passes(self, streams, margin, churn):
        assert rates(streams, 16, margin, churn=churn, loss=0)[0] >= 0.95

    def test_independent_items(self):
        """198 questions: worst false PASS 5.9 %, false FAIL 5.2 % over flip rates."""
        found = [rates(198, 1, 2, churn=c, loss=2) for c in (0, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2)]
        assert max(p for p, _ in found) <= 0.06 + 2 * 0.0034
        assert max(f for _, f in found) <= 0.055 + 2 * 0.0034

    def test_flips_within_streams_correlate_as_asked(self):
        d = simulate_differences(400, 16, 0.2, 0.0, icc=0.3, replicates=20)
        lost = (d < 0).reshape(20, 400, 16)
        between, p = lost.mean(axis=2).var(), lost.mean()
        assert (between / (p * (1 - p)) * 16 - 1) / 15 == pytest.approx(0.3, abs=0.03)


class TestPower:
    def test_of_the_published_design(self):
        """198 items, margin 2: 10 % flips once 0.23; sampled, 16 repeats 0.61-0.74, 32 0.86-0.95."""
        assert power_noninferiority(198, 1, 0.10, 2) == pytest.approx(0.23, abs=0.03)
        assert power_noninferiority(198, 1, 0.34, 2, repeats=16) == pytest.approx(0.61, abs=0.04)
        assert power_noninferiority(198, 1, 0.24, 2, repeats=32) == pytest.approx(0.95, abs=0.03)

    def test_is_seeded(self):
        assert power_noninferiority(16, 16, 0.04, 4) == power_noninferiority(16, 16, 0.04, 4)

    def test_grows_with_streams_and_margin(self):
        small = power_noninferiority(16, 16, 0.06, 3)
        assert small < power_noninferiority(32, 16, 0.06, 3) and small < power_noninferiority(16, 16, 0.06, 5)

    @pytest.mark.parametrize("bad", [(0, 16, 0.1, 2), (16, 16, 1.5, 2), (16, 16, -0.1, 2)])
    def test_refuses(self, bad):
        with pytest.raises(ValueError, match="expected"):
            power_noninferiority(*bad)

    def test_repeats_needed_decide(self):
        """10 % flips, nothing lost, margin 2: R repeats at that spread give 90 % power."""
        wanted = repeats_needed(math.sqrt(0.1), 0.02, 198, margin=2)
        assert power_noninferiority(198, 1, 0.1, 2, repeats=wanted) == pytest.approx(0.9, abs=0.03)

    def test_repeats_needed_where_nothing_flipped(self):
        """0 of n bounds the loss below 1 point from n = 299 on: two repeats of 198 fresh items."""
        assert repeats_needed(0.0, 0.01, 198, margin=1) == 2

    @pytest.mark.parametrize(("spread", "distance"), [(0.3, 0.0), (0.3, 1e-5), (0.0, -0.01), (0.0, 1e-9)])
    def test_no_practical_number(self, spread, distance):
        assert repeats_needed(spread, distance, 198, margin=2) is None

    def test_never_fewer_than_now(self):
        assert repeats_needed(0.01, 0.02, 198, margin=2, repeats=4) == 5


class TestOtherTests:
    def test_mcnemar(self):
        assert exact_mcnemar(0, 0) == 1.0
        assert exact_mcnemar(10, 4) == exact_mcnemar(4, 10) == pytest.approx(0.1796, abs=5e-5)
        assert exact_mcnemar(0, 8) == pytest.approx(2 * 0.5**8)

    def test_bootstrap(self):
        d = np.random.default_rng(0).normal(0.1, 1, 400).clip(-1, 1)
        low, high = bootstrap_interval(d)
        interval = stats.ttest_1samp(d, 0).confidence_interval()
        assert (low, high) == pytest.approx((interval.low, interval.high), abs=0.01)
        assert bootstrap_interval(d) == (low, high)

    @pytest.mark.parametrize("d", [np.zeros(198), np.ones(5), [0.5]])
    def test_bootstrap_of_equal_items_is_null(self, d):
        assert bootstrap_interval(d) is None

    def test_bootstrap_resamples_streams(self):
        d = np.repeat([-1.0, 1.0] * 8, 16)
        low, high = bootstrap_interval(d, clusters=np.repeat(np.arange(16), 16))
        assert high - low > 0.8 > np.diff(bootstrap_interval(d))[0]

    def test_holm(self):
        found = holm_over_plans({"a": {"x": 0.001, "y": 0.02}, "b": {"x": 0.03}, "c": {"x": 1e-4, "y": 1e-3}})
        assert [found[plan].p for plan in "abc"] == [0.02, 0.03, 0.001]
        assert [found[plan].p_adjusted for plan in "abc"] == pytest.approx([0.04, 0.04, 0.003])
        assert all(result.passes for result in found.values())
        assert not holm_over_plans({"a": {"x": 0.03}, "b": {"x": 0.03}})["a"].passes

    def test_holm_of_nothing(self):
        with pytest.raises(EmptyRunError):
            holm_over_plans({"a": {}})

    def test_above_chance(self):
        """32 of 100 at 1/4: P(X >= 32) = 0.069, at 33 0.045."""
        assert not above_chance(32, 100, 0.25) and above_chance(33, 100, 0.25)
        assert above_chance(33, 100, 0.25).p_value == pytest.approx(stats.binom.sf(32, 100, 0.25), rel=1e-9)
        assert above_chance(1, 10, 0.0) and not above_chance(0, 10, 0.0)

    def test_above_chance_of_nothing(self):
        with pytest.raises(EmptyRunError):
            above_chance(0, 0, 0.25)
        with pytest.raises(ValueError, match="correct"):
            above_chance(3, 2, 0.25)

    def test_single_answers_of_items_are_the_binomial_test(self):
        assert items_above_chance([1.0] * 33 + [0.0] * 67, 0.25) == above_chance(33, 100, 0.25)
        assert items_above_chance([1.0] * 100, 0.25) == above_chance(100, 100, 0.25)
        assert items_above_chance([0.5] * 100, 0.25) == above_chance(50, 100, 0.25)  # no spread to go by

    def test_means_over_repeats_are_students_t(self):
        means = np.random.default_rng(0).binomial(8, 0.3, 200) / 8
        found, test = items_above_chance(means, 0.25), stats.ttest_1samp(means, 0.25, alternative="greater")
        assert (found.p_value, found.accuracy) == pytest.approx((test.pvalue, means.mean()), rel=1e-12)
        assert bool(found) == (found.p_value <= 0.05) == (found.lower_95 >= 0.25)

    def test_one_answer_in_many_is_above_a_chance_of_0(self):
        assert items_above_chance([0.25] + [0.0] * 20 + [0.25] * 9, 0.0)
        assert not items_above_chance([0.0] * 20, 0.0)

    def test_guessing_items_are_above_chance_as_often_as_the_test_says(self):
        """Items that a guesser favours at every repeat, 40 x 8: 5 % and three standard errors of 1,000 runs, 7.1 %."""
        means = np.random.default_rng(1).beta(0.5, 1.5, (1000, 40)).round(3)
        assert np.mean([bool(items_above_chance(m, 0.25)) for m in means]) <= 0.071
        answers = np.random.default_rng(2).binomial(8, means).sum(axis=1)
        assert np.mean([bool(above_chance(int(a), 320, 0.25)) for a in answers]) > 0.15

    def test_above_chance_of_no_items(self):
        with pytest.raises(EmptyRunError):
            items_above_chance([], 0.25)
