"""``driftgate report``: render a stored run again."""

from __future__ import annotations

from driftgate.console import Quiet, RunPath, write

__all__ = ["report"]


def report(run_folder: RunPath, quiet: Quiet = False) -> None:
    """Render the report of a stored run again."""
    from driftgate.reports import render_all

    paths = render_all(run_folder)
    if not quiet:
        write("".join(f"{path}\n" for path in paths))
