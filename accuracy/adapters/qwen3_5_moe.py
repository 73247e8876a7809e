"""Qwen3.5 with experts (text, also inside the multimodal class): Gated DeltaNet layers."""

from __future__ import annotations

from driftgate.accuracy.adapters.decode_functions import GDN
from driftgate.accuracy.adapters.families import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    module="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
    decode=GDN,
)
