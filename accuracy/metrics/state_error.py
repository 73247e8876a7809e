"""How far a state, a copy or an output is from its reference: the relative Frobenius norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["relative_error"]


def relative_error(x: Tensor, reference: Tensor, dims: int | Sequence[int]) -> Tensor:
    """``‖x - reference‖ / ‖reference‖`` over ``dims``, in FP64.

    For states [..., heads, d_v, d_k] with ``dims=(-2, -1)`` this is one number a head (Frobenius norm); for
    outputs [..., heads, d_v] use ``dims=-1``.

    Args:
        x: any floating dtype; taken to FP64 before the subtraction.
        reference: the same shape.
        dims: the axes that the norms run over; at least one.

    Returns:
        The other axes, FP64, a fraction, 0 … inf, lower is better. Equal tensors give exactly 0, also where
        the reference is 0 (0/0 counts as 0); anything else over a zero reference gives inf. NaN on either
        side gives NaN, and so does an infinite element.

    Raises:
        ValueError: shapes differ, no axis is named, or an operand has no floating dtype.
    """
    if x.shape != reference.shape:
        raise ValueError(f"reference: expected the shape of x, {tuple(x.shape)}, got {tuple(reference.shape)}")
    if not (x.is_floating_point() and reference.is_floating_point()):
        raise ValueError(f"x, reference: expected floating dtypes, got {x.dtype} and {reference.dtype}")
    axes = (dims,) if isinstance(dims, int) else tuple(dims)
    if not axes:
        raise ValueError("dims: expected at least one axis, got none")
    wide = reference.double()
    error = torch.linalg.vector_norm(x.double() - wide, dim=axes)
    scale = torch.linalg.vector_norm(wide, dim=axes)
    return torch.where((error == 0) & (scale == 0), torch.zeros_like(error), error / scale)
