"""GLM-5-Next (text): Kimi Delta Attention layers with a bounded decay, and sparse attention."""

from __future__ import annotations

from driftgate.accuracy.adapters.decode_functions import KDA
from driftgate.accuracy.adapters.families import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="glm5_next",
    model_types=("glm5_next", "glm5_next_text"),
    module="transformers.models.glm5_next.modeling_glm5_next",
    decode=KDA,
)
