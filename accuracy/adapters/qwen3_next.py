"""Qwen3-Next: Gated DeltaNet layers and attention layers, experts behind each."""

from __future__ import annotations

from driftgate.accuracy.adapters.decode_functions import GDN
from driftgate.accuracy.adapters.families import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    module="transformers.models.qwen3_next.modeling_qwen3_next",
    decode=GDN,
)
