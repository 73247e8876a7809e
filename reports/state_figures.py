"""Figures of the errors of states and layer outputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from driftgate.accuracy.records import LayerState, RunData
from driftgate.reports.drawing import MUTED, PAPER, STYLE, NoDataError, PlanStyle, add_legend, plan_style, start_figure
from driftgate.reports.panels import draw_heat_map, read_layers

__all__ = ["output_error_against_state_error", "state_error_by_layer"]

_ERRORS = ("read_error", "checkpoint_error", "trajectory_error", "output_error")


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
def output_error_against_state_error(run: RunData) -> Figure:
    """Output error of each plan and layer against the error of the state that it reads, both relative, logarithmic.

    Raises:
        NoDataError: no layer of any plan has both.
    """
    points = {name: _read_points(plan.state.layers) for name, plan in run.results.plans.items()}
    found = [point for entries in points.values() for point in entries]
    if not found:
        raise NoDataError("no layer has a state error and an output error above 0")
    figure = start_figure(6.4, 4.2, f"Output error against state error (backend: {run.results.backend.drift})")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    positive = [state for state, _ in found if state > 0]
    if positive:  # whole decades: every axis has two labels then
        ends = [10 ** math.floor(math.log10(min(positive))), 10 ** math.ceil(math.log10(1.01 * max(positive)))]
        axes.plot(ends, ends, color=MUTED, linewidth=1, linestyle="--")
        axes.set_xlim(*ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    handles = [_draw_layers(axes, plan_style(run, name), entries) for name, entries in points.items()]
    handles.append(Line2D([], [], color=MUTED, linewidth=1, linestyle="--", label="output error = state error"))
    axes.set_xlabel("error of the state that is read (relative, 1 = 100 %)")
    axes.set_ylabel("output error of the layer\n(relative, 1 = 100 %)")
    add_legend(figure, handles)
    return figure


def _draw_layers(axes: Axes, style: PlanStyle, entries: list[tuple[float, float]]) -> Line2D:
    """Marks of a plan, one a layer; a state error of exactly 0 lies on the left edge."""
    look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "markersize": 7.0, "linestyle": "none"}
    hollow: dict[str, Any] = {"fillstyle": "none"}
    for state, output in entries:
        place: Any = axes.transData if state else axes.get_yaxis_transform()
        more = {"markeredgecolor": PAPER, "markeredgewidth": 0.6} if state else {**hollow, "clip_on": False}
        axes.plot([state], [output], transform=place, **look, **more)
    if entries and not any(state for state, _ in entries):
        return Line2D([], [], label=f"{style.label}: state error exactly 0 (left edge)", **look, **hollow)
    return Line2D([], [], label=style.label, **look)


def _read_points(layers: list[LayerState]) -> list[tuple[float, float]]:
    """State error and output error of the layers that have both, the latter above 0."""
    errors = [(_error_of_read(entry), entry.output_error) for entry in layers]
    return [(state, output) for state, output in errors if state is not None and output]


def _error_of_read(entry: LayerState) -> float | None:
    """Error of what a step reads: copy against checkpoint and checkpoint against FP32, added as squares."""
    parts = [error for error in (entry.read_error, entry.checkpoint_error) if error is not None]
    return math.hypot(*parts) if parts else None
