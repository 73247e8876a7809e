"""The delta rule over whole sequences in chunks, with a cheap backward pass; for training only.

What GDN and KDA share: inside a chunk the corrections solve one unit lower triangular system, which is inverted once by
blocked substitution; the inverse is differentiated by its closed form ``dA = -T^T dT T^T`` instead of through two
triangular solves. Between chunks the state is carried from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["chunk_delta_rule", "disturb"]

BLOCK = 16

PairProducts = Callable[[Sequence[Tensor], Tensor, Tensor], list[Tensor]]
"""(queries, keys, total) of chunks, [..., C, d_k] and summed log decays [..., C, 1 or d_k] -> for each x of the queries
``sum_d x[i, d] k[j, d] exp(total[i, d] - total[j, d])`` [..., C, C] for j <= i, and anything finite above."""


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


def disturb(states: Tensor, read_noise: Tensor | None) -> Tensor:
    """The copy of the states that is read: every entry is off by a normal share of itself of this deviation []."""
    return states if read_noise is None else states * (1.0 + read_noise * torch.randn_like(states))


def chunk_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    pair_products: PairProducts,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    read_noise: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Outputs [B, T, H, d_v] for q, k [B, T, H, d_k], v [B, T, H, d_v], log_decay [B, T, H, 1 or d_k], beta [B, T, H].

    Takes the options of the functions in transformers that it stands in for. With ``read_noise`` each chunk reads a
    disturbed copy of the state before it, while the state that is carried on stays exact.

    Raises:
        ValueError: a state is given or asked for, which training does not need; or T is no multiple of chunk_size.
    """
    if initial_state is not None or output_final_state:
        raise ValueError("the training path keeps no state: call the model with use_cache=False")
    batch, length, heads, d_v = value.shape
    if length % chunk_size:
        raise ValueError(f"length must be a multiple of {chunk_size}, got {length}")
    with torch.autocast(value.device.type, enabled=False):

        def split(x: Tensor) -> Tensor:
            x = x.float().transpose(1, 2)
            return x.reshape(batch, heads, length // chunk_size, chunk_size, *x.shape[3:])

        q, k, v, total, rate = (split(x) for x in (query, key, value, log_decay, beta[..., None]))
        if use_qk_l2norm_in_kernel:
            q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6)
            k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        q, k_rate, total = q * q.shape[-1] ** -0.5, k * rate, total.cumsum(-2)
        inner, own = pair_products([q, k_rate], k, total)
        inverse = _InvertUnitLower.apply(own.tril(-1))  # type: ignore[no-untyped-call]
        grown, last = total.exp(), total[..., -1:, :]
        new_values, seen = inverse @ (v * rate), inverse @ (k_rate * grown)
        k_state = (k * (last - total).exp()).transpose(-1, -2)
        kept = last.exp().transpose(-1, -2)
        state = torch.zeros(batch, heads, k.shape[-1], d_v, dtype=q.dtype, device=q.device)
        before = []
        for i in range(length // chunk_size):
            before.append(state)
            state = state * kept[:, :, i] + k_state[:, :, i] @ (new_values[:, :, i] - seen[:, :, i] @ state)
        copies = disturb(torch.stack(before, dim=2), read_noise)
        out = (q * grown) @ copies + inner.tril() @ (new_values - seen @ copies)
        return out.reshape(batch, heads, length, d_v).transpose(1, 2).to(value.dtype), None
