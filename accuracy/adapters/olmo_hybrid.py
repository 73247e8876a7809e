"""OLMo hybrid: Gated DeltaNet layers whose β may reach 2, and attention layers."""

from __future__ import annotations

from driftgate.accuracy.adapters.decode_functions import GDN
from driftgate.accuracy.adapters.families import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="olmo_hybrid",
    model_types=("olmo_hybrid",),
    module="transformers.models.olmo_hybrid.modeling_olmo_hybrid",
    decode=GDN,
)
