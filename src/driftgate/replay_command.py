"""``driftgate replay``: plans through the decode kernels on a dump of recorded inputs, with no model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftgate.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from driftgate.accuracy.plans import PrecisionPlan, Role
    from driftgate.accuracy.replay_dump import Replay
    from driftgate.accuracy.replay_records import Errors, PlanReplay, ReplayDocument
    from driftgate.kernels.contract import Backend

__all__ = ["draw_replay", "format_notes", "format_table", "pick_backend", "replay"]

EXIT_OF_VERDICT = {"pass": 0, "fail": 1, "inconclusive": 3}
COLUMNS = ("output_error", "checkpoint_error", "read_error", "leak", "leak_predicted")
HEADINGS = ("output", "checkp.", "read", "leak", "by law", "drift")


def replay(
    dump: Annotated[Path, typer.Argument(metavar="DUMP", help="What `driftgate record` wrote; see docs/dump.md.")],
    plan: Annotated[list[str] | None, typer.Option(help="Plan, e.g. nvfp4/fp32@16; repeatable.")] = None,
    control: Annotated[list[str] | None, typer.Option(help="Plan that is expected to drift; repeatable.")] = None,
    steps: Annotated[int | None, typer.Option(help="Leading steps to take; default all.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of stochastic rounding.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    backend: Annotated[str, typer.Option(help="auto, triton, triton-interpret or torch.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for replay.json, steps.parquet and a figure.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No progress bar.")] = False,
) -> None:
    """Run plans on recorded inputs, with no model: output, checkpoint and read errors, leak and drift by layer."""
    from driftgate.accuracy.replay_dump import check_plans, replay_dump
    from driftgate.console import progress, show, write
    from driftgate.run_folder import check_out, claim

    plans, roles = _parse_plans(plan or (), control or ())
    check_plans(plans, n_steps=steps)
    way, device = pick_backend(backend, device)
    if out is not None:
        check_out(out)

    from driftgate.accuracy.dump import load_dump

    recorded = load_dump(dump)
    total = len(recorded.layers) * (steps or recorded.n_steps)
    with progress("layer steps", total, not (quiet or as_json or no_progress), then="statistics") as advance:
        measured = replay_dump(
            recorded, plans, roles=roles, file=str(dump), n_steps=steps, backend=way, device=device, seed=seed,
            progress=advance,
        )  # fmt: skip
    if out is not None:
        folder = claim(out)
        try:
            _write_folder(out, measured)
        finally:
            folder.release()
    if as_json:
        write(_to_json(measured.document))
    elif not quiet:
        show(format_table(measured.document), "", *format_notes(measured.document))
    raise typer.Exit(EXIT_OF_VERDICT[measured.document.verdict])


def pick_backend(backend: str, device: str) -> tuple[Backend, str]:
    """Backend and device of two options; begins again with TRITON_INTERPRET=1 where the interpreter is asked for.

    Raises:
        UsageError: an unknown name, or a backend that this process or device cannot run.
        InputError: the device is not there.
    """
    from driftgate.accuracy.backends import check_backend, resolve_backend

    check_backend(backend)
    if backend == "triton-interpret" and os.environ.get("TRITON_INTERPRET") != "1":
        os.execve(sys.executable, [sys.executable, "-P", *sys.argv], {**os.environ, "TRITON_INTERPRET": "1"})

    from driftgate.accuracy.models import resolve_device

    device = resolve_device("cpu" if backend == "triton-interpret" and device == "auto" else device)
    return resolve_backend(backend, device), device


def _parse_plans(plans: Sequence[str], controls: Sequence[str]) -> tuple[dict[str, PrecisionPlan], dict[str, Role]]:
    """Plans and their roles by canonical text.

    Raises:
        UsageError: a text that does not parse, or a plan that is there twice.
    """
    from driftgate.accuracy.plans import PrecisionPlan, Role

    parsed: dict[str, PrecisionPlan] = {}
    roles: dict[str, Role] = {}
    for role, texts in ((Role.CANDIDATE, plans), (Role.CONTROL, controls)):
        for text in texts:
            one = PrecisionPlan.parse(text)
            if str(one) in parsed:
                raise UsageError(f"plan {one} is listed twice; list it once")
            parsed[str(one)], roles[str(one)] = one, role
    return parsed, roles


def _write_folder(out: Path, measured: Replay) -> None:
    """replay.json last, so that its presence means complete."""
    from driftgate.accuracy.records import write_text
    from driftgate.reports.drawing import write_png

    measured.steps.to_parquet(out / "steps.parquet", index=False)
    write_png(draw_replay(measured), out / "output_error.png")
    write_text(out / "replay.json", _to_json(measured.document))


def _to_json(document: ReplayDocument) -> str:
    return json.dumps(document.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"


def format_table(document: ReplayDocument) -> Table:
    """Errors of each plan for a terminal of 80 columns: mean over layers, and its worst layer."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("plan", overflow="fold")
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, plan in document.plans.items():
        table.add_row(escape(name + (" (control)" if plan.role == "control" else "")))
        worst = next(layer for layer in plan.layers if layer.layer == plan.worst_layer)
        count = f"{len(plan.layers)} layers" if len(plan.layers) > 1 else "1 layer"
        table.add_row(f"  mean of {count}", *_cells(plan.mean), _law(plan.drift.law, plan.drift.slope))
        if len(plan.layers) > 1:
            table.add_row(f"  layer {worst.layer}, the worst", *_cells(worst), _law(worst.drift.law, worst.drift.slope))
    return table


