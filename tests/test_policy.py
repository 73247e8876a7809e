"""Policies on a run: which verdict outweighs which, and what the run as a whole may not be passed for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from policy_cases import CONTROL, LIMITED, OTHER, PLAN, decided, loss, one, rule, with_answers
from run_cases import Measured, flipped, lognormal, make_items, make_run

from driftgate.accuracy import records as rec
from driftgate.accuracy.policy import COUNTS_AS, Check, Policy, count_inconclusive, decide, load_policy
from driftgate.accuracy.policy_file import Inconclusive
from driftgate.accuracy.records import load_run, save_run


def cross_checked(differences, steps=32, dtype="float32"):
    run = make_run({PLAN: Measured(kl=lognormal(1e-6)), "fp32@4": Measured(kl=lognormal(1e-6))})
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
    run = make_run({CONTROL: Measured(kl=lognormal(1e-2), role="control")})
    assert [v.reason.split(":")[0] for v in decided(run, rule("kl_mean", 0.01))] == ["no_candidates"]
    assert run.results.verdict == "inconclusive"


def test_nan_fails_a_plan_whatever_the_policy_asks_for():
    run = make_run({PLAN: Measured(kl=lognormal(1e-6), nonfinite_states=1)})
    checks = {v.check: v.verdict for v in decided(run, rule("bitwise"))}
    assert checks == {"bitwise": "pass", "finite": "fail"}
    assert run.results.verdict == "fail"


def test_a_control_never_gates():
    kl = lognormal(1.0)
    kl[0, 0] = math.nan
    baseline, lost = flipped(150, 0, 198, right=160)
    items = make_items(baseline, {PLAN: baseline, CONTROL: lost})
    plans = {
        PLAN: Measured(kl=lognormal(1e-6)),
        CONTROL: Measured(kl=kl, role="control", nonfinite_states=1, checkpoint_error=9.0, reads=0),
    }
    run = make_run(plans, items=items)
    verdicts = decided(run, *(rule(c, 2.0) for c in LIMITED if c != "same_top_p"), loss(2))
    assert {v.plan for v in verdicts} == {PLAN}
    assert run.results.verdict == "pass"


@pytest.mark.parametrize(("level", "blind"), [(3e-6, True), (3.001e-6, False)])
def test_a_control_within_three_noise_floors_takes_passes_back(level, blind):
    control = Measured(kl=np.full((16, 256), level), role="control")
    run = make_run({PLAN: Measured(kl=lognormal(1e-5)), CONTROL: control}, floor=1e-6)
    verdicts = {(v.plan, v.check): v for v in decided(run, rule("kl_mean", 0.01), rule("bitwise"))}
    assert verdicts[PLAN, "kl_mean"].verdict == ("inconclusive" if blind else "pass")
    assert ((CONTROL, "sensitivity") in verdicts) == blind
    assert verdicts["baseline", "bitwise"].verdict == "pass"
    assert run.results.verdict == ("inconclusive" if blind else "pass")
    if blind:
        assert "no_sensitivity" in verdicts[PLAN, "kl_mean"].reason


def test_a_blind_control_does_not_soften_a_fail():
    control = Measured(kl=np.zeros((16, 256)), role="control")
    run = make_run({PLAN: Measured(kl=lognormal(0.1)), CONTROL: control})
    assert one(run, rule("kl_mean", 0.01)).verdict == "fail"
    assert run.results.verdict == "fail"


def test_a_policy_without_the_task_leaves_no_verdict_of_another_policy():
    run = with_answers(40, 2)
    decided(run, loss(2))
    decided(run, rule("kl_mean", 0.01))
    assert run.results.plans[PLAN].tasks["recall"].verdict == "inconclusive"


def test_patterns_choose_plans_and_tasks():
    run = with_answers(0, 0, plans=(PLAN, OTHER))
    assert [v.plan for v in decided(run, rule("kl_mean", 0.01, plans=("fp8*",)))] == [OTHER]
    assert [v.reason.split(":")[0] for v in decided(run, loss(2, tasks=("track*",)))] == ["matched_nothing"]


def test_fail_outweighs_inconclusive_outweighs_pass():
    kl = {PLAN: Measured(kl=lognormal(1e-6)), OTHER: Measured(kl=lognormal(0.1))}
    run = make_run(kl | {"nvfp4/fp16@4": Measured(kl=lognormal(1e-6), reads=0)})
    found = {v.plan: v.verdict for v in decided(run, rule("kl_mean", 0.01))}
    assert found == {PLAN: "pass", OTHER: "fail", "nvfp4/fp16@4": "invalid"}
    assert run.results.verdict == "fail"


def test_no_verdict_at_all_is_not_a_pass():
    run = make_run({PLAN: Measured(kl=lognormal(1e-6))})
    (found,) = decided(run, rule("kl_mean", 0.01, plans=("int8*",)))
    assert (found.verdict, found.reason.split(":")[0]) == ("inconclusive", "matched_nothing")
    assert run.results.verdict == "inconclusive"


def test_bitwise_without_a_case_is_inconclusive():
    run = make_run({PLAN: Measured(kl=lognormal(1e-6))}, bitwise={})
    assert [v.verdict for v in decided(run, rule("bitwise"))] == ["inconclusive"]


def test_one_broken_invariant_fails_the_run():
    run = make_run({PLAN: Measured(kl=lognormal(1e-6))}, bitwise={"A/A": True, "I1": True, "I2": False})
    (found,) = decided(run, rule("bitwise"))
    assert (found.plan, found.verdict, found.value, found.limit) == ("baseline", "fail", 1.0, 0.0)
    assert "I2" in found.reason


def test_a_baseline_that_differs_from_itself_fails_whatever_the_policy_asks_for():
    run = make_run({PLAN: Measured(kl=lognormal(1e-6))}, bitwise={"A/A": False, "I1": True})
    verdicts = decided(run, rule("kl_mean", 0.01))
    assert run.results.verdict == "fail"
    (found,) = [v for v in verdicts if v.verdict == "fail"]
    assert "step" in found.reason and "7" in found.reason


def test_a_baseline_that_differs_from_itself_is_told_once():
    run = make_run({PLAN: Measured(kl=lognormal(1e-6))}, bitwise={"A/A": False})
    assert [v.verdict for v in decided(run, rule("bitwise"))] == ["fail"]


def test_a_run_read_back_from_disk_gets_the_same_verdicts(tmp_path):
    baseline, answers = flipped(4, 2, 192, right=150)
    _, lost = flipped(60, 0, 192, right=150)
    items = make_items(baseline, {PLAN: answers, OTHER: lost, CONTROL: lost}, per_stream=12)
    plans = {
        PLAN: Measured(kl=lognormal(0.01)),
        OTHER: Measured(kl=lognormal(0.03, seed=1)),
        CONTROL: Measured(kl=lognormal(0.2), role="control"),
    }
    run = make_run(plans, items=items)
    decide(run, load_policy())
    save_run(tmp_path, run)
    stored = load_run(tmp_path)
    before = stored.results.model_copy(deep=True)
    decide(stored, load_policy())
    assert stored.results == before == run.results
    assert len(run.results.verdicts) == 9


def tolerance_record(**changes):
    fields = {
        "recurrence": "gdn", "case": {"plan": "fp32@4"}, "what": "output", "error": 0.5, "bound": 1.0, "scale": 9.0,
        "greatest_error": 0.5, "within": True,
    }  # fmt: skip
    return rec.ToleranceRecord(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [({}, "pass"), ({"error": 1.1, "within": False}, "fail"), ({"error": float("nan"), "within": False}, "fail")],
)
def test_an_error_outside_its_bound_fails_the_run(changes, verdict):
    run = make_run({PLAN: Measured(kl=lognormal(1e-6))}, bitwise={"I1": True})
    run.results.tolerance = [tolerance_record(), tolerance_record(**changes)]
    found = next(v for v in decided(run, rule("bitwise")) if v.check == "tolerance")
    assert (found.verdict, found.limit) == (verdict, 1.0)
    assert (run.results.verdict == "fail") == (verdict == "fail")


def counted(run: rec.RunData, kind: str, *checks) -> rec.RunData:
    """The run under a policy that says what an inconclusive run counts as."""
    decide(run, Policy(name="test", inconclusive=Inconclusive(counts_as=kind, reason="because"), checks=checks))
    return run


def open_run(**changes) -> rec.RunData:
    """A run whose mean KL has its limit between its bounds, with a control that drifts."""
    return make_run(
        {PLAN: Measured(kl=lognormal(1e-3), **changes), CONTROL: Measured(kl=lognormal(0.1), role="control")}
    )


OPEN = float(lognormal(1e-3).mean())


def told(run: rec.RunData) -> list[tuple[str, str]]:
    return [(v.verdict, v.reason) for v in run.results.verdicts if v.check == COUNTS_AS]


def test_an_open_run_stays_open_where_the_policy_lets_it_pass():
    run = counted(open_run(), "pass", rule("kl_mean", OPEN))
    assert run.results.verdict == "inconclusive"
    assert told(run) == [("pass", "1 check is inconclusive, which this policy counts as a pass: because")]


def test_an_open_run_fails_where_the_policy_says_so():
    run = counted(open_run(), "fail", rule("kl_mean", OPEN), rule("same_top_p", 0.95))
    assert run.results.verdict == "fail"
    assert told(run) == [("fail", "2 checks are inconclusive, which this policy counts as a fail: because")]


@pytest.mark.parametrize("kind", ["pass", "fail"])
@pytest.mark.parametrize(("limit", "verdict"), [(2e-3, "pass"), (5e-4, "fail")])
def test_a_run_that_is_decided_is_no_matter_of_the_rule(kind, limit, verdict):
    run = counted(open_run(), kind, rule("kl_mean", limit))
    assert (run.results.verdict, told(run)) == (verdict, [])


def at_chance() -> rec.RunData:
    return with_answers(0, 0, 40, right=10)


def unread() -> rec.RunData:
    return with_answers(2, 1, 40, right=30, low_precision_reads=0)


def blind() -> rec.RunData:
    control = Measured(kl=lognormal(2e-9), role="control")
    return make_run({PLAN: Measured(kl=lognormal(1e-3)), CONTROL: control})


SAW_NOTHING = {
    "no low-precision state was read": (lambda: open_run(reads=0), (rule("kl_mean", 2e-3),), "copy_not_read"),
    "nothing was quantized": (lambda: open_run(requantizations=0), (rule("kl_mean", 2e-3),), "not_requantized"),
    "controls alone": (
        lambda: make_run({CONTROL: Measured(kl=lognormal(0.1), role="control")}),
        (rule("kl_mean", 2e-3),),
        "no_candidates",
    ),
    "no step has a bound": (
        lambda: make_run({PLAN: Measured(kl=lognormal(1e-3, shape=(1, 2)))}),
        (rule("kl_mean", 2e-3),),
        "kl_mean",
    ),
    "a misspelt plan": (open_run, (rule("kl_mean", OPEN), rule("kl_mean", 1.0, plans=("nvfp5*",))), "matched_nothing"),
    "a blind control": (blind, (rule("same_top_p", 0.9),), "no_sensitivity"),
    "no invariant": (
        lambda: make_run({PLAN: Measured(kl=lognormal(1e-3))}, bitwise={}),
        (Check(check="bitwise", reason="because"),),
        "no invariant",
    ),
    "a baseline that guesses": (at_chance, (loss(10),), "at_chance"),
    "answers that read no low-precision state": (unread, (loss(30),), "copy_not_read"),
}


@pytest.mark.parametrize("kind", SAW_NOTHING)
def test_what_could_have_seen_nothing_is_never_let_pass(kind):
    make, checks, says = SAW_NOTHING[kind]
    run = counted(make(), "pass", *checks)
    assert run.results.verdict == "inconclusive"
    ((verdict, reason),) = told(run)
    assert verdict == "inconclusive" and says in reason and "could have seen nothing" in reason
    assert counted(make(), "fail", *checks).results.verdict == "fail"


def test_a_run_that_is_decided_again_has_one_verdict_of_the_rule():
    run = counted(counted(open_run(), "fail", rule("kl_mean", OPEN)), "pass", rule("kl_mean", OPEN))
    assert [verdict for verdict, _ in told(run)] == ["pass"]
    again = count_inconclusive(run.results.verdicts, Inconclusive(counts_as="pass", reason="because"))
    assert again == run.results.verdicts
