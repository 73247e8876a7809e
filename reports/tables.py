"""Rows and tables that every report shares, for the terminal and for pages.

Notable: numbers are written by ``numbers``, verdicts are told by ``open_checks``; nothing here decides anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from driftgate.accuracy.records import PlanRecord, Results, RunData, TaskRecord
from driftgate.reports.alike import group_alike, merge_numbers
from driftgate.reports.numbers import (
    NA,
    format_interval,
    format_kl,
    format_number,
    format_percent,
    format_points,
    format_ratio,
)
from driftgate.reports.open_checks import COUNTS_AS, gates, headline, list_open_checks, open_lines, plan_verdict

__all__ = [
    "CROSS_CHECK_NOTE", "MARK_LEGEND", "NA", "Cell", "PlanRow", "check_rows", "checks_table", "format_interval",
    "format_kl", "format_number", "format_percent", "format_points", "format_ratio", "headline", "list_open_checks",
    "list_plan_notes", "open_lines", "plan_rows", "plan_verdict", "reference_line", "run_lines", "summary_table",
    "tasks_tables",
]  # fmt: skip

FEW_STEPS = 100
"""Effective steps below which the interval of a mean KL is marked and cannot decide a pass."""
MARK_LEGEND = f"†: KL grows with position, or fewer than {FEW_STEPS} effective steps: no interval of this mean decides"
CROSS_CHECK_NOTE = (
    "Only plans with an FP32 state are held to a limit: below FP32 a difference in the last bit can round a value to "
    "the next code, and the logits then differ by what that code is worth."
)

_COLOURS = {"fail": "red", "invalid": "red", "inconclusive": "yellow", "pass": "green"}


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
    notes = [(name, *note) for name, plan in run.results.plans.items() for note in _note(plan)]
    told = []
    for alike in group_alike(notes, lambda note: "\n".join(note[1:])):
        names, text = ", ".join(note[0] for note in alike), merge_numbers([note[2] for note in alike])
        told.append(alike[0][1].format(names) + f": {text}")
    return told


def _note(plan: PlanRecord) -> list[tuple[str, str]]:
    """Notes on one plan: whom they are about, with a place for its name, and what they say."""
    kl, found = plan.kl, []
    if _is_marked(plan) and plan.drift.law == "growing":
        found.append(("† {}", "KL grows with position, so that no interval of its overall mean decides."))
    elif _is_marked(plan):
        few = f"{format_number(kl.n_effective)} effective steps (below {FEW_STEPS}); the interval cannot decide a pass."
        found.append(("† {}", few))
    if kl.n_nonfinite:
        first = format_number(kl.first_nonfinite_step)
        found.append(("{}", f"KL of {kl.n_nonfinite} steps is not finite, the first at step {first}."))
    if kl.n_negative:
        found.append(("{}", f"{kl.n_negative} steps have a KL below 0 by rounding."))
    for task, record in plan.tasks.items():
        if record.cap_hits or record.unparsed:
            cut = f"{record.cap_hits} answers cut off at the token limit, {record.unparsed} unparsed"
            found.append((f"{{}}, {task}", f"{cut}, of {record.n} items times {record.repeats}."))
    return found


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
    made = [record.verdict for record in results.verdicts if record.check != COUNTS_AS]
    lines = [f"checks: {made.count('pass')} of {len(made)} pass (policy {run.manifest.policy.get('name', NA)})"]
    lines += [f"  {line}" for line in open_lines(run)]
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
