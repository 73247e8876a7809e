"""The command line: parse, call, print. Every error is one line with its exit code; see ``errors.py``."""

from __future__ import annotations

import errno
import json
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from driftgate.bench_command import bench
from driftgate.certify_command import certify
from driftgate.compare_command import compare
from driftgate.console import AsJson, emit
from driftgate.console import show as _show
from driftgate.console import write as _write
from driftgate.cost_command import cost
from driftgate.errors import DriftgateError, unknown_name
from driftgate.gate_command import gate
from driftgate.record_command import record
from driftgate.replay_command import replay
from driftgate.report_command import report
from driftgate.run_command import run

__all__ = ["app", "main"]

app = typer.Typer(
    name="driftgate",
    help="Which precision may the recurrent state of a hybrid model have?",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

INTERRUPTED, CLOSED_PIPE = 130, 141
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@app.callback()
def root(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Which precision may the recurrent state of a hybrid model have?"""
    ctx.obj = {"debug": debug}


@app.command()
def formats(
    file: Annotated[Path | None, typer.Argument(help="A .npy or .safetensors file; none: a built-in example.")] = None,
    scope: Annotated[str, typer.Option(help="Elements that share an FP32 scale: tensor, slot, head or row.")] = "row",
    as_json: AsJson = False,
) -> None:
    """Measure what every number format loses on a tensor."""
    from driftgate.formats_command import measure_formats

    measured = measure_formats(file, scope=scope)
    if as_json:
        _write(json.dumps(measured.as_dict(), indent=1) + "\n")
        return
    _show(*measured.notes(), measured.table())


@app.command(name="ls")
def list_catalogue(
    catalogue: Annotated[str, typer.Argument(help="models, plans, tasks, formats or suites.")],
    as_json: AsJson = False,
) -> None:
    """List a catalogue."""
    from driftgate.registry import CATALOGUES

    if catalogue not in CATALOGUES:
        raise unknown_name("catalogue", catalogue, CATALOGUES)
    rows = CATALOGUES[catalogue]()
    if as_json:
        _write(json.dumps(rows, indent=1) + "\n")
        return
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(v) for v in row.values()))
    _show(table)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can run."""
    from driftgate.doctor import examine

    findings = examine()
    if as_json:
        _write(json.dumps([f.as_dict() for f in findings], indent=1) + "\n")
    else:
        _write("".join(f"{f.status:5} {f.subject}: {f.text}\n" for f in findings))
    raise typer.Exit(4 if any(f.status == "bad" for f in findings) else 0)


def main() -> None:
    """Entry point of the console script."""
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    try:
        code = app(args=arguments or ["--help"], standalone_mode=False)
        if code == INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        _write("")  # what typer printed may still be on its way
        raise SystemExit(code if isinstance(code, int) else 0)
    except DriftgateError as error:
        _fail(str(error), error.exit_code, debug)
    except typer.Exit as error:
        raise SystemExit(error.exit_code) from None
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted; a run folder without results.json is not complete", INTERRUPTED, debug)
    except BrokenPipeError:
        raise SystemExit(CLOSED_PIPE) from None
    except SystemExit as error:  # rich ends with 1, the code of a failed gate, when the help of typer has no reader
        raise (SystemExit(CLOSED_PIPE) if isinstance(error.__context__, BrokenPipeError) else error) from None
    except Exception as error:
        _fail(*_explain(error), debug)


def _explain(error: Exception) -> tuple[str, int]:
    """One line and the exit code of an error that nobody foresaw."""
    if hasattr(error, "format_message"):  # what click raises for flags, whichever click typer brings
        return error.format_message(), 2
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return f"no space is left on a disk: {text}; free some, or set TMPDIR and --out to another one", 4
    full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # the latter is torch's
    if full or "DefaultCPUAllocator" in text:  # torch raises RuntimeError where this machine's memory runs out
        return f"memory ran out: {text}; give a smaller --batch, or fewer --steps or --sequences", 4
    return f"internal error: {type(error).__name__}: {text}; please report it with the output of --debug", 70


def _fail(message: str, code: int, debug: bool) -> None:
    """One line on standard error, the traceback on demand."""
    if debug:
        traceback.print_exc()
    emit(f"driftgate: {' '.join(message.split())}\n", sys.stderr)
    emit("", sys.stdout)
    raise SystemExit(code)


app.command()(run)
app.command()(gate)
app.command()(compare)
app.command()(report)
app.command()(bench)
app.command()(certify)
app.command()(record)
app.command()(replay)
app.command()(cost)
