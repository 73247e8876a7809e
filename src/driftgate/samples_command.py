"""``driftgate gate --samples BASE CAND``: the paired verdict over scored answers of any engine.

Notable: one ``Comparison`` is formed first, and text, JSON and exit code are read off it, so that they agree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from driftgate.console import EXIT_OF_VERDICT, show, write
from driftgate.errors import InputError, UsageError

if TYPE_CHECKING:
    import pandas as pd

    from driftgate.accuracy.noninferiority import PairedVerdict
    from driftgate.accuracy.policy_file import Policy
    from driftgate.accuracy.records import TaskRecord, VerdictRecord
    from driftgate.accuracy.samples import SampleSet

__all__ = ["Comparison", "compare_samples", "gate_samples"]

NOT_RECORDED = "not recorded"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One task: both sides, their record, and the paired comparison at the policy's first margin for it.

    Attributes:
        base, candidate: what was read.
        record: figures and the task's verdict; ``repeats`` are those of the median item.
        paired: bounds, and the repeats that would decide; None where the policy asks for no margin here.
    """

    base: SampleSet
    candidate: SampleSet
    record: TaskRecord
    paired: PairedVerdict | None

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` holds of it; what a file does not record is null."""
        found = self.record
        names = (
            "n",
            "repeats",
            "accuracy",
            "baseline_accuracy",
            "delta",
            "ci_low",
            "ci_high",
            "lost",
            "gained",
            "p_value",
        )
        caps, parsing = (
            all(getattr(side, name) for side in (self.base, self.candidate))
            for name in ("records_caps", "records_parsing")
        )
        return {
            **{name: getattr(found, name) for name in names},
            "repeats_least": self.base.repeats[0],
            "repeats_greatest": self.base.repeats[-1],
            "chance": found.chance or None,
            "cap_hits": found.cap_hits if caps else None,
            "baseline_cap_hits": found.baseline_cap_hits if caps else None,
            "unparsed": found.unparsed if parsing else None,
            "baseline_unparsed": found.baseline_unparsed if parsing else None,
            "accuracy_completed": found.accuracy_completed if caps and parsing else None,
            "baseline_accuracy_completed": found.baseline_accuracy_completed if caps and parsing else None,
            "repeats_needed": self.paired.repeats_needed if self.paired else None,
            "verdict": found.verdict,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that is printed.

    Attributes:
        policy: name of the policy.
        tasks: by name.
        verdicts: of the policy's checks of answers.
        not_judged: checks of the policy that need a run and not answers alone.
        verdict: of all of them.
    """

    policy: str
    tasks: dict[str, Compared]
    verdicts: list[VerdictRecord]
    not_judged: list[str]
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """The document of ``--json``."""
        first = next(iter(self.tasks.values()))
        sides = {"base": first.base, "candidate": first.candidate}
        return {
            "schema_version": 1,
            "verdict": self.verdict,
            "policy": self.policy,
            "formats": {name: side.format for name, side in sides.items()},
            "tasks": {name: task.as_dict() for name, task in self.tasks.items()},
            "verdicts": [v.model_dump() for v in self.verdicts],
            "not_judged": self.not_judged,
        }

    def lines(self) -> list[str]:
        """The same as text."""
        lines = [line for name, task in self.tasks.items() for line in _describe(name, task)]
        lines += [f"{v.verdict.upper()} {v.check}: {v.reason}" for v in self.verdicts]
        if self.not_judged:
            lines.append(f"not judged, for they need a run: {', '.join(self.not_judged)}")
        return [*lines, f"policy: {self.policy}", f"verdict: {self.verdict}"]


def gate_samples(
    base: Path,
    cand: Path,
    *,
    margin: float | None = None,
    policy: Path | None = None,
    metric: str | None = None,
    filter: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Compare two files of samples, print, and return the exit code.

    Args:
        base, cand: files or lm-eval output folders: answers of the baseline, and of what shall not be worse.
        margin: points that may be lost; instead of a policy.
        policy: YAML file; neither: the bundled default.
        metric, filter: which score, where a file has several.
        as_json: print one JSON document.
        quiet: print nothing.

    Returns:
        0 pass, 1 fail, 3 inconclusive.

    Raises:
        DriftgateError: one line with its exit code.
    """
    found = compare_samples(base, cand, policy=_choose_policy(margin, policy), metric=metric, filter=filter)
    if as_json:
        write(json.dumps(found.as_dict(), indent=1, allow_nan=False) + "\n")
    elif not quiet:
        show(*found.lines())
    return EXIT_OF_VERDICT[found.verdict]


def compare_samples(
    base: Path, cand: Path, *, policy: Policy, metric: str | None = None, filter: str | None = None
) -> Comparison:
    """Read two files and decide every task under a policy.

    Raises:
        InputError: files that cannot be read, chosen or paired, or are the same, or a policy without a check of
            answers.
        EmptyRunError: nothing was scored.
    """
    from driftgate.accuracy.items import paired_record
    from driftgate.accuracy.policy import find_unmatched
    from driftgate.accuracy.policy_file import TASK_CHECKS
    from driftgate.accuracy.samples import CANDIDATE, make_items, pair_sets, read_samples, refuse_same_files
    from driftgate.accuracy.task_checks import check_tasks, judge_task
    from driftgate.accuracy.verdicts import matches, summarize_verdicts

    judged = policy.model_copy(update={"checks": tuple(c for c in policy.checks if c.check in TASK_CHECKS)})
    if not judged.checks:
        raise InputError(f"policy {policy.name} has no {' or '.join(TASK_CHECKS)}; give --margin, or a policy with one")
    sides = [read_samples(path, metric=metric, filter=filter) for path in (base, cand)]
    verdicts, tasks = [], {}
    pairs = pair_sets(*sides)
    refuse_same_files(pairs)
    for task, (own, other) in pairs.items():
        items = make_items(task, own, other)
        record = paired_record(items, CANDIDATE, task, chance=max(own.chance, other.chance))
        record.repeats = median_low(own.repeats)
        found = check_tasks(items, {CANDIDATE: {task: record}}, judged.checks)
        verdicts += [_need_caps(_restate_repeats(v, items, record, task), own, other) for v in found]
        margins = [
            c.margin for c in judged.checks if c.margin and matches(CANDIDATE, c.plans) and matches(task, c.tasks)
        ]
        paired = _compare(items, record, task, margins[0]) if margins else None
        record.verdict = judge_task(verdicts, CANDIDATE, task)
        tasks[task] = Compared(base=own, candidate=other, record=record, paired=paired)
    verdicts += find_unmatched(judged, [CANDIDATE], tasks)
    return Comparison(
        policy=policy.name,
        tasks=tasks,
        verdicts=verdicts,
        not_judged=sorted({c.check for c in policy.checks} - set(TASK_CHECKS)),
        verdict=summarize_verdicts(v.verdict for v in verdicts),
    )


def _choose_policy(margin: float | None, policy: Path | None) -> Policy:
    from driftgate.accuracy.policy_file import Check, Policy, load_policy

    if margin is None:
        return load_policy(policy)
    if policy is not None:
        raise UsageError("--margin and --policy both say what may be lost; give one of them")
    if not 0.0 < margin < 100.0:
        raise UsageError(f"--margin {margin:g}: expected points above 0 and below 100")
    check = Check(check="task_loss", margin=margin, reason="given as --margin")
    return Policy(name=f"--margin {margin:g}", checks=(check,))


def _compare(items: pd.DataFrame, record: TaskRecord, task: str, margin: float) -> PairedVerdict:
    """``compare_items``, where items may differ in repeats, and repeats of a baseline that guesses decide nothing."""
    from driftgate.accuracy.items import BASELINE
    from driftgate.accuracy.noninferiority import paired_noninferiority
    from driftgate.accuracy.samples import CANDIDATE
    from driftgate.accuracy.task_checks import tell_at_chance

    means = items.groupby(["plan", "item_id"])["correct"].mean().unstack("plan")
    found = paired_noninferiority(means[CANDIDATE] - means[BASELINE], margin, repeats=record.repeats)
    guesses = tell_at_chance(items, record, task)
    if guesses is None or found.verdict == "fail":
        return found
    bounds = found.reason.partition("; ")[0]
    return replace(found, repeats_needed=None, reason=f"{guesses}; {bounds}")


def _restate_repeats(verdict: VerdictRecord, items: pd.DataFrame, record: TaskRecord, task: str) -> VerdictRecord:
    """What would decide an open loss, in the words of ``_compare``; a warning behind it stays."""
    from driftgate.accuracy.items import compare_items
    from driftgate.accuracy.samples import CANDIDATE

    if verdict.verdict != "inconclusive" or verdict.limit is None or not verdict.check.startswith("task_loss"):
        return verdict
    if verdict.reason.startswith("at_chance:"):
        return verdict
    stock = compare_items(items, CANDIDATE, task, margin=verdict.limit).reason
    rest = verdict.reason.removeprefix(stock)
    return verdict.model_copy(update={"reason": _compare(items, record, task, verdict.limit).reason + rest})


def _need_caps(verdict: VerdictRecord, *sides: SampleSet) -> VerdictRecord:
    """Caps that were not recorded are no caps that were not hit."""
    missing = [str(side.source) for side in sides if not side.records_caps]
    if not (missing and verdict.check.startswith("cap_hit_excess")):
        return verdict
    reason = f"caps_not_recorded: {', '.join(missing)} does not say which answers hit the cap"
    return verdict.model_copy(update={"verdict": "inconclusive", "value": None, "reason": reason})


def _describe(name: str, task: Compared) -> list[str]:
    """Figures of one task."""
    f = task.as_dict()
    sides = "base {}, candidate {}"

    def counts(kind: str) -> str:
        pair = (f[f"baseline_{kind}"], f[kind])
        return NOT_RECORDED if None in pair else sides.format(*pair)

    def percent(*keys: str) -> str:
        return sides.format(*("n/a" if f[key] is None else f"{100 * f[key]:.2f} %" for key in keys))

    least, greatest = f["repeats_least"], f["repeats_greatest"]
    repeats = f"{least} {'repeat' if least == 1 else 'repeats'} each"
    lines = [
        f"{name}: {f['n']} items, {repeats if least == greatest else f'{least} to {greatest} repeats'}",
        f"  accuracy: {percent('baseline_accuracy', 'accuracy')}",
        f"  delta: {100 * f['delta']:+.2f} points, 95 % interval [{100 * f['ci_low']:+.2f}, {100 * f['ci_high']:+.2f}]",
        f"  items: {f['lost']} lost, {f['gained']} gained, McNemar p = {f['p_value']:.3g}",
        f"  cap hits: {counts('cap_hits')}",
        f"  unparsed: {counts('unparsed')}",
        f"  chance: {NOT_RECORDED if f['chance'] is None else format(f['chance'], '.0%')}",
    ]
    if f["accuracy_completed"] is not None and f["cap_hits"] + f["baseline_cap_hits"] + f["unparsed"]:
        lines.append(f"  accuracy of completed answers: {percent('baseline_accuracy_completed', 'accuracy_completed')}")
    if f["repeats_needed"] is not None:
        lines.append(f"  repeats needed: {f['repeats_needed']}")
    return lines
