"""Which code takes the decode steps, as users name it and as this process and its device can run it."""

from __future__ import annotations

import os

from driftgate.errors import UsageError, unknown_name
from driftgate.kernels.contract import Backend

__all__ = ["BACKENDS", "check_backend", "resolve_backend"]

BACKENDS = ("auto", *(backend.value for backend in Backend))
"""What a user may name."""


def check_backend(name: str) -> None:
    """Raise UsageError, with the nearest names, for one that is none of ``BACKENDS``."""
    if name not in BACKENDS:
        raise unknown_name("backend", name, BACKENDS)


def resolve_backend(name: str, device: str) -> Backend:
    """The backend that a name stands for: ``auto`` is ``triton`` on a GPU and ``torch`` without one.

    Args:
        name: one of ``BACKENDS``.
        device: ``cpu``, ``cuda`` or ``cuda:N``, as ``resolve_device`` gives it.

    Raises:
        UsageError: an unknown name, or a backend that this process or device cannot run.
    """
    check_backend(name)
    on_gpu = device.startswith("cuda")
    backend = (Backend.TRITON if on_gpu else Backend.TORCH) if name == "auto" else Backend(name)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend is Backend.TRITON and not on_gpu:
        raise UsageError("backend triton needs a GPU; use backend torch or triton-interpret, or device cuda")
    if backend is Backend.TRITON_INTERPRET and not interpreted:
        raise UsageError("backend triton-interpret needs TRITON_INTERPRET=1 in the environment before Python starts")
    if backend is not Backend.TRITON_INTERPRET and interpreted:
        raise UsageError(f"TRITON_INTERPRET=1 is set, so Triton cannot compile; unset it for backend {backend.value}")
    return backend
