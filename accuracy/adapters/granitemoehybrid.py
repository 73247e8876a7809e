"""Granite 4 hybrid: Mamba-2 layers and attention layers, experts behind each."""

from __future__ import annotations

from driftgate.accuracy.adapters.decode_functions import MAMBA2
from driftgate.accuracy.adapters.families import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="granitemoehybrid",
    model_types=("granitemoehybrid",),
    module="transformers.models.granitemoehybrid.modeling_granitemoehybrid",
    decode=MAMBA2,
)
