"""Suites, tasks and embedded checkpoints, and the run that measures plans on them.

``suite.py`` says what a run measures, ``experiment.py`` leads through its stages (run_*.py), ``scoring.py`` turns
answers into items and paired records; tasks/, suites/ and checkpoints/ are catalogues.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["load_task"]


def __getattr__(name: str) -> Any:
    if name == "load_task":
        return import_module("driftgate.evals.tasks").load_task
    raise AttributeError(f"module 'driftgate.evals' has no attribute {name!r}")
