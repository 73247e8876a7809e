"""What a codec is, and the float32 steps that codecs share: each of them is one rounding.

Quotients divide tensor by tensor: ``448 / x`` is a rounded reciprocal times 448 in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from driftgate.quant.arithmetic import Arithmetic
from driftgate.quant.elements import cast_e2m1

__all__ = ["FLT_MAX", "Codec", "Parts", "divide", "encode_scale", "max_magnitude", "pack_pairs", "pad_row"]
__all__ += ["saturate_e2m1", "to_blocks"]

FLT_MAX = torch.finfo(torch.float32).max

#: Codes, block scales or None, FP32 scales shaped like amax or None.
Parts = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Codec:
    """How one format computes.

    Attributes:
        encode: finite x [..., d_k] float32, amax of each scope, broadcastable to [..., 1], the arithmetic, and
            random words of each element or None for nearest even. May return x itself as codes.
        decode: codes, block scales, scales and d_k to float32 [..., d_k].
        saturate: codes and x, the codes of non-finite elements replaced by what the format makes of them.
    """

    encode: Callable[[Tensor, Tensor, Arithmetic, Tensor | None], Parts]
    decode: Callable[[Tensor, Tensor | None, Tensor | None, int], Tensor]
    saturate: Callable[[Tensor, Tensor], Tensor]


def max_magnitude(x: Tensor) -> Tensor:
    """Greatest magnitude over the last axis, kept; inf or NaN where an element is.

    Magnitudes of floats order as their bits do, and integer maxima over short axes are the faster ones.
    """
    bits = x.view(torch.int32) & 0x7FFFFFFF
    return bits.amax(-1, keepdim=True).view(torch.float32)


def divide(numerator: float, x: Tensor) -> Tensor:
    """fl(numerator / x), capped at FLT_MAX."""
    return torch.div(torch.full_like(x, numerator), x).clamp_(max=FLT_MAX)


def encode_scale(max_code: float, amax: Tensor) -> Tensor:
    """The factor that takes amax to max_code; 1 for a scope of zeros."""
    return torch.where(amax == 0, 1.0, divide(max_code, amax))


def pad_row(x: Tensor, block: int) -> Tensor:
    """Rows [..., d_k] filled up to whole blocks."""
    pad = -x.shape[-1] % block
    return torch.nn.functional.pad(x, (0, pad)) if pad else x


def to_blocks(x: Tensor, block: int) -> Tensor:
    """Rows [..., d_k] as [..., ceil(d_k/block), block], filled up with zeros."""
    x = pad_row(x, block)
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def pack_pairs(codes: Tensor) -> Tensor:
    """Two E2M1 codes a byte, the even element in the low nibble; reads pairs as little-endian words."""
    pairs = codes.contiguous().view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def saturate_e2m1(codes: Tensor, x: Tensor) -> Tensor:
    """Packed codes, those of non-finite elements of x replaced: NaN +6, infinities ±6."""
    saturated = cast_e2m1(x.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf))
    pad = 2 * codes.shape[-1] - x.shape[-1]
    finite = torch.nn.functional.pad(x.isfinite(), (0, pad), value=True)
    saturated = torch.nn.functional.pad(saturated, (0, pad))
    unpacked = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return pack_pairs(torch.where(finite, unpacked, saturated))
