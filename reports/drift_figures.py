"""Figures of the divergence of logits: against position, within a flush window, against bytes."""

from __future__ import annotations

from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from driftgate.accuracy.records import RunData
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
)  # fmt: skip
from driftgate.reports.panels import (
    RING,
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
