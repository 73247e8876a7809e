"""Figures of the divergence of logits: against position, within a flush window, against bytes."""

from __future__ import annotations

from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from driftgate.accuracy.records import RunData
from driftgate.reports.drawing import (
    COLOURS,
    INK,
    LINES,
    MUTED,
    STYLE,
    NoDataError,
    PlanStyle,
    add_curve,
    add_legend,
    count_positions,
    escape_text,
    list_families,
    list_variants,
    plan_style,
    start_figure,
)  # fmt: skip
from driftgate.reports.panels import (
    RING,
    Curve,
    draw_noise_floor,
    draw_pareto_front,
    draw_point,
    is_efficient,
    read_baseline_nll,
    read_offsets,
    read_positions,
    require_positive,
)  # fmt: skip

__all__ = ["kl_against_bytes", "kl_against_position", "kl_by_window_offset"]

_KL_LABEL = "mean KL(baseline‖plan)\n(nats per step)"
_OFFSET_LABEL = "buffered entries found by the step (steps since the last flush)"


@rc_context(STYLE)
def kl_against_position(run: RunData) -> Figure:
    """Mean KL (nats per step) against position (tokens) of each plan; below it the baseline's own NLL.

    Raises:
        NoDataError: no plan has a KL above 0 at any position.
    """
    curves = {name: curve for name in run.results.plans if (curve := read_positions(run, name))[0]}
    require_positive([values for _, values in curves.values()])
    likelihood = read_baseline_nll(run)
    title = f"KL against position (backend: {run.results.backend.drift})"
    figure, panels, below = _start_panels(run, title, below=bool(likelihood[0]))
    notes = {}
    for name in curves:
        slope = run.results.plans[name].drift.slope
        notes[name] = "" if slope is None else f", slope {slope:.2f}"
    handles = _draw_curves(run, panels, curves, notes)
    if below is not None:
        below.plot(*likelihood, color=INK, linewidth=1.2)
        below.set_ylabel("baseline NLL\n(nats per token)")
    count_positions(below or panels[-1], label="position (tokens)")
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
    figure, panels, _ = _start_panels(run, f"KL by window offset (backend: {run.results.backend.drift})")
    handles = _draw_curves(run, panels, curves, dict.fromkeys(curves, ""))
    for axes in panels:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if axes.xaxis.get_tick_params()["labelbottom"]:
            axes.set_xlabel(_OFFSET_LABEL if len(panels) == 1 else _OFFSET_LABEL.replace(" (", "\n("))
    add_legend(figure, handles)
    return figure


def _start_panels(run: RunData, title: str, *, below: bool = False) -> tuple[Figure, list[Any], Any]:
    """A figure with one panel, or one for each family of plans, which share both axes.

    Returns:
        The figure, its panels with a logarithmic KL axis, and one more below them or None.
    """
    families = list(list_families(run)) or [""]
    across = min(2, len(families))
    down = -(-len(families) // across)
    figure = start_figure(7.6, (3.9 if across == 1 else 2.1 * down) + 1.3 * below, title)
    grid = figure.add_gridspec(down + below, across, height_ratios=[3] * down + [across] * below)
    panels: list[Any] = []
    for number, family in enumerate(families):
        shared = {"sharex": panels[0], "sharey": panels[0]} if panels else {}
        axes = figure.add_subplot(grid[divmod(number, across)], **shared)
        axes.set_yscale("log")
        axes.set_ylabel(_KL_LABEL if across == 1 else "mean KL\n(nats per step)")
        axes.set_title(escape_text(family), loc="left")
        panels.append(axes)
    last = figure.add_subplot(grid[down, :], sharex=panels[0]) if below else None
    for number, axes in enumerate(panels):
        axes.label_outer()
        axes.tick_params(labelbottom=last is None and number + across >= len(panels))
    return figure, panels, last


def _draw_curves(run: RunData, panels: list[Any], curves: dict[str, Curve], notes: dict[str, str]) -> list[Line2D]:
    """Draw each plan, then the noise floor; the legend is of plans, or where families have panels of their variants."""
    families = list_families(run)
    if not families:
        handles = [add_curve(panels[0], plan_style(run, n), *curve, note=notes[n]) for n, curve in curves.items()]
        return handles + draw_noise_floor(panels, run)
    variants, hollow = list_variants(families), False
    drawn: list[PlanStyle] = []
    for axes, (family, names) in zip(panels, families.items(), strict=True):
        exact: list[PlanStyle] = []
        for name in (name for name in names if name in curves):
            variant = name.partition("@")[2]
            number, values = variants.index(variant), curves[name][1]
            look = PlanStyle(escape_text(f"@{variant}"), COLOURS[number], LINES[number % len(LINES)], ".")
            add_curve(axes, look, *curves[name])
            (drawn if any(values) else exact).append(look)
            hollow |= any(values) and 0 in values
        if exact:
            axes.set_title(escape_text(f"{family}; exactly 0: {', '.join(look.label for look in exact)}"), loc="left")
    legend = [
        Line2D([], [], color=look.colour, linestyle=look.line, label=look.label)
        for look in sorted(set(drawn), key=lambda look: COLOURS.index(look.colour))
    ]
    if hollow:
        legend.append(Line2D([], [], color=MUTED, marker="v", linestyle="none", fillstyle="none", label="exactly 0"))
    return legend + draw_noise_floor(panels, run)


@rc_context(STYLE)
def kl_against_bytes(run: RunData) -> Figure:
    """Mean KL (nats per step, logarithmic) against state bytes relative to the baseline, and against traffic in bytes.

    Raises:
        NoDataError: no plan has a mean KL above 0.
    """
    plans = {name: plan for name, plan in run.results.plans.items() if plan.kl.mean is not None}
    require_positive([[plan.kl.mean for plan in plans.values()]])
    figure = start_figure(7.6, 3.9, f"KL against bytes per step (backend: {run.results.backend.drift})")
    panels: Any = figure.subplots(1, 2, sharey=True)
    panels[0].set_yscale("log")
    panels[0].set_ylabel(_KL_LABEL)
    panels[0].set_xlabel("state bytes per step / baseline")
    panels[1].set_xlabel("state and buffer traffic per step\n(KiB per sequence)")
    traffic = {name: plan.bytes.traffic_per_step / 1024 for name, plan in plans.items()}
    whole = [traffic[name] / plan.bytes.traffic_ratio for name, plan in plans.items() if plan.bytes.traffic_ratio > 0]
    columns = [({name: plan.bytes.state_ratio for name, plan in plans.items()}, 1.0)]
    columns.append((traffic, max(whole, default=0.0)))
    handles: list[Line2D] = []
    for axes, (places, baseline) in zip(panels, columns, strict=True):
        best = {name for name in places if is_efficient(run, name, places)}
        draw_pareto_front(axes, run, {name: places[name] for name in best})
        axes.axvline(baseline, color=INK, linewidth=1, linestyle=":")
        handles = [draw_point(axes, run, name, place, ringed=name in best) for name, place in places.items()]
        axes.set_xlim(0, 1.08 * max(baseline, *places.values()))
    ends = [
        Line2D([], [], label="no candidate is better in both", **RING),
        Line2D([], [], color=MUTED, linewidth=1, label="Pareto front of the candidates"),
        Line2D([], [], color=INK, linewidth=1, linestyle=":", label="baseline"),
    ]
    add_legend(figure, [*handles, *ends])
    return figure
