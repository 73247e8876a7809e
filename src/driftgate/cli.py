"""The command line: parse, call, print. Every error is one line with its exit code; see ``errors.py``."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console
from rich.table import Table

from driftgate.bench_command import bench
from driftgate.certify_command import certify
from driftgate.errors import DriftgateError, InputError, unknown_name
from driftgate.record_command import record
from driftgate.replay_command import replay

if TYPE_CHECKING:
    from driftgate.accuracy.records import RunData

__all__ = ["app", "main"]

app = typer.Typer(
    name="driftgate",
    help="Which precision may the recurrent state of a hybrid model have?",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

EXIT_OF_VERDICT = {"pass": 0, "fail": 1, "inconclusive": 3}
INTERRUPTED, CLOSED_PIPE = 130, 141
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output and nothing else.")]
PolicyFile = Annotated[Path | None, typer.Option("--policy", help="YAML with checks, limits and reasons.")]


@app.callback()
def root(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Which precision may the recurrent state of a hybrid model have?"""
    ctx.obj = {"debug": debug}


@app.command()
def run(
    suite: Annotated[str, typer.Argument(help="Bundled suite or YAML file.")] = "quick",
    model: Annotated[str | None, typer.Option(help="Embedded checkpoint or folder.")] = None,
    plan: Annotated[list[str] | None, typer.Option(help="Plan, e.g. nvfp4/fp32@16; repeatable.")] = None,
    control: Annotated[list[str] | None, typer.Option(help="Plan that is expected to drift; repeatable.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Task, or none; repeatable.")] = None,
    steps: Annotated[int | None, typer.Option(help="Decoded steps of each stream.")] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Streams.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Streams that decode together.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of streams and questions.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    backend: Annotated[str, typer.Option(help="auto, triton, triton-interpret or torch.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; default as stored.")] = None,
    policy: PolicyFile = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/SUITE-TIME-RANDOM.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No progress bar.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and the power of its tasks.")] = False,
) -> None:
    """Measure plans beside the FP32 baseline, decide, and write a report."""
    from driftgate.errors import EmptyRunError
    from driftgate.main_job import prepare
    from driftgate.run_folder import default_out

    if steps is not None and steps < 1:
        raise EmptyRunError(f"--steps {steps}: no step would be decoded; give 1 or more")
    tasks = None if task is None else [t for t in task if t != "none"]
    choices = {
        "model": model, "plans": plan or [], "controls": control or [], "tasks": tasks, "steps": steps,
        "sequences": sequences, "batch": batch, "seed": seed, "device": device, "backend": backend, "dtype": dtype,
        "policy": policy,
    }  # fmt: skip
    if dry_run:
        _print_dry_run(suite, choices, out, as_json=as_json)
        return
    prepared = prepare(suite, out=out or default_out(suite), **choices)  # type: ignore[arg-type]
    show = not (quiet or as_json or no_progress)
    with _progress("lock step", prepared.experiment.n_steps, show, then="cross-check and statistics") as advance:
        data = prepared.execute(advance)
    if as_json:
        _write(data.results.model_dump_json(indent=1) + "\n")
    elif not quiet:
        _print_summary(data, prepared.out)
    raise typer.Exit(EXIT_OF_VERDICT[data.results.verdict])


@app.command()
def report(run_folder: Annotated[Path, typer.Argument(metavar="RUN")], quiet: Quiet = False) -> None:
    """Render the report of a stored run again."""
    from driftgate.reports import render_all

    paths = render_all(run_folder)
    if not quiet:
        _write("".join(f"{path}\n" for path in paths))


@app.command()
def gate(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN")],
    policy: PolicyFile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Decide a stored run again under a policy; the folder is left as it is."""
    from driftgate.accuracy.policy import decide, load_policy
    from driftgate.accuracy.records import load_run
    from driftgate.reports.tables import checks_table

    rules = load_policy(policy)
    data = load_run(run_folder)
    decide(data, rules)
    if as_json:
        document = {
            "schema_version": 1,
            "verdict": data.results.verdict,
            "verdicts": [v.model_dump() for v in data.results.verdicts],
        }
        _write(json.dumps(document, indent=1) + "\n")
    elif not quiet:
        _show(checks_table(data), f"verdict: {data.results.verdict}")
    raise typer.Exit(EXIT_OF_VERDICT[data.results.verdict])


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
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter is torch's
        return f"memory ran out: {text}; give a smaller --batch, or fewer --steps or --sequences", 4
    return f"internal error: {type(error).__name__}: {text}; please report it with the output of --debug", 70


def _fail(message: str, code: int, debug: bool) -> None:
    """One line on standard error, the traceback on demand."""
    if debug:
        traceback.print_exc()
    _emit(f"driftgate: {' '.join(message.split())}\n", sys.stderr)
    _emit("", sys.stdout)
    raise SystemExit(code)


def _show(*parts: Table | str) -> None:
    """Print tables and lines on standard output; lines are neither wrapped nor read as markup."""
    screen, text = Console(), io.StringIO()
    console = Console(file=text, width=screen.width, force_terminal=screen.is_terminal)
    for part in parts:
        if isinstance(part, str):
            console.print(part, highlight=False, markup=False, soft_wrap=True)
        else:
            console.print(part)
    _write(text.getvalue())


def _write(text: str) -> None:
    """Write to standard output. A reader that went away changes no exit code: it has seen what it wanted.

    Raises:
        InputError: what standard output leads to is full or broken.
    """
    error = _emit(text, sys.stdout)
    if error is not None and not isinstance(error, BrokenPipeError):
        reason = f"cannot write to standard output: {error.strerror}; free some space or send it elsewhere"
        raise InputError(reason) from error


def _emit(text: str, stream: TextIO | None) -> OSError | None:
    """Write and flush; a stream that fails leads nowhere from then on, and the error is returned."""
    if stream is None:  # closed by the caller
        return None
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        with open(os.devnull, "wb") as nothing:  # else Python tries again when it ends, and makes its exit code 120
            os.dup2(nothing.fileno(), stream.fileno())
        return error
    return None


@contextmanager
def _progress(what: str, total: int, show: bool, *, then: str | None = None) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on standard error, off when it is no terminal; ``then`` says what follows its last step."""
    console = Console(stderr=True)
    if not (show and console.is_terminal):
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance(n: int) -> None:
            bar.advance(task, n)
            if bar.finished and then is not None:
                bar.update(task, description=then)

        yield advance


def _print_summary(data: RunData, folder: Path) -> None:
    from driftgate.reports.tables import run_lines, summary_table, tasks_table

    answers = tasks_table(data)
    tables: list[Table | str] = [summary_table(data), ""] if answers is None else [summary_table(data), "", answers, ""]
    _show(*tables, *run_lines(data), f"report: {folder / 'report.html'}")


def _print_dry_run(suite: str, choices: dict[str, object], out: Path | None, *, as_json: bool) -> None:
    from driftgate.dry_run import describe

    described = describe(suite, choices, out=out)
    if as_json:
        _write(json.dumps(described, indent=1) + "\n")
        return
    lines = [
        f"{key}: {', '.join(value) if isinstance(value, list) else value}"
        for key, value in described.items()
        if key != "tasks"
    ]
    for task, facts in described["tasks"].items():
        chances = ", ".join(f"{value:.0%} at {case}" for case, value in facts["power"].items())
        lines.append(f"{task}: {facts['questions']} questions; a plan that loses nothing passes: {chances}")
    _show(*lines)


app.command()(bench)
app.command()(certify)
app.command()(record)
app.command()(replay)
