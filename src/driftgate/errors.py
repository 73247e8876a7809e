"""Errors that a user meets: each is one line that names the thing and the mend, with its exit code.

Exit codes: 0 pass, 1 a gate failed, 2 usage, 3 inconclusive or invalid, 4 what a file, folder, model or device
shows, 5 zero steps or items, 70 internal error. Kernels and formats raise ``ValueError`` for arguments that do not
fit; the front door turns an escaped one into exit code 70, since no command line should be able to cause it.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["DriftgateError", "EmptyRunError", "InputError", "UsageError", "unknown_name"]


class DriftgateError(Exception):
    """Base of every error that is shown to a user as one line."""

    exit_code = 70


class UsageError(DriftgateError):
    """What the command line alone shows: flags, plan text, unknown suite, task, plan or format."""

    exit_code = 2


class InputError(DriftgateError):
    """What a file, folder, model or device shows, or runs that do not belong together."""

    exit_code = 4


class EmptyRunError(DriftgateError):
    """Zero steps or zero items: nothing was measured."""

    exit_code = 5


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """One line for a name that no catalogue holds, with the nearest ones first.

    Args:
        kind: what was looked up, e.g. ``"format"``.
        name: what the user wrote.
        known: all names of that catalogue.
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return UsageError(f"unknown {kind} {name!r}; {hint}")