def _cells(errors: Errors) -> list[str]:
    return [_number(getattr(errors, name)) for name in COLUMNS]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def _law(law: str | None, slope: float | None) -> str:
    """Slope and law in 13 columns."""
    return "-" if slope is None else f"{slope:.2f} {'' if law is None else law}".strip()


def format_notes(document: ReplayDocument) -> list[str]:
    """What a reader must know beside the table."""
    dump, floor = document.dump, document.baseline
    kinds = ", ".join(dict.fromkeys(layer.recurrence for layer in floor.layers))
    taken = f"{dump.steps}" if dump.steps == dump.steps_recorded else f"{dump.steps} of {dump.steps_recorded}"
    lines = [
        f"{dump.file}: {dump.model}, {len(dump.layers)} layers ({kinds}), {dump.sequences} sequences of {taken} steps",
        f"backend: {document.backend} on {document.device}; errors are relative Frobenius norms against the FP32 "
        "baseline",
        f"the baseline against FP64: output {_number(floor.output_error)}, state {_number(floor.state_error)}",
    ]
    equal = sum(record.equal for record in document.bitwise)
    lines.append(f"bits that must be equal: {equal} of {len(document.bitwise)} comparisons are")
    lines += [f"  {_broken(record)}" for record in document.bitwise if not record.equal]
    lines += [f"{name}: {_status(plan)}" for name, plan in document.plans.items() if plan.status != "measured"]
    return [*lines, f"verdict: {document.verdict} (no limits are applied)"]


def _broken(record: Any) -> str:
    case = record.case
    return (
        f"{record.invariant} {case['plan']} layer {case['layer']}: {record.n_different} differ, at most "
        f"{record.max_ulp} ulp, first {record.first_different}"
    )


def _status(plan: PlanReplay) -> str:
    return f"{plan.status}, {plan.reason}"


def draw_replay(measured: Replay) -> Figure:
    """Output error against position of each plan: mean over layers, heads and sequences, exact zeros left out."""
    from types import SimpleNamespace

    from matplotlib import rc_context
    from matplotlib.lines import Line2D

    from driftgate.reports.drawing import MUTED, STYLE, add_legend, escape_text, plan_style, start_figure

    document, handles = measured.document, []
    by_layer = measured.steps.groupby(["plan", "layer", "position"], observed=True)["output_error"].mean()
    means = by_layer.groupby(["plan", "position"], observed=True).mean()
    with rc_context(STYLE):
        title = f"Output error on {document.dump.model} (backend: {document.backend})"
        figure = start_figure(7.6, 3.9, escape_text(title))
        axes = figure.subplots()
        axes.set_yscale("log")
        axes.set_xlabel("position (tokens)")
        axes.set_ylabel("relative error of a layer's output,\nmean over layers and heads")
        for name in document.plans:
            style = plan_style(SimpleNamespace(results=document), name)  # type: ignore[arg-type]
            curve = means[name]
            above = curve[curve > 0]
            note = f", exactly 0 at {len(curve) - len(above)} of {len(curve)} steps" if len(above) < len(curve) else ""
            look: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "linewidth": 1.0}
            axes.plot(above.index, above.to_numpy(), **look)
            handles.append(Line2D([], [], label=style.label + note, **look))
        floor = document.baseline.output_error
        if floor:
            line = axes.axhline(floor, color=MUTED, linewidth=1.0, linestyle=":")
            line.set_label("baseline against FP64")
            handles.append(line)
        add_legend(figure, handles)
    return figure
