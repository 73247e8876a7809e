"""What goes into one panel: the data of a figure taken from the run, and the marks drawn from them.

Notable: binned means come from the record where it has them, so that a figure shows what results.json says;
only a record without bins is binned from the steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.lines import Line2D

from driftgate.accuracy.records import RunData
from driftgate.reports.drawing import INK, MUTED, PAPER, NoDataError, escape_text, plan_style

__all__ = [
    "CHANCE", "RING", "Curve", "draw_heat_map", "draw_noise_floor", "draw_pareto_front", "draw_point", "draw_task",
    "is_efficient", "read_baseline_nll", "read_layers", "read_offsets", "read_positions",
    "require_positive",
]  # fmt: skip

N_BINS = 24
"""Log-spaced bins of positions, as in the fit of the drift law."""
FAR_BELOW = 1e3
"""How far below every curve the noise floor may lie and still be drawn."""
CHANCE = 0.25
"""The tasks that ship ask for one of four choices."""

RING: dict[str, Any] = {
    "color": INK,
    "marker": "o",
    "markersize": 12,
    "fillstyle": "none",
    "linestyle": "none",
}
"""Around a candidate that no other one beats."""

Curve = tuple[list[float], list[float | None]]
"""Places and values; a null value is unknown."""


def require_positive(curves: Sequence[Sequence[float | None]]) -> None:
    """Refuse data that a logarithmic axis cannot show.

    Raises:
        NoDataError: no value is known, or none is above 0.
    """
    values = [value for curve in curves for value in curve if value is not None]
    if not values:
        raise NoDataError("the run holds no KL")
    if max(values) <= 0:
        raise NoDataError("the KL of every plan is exactly 0, all are bit-equal to the baseline")


def read_positions(run: RunData, plan: str) -> Curve:
    """Mean KL (nats) by bin of position (tokens), placed at the geometric middle of the bin."""
    points = run.results.plans[plan].drift.by_position
    if points:
        return [math.sqrt(max(p.low, 1) * max(p.high, 1)) for p in points], [p.mean for p in points]
    return _bin_steps(run.steps[run.steps["plan"] == plan], "kl")


def read_offsets(run: RunData, plan: str) -> Curve:
    """Mean KL (nats) by buffered entries found."""
    points = run.results.plans[plan].drift.by_window_offset
    if points:
        return [float(p.offset) for p in points], [p.mean for p in points]
    steps = _finite(run.steps[run.steps["plan"] == plan], "kl")
    means = steps.groupby("window_offset")["kl"].mean()
    return [float(offset) for offset in means.index], means.tolist()


def read_baseline_nll(run: RunData) -> Curve:
    """The baseline's mean NLL (nats per token) by bin of position."""
    return _bin_steps(run.steps.drop_duplicates(["sequence", "position"]), "nll_baseline")


def read_layers(run: RunData, kind: str) -> pd.DataFrame:
    """State errors of one kind: rows are plans, columns the layers of any plan, NaN where unknown."""
    layers = sorted({entry.layer for plan in run.results.plans.values() for entry in plan.state.layers})
    table = pd.DataFrame(np.nan, index=list(run.results.plans), columns=layers)
    for name, plan in run.results.plans.items():
        for entry in plan.state.layers:
            value = getattr(entry, kind)
            table.loc[name, entry.layer] = np.nan if value is None else value
    return table


