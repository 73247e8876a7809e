"""Figures of number formats on real states: how the values lie, what each format loses, and where NVFP4 loses it.

Notable: arrays in, figures out; no torch. Quantising is for the caller, so that these draw any format's result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from driftgate.reports.drawing import COLOURS, INK, LINES, MARKERS, MUTED, STYLE, NoDataError, add_legend, start_figure

__all__ = ["block_scales", "format_snr", "state_histogram", "where_a_format_loses"]

BINS = 60
SMALLEST = 1e-6
"""Magnitudes below this share of the greatest one are not shown."""


@rc_context(STYLE)
def state_histogram(states: Mapping[str, np.ndarray]) -> Figure:
    """Share of elements by magnitude over the root mean square of their state, one curve for each state.

    Args:
        states: name to values, any shape; zeros are counted in the legend.

    Raises:
        NoDataError: every element is 0.
    """
    shown = {name: np.abs(values[values != 0]) / _rms(values) for name, values in states.items() if values.any()}
    if not shown:
        raise NoDataError("every element of every state is 0")
    figure = start_figure(7.0, 3.6, "Magnitudes of the state's elements")
    axes = figure.subplots()
    axes.set_xscale("log")
    low = max(SMALLEST, min(float(values.min()) for values in shown.values()))
    edges = np.geomspace(low, 1.01 * max(float(values.max()) for values in shown.values()), BINS)
    handles = []
    for i, (name, values) in enumerate(shown.items()):
        share = 100 * np.histogram(values, edges)[0] / values.size
        handles += axes.plot(np.sqrt(edges[1:] * edges[:-1]), share, label=name, **_look(i, marker=False))
    axes.set_xlabel("|element| / root mean square of the state (dimensionless)")
    axes.set_ylabel("elements (% in each bin)")
    add_legend(figure, handles)
    return figure


@rc_context(STYLE)
def format_snr(bits: Mapping[str, float], snr: Mapping[str, Mapping[str, float]]) -> Figure:
    """Signal-to-noise ratio (dB) of every format against its bits per element, scales included, one mark a state.

    Args:
        bits: format to bits per element.
        snr: state to format to dB; formats without an error are left out by the caller.

    Raises:
        NoDataError: no format has a ratio.
    """
    if not any(snr.values()):
        raise NoDataError("no format has an error")
    figure = start_figure(7.0, 4.0, "Signal to noise of the formats")
    axes = figure.subplots()
    handles = []
    for i, (name, values) in enumerate(snr.items()):
        look = _look(i, marker=True) | {"linestyle": "none"}
        handles += axes.plot([bits[fmt] for fmt in values], list(values.values()), label=name, **look)
    places = {fmt: (bits[fmt], _mean_of(fmt, snr)) for fmt in bits if any(fmt in values for values in snr.values())}
    for fmt, (x, y) in places.items():
        crowded = any(0 < other - x < 0.6 and abs(level - y) < 8 for other, level in places.values())
        label: dict[str, Any] = {"xytext": (-7, 0), "ha": "right"} if crowded else {"xytext": (7, 0), "ha": "left"}
        axes.annotate(fmt, (x, y), textcoords="offset points", va="center", fontsize=8, **label)
    axes.margins(x=0.12)
    axes.set_xlabel("bits per element, scales included")
    axes.set_ylabel("signal to noise (dB, higher is better)")
    add_legend(figure, handles)
    return figure


@rc_context(STYLE)
def block_scales(states: Mapping[str, np.ndarray], *, block: int = 16) -> Figure:
    """Greatest magnitude of each block over that of its row, in octaves: what one scale a row would throw away.

    Args:
        states: name to values [..., row]; the row is a whole number of blocks.
        block: elements that share a scale (NVFP4: 16).

    Raises:
        NoDataError: every block is 0.
        ValueError: a row is no whole number of blocks.
    """
    octaves = {name: _octaves_below(values, block) for name, values in states.items()}
    octaves = {name: values for name, values in octaves.items() if values.size}
    if not octaves:
        raise NoDataError("every block of every state is 0")
    figure = start_figure(7.0, 3.6, f"Blocks of {block} below the greatest block of their row")
    axes = figure.subplots()
    edges = np.linspace(0, max(1.0, *(float(values.max()) for values in octaves.values())) + 1e-9, 40)
    handles = []
    for i, (name, values) in enumerate(octaves.items()):
        share = 100 * np.histogram(values, edges)[0] / values.size
        handles += axes.plot((edges[1:] + edges[:-1]) / 2, share, label=name, **_look(i, marker=False))
    axes.set_xlabel("octaves below the greatest block of the row (0 = as great)")
    axes.set_ylabel("blocks (% in each bin)")
    add_legend(figure, handles)
    return figure


@rc_context(STYLE)
def where_a_format_loses(values: np.ndarray, decoded: Mapping[str, np.ndarray], *, block: int = 16) -> Figure:
    """Where the squared error sits, and which elements read back as 0, by magnitude over the block's greatest.

    Args:
        values: a state, [..., row].
        decoded: format to what it reads back as, same shape.
        block: elements that share a scale.

    Raises:
        NoDataError: no format has an error.
    """
    errors = {name: (back - values) ** 2 for name, back in decoded.items()}
    if not any(error.any() for error in errors.values()):
        raise NoDataError("no format has an error")
    blocks = np.abs(values).reshape(*values.shape[:-1], -1, block)
    greatest = blocks.max(axis=-1, keepdims=True)
    place = (blocks / np.where(greatest > 0, greatest, 1.0)).reshape(values.shape)
    edges = np.linspace(0, 1, 25)
    middle = (edges[1:] + edges[:-1]) / 2
    figure = start_figure(7.6, 3.6, "Where the error sits")
    panels: Any = figure.subplots(1, 2)
    handles = []
    for i, (name, error) in enumerate(errors.items()):
        share = np.histogram(place, edges, weights=error)[0]
        lost = (decoded[name] == 0) & (values != 0)
        zeros = np.histogram(place[lost], edges)[0] / np.maximum(np.histogram(place, edges)[0], 1)
        look = _look(i, marker=False)
        handles += panels[0].plot(middle, 100 * share / max(float(share.sum()), 1e-300), label=name, **look)
        panels[1].plot(middle, 100 * zeros, **look)
    _mark_steps(panels[0])
    panels[0].set_ylabel("squared error (% in each bin)")
    panels[1].set_ylabel("elements that read back as 0 (%)")
    for axes in panels:
        axes.set_xlabel("|element| / greatest of its block")
    add_legend(figure, [*handles, Line2D([], [], color=MUTED, linestyle=":", label="values of E2M1 over 6")])
    return figure


def _mean_of(fmt: str, snr: Mapping[str, Mapping[str, float]]) -> float:
    return float(np.mean([values[fmt] for values in snr.values() if fmt in values]))


def _mark_steps(axes: Axes) -> None:
    for code in (0.5, 1, 1.5, 2, 3, 4):
        axes.axvline(code / 6, color=MUTED, linestyle=":", linewidth=0.8, zorder=0)


def _octaves_below(values: np.ndarray, block: int) -> np.ndarray:
    if values.shape[-1] % block:
        raise ValueError(f"rows of {values.shape[-1]} are no whole number of blocks of {block}")
    greatest = np.abs(values).reshape(*values.shape[:-1], -1, block).max(axis=-1)
    row = greatest.max(axis=-1, keepdims=True)
    known = (greatest > 0) & (row > 0)
    octaves: np.ndarray = np.log2(np.broadcast_to(row, greatest.shape)[known] / greatest[known])
    return octaves


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _look(index: int, *, marker: bool) -> dict[str, Any]:
    look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)]}
    return look | ({"marker": MARKERS[index % len(MARKERS)], "markeredgecolor": INK} if marker else {})
