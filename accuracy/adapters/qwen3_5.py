"""Qwen3.5 (text, also inside the multimodal class): Gated DeltaNet layers."""

from __future__ import annotations

from driftgate.accuracy.adapters.decode_functions import GDN
from driftgate.accuracy.adapters.families import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text"),
    module="transformers.models.qwen3_5.modeling_qwen3_5",
    decode=GDN,
)
