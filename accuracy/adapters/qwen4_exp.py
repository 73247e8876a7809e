"""Qwen4-Exp (text): Gated DeltaNet layers and indexed attention."""

from __future__ import annotations

from driftgate.accuracy.adapters.decode_functions import GDN
from driftgate.accuracy.adapters.families import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="qwen4_exp",
    model_types=("qwen4_exp", "qwen4_exp_text"),
    module="transformers.models.qwen4_exp.modeling_qwen4_exp",
    decode=GDN,
)
