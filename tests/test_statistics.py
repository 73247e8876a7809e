"""Summaries of per-step figures and the drift law: values, edges, and simulated coverage of the intervals."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from driftgate.accuracy.drift_law import by_position, by_window_offset, drift_law
from driftgate.accuracy.resampling import Steps, Unit, count_effective, form_units, t_interval
from driftgate.accuracy.statistics import (
    perplexity_ratio,
    proportion_ci,
    quantile_interval,
    summarize_delta_p,
    summarize_kl,
)
from driftgate.errors import EmptyRunError

KL_KEYS = (
    "mean ci_low ci_high geo_mean geo_ci_low geo_ci_high max p99_9 p99 p95 p90 median p10 p5 p1 p0_1 min "
    "n_steps n_effective n_nonfinite first_nonfinite_step n_negative"
)


def autoregressive(rng, shape, *, correlation, sd):
    """Exp of stationary Gaussian AR(1) steps: ln KL with the given standard deviation; mean exp(sd²/2)."""
    steps = rng.standard_normal(shape)
    steps[..., 1:] *= math.sqrt(1 - correlation**2)
    for t in range(1, shape[-1]):
        steps[..., t] += correlation * steps[..., t - 1]
    return np.exp(sd * steps)


class TestKlSummary:
    def test_keys_are_those_of_the_contract_in_order(self):
        assert list(summarize_kl(np.ones((2, 20))).as_dict()) == KL_KEYS.split()

    def test_values_of_a_known_sample(self):
        kl = np.arange(1.0, 41.0).reshape(2, 20)
        found = summarize_kl(kl)
        means = stats.ttest_1samp(kl.mean(axis=1), 0.0).confidence_interval(0.95)
        assert found.mean == 20.5 and found.median == 20.5 and found.min == 1.0 and found.max == 40.0
        assert found.ci_low == max(means.low, 0.0) == 0.0
        assert found.ci_high == pytest.approx(means.high, rel=1e-12)
        assert found.geo_mean == pytest.approx(stats.gmean(kl.ravel()), rel=1e-12)
        assert found.p90 == np.quantile(kl, 0.9) and found.p0_1 == np.quantile(kl, 0.001)
        assert (found.n_steps, found.unit, found.n_sequences) == (40, Unit.SEQUENCE, 2)

    def test_one_sequence_uses_ten_batches(self):
        kl = np.random.default_rng(0).exponential(size=207)
        means = kl[7:].reshape(10, 20).mean(axis=1)
        interval = stats.ttest_1samp(means, 0.0).confidence_interval(0.95)
        shift = kl.mean() - means.mean()
        found = summarize_kl(kl)
        assert found.unit is Unit.BATCH
        assert (found.ci_low, found.ci_high) == pytest.approx((interval.low + shift, interval.high + shift), rel=1e-12)

    def test_one_sided_bounds_are_the_ends_at_ninety_percent(self):
        kl = np.random.default_rng(0).exponential(size=(8, 100))
        interval = stats.ttest_1samp(kl.mean(axis=1), 0.0).confidence_interval(0.90)
        found = summarize_kl(kl)
        assert (found.lower_95, found.upper_95) == pytest.approx((interval.low, interval.high), rel=1e-12)

    def test_token_and_sequence_mean_of_unequal_lengths(self):
        kl = np.zeros((2, 1000))
        kl[0] = 1.0
        mask = np.ones_like(kl, dtype=bool)
        mask[0, 10:] = False
        found = summarize_kl(kl, mask)
        assert found.mean == pytest.approx(10 / 1010, rel=1e-12) and found.sequence_mean == 0.5
        assert found.n_steps == 1010

    def test_padding_enters_nothing(self):
        rng = np.random.default_rng(0)
        kl, mask = rng.exponential(size=(2, 50)), np.ones((2, 50), dtype=bool)
        mask[0, 5:] = False
        padded = kl.copy()
        padded[0, 5:] = np.nan
        found = summarize_kl(padded, mask)
        assert found == summarize_kl(np.where(mask, kl, 7.0), mask)
        assert found.n_steps == 55 and found.n_nonfinite == 0

    def test_non_finite_steps_are_counted_named_and_left_out(self):
        kl = np.ones((3, 200))
        kl[2, 40:] = np.nan
        kl[1, 90] = np.inf
        found = summarize_kl(kl)
        assert (found.n_nonfinite, found.first_nonfinite_step, found.failed_sequences) == (161, 40, (1, 2))
        assert found.mean == 1.0 and found.max == 1.0 and found.n_steps == 600
        assert "161 steps are not finite" in found.pass_blocked

    def test_nothing_finite_is_null_and_valid_json(self):
        found = summarize_kl(np.full((2, 20), np.nan)).as_dict()
        assert json.loads(json.dumps(found, allow_nan=False))["mean"] is None
        assert found["max"] is None and found["n_effective"] is None and found["n_nonfinite"] == 40

    def test_bitwise_equal_plan_is_exactly_zero_and_may_pass(self):
        found = summarize_kl(np.zeros((4, 64)))
        assert found.mean == found.ci_high == found.upper_95 == 0.0
        assert found.geo_mean is None and found.pass_blocked is None

    def test_tiny_values_survive(self):
        found = summarize_kl(np.full((4, 64), 1e-9) * np.linspace(0.9, 1.1, 64))
        assert found.mean == pytest.approx(1e-9, rel=1e-12, abs=0.0) and found.geo_ci_low > 0

    def test_negative_steps_are_counted(self):
        kl = np.ones((2, 30))
        kl[0, 3] = -1e-13
        assert summarize_kl(kl).n_negative == 1 and summarize_kl(kl).geo_mean is None

    @pytest.mark.parametrize("n", [1, 9])
    def test_too_few_steps_have_no_bars(self, n):
        found = summarize_kl(np.full(n, 0.1))
        assert found.mean == pytest.approx(0.1) and found.ci_low is None and found.upper_95 is None
        assert "too few steps" in found.pass_blocked

    def test_few_independent_steps_block_a_pass(self):
        rng = np.random.default_rng(0)
        found = summarize_kl(autoregressive(rng, (300,), correlation=0.9, sd=0.5))
        assert found.n_effective < 100 and "independent" in found.pass_blocked

    def test_heavy_tails_block_a_pass_on_the_mean(self):
        rng = np.random.default_rng(0)
        found = summarize_kl(autoregressive(rng, (16, 500), correlation=0.0, sd=2.0))
        assert found.sd_ln == pytest.approx(2.0, abs=0.1) and "sd(ln KL)" in found.pass_blocked

    def test_zero_steps_are_an_error(self):
        with pytest.raises(EmptyRunError, match="zero steps"):
            summarize_kl(np.ones((2, 3)), np.zeros((2, 3), dtype=bool))
        with pytest.raises(EmptyRunError, match="zero steps"):
            summarize_kl(np.empty((0, 0)))

    def test_mask_of_another_shape_is_refused(self):
        with pytest.raises(ValueError, match="mask"):
            summarize_kl(np.ones((2, 3)), np.ones((2, 2)))


class TestCoverage:
    """Two-sided 95 % intervals of the mean KL: 93-97 % are asked; n runs leave an s.e. of sqrt(.05·.95/n).

    600 runs: 0.9 points, so 0.93 - 2 s.e. = 0.912 and 0.97 + 2 s.e. = 0.984 bound what a valid interval
    shows; measured with these seeds 0.930-0.947, at sd(ln KL) = 2 0.88, steps as if independent 0.36.
    """

    RUNS = 600

    def cover(self, kl, mean):
        intervals = [t_interval(form_units(Steps.of(one)).values) for one in kl]
        return np.mean([i.low <= mean <= i.high for i in intervals])

    @pytest.mark.parametrize(("correlation", "n", "sd"), [(0.5, 1000, 1.0), (0.9, 2000, 0.5), (0.9, 4000, 1.0)])
    def test_one_sequence(self, correlation, n, sd):
        kl = autoregressive(np.random.default_rng(1), (self.RUNS, n), correlation=correlation, sd=sd)
        assert 0.912 <= self.cover(kl, math.exp(sd**2 / 2)) <= 0.984

    @pytest.mark.parametrize("sd", [0.5, 1.0])
    def test_sixteen_sequences(self, sd):
        kl = autoregressive(np.random.default_rng(2), (self.RUNS, 16, 264), correlation=0.9, sd=sd)
        assert 0.912 <= self.cover(kl, math.exp(sd**2 / 2)) <= 0.984

    def test_geometric_mean_holds_where_the_mean_does_not(self):
        kl = autoregressive(np.random.default_rng(3), (self.RUNS, 4000), correlation=0.9, sd=2.0)
        assert self.cover(kl, math.exp(2.0)) < 0.912
        assert 0.912 <= self.cover(np.log(kl), 0.0) <= 0.984

    def test_independence_of_steps_would_not_cover(self):
        kl = autoregressive(np.random.default_rng(4), (self.RUNS, 2000), correlation=0.9, sd=0.5)
        intervals = [t_interval(one) for one in kl]
        assert np.mean([i.low <= math.exp(0.125) <= i.high for i in intervals]) < 0.5

    def test_effective_steps_of_an_autoregression(self):
        """n·(1 - 0.8)/(1 + 0.8) = n/9 for the Gaussian steps themselves."""
        steps = np.log(autoregressive(np.random.default_rng(5), (16, 4500), correlation=0.8, sd=1.0))
        assert count_effective(Steps.of(steps)) == pytest.approx(8000, rel=0.08)

    def test_effective_steps_are_at_most_all(self):
        assert count_effective(Steps.of([1.0, -1.0] * 50)) == 100 == count_effective(Steps.of(np.ones(100)))
        assert count_effective(Steps.of(np.random.default_rng(0).random(500) * 1e-200)) > 300


class TestProportion:
    def test_spread_between_sequences_widens_it(self):
        same = np.zeros((10, 200), dtype=bool)
        same[:5] = True
        found, single = proportion_ci(same), stats.binomtest(1000, 2000).proportion_ci(0.95)
        assert found.value == 0.5 and found.ci_low < 0.2 < single.low and found.ci_high > 0.8

    def test_all_equal_still_has_a_bound(self):
        found = proportion_ci(np.ones((4, 250), dtype=bool))
        assert found.value == 1.0 == found.ci_high
        assert found.lower_95 == pytest.approx(0.05 ** (1 / 1000), rel=1e-9)

    def test_coverage(self):
        """Share of steps with an AR(1) = 0.9 Gaussian below a level, 16 x 264: 95.2 % of 500 runs, Student's
        t on sequences would cover 92 %; 300 runs have a standard error of 1.3 points."""
        steps = np.log(autoregressive(np.random.default_rng(6), (300, 16, 264), correlation=0.9, sd=1.0))
        found = [proportion_ci(one < stats.norm.ppf(0.97)) for one in steps]
        assert np.mean([f.ci_low <= 0.97 <= f.ci_high for f in found]) >= 0.95 - 2 * 0.013

    def test_padding_and_emptiness(self):
        assert proportion_ci([[True, False]], [[True, False]]).value == 1.0
        with pytest.raises(EmptyRunError):
            proportion_ci(np.empty((1, 0)))


class TestPerplexityAndDeltaP:
    def test_ratio_is_paired(self):
        baseline = np.random.default_rng(0).exponential(3.0, (6, 100))
        found = perplexity_ratio(baseline + 0.01, baseline)
        assert found.ratio == pytest.approx(math.exp(0.01), rel=1e-12)
        assert found.ratio_ci_low == pytest.approx(found.ratio_ci_high, rel=1e-9)
        assert found.plan == pytest.approx(math.exp(baseline.mean() + 0.01), rel=1e-12)
        assert list(found.as_dict()) == ["plan", "baseline", "ratio", "ratio_ci_low", "ratio_ci_high"]

    def test_equal_likelihoods_give_exactly_one(self):
        nll = np.random.default_rng(0).exponential(3.0, (6, 100))
        found = perplexity_ratio(nll, nll)
        assert found.ratio == found.ratio_ci_low == found.ratio_ci_high == 1.0

    @pytest.mark.parametrize("value", [np.inf, np.nan, 1e9])
    def test_undefined_is_null(self, value):
        plan = np.ones((2, 20))
        plan[1, 3] = value
        found = perplexity_ratio(plan, np.ones((2, 20)))
        assert found.plan is None and found.ratio is None and found.baseline == pytest.approx(math.e)

    def test_both_infinite_is_null(self):
        assert perplexity_ratio([np.inf] * 20, [np.inf] * 20).ratio is None

    def test_shapes(self):
        with pytest.raises(ValueError, match="nll_baseline"):
            perplexity_ratio(np.ones(3), np.ones(4))
        with pytest.raises(EmptyRunError):
            perplexity_ratio([], [])

    def test_delta_p(self):
        found = summarize_delta_p([[0.3, -0.4], [np.nan, 9.0]], [[True, True], [True, False]])
        assert found.mean == pytest.approx(-0.05) and found.rms == pytest.approx(math.sqrt(0.125))
        assert (found.max, found.min) == (0.3, -0.4)
        assert summarize_delta_p([np.nan]).as_dict() == {"mean": None, "rms": None, "max": None, "min": None}


class TestQuantileInterval:
    def test_covers_the_sample_quantile(self):
        kl = np.random.default_rng(0).exponential(size=4000)
        low, high = quantile_interval(kl, 0.99)
        assert low < np.quantile(kl, 0.99) < high

    @pytest.mark.parametrize(("n", "known"), [(2994, False), (2995, True)])
    def test_far_tail_needs_enough_steps(self, n, known):
        """0.999^n <= 5 % from n = 2,995 on."""
        _, high = quantile_interval(np.arange(float(n)), 0.999, confidence=0.90)
        assert (high is not None) == known

    def test_infinite_steps_push_the_end_out(self):
        kl = np.append(np.ones(990), np.full(10, np.inf))
        assert quantile_interval(kl, 0.99)[1] is None and quantile_interval(kl, 0.5) == (1.0, 1.0)


def _drifting(shape, growth, *, seed=0, cycle=16):
    """A saw-tooth of L = 16 times a growth in position times AR(1) = 0.8 noise with sd(ln KL) = 1."""
    t = np.arange(shape[-1])
    saw = 0.02 + np.where(t % cycle == cycle - 1, 0.0, 0.5 + 0.5 * (t % cycle) / cycle)
    noise = autoregressive(np.random.default_rng(seed), shape, correlation=0.8, sd=1.0)
    return 1e-6 * growth(t + 1.0) * saw * noise


class TestDriftLaw:
    @pytest.mark.parametrize("slope", [0.0, 0.5, 1.0])
    def test_recovers_a_power_of_position_exactly(self, slope):
        """Bins are whole cycles; the mean of t^s over one differs from that at the mean of ln t: to 1 %."""
        kl = np.tile((np.arange(2048) + 0.5) ** slope, (3, 1))
        assert drift_law(kl, np.arange(2048), cycle=16).slope == pytest.approx(slope, abs=0.01)

    def test_saw_tooth_does_not_tilt_it(self):
        kl = np.tile(np.where(np.arange(264) % 16 == 15, 1e-9, 1e-3 * (1 + np.arange(264) % 16)), (4, 1))
        found = drift_law(kl, np.arange(264), cycle=16)
        assert found.slope == pytest.approx(0.0, abs=1e-9) and found.law == "flat"

    @pytest.mark.parametrize(
        ("growth", "law"),
        [
            (lambda t: t, "growing"),
            (lambda t: np.ones_like(t), "flat"),
            (lambda t: 1 - np.exp(-t / 300), "saturating"),
        ],
    )
    def test_names_the_law(self, growth, law):
        assert drift_law(_drifting((16, 2048), growth), np.arange(2048), cycle=16).law == law

    def test_error_rates(self):
        """In 100 runs of 16 x 1,024 slope 1 was covered in 93, named growing in 96; flat in 1."""
        positions = np.arange(1024)
        runs = range(40)
        grown = [drift_law(_drifting((16, 1024), lambda t: t, seed=s), positions, cycle=16) for s in runs]
        flat = [drift_law(_drifting((16, 1024), np.ones_like, seed=s), positions, cycle=16) for s in runs]
        assert np.mean([d.slope_ci_low <= 1.0 <= d.slope_ci_high for d in grown]) >= 0.85  # 95 % - 3 s.e. of 40 runs
        assert np.mean([d.law == "growing" for d in grown]) >= 0.85
        assert np.mean([d.law == "growing" for d in flat]) <= 0.10

    def test_short_stream_says_that_growth_is_not_excluded(self):
        kl = _drifting((16, 264), lambda t: t, seed=1)
        found = drift_law(kl, np.arange(264), cycle=16)
        assert found.law == "saturating" and "not excluded" in found.reason

    def test_excess_over_the_reference_decides(self):
        """Both grow alike, so nothing in excess: the growth is the model's, not the recurrence's."""
        kl = _drifting((16, 2048), lambda t: t)
        found = drift_law(kl, np.arange(2048), cycle=16, reference=3.0 * kl)
        assert found.slope_ci_low > 0.25 and found.excess_slope == pytest.approx(0.0, abs=1e-9)
        assert found.law == "flat"

    def test_excess_growth_is_found_under_a_flat_reference(self):
        kl, flat = _drifting((16, 2048), lambda t: t), _drifting((16, 2048), np.ones_like, seed=9)
        found = drift_law(kl, np.arange(2048), cycle=16, reference=flat)
        assert found.law == "growing" and found.excess_ci_low <= 1.0 <= found.excess_ci_high

    def test_one_sequence_has_an_interval(self):
        found = drift_law(_drifting((1, 8192), lambda t: t), np.arange(8192), cycle=16)
        assert found.slope_ci_low < found.slope < found.slope_ci_high

    @pytest.mark.parametrize("kl", [np.zeros((4, 264)), np.ones((4, 40)), np.full((4, 264), np.nan)])
    def test_no_slope_is_null(self, kl):
        found = drift_law(kl, np.arange(kl.shape[1]), cycle=16)
        assert found.slope is None and found.law is None and "too few" in found.reason

    def test_masked_and_non_finite_steps_do_not_enter(self):
        kl, mask = _drifting((4, 512), lambda t: t), np.ones((4, 512), dtype=bool)
        mask[:, 400:] = False
        broken = np.where(mask, kl, 1e9)
        broken[2, 300:] = np.nan
        cut = mask.copy()
        cut[2, 300:] = False
        assert drift_law(broken, np.arange(512), cycle=16, mask=mask) == drift_law(
            kl, np.arange(512), cycle=16, mask=cut
        )

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"positions": np.arange(9)}, "positions"),
            ({"positions": np.zeros(10, int)}, "rising"),
            ({"cycle": 0}, "cycle"),
            ({"reference": np.ones((2, 11))}, "reference"),
        ],
    )
    def test_refuses(self, options, says):
        arguments = {"positions": np.arange(10), "cycle": 2} | options
        with pytest.raises(ValueError, match=says):
            drift_law(np.ones((2, 10)), **arguments)


class TestCurves:
    def test_by_window_offset(self):
        kl = np.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, np.nan, 8.0]])
        assert by_window_offset(kl, np.array([0, 1, 0, 1])) == [
            {"offset": 0, "mean": 3.0, "n": 3},
            {"offset": 1, "mean": 5.0, "n": 4},
        ]

    def test_offset_with_nothing_finite_is_null(self):
        assert by_window_offset([np.nan, 1.0], [0, 1])[0] == {"offset": 0, "mean": None, "n": 0}

    def test_by_position_covers_every_step_once(self):
        found = by_position(np.ones((3, 1000)))
        assert sum(point["n"] for point in found) == 3000 and len(found) <= 24
        assert found[0]["low"] == 0 and found[-1]["high"] == 999
        assert all(a["high"] + 1 == b["low"] for a, b in pairwise(found))

    def test_by_position_takes_true_positions(self):
        found = by_position(np.array([[1.0, 3.0]]), 1, positions=[64, 70])
        assert found == [{"low": 64, "high": 70, "mean": 2.0, "n": 2}]

    def test_empty(self):
        assert by_position(np.empty((1, 0))) == [] and by_window_offset(np.empty((1, 0)), np.empty((1, 0))) == []
