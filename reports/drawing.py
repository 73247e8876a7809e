"""How figures look: one style for a plan in every figure, curves that show exact zeros, files written whole.

Notable: figures are plain ``matplotlib.figure.Figure`` objects, no pyplot state. Ink, grid and paper have fixed
colours, which ``svg`` turns into CSS variables, so that one drawing serves a light and a dark page. Where a run has
many plans, those of the same formats are a family: what follows the ``@`` is the colour, the family the mark.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter
from PIL import Image

from driftgate.accuracy.records import RunData
from driftgate.errors import InputError

__all__ = [
    "COLOURS", "GRID", "INK", "LINES", "MARKERS", "MUTED", "PAPER", "STYLE", "NoDataError", "PlanStyle", "add_curve",
    "add_legend", "count_positions", "escape_text", "find_backend", "list_families", "list_variants", "plan_style",
    "start_figure", "write_png",
]  # fmt: skip

INK, MUTED, GRID, PAPER = "#1b1f23", "#66707a", "#d5dae1", "#fffffe"

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
}
"""Applied with ``matplotlib.rc_context``; the user's own settings stay as they are."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette without black and yellow: told apart under every common colour blindness."""
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

MANY = 8
"""Curves that one panel can tell apart."""
LONGEST = 60
"""Characters of a plan's name that a legend has room for."""


class NoDataError(InputError):
    """The run holds nothing that this figure could show; the message says why, in one clause."""


@dataclass(frozen=True)
class PlanStyle:
    """How a plan is drawn, the same in every figure of a run; 210 plans look different."""

    label: str
    colour: str
    line: Any
    marker: str


def plan_style(run: RunData, name: str) -> PlanStyle:
    """Style of a plan by its place in the run, or by family and variant; controls are labelled as such."""
    families = list_families(run)
    if families:
        colour = list_variants(families).index(name.partition("@")[2])
        shape = next(place for place, names in enumerate(families.values()) if name in names)
    else:
        colour = shape = list(run.results.plans).index(name)
    label = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
    label += " (control)" if run.results.plans[name].role == "control" else ""
    return PlanStyle(
        escape_text(label),
        COLOURS[colour % len(COLOURS)],
        LINES[shape % len(LINES)],
        MARKERS[shape % len(MARKERS)],
    )


def list_families(run: RunData) -> dict[str, list[str]]:
    """Plans of the same formats and role, where there are too many plans for one panel and few formats; else empty.

    Returns:
        What stands before the ``@`` (with ``(control)``) to names of plans.
    """
    families: dict[str, list[str]] = {}
    for name, plan in run.results.plans.items():
        told = " (control)" if plan.role == "control" else ""
        families.setdefault(name.partition("@")[0] + told, []).append(name)
    fits = len(run.results.plans) > MANY and 1 < len(families) <= len(MARKERS)
    return families if fits and len(list_variants(families)) <= len(COLOURS) else {}


def list_variants(families: dict[str, list[str]]) -> list[str]:
    """What follows the ``@`` in any plan, by length of the buffer."""
    found = {name.partition("@")[2] for names in families.values() for name in names}
    return sorted(found, key=lambda variant: (int((re.match(r"\d+", variant) or ["0"])[0]), variant))


def find_backend(run: RunData, source: str) -> str:
    """Which backend produced figures of a kind: ``drift``, ``tasks``, or ``tolerance`` (told by its cases)."""
    if source != "tolerance":
        return str(getattr(run.results.backend, source))
    named = {str(record.case.get("backend", run.results.backend.drift)) for record in run.results.tolerance}
    return ", ".join(sorted(named)) or run.results.backend.drift


def escape_text(text: str) -> str:
    """Text that matplotlib neither reads as mathematics nor hides as a label that begins with ``_``."""
    text = text.replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text


def start_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure (inches) with a title; the layout leaves room for every label."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    return figure


def add_curve(axes: Axes, style: PlanStyle, x: Sequence[float], y: Sequence[float | None], *, note: str = "") -> Line2D:
    """Draw one plan on an axis whose y is logarithmic.

    Args:
        axes: target.
        style: of the plan.
        x: places.
        y: values; null values leave a gap, an exact 0 is drawn as a hollow triangle on the lower edge.
        note: what the legend says after the label.

    Returns:
        A handle for the legend, which says so where the whole curve is exactly 0.
    """
    known = [(place, value) for place, value in zip(x, y, strict=True) if value is not None]
    positive = [value if value is not None and value > 0 else float("nan") for value in y]
    zeros = [place for place, value in known if value == 0]
    look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "linestyle": style.line}
    if known and len(zeros) == len(known):
        return Line2D([], [], label=f"{style.label}: exactly 0", **(look | {"linestyle": "none", "fillstyle": "none"}))
    axes.plot(list(x), positive, **look)
    if zeros:
        edge = axes.get_xaxis_transform()
        hollow: dict[str, Any] = {"marker": "v", "linestyle": "none", "fillstyle": "none", "clip_on": False}
        axes.plot(zeros, [0.0] * len(zeros), transform=edge, color=style.colour, **hollow)
        note += "; ▽: exactly 0"
    return Line2D([], [], label=style.label + note, **look)


def add_legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Put a legend below all panels and make the figure taller by its rows."""
    width, height = figure.get_size_inches()
    longest = max(len(handle.get_label()) for handle in handles)
    columns = max(1, min(len(handles), int(width / (0.078 * longest + 0.65))))
    rows = -(-len(handles) // columns)
    figure.set_size_inches(width, height + 0.19 * rows)
    figure.legend(handles=list(handles), loc="outside lower left", ncols=columns, handlelength=3.6)


def count_positions(axes: Axes, *, label: str) -> None:
    """A logarithmic axis of whole numbers, in powers of two written out."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.set_xlabel(label)


def write_png(figure: Figure, path: Path) -> Path:
    """Write a picture atomically.

    Raises:
        InputError: the folder cannot be written to.
    """
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        _save_small(figure, temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; make the folder writable") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return path


def _save_small(figure: Figure, path: str) -> None:
    """Save with a palette of 256 colours: a third of the size, and no colour that anybody could tell apart is lost."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    with Image.open(buffer) as picture:
        few = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(path, format="png", optimize=True)
