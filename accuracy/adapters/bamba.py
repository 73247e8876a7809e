"""Bamba: Mamba-2 layers and attention layers."""

from __future__ import annotations

from driftgate.accuracy.adapters.decode_functions import MAMBA2
from driftgate.accuracy.adapters.families import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="bamba",
    model_types=("bamba",),
    module="transformers.models.bamba.modeling_bamba",
    decode=MAMBA2,
)
