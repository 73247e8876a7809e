"""Numbers, rows and tables that every report shares: one place decides how a value is written.

Notable: undefined numbers read ``n/a``; a KL of exactly 0 reads ``0`` and no other does. The verdict of a
plan is the gravest of its checks in ``results.verdicts``; nothing here decides anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from driftgate.accuracy.records import PlanRecord, Results, RunData, TaskRecord, VerdictRecord

__all__ = [
    "CROSS_CHECK_NOTE",
    "MARK_LEGEND",
    "NA",
    "Cell",
    "PlanRow",
    "check_rows",
    "checks_table",
    "disagreement",
    "format_interval",
    "format_kl",
    "format_number",
    "format_percent",
    "format_points",
    "format_ratio",
    "gates",
    "headline",
    "list_open_checks",
    "list_plan_notes",
    "open_lines",
    "plan_rows",
    "plan_verdict",
    "run_lines",
    "summary_table",
    "tasks_tables",
]  # fmt: skip

NA = "n/a"
FEW_STEPS = 100
"""Effective steps below which the interval of a mean KL is marked and cannot decide a pass."""
MARK_LEGEND = f"†: KL grows with position, or fewer than {FEW_STEPS} effective steps: no interval of this mean decides"
CROSS_CHECK_NOTE = (
    "Only plans with an FP32 state are held to a limit: below FP32 a difference in the last bit can round a value to "
    "the next code, and the logits then differ by what that code is worth."
)

_GRAVITY = ("fail", "invalid", "inconclusive", "pass")
_COLOURS = {"fail": "red", "invalid": "red", "inconclusive": "yellow", "pass": "green"}


def format_kl(value: float | None) -> str:
    """A KL in nats: three digits, scientific; exactly 0 reads ``0``."""
    if value is None or not math.isfinite(value):
        return NA
    return "0" if value == 0 else f"{value:.2e}"


def format_percent(fraction: float | None, *, digits: int = 2) -> str:
    """A fraction as a percentage."""
    return NA if fraction is None or not math.isfinite(fraction) else f"{100 * fraction:.{digits}f} %"


def format_points(fraction: float | None) -> str:
    """A signed difference of fractions in percentage points; the unit is in the heading."""
    return NA if fraction is None or not math.isfinite(fraction) else f"{100 * fraction + 0.0:+.2f}"


def format_ratio(value: float | None, *, digits: int = 5) -> str:
    """A ratio near 1 with fixed digits, so that a small change stays visible."""
    return NA if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def format_number(value: Any, *, digits: int = 4) -> str:
    """Anything of a record as text: numbers to ``digits`` significant digits, null and non-finite as n/a."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return NA
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, list | tuple):
        return ", ".join(format_number(item, digits=digits) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={format_number(item, digits=digits)}" for key, item in value.items())
    return str(value)


def format_interval(low: str, high: str) -> str:
    """Two written bounds as ``[low, high]``; n/a where neither is defined."""
    return NA if low == high == NA else f"[{low}, {high}]"


class Cell(NamedTuple):
    """A written value, its lines in order of weight, and the number behind it, by which a table sorts."""

    lines: tuple[str, ...]
    value: float | None = None

    @property
    def text(self) -> str:
        """All lines as one."""
        return " ".join(self.lines)


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One plan of the plan table.

    Attributes:
        name: key of the plan in results.json.
        role: ``candidate`` or ``control``.
        verdict: see `plan_verdict`.
        cells: column heading (with its unit) to value; the same headings in every row of a run.
    """

    name: str
    role: str
    verdict: str
    cells: dict[str, Cell]


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
    counted = [record for record in run.results.verdicts if gates(run, record.plan)]
    parts = [(verdict, sum(record.verdict == verdict for record in counted)) for verdict in _GRAVITY]
    told = ", ".join(f"{count} {verdict}" for verdict, count in parts if count) or "none made"
    return f"{run.results.verdict.upper()} (checks of candidates: {told})"


def plan_rows(run: RunData) -> list[PlanRow]:
    """The plan table: one row a plan, in the order of the run."""
    tasks = list(dict.fromkeys(task for plan in run.results.plans.values() for task in plan.tasks))
    return [
        PlanRow(name=name, role=plan.role, verdict=plan_verdict(run, name), cells=_cells(plan, tasks))
        for name, plan in run.results.plans.items()
    ]


def _cells(plan: PlanRecord, tasks: list[str]) -> dict[str, Cell]:
    kl, top, ppl = plan.kl, plan.same_top_p, plan.ppl
    bounds = [format_kl(x) for x in (kl.mean, kl.ci_low, kl.ci_high)]
    shares = [format_percent(x) for x in (top.value, top.ci_low, top.ci_high)]
    ratios = [format_ratio(x) for x in (ppl.ratio, ppl.ratio_ci_low, ppl.ratio_ci_high)]
    cells = {
        "Mean KL (nats)": _with_interval(bounds, kl.mean, mark="†" * _is_marked(plan)),
        "p99.9 KL": Cell((format_kl(kl.p99_9),), kl.p99_9),
        "Same top": _with_interval(shares, top.value),
        "PPL ratio": _with_interval(ratios, ppl.ratio),
        "State ratio": Cell((f"{plan.bytes.state_ratio:.3f}",), plan.bytes.state_ratio),
        "Traffic ratio": Cell((f"{plan.bytes.traffic_ratio:.3f}",), plan.bytes.traffic_ratio),
    }
    judged = plan.role == "candidate"
    return cells | {f"Task {name}": _task_cell(plan.tasks.get(name), judged=judged) for name in tasks}


def _with_interval(texts: list[str], value: float | None, *, mark: str = "") -> Cell:
    """A value with its bounds below; none where the value is undefined or all three read the same."""
    alone = texts[0] == NA or len(set(texts)) == 1
    return Cell((texts[0] + mark,) if alone else (texts[0] + mark, format_interval(*texts[1:])), value)


def _task_cell(task: TaskRecord | None, *, judged: bool) -> Cell:
    """Short lines: two such columns have to fit a page beside all others."""
    if task is None:
        return Cell((NA,))
    bounds = format_interval(format_points(task.ci_low), format_points(task.ci_high))
    flips = f"{task.lost} lost, {task.gained} gained:"
    verdict = task.verdict if judged else "control, not judged"
    lines = (format_percent(task.accuracy), f"{format_points(task.delta)} points", bounds, flips, verdict)
    return Cell(lines, task.accuracy)


def _is_marked(plan: PlanRecord) -> bool:
    few = plan.kl.n_effective is not None and plan.kl.n_effective < FEW_STEPS
    return plan.kl.mean not in (None, 0) and (few or plan.drift.law == "growing")


def list_plan_notes(run: RunData) -> list[str]:
    """What a reader of the plan table must know: marked intervals, steps left out, answers cut off."""
    notes = []
    for name, plan in run.results.plans.items():
        kl = plan.kl
        if _is_marked(plan) and plan.drift.law == "growing":
            notes.append(f"† {name}: KL grows with position, so that no interval of its overall mean decides.")
        elif _is_marked(plan):
            notes.append(
                f"† {name}: {format_number(kl.n_effective)} effective steps (below {FEW_STEPS}); "
                "the interval cannot decide a pass."
            )
        if kl.n_nonfinite:
            first = format_number(kl.first_nonfinite_step)
            notes.append(f"{name}: KL of {kl.n_nonfinite} steps is not finite, the first at step {first}.")
        if kl.n_negative:
            notes.append(f"{name}: {kl.n_negative} steps have a KL below 0 by rounding.")
        for task, record in plan.tasks.items():
            if record.cap_hits or record.unparsed:
                notes.append(
                    f"{name}, {task}: {record.cap_hits} answers cut off at the token limit, "
                    f"{record.unparsed} unparsed, of {record.n} items times {record.repeats}."
                )
    return notes


def check_rows(run: RunData) -> list[list[str]]:
    """Rows plan, check, value, limit, verdict, reason; a control's verdict says that it does not gate."""
    return [
        [
            record.plan,
            record.check,
            format_number(record.value),
            format_number(record.limit),
            record.verdict if gates(run, record.plan) else f"{record.verdict} (control, does not gate)",
            record.reason,
        ]
        for record in run.results.verdicts
    ]


def summary_table(run: RunData) -> Table:
    """The plan table for a terminal: fits 80 columns, long plan names fold and are never cut."""
    table = Table(title=headline(run), title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("Plan", overflow="fold")
    for heading in ("Mean KL", "p99.9 KL", "Same top", "State", "Task"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("Verdict", no_wrap=True)
    for row in plan_rows(run):
        plan = run.results.plans[row.name]
        losses = [task.delta for task in plan.tasks.values() if task.delta is not None]
        table.add_row(
            escape(row.name),
            format_kl(plan.kl.mean) + "†" * _is_marked(plan),
            format_kl(plan.kl.p99_9),
            format_percent(plan.same_top_p.value),
            row.cells["State ratio"].text,
            format_points(min(losses)) if losses else NA,
            Text(row.verdict, style=_COLOURS.get(row.verdict, "")),
        )
    table.caption = "KL in nats; state: bytes / baseline; task: greatest change of accuracy downwards, in points"
    if any(_is_marked(plan) for plan in run.results.plans.values()):
        table.caption += f"\n{MARK_LEGEND}"
    table.caption_justify = "left"
    return table


def tasks_tables(run: RunData) -> list[Table]:
    """Accuracy of baseline and plans with lost and gained answers, two tasks a table, so that it fits 80 columns."""
    tasks = list(dict.fromkeys(task for plan in run.results.plans.values() for task in plan.tasks))
    return [_tasks_table(run, tasks[first : first + 2]) for first in range(0, len(tasks), 2)]


def _tasks_table(run: RunData, tasks: list[str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("Plan", overflow="fold")
    for task in tasks:
        table.add_column(f"{task} accuracy", justify="right", overflow="fold")
        table.add_column("lost/gained", justify="right", no_wrap=True)
    first = next(iter(run.results.plans.values())).tasks
    base = [cell for t in tasks for cell in (format_percent(first[t].baseline_accuracy, digits=1), "")]
    table.add_row(run.results.baseline, *base)
    for name, plan in run.results.plans.items():
        cells: list[str] = []
        for task in tasks:
            record = plan.tasks.get(task)
            cells.append(NA if record is None else format_percent(record.accuracy, digits=1))
            cells.append(NA if record is None else f"{record.lost}/{record.gained}")
        table.add_row(escape(name), *cells)
    return table


def run_lines(run: RunData) -> list[str]:
    """What a terminal says below the tables: open checks with their reasons, noise floor, bits, backends."""
    results = run.results
    floor = results.noise_floor
    equal = sum(record.equal for record in results.bitwise)
    passed = sum(record.verdict == "pass" for record in results.verdicts)
    lines = [f"checks: {passed} of {len(results.verdicts)} pass (policy {run.manifest.policy.get('name', NA)})"]
    lines += [f"  {v.verdict}: {v.plan} {v.check}: {v.reason}" for v in list_open_checks(run)]
    lines += [
        f"noise floor (FP32, another launch): mean KL {format_kl(floor.kl_mean)}, max {format_kl(floor.kl_max)}",
        f"bit-exact: {equal} of {len(results.bitwise)} cases equal, baseline against itself included",
        f"backend: drift and tasks on {results.backend.drift}",
    ]
    if results.reference is not None:
        lines.append(reference_line(results))
    check = results.backend.cross_check
    if check is not None:
        worst = max(check.by_plan, key=lambda name: check.by_plan[name] or 0.0, default=NA)
        differences = [format_number(check.by_plan.get(name), digits=2) for name in (results.baseline, worst)]
        lines.append(
            f"cross-check: interpreted Triton kernels, same tokens, {check.steps} steps: logits differ by at most "
            f"{differences[0]} ({results.baseline}), {differences[1]} ({worst})"
        )
        lines.append(f"  {CROSS_CHECK_NOTE}")
    return lines


def reference_line(results: Results) -> str:
    """KL of the reference model's weights in one line, to set beside the plans' own."""
    found = results.reference
    assert found is not None
    interval = format_interval(format_kl(found.kl.ci_low), format_kl(found.kl.ci_high))
    return (
        f"weights: KL({found.model}‖{results.model.get('name', NA)}) at FP32 state: mean {format_kl(found.kl.mean)} "
        f"{interval}, same top token {format_percent(found.same_top_p.value)}"
    )


def checks_table(run: RunData) -> Table:
    """The checks for a terminal: what was measured, the limit and the verdict, one line a check in 80 columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("Plan", overflow="fold")
    table.add_column("Check", overflow="fold")
    table.add_column("Value", justify="right", no_wrap=True)
    table.add_column("Limit", justify="right", no_wrap=True)
    table.add_column("Verdict", no_wrap=True)
    for record, cells in zip(run.results.verdicts, check_rows(run), strict=True):
        gating = gates(run, record.plan)
        style = _COLOURS[record.verdict] if gating else ""
        verdict = record.verdict if gating else f"{record.verdict} (control)"
        table.add_row(escape(cells[0]), escape(cells[1]), cells[2], cells[3], Text(verdict, style=style))
    return table


def open_lines(run: RunData) -> list[str]:
    """Below the checks: each that did not pass with its reason, and why the run is judged otherwise where it is."""
    lines = [f"{v.verdict}: {v.plan} {v.check}: {v.reason}" for v in list_open_checks(run)]
    extra = disagreement(run)
    return lines if extra is None else [*lines, extra]
