"""Checks of answers: does a plan lose less than the margin, and does it hit the cap no oftener, on every task?

Notable: a pass needs more than a bound inside its limit. The baseline must be above guessing, the plan's low-precision
copy must have been read while the answers were produced, and the pass must survive Holm over all plans. All
``task_loss`` checks of a policy are one family: one check for each task may not loosen what one for all tasks asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from driftgate.accuracy.chance import items_above_chance
from driftgate.accuracy.items import bound_cap_excess, compare_items, has_caps, score_baseline
from driftgate.accuracy.noninferiority import PairedVerdict, holm_over_plans
from driftgate.accuracy.policy_file import TASK_CHECKS, Check
from driftgate.accuracy.records import TaskRecord, Verdict, VerdictRecord
from driftgate.accuracy.verdicts import compare_bounds, gravest, matches, record_verdict

__all__ = ["check_tasks", "judge_task", "tell_at_chance"]

ALPHA = 0.05
Records = Mapping[str, Mapping[str, TaskRecord]]


def check_tasks(
    items: pd.DataFrame,
    records: Records,
    checks: Sequence[Check],
    *,
    why_untested: Callable[[str, str], str | None] = lambda plan, task: None,
) -> list[VerdictRecord]:
    """Verdicts of the policy's checks of answers, ``task_loss`` first.

    Args:
        items: items frame with the baseline's rows.
        records: of each candidate and task.
        checks: of the policy; those of other kinds are passed over.
        why_untested: of a plan and task, why its answers say nothing about the plan's precision; None if they do.

    Returns:
        One verdict for each check, plan and task that fit, named ``CHECK:TASK``.
    """
    losses = [
        _Loss(check, plan, task, compare_items(items, plan, task, margin=check.margin))
        for check, plan, task in _pairs("task_loss", records, checks)
        if check.margin is not None
    ]
    verdicts = []
    for loss, passes, adjusted in zip(losses, *_survive_holm(losses), strict=True):
        untested = why_untested(loss.plan, loss.task)
        verdicts.append(_judge_loss(items, records, loss, untested, passes=passes, adjusted=adjusted))
    caps = _pairs("cap_hit_excess", records, checks)
    return verdicts + [_judge_caps(items, check, plan, task) for check, plan, task in caps]


def _judge_caps(items: pd.DataFrame, check: Check, plan: str, task: str) -> VerdictRecord:
    named = f"cap_hit_excess:{task}"
    if not has_caps(items, task):
        reason = f"task {task} generates nothing, so there is no cap to hit: leave this check out"
        return record_verdict(plan, named, "inconclusive", reason, limit=check.limit)
    low, high = bound_cap_excess(items, plan, task)
    return compare_bounds(plan, check, low, high, named=named, more="more items or repeats would decide")


def judge_task(verdicts: Sequence[VerdictRecord], plan: str, task: str) -> Verdict:
    """What the checks of answers say of one plan and task together; without a ``task_loss`` nothing was decided."""
    found = {
        kind: [v.verdict for v in verdicts if (v.plan, v.check) == (plan, f"{kind}:{task}")] for kind in TASK_CHECKS
    }
    return gravest(found["task_loss"] + found["cap_hit_excess"]) if found["task_loss"] else "inconclusive"


@dataclass(frozen=True)
class _Loss:
    """One paired comparison that a check asks for."""

    check: Check
    plan: str
    task: str
    found: PairedVerdict

    @property
    def p_pass(self) -> float:
        """Error of the test behind a pass; at a bound equal to the margin the search ends on either side of 5 %."""
        return min(self.found.p_pass, ALPHA) if self.found.verdict == "pass" else self.found.p_pass


def _pairs(kind: str, records: Records, checks: Sequence[Check]) -> list[tuple[Check, str, str]]:
    return [
        (check, plan, task)
        for check in checks
        if check.check == kind
        for plan, tasks in records.items()
        if matches(plan, check.plans)
        for task in tasks
        if matches(task, check.tasks)
    ]


def _survive_holm(losses: Sequence[_Loss]) -> tuple[list[bool], list[float]]:
    """For each comparison whether its p survives Holm beside the other plans, and its adjusted p.

    A plan's p among the others is its greatest over all checks and tasks, so that a plan's last pass survives where
    the plan does; its other comparisons, whose p are smaller, keep theirs beside a task that failed.
    """
    family: dict[str, dict[str, float]] = {}
    for number, loss in enumerate(losses):
        family.setdefault(loss.plan, {})[str(number)] = loss.p_pass
    found = [
        holm_over_plans({**family, loss.plan: {"": loss.p_pass}}, alpha=ALPHA)[loss.plan] for loss in losses
    ]  # fmt: skip
    return [f.passes for f in found], [f.p_adjusted for f in found]


def _judge_loss(
    items: pd.DataFrame, records: Records, loss: _Loss, untested: str | None, *, passes: bool, adjusted: float
) -> VerdictRecord:
    found, record = loss.found, records[loss.plan][loss.task]
    verdict, reason = found.verdict, found.reason
    guesses = tell_at_chance(items, record, loss.task)
    if guesses is not None and verdict != "fail":
        verdict, reason = "inconclusive", f"{guesses}; {found.reason.partition('; ')[0]}"
    elif verdict == "pass" and untested is not None:
        verdict, reason = "inconclusive", untested
    elif verdict == "pass" and not passes:
        verdict = "inconclusive"
        reason = f"{found.reason}; over all plans (Holm) p = {adjusted:.2g}, more items would decide"
    reason += _warn_of_caps(items, loss, record)
    if verdict in ("pass", "fail"):
        reason = f"{reason}: {loss.check.reason}"
    value = 100 * (found.fail_bound if found.verdict == "fail" else found.bound)
    return record_verdict(
        loss.plan, f"task_loss:{loss.task}", verdict, reason, value=value, limit=loss.check.margin
    )  # fmt: skip


def tell_at_chance(items: pd.DataFrame, record: TaskRecord, task: str) -> str | None:
    """That the baseline is not surely above guessing, so that more repeats would say nothing; None if it is."""
    chance = items_above_chance(score_baseline(items, task), record.chance)
    if chance:
        return None
    few = ", of too few items to tell" if chance.accuracy > record.chance else ""
    told = f"at_chance: the baseline answers {chance.accuracy:.1%} right, guessing {record.chance:.0%}{few}"
    return f"{told}, more repeats do not help"


def _warn_of_caps(items: pd.DataFrame, loss: _Loss, record: TaskRecord) -> str:
    """Answers cut at the cap count as wrong or lucky: told wherever the plan surely has more of them."""
    if record.cap_hits <= record.baseline_cap_hits or bound_cap_excess(items, loss.plan, loss.task)[0] <= 0.0:
        return ""
    return f"; {record.cap_hits} answers hit the cap, {record.baseline_cap_hits} of the baseline"
