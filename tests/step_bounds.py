"""How far kernels in FP32 may lie from the recurrence in FP64, derived; nothing here is measured or tuned.

Unit roundoff e = 2^-24. With normalised keys an element of S k is off by at most (d_k + 8)·e·M: a sum of d_k products,
the key's norm, exp, and the products around them, M the greatest norm that a row of the state reaches. A step
multiplies by α(I - βkkᵀ), whose norm is at most 1, so errors only add up: after n steps a state element is off by
n·(d_k + 8)·e·M. The bounds take twice that: u kᵀ has k's error too, and |u| <= 2M.
An output reads the state with q, which is as long as ``scale``: |q| times the state's bound, and again for its own sum.
A readout that does not build the state adds up h buffered corrections instead: there M grows by their sum, at most
(h + 1)·max|u||k|. With ``state_output`` both operands of the product that rebuilds the tile are rounded, to TF32 or
BF16, and an error of û returns in the û that follow it: 4·unit·(h + 1)·M.
Mamba-2 adds x (dt·B)ᵀ and reads with C, as long as they are; y adds D·x, rounded twice, and silu(z) multiplies all by
at most |z|, with a relative error of (|z| + 8)·e from its exp. An output is rounded once to its type.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from driftgate.accuracy.running_bounds import ROUNDOFF
from driftgate.kernels.contract import Dot

__all__ = ["bound_dot", "bound_output", "bound_state"]

_UNITS = {Dot.IEEE: 0.0, Dot.TF32: 2.0**-11, Dot.BF16: 2.0**-8}

Number = TypeVar("Number", float, torch.Tensor)


def bound_state(n: int, d_k: int, greatest: Number) -> Number:
    """Error of a state element after n steps. greatest: M, a number or a tensor of any shape."""
    return greatest * (2 * n * (d_k + 8) * ROUNDOFF)


def bound_dot(dot: Dot, greatest: Number, n: int) -> Number:
    """Error of the tile that ``state_output`` rebuilds from n - 1 entries, and of what follows from it."""
    return greatest * (4 * _UNITS[dot] * n)


def bound_output(
    expected: torch.Tensor,
    *,
    activation: torch.dtype,
    read: torch.Tensor | float,
    skip: torch.Tensor | float = 0.0,
    gates: torch.Tensor | float | None = None,
    roundings: int = 1,
) -> torch.Tensor:
    """Error of an output.

    Args:
        expected: [..., d_v].
        activation: type that an output is rounded to.
        read: what S q may be off by, error of the sum included.
        skip: greatest |D·x|, 0 without.
        gates: greatest |z|, None without a gate.
        roundings: 2 where ``expected`` was rounded to that type too.

    Returns:
        Absolute bound of each element, float64.
    """
    rounding: torch.Tensor | float = roundings * (2.0**-8 if activation == torch.bfloat16 else ROUNDOFF)
    bound = read + 2 * ROUNDOFF * skip
    if gates is not None:
        bound = bound * (gates.clamp(min=1.0) if isinstance(gates, torch.Tensor) else max(gates, 1.0))
        rounding = rounding + 2 * ROUNDOFF * (gates + 8)
    return bound + rounding * expected.double().abs()
