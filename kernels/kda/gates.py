"""The gate of Kimi Delta Attention, from what a model delivers."""

from __future__ import annotations

import torch

__all__ = ["compute_log_decay"]


def compute_log_decay(
    a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, *, lower_bound: float | None = None
) -> torch.Tensor:
    """Log decay g per key channel, in FP32.

    -exp(A_log)·softplus(a + dt_bias), softplus linear above 20; with ``lower_bound`` l the bounded form
    l·sigmoid(exp(A_log)·(a + dt_bias)), which is never below l.

    Args:
        a: [..., HV, d_k], any float type.
        A_log: [HV]; dt_bias: [HV, d_k] or [HV·d_k]; both of the precision that the checkpoint stores.
        lower_bound: below 0 (published models: -5), or None.

    Returns:
        g [..., HV, d_k] float32, at most 0.

    Raises:
        ValueError: a lower bound that is not below 0.
    """
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound: expected a number below 0 or None, got {lower_bound}")
    x = a.float() + dt_bias.float().view(a.shape[-2:])
    rate = A_log.float().exp()[:, None]
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * x)
    return -rate * torch.nn.functional.softplus(x)
