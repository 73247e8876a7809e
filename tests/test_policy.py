"""Policies: every check decides three ways on the documented side of its limit, and what may not pass does not."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.signal import lfilter

from driftgate.accuracy import policy as policies
from driftgate.accuracy import records as rec
from driftgate.accuracy.items import compare_items
from driftgate.accuracy.kl_summary import summarize_kl
from driftgate.accuracy.paired_tests import bound_loss
from driftgate.accuracy.policy import Check, Policy, decide, load_policy
from driftgate.accuracy.power import simulate_differences
from driftgate.accuracy.records import RunData, load_run, save_run
from driftgate.errors import InputError

_spec = importlib.util.spec_from_file_location("run_cases", Path(__file__).parent / "run_cases.py")
cases = sys.modules["run_cases"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)
Measured, lognormal = cases.Measured, cases.lognormal

PLAN, OTHER, CONTROL = "nvfp4/fp32@4", "fp8/fp32@4", "nvfp4@4"
DRIFT = ("kl_mean", "kl_p99_9", "same_top_p", "ppl_ratio", "drift_slope")
LIMITED = (*DRIFT, "checkpoint_error")


def rule(check: str, limit: float | None = None, **fields) -> Check:
    return Check(check=check, limit=limit, reason="because", **fields)


def loss(margin: float, **fields) -> Check:
    return Check(check="task_loss", margin=margin, reason="because", **fields)


def decided(run: RunData, *checks: Check) -> list:
    decide(run, Policy(name="test", checks=checks))
    return run.results.verdicts


def one(run: RunData, check: Check):
    """The only verdict of a candidate."""
    (found,) = [v for v in decided(run, check) if v.plan == PLAN]
    return found


@pytest.fixture(scope="module")
def run() -> RunData:
    """One candidate whose every figure has an interval; its KL grows as position^0.2, so slopes are above 0."""
    growth = np.arange(1, cases.STEPS + 1) ** 0.2
    return cases.make_run({PLAN: Measured(kl=0.01 * growth * lognormal(1.0), nll=0.01)})


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
    run = cases.make_run({PLAN: Measured(kl=lognormal(0.01), checkpoint_error=None)})
    assert one(run, rule("checkpoint_error", 1.0)).verdict == "inconclusive"


def test_p99_9_of_few_steps_can_fail_but_never_pass():
    """Below 2,995 steps the upper end is out of reach; the lower one is not."""
    run = cases.make_run({PLAN: Measured(kl=lognormal(0.01, shape=(16, 64)))})
    assert one(run, rule("kl_p99_9", 1e6)).verdict == "inconclusive"
    assert one(run, rule("kl_p99_9", 1e-6)).verdict == "fail"


@pytest.mark.parametrize("check", ["kl_mean", "drift_slope"])
def test_a_kl_of_exactly_0_passes_a_limit_of_0(check):
    run = cases.make_run({"fp32@4": Measured(kl=np.zeros((16, 256)))})
    (found,) = decided(run, rule(check, 0.0))
    assert (found.verdict, found.value) == ("pass", 0.0)


@pytest.mark.parametrize("level", [0.0, 1e-13])
def test_a_low_precision_plan_that_cannot_be_told_from_fp32_was_not_measured(level):
    kl = lognormal(level) if level else np.zeros((16, 256))
    run = cases.make_run({PLAN: Measured(kl=kl)})
    found = one(run, rule("kl_mean", 0.01))
    assert (found.verdict, found.reason.split(":")[0]) == ("invalid", "equals_baseline")


def cross_checked(differences, steps=32, dtype="float32"):
    run = cases.make_run({PLAN: Measured(kl=lognormal(1e-6)), "fp32@4": Measured(kl=lognormal(1e-6))})
    check = None if differences is None else rec.CrossCheck(steps=steps, max_abs_difference=0.0, by_plan=differences)
    run.results.backend = rec.Backends(drift="torch", tasks="torch", cross_check=check)
    run.results.model["dtype"] = dtype
    return [v.verdict for v in decided(run, rule("kl_mean", 0.01)) if v.check == "cross_check"]


def test_twins_and_kernels_must_agree_where_the_state_is_fp32():
    assert cross_checked({"baseline": 1e-5, "fp32@4": 1e-3, PLAN: 0.3}) == ["pass"]
    assert cross_checked({"baseline": 1e-5, "fp32@4": 1.001e-3, PLAN: 0.0}) == ["fail"]
    assert cross_checked({"baseline": 11.0, "fp32@4": 1e-5}) == ["fail"]
    assert cross_checked({"baseline": None, "fp32@4": 1e-5}) == ["fail"]
    assert cross_checked({"baseline": 1e-5}) == ["fail"]
    assert cross_checked({"baseline": 0.1, "fp32@4": 0.1}, dtype="bfloat16") == ["pass"]
    assert cross_checked(None) == ["inconclusive"]
    assert cross_checked({"baseline": 0.0, "fp32@4": 0.0}, steps=0) == ["inconclusive"]


def test_a_run_of_controls_alone_is_inconclusive():
    run = cases.make_run({CONTROL: Measured(kl=lognormal(1e-2), role="control")})
    assert [v.reason.split(":")[0] for v in decided(run, rule("kl_mean", 0.01))] == ["no_candidates"]
    assert run.results.verdict == "inconclusive"


def test_too_few_effective_steps_cannot_pass_but_can_fail():
    run = cases.make_run({PLAN: Measured(kl=lognormal(0.01, shape=(2, 40)))})
    assert "worth" in one(run, rule("kl_mean", 1.0)).reason
    assert one(run, rule("kl_mean", 1.0)).verdict == "inconclusive"
    assert one(run, rule("kl_mean", 1e-6)).verdict == "fail"


@pytest.mark.parametrize("check", DRIFT)
@pytest.mark.parametrize(
    ("counters", "says"), [({"reads": 0}, "copy_not_read"), ({"requantizations": 0}, "not_requantized")]
)
def test_a_plan_that_was_not_exercised_is_invalid(check, counters, says):
    run = cases.make_run({PLAN: Measured(kl=lognormal(1e-6), **counters)})
    found = one(run, rule(check, 0.5))
    assert (found.verdict, run.results.verdict) == ("invalid", "inconclusive")
    assert says in found.reason


def test_counters_of_an_fp32_plan_are_0_by_right():
    run = cases.make_run({"fp32@4": Measured(kl=lognormal(1e-6), reads=0, requantizations=0)})
    decided(run, rule("kl_mean", 0.01))
    assert run.results.verdict == "pass"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("check", DRIFT)
def test_a_step_that_is_not_finite_fails_every_drift_check(check, bad):
    kl = lognormal(1e-6)
    kl[3, 17] = bad
    found = one(cases.make_run({PLAN: Measured(kl=kl)}), rule(check, 0.5))
    assert found.verdict == "fail"
    assert "step 17" in found.reason


@pytest.mark.parametrize("check", DRIFT)
def test_a_state_that_is_not_finite_fails_every_drift_check(check):
    found = one(cases.make_run({PLAN: Measured(kl=lognormal(1e-6), nonfinite_states=2)}), rule(check, 0.5))
    assert found.verdict == "fail"
    assert "2 sequences" in found.reason


def test_nan_outweighs_a_plan_that_was_not_exercised():
    run = cases.make_run({PLAN: Measured(kl=lognormal(1e-6), reads=0, nonfinite_states=1)})
    assert one(run, rule("kl_mean", 0.5)).verdict == "fail"


def test_nan_fails_a_plan_whatever_the_policy_asks_for():
    run = cases.make_run({PLAN: Measured(kl=lognormal(1e-6), nonfinite_states=1)})
    checks = {v.check: v.verdict for v in decided(run, rule("bitwise"))}
    assert checks == {"bitwise": "pass", "finite": "fail"}
    assert run.results.verdict == "fail"


def test_a_control_never_gates():
    kl = lognormal(1.0)
    kl[0, 0] = math.nan
    baseline, lost = cases.flipped(150, 0, 198, right=160)
    items = cases.make_items(baseline, {PLAN: baseline, CONTROL: lost})
    plans = {
        PLAN: Measured(kl=lognormal(1e-6)),
        CONTROL: Measured(kl=kl, role="control", nonfinite_states=1, checkpoint_error=9.0, reads=0),
    }
    run = cases.make_run(plans, items=items)
    verdicts = decided(run, *(rule(c, 2.0) for c in LIMITED if c != "same_top_p"), loss(2))
    assert {v.plan for v in verdicts} == {PLAN}
    assert run.results.verdict == "pass"


@pytest.mark.parametrize(("level", "blind"), [(3e-6, True), (3.001e-6, False)])
def test_a_control_within_three_noise_floors_takes_passes_back(level, blind):
    control = Measured(kl=np.full((16, 256), level), role="control")
    run = cases.make_run({PLAN: Measured(kl=lognormal(1e-5)), CONTROL: control}, floor=1e-6)
    verdicts = {(v.plan, v.check): v for v in decided(run, rule("kl_mean", 0.01), rule("bitwise"))}
    assert verdicts[PLAN, "kl_mean"].verdict == ("inconclusive" if blind else "pass")
    assert ((CONTROL, "sensitivity") in verdicts) == blind
    assert verdicts["baseline", "bitwise"].verdict == "pass"
    assert run.results.verdict == ("inconclusive" if blind else "pass")
    if blind:
        assert "no_sensitivity" in verdicts[PLAN, "kl_mean"].reason


def test_a_blind_control_does_not_soften_a_fail():
    control = Measured(kl=np.zeros((16, 256)), role="control")
    run = cases.make_run({PLAN: Measured(kl=lognormal(0.1)), CONTROL: control})
    assert one(run, rule("kl_mean", 0.01)).verdict == "fail"
    assert run.results.verdict == "fail"


def with_answers(lost: int, gained: int, n: int = 198, *, right: int = 150, plans: tuple[str, ...] = (PLAN,)):
    baseline, answers = cases.flipped(lost, gained, n, right=right)
    items = cases.make_items(baseline, dict.fromkeys(plans, answers))
    return cases.make_run({name: Measured(kl=lognormal(1e-6)) for name in plans}, items=items)


def test_no_flips_of_198_pass_at_two_points_with_a_bound_of_one_and_a_half():
    found = one(with_answers(0, 0), loss(2))
    assert (found.check, found.verdict) == ("task_loss:recall", "pass")
    assert found.value == pytest.approx(1.50, abs=0.005)


def test_ten_lost_and_four_gained_of_198_are_inconclusive():
    run = with_answers(10, 4)
    found = one(run, loss(2))
    assert found.verdict == run.results.plans[PLAN].tasks["recall"].verdict == "inconclusive"


def test_many_lost_fail():
    run = with_answers(40, 2)
    found = one(run, loss(2))
    assert (found.verdict, run.results.verdict) == ("fail", "fail")
    assert found.value > found.limit == 2


@pytest.mark.parametrize("lost", [0, 3, 8])
def test_a_loss_bound_equal_to_the_margin_passes_and_1e_9_beyond_does_not(lost):
    """The margin in points is the float whose hundredth is the bound itself."""
    run = with_answers(lost, 0)
    bound = compare_items(run.items, PLAN, "recall", margin=2).bound
    margin = next(
        m for m in (100 * bound, np.nextafter(100 * bound, 0), np.nextafter(100 * bound, 9)) if m / 100 == bound
    )
    assert one(run, loss(float(margin))).verdict == "pass"
    assert one(run, loss(float(margin) + 1e-9)).verdict == "pass"
    assert one(run, loss(float(margin) - 1e-9)).verdict == "inconclusive"


def test_a_failing_loss_bound_equal_to_the_margin_does_not_fail():
    run = with_answers(40, 2)
    bound = compare_items(run.items, PLAN, "recall", margin=2).fail_bound
    assert one(run, loss(100 * bound * (1 + 1e-12))).verdict == "inconclusive"
    assert one(run, loss(100 * bound - 1e-9)).verdict == "fail"


@pytest.mark.parametrize("right", [0, 50])
def test_a_baseline_at_chance_cannot_pass(right):
    """50 of 198 right is 25.3 %, which guessing gives."""
    found = one(with_answers(0, 0, right=right), loss(2))
    assert found.verdict == "inconclusive"
    assert found.reason.startswith("at_chance")


def test_a_baseline_at_chance_can_still_be_failed():
    found = one(with_answers(50, 0, right=50), loss(2))
    assert found.verdict == "fail"


def test_answers_given_without_reading_the_copy_cannot_pass():
    baseline, answers = cases.flipped(0, 0, 198, right=150)
    items = cases.make_items(baseline, {PLAN: answers})
    run = cases.make_run({PLAN: Measured(kl=lognormal(1e-6), reads=0)}, items=items)
    found = one(run, loss(2))
    assert found.verdict == "inconclusive"
    assert "copy_not_read" in found.reason


def test_holm_takes_back_what_two_looks_would_give():
    """0 of 198 lost at margin 1.6: p = 0.984^198 = 0.041, a pass alone; of two plans the first needs 0.025."""
    assert one(with_answers(0, 0), loss(1.6)).verdict == "pass"
    run = with_answers(0, 0, plans=(PLAN, OTHER))
    verdicts = decided(run, loss(1.6))
    assert [v.verdict for v in verdicts] == ["inconclusive"] * 2
    assert all("Holm" in v.reason for v in verdicts)
    assert {p.tasks["recall"].verdict for p in run.results.plans.values()} == {"inconclusive"}


def test_holm_leaves_a_strong_pass_beside_a_weak_plan():
    baseline, answers = cases.flipped(0, 0, 600, right=400)
    _, worse = cases.flipped(6, 0, 600, right=400)
    items = cases.make_items(baseline, {PLAN: answers, OTHER: worse})
    run = cases.make_run({n: Measured(kl=lognormal(1e-6)) for n in (PLAN, OTHER)}, items=items)
    assert {v.plan: v.verdict for v in decided(run, loss(1.5))} == {PLAN: "pass", OTHER: "inconclusive"}


def test_two_checks_of_one_task_leave_the_graver_verdict_on_it():
    run = with_answers(40, 2)
    assert [v.verdict for v in decided(run, loss(2), loss(60))] == ["fail", "pass"]
    assert run.results.plans[PLAN].tasks["recall"].verdict == "fail"


def test_a_policy_without_the_task_leaves_no_verdict_of_another_policy():
    run = with_answers(40, 2)
    decided(run, loss(2))
    decided(run, rule("kl_mean", 0.01))
    assert run.results.plans[PLAN].tasks["recall"].verdict == "inconclusive"


def test_patterns_choose_plans_and_tasks():
    run = with_answers(0, 0, plans=(PLAN, OTHER))
    assert [v.plan for v in decided(run, rule("kl_mean", 0.01, plans=("fp8*",)))] == [OTHER]
    assert [v.reason.split(":")[0] for v in decided(run, loss(2, tasks=("track*",)))] == ["matched_nothing"]


def test_a_growing_law_decides_on_the_last_quarter_and_says_so():
    """KL = 1e-4 position: the mean over all is 0.0513, over the last quarter (769 … 1024) 0.0897."""
    shape = (16, 1024)
    kl = 1e-4 * np.arange(1, 1025) * lognormal(1.0, sd=0.1, shape=shape)
    run = cases.make_run({PLAN: Measured(kl=kl)})
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
        _, high, blocked = policies._kl_bounds(summary, kl)
        used += blocked is None
        covered += high >= math.exp(1.8**2 / 2)
    assert used == 200
    assert covered >= 181


def test_no_wider_bounds_outside_where_they_were_checked():
    for kl in (heavy(1.8, policies.HEAVY_SEQUENCES - 1, 1024, 0), heavy(2.6, 16, 1024, 0), heavy(1.8, 16, 12, 0)):
        run = cases.make_run({PLAN: Measured(kl=1e-6 * kl)})
        assert one(run, rule("kl_mean", 1.0)).verdict == "inconclusive"


def test_a_heavy_tailed_kl_passes_by_the_wider_bound():
    kl = heavy(1.5, 16, 1024, 3)
    run = cases.make_run({PLAN: Measured(kl=kl)})
    found = one(run, rule("kl_mean", 100.0))
    assert found.verdict == "pass"
    assert found.value > summarize_kl(kl).upper_95


QUICK = (16, (12, 14), 4)
"""Streams, questions of each task in a stream, candidates of the quick suite."""


def quick_suite_passes(points: float, flips: float, alpha: float, *, replicates: int = 500) -> np.ndarray:
    """Whether the bound at error alpha is inside the bundled margin, [task, replicate, plan], at this true loss."""
    (margin,) = [c.margin for c in load_policy().checks if c.check == "task_loss"]
    streams, questions, plans = QUICK
    found = []
    for seed, each in enumerate(questions):
        d = simulate_differences(streams, each, flips, points, replicates=plans * replicates, seed=seed)
        upper = bound_loss(d, np.repeat(np.arange(streams), each), alpha=alpha).upper
        found.append((upper <= margin / 100).reshape(replicates, plans))
    return np.stack(found)


@pytest.mark.parametrize("flips", [0.0, 0.02, 0.05])
def test_four_candidates_that_lose_nothing_pass_the_quick_suite(flips):
    """All four pass for at least 95 % of seeds; Holm: k plans pass at alpha / (5 - k), for every k; found 99.8 %."""
    levels = [quick_suite_passes(0.0, flips, 0.05 / (QUICK[2] - k)).all(axis=0) for k in range(QUICK[2])]
    all_pass = np.all([level.sum(axis=1) > k for k, level in enumerate(levels)], axis=0)
    assert all_pass.mean() >= 0.95


@pytest.mark.parametrize("flips", [0.0, 0.02, 0.05])
def test_a_loss_of_the_margin_passes_a_task_no_oftener_than_the_test_errs(flips):
    """5 % and 3 sd of 2,000 replicates: 6.5 %; found 2.6 to 3.5 %."""
    (margin,) = [c.margin for c in load_policy().checks if c.check == "task_loss"]
    assert (quick_suite_passes(margin, flips, 0.05).mean(axis=(1, 2)) <= 0.065).all()


def test_fail_outweighs_inconclusive_outweighs_pass():
    kl = {PLAN: Measured(kl=lognormal(1e-6)), OTHER: Measured(kl=lognormal(0.1))}
    run = cases.make_run(kl | {"nvfp4/fp16@4": Measured(kl=lognormal(1e-6), reads=0)})
    found = {v.plan: v.verdict for v in decided(run, rule("kl_mean", 0.01))}
    assert found == {PLAN: "pass", OTHER: "fail", "nvfp4/fp16@4": "invalid"}
    assert run.results.verdict == "fail"


def test_no_verdict_at_all_is_not_a_pass():
    run = cases.make_run({PLAN: Measured(kl=lognormal(1e-6))})
    (found,) = decided(run, rule("kl_mean", 0.01, plans=("int8*",)))
    assert (found.verdict, found.reason.split(":")[0]) == ("inconclusive", "matched_nothing")
    assert run.results.verdict == "inconclusive"


def test_bitwise_without_a_case_is_inconclusive():
    run = cases.make_run({PLAN: Measured(kl=lognormal(1e-6))}, bitwise={})
    assert [v.verdict for v in decided(run, rule("bitwise"))] == ["inconclusive"]


def test_one_broken_invariant_fails_the_run():
    run = cases.make_run({PLAN: Measured(kl=lognormal(1e-6))}, bitwise={"A/A": True, "I1": True, "I2": False})
    (found,) = decided(run, rule("bitwise"))
    assert (found.plan, found.verdict, found.value, found.limit) == ("baseline", "fail", 1.0, 0.0)
    assert "I2" in found.reason


def test_a_baseline_that_differs_from_itself_fails_whatever_the_policy_asks_for():
    run = cases.make_run({PLAN: Measured(kl=lognormal(1e-6))}, bitwise={"A/A": False, "I1": True})
    verdicts = decided(run, rule("kl_mean", 0.01))
    assert run.results.verdict == "fail"
    (found,) = [v for v in verdicts if v.verdict == "fail"]
    assert "step" in found.reason and "7" in found.reason


def test_a_baseline_that_differs_from_itself_is_told_once():
    run = cases.make_run({PLAN: Measured(kl=lognormal(1e-6))}, bitwise={"A/A": False})
    assert [v.verdict for v in decided(run, rule("bitwise"))] == ["fail"]


def test_a_run_read_back_from_disk_gets_the_same_verdicts(tmp_path):
    baseline, answers = cases.flipped(4, 2, 192, right=150)
    _, lost = cases.flipped(60, 0, 192, right=150)
    items = cases.make_items(baseline, {PLAN: answers, OTHER: lost, CONTROL: lost}, per_stream=12)
    plans = {
        PLAN: Measured(kl=lognormal(0.01)),
        OTHER: Measured(kl=lognormal(0.03, seed=1)),
        CONTROL: Measured(kl=lognormal(0.2), role="control"),
    }
    run = cases.make_run(plans, items=items)
    decide(run, load_policy())
    save_run(tmp_path, run)
    stored = load_run(tmp_path)
    before = stored.results.model_copy(deep=True)
    decide(stored, load_policy())
    assert stored.results == before == run.results
    assert len(run.results.verdicts) == 9


def test_the_default_policy_gives_every_limit_a_reason():
    policy = load_policy()
    assert policy.name == "default"
    assert {c.check for c in policy.checks} >= {"bitwise", "kl_mean", "task_loss"}
    assert all(len(c.reason) > 20 for c in policy.checks)


WRONG = {
    "unknown check": ("checks: [{check: kl_maen, limit: 1, reason: x}]", "checks.0.check"),
    "unknown key of a check": ("checks: [{check: kl_mean, limit: 1, reason: x, plan: y}]", "checks.0.plan"),
    "unknown key": ("limits: []\nchecks: [{check: bitwise, reason: x}]", "limits"),
    "limit and margin": ("checks: [{check: task_loss, limit: 1, margin: 2, reason: x}]", "task_loss takes margin"),
    "neither": ("checks: [{check: kl_mean, reason: x}]", "kl_mean takes limit"),
    "limit of bitwise": ("checks: [{check: bitwise, limit: 0, reason: x}]", "bitwise takes neither"),
    "margin of a drift check": ("checks: [{check: kl_mean, margin: 2, reason: x}]", "kl_mean takes limit"),
    "NaN limit": ("checks: [{check: kl_mean, limit: .nan, reason: x}]", "checks.0.limit"),
    "infinite limit": ("checks: [{check: kl_mean, limit: .inf, reason: x}]", "checks.0.limit"),
    "negative limit": ("checks: [{check: kl_mean, limit: -1, reason: x}]", "checks.0.limit"),
    "margin of 0": ("checks: [{check: task_loss, margin: 0, reason: x}]", "checks.0.margin"),
    "margin of 100": ("checks: [{check: task_loss, margin: 100, reason: x}]", "checks.0.margin"),
    "word for a limit": ("checks: [{check: kl_mean, limit: low, reason: x}]", "checks.0.limit"),
    "no reason": ("checks: [{check: kl_mean, limit: 1}]", "checks.0.reason"),
    "empty reason": ("checks: [{check: kl_mean, limit: 1, reason: ''}]", "checks.0.reason"),
    "no checks": ("name: x", "checks"),
    "empty list of checks": ("checks: []", "checks"),
    "checks that are no list": ("checks: 3", "checks"),
    "plans that are no list": ("checks: [{check: bitwise, reason: x, plans: fp32@4}]", "plans"),
    "empty file": ("", "expected a mapping"),
    "a list": ("- check: bitwise", "expected a mapping"),
    "a number as key": ("1: 2\nchecks: [{check: bitwise, reason: x}]", "1"),
    "no YAML": ("checks: [", "no readable YAML"),
    "a tag of Python": ("checks: !!python/object/apply:os.getcwd []", "no readable YAML"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_policy_file_is_one_line_that_names_file_and_place(tmp_path, kind):
    text, says = WRONG[kind]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_policy(path)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert str(path) in message and says in message
    assert "\n" not in message


def test_a_policy_file_that_is_missing_or_a_folder_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.yaml does not exist"):
        load_policy(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="no readable YAML"):
        load_policy(tmp_path)


def test_a_policy_file_of_other_bytes_is_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00checks")
    with pytest.raises(InputError, match=r"mine\.yaml"):
        load_policy(path)


def test_a_limit_may_be_written_as_1e_3(tmp_path):
    """YAML 1.1 reads 1e-3 as a word; people write it."""
    path = tmp_path / "mine.yaml"
    path.write_text("checks: [{check: kl_mean, limit: 1e-3, reason: x}]")
    policy = load_policy(path)
    assert (policy.name, policy.checks[0].limit) == ("mine", 0.001)
