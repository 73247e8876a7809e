"""What the checks say of a run: its verdict in one line, a plan's verdict, and the checks that did not pass.

Notable: checks that say the same of several plans or tasks are one line, in which every plan that failed is named with
its value. Nothing here decides anew.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from driftgate.accuracy.records import RunData, VerdictRecord
from driftgate.reports.alike import group_alike, merge_numbers
from driftgate.reports.numbers import NA, format_number

__all__ = [
    "ACCEPTED", "COUNTS_AS", "OpenChecks", "counts_as_pass", "disagreement", "gates", "group_open_checks", "headline",
    "list_open_checks", "open_lines", "plan_verdict",
]  # fmt: skip

ACCEPTED = "accepted:"
"""Prefix of checks against the last accepted run."""
COUNTS_AS = "counts_as"
"""Check that holds what a policy makes of an inconclusive run."""

_GRAVITY = ("fail", "invalid", "inconclusive", "pass")


def gates(run: RunData, plan: str) -> bool:
    """Whether the checks of this plan count: all but those of controls do."""
    record = run.results.plans.get(plan)
    return record is None or record.role == "candidate"


def plan_verdict(run: RunData, plan: str) -> str:
    """The gravest verdict of a plan's checks; ``control`` for a control, ``no check`` where there is none."""
    if not gates(run, plan):
        return "control"
    found = {record.verdict for record in run.results.verdicts if record.plan == plan}
    return next((verdict for verdict in _GRAVITY if verdict in found), "no check")


def list_open_checks(run: RunData) -> list[VerdictRecord]:
    """Checks that count and did not pass, the gravest first."""
    found = [record for record in run.results.verdicts if gates(run, record.plan) and record.verdict != "pass"]
    return sorted(found, key=lambda record: _GRAVITY.index(record.verdict))


def counts_as_pass(run: RunData) -> str | None:
    """That a policy lets this inconclusive run pass, and why; None where it does not."""
    found = [r.reason for r in run.results.verdicts if r.check == COUNTS_AS and r.verdict == "pass"]
    return found[0] if found and run.results.verdict == "inconclusive" else None


def disagreement(run: RunData) -> str | None:
    """One sentence where the checks alone do not give the verdict of the run (A/A differs); else None."""
    grave = {record.verdict for record in list_open_checks(run)}
    of_checks = "fail" if "fail" in grave else "inconclusive" if grave else "pass"
    if not run.results.verdicts:
        return f"The run is {run.results.verdict}; no check was made."
    if of_checks == run.results.verdict:
        return None
    unequal = sum(not record.equal for record in run.results.bitwise)
    blind = [record.plan for record in run.results.verdicts if record.check == "sensitivity"]
    cause = f"; {unequal} bit-exact cases differ" if unequal else ""
    cause += f"; control {blind[0]} cannot be told from the baseline" if blind else ""
    return f"The run is {run.results.verdict}; its checks alone would give {of_checks}{cause}."


def headline(run: RunData) -> str:
    """The verdict and its count of checks, in one line."""
    counted = [r for r in run.results.verdicts if gates(run, r.plan) and (r.check, r.verdict) != (COUNTS_AS, "pass")]
    parts = [(verdict, sum(record.verdict == verdict for record in counted)) for verdict in _GRAVITY]
    told = ", ".join(f"{count} {verdict}" for verdict, count in parts if count) or "none made"
    return f"{run.results.verdict.upper()} (checks of candidates: {told})"


@dataclass(frozen=True, kw_only=True)
class OpenChecks:
    """Checks that did not pass and say the same: every one of ``checks`` of every one of ``plans``.

    Attributes:
        verdict: of all of them.
        plans, checks: names, or ``all 5 candidates``.
        value: of each plan in its order where they failed, else the range of all; empty where units differ.
        limit: the same way.
        reason: with ranges where the numbers of the reasons differ.
    """

    verdict: str
    plans: str
    checks: str
    value: str
    limit: str
    reason: str

    @property
    def line(self) -> str:
        """As a terminal says it; value and limit stand in the reason."""
        return f"{self.verdict}: {self.plans} {self.checks}: {self.reason}"

    @property
    def numbers(self) -> str:
        """Value and limit in words, where there are any."""
        return "" if {self.value, self.limit} <= {"", NA} else f"value {self.value}, limit {self.limit}"


def group_open_checks(run: RunData) -> list[OpenChecks]:
    """Checks that count and did not pass, the gravest first, those that say the same together."""
    candidates = [name for name, plan in run.results.plans.items() if plan.role == "candidate"]
    of_kind: dict[Hashable, list[VerdictRecord]] = {}
    for record in list_open_checks(run):
        of_kind.setdefault((record.verdict, _kind(record), record.limit), []).append(record)
    merged: dict[Hashable, list[list[VerdictRecord]]] = {}
    for records in of_kind.values():
        for alike in group_alike(records, lambda record: record.reason):
            for block in _split_whole(alike):
                merged.setdefault((block[0].verdict, _unit(block), _names(block), _reason(block)), []).append(block)
    return [_tell(blocks, candidates) for blocks in merged.values()]


def _kind(record: VerdictRecord) -> str:
    """A failed check by its whole name, others without their task."""
    prefix = ACCEPTED if record.check.startswith(ACCEPTED) else ""
    return record.check if record.verdict == "fail" else prefix + record.check.removeprefix(prefix).partition(":")[0]


def _unit(block: list[VerdictRecord]) -> str:
    """What keeps blocks of the same reason apart: failed checks stay lines of their own."""
    return block[0].check if block[0].verdict == "fail" else ""


def _split_whole(records: list[VerdictRecord]) -> list[list[VerdictRecord]]:
    """Parts in which every check is there for every plan, so that two lists of names say which."""
    by_check: dict[str, list[VerdictRecord]] = {}
    for record in records:
        by_check.setdefault(record.check, []).append(record)
    parts: dict[tuple[str, ...], list[VerdictRecord]] = {}
    for found in by_check.values():
        parts.setdefault(_names(found), []).extend(found)
    return list(parts.values())


def _names(records: list[VerdictRecord]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(record.plan for record in records))


def _reason(records: list[VerdictRecord]) -> str:
    return merge_numbers([record.reason for record in records])


def _tell(blocks: list[list[VerdictRecord]], candidates: list[str]) -> OpenChecks:
    """One line of blocks that share plans and reason; value and limit only where there is one kind of check."""
    records = [record for block in blocks for record in block]
    first, names, failed = records[0], _names(records), records[0].verdict == "fail"
    all_of_them = not failed and len(names) > 2 and list(names) == candidates
    values = [format_number(record.value) for record in records]
    known = [value for value in values if value != NA]
    value = ", ".join(values) if failed else merge_numbers(known) if known else NA
    return OpenChecks(
        verdict=first.verdict,
        plans=f"all {len(names)} candidates" if all_of_them else ", ".join(names),
        checks=", ".join(dict.fromkeys(record.check for record in records)),
        value=value if len(blocks) == 1 else "",
        limit=format_number(first.limit) if len(blocks) == 1 else "",
        reason=_reason(blocks[0]),
    )


def open_lines(run: RunData) -> list[str]:
    """Below the checks: those that did not pass with their reason, and why the run is judged otherwise where it is."""
    lines = [found.line for found in group_open_checks(run)]
    extra, passed = disagreement(run), counts_as_pass(run)
    return [*lines, *(told for told in (passed, extra) if told is not None)]
