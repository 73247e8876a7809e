"""Reports of a stored run: report.md, report.html, junit.xml and figures, from the run folder alone.

Notable: no torch; every module renders the same ``RunData``, so text, page, JUnit and JSON cannot disagree.
"""

from __future__ import annotations

from pathlib import Path

from driftgate.accuracy.records import load_run
from driftgate.reports import figures, junit, markdown, page, tables

__all__ = ["figures", "junit", "markdown", "page", "render_all", "tables"]


def render_all(folder: str | Path) -> list[Path]:
    """Write every report of a run folder, each file atomically.

    Args:
        folder: what ``driftgate run --out`` wrote.

    Returns:
        The files written: the pictures, then report.md, report.html and junit.xml.

    Raises:
        InputError: the folder is no complete run, or cannot be written to.
    """
    folder = Path(folder)
    run = load_run(folder)
    pictures = sorted(figures.render(run, folder).glob("*.png"))
    return [*pictures, markdown.render(run, folder), page.render(run, folder), junit.render(run, folder)]
