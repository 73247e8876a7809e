"""Kimi Delta Attention: baseline, replay, flush and speculative window, as Triton kernels and as a torch twin.

``decode_step``, ``replay_step``, ``flush_now`` and ``verify_window`` are the Triton kernels; ``reference`` holds the
twin of each under the same names; ``compute_log_decay`` makes the gate
from what a model delivers. README.md beside this file has the equations.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from driftgate.kernels.contract import Backend

__all__ = ["compute_log_decay", "decode_step", "flush_now", "implementation", "reference", "replay_step"]
__all__ += ["verify_window"]


def implementation(backend: Backend) -> ModuleType:
    """The module whose ``decode_step``, ``replay_step``, ``flush_now`` and ``verify_window`` run on a backend.

    Raises:
        RuntimeError: ``triton-interpret`` without TRITON_INTERPRET=1, or ``triton`` with it.
    """
    if backend is Backend.TORCH:
        return import_module("driftgate.kernels.kda.reference")
    module = import_module("driftgate.kernels.kda.decode")
    module.require(backend)
    return module


def __getattr__(name: str) -> Any:
    if name in ("decode_step", "replay_step", "flush_now", "verify_window"):
        return getattr(import_module("driftgate.kernels.kda.decode"), name)
    if name == "reference":
        return import_module("driftgate.kernels.kda.reference")
    if name == "compute_log_decay":
        return import_module("driftgate.kernels.kda.gates").compute_log_decay
    raise AttributeError(f"module 'driftgate.kernels.kda' has no attribute {name!r}")
