"""Accuracy of precision plans: parse them, run them beside the baseline, compare, certify, and judge.

``plans`` (plan texts) · ``lockstep`` (drift on shared tokens) · ``certify`` (bit-exact invariants) · ``metrics`` (one
file each) · ``statistics`` · ``records`` (what a run folder holds). Importing this room imports neither torch nor
transformers; names that need them load on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["LockstepRunner", "PrecisionPlan", "certify", "kl_divergence"]

_HOMES = {
    "LockstepRunner": "driftgate.accuracy.lockstep",
    "PrecisionPlan": "driftgate.accuracy.plans",
    "kl_divergence": "driftgate.accuracy.metrics.kl",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'driftgate.accuracy' has no attribute {name!r}")


class _Room(ModuleType):
    """This room: ``certify`` is the function, also once its file, which has the same name, was imported."""

    @property
    def certify(self) -> Any:
        return import_module("driftgate.accuracy.certify").certify

    @certify.setter
    def certify(self, module: ModuleType) -> None:
        """Importing the file wants to put the module here; it stays reachable by its full name."""


sys.modules[__name__].__class__ = _Room
