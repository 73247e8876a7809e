"""Checks that did not pass, on top of every report: few lines, and none of them hidden."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
from report_cases import CONTROL, SPLIT, make_many, make_run, with_results

from driftgate.accuracy import records as rec
from driftgate.reports import markdown, page
from driftgate.reports.alike import group_alike, merge_numbers
from driftgate.reports.open_checks import counts_as_pass, group_open_checks, headline, open_lines
from driftgate.reports.tables import list_plan_notes, run_lines

PLANS = ("fp32@16", SPLIT, "nvfp4/fp32@8", "fp8/fp32@16", "nvfp4/fp8@16")
TASKS = ("recall", "tracking", "gpqa")


def verdict(
    plan: str, check: str, kind: str = "inconclusive", *, value: float | None = 1.0, limit: float = 10.0, reason: str
) -> rec.VerdictRecord:
    return rec.VerdictRecord(plan=plan, check=check, value=value, limit=limit, verdict=kind, reason=reason)


def with_verdicts(*verdicts: rec.VerdictRecord) -> rec.RunData:
    """A run of five candidates and a control with these verdicts."""
    run = make_run()
    record = run.results.plans[SPLIT]
    plans = dict.fromkeys(PLANS, record) | {CONTROL: record.model_copy(update={"role": "control"})}
    failed = any(v.verdict == "fail" and v.plan != CONTROL for v in verdicts)
    return with_results(run, plans=plans, verdicts=list(verdicts), verdict="fail" if failed else "inconclusive")


def losses(kind: str) -> list[rec.VerdictRecord]:
    """Every plan on every task, each with numbers of its own."""
    return [
        verdict(plan, f"task_loss:{task}", kind, value=1.5 * i, reason=f"-{i}.5 to {i} points lost, margin 10")
        for i, (plan, task) in enumerate(product(PLANS, TASKS))
    ]


def test_what_is_the_same_for_all_plans_and_tasks_is_one_line():
    run = with_verdicts(*losses("inconclusive"))
    (found,) = group_open_checks(run)
    assert (found.plans, found.checks) == ("all 5 candidates", ", ".join(f"task_loss:{task}" for task in TASKS))
    assert (found.value, found.limit) == ("0…21", "10")
    assert found.reason == "-14.5…-0.5 to 0…14 points lost, margin 10"
    assert len(open_lines(run)) == 1


def test_every_failed_check_is_named_with_its_plan_and_its_value():
    run = with_verdicts(*losses("fail"))
    found = group_open_checks(run)
    assert [group.checks for group in found] == [f"task_loss:{task}" for task in TASKS]
    assert {group.plans for group in found} == {", ".join(PLANS)}
    values = {value for group in found for value in group.value.split(", ")}
    assert values == {f"{1.5 * i:.4g}" for i in range(15)}
    assert all(group.line.startswith(f"fail: {PLANS[0]}, {PLANS[1]}") for group in found)


def test_the_lines_hold_every_open_check_and_no_other():
    """Whatever differs: the product of the plans and the checks of a line are checks with that verdict."""
    mixed = losses("inconclusive")
    mixed[4] = verdict(PLANS[1], "task_loss:tracking", "fail", reason="12.5 to 14 points lost, margin 10")
    mixed[7] = verdict(PLANS[2], "task_loss:tracking", reason="at_chance: the baseline answers 24.1% right")
    mixed[11] = verdict(PLANS[3], "task_loss:gpqa", "pass", reason="none lost")
    mixed += [verdict(plan, "kl_mean", "invalid", value=None, reason="copy_not_read: none") for plan in PLANS[:2]]
    mixed += [verdict(PLANS[0], "same_top_p", "invalid", limit=0.85, reason="copy_not_read: none")]
    mixed += [verdict(CONTROL, "kl_mean", "fail", reason="a control does not gate")]
    run = with_verdicts(*mixed)
    told = [
        (group.verdict, plan, check)
        for group in group_open_checks(run)
        for plan, check in product(
            PLANS if group.plans == "all 5 candidates" else group.plans.split(", "), group.checks.split(", ")
        )
    ]
    assert sorted(told) == sorted((v.verdict, v.plan, v.check) for v in mixed[:-1] if v.verdict != "pass")
    order = [group.verdict for group in group_open_checks(run)]
    assert order == sorted(order, key=["fail", "invalid", "inconclusive"].index)


def test_checks_of_other_units_share_a_line_but_no_number():
    reason = "copy_not_read: no step read a low-precision state"
    limits = {"kl_mean": 0.02, "same_top_p": 0.85, "ppl_ratio": 1.02}
    run = with_verdicts(*(verdict(SPLIT, name, "invalid", limit=x, reason=reason) for name, x in limits.items()))
    (found,) = group_open_checks(run)
    assert (found.plans, found.checks, found.reason) == (SPLIT, ", ".join(limits), reason)
    assert (found.value, found.limit, found.numbers) == ("", "", "")


def test_numbers_of_other_units_never_make_a_range():
    reason = "one-sided 95 % bounds {} to {} hold the limit; run more sequences"
    run = with_verdicts(
        verdict(SPLIT, "kl_mean", limit=0.02, reason=reason.format(0.01, 0.03)),
        verdict(SPLIT, "ppl_ratio", limit=1.02, reason=reason.format(1.01, 1.03)),
        verdict(SPLIT, "accepted:kl_mean", limit=0.02, reason="accepted 0.01, now 0.03"),
        verdict(SPLIT, "accepted:same_top_p", limit=0.02, reason="accepted 0.95, now 0.92"),
    )
    assert len(group_open_checks(run)) == 4


def test_every_report_tells_the_same_lines(tmp_path: Path):
    run = with_verdicts(*losses("inconclusive"), verdict(SPLIT, "kl_mean", "fail", reason="0.03 is outside"))
    found = group_open_checks(run)
    assert len(found) == 2
    text, html = (module.render(run, tmp_path).read_text("utf-8") for module in (markdown, page))
    top = text[: text.index("## Plans")]
    assert top.count("\n- **") == html.count('<li><span class="badge small') == 2
    for group in found:
        assert group.line in open_lines(run)
        assert f"  {group.line}" in run_lines(run)
        assert group.reason in top and group.reason in html
        assert re.search(rf"<code>{re.escape(group.plans)}</code> {group.checks}: value", html)


def test_notes_on_plans_are_told_once():
    run = make_many()
    notes = list_plan_notes(run)
    few = run.results.plans[SPLIT].kl.model_copy(update={"n_effective": 61.5})
    plans = dict(run.results.plans)
    names = list(plans)[3:6]
    for i, name in enumerate(names):
        kl = few.model_copy(update={"n_effective": 61.5 + i})
        plans[name] = plans[name].model_copy(update={"kl": kl})
    (more,) = set(list_plan_notes(with_results(run, plans=plans))) - set(notes)
    assert more.startswith(f"† {', '.join(names)}: 61.5…63.5 effective steps")


def test_what_a_policy_makes_of_an_open_run_is_told_with_it(tmp_path: Path):
    told = "15 checks are inconclusive, which this policy counts as a pass: because"
    passed = rec.VerdictRecord(plan="baseline", check="counts_as", value=None, limit=None, verdict="pass", reason=told)
    run = with_verdicts(*losses("inconclusive"), passed)
    assert counts_as_pass(run) == told
    assert open_lines(run)[-1] == told
    assert headline(run) == "INCONCLUSIVE (checks of candidates: 15 inconclusive)", "it is no pass of a check"
    for module in (markdown, page):
        assert module.render(run, tmp_path).read_text("utf-8").count(told) == 2, "on top, and in the table of checks"
    assert counts_as_pass(with_results(run, verdict="fail")) is None


@pytest.mark.parametrize(
    ("texts", "merged"),
    [
        (["0.5 of 7", "1e-05 of 7"], "1e-05…0.5 of 7"),
        (["-3 to +4", "-2 to +4"], "-3…-2 to +4"),
        (["8,192 steps.", "512 steps."], "512…8,192 steps."),
        (["23.6% right", "9.1% right"], "9.1…23.6% right"),
        (["1.0 and 1.00"], "1.0 and 1.00"),
    ],
)
def test_unlike_numbers_become_ranges(texts, merged):
    assert group_alike(texts, str) == [texts]
    assert merge_numbers(texts) == merged


@pytest.mark.parametrize("pair", [("fp32@16", "fp32@8"), ("I1", "I2"), ("p99.9", "p99.5"), ("nvfp4", "nvfp8")])
def test_digits_of_names_are_no_numbers(pair):
    assert group_alike(pair, str) == [[pair[0]], [pair[1]]]
