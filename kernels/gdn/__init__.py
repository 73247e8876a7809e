"""Gated DeltaNet: baseline step, replay step, flush and speculative window, as Triton kernels and as a torch twin.

``decode_step``, ``replay_step``, ``flush_now`` and ``verify_window`` are the Triton kernels; ``reference`` holds the
twin of each under the same names. README.md beside this file has the equations.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from driftgate.kernels.contract import Backend

__all__ = ["decode_step", "flush_now", "implementation", "reference", "replay_step", "verify_window"]


def implementation(backend: Backend) -> ModuleType:
    """The module whose ``decode_step``, ``replay_step``, ``flush_now`` and ``verify_window`` run on a backend.

    Raises:
        RuntimeError: ``triton-interpret`` without TRITON_INTERPRET=1, or ``triton`` with it.
    """
    if backend is Backend.TORCH:
        return import_module("driftgate.kernels.gdn.reference")
    module = import_module("driftgate.kernels.gdn.decode")
    module.require(backend)
    return module


def __getattr__(name: str) -> Any:
    if name in ("decode_step", "replay_step", "flush_now", "verify_window"):
        return getattr(import_module("driftgate.kernels.gdn.decode"), name)
    if name == "reference":
        return import_module("driftgate.kernels.gdn.reference")
    raise AttributeError(f"module 'driftgate.kernels.gdn' has no attribute {name!r}")
