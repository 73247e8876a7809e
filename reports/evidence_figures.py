"""Figures of what the run proves: answers of tasks, and errors beside their bounds."""

from __future__ import annotations

from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from driftgate.accuracy.records import RunData, ToleranceRecord
from driftgate.reports.drawing import INK, MUTED, STYLE, NoDataError, add_legend, find_backend, start_figure
from driftgate.reports.panels import CHANCE, draw_task

__all__ = ["task_accuracy", "tolerance_ladder"]

_OUTPUT, _STATE = "#0072b2", "#d55e00"


@rc_context(STYLE)
def task_accuracy(run: RunData) -> Figure:
    """Accuracy (%) of each plan and task, with the 95 % interval of its paired difference.

    Raises:
        NoDataError: no plan has an accuracy on any task.
    """
    tasks: dict[str, list[str]] = {}
    for name, plan in run.results.plans.items():
        for task, record in plan.tasks.items():
            if record.accuracy is not None:
                tasks.setdefault(task, []).append(name)
    if not tasks:
        raise NoDataError("the run holds no task with an accuracy")
    heights = [0.3 * len(names) + 0.7 for names in tasks.values()]
    figure = start_figure(7.6, sum(heights) + 0.6, f"Task accuracy (backend: {run.results.backend.tasks})")
    panels: Any = figure.subplots(len(tasks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (task, names) in zip(panels, tasks.items(), strict=True):
        draw_task(axes, run, task, names)
    panels[-1].set_xlabel("accuracy (% of items)")
    handles = [
        Line2D([], [], color=INK, label="baseline"),
        Line2D([], [], color=MUTED, linestyle=":", label=f"chance of four choices ({100 * CHANCE:.0f} %)"),
        Line2D([], [], color=MUTED, marker="|", markersize=8, label="baseline + 95 % interval of the difference"),
    ]
    add_legend(figure, handles)
    return figure


@rc_context(STYLE)
def tolerance_ladder(run: RunData) -> Figure:
    """Error of every tolerance case as a multiple of its derived bound, by recurrence and readout; 1 is the bound.

    Raises:
        NoDataError: no case was measured.
    """
    rows: dict[str, list[ToleranceRecord]] = {}
    for record in run.results.tolerance:
        rows.setdefault(_tell_route(record), []).append(record)
    strained = [r.error / r.bound for records in rows.values() for r in records if r.error and r.bound > 0]
    if not strained:
        raise NoDataError("the run holds no tolerance case; driftgate certify measures them")
    title = f"Errors against FP64 beside their bounds (backend: {find_backend(run, 'tolerance')})"
    figure = start_figure(7.6, 1.3 + 0.34 * len(rows), title)
    axes = figure.subplots()
    axes.set_xscale("log")
    for row, records in enumerate(rows.values()):
        for record in records:
            if record.error and record.bound > 0:
                colour, marker, shift = (_OUTPUT, "o", -0.13) if record.what == "output" else (_STATE, "s", 0.13)
                axes.plot([record.error / record.bound], [row + shift], color=colour, marker=marker, alpha=0.75)
    axes.axvline(1.0, color=INK, linewidth=1.4)
    axes.set_xlim(0.5 * min(strained), 3 * max(1.0, *strained))
    axes.set_yticks(range(len(rows)), [name + _tell_undrawn(records) for name, records in rows.items()])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("error / bound (dimensionless; above 1 is outside)")
    look: dict[str, Any] = {"linestyle": "none"}
    handles = [
        Line2D([], [], color=_OUTPUT, marker="o", label="output", **look),
        Line2D([], [], color=_STATE, marker="s", label="state", **look),
        Line2D([], [], color=INK, linewidth=1.4, label="bound"),
    ]
    add_legend(figure, handles)
    return figure


def _tell_route(record: ToleranceRecord) -> str:
    readout, dot = str(record.case.get("readout", "")), str(record.case.get("dot", "ieee"))
    return " ".join(part for part in (record.recurrence, readout, "" if dot == "ieee" else dot) if part)


def _tell_undrawn(records: list[ToleranceRecord]) -> str:
    """What a logarithmic axis cannot show: cases that are exact, and cases that are not finite."""
    exact, wrong = sum(r.error == 0 for r in records), sum(r.error is None for r in records)
    told = [f"{count} {what}" for count, what in ((exact, "exact"), (wrong, "not finite")) if count]
    return f" ({', '.join(told)})" if told else ""
