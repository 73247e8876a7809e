"""``driftgate bench``: times of the compiled kernels, each plan beside the baseline of the same process.

Notable: only the command itself needs typer and the modules of ``console.py``; ``choose_cases``, ``run_bench`` and
``format_table`` serve scripts as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftgate.accuracy.plans import BASELINE, PrecisionPlan
from driftgate.errors import InputError, UsageError, unknown_name
from driftgate.kernels.contract import Recurrence

if TYPE_CHECKING:
    from driftgate.kernels.launch import Launch

__all__ = ["Case", "bench", "choose_cases", "format_notes", "format_table", "run_bench"]

DEFAULT_PLANS = (
    "fp32@{}",
    "fp32@{}+cached+buf=bf16",
    "fp32@{}+exact_readout",
    "fp8/fp32@{}",
    "nvfp4/fp32@{}",
    "nvfp4@{}",
)
"""With L in the braces."""

DEFAULT_LENGTH = 16
DEFAULT_BATCHES = (16, 64, 256)
WIDTH = 80
NOISY = 0.1
"""Spread over the median from which the notes count a time as noisy."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan on one layer at one batch."""

    recurrence: Recurrence
    batch: int
    plan: PrecisionPlan


def bench(
    plan: Annotated[list[str] | None, typer.Option(help="Plan, e.g. nvfp4/fp32@16; repeatable.")] = None,
    recurrence: Annotated[list[str] | None, typer.Option(help="gdn, kda or mamba2; repeatable; default all.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows; repeatable; default 16 64 256.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="L of the default plans; default 16.")] = None,
    every_offset: Annotated[bool, typer.Option("--every-offset", help="Time every window offset.")] = False,
    out: Annotated[Path | None, typer.Option(help="File for the JSON document.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Time the kernels on this GPU beside the baseline and what a copy of memory reaches."""
    from driftgate.console import progress, show, write

    cases = choose_cases(plans=plan, recurrences=recurrence, batches=batch, length=length)
    _check_out(out)
    _require_gpu()
    with progress("configurations", len(cases), not (quiet or as_json)) as advance:
        document = run_bench(cases, every_offset=every_offset, advance=advance)
    text = json.dumps(document, indent=1) + "\n"
    if as_json:
        write(text)
    elif not quiet:
        show(*format_table(document), "", *format_notes(document))
    if out is not None:  # last, so that a full disk does not cost what was measured
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"--out {out}: cannot be written ({error.strerror}); name another file") from error


def choose_cases(
    *,
    plans: Sequence[str] | None = None,
    recurrences: Sequence[str] | None = None,
    batches: Sequence[int] | None = None,
    length: int | None = None,
) -> list[Case]:
    """What to time, in order; the baseline comes first at every recurrence and batch, named or not.

    Args:
        plans: texts; None for the default plans.
        recurrences: names; None for all.
        batches: rows; None for 16, 64 and 256.
        length: L of the default plans, None for 16.

    Raises:
        UsageError: an unknown recurrence or plan, a plan without natural cycles, ``length`` beside ``plans``.
    """
    if plans and length is not None:
        raise UsageError("--length is L of the default plans; write it into --plan instead, as in fp32@8")
    known = {r.value: r for r in Recurrence}
    for name in recurrences or ():
        if name not in known:
            raise unknown_name("recurrence", name, known)
    texts = plans or [text.format(DEFAULT_LENGTH if length is None else length) for text in DEFAULT_PLANS]
    parsed = [PrecisionPlan.parse(text) for text in texts]
    for p in parsed:
        if p.options.track or p.options.window:
            raise UsageError(
                f"plan {str(p)!r}: bench times natural cycles of single tokens; leave +track and +spec out"
            )
    chosen = {str(p): p for p in (BASELINE, *parsed)}.values()
    return [
        Case(recurrence=known[name], batch=n, plan=p)
        for name in dict.fromkeys(recurrences or known)
        for n in dict.fromkeys(batches or DEFAULT_BATCHES)
        for p in chosen
    ]


def run_bench(
    cases: Iterable[Case],
    *,
    every_offset: bool = False,
    launches: Callable[[Case], Launch | None] | None = None,
    advance: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Measure the copy's bandwidth, then every case.

    Args:
        cases: as ``choose_cases`` has them; a plan is compared with the baseline before it of equal recurrence and
            batch.
        every_offset: time every window offset, where else three and the flush are timed.
        launches: configuration for a case; None for the table's.
        advance: told of each case that is done.

    Returns:
        What JSON holds: ``machine``, ``copy`` and ``records``, those of ``time_configuration`` with ``plan``,
        ``baseline_us`` and ``speedup`` (the baseline's time over the cycle's).
    """
    from driftgate.kernels.bench import SHAPES, choose_offsets, time_configuration
    from driftgate.kernels.device_time import describe_machine, measure_copy

    copy = measure_copy()
    records, baselines = [], {}
    for case in cases:
        options = case.plan.options
        record = time_configuration(
            case.recurrence, SHAPES[case.recurrence], options, case.batch,
            None if launches is None else launches(case), choose_offsets(options.length, every=every_offset),
            copy_bandwidth=copy["bandwidth"],
        )  # fmt: skip
        us = record["cycle"]["us"]
        if options.step_by_step:
            baselines[case.recurrence, case.batch] = us
        baseline = baselines[case.recurrence, case.batch]
        records.append({"plan": str(case.plan)} | record | {"baseline_us": baseline, "speedup": baseline / us})
        if advance is not None:
            advance(1)
    return {"schema_version": 1, "machine": describe_machine(), "copy": copy, "records": records}


def format_table(document: dict[str, Any]) -> list[str]:
    """Lines of at most 80 columns, one a record; a plan too long for its column has a line of its own.

    Raises:
        ValueError: a record without a time of its flush, whose cycle would be a guess.
    """
    records = document["records"]
    lengths = {r["length"] for r in records if r["length"]}
    middle = f"h={max(lengths) // 2}" if len(lengths) == 1 else "h=L/2"
    rows = [(r["recurrence"], str(r["batch"]), r["plan"], *_cells(r)) for r in records]
    heads = [
        ("recur-", "", "", "µs", "µs", "µs", "cycle", "floor", "x", "% of"),
        ("rence", "batch", "plan", "h=0", middle, "flush", "µs", "µs", "base", "copy"),
    ]
    widths = [6, 5, 0, 5, 5, 5, 5, 5, 4, 4]
    room = WIDTH - sum(widths) - len(widths) + 1
    widths[2] = max([4, *(n for row in rows if (n := len(row[2])) <= room)])
    lines = []
    for row in [*heads, *rows]:
        cells = list(row)
        if len(cells[2]) > widths[2]:
            lines.append(" ".join(cells[:3]))
            cells[:3] = ["", "", ""]
        justified = [
            cell.ljust(width) if i in (0, 2) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append(" ".join(justified).rstrip())
    return lines


def format_notes(document: dict[str, Any]) -> list[str]:
    """What a reader must know beside the table."""
    machine, copy, records = document["machine"], document["copy"], document["records"]
    methods = {"graph": "in CUDA Graphs", "events": "launched one by one"}
    by_method = [
        f"batch {', '.join(str(b) for b in sorted({r['batch'] for r in records if r['method'] == method}))} {text}"
        for method, text in methods.items()
        if any(r["method"] == method for r in records)
    ]
    steps = [step for r in records for step in r["steps"]]
    noisy = sum(step["spread_us"] > NOISY * step["us"] for step in steps)
    lines = [
        f"{machine['device']} ({machine['capability']}), driver {machine['driver'] or 'unknown'}",
        f"torch {machine['torch']}, triton {machine['triton']}, {machine['date']}",
        f"device copy: {copy['bandwidth'] / 1e12:.2f} TB/s, bytes read and written",
        f"µs: median of {records[0]['repeats']} passes, of one layer and token; {'; '.join(by_method)}",
        "cycle: mean over L steps, the flush counted once; x base: baseline µs / cycle µs",
        "floor: bytes of states and buffers by formula, at the copy's bandwidth",
    ]
    if any(r["sampled"] for r in records):
        lines.append("sampled: offsets 0, L/2, L-2 and the flush timed, those between interpolated")
    if noisy:
        lines.append(f"{noisy} of {len(steps)} times have a spread above {NOISY:.0%} of the median: see spread_us")
    return lines


def _cells(record: dict[str, Any]) -> tuple[str, ...]:
    """Numbers of a row: h = 0, h = L // 2, flush, cycle, floor, speed-up, per cent of the copy."""
    length, cycle = record["length"], record["cycle"]
    flush = [step["us"] for step in record["steps"] if step["flush"]]
    if cycle is None or len(flush) != 1:
        raise ValueError(f"plan {record['plan']}: the flush or a step beside it was not timed, so no cycle is printed")
    between = {step["offset"]: step["us"] for step in record["steps"] if not step["flush"]}
    times = (between.get(0), between.get(length // 2), flush[0] if length else None, cycle["us"], cycle["floor_us"])
    fraction = cycle["copy_fraction"]
    return (
        *(_show_us(us) for us in times),
        f"{record['speedup']:.2f}",
        "-" if fraction is None else f"{100 * fraction:.0f}",
    )


def _show_us(us: float | None) -> str:
    """Microseconds in five characters."""
    if us is None:
        return "-"
    return f"{us:.1f}" if us < 999.95 else f"{us:.0f}"


def _check_out(out: Path | None) -> None:
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise InputError(f"--out {out}: expected a file in a folder that exists; name one")


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise InputError("bench: no CUDA device here, and a CPU cannot time compiled kernels; run it where a GPU is")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise InputError("bench: TRITON_INTERPRET=1 interprets the kernels, which has no time to speak of; unset it")
