"""Mamba-2: pure Mamba-2 layers."""

from __future__ import annotations

from driftgate.accuracy.adapters.decode_functions import MAMBA2
from driftgate.accuracy.adapters.families import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="mamba2",
    model_types=("mamba2",),
    module="transformers.models.mamba2.modeling_mamba2",
    decode=MAMBA2,
)
