"""The fused recurrent gated delta rule of flash-linear-attention, for `driftgate certify --kernel fla_gdn:step`.

Needs a GPU and `pip install flash-linear-attention`. fla keeps a state as [d_k, d_v], takes a sequence axis, returns
the new state in FP32 and knows no padded rows; all of that is done here, so the kernel itself is what is certified.
"""

from __future__ import annotations

import torch


def step(
    inputs: dict[str, torch.Tensor],
    state: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
    pad_slot: int,
) -> torch.Tensor:
    """One step per row; state [slots, HV, d_v, d_k] is updated in place, padded rows give zeros."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    live = (slots != pad_slot).nonzero()[:, 0]
    places = slots[live].long()
    one_token = {name: inputs[name][live, None] for name in ("q", "k", "v", "g", "beta")}
    out, new = fused_recurrent_gated_delta_rule(
        **one_token,
        scale=scale,
        initial_state=state[places].float().transpose(-1, -2).contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=qk_l2norm,
    )
    state[places] = new.transpose(-1, -2).to(state.dtype)
    padded = torch.zeros_like(inputs["v"])
    padded[live] = out[:, 0].to(padded.dtype)
    return padded


step.recurrence = "gdn"
step.formats = ("fp32", "bf16")
