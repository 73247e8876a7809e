"""The gated delta rule and its short convolution over whole sequences, with a cheap backward pass; for training only.

Same values as the chunked function that transformers ships for Gated DeltaNet, but the unit lower triangular systems
are inverted once per chunk by blocked substitution, and the inverse is differentiated by its closed form
``dA = -T^T dT T^T`` instead of through two triangular solves. The depthwise convolution is a sum of shifted products,
since the weight gradient of a grouped convolution is slow.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["causal_convolve", "chunk_gated_delta_rule", "invert_unit_lower"]

BLOCK = 16


def _substitute(lower: Tensor) -> Tensor:
    """Inverse of I + lower for strictly lower triangular [..., n, n], row by row."""
    n = lower.shape[-1]
    inverse = torch.eye(n, dtype=lower.dtype, device=lower.device).expand(lower.shape).clone()
    for i in range(1, n):
        inverse[..., i, :i] = -(lower[..., i, None, :i] @ inverse[..., :i, :i]).squeeze(-2)
    return inverse


def _invert(lower: Tensor) -> Tensor:
    """Inverse of I + lower: halves are inverted together and joined by the block formula."""
    n = lower.shape[-1]
    if n <= BLOCK or n % 2:
        return _substitute(lower)
    half = n // 2
    both = _invert(torch.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    inverse = torch.zeros_like(lower)
    inverse[..., :half, :half] = both[0]
    inverse[..., half:, half:] = both[1]
    inverse[..., half:, :half] = -both[1] @ lower[..., half:, :half] @ both[0]
    return inverse


class _InvertUnitLower(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        inverse = _invert(lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        gradient: Tensor = turned @ grads[0] @ turned
        return (-gradient).tril(-1)


def invert_unit_lower(lower: Tensor) -> Tensor:
    """Inverse of ``I + lower`` for a strictly lower triangular ``lower`` [..., n, n], differentiable."""
    return _InvertUnitLower.apply(lower)  # type: ignore[no-any-return, no-untyped-call]


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """Outputs [B, T, HV, d_v] for q, k [B, T, H or HV, d_k], v [B, T, HV, d_v], g and beta [B, T, HV].

    Takes the arguments of the function in transformers that it stands in for while training; it keeps no state, so a
    call with a state raises ValueError, and T must be a multiple of the chunk size.
    """
    if initial_state is not None or output_final_state:
        raise ValueError("the training path keeps no state: call the model with use_cache=False")
    batch, length, heads, d_v = value.shape
    if length % chunk_size:
        raise ValueError(f"length must be a multiple of {chunk_size}, got {length}")
    if key.shape[2] != heads:
        query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (query, key))
    with torch.autocast(value.device.type, enabled=False):

        def split(x: Tensor) -> Tensor:
            x = x.float().transpose(1, 2)
            return x.reshape(batch, heads, length // chunk_size, chunk_size, *x.shape[3:])

        q, k, v, decay, rate = (split(x) for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6)
            k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        q = q * q.shape[-1] ** -0.5
        total = decay.cumsum(-1)
        upper = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu(1)
        pair = (total[..., :, None] - total[..., None, :]).masked_fill(upper, float("-inf")).exp()
        k_rate = k * rate[..., None]
        inverse = invert_unit_lower(((k_rate @ k.transpose(-1, -2)) * pair).tril(-1))
        grown = total.exp()[..., None]
        new_values = inverse @ (v * rate[..., None])
        seen = inverse @ (k_rate * grown)
        inner = (q @ k.transpose(-1, -2)) * pair
        q_state = q * grown
        k_state = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
        last = total[..., -1].exp()[..., None, None]
        state = torch.zeros(batch, heads, k.shape[-1], d_v, dtype=q.dtype, device=q.device)
        reads, corrections = [], []
        for i in range(length // chunk_size):
            u = new_values[:, :, i] - seen[:, :, i] @ state
            reads.append(q_state[:, :, i] @ state)
            corrections.append(u)
            state = state * last[:, :, i] + k_state[:, :, i] @ u
        out = torch.stack(reads, dim=2) + inner @ torch.stack(corrections, dim=2)
        return out.reshape(batch, heads, length, d_v).transpose(1, 2).to(value.dtype), None


def causal_convolve(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: object
) -> Tensor:
    """Causal depthwise convolution of x [B, C, T] with weight [C, K], then SiLU; stands in for transformers' own."""
    if bias is not None or activation != "silu":
        raise ValueError(f"expected no bias and silu, got activation {activation!r}")
    width, length = weight.shape[-1], hidden_states.shape[-1]
    padded = F.pad(hidden_states, (width - 1, 0))
    taps = weight.to(hidden_states.dtype)
    out = sum(taps[:, i, None] * padded[..., i : i + length] for i in range(width))
    return F.silu(out)  # type: ignore[arg-type]
