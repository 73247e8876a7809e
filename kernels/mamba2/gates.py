"""The step size of Mamba-2, from what a model delivers."""

from __future__ import annotations

import torch

__all__ = ["compute_dt"]


def compute_dt(
    dt: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    *,
    softplus: bool = True,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """Step size dt, in FP32: dt + dt_bias, softplus (linear above 20), then clamped to the limits.

    Args:
        dt: [..., HV], any float type.
        dt_bias: [HV], or None.
        softplus: whether the model applies it.
        limits: least and greatest value; transformers applies none in decode.

    Returns:
        dt [..., HV] float32.

    Raises:
        ValueError: limits in the wrong order.
    """
    low, high = limits
    if not low <= high:
        raise ValueError(f"limits: expected least and greatest, got {limits}")
    x = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    if softplus:
        x = torch.nn.functional.softplus(x)
    return x.clamp(low, high)
