"""The figures of the report: one public function each, from a run to a ``matplotlib.figure.Figure``.

Notable: a figure without data is not drawn; its function raises `NoDataError` with the reason, which the report prints.
To add one: a function here and an entry in `FIGURES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from driftgate.accuracy.records import RunData
from driftgate.errors import InputError
from driftgate.reports.drawing import (
    GRID,
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

__all__ = [
    "FIGURES", "FigureEntry", "NoDataError", "caption", "kl_against_bytes", "kl_against_position", "kl_by_window_offset",
    "render", "state_error_by_layer", "task_accuracy",
]  # fmt: skip

N_BINS = 24
"""Log-spaced bins of positions, as in the fit of the drift law."""
CHANCE = 0.25
"""The tasks that ship ask for one of four choices."""
_ERRORS = ("read_error", "checkpoint_error", "trajectory_error", "output_error")


@rc_context(STYLE)
def kl_against_position(run: RunData) -> Figure:
    """Mean KL (nats per step) of each plan against position (tokens), both logarithmic, above the baseline's own NLL.

    Raises:
        NoDataError: no plan has a KL above 0 at any position.
    """
    curves = {name: _by_position(run, name) for name in run.results.plans}
    _require_positive([y for _, y in curves.values()])
    likelihood = _bin_steps(
        _finite(run.steps, "nll_baseline").drop_duplicates(["sequence", "position"]), "nll_baseline"
    )
    title = f"KL against position (backend: {run.results.backend.drift})"
    figure = start_figure(7.6, 5.6 if likelihood[0] else 4.2, title)
    panels: Any = figure.subplots(2 if likelihood[0] else 1, 1, sharex=True, squeeze=False,
                                  height_ratios=[3, 1] if likelihood[0] else None)[:, 0]  # fmt: skip
    main = panels[0]
    main.set_yscale("log")
    handles = []
    for name, (x, y) in curves.items():
        slope = run.results.plans[name].drift.slope
        note = "" if slope is None else f", slope {slope:.2f}"
        if x:
            handles.append(add_curve(main, plan_style(run, name), x, y, note=note))
    main.set_ylabel("mean KL(baseline‖plan)\n(nats per step)")
    handles += _draw_noise_floor(main, run)
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
        NoDataError: no plan with a KL above 0 has more than one window offset.
    """
    curves = {name: _by_offset(run, name) for name in run.results.plans}
    curves = {name: (x, y) for name, (x, y) in curves.items() if len(x) > 1}
    if not curves:
        raise NoDataError("no plan of the run buffers steps (L above 1)")
    _require_positive([y for _, y in curves.values()])
    figure = start_figure(7.6, 4.0, f"KL by window offset (backend: {run.results.backend.drift})")
    axes = figure.subplots()
    axes.set_yscale("log")
    handles = [add_curve(axes, plan_style(run, name), x, y) for name, (x, y) in curves.items()]
    handles += _draw_noise_floor(axes, run)
    axes.set_xlabel("buffered entries found by the step, h (steps since the last flush)")
    axes.set_ylabel("mean KL(baseline‖plan)\n(nats per step)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    add_legend(figure, handles)
    return figure


@rc_context(STYLE)
def state_error_by_layer(run: RunData) -> Figure:
    """Relative Frobenius errors of read copy, checkpoint, trajectory and output: one heat map each, plans × layers.

    Raises:
        NoDataError: no layer of any plan has a state error.
    """
    tables = {kind: table for kind in _ERRORS if (table := _layer_table(run, kind)).notna().to_numpy().any()}
    if not tables:
        raise NoDataError("the run holds no state errors")
    values = np.concatenate([table.to_numpy().ravel() for table in tables.values()])
    positive = values[np.isfinite(values) & (values > 0)]
    low, high = (positive.min(), positive.max()) if positive.size else (0.1, 1.0)
    shades = ScalarMappable(LogNorm(low, high if high > low else low * 10), colormaps["cividis"])
    layers = next(iter(tables.values())).shape[1]
    across = len(tables) if layers <= 3 else 2 if layers <= 8 else 1
    down = -(-len(tables) // across)
    cell = (0.52, 0.3) if layers <= 24 else (0.24, 0.52)
    names = list(run.results.plans)
    label_width = 0.075 * max(len(plan_style(run, name).label) for name in names)
    height = down * (cell[1] * len(names) + 0.75) + 0.5
    figure = start_figure(
        label_width + across * max(1.5, cell[0] * layers + 0.3) + 1.1,
        height,
        f"State errors by layer (backend: {run.results.backend.drift})",
    )
    panels: Any = figure.subplots(down, across, squeeze=False, sharey=True)
    for panel in panels.ravel()[len(tables) :]:
        panel.remove()
    used = panels.ravel()[: len(tables)]
    for axes, (kind, table) in zip(used, tables.items(), strict=True):
        _draw_heat_map(axes, table, shades, upright=cell[0] < cell[1])
        axes.set_title(kind.replace("_", " "), loc="left")
        axes.set_xlabel("layer")
    used[0].set_ylim(len(names), 0)
    for row in panels:
        row[0].set_yticks(np.arange(len(names)) + 0.5, [plan_style(run, name).label for name in names])
    if positive.size:
        figure.colorbar(
            shades, ax=list(used), label="relative error (Frobenius norms, 1 = 100 %)", aspect=30, pad=0.01
        )
    return figure


@rc_context(STYLE)
def task_accuracy(run: RunData) -> Figure:
    """Accuracy (%) of each plan and task with the 95 % interval of the paired difference laid around the baseline's.

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
    tallest = max(len(names) for names in tasks.values())
    title = f"Task accuracy (backend: {run.results.backend.tasks})"
    figure = start_figure(7.6, len(tasks) * (0.3 * tallest + 0.85) + 0.4, title)
    panels: Any = figure.subplots(len(tasks), 1, squeeze=False)[:, 0]
    for axes, (task, names) in zip(panels, tasks.items(), strict=True):
        _draw_task(axes, run, task, names)
    panels[-1].set_xlabel("accuracy (% of items)")
    handles = [
        Line2D([], [], color=INK, label="baseline"),
        Line2D([], [], color=MUTED, linestyle=":", label=f"chance of four choices ({100 * CHANCE:.0f} %)"),
        Line2D([], [], color=MUTED, marker="|", label="95 % interval of plan − baseline, paired"),
    ]
    add_legend(figure, handles)
    return figure


@rc_context(STYLE)
def kl_against_bytes(run: RunData) -> Figure:
    """Mean KL (nats per step, logarithmic) against state bytes and against traffic, both relative to the baseline.

    Raises:
        NoDataError: no plan has a mean KL above 0.
    """
    plans = {name: plan for name, plan in run.results.plans.items() if plan.kl.mean is not None}
    _require_positive([[plan.kl.mean for plan in plans.values()]])
    figure = start_figure(
        7.6, 4.0, f"KL against bytes (backend: {run.results.backend.drift}; bytes by formula)"
    )
    panels: Any = figure.subplots(1, 2, sharey=True)
    panels[0].set_yscale("log")
    panels[0].set_ylabel("mean KL(baseline‖plan)\n(nats per step)")
    handles: list[Any] = []
    for axes, field in zip(panels, ("state_ratio", "traffic_ratio"), strict=True):
        places = {name: float(getattr(plan.bytes, field)) for name, plan in plans.items()}
        handles = [_draw_point(axes, run, name, place) for name, place in places.items()]
        rings = [name for name in places if _is_efficient(run, name, places)]
        above = [name for name in rings if plans[name].kl.mean]
        axes.plot(
            [places[n] for n in above],
            [plans[n].kl.mean for n in above],
            "o",
            color=INK,
            ms=11,
            fillstyle="none",
        )
        axes.set_xlim(0, 1.08 * max(1.0, *places.values()))
    panels[0].set_xlabel("state bytes per step / baseline")
    panels[1].set_xlabel("state and buffer traffic per step / baseline")
    ring = Line2D(
        [],
        [],
        color=INK,
        marker="o",
        ms=9,
        fillstyle="none",
        linestyle="none",
        label="no candidate is better in both",
    )
    add_legend(figure, [*handles, ring])
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
        """File name without ending, anchor and name of the function."""
        return str(self.draw.__name__)


FIGURES: tuple[FigureEntry, ...] = (
    FigureEntry(
        draw=kl_against_position,
        title="KL against position",
        source="drift",
        reading="A level line means that the error of the format stays what it is; a rising one means that rounding errors "
        "feed back into the state. Where the baseline's own NLL below jumps, the model has left the range it was "
        "trained on, and the KL there says less about the format.",
    ),
    FigureEntry(
        draw=kl_by_window_offset,
        title="KL by window offset",
        source="drift",
        reading="The offset is the number of steps since the last flush: a split plan reads its low-precision copy between "
        "flushes and the exact state at them. A saw-tooth that starts anew after each flush is the read error alone; "
        "a curve that is high everywhere is an error held in the checkpoint.",
    ),
    FigureEntry(
        draw=state_error_by_layer,
        title="State errors by layer",
        source="drift",
        reading="Read error is copy against checkpoint, checkpoint error is against FP32 on the layer's own inputs, "
        "trajectory error is against the baseline's state, output error is what the layer passes on. A checkpoint error "
        "printed as 0 is exactly 0: such a plan feeds nothing of its rounding back.",
    ),
    FigureEntry(
        draw=task_accuracy,
        title="Task accuracy",
        source="tasks",
        reading="The point is the plan's accuracy and the bar the 95 % interval of its paired difference, laid around the "
        "baseline; lost and gained count the items whose answer flipped. A bar that crosses the baseline is no proof of "
        "equality: the verdict asks whether it stays inside the margin.",
    ),
    FigureEntry(
        draw=kl_against_bytes,
        title="KL against bytes",
        source="drift",
        reading="Left and low is better; a ring marks candidates that no other candidate beats in both. Traffic holds the "
        "buffer's reads and writes beside the state's, so that a plan can save state bytes and still move more.",
    ),
)  # fmt: skip


def caption(run: RunData, entry: FigureEntry) -> str:
    """How to read a figure, and which backend produced it."""
    return f"{entry.reading} Backend: {getattr(run.results.backend, entry.source)}."


def render(run: RunData, out: Path) -> Path:
    """Write ``figures/*.png`` into the run folder ``out``, remove those that have no data now, return the folder."""
    folder = Path(out) / "figures"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}; make the folder writable") from error
    for entry in FIGURES:
        path = folder / f"{entry.name}.png"
        try:
            write_png(entry.draw(run), path)
        except NoDataError:
            path.unlink(missing_ok=True)
    return folder


def _require_positive(curves: Sequence[Sequence[float | None]]) -> None:
    values = [value for curve in curves for value in curve if value is not None]
    if not values:
        raise NoDataError("the run holds no KL")
    if max(values) <= 0:
        raise NoDataError("the KL of every plan is exactly 0: all are bit-equal to the baseline")


def _finite(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    return frame[np.isfinite(frame[column].to_numpy(dtype=float))]


def _by_position(run: RunData, name: str) -> tuple[list[float], list[float | None]]:
    """Bins of the record where it has them, else bins of the steps."""
    points = run.results.plans[name].drift.by_position
    if points:
        return [math.sqrt(max(p.low, 1) * max(p.high, 1)) for p in points], [p.mean for p in points]
    return _bin_steps(_finite(run.steps[run.steps["plan"] == name], "kl"), "kl")


def _bin_steps(steps: pd.DataFrame, column: str) -> tuple[list[float], list[float | None]]:
    """Means of a column over log-spaced bins of position; empty bins are left out."""
    if steps.empty:
        return [], []
    position = np.maximum(steps["position"].to_numpy(dtype=float), 1)
    edges = np.unique(np.rint(np.geomspace(position.min(), position.max() + 1, N_BINS + 1)))
    groups = pd.DataFrame(
        {"bin": np.digitize(position, edges), "x": np.log(position), "y": steps[column].to_numpy()}
    ).groupby("bin")
    means = groups.mean()
    return np.exp(means["x"]).tolist(), means["y"].tolist()


def _by_offset(run: RunData, name: str) -> tuple[list[float], list[float | None]]:
    points = run.results.plans[name].drift.by_window_offset
    if points:
        return [float(p.offset) for p in points], [p.mean for p in points]
    means = _finite(run.steps[run.steps["plan"] == name], "kl").groupby("window_offset")["kl"].mean()
    return [float(offset) for offset in means.index], means.tolist()


def _draw_noise_floor(axes: Axes, run: RunData) -> list[Line2D]:
    """A line at the noise floor; a floor of exactly 0 is a line of the legend only, an unknown one nothing."""
    floor = run.results.noise_floor.kl_mean
    if floor is None:
        return []
    if floor <= 0:
        return [Line2D([], [], linestyle="none", label="noise floor of FP32: exactly 0")]
    axes.axhline(floor, color=MUTED, linestyle="--", linewidth=1)
    return [
        Line2D([], [], color=MUTED, linestyle="--", linewidth=1, label=f"noise floor of FP32: {floor:.1e}")
    ]


def _layer_table(run: RunData, kind: str) -> pd.DataFrame:
    """Errors of one kind: a row for each plan, a column for each layer of any plan, NaN where unknown."""
    layers = sorted({entry.layer for plan in run.results.plans.values() for entry in plan.state.layers})
    table = pd.DataFrame(np.nan, index=list(run.results.plans), columns=layers)
    for name, plan in run.results.plans.items():
        for entry in plan.state.layers:
            value = getattr(entry, kind)
            table.loc[name, entry.layer] = np.nan if value is None else value
    return table


def _draw_heat_map(axes: Axes, table: pd.DataFrame, shades: ScalarMappable, *, upright: bool) -> None:
    """Shade every positive error and print every cell; zero and unknown cells stay unshaded."""
    values = table.to_numpy()
    axes.pcolormesh(np.ma.masked_where(~(values > 0), values), norm=shades.norm, cmap=shades.cmap)
    for (row, column), value in np.ndenumerate(values):
        text = (
            "n/a" if np.isnan(value) else "0" if value == 0 else f"{value:.0e}" if upright else f"{value:.1e}"
        )
        red, green, blue, _ = shades.to_rgba(value if value > 0 else 1.0)  # type: ignore[misc]
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        colour = (MUTED if np.isnan(value) else INK) if not value > 0 else "#ffffff" if dark else "#000000"
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=colour, fontsize=6.5,
                  rotation=90 if upright else 0)  # fmt: skip
    axes.set_xticks(np.arange(table.shape[1]) + 0.5, [str(layer) for layer in table.columns])
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_task(axes: Axes, run: RunData, task: str, names: Sequence[str]) -> None:
    """One task: a row for each plan, with the baseline and chance as lines and the flips at the right."""
    records = [run.results.plans[name].tasks[task] for name in names]
    baselines = [100 * r.baseline_accuracy for r in records if r.baseline_accuracy is not None]
    places = [100 * CHANCE, *baselines]
    for row, (name, record) in enumerate(zip(names, records, strict=True)):
        style = plan_style(run, name)
        accuracy = 100 * (record.accuracy or 0.0)
        places.append(accuracy)
        if None not in (record.baseline_accuracy, record.ci_low, record.ci_high):
            bounds = [100 * (record.baseline_accuracy + end) for end in (record.ci_low, record.ci_high)]  # type: ignore[operator]
            axes.plot(
                bounds, [row, row], color=style.colour, marker="|", markersize=8, linewidth=2.2, alpha=0.75
            )
            places += bounds
        axes.plot(
            [accuracy], [row], color=style.colour, marker=style.marker, markersize=6.5, markeredgecolor=INK
        )
        axes.annotate(f"{record.lost} lost, {record.gained} gained", (1.01, row), xycoords=("axes fraction", "data"),
                      va="center", fontsize=8)  # fmt: skip
    for place in dict.fromkeys(baselines):
        axes.axvline(place, color=INK, linewidth=1.2, zorder=1)
    axes.axvline(100 * CHANCE, color=MUTED, linestyle=":", linewidth=1.2, zorder=1)
    axes.set_yticks(range(len(names)), [plan_style(run, name).label for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(min(places) - 2, max(places) + 2)
    axes.grid(False, axis="y")
    items = " or ".join(dict.fromkeys(f"{r.n} items × {r.repeats}" for r in records))
    axes.set_title(f"{task.replace('$', chr(92) + '$')} ({items})", loc="left")


def _draw_point(axes: Axes, run: RunData, name: str, place: float) -> Line2D:
    """One plan at its bytes, with the interval of its mean KL; a KL of exactly 0 lies on the lower edge."""
    style, kl = plan_style(run, name), run.results.plans[name].kl
    look: dict[str, Any] = {
        "color": style.colour,
        "marker": style.marker,
        "linestyle": "none",
        "markersize": 6.5,
    }
    if not kl.mean:
        look |= {"fillstyle": "none"}
        axes.plot([place], [0.0], transform=axes.get_xaxis_transform(), clip_on=False, **look)
        return Line2D([], [], label=f"{style.label}: exactly 0 (lower edge)", **look)
    if kl.ci_low is not None and kl.ci_high is not None and kl.ci_low > 0:
        axes.plot([place, place], [kl.ci_low, kl.ci_high], color=style.colour, linewidth=1.3)
    axes.plot([place], [kl.mean], **look)
    return Line2D([], [], label=style.label, **look)


def _is_efficient(run: RunData, name: str, places: dict[str, float]) -> bool:
    """Whether no other candidate has at most the bytes and at most the KL, and less of one."""
    plans = run.results.plans
    mine = (places[name], plans[name].kl.mean or 0.0)
    others = [
        (places[n], plans[n].kl.mean or 0.0) for n in places if n != name and plans[n].role == "candidate"
    ]
    beaten = any(x <= mine[0] and y <= mine[1] and (x, y) != mine for x, y in others)
    return plans[name].role == "candidate" and not beaten
