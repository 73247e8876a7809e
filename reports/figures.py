"""The figures of the report: one public function each, from a run to a ``matplotlib.figure.Figure``.

Notable: a figure without data is not drawn: its function raises `NoDataError` with the reason, and the report
prints it. To add a figure: a function in the file of its kind, and here an entry in `FIGURES`. Those of number
formats take arrays and serve notebooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from matplotlib.figure import Figure

from driftgate.accuracy.records import RunData
from driftgate.errors import InputError
from driftgate.reports.drawing import NoDataError, find_backend, write_png
from driftgate.reports.drift_figures import kl_against_bytes, kl_against_position, kl_by_window_offset
from driftgate.reports.evidence_figures import task_accuracy, tolerance_ladder
from driftgate.reports.format_figures import block_scales, format_snr, state_histogram, where_a_format_loses
from driftgate.reports.state_figures import output_error_against_state_error, state_error_by_layer

__all__ = [
    "FIGURES", "Drawing", "FigureEntry", "NoDataError", "block_scales", "caption", "draw_all", "format_snr",
    "kl_against_bytes", "kl_against_position", "kl_by_window_offset", "output_error_against_state_error", "render",
    "state_error_by_layer", "state_histogram", "task_accuracy", "tolerance_ladder", "where_a_format_loses",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FigureEntry:
    """A figure of the report.

    Attributes:
        draw: the public function; its name is the file's.
        title: heading in the report.
        source: what produced its numbers; see `find_backend`.
        reading: how to read it, two sentences.
    """

    draw: Callable[[RunData], Figure]
    title: str
    source: Literal["drift", "tasks", "tolerance"]
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
        title="Saw-tooth by window offset",
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
        draw=output_error_against_state_error,
        title="Output error against state error",
        source="drift",
        reading="Each mark is a layer. The state error is that of what a step reads: copy against checkpoint and "
        "checkpoint against FP32, added as squares. A mark on the dashed line passes its error on unchanged; below "
        "it the layer averages errors out, above it the inputs of the layer were wrong already.",
    ),
    FigureEntry(
        draw=kl_against_bytes,
        title="Pareto front: KL against bytes per step",
        source="drift",
        reading="Left and low is better; a ring marks candidates that no other candidate beats in both. "
        "Traffic holds the reads and writes of the buffer beside those of the state, so that a "
        "long buffer can eat what the format saves.",
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
        draw=tolerance_ladder,
        title="Tolerance",
        source="tolerance",
        reading="Each mark is a case: the error of the kernel against FP64 over the bound that was derived for it. "
        "Left of 1 it is inside; far left means that the bound is generous, not that the kernel is better.",
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
    return f"{entry.reading} Backend: {find_backend(run, entry.source)}."


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
