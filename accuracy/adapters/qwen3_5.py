"""Qwen3.5 (text, also inside the multimodal class): Gated DeltaNet layers."""

from __future__ import annotations

from typing import Any

import torch

from driftgate.accuracy.adapters.families import Family, StepInputs
from driftgate.kernels.contract import HeadShape

__all__ = ["FAMILY"]


def head_shape(mixer: Any) -> HeadShape:
    """Heads of a ``Qwen3_5GatedDeltaNet``."""
    return HeadShape(
        key_heads=mixer.num_k_heads, value_heads=mixer.num_v_heads, d_k=mixer.head_k_dim, d_v=mixer.head_v_dim
    )


def read_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    shape: HeadShape,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> StepInputs:
    """Arguments of ``torch_recurrent_gated_delta_rule``: [B, 1, heads, …].

    transformers before 5.24 repeats q and k to the value heads; every group's first head is taken there. β is
    upcast: the model's own rounding of it is shared by all plans.

    Raises:
        ValueError: the model asks for no L2 norm, which no checkpoint of this family does.
    """
    if not use_qk_l2norm_in_kernel:
        raise ValueError("use_qk_l2norm_in_kernel: expected True for Qwen3.5, got False")
    q, k = (x[:, 0, :: x.shape[2] // shape.key_heads] for x in (query, key))
    return StepInputs(q=q, k=k, v=value[:, 0], g=g[:, 0].float(), beta=beta[:, 0].float())


FAMILY = Family(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text"),
    module="transformers.models.qwen3_5.modeling_qwen3_5",
    function="torch_recurrent_gated_delta_rule",
    recurrence="gdn",
    head_shape=head_shape,
    read_step=read_step,
)
