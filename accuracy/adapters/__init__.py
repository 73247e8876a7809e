"""Model families of transformers: which function takes a decode step, and how its arguments read.

One file a family, found through ``FAMILIES``. ``wrap`` (in ``wrapping.py``) is what callers use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["FAMILIES", "Family", "StepInputs", "find_family", "wrap"]

_HOMES = {
    "FAMILIES": "driftgate.accuracy.adapters.families",
    "Family": "driftgate.accuracy.adapters.families",
    "StepInputs": "driftgate.accuracy.adapters.decode_functions",
    "find_family": "driftgate.accuracy.adapters.families",
    "wrap": "driftgate.accuracy.adapters.wrapping",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'driftgate.accuracy.adapters' has no attribute {name!r}")
