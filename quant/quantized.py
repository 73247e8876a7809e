"""Whole tensors in a format: scopes, block axis, reports. The arithmetic is that of the codecs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from driftgate.quant.arithmetic import Arithmetic, choose
from driftgate.quant.codec import to_blocks
from driftgate.quant.codecs import CODECS, raise_nonfinite
from driftgate.quant.formats import Format, Rounding, ScaleKind, Scope
from driftgate.quant.philox import Noise, hash_stream

__all__ = ["QuantizedTensor", "quantize"]

_EXACT_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
_PIECE = 32  # elements of a row that share a scale in scope 1x32


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor as stored in a format.

    Shapes are those of x, or with ``dim=-2`` those of x with its last two axes swapped: rows run along the
    block axis.

    Attributes:
        format: the format.
        codes: in the format's storage type [..., d_v, d_k]; packed uint8 for nvfp4 [..., d_v, 8*ceil(d_k/16)] and
            mxfp4 [..., d_v, 16*ceil(d_k/32)], low nibble = even element, rows filled up with zeros.
        scales: fp8, fp8_e5m2, int8, int16: FP32 decode scale of each scope (row: [..., d_v, 1], 1x32: [..., d_v,
            ceil(d_k/32)]); uint8 [..., d_v, ceil(d_k/block)], raw E4M3 bits for nvfp4, E8M0 for mxfp4 and mxfp8;
            None for formats without scales.
        global_scale: nvfp4: FP32 decode scale of each scope (row: [..., d_v, 1]), x = e2m1 * e4m3 *
            global_scale; None elsewhere.
        amax: FP32 greatest magnitude of each scope, from which other conventions of the scale can be
            derived; None for formats without FP32 scales. Not needed to decode, not part of nbytes.
        shape: shape of x.
        dim: block axis, -1 or -2.
        scope: scope of the FP32 scale.
        arithmetic: how codes and scales were computed.
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
    arithmetic: Arithmetic
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
        decode, d_k = CODECS[self.format.name].decode, self.shape[self.dim]
        if self.format.scaled and self.scope is Scope.ROW_32:
            assert scales is not None
            decoded = decode(to_blocks(self.codes, _PIECE), None, scales.unsqueeze(-1), _PIECE)
            decoded = decoded.flatten(-2)[..., :d_k].contiguous()
        else:
            decoded = decode(self.codes, block_scales, scales, d_k)
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
    arithmetic: Arithmetic | None = None,
) -> QuantizedTensor:
    """Store x in a format.

    Args:
        fmt: target format.
        x: [slots, heads, d_v, d_k], float32, or bfloat16 or float16 (both exact in float32). A tensor with
            fewer axes counts as one slot and one head.
        dim: axis along which scale blocks run, the last (d_k, the contraction axis of a readout) or the one
            before (d_v). Scope ``row`` is one row along this axis.
        scope: elements that share an FP32 scale: tensor, slot, head, row, or 32 of a row (1x32, formats without
            block scales); None is row. Without effect on formats that have no FP32 scale.
        rounding: ``nearest``, or ``stochastic`` for the elements of bf16, fp16, int16, fp8, fp8_e5m2, int8 and
            nvfp4; scales are nearest in either case.
        seed: of stochastic rounding; without effect on ``nearest``. Each slot is taken for a sequence of its own,
            in layer 0, that has seen no token (:class:`driftgate.quant.philox.Noise` has the rule).
        arithmetic: choices where libraries differ; None is the default of each.

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
    shared = Scope.ROW if scope is None else choose("scope", scope, Scope)
    if shared is Scope.ROW_32 and fmt.scaled and fmt.scale is not ScaleKind.SCOPE:
        raise ValueError(f"scope: expected tensor, slot, head or row for {fmt.name}, got {shared.value}")
    arithmetic = arithmetic or Arithmetic()
    arithmetic.check(fmt)
    stochastic = choose("rounding", rounding, Rounding) is Rounding.STOCHASTIC
    if stochastic and not fmt.stochastic:
        raise ValueError(f"rounding: expected nearest for {fmt.name}, got stochastic")
    if stochastic and seed is None:
        raise ValueError("seed: expected an int for stochastic rounding, got None")

    rows = x.detach().to(torch.float32)
    if not bool(rows.isfinite().all()):
        raise_nonfinite(fmt, rows)
    words = _draw_words(seed, rows) if stochastic and seed is not None else None
    if block_axis == -2:
        rows = rows.transpose(-1, -2)
        words = None if words is None else words.transpose(-1, -2)
    # Codecs may view bits and keep x as codes.
    rows = rows.clone(memory_format=torch.contiguous_format)
    encode = CODECS[fmt.name].encode
    if fmt.scaled and shared is Scope.ROW_32:
        pieces = to_blocks(rows, _PIECE)
        amax = pieces.abs().amax(-1)
        words = None if words is None else to_blocks(words, _PIECE)
        codes, block_scales, scales = encode(pieces, amax.unsqueeze(-1), arithmetic, words)
        assert scales is not None
        codes, scales = codes.flatten(-2)[..., : rows.shape[-1]].contiguous(), scales.squeeze(-1)
    else:
        amax = _max_magnitude(rows, shared)
        codes, block_scales, scales = encode(rows, amax, arithmetic, words)
    n_overflow = 0 if fmt.scaled else int(codes.isinf().sum())
    return QuantizedTensor(
        format=fmt,
        codes=codes,
        scales=block_scales if fmt.block_scaled else scales,
        global_scale=scales if fmt.block_scaled else None,
        amax=amax if fmt.scope_scaled else None,
        shape=x.shape,
        dim=block_axis,
        scope=shared,
        arithmetic=arithmetic,
        n_overflow=n_overflow,
    )


def _draw_words(seed: int, rows: Tensor) -> Tensor:
    """Random words of each element, every slot a sequence of its own."""
    slots = torch.arange(rows.shape[0] if rows.dim() == 4 else 1)
    return Noise(seed=seed, streams=hash_stream(slots, 0)).words(rows.shape, rows.device)


def _max_magnitude(rows: Tensor, scope: Scope) -> Tensor:
    """Greatest magnitude of each scope; reduced axes are kept with length 1."""
    if scope in (Scope.ROW, Scope.ROW_32):
        axes: tuple[int, ...] = (-1,)
    elif scope is Scope.TENSOR or rows.dim() < 4:
        axes = tuple(range(rows.dim()))
    elif scope is Scope.SLOT:
        axes = (1, 2, 3)
    else:
        axes = (2, 3)
    return rows.abs().amax(axes, keepdim=True)
