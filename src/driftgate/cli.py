"""The command line: parse, call, print. Every error is one line with its exit code; see ``errors.py``."""

from __future__ import annotations

import datetime
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from driftgate.errors import DriftgateError, unknown_name

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
INTERRUPTED = 130

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
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/SUITE-TIME.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No progress bar.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and the power of its tasks.")] = False,
) -> None:
    """Measure plans beside the FP32 baseline, decide, and write a report."""
    from driftgate.errors import EmptyRunError
    from driftgate.main_job import prepare

    if steps is not None and steps < 1:
        raise EmptyRunError(f"--steps {steps}: no step would be decoded; give 1 or more")
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    folder = out or Path("runs") / f"{Path(suite).stem}-{stamp}"
    tasks = None if task is None else [t for t in task if t != "none"]
    choices = {
        "model": model, "plans": plan or [], "controls": control or [], "tasks": tasks, "steps": steps,
        "sequences": sequences, "batch": batch, "seed": seed, "device": device, "backend": backend, "dtype": dtype,
        "policy": policy,
    }  # fmt: skip
    if dry_run:
        _print_dry_run(suite, choices, as_json=as_json)
        return
    prepared = prepare(suite, out=folder, **choices)  # type: ignore[arg-type]
    show = not (quiet or as_json or no_progress)
    with _progress("lock step", prepared.experiment.n_steps, show) as advance:
        data = prepared.execute(advance)
    if as_json:
        sys.stdout.write(data.results.model_dump_json(indent=1) + "\n")
    elif not quiet:
        _print_summary(data, folder)
    raise typer.Exit(EXIT_OF_VERDICT[data.results.verdict])


@app.command()
def certify(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    length: Annotated[list[int] | None, typer.Option(min=1, help="L; repeatable; default 1 2 3 5 8 16.")] = None,
    number_format: Annotated[
        list[str] | None, typer.Option("--format", help="Format; repeatable; default fp32 bf16 fp16 fp8 nvfp4.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Certify the bit-exact invariants of the kernels, compiled on a GPU or under Triton's interpreter."""
    import os

    from driftgate.accuracy.models import resolve_device
    from driftgate.quant import get_format

    formats = [get_format(name).name for name in number_format or ()]
    device = resolve_device(device)
    if not device.startswith("cuda") and os.environ.get("TRITON_INTERPRET") != "1":
        os.execve(sys.executable, [sys.executable, "-P", *sys.argv], {**os.environ, "TRITON_INTERPRET": "1"})
    from driftgate.accuracy.certify import DEFAULT_FORMATS, DEFAULT_LENGTHS, count_cases
    from driftgate.accuracy.certify import certify as certify_kernels
    from driftgate.kernels.contract import Backend
    from driftgate.reports.tables import bitwise_table

    backend = Backend.TRITON if device.startswith("cuda") else Backend.TRITON_INTERPRET
    cases = {"lengths": length or DEFAULT_LENGTHS, "formats": formats or DEFAULT_FORMATS}
    with _progress("cases", count_cases(**cases), not (quiet or as_json)) as advance:
        records = certify_kernels(backend=backend, device=device, seed=seed, progress=advance, **cases)
    if as_json:
        document = {"schema_version": 1, "bitwise": [r.model_dump() for r in records], "tolerance": []}
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    elif not quiet:
        console = Console()
        console.print(bitwise_table(records))
        failed = sum(not r.equal for r in records)
        console.print(f"{len(records)} cases on {backend.value}, {failed} failed")
    raise typer.Exit(0 if records and all(r.equal for r in records) else 1)


@app.command()
def report(run_folder: Annotated[Path, typer.Argument(metavar="RUN")], quiet: Quiet = False) -> None:
    """Render the report of a stored run again."""
    from driftgate.reports import render_all

    for path in render_all(run_folder):
        if not quiet:
            print(path)


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
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    elif not quiet:
        console = Console()
        console.print(checks_table(data))
        console.print(f"verdict: {data.results.verdict}")
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
        sys.stdout.write(json.dumps(measured.as_dict(), indent=1) + "\n")
        return
    console = Console()
    for line in measured.notes():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(measured.table())


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
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(v) for v in row.values()))
    Console().print(table)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can run."""
    from driftgate.doctor import examine

    findings = examine()
    if as_json:
        sys.stdout.write(json.dumps([f.as_dict() for f in findings], indent=1) + "\n")
    else:
        for finding in findings:
            print(f"{finding.status:5} {finding.subject}: {finding.text}")
    raise typer.Exit(4 if any(f.status == "bad" for f in findings) else 0)


def main() -> None:
    """Entry point of the console script."""
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    try:
        code = app(args=arguments or ["--help"], standalone_mode=False)
        if code == INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        raise SystemExit(code if isinstance(code, int) else 0)
    except DriftgateError as error:
        _fail(str(error), error.exit_code, debug)
    except typer.Exit as error:
        raise SystemExit(error.exit_code) from None
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted; a run folder without results.json is not complete", INTERRUPTED, debug)
    except BrokenPipeError:
        raise SystemExit(141) from None
    except Exception as error:
        if hasattr(error, "format_message"):  # what click raises for flags, whichever click typer brings
            _fail(error.format_message(), 2, debug)
        text = (str(error).strip().splitlines() or [""])[0]
        _fail(f"internal error: {type(error).__name__}: {text}; please report it with the output of --debug", 70, debug)


def _fail(message: str, code: int, debug: bool) -> None:
    """One line on standard error, the traceback on demand."""
    if debug:
        traceback.print_exc()
    print(f"driftgate: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


@contextmanager
def _progress(what: str, total: int, show: bool) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on standard error, off when it is no terminal."""
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
            if bar.finished:
                bar.update(task, description="cross-check and statistics")

        yield advance


def _print_summary(data: RunData, folder: Path) -> None:
    from driftgate.reports.tables import run_lines, summary_table, tasks_table

    console = Console()
    console.print(summary_table(data))
    answers = tasks_table(data)
    if answers is not None:
        console.print()
        console.print(answers)
    console.print()
    for line in run_lines(data):
        console.print(line, highlight=False, markup=False)
    console.print(f"report: {folder / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


def _print_dry_run(suite: str, choices: dict[str, object], *, as_json: bool) -> None:
    from driftgate.dry_run import describe

    described = describe(suite, choices)
    if as_json:
        sys.stdout.write(json.dumps(described, indent=1) + "\n")
        return
    for key, value in described.items():
        if key == "tasks":
            continue
        print(f"{key}: {', '.join(value) if isinstance(value, list) else value}")
    for task, facts in described["tasks"].items():
        chances = ", ".join(f"{value:.0%} at {case}" for case, value in facts["power"].items())
        print(f"{task}: {facts['questions']} questions; a plan that loses nothing passes: {chances}")
