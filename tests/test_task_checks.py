"""Checks of answers: loss, chance, copies that were not read, caps, and one Holm family over plans."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from policy_cases import OTHER, PLAN, decided, loss, one, rule, with_answers
from run_cases import Measured, flipped, lognormal, make_items, make_run
from scipy import stats

from driftgate.accuracy.items import compare_items
from driftgate.accuracy.paired_tests import bound_loss
from driftgate.accuracy.policy import load_policy
from driftgate.accuracy.power import simulate_differences


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
    baseline, answers = flipped(0, 0, 198, right=150)
    items = make_items(baseline, {PLAN: answers})
    run = make_run({PLAN: Measured(kl=lognormal(1e-6), reads=0)}, items=items)
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
    baseline, answers = flipped(0, 0, 600, right=400)
    _, worse = flipped(6, 0, 600, right=400)
    items = make_items(baseline, {PLAN: answers, OTHER: worse})
    run = make_run({n: Measured(kl=lognormal(1e-6)) for n in (PLAN, OTHER)}, items=items)
    assert {v.plan: v.verdict for v in decided(run, loss(1.5))} == {PLAN: "pass", OTHER: "inconclusive"}


def test_two_checks_of_one_task_leave_the_graver_verdict_on_it():
    run = with_answers(40, 2)
    assert [v.verdict for v in decided(run, loss(2), loss(60))] == ["fail", "pass"]
    assert run.results.plans[PLAN].tasks["recall"].verdict == "fail"


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


def test_checks_of_one_policy_are_one_family():
    """A check for each plan may not give what one check for both takes back: p = 0.041 each, the first needs 0.025."""
    run = with_answers(0, 0, plans=(PLAN, OTHER))
    apart = decided(run, loss(1.6, plans=(PLAN,)), loss(1.6, plans=(OTHER,)))
    assert [(v.plan, v.verdict) for v in apart] == [(PLAN, "inconclusive"), (OTHER, "inconclusive")]
    assert all("Holm" in v.reason for v in apart)


def test_a_weak_task_of_another_check_weighs_on_every_plan():
    """Two tasks with a check each: OTHER's p is its greatest over both, so it comes last and PLAN's needs 0.025."""
    baseline, same = flipped(0, 0, 198, right=150)
    _, lost = flipped(4, 0, 198, right=150)
    items = pd.concat(
        [
            make_items(baseline, {PLAN: same, OTHER: same}),
            make_items(baseline, {PLAN: same, OTHER: lost}, task="gpqa"),
        ],
        ignore_index=True,
    )
    run = make_run({n: Measured(kl=lognormal(1e-6)) for n in (PLAN, OTHER)}, items=items)
    checks = (loss(1.6, tasks=("recall",)), loss(4, tasks=("gpqa",)))
    found = {(v.plan, v.check): v.verdict for v in decided(run, *checks)}
    assert found[PLAN, "task_loss:recall"] == "inconclusive"  # 0.041
    assert found[PLAN, "task_loss:gpqa"] == "pass"  # 0.96^198 = 0.0003
    assert found[OTHER, "task_loss:recall"] == "inconclusive"


def test_a_strong_pass_stands_beside_a_task_of_the_plan_that_failed():
    baseline, same = flipped(0, 0, 198, right=150)
    _, lost = flipped(60, 0, 198, right=150)
    items = pd.concat(
        [make_items(baseline, {PLAN: same}), make_items(baseline, {PLAN: lost}, task="gpqa")], ignore_index=True
    )
    run = make_run({PLAN: Measured(kl=lognormal(1e-6))}, items=items)
    assert {v.check: v.verdict for v in decided(run, loss(2))} == {"task_loss:recall": "pass", "task_loss:gpqa": "fail"}
    assert run.results.verdict == "fail"


def test_a_task_that_never_read_the_copy_cannot_pass_whatever_the_stream_did():
    """One token on a flush step: no reads while it answered, thousands in the stream."""
    found = one(with_answers(0, 0, low_precision_reads=0), loss(2))
    assert (found.verdict, found.reason.split(":")[0]) == ("inconclusive", "copy_not_read")


@pytest.mark.parametrize(
    ("n_read", "verdict"), [(1, "inconclusive"), (98, "inconclusive"), (99, "pass"), (198, "pass")]
)
def test_most_answers_must_have_read_the_copy(n_read, verdict):
    """Prompts that the model prefills whole give the baseline's answers whatever the format; one other is no help."""
    run = with_answers(0, 0)
    run.items["low_precision_reads"] = [0] * 198 + [0] * (198 - n_read) + [3] * n_read
    found = one(run, loss(2))
    assert found.verdict == verdict
    assert verdict == "pass" or f"for {n_read} of 198 answers" in found.reason


