"""driftgate: which precision may the recurrent state of a hybrid model have?

Public names are loaded on first use, so that ``import driftgate`` imports neither torch nor triton nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["PrecisionPlan", "load_run", "run"]

_HOMES = {
    "PrecisionPlan": "driftgate.accuracy.plans",
    "load_run": "driftgate.accuracy.records",
    "run": "driftgate.main_job",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'driftgate' has no attribute {name!r}")
