"""The folder that a run writes: looked at before anything is spent, then claimed, so that two runs never share it.

Notable: the claim is a file that only one process can create (``O_EXCL``) and that names it. It lies in the folder
until the run has written everything, and goes with a run that is refused or fails; so do folders that were made for it
and stayed empty. A claim whose process is gone holds nothing, so a run that was killed early blocks no other.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from driftgate.errors import InputError
from driftgate.run_request import REQUEST

__all__ = ["CLAIM", "RunFolder", "check_out", "claim", "default_out", "reclaim"]

CLAIM = ".driftgate-run"


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A folder that this process alone writes to.

    Attributes:
        path: the folder.
        made: folders that were made for it, the innermost first.
        taken_over: it was there before, with what an interrupted run was asked to do.
    """

    path: Path
    made: tuple[Path, ...]
    taken_over: bool = False

    def release(self) -> None:
        """End the claim, and remove what was made for it where nothing was measured."""
        (self.path / CLAIM).unlink(missing_ok=True)
        if not self.taken_over and {p.name for p in self.path.iterdir()} == {REQUEST}:
            (self.path / REQUEST).unlink()
        _remove_empty(self.made)


def default_out(suite: str) -> Path:
    """``runs/SUITE-TIME-RANDOM``: two runs that start in the same second have folders of their own."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{Path(suite).stem}-{stamp}-{secrets.token_hex(3)}"


def check_out(out: Path) -> None:
    """Look whether a run could write to a folder, and leave everything as it is.

    Raises:
        InputError: it is a file, holds something already, or cannot be written.
    """
    try:
        if out.exists():
            _refuse_taken(out)
        nearest = next(p for p in (out, *out.absolute().parents) if p.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(None, "Not a directory")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(None, "Permission denied")
    except OSError as error:
        raise _unwritable(out, error) from error


def claim(out: Path) -> RunFolder:
    """Make a run folder, or take an empty one, for this process alone.

    Raises:
        InputError: as ``check_out``, or another run has it.
    """
    made: tuple[Path, ...] = ()
    try:
        made = tuple(p for p in (out, *out.parents) if not p.exists())
        out.mkdir(parents=True, exist_ok=True)
        if (out / CLAIM).exists():
            _refuse_taken(out)  # which leaves the claim of a process that is gone
            return reclaim(out)
        _write_claim(out)
    except FileExistsError as error:
        _refuse_taken(out)
        raise _in_use(out) from error
    except OSError as error:
        _remove_empty(made)
        raise _unwritable(out, error) from error
    folder = RunFolder(path=out, made=made)
    try:
        _refuse_taken(out, own=True)
    except InputError:
        folder.release()
        raise
    return folder


def reclaim(out: Path) -> RunFolder:
    """Take over the folder of a run that was interrupted.

    Raises:
        InputError: the run is still going on, or the folder cannot be written.
    """
    try:
        folder = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(out, error) from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # of two that take the same folder over, the second meets the first's claim
        _refuse_living(out)
        (out / CLAIM).unlink(missing_ok=True)
        _write_claim(out)
    except FileExistsError as error:  # another run began at this very moment
        raise _in_use(out) from error
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        os.close(folder)
    return RunFolder(path=out, made=(), taken_over=(out / REQUEST).exists())


def _refuse_living(out: Path) -> None:
    owner = _find_owner(out)
    if owner is not None:
        raise InputError(
            f"{out} belongs to process {owner[0]} on {owner[1]}, which is still going on; wait for it, or delete "
            f"{out / CLAIM} if it is gone"
        )


def _find_owner(out: Path) -> tuple[int, str] | None:
    """Process and host of a claim; None where there is none, or its process is known to be gone."""
    try:
        process, host = (out / CLAIM).read_text(encoding="utf-8").split()
        number = int(process)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{out / CLAIM} is damaged; delete it if no run is going on in {out}") from error
    return (number, host) if host != socket.gethostname() or _is_alive(number) else None


def _write_claim(out: Path) -> None:
    with open(out / CLAIM, "x", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {socket.gethostname()}\n")


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _refuse_taken(out: Path, *, own: bool = False) -> None:
    """Raise where the folder is a file or holds something; ``own``: the claim in it is ours."""
    if not out.is_dir():
        raise InputError(f"output {out} is a file; choose a folder with --out")
    names = sorted(p.name for p in out.iterdir())
    if CLAIM in names and not own and _find_owner(out) is not None:
        raise _in_use(out)
    others = [name for name in names if name != CLAIM]
    if others:
        if REQUEST in others and "results.json" not in others:
            raise InputError(f"output folder {out} holds an interrupted run; give --resume {out}, or another --out")
        kind = "another run" if "results.json" in others else f"other files ({others[0]})"
        raise InputError(f"output folder {out} holds {kind}; choose another --out")


def _in_use(out: Path) -> InputError:
    return InputError(f"output folder {out} belongs to another run that is still going on; choose another --out")


def _unwritable(out: Path, error: OSError) -> InputError:
    return InputError(f"cannot write to output folder {out}: {error.strerror}; choose another --out")


def _remove_empty(folders: tuple[Path, ...]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # it holds something, or was never made
            continue