def test_an_answer_that_is_not_finite_fails_the_plan_whatever_the_margin():
    run = with_answers(0, 0, low_precision_reads=9)
    last = run.items.index[-1]
    run.items.loc[last, ["answer", "correct", "parse_reason"]] = [None, False, "nonfinite"]
    verdicts = decided(run, loss(20))
    assert [(v.check, v.verdict) for v in verdicts if v.verdict == "fail"] == [("finite", "fail")]
    assert "1 answers have logits that are not finite" in verdicts[-1].reason
    assert run.results.verdict == "fail"


def test_what_would_decide_is_something_that_can_be_asked_for():
    """Streams have no repeats, and greedy answers that never flip show nothing new when they are asked again."""
    still = one(with_answers(0, 0, 30, right=28), loss(2))
    assert re.search(r"; \d+ items \(now 30\) would decide if nothing flips", still.reason)
    assert re.search(r"; \d+ repeats \(now 1\) would decide", one(with_answers(6, 5), loss(2)).reason)
    in_streams = with_answers(6, 5)
    in_streams.items["stream"] = [*range(18)] * 22
    assert re.search(r"; \d+ streams \(now 18\) would decide", one(in_streams, loss(2)).reason)


def test_a_baseline_that_guesses_is_told_whatever_else_is_open():
    found = one(with_answers(0, 0, 20, right=5), loss(2))
    assert found.verdict == "inconclusive"
    assert found.reason.startswith(
        "at_chance: the baseline answers 25.0% right, guessing 25%, more repeats do not help; "
    )


def test_a_baseline_above_guessing_of_too_few_items_is_told_so():
    found = one(with_answers(0, 0, 3, right=2), loss(2))
    assert found.verdict == "inconclusive"
    assert found.reason.startswith(
        "at_chance: the baseline answers 66.7% right, guessing 25%, of too few items to tell, more repeats do not help"
    )


def test_a_task_that_generates_nothing_has_no_cap_to_hit():
    found = one(with_answers(0, 0, n_tokens=1, capped=False), rule("cap_hit_excess", 1.0))
    assert (found.verdict, "no cap to hit" in found.reason) == ("inconclusive", True)


def test_each_task_counts_its_own_reads():
    run = with_answers(0, 0, low_precision_reads=0)
    other = run.items.assign(task="gpqa", low_precision_reads=[0] * 198 + [3] * 198)
    run = make_run({PLAN: Measured(kl=lognormal(1e-6))}, items=pd.concat([run.items, other], ignore_index=True))
    found = {v.check: v.verdict for v in decided(run, loss(2))}
    assert found == {"task_loss:recall": "inconclusive", "task_loss:gpqa": "pass"}


@pytest.mark.parametrize(("reads", "verdict"), [(0, "inconclusive"), (1000, "pass")])
def test_the_counters_of_the_plan_stand_for_questions_in_streams(reads, verdict):
    """Their rows have no reads of their own; beside a task that counts, the column is there and empty."""
    baseline, answers = flipped(0, 0, 198, right=150)
    items = make_items(baseline, {PLAN: answers})
    counted = items.assign(task="gpqa", low_precision_reads=5.0)
    items = pd.concat([items, counted], ignore_index=True)
    run = make_run({PLAN: Measured(kl=lognormal(1e-6), reads=reads)}, items=items)
    found = {v.check: v.verdict for v in decided(run, loss(2))}
    assert found == {"task_loss:recall": verdict, "task_loss:gpqa": "pass"}


def test_a_plan_in_fp32_has_nothing_to_read():
    baseline, answers = flipped(0, 0, 198, right=150)
    items = make_items(baseline, {"fp32@4": answers}).assign(low_precision_reads=0)
    run = make_run({"fp32@4": Measured(kl=lognormal(1e-6), reads=0, requantizations=0)}, items=items)
    assert [v.verdict for v in decided(run, loss(2))] == ["pass"]


