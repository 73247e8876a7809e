"""What this machine can run: versions, devices, backends, embedded checkpoints, and packages that get in the way."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

__all__ = ["Finding", "examine"]

_NEEDED = {"torch": "2.11", "triton": "3.6", "transformers": "5.17"}
_HIJACKERS = ("fla", "mamba_ssm", "causal_conv1d")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; ``bad`` means that the quick suite cannot run."""

    status: Literal["ok", "note", "bad"]
    subject: str
    text: str

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def examine() -> list[Finding]:
    """Look at everything; never raises."""
    findings = [_python()]
    findings += [_package(name, least) for name, least in _NEEDED.items()]
    if all(f.status != "bad" for f in findings):
        findings += [_device(), _interpreter(), *_checkpoints()]
    findings += [_hijacker(name) for name in _HIJACKERS if importlib.util.find_spec(name) is not None]
    return findings


def _python() -> Finding:
    good = sys.version_info >= (3, 11) and sys.platform == "linux"
    text = f"{platform.python_version()} on {sys.platform}" + (
        "" if good else "; driftgate needs Linux, Python 3.11 or later"
    )
    return Finding("ok" if good else "bad", "python", text)


def _package(name: str, least: str) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding("bad", name, f"not installed; driftgate needs {name} >= {least}")
    if _release(found) < _release(least):
        return Finding("bad", name, f"{found}; driftgate needs {least} or later")
    return Finding("ok", name, found)


def _release(text: str) -> tuple[int, ...]:
    """The first two numbers of a version, whatever follows them (rc1, .dev0, +cu130)."""
    return tuple(int(n) for n in re.findall(r"\d+", text)[:2])


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        text = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()} (sm_{major}{minor}), backend triton"
        if (major, minor) < (8, 9):
            return Finding("note", "gpu", text + "; FP8 conversions need sm_89, use --device cpu")
        return Finding("ok", "gpu", text)
    return Finding("ok", "gpu", f"none: backend torch on {os.cpu_count()} cores, cross-checked by interpreted kernels")


def _interpreter() -> Finding:
    from driftgate.kernels.interpreter import CHECKED_RELEASES

    release = ".".join(version("triton").split(".")[:2])
    if release in CHECKED_RELEASES:
        return Finding("ok", "interpreter", f"Triton {release} is one of those that were checked")
    import torch

    wanted = "note" if torch.cuda.is_available() else "bad"  # a GPU runs the compiled kernels
    return Finding(
        wanted, "interpreter", f"Triton {release} was not checked; install one of {', '.join(CHECKED_RELEASES)}"
    )


def _checkpoints() -> list[Finding]:
    from driftgate.evals.checkpoints import list_checkpoints

    found = list_checkpoints()
    if not found:
        return [Finding("bad", "checkpoints", "no embedded checkpoint is installed; install driftgate again")]
    return [Finding("ok", "checkpoint", f"{name} in {folder}") for name, folder in found.items()]


def _hijacker(name: str) -> Finding:
    text = "is importable: transformers binds it at import, also on a CPU, where its prefill fails"
    return Finding("note", name, text + "; uninstall it for CPU runs")
