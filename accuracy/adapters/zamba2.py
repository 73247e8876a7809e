"""Zamba2: Mamba-2 layers, some with a shared attention block before them."""

from __future__ import annotations

from driftgate.accuracy.adapters.decode_functions import MAMBA2
from driftgate.accuracy.adapters.families import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="zamba2",
    model_types=("zamba2",),
    module="transformers.models.zamba2.modeling_zamba2",
    decode=MAMBA2,
)