def test_answers_of_a_plan_that_ran_in_fp32_after_all_cannot_pass():
    items = with_answers(0, 0, low_precision_reads=9).items
    run = make_run({PLAN: Measured(kl=np.zeros((16, 256)))}, items=items)
    found = one(run, loss(2))
    assert (found.verdict, found.reason.split(":")[0]) == ("inconclusive", "equals_baseline")


@pytest.mark.parametrize(("chance", "verdict"), [(0.0, "pass"), (0.25, "pass"), (0.5, "inconclusive")])
def test_chance_is_that_of_the_task(chance, verdict):
    """105 of 198 right is 53 %: far above one in four, not above one in two (p = 0.22)."""
    run = with_answers(0, 0, right=105)
    run.results.plans[PLAN].tasks["recall"].chance = chance
    found = one(run, loss(2))
    assert found.verdict == verdict
    assert found.reason.startswith("at_chance") == (verdict != "pass")


def test_repeats_of_lucky_items_are_no_skill():
    """14 of 40 items right at each of 8 repeats: as 320 answers p = 3e-5 against guessing, as 40 items 0.10."""
    run = with_answers(0, 0, 40, right=14)
    items = pd.concat([run.items.assign(repeat=r) for r in range(8)], ignore_index=True)
    run = make_run({PLAN: Measured(kl=lognormal(1e-6))}, items=items)
    found = one(run, loss(10))
    assert (found.verdict, found.reason.split(":")[0]) == ("inconclusive", "at_chance")


def with_caps(plan: int, base: int, n: int = 198):
    """A run whose answers are equal, and of which the first so many hit the cap."""
    run = with_answers(0, 0, n, n_tokens=5)
    for name, hits in ((PLAN, plan), ("baseline", base)):
        own = run.items.index[run.items["plan"] == name]
        run.items.loc[own[:hits], "capped"] = True
    return make_run({PLAN: Measured(kl=lognormal(1e-6))}, items=run.items)


def test_an_answer_that_is_cut_at_the_cap_is_told_and_gated_by_policy():
    """A plan that writes longer at the same cap: 40 of 198 answers cut, 4 of the baseline's."""
    run = with_caps(40, 4)
    cap = one(run, rule("cap_hit_excess", 0.05))
    assert (cap.check, cap.verdict) == ("cap_hit_excess:recall", "fail")
    assert cap.limit == 0.05 < cap.value < 36 / 198
    record = run.results.plans[PLAN].tasks["recall"]
    assert (record.cap_hits, record.baseline_cap_hits) == (40, 4)
    warned = one(run, loss(2))
    assert "40 answers hit the cap, 4 of the baseline" in warned.reason


def test_caps_that_both_sides_hit_are_no_excess():
    run = with_caps(20, 20)
    assert one(run, rule("cap_hit_excess", 0.02)).verdict == "pass"
    assert "cap" not in one(run, loss(2)).reason


@pytest.mark.parametrize("hits", [0, 3, 12])
def test_an_excess_of_caps_equal_to_the_limit_passes_and_1e_9_beyond_does_not(hits):
    """The upper bound is scipy's exact one on the items that the plan alone cut."""
    run = with_caps(hits, 0)
    bound = stats.binomtest(hits, 198).proportion_ci(0.90, "exact").high
    found = one(run, rule("cap_hit_excess", 1.0))
    assert found.value == pytest.approx(bound, rel=1e-12)
    assert one(run, rule("cap_hit_excess", found.value)).verdict == "pass"
    assert one(run, rule("cap_hit_excess", found.value - 1e-9)).verdict == "inconclusive"


def test_the_verdict_of_a_task_is_the_gravest_of_its_checks():
    run = with_caps(40, 4)
    decided(run, loss(2), rule("cap_hit_excess", 0.05))
    assert run.results.plans[PLAN].tasks["recall"].verdict == "fail"
    decided(run, rule("cap_hit_excess", 0.9))
    assert run.results.plans[PLAN].tasks["recall"].verdict == "inconclusive"  # no margin was asked for


def test_a_misspelt_task_of_a_cap_check_is_no_pass():
    (found,) = decided(with_caps(0, 0), rule("cap_hit_excess", 0.05, tasks=("gqpa",)))
    assert (found.verdict, found.reason.split(":")[0]) == ("inconclusive", "matched_nothing")
