"""Nemotron-H: Mamba-2 layers among attention, MLP and expert layers."""

from __future__ import annotations

from driftgate.accuracy.adapters.decode_functions import MAMBA2
from driftgate.accuracy.adapters.families import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="nemotron_h",
    model_types=("nemotron_h",),
    module="transformers.models.nemotron_h.modeling_nemotron_h",
    decode=MAMBA2,
)
