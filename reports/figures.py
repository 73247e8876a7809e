"""The figures of the report: one public function each, from a run to a ``matplotlib.figure.Figure``.

Notable: a figure without data is not drawn: its function raises `NoDataError` with the reason, and the report
prints it. To add a figure: a function here and an entry in `FIGURES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from driftgate.accuracy.records import RunData
from driftgate.errors import InputError
from driftgate.reports.drawing import (
    INK,
    MUTED,
    STYLE,
    NoDataError,
    add_curve,
    add_legend,
    count_positions,
    plan_style,
    start_figure,
    write_png,
)
from driftgate.reports.panels import (
    CHANCE,
    RING,
    draw_heat_map,
    draw_noise_floor,
    draw_point,
    draw_task,
    is_efficient,
    read_baseline_nll,
    read_layers,
    read_offsets,
    read_positions,
    require_positive,
)

__all__ = [
    "FIGURES", "Drawing", "FigureEntry", "NoDataError", "caption", "draw_all", "kl_against_bytes",
    "kl_against_position", "kl_by_window_offset", "render", "state_error_by_layer", "task_accuracy",
]  # fmt: skip

_ERRORS = ("read_error", "checkpoint_error", "trajectory_error", "output_error")
_KL_LABEL = "mean KL(baseline‖plan)\n(nats per step)"


@rc_context(STYLE)
def kl_against_position(run: RunData) -> Figure:
    """Mean KL (nats per step) against position (tokens) of each plan; below it the baseline's own NLL.

    Raises:
        NoDataError: no plan has a KL above 0 at any position.
    """
    curves = {name: curve for name in run.results.plans if (curve := read_positions(run, name))[0]}
    require_positive([values for _, values in curves.values()])
    likelihood = read_baseline_nll(run)
    shares = [3, 1] if likelihood[0] else [1]
    title = f"KL against position (backend: {run.results.backend.drift})"
    figure = start_figure(7.6, 3.9 + 1.3 * (len(shares) - 1), title)
    panels: Any = figure.subplots(len(shares), 1, sharex=True, squeeze=False, height_ratios=shares)[:, 0]
    panels[0].set_yscale("log")
    panels[0].set_ylabel(_KL_LABEL)
    handles = []
    for name, (places, values) in curves.items():
        slope = run.results.plans[name].drift.slope
        note = "" if slope is None else f", slope {slope:.2f}"
        handles.append(add_curve(panels[0], plan_style(run, name), places, values, note=note))
    handles += draw_noise_floor(panels[0], run)
    if likelihood[0]:
        panels[1].plot(*likelihood, color=INK, linewidth=1.2)
        panels[1].set_ylabel("baseline NLL\n(nats per token)")
    count_positions(panels[-1], label="position (tokens)")
    add_legend(figure, handles)
    return figure


@rc_context(STYLE)
def kl_by_window_offset(run: RunData) -> Figure:
    """Mean KL (nats per step, logarithmic) of each plan against the buffered entries that a step found.

    Raises:
        NoDataError: no plan buffers steps, or none that does has a KL above 0.
    """
    curves = {name: read_offsets(run, name) for name in run.results.plans}
    require_positive([values for _, values in curves.values()])
    curves = {name: curve for name, curve in curves.items() if len(curve[0]) > 1}
    if not any(value for _, values in curves.values() for value in values):
        raise NoDataError("no plan that buffers steps (L above 1) has a KL above 0")
    figure = start_figure(7.6, 3.9, f"KL by window offset (backend: {run.results.backend.drift})")
    axes = figure.subplots()
    axes.set_yscale("log")
    handles = [add_curve(axes, plan_style(run, name), *curve) for name, curve in curves.items()]
    handles += draw_noise_floor(axes, run)
    axes.set_xlabel("buffered entries found by the step (steps since the last flush)")
    axes.set_ylabel(_KL_LABEL)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(figure, handles)
    return figure


@rc_context(STYLE)
def state_error_by_layer(run: RunData) -> Figure:
    """Relative errors of read copy, checkpoint, trajectory and output: heat maps of plans by layers.

    Raises:
        NoDataError: no layer of any plan has a state error.
    """
    tables = {kind: table for kind in _ERRORS if (table := read_layers(run, kind)).notna().to_numpy().any()}
    if not tables:
        raise NoDataError("the run holds no state errors")
    values = np.concatenate([table.to_numpy().ravel() for table in tables.values()])
    positive = values[values > 0]
    low, high = (positive.min(), positive.max()) if positive.size else (0.1, 1.0)
    shades = ScalarMappable(LogNorm(low, high if high > low else 10 * low), colormaps["cividis"])
    n_layers, labels = (
        next(iter(tables.values())).shape[1],
        [plan_style(run, name).label for name in run.results.plans],
    )
    across = len(tables) if n_layers <= 3 else 2 if n_layers <= 8 else 1
    down = -(-len(tables) // across)
    width, height = (0.52, 0.3) if n_layers <= 16 else (0.22, 0.52)
    size = (
        1.1 + 0.075 * max(map(len, labels)) + across * max(1.4, width * n_layers + 0.2),
        0.5 + down * (height * len(labels) + 0.75),
    )
    figure = start_figure(*size, f"State errors by layer (backend: {run.results.backend.drift})")
    panels: Any = figure.subplots(down, across, squeeze=False, sharey=True)
    used = panels.ravel()[: len(tables)]
    for spare in panels.ravel()[len(tables) :]:
        spare.remove()
    for axes, (kind, table) in zip(used, tables.items(), strict=True):
        draw_heat_map(axes, table, shades, upright=width < height)
        axes.set_title(kind.replace("_", " "), loc="left")
        axes.set_xlabel("layer")
    used[0].set_yticks(np.arange(len(labels)) + 0.5, labels)
    used[0].set_ylim(len(labels), 0)
    if positive.size:
        shrink = min(1.0, 3.5 / size[1])
        bar = figure.colorbar(shades, ax=list(used), aspect=20, pad=0.01, shrink=shrink, anchor=(0.0, 1.0))
        bar.set_label("relative error (1 = 100 %)")
    return figure


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
def kl_against_bytes(run: RunData) -> Figure:
    """Mean KL (nats per step, logarithmic) against state bytes and traffic relative to the baseline.

    Raises:
        NoDataError: no plan has a mean KL above 0.
    """
    plans = {name: plan for name, plan in run.results.plans.items() if plan.kl.mean is not None}
    require_positive([[plan.kl.mean for plan in plans.values()]])
    figure = start_figure(7.6, 3.9, f"KL against bytes (backend: {run.results.backend.drift}; bytes by formula)")
    panels: Any = figure.subplots(1, 2, sharey=True)
    panels[0].set_yscale("log")
    panels[0].set_ylabel(_KL_LABEL)
    panels[0].set_xlabel("state bytes per step / baseline")
    panels[1].set_xlabel("state and buffer traffic per step / baseline")
    handles: list[Line2D] = []
    for axes, field in zip(panels, ("state_ratio", "traffic_ratio"), strict=True):
        places = {name: float(getattr(plan.bytes, field)) for name, plan in plans.items()}
        best = {name for name in places if is_efficient(run, name, places)}
        handles = [draw_point(axes, run, name, place, ringed=name in best) for name, place in places.items()]
        axes.set_xlim(0, 1.08 * max(1.0, *places.values()))
    add_legend(figure, [*handles, Line2D([], [], label="no candidate is better in both", **RING)])
    return figure


@dataclass(frozen=True, kw_only=True)
class FigureEntry:
    """A figure of the report.

    Attributes:
        draw: the public function; its name is the file's.
        title: heading in the report.
        source: which backend field produced its numbers.
        reading: how to read it, two sentences.
    """

    draw: Callable[[RunData], Figure]
    title: str
    source: Literal["drift", "tasks"]
    reading: str

    @property
    def name(self) -> str:
        """File name without ending, and name of the function."""
        return str(self.draw.__name__)


FIGURES: tuple[FigureEntry, ...] = (
    FigureEntry(
        draw=kl_against_position,
        title="KL against position",
        source="drift",
        reading="A level line means that the error of the format stays what it is; a rising one means that "
        "rounding errors feed back into the state. Where the baseline's own NLL (below) rises, the "
        "model has left the range that it was trained on, and the KL there says less about the "
        "format.",
    ),
    FigureEntry(
        draw=kl_by_window_offset,
        title="KL by window offset",
        source="drift",
        reading="The offset counts the steps since the last flush, so that each curve is one tooth of the "
        "saw that the KL makes along the stream. A curve that depends on the offset is error of "
        "the readout, which ends with the window; one that is high at every offset is error held "
        "in the checkpoint or in other layers. The streams of the tasks are pairs of tokens: where L "
        "is even an offset meets only the first or only the second of each pair, so that curves "
        "zigzag with period 2, which says nothing about the format.",
    ),
    FigureEntry(
        draw=state_error_by_layer,
        title="State errors by layer",
        source="drift",
        reading="Read error is copy against checkpoint, checkpoint error is against FP32 on the layer's "
        "own inputs, trajectory error is against the baseline's state, output error is of what the "
        "layer passes on. A checkpoint error printed as 0 is exactly 0: such a plan feeds none of "
        "its rounding back into its state.",
    ),
    FigureEntry(
        draw=task_accuracy,
        title="Task accuracy",
        source="tasks",
        reading="The mark is the plan's accuracy and the bar the 95 % interval of its paired difference, "
        "laid around the baseline; lost and gained count the items whose answer flipped. A bar "
        "that crosses the baseline is no proof of equality: the verdict asks whether the loss "
        "stays inside the margin.",
    ),
    FigureEntry(
        draw=kl_against_bytes,
        title="KL against bytes",
        source="drift",
        reading="Left and low is better; a ring marks candidates that no other candidate beats in both. "
        "Traffic holds the reads and writes of the buffer beside those of the state, so that a "
        "long buffer can eat what the format saves.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure of a run, or the reason why there is none.

    Attributes:
        entry: which one.
        figure: None where the run has no data for it.
        absent: the reason then, a clause; else empty.
    """

    entry: FigureEntry
    figure: Figure | None
    absent: str


def draw_all(run: RunData) -> list[Drawing]:
    """Draw every figure that the run has data for."""
    drawings = []
    for entry in FIGURES:
        try:
            drawings.append(Drawing(entry=entry, figure=entry.draw(run), absent=""))
        except NoDataError as reason:
            drawings.append(Drawing(entry=entry, figure=None, absent=str(reason)))
    return drawings


def caption(run: RunData, entry: FigureEntry) -> str:
    """How to read a figure, and which backend produced it."""
    return f"{entry.reading} Backend: {getattr(run.results.backend, entry.source)}."


def render(run: RunData, out: Path) -> Path:
    """Write ``figures/*.png`` into the run folder ``out`` and return that folder; no stale picture stays.

    Raises:
        InputError: the folder cannot be written to.
    """
    folder = Path(out) / "figures"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}; make the folder writable") from error
    for drawing in draw_all(run):
        path = folder / f"{drawing.entry.name}.png"
        if drawing.figure is None:
            path.unlink(missing_ok=True)
        else:
            write_png(drawing.figure, path)
    return folder
