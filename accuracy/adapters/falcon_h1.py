"""Falcon-H1: Mamba-2 beside attention in every layer; by default the gate z is inside the recurrence."""

from __future__ import annotations

from typing import Any

from driftgate.accuracy.adapters.decode_functions import MAMBA2
from driftgate.accuracy.adapters.families import Family

__all__ = ["FAMILY"]


def find_fault(config: Any) -> str | None:
    """Before 5.23 the norm drops the sequence axis of a single token, so that a batch becomes a sequence."""
    import transformers

    release = tuple(int(n) for n in transformers.__version__.split(".")[:2])
    if getattr(config, "mamba_rms_norm", False) and release < (5, 23):
        return f"transformers {transformers.__version__} decodes no batch with mamba_rms_norm; install 5.23 or later"
    return None


FAMILY = Family(
    name="falcon_h1",
    model_types=("falcon_h1",),
    module="transformers.models.falcon_h1.modeling_falcon_h1",
    decode=MAMBA2,
    find_fault=find_fault,
)
