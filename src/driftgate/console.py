"""What commands share: options that mean the same everywhere, exit codes of verdicts, how they print.

Notable: whatever is printed is formed whole and written at once, so that a reader that goes away, or a full disk, is
met in one place and never changes the exit code of a verdict.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console
from rich.table import Table

from driftgate.errors import InputError

if TYPE_CHECKING:
    from driftgate.accuracy.records import RunData

__all__ = [
    "EXIT_OF_VERDICT", "AsJson", "PolicyFile", "Quiet", "RunPath", "emit", "end_run", "progress", "show", "warn",
    "write",
]  # fmt: skip

EXIT_OF_VERDICT = {"pass": 0, "fail": 1, "inconclusive": 3}

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output and nothing else.")]
PolicyFile = Annotated[Path | None, typer.Option("--policy", help="YAML with checks, limits and reasons.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `driftgate run --out` wrote.")]


def end_run(data: RunData) -> typer.Exit:
    """The exit of a command that decided a run: the code of its verdict, or 0 where the policy lets an open one pass.

    The latter is said on standard error whatever the flags, so that no log shows a pass that nobody measured.
    """
    from driftgate.reports.open_checks import counts_as_pass

    passed = counts_as_pass(data)
    if passed is None:
        return typer.Exit(EXIT_OF_VERDICT[data.results.verdict])
    warn(f"exit code 0 for an INCONCLUSIVE run (policy {data.manifest.policy.get('name')}): {passed}")
    return typer.Exit(0)


def warn(line: str) -> None:
    """Say on standard error, ``--quiet`` and ``--json`` or not, what nobody may miss."""
    emit(f"driftgate: {line}\n", sys.stderr)


def show(*parts: Table | str) -> None:
    """Print tables and lines on standard output; lines are neither wrapped nor read as markup."""
    screen, text = Console(), io.StringIO()
    console = Console(file=text, width=screen.width, force_terminal=screen.is_terminal)
    for part in parts:
        if isinstance(part, str):
            console.print(part, highlight=False, markup=False, soft_wrap=True)
        else:
            console.print(part)
    write(text.getvalue())


def write(text: str) -> None:
    """Write to standard output. A reader that went away changes no exit code: it has seen what it wanted.

    Raises:
        InputError: what standard output leads to is full or broken.
    """
    error = emit(text, sys.stdout)
    if error is not None and not isinstance(error, BrokenPipeError):
        reason = f"cannot write to standard output: {error.strerror}; free some space or send it elsewhere"
        raise InputError(reason) from error


def emit(text: str, stream: TextIO | None) -> OSError | None:
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
def progress(what: str, total: int, show: bool, *, then: str | None = None) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on standard error, off when it is no terminal.

    Args:
        what: its steps.
        total: how many.
        show: False for none.
        then: what follows its last step: a spinner says so in place of the full bar, with the time that it takes.
    """
    console = Console(stderr=True)
    if not (show and console.is_terminal):
        yield None
        return
    from rich import progress as rich

    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn())
    with ExitStack() as shown:
        bar = rich.Progress(*columns, rich.TimeRemainingColumn(), console=console, transient=True)
        task = shown.enter_context(bar).add_task(what, total=total)

        def advance(n: int) -> None:
            was_full = bar.finished
            bar.advance(task, n)
            if bar.finished and not was_full and then is not None:
                shown.close()
                columns = (rich.SpinnerColumn(), rich.TextColumn("{task.description}"), rich.TimeElapsedColumn())
                rest = rich.Progress(*columns, console=console, transient=True)
                shown.enter_context(rest).add_task(then, total=None)

        yield advance
