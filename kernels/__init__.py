"""Decode kernels of recurrent layers: the step-by-step baseline and replay, with a torch twin beside each.

Where to look: ``contract.py`` says what a plan means to a kernel, ``pool.py`` owns what is stored, ``launch.py`` holds
every launch configuration, ``interpreter.py`` corrects Triton's interpreter, and each recurrence has a folder with its
``reference.py`` (twin), ``decode.py`` (Triton) and README (equations). Importing this room imports no triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Fold", "HeadShape", "Readout", "ReplayOptions", "StatePool", "gdn"]

_HOMES = {
    "Fold": "driftgate.kernels.contract",
    "HeadShape": "driftgate.kernels.contract",
    "Readout": "driftgate.kernels.contract",
    "ReplayOptions": "driftgate.kernels.contract",
    "StatePool": "driftgate.kernels.pool",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "gdn":
        return import_module("driftgate.kernels.gdn")
    raise AttributeError(f"module 'driftgate.kernels' has no attribute {name!r}")
