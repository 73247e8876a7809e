"""The ladder of evidence: bits, then tolerance, then tasks; each rung asks less of the kernels and says more of use.

Notable: a rung that was not climbed is a row that says so.
"""

from __future__ import annotations

from collections import Counter

from driftgate.accuracy.records import RunData, ToleranceRecord
from driftgate.reports.numbers import NA, format_number
from driftgate.reports.open_checks import gates

__all__ = ["LADDER_HEADER", "LADDER_NOTE", "list_rungs"]

LADDER_HEADER = ("Rung", "What", "Recurrence", "Cases", "Kept", "Nearest to its limit", "Result")
LADDER_NOTE = (
    "Bits: cases that must agree to the last bit. Tolerance: errors of outputs and states against FP64 beside derived "
    "bounds, for kernels that add in another order. Tasks: answers of candidates beside the baseline's."
)


def list_rungs(run: RunData) -> list[list[str]]:
    """Rows of the ladder, in the order bits, tolerance, tasks."""
    return [*_bits(run), *_tolerance(run), *_tasks(run)]


def _bits(run: RunData) -> list[list[str]]:
    keys = dict.fromkeys((r.invariant, r.recurrence) for r in run.results.bitwise)
    rows = []
    for invariant, recurrence in keys:
        records = [r for r in run.results.bitwise if (r.invariant, r.recurrence) == (invariant, recurrence)]
        kept = sum(record.equal for record in records)
        worst = f"{max(record.max_ulp for record in records)} ulp"
        result = "equal" if kept == len(records) else "differs"
        rows.append(["bits", invariant, recurrence, str(len(records)), str(kept), worst, result])
    return rows or [["bits", "no case was run", NA, "0", "0", NA, NA]]


def _tolerance(run: RunData) -> list[list[str]]:
    groups: dict[tuple[str, str], list[ToleranceRecord]] = {}
    for record in run.results.tolerance:
        dot = str(record.case.get("dot", "ieee"))
        route = " ".join((str(record.case.get("readout", "")), "" if dot == "ieee" else dot, record.what)).split()
        groups.setdefault((" ".join(route), record.recurrence), []).append(record)
    rows = []
    for (what, recurrence), records in groups.items():
        kept = sum(record.within for record in records)
        strains = [_strain(record) for record in records]
        worst = NA if None in strains else f"{max(s for s in strains if s is not None):.2g} of the bound"
        result = "within" if kept == len(records) else "outside"
        rows.append(["tolerance", what, recurrence, str(len(records)), str(kept), worst, result])
    return rows or [["tolerance", "no case was run; driftgate certify measures it", NA, "0", "0", NA, NA]]


def _strain(record: ToleranceRecord) -> float | None:
    """Error as a multiple of its bound; None where it was not finite."""
    if record.error is None:
        return None
    return record.error / record.bound if record.bound > 0 else 0.0 if record.within else float("inf")


def _tasks(run: RunData) -> list[list[str]]:
    names = dict.fromkeys(task for plan in run.results.plans.values() for task in plan.tasks)
    rows = []
    for task in names:
        found = [
            plan.tasks[task] for name, plan in run.results.plans.items() if gates(run, name) and task in plan.tasks
        ]
        if not found:
            continue
        counts = Counter(record.verdict for record in found)
        losses = [record.delta for record in found if record.delta is not None]
        worst = NA if not losses else f"{format_number(100 * min(losses) + 0.0, digits=3)} points"
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        rows.append(["tasks", task, NA, str(len(found)), str(counts["pass"]), worst, told])
    return rows or [["tasks", "no task was run", NA, "0", "0", NA, NA]]