def _finite(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    finite: pd.DataFrame = frame[np.isfinite(frame[column].to_numpy(dtype=float))]
    return finite


def _bin_steps(steps: pd.DataFrame, column: str) -> Curve:
    """Means of the finite values over log-spaced bins of position; empty bins are left out."""
    steps = _finite(steps, column)
    if steps.empty:
        return [], []
    position = np.maximum(steps["position"].to_numpy(dtype=float), 1)
    edges = np.unique(np.rint(np.geomspace(position.min(), position.max() + 1, N_BINS + 1)))
    parts = {
        "bin": np.digitize(position, edges),
        "place": np.log(position),
        "value": steps[column].to_numpy(),
    }
    means = pd.DataFrame(parts).groupby("bin").mean()
    return np.exp(means["place"]).tolist(), means["value"].tolist()


def draw_noise_floor(panels: Sequence[Axes], run: RunData) -> list[Line2D]:
    """Draw a line at the noise floor behind the curves of each panel and return its legend.

    A floor of exactly 0, or one that would take most of the axis for itself, is in the legend only.
    """
    floor = run.results.noise_floor.kl_mean
    if floor is None:
        return []
    if floor <= 0:
        return [Line2D([], [], linestyle="none", label="noise floor of FP32: exactly 0")]
    shown = [np.asarray(line.get_ydata(), dtype=float) for axes in panels for line in axes.lines]
    lowest = min((values[values > 0].min() for values in shown if (values > 0).any()), default=floor)
    if floor * FAR_BELOW < lowest:
        return [Line2D([], [], linestyle="none", label=f"noise floor of FP32: {floor:.1e}, far below")]
    for axes in panels:
        axes.axhline(floor, color=MUTED, linestyle="--", linewidth=1)
    return [Line2D([], [], color=MUTED, linestyle="--", linewidth=1, label=f"noise floor of FP32: {floor:.1e}")]


def draw_heat_map(axes: Axes, table: pd.DataFrame, shades: ScalarMappable, *, upright: bool) -> None:
    """Shade every positive error and print every cell; zero and unknown cells stay unshaded."""
    values = table.to_numpy(dtype=float)
    norm: Any = shades.norm
    axes.pcolormesh(np.ma.masked_where(~(values > 0), values), norm=norm, cmap=shades.cmap)
    for (row, column), value in np.ndenumerate(values):
        if value > 0:
            red, green, blue, _ = shades.to_rgba(np.array([value]))[0]
            colour = "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "#000000"
            text = f"{value:.0e}" if upright else f"{value:.1e}"
        else:
            colour, text = (MUTED, "n/a") if np.isnan(value) else (INK, "0")
        place: dict[str, Any] = {"ha": "center", "va": "center", "rotation": 90 if upright else 0}
        axes.text(column + 0.5, row + 0.5, text, color=colour, fontsize=6.5, **place)
    axes.set_xticks(np.arange(table.shape[1]) + 0.5, [str(layer) for layer in table.columns])
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_task(axes: Axes, run: RunData, task: str, names: Sequence[str]) -> None:
    """Draw one task: a row for each plan, the baseline and chance as lines, the flips at the right."""
    records = [run.results.plans[name].tasks[task] for name in names]
    baselines = [100 * record.baseline_accuracy for record in records if record.baseline_accuracy is not None]
    places = [100 * CHANCE, *baselines]
    for row, (name, record) in enumerate(zip(names, records, strict=True)):
        style = plan_style(run, name)
        base, low, high = record.baseline_accuracy, record.ci_low, record.ci_high
        if base is not None and low is not None and high is not None:
            bounds = [100 * (base + low), 100 * (base + high)]
            axes.plot(bounds, [row, row], color=style.colour, marker="|", markersize=8, linewidth=2.2)
            places += bounds
        if record.accuracy is not None:
            places.append(100 * record.accuracy)
            look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "markeredgecolor": INK}
            axes.plot([100 * record.accuracy], [row], markersize=6.5, **look)
        told = f"{record.lost} lost, {record.gained} gained"
        axes.annotate(told, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    for place in dict.fromkeys(baselines):
        axes.axvline(place, color=INK, linewidth=1.2, zorder=1)
    axes.axvline(100 * CHANCE, color=MUTED, linestyle=":", linewidth=1.4, zorder=1)
    axes.set_yticks(range(len(names)), [plan_style(run, name).label for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(max(min(places), 0) - 2, min(max(places), 100) + 2)  # an interval may reach beyond what can be
    axes.grid(False, axis="y")
    items = " or ".join(dict.fromkeys(f"{record.n} items, {_count_repeats(record.repeats)}" for record in records))
    axes.set_title(escape_text(f"{task} ({items})"), loc="left")


def _count_repeats(number: int) -> str:
    return "1 repeat" if number == 1 else f"{number} repeats"


def draw_point(axes: Axes, run: RunData, name: str, place: float, *, ringed: bool) -> Line2D:
    """Draw a plan at its bytes with the interval of its mean KL; a KL of exactly 0 lies on the lower edge."""
    style, kl = plan_style(run, name), run.results.plans[name].kl
    look: dict[str, Any] = {
        "color": style.colour,
        "marker": style.marker,
        "linestyle": "none",
        "markersize": 7,
    }
    where: dict[str, Any] = {}
    if kl.mean:
        look |= {"markeredgecolor": PAPER, "markeredgewidth": 0.6}
        if kl.ci_low is not None and kl.ci_high is not None and kl.ci_low > 0:
            axes.plot([place, place], [kl.ci_low, kl.ci_high], color=style.colour, linewidth=1.3)
    else:
        look |= {"fillstyle": "none"}
        where = {"transform": axes.get_xaxis_transform(), "clip_on": False}
    axes.plot([place], [kl.mean or 0.0], **look, **where)
    if ringed:
        axes.plot([place], [kl.mean or 0.0], **RING, **where)
    return Line2D([], [], label=style.label if kl.mean else f"{style.label}: exactly 0 (lower edge)", **look)


def draw_pareto_front(axes: Axes, run: RunData, places: dict[str, float]) -> None:
    """Draw the steps between candidates that no other one beats; a KL of exactly 0 ends the line at its bytes."""
    ordered = sorted((place, run.results.plans[name].kl.mean or 0.0) for name, place in places.items())
    shown = [(place, mean) for place, mean in ordered if mean > 0]
    if len(shown) > 1:
        axes.step(*zip(*shown, strict=True), where="post", color=MUTED, linewidth=1, zorder=1)


def is_efficient(run: RunData, name: str, places: dict[str, float]) -> bool:
    """Whether this is a candidate and no other has at most its bytes and its KL, and less of one."""
    plans = run.results.plans
    mine = (places[name], plans[name].kl.mean or 0.0)
    others = [(places[n], plans[n].kl.mean or 0.0) for n in places if n != name and plans[n].role == "candidate"]
    beaten = any(x <= mine[0] and y <= mine[1] and (x, y) != mine for x, y in others)
    return plans[name].role == "candidate" and not beaten
