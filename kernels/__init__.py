"""Decode kernels of recurrent layers: the step-by-step baseline and replay, with a torch twin beside each.

Where to look: ``contract.py`` says what a plan means to a kernel, ``pool.py`` owns what is stored (``states.py``) and
when it is written back (``schedule.py``), ``step.py`` and ``readout.py`` are device functions, ``replay.py`` the
kernels and their launch, ``twin.py`` the same in torch, ``launch.py`` every launch configuration, ``interpreter.py``
corrections of Triton's interpreter. Each recurrence has a folder with its public ``decode.py`` (Triton), its
``reference.py`` (twin) and a README (equations). Importing this room imports no triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "Fold",
    "HeadShape",
    "Readout",
    "Recurrence",
    "ReplayOptions",
    "StatePool",
    "gdn",
    "kda",
    "mamba2",
    "split_mixed_qkv",
]

_HOMES = {
    "Fold": "driftgate.kernels.contract",
    "HeadShape": "driftgate.kernels.contract",
    "Readout": "driftgate.kernels.contract",
    "Recurrence": "driftgate.kernels.contract",
    "ReplayOptions": "driftgate.kernels.contract",
    "StatePool": "driftgate.kernels.pool",
    "split_mixed_qkv": "driftgate.kernels.arguments",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in ("gdn", "kda", "mamba2"):
        return import_module(f"driftgate.kernels.{name}")
    raise AttributeError(f"module 'driftgate.kernels' has no attribute {name!r}")
