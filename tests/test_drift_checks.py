"""Checks of drift: each decides three ways on the documented side of its limit, and what may not pass does not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from policy_cases import DRIFT, LIMITED, PLAN, decided, one, rule
from run_cases import STEPS, Measured, lognormal, make_run
from scipy.signal import lfilter

from driftgate.accuracy import drift_checks
from driftgate.accuracy.kl_summary import summarize_kl
from driftgate.accuracy.records import RunData


@pytest.fixture(scope="module")
def run() -> RunData:
    """One candidate whose every figure has an interval; its KL grows as position^0.2, so slopes are above 0."""
    growth = np.arange(1, STEPS + 1) ** 0.2
    return make_run({PLAN: Measured(kl=0.01 * growth * lognormal(1.0), nll=0.01)})


def bounds(run: RunData, check: str) -> tuple[float, float]:
    """What decides a pass (inner) and a fail (outer), as verdicts themselves state them."""
    easy, hard = (0.0, 1.0) if check == "same_top_p" else (1e6, 0.0)
    passed, failed = one(run, rule(check, easy)), one(run, rule(check, hard))
    assert (passed.verdict, failed.verdict) == ("pass", "fail")
    return passed.value, failed.value


@pytest.mark.parametrize("check", LIMITED)
def test_a_bound_equal_to_the_limit_passes(run, check):
    inner, _ = bounds(run, check)
    found = one(run, rule(check, inner))
    assert (found.verdict, found.value, found.limit) == ("pass", inner, inner)


@pytest.mark.parametrize("check", LIMITED)
def test_a_bound_1e_9_beyond_the_limit_does_not_pass(run, check):
    inner, _ = bounds(run, check)
    sign = -1.0 if check == "same_top_p" else 1.0
    assert one(run, rule(check, inner - sign * 1e-9)).verdict != "pass"
    assert one(run, rule(check, inner + sign * 1e-9)).verdict == "pass"


@pytest.mark.parametrize("check", LIMITED)
def test_a_fail_needs_the_other_bound_beyond_the_limit(run, check):
    inner, outer = bounds(run, check)
    sign = -1.0 if check == "same_top_p" else 1.0
    assert one(run, rule(check, outer - sign * 1e-9)).verdict == "fail"
    at_limit = one(run, rule(check, outer)).verdict
    assert at_limit == ("pass" if inner == outer else "inconclusive")


@pytest.mark.parametrize("check", DRIFT)
def test_a_limit_between_the_bounds_is_inconclusive(run, check):
    inner, outer = bounds(run, check)
    assert inner != outer
    found = one(run, rule(check, (inner + outer) / 2))
    assert found.verdict == "inconclusive"
    assert found.reason


def test_a_checkpoint_error_without_a_flush_is_inconclusive():
    run = make_run({PLAN: Measured(kl=lognormal(0.01), checkpoint_error=None)})
    assert one(run, rule("checkpoint_error", 1.0)).verdict == "inconclusive"


def test_p99_9_of_few_steps_can_fail_but_never_pass():
    """Below 2,995 steps the upper end is out of reach; the lower one is not."""
    run = make_run({PLAN: Measured(kl=lognormal(0.01, shape=(16, 64)))})
    assert one(run, rule("kl_p99_9", 1e6)).verdict == "inconclusive"
    assert one(run, rule("kl_p99_9", 1e-6)).verdict == "fail"


@pytest.mark.parametrize("check", ["kl_mean", "drift_slope"])
def test_a_kl_of_exactly_0_passes_a_limit_of_0(check):
    run = make_run({"fp32@4": Measured(kl=np.zeros((16, 256)))})
    (found,) = decided(run, rule(check, 0.0))
    assert (found.verdict, found.value) == ("pass", 0.0)


@pytest.mark.parametrize("level", [0.0, 1e-13])
def test_a_low_precision_plan_that_cannot_be_told_from_fp32_was_not_measured(level):
    kl = lognormal(level) if level else np.zeros((16, 256))
    run = make_run({PLAN: Measured(kl=kl)})
    found = one(run, rule("kl_mean", 0.01))
    assert (found.verdict, found.reason.split(":")[0]) == ("invalid", "equals_baseline")


def test_too_few_effective_steps_cannot_pass_but_can_fail():
    run = make_run({PLAN: Measured(kl=lognormal(0.01, shape=(2, 40)))})
    assert "worth" in one(run, rule("kl_mean", 1.0)).reason
    assert one(run, rule("kl_mean", 1.0)).verdict == "inconclusive"
    assert one(run, rule("kl_mean", 1e-6)).verdict == "fail"


@pytest.mark.parametrize("check", DRIFT)
@pytest.mark.parametrize(
    ("counters", "says"), [({"reads": 0}, "copy_not_read"), ({"requantizations": 0}, "not_requantized")]
)
def test_a_plan_that_was_not_exercised_is_invalid(check, counters, says):
    run = make_run({PLAN: Measured(kl=lognormal(1e-6), **counters)})
    found = one(run, rule(check, 0.5))
    assert (found.verdict, run.results.verdict) == ("invalid", "inconclusive")
    assert says in found.reason


def test_counters_of_an_fp32_plan_are_0_by_right():
    run = make_run({"fp32@4": Measured(kl=lognormal(1e-6), reads=0, requantizations=0)})
    decided(run, rule("kl_mean", 0.01))
    assert run.results.verdict == "pass"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("check", DRIFT)
def test_a_step_that_is_not_finite_fails_every_drift_check(check, bad):
    kl = lognormal(1e-6)
    kl[3, 17] = bad
    found = one(make_run({PLAN: Measured(kl=kl)}), rule(check, 0.5))
    assert found.verdict == "fail"
    assert "step 17" in found.reason


@pytest.mark.parametrize("check", DRIFT)
def test_a_state_that_is_not_finite_fails_every_drift_check(check):
    found = one(make_run({PLAN: Measured(kl=lognormal(1e-6), nonfinite_states=2)}), rule(check, 0.5))
    assert found.verdict == "fail"
    assert "2 sequences" in found.reason


def test_nan_outweighs_a_plan_that_was_not_exercised():
    run = make_run({PLAN: Measured(kl=lognormal(1e-6), reads=0, nonfinite_states=1)})
    assert one(run, rule("kl_mean", 0.5)).verdict == "fail"


def test_a_growing_law_decides_on_the_last_quarter_and_says_so():
    """KL = 1e-4 position: the mean over all is 0.0513, over the last quarter (769 … 1024) 0.0897."""
    shape = (16, 1024)
    kl = 1e-4 * np.arange(1, 1025) * lognormal(1.0, sd=0.1, shape=shape)
    run = make_run({PLAN: Measured(kl=kl)})
    assert run.results.plans[PLAN].drift.law == "growing"
    between, above = one(run, rule("kl_mean", 0.07)), one(run, rule("kl_mean", 0.1))
    assert (between.verdict, above.verdict) == ("fail", "pass")
    assert "last quarter" in above.reason and "last quarter" in between.reason
    assert above.value == pytest.approx(0.0897, rel=0.02)


def heavy(sd: float, sequences: int, steps: int, seed: int, rho: float = 0.8) -> np.ndarray:
    """exp(sd·x) of AR(1) steps x with variance 1; its mean is exp(sd²/2)."""
    noise = np.random.default_rng(seed).standard_normal((sequences, steps + 100)) * math.sqrt(1 - rho**2)
    return np.exp(sd * lfilter([1.0], [1.0, -rho], noise, axis=1)[:, 100:])


@pytest.mark.parametrize("sequences", [8, 16])
def test_wider_bounds_cover_the_mean_of_a_heavy_tailed_kl(sequences):
    """One-sided 99.5 % bounds of the skewed mean: promised are 95 %; of 200 runs 95 % ± 3 sd are 181 to 199."""
    covered = used = 0
    for seed in range(200):
        kl = heavy(1.8, sequences, 1024, seed)
        summary = summarize_kl(kl)
        assert summary.pass_blocked
        _, high, blocked = drift_checks.bound_mean_kl(summary, kl)
        used += blocked is None
        covered += high >= math.exp(1.8**2 / 2)
    assert used == 200
    assert covered >= 181


def test_no_wider_bounds_outside_where_they_were_checked():
    for kl in (heavy(1.8, drift_checks.HEAVY_SEQUENCES - 1, 1024, 0), heavy(2.6, 16, 1024, 0), heavy(1.8, 16, 12, 0)):
        run = make_run({PLAN: Measured(kl=1e-6 * kl)})
        assert one(run, rule("kl_mean", 1.0)).verdict == "inconclusive"


def test_a_heavy_tailed_kl_passes_by_the_wider_bound():
    kl = heavy(1.5, 16, 1024, 3)
    run = make_run({PLAN: Measured(kl=kl)})
    found = one(run, rule("kl_mean", 100.0))
    assert found.verdict == "pass"
    assert found.value > summarize_kl(kl).upper_95
