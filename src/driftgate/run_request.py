"""What was asked of a run, kept in its folder from the start, so that an interrupted run can be taken up again.

Notable: a run is resumed under the same model files, versions and device or not at all; answers that were stored are
kept, everything else is measured again, and the result is that of an uninterrupted run.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftgate.errors import DriftgateError, InputError

if TYPE_CHECKING:
    from driftgate.accuracy.models import LoadedModel
    from driftgate.main_job import Checked

__all__ = [
    "REQUEST", "hash_request", "is_extension", "parse_request", "read_request", "refuse_changed", "write_extension",
    "write_request",
]  # fmt: skip

REQUEST = "request.json"


def write_request(folder: Path, checked: Checked, loaded: LoadedModel) -> None:
    """Keep what a run is about to do."""
    from driftgate.accuracy.records import write_text

    fields = _describe(checked, loaded)
    write_text(folder / REQUEST, json.dumps({**fields, "sha256": hash_request(fields)}, indent=1) + "\n")


def read_request(folder: Path) -> dict[str, Any]:
    """What an interrupted run was asked to do.

    Raises:
        InputError: there is no run to resume in the folder, or it is finished.
    """
    if (folder / "results.json").exists():
        raise InputError(f"{folder} holds a finished run; `driftgate report {folder}` renders it again")
    try:
        fields = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
        if isinstance(fields, dict) and "extends" in fields:
            raise InputError(
                f"{folder} holds an interrupted --extend of {fields['extends']}; give the command that began it again"
            )
        if not isinstance(fields, dict) or not {"suite", "policy", "device", "backend", "dtype"} <= fields.keys():
            raise ValueError
        if fields.pop("sha256", None) != hash_request(fields):
            raise InputError(f"{folder / REQUEST} was edited; start the run anew with what you want")
    except FileNotFoundError as error:
        raise InputError(f"{folder} holds no interrupted run; give the folder of one, or start anew") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / REQUEST} is damaged; start the run anew") from error
    return fields


def write_extension(folder: Path, fields: dict[str, Any]) -> None:
    """Keep what an extension of a run is about to do, so that the same command takes it up."""
    from driftgate.accuracy.records import write_text

    write_text(folder / REQUEST, json.dumps({**fields, "sha256": hash_request(fields)}, indent=1) + "\n")


def is_extension(folder: Path, fields: dict[str, Any]) -> bool:
    """Whether a folder holds this very extension, interrupted."""
    try:
        kept = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    finished = (folder / "results.json").exists()
    return isinstance(kept, dict) and kept.get("sha256") == hash_request(fields) and not finished


def refuse_changed(folder: Path, request: dict[str, Any], checked: Checked, loaded: LoadedModel) -> None:
    """Refuse to go on where anything that the figures depend on has changed since the run began.

    Raises:
        InputError: names the first thing that differs.
    """
    now = json.loads(json.dumps(_describe(checked, loaded)))
    for part, fields in now.items():
        before: Any = request.get(part)
        if fields == before:
            continue
        names = sorted(set(fields) | set(before)) if isinstance(fields, dict) and isinstance(before, dict) else []
        first = next((name for name in names if fields.get(name) != before.get(name)), None)
        what = part if first is None else f"{part} {first}"
        raise InputError(f"{folder}: {what} is not what the run began with; start it anew with another --out")


def hash_request(fields: dict[str, Any]) -> str:
    """Seal of a request, the seal itself left out: an edited one is told."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _describe(checked: Checked, loaded: LoadedModel) -> dict[str, Any]:
    from driftgate.evals.run_records import describe_device, read_versions

    return {
        "suite": checked.suite.model_dump(mode="json"),
        "policy": checked.policy.model_dump(mode="json"),
        "device": checked.device,
        "backend": checked.backend.value,
        "dtype": checked.dtype,
        "model": loaded.hashes,
        "versions": read_versions(),
        "machine": describe_device(loaded.model),
        "tasks": {built.task.name: built.describe() for built in checked.built},
        **({"data": {"streams": _hash_tokens(checked.given)}} if checked.given else {}),
        **({"reference model": _describe_files(checked.reference)} if checked.reference is not None else {}),
    }


def _hash_tokens(streams: tuple[tuple[int, ...], ...]) -> str:
    return hashlib.sha256(json.dumps(streams).encode()).hexdigest()


def _describe_files(folder: Path) -> dict[str, int]:
    """Sizes of a checkpoint's files: enough to tell another checkpoint, and nothing is read again."""
    return {p.name: p.stat().st_size for p in sorted(folder.iterdir()) if p.suffix in (".safetensors", ".json")}


def parse_request(request: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    """Suite and policy of a request.

    Raises:
        InputError: they do not fit this version.
    """
    from driftgate.accuracy.policy import Policy
    from driftgate.evals.suite import Suite

    try:
        return Suite.model_validate(request["suite"]), Policy.model_validate(request["policy"])
    except (ValueError, DriftgateError) as error:
        raise InputError(f"{folder / REQUEST} is of another version; start the run anew") from error
