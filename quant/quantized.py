"""Whole tensors in a format: scopes, block axis, reports. The arithmetic is that of the codecs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor

from driftgate.quant.codecs import CODECS, raise_nonfinite
from driftgate.quant.formats import Format, Rounding, Scope

__all__ = ["QuantizedTensor", "quantize"]

_EXACT_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)

_Choice = TypeVar("_Choice", bound=Enum)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor as stored in a format.

    Shapes are those of x, or with ``dim=-2`` those of x with its last two axes swapped: rows run along the
    block axis.

    Attributes:
        format: the format.
        codes: wide formats: x in that dtype; fp8: raw bits, uint8 [..., d_v, d_k]; nvfp4: packed uint8
            [..., d_v, 8*ceil(d_k/16)], low nibble = even element, rows padded with zeros to whole blocks.
        scales: fp8: FP32 decode scale of each scope (row: [..., d_v, 1]); nvfp4: raw E4M3 bits, uint8
            [..., d_v, ceil(d_k/16)]; None for formats without scales.
        global_scale: nvfp4: FP32 decode scale of each scope (row: [..., d_v, 1]), x = e2m1 * e4m3 *
            global_scale; None elsewhere.
        amax: FP32 greatest magnitude of each scope, from which other conventions of the scale can be
            derived; None for formats without scales. Not needed to decode, not part of nbytes.
        shape: shape of x.
        dim: block axis, -1 or -2.
        scope: scope of the FP32 scale.
        n_overflow: finite elements of x that became infinite (fp16 beyond 65504, bf16 beyond its greatest
            value); scaled formats saturate and have none.
    """

    format: Format
    codes: Tensor
    scales: Tensor | None
    global_scale: Tensor | None
    amax: Tensor | None
    shape: torch.Size
    dim: int
    scope: Scope
    n_overflow: int

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and global scale."""
        stored = (self.codes, self.scales, self.global_scale)
        return sum(part.numel() * part.element_size() for part in stored if part is not None)

    def dequantize(self) -> Tensor:
        """The stored values, float32 in the shape of x, in memory of their own."""
        if self.format.block_scaled:
            block_scales, scales = self.scales, self.global_scale
        else:
            block_scales, scales = None, self.scales
        decoded = CODECS[self.format.name].decode(self.codes, block_scales, scales, self.shape[self.dim])
        if self.dim == -2:
            return decoded.transpose(-1, -2).contiguous()
        return decoded.clone() if decoded is self.codes else decoded


def quantize(
    fmt: Format,
    x: Tensor,
    *,
    dim: int = -1,
    scope: str | Scope | None = None,
    rounding: str | Rounding = Rounding.NEAREST,
    seed: int | None = None,
) -> QuantizedTensor:
    """Store x in a format.

    Args:
        fmt: target format.
        x: [slots, heads, d_v, d_k], float32, or bfloat16 or float16 (both exact in float32). A tensor with
            fewer axes counts as one slot and one head.
        dim: axis along which scale blocks run, the last (d_k, the contraction axis of a readout) or the one
            before (d_v). Scope ``row`` is one row along this axis.
        scope: elements that share an FP32 scale: tensor, slot, head or row; None is row. Without effect on
            formats that have no scale.
        rounding: ``nearest``.
        seed: of stochastic rounding; without effect on ``nearest``.

    Returns:
        Codes and scales on x's device, sharing no memory with x.

    Raises:
        ValueError: an argument does not fit, or x holds a NaN or an infinity: slot, head, row and element
            are named.
    """
    if not isinstance(x, Tensor) or x.dtype not in _EXACT_IN_FLOAT32:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x: expected a float32, bfloat16 or float16 tensor, got {got}")
    if not 1 <= x.dim() <= 4 or x.numel() == 0:
        raise ValueError(f"x: expected up to [slots, heads, d_v, d_k] and one element, got {list(x.shape)}")
    block_axis = dim - x.dim() if dim >= 0 else dim
    if block_axis not in (-1, -2) or -block_axis > x.dim():
        raise ValueError(f"dim: expected one of the last two axes of {list(x.shape)}, got {dim}")
    shared = Scope.ROW if scope is None else _choose("scope", scope, Scope)
    _choose("rounding", rounding, Rounding, of=fmt)

    rows = x.detach().to(torch.float32)
    if not bool(rows.isfinite().all()):
        raise_nonfinite(fmt, rows)
    if block_axis == -2:
        rows = rows.transpose(-1, -2)
    # Codecs may view bits and keep x as codes.
    rows = rows.clone(memory_format=torch.contiguous_format)
    amax = _max_magnitude(rows, shared)
    codes, block_scales, scales = CODECS[fmt.name].encode(rows, amax)
    n_overflow = 0 if fmt.scaled else int(codes.isinf().sum())
    return QuantizedTensor(
        format=fmt,
        codes=codes,
        scales=block_scales if fmt.block_scaled else scales,
        global_scale=scales if fmt.block_scaled else None,
        amax=amax if fmt.scaled else None,
        shape=x.shape,
        dim=block_axis,
        scope=shared,
        n_overflow=n_overflow,
    )


def _choose(argument: str, value: str | Enum, choices: type[_Choice], *, of: Format | None = None) -> _Choice:
    """The member with that value; a ValueError lists the values there are."""
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(str(choice.value) for choice in choices)
        where = f" (no other is available for {of.name} yet)" if of is not None else ""
        raise ValueError(f"{argument}: expected one of {known}{where}, got {value!r}") from None


def _max_magnitude(rows: Tensor, scope: Scope) -> Tensor:
    """Greatest magnitude of each scope; reduced axes are kept with length 1."""
    if scope is Scope.ROW:
        axes: tuple[int, ...] = (-1,)
    elif scope is Scope.TENSOR or rows.dim() < 4:
        axes = tuple(range(rows.dim()))
    elif scope is Scope.SLOT:
        axes = (1, 2, 3)
    else:
        axes = (2, 3)
    return rows.abs().amax(axes, keepdim=True)
