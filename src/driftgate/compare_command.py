"""``driftgate compare``: two stored runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from driftgate.console import AsJson, Quiet, show, write
from driftgate.errors import InputError

__all__ = ["compare"]


def compare(
    run_a: Annotated[Path, typer.Argument(metavar="A", help="Folder of a run.")],
    run_b: Annotated[Path, typer.Argument(metavar="B", help="Folder of another run.")],
    unlike: Annotated[
        bool, typer.Option("--unlike", help="Compare runs of different models or suites all the same.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show the difference of every figure of two runs, and in what their manifests differ.

    Runs of different models, types of activations or suites are refused: their figures measure different things.
    """
    from driftgate.accepted import describe_identity, differing
    from driftgate.accuracy.records import load_run
    from driftgate.reports.comparison import compare_lines, compare_runs, compare_tables, comparison_document

    a, b = load_run(run_a), load_run(run_b)
    different = differing(describe_identity(a), describe_identity(b))
    if different and not unlike:
        raise InputError(f"{run_a} and {run_b} differ in {', '.join(different)}; --unlike compares them all the same")
    found = compare_runs(a, b)
    if not found.plans:
        raise InputError(f"{run_a} and {run_b} have no plan in common; run the same --plan in both")
    if as_json:
        document = {"a": str(run_a), "b": str(run_b), "unlike": different, **comparison_document(found)}
        write(json.dumps(document, indent=1) + "\n")
    elif not quiet:
        warned = [f"unlike runs: they differ in {', '.join(different)}", ""] if different else []
        show(f"A: {run_a}", f"B: {run_b}", "", *warned, *compare_tables(found), "", *compare_lines(found))
