"""Kimi-Linear: Kimi Delta Attention layers and latent attention layers."""

from __future__ import annotations

from driftgate.accuracy.adapters.decode_functions import KDA
from driftgate.accuracy.adapters.families import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="kimi_linear",
    model_types=("kimi_linear",),
    module="transformers.models.kimi_linear.modeling_kimi_linear",
    decode=KDA,
)
