"""What a job on GitHub shows of a verdict: the step summary and the annotations, and nothing anywhere else.

Notable: the summary is a file that grows by what each command of a step appends and is dropped whole above 1 MiB, so
that it is cut here at whole lines. A control is never an annotation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from driftgate.accuracy.records import RunData
from driftgate.errors import InputError
from driftgate.reports.markdown import write_open_checks, write_plan_table
from driftgate.reports.open_checks import counts_as_pass, headline, list_open_checks

__all__ = ["SUMMARY_LIMIT", "append_summary", "list_annotations"]

SUMMARY_LIMIT = 1024 * 1024
"""Bytes that GitHub takes from one step."""
SHOWN = 10
"""Annotations of one kind that GitHub keeps of a step."""
_KINDS = {"fail": "error", "invalid": "error", "inconclusive": "warning"}
_CUT = "\nCut here: a step summary holds 1 MiB.\n"


def append_summary(run: RunData, environment: Mapping[str, str]) -> None:
    """Append verdict, open checks and plan table to the file that ``GITHUB_STEP_SUMMARY`` names; none, no file.

    Raises:
        InputError: the file cannot be written.
    """
    name = environment.get("GITHUB_STEP_SUMMARY")
    if not name:
        return
    lines = [f"## driftgate: {headline(run)}", "", *write_open_checks(run), "", *write_plan_table(run)]
    path = Path(name)
    try:
        with path.open("a", encoding="utf-8") as file:
            room = SUMMARY_LIMIT - os.fstat(file.fileno()).st_size
            file.write(_cut("\n".join(lines) + "\n", room))
    except OSError as error:
        reason = f"cannot write the step summary {path}: {error.strerror}; name a file in GITHUB_STEP_SUMMARY"
        raise InputError(reason) from error


def _cut(text: str, room: int) -> str:
    """The text, or as many of its first lines as fit with a note into ``room`` bytes."""
    if len(text.encode()) <= room:
        return text
    left, kept = room - len(_CUT.encode()), ""
    for line in text.splitlines(keepends=True):
        left -= len(line.encode())
        if left < 0:
            break
        kept += line
    return kept + _CUT if room >= len(_CUT.encode()) else ""


def list_annotations(run: RunData, environment: Mapping[str, str]) -> list[str]:
    """Workflow commands, one for each check of a candidate that did not pass; none outside GitHub Actions."""
    if environment.get("GITHUB_ACTIONS") != "true":
        return []
    commands: dict[str, list[str]] = {"error": [], "warning": []}
    passed = counts_as_pass(run)
    if passed is not None:
        commands["warning"].append(
            f"::warning title={_escape('driftgate inconclusive: exit code 0', inside=True)}::{_escape(passed)}"
        )
    for record in list_open_checks(run):
        kind = _KINDS[record.verdict]
        title = _escape(f"driftgate {record.verdict}: {record.plan} {record.check}", inside=True)
        commands[kind].append(f"::{kind} title={title}::{_escape(record.reason)}")
    shown = []
    for kind, all_of_kind in commands.items():
        rest = len(all_of_kind) - SHOWN + 1
        if len(all_of_kind) > SHOWN:
            all_of_kind = [*all_of_kind[: SHOWN - 1], f"::{kind} title=driftgate::and {rest} more; see the summary"]
        shown += all_of_kind
    return shown


def _escape(text: str, *, inside: bool = False) -> str:
    """Text of a workflow command; ``inside`` its properties a colon and a comma have a meaning too."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if inside else text
