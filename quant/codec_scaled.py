"""Codecs of one FP32 scale a scope: fp8 (E4M3FN), fp8_e5m2, int8, int16. fl() = one rounding to nearest even.

    encode       e = min(fl(Q/amax), FLT_MAX), 1 if amax = 0   scale = fl(1/e)      code = round(fl(x*e))
    encode_pow2  the same with the mantissa of e cut off
    decode       scale = fl(amax/Q), 1 if amax = 0                                  code = round(fl(x/scale))
    x' = fl(code*scale)

Q is the greatest code: 448, 57344, 127, 32767. ``encode`` is the rule of FlashInfer's state kernels and of
TransformerEngine. Floats keep the sign of zero, integers have none; -128 and -32768 are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from driftgate.quant.arithmetic import Arithmetic, Convention
from driftgate.quant.codec import Codec, Parts, divide, encode_scale
from driftgate.quant.elements import Element, look_up, round_integer

__all__ = ["float_codec", "integer_codec"]


def float_codec(element: Element, table: Literal["e4m3", "e5m2"]) -> Codec:
    """Codec of a saturating 8-bit float; NaN saturates to 0x7F, an infinity to the greatest value."""

    def decode(codes: Tensor, block_scales: Tensor | None, scales: Tensor | None, d_k: int) -> Tensor:
        assert scales is not None
        return look_up(table, codes) * scales

    def saturate(codes: Tensor, x: Tensor) -> Tensor:
        codes = torch.where(x.isinf(), element.nearest(x.nan_to_num(0.0)), codes)
        return codes.masked_fill_(x.isnan(), 0x7F)

    return Codec(_encoder(element.max_value, element.encode), decode, saturate)


def integer_codec(dtype: torch.dtype) -> Codec:
    """Codec of a signed integer; NaN and +inf saturate to the greatest code, -inf to the least."""
    top = torch.iinfo(dtype).max

    def encode(x: Tensor, words: Tensor | None) -> Tensor:
        return round_integer(x, top, words).to(dtype)

    def decode(codes: Tensor, block_scales: Tensor | None, scales: Tensor | None, d_k: int) -> Tensor:
        assert scales is not None
        return codes.to(torch.float32) * scales

    def saturate(codes: Tensor, x: Tensor) -> Tensor:
        saturated = x.nan_to_num(nan=top, posinf=top, neginf=-top).clamp_(-top, top).to(dtype)
        return torch.where(x.isfinite(), codes, saturated)

    return Codec(_encoder(float(top), encode), decode, saturate)


def _encoder(
    top: float, encode: Callable[[Tensor, Tensor | None], Tensor]
) -> Callable[[Tensor, Tensor, Arithmetic, Tensor | None], Parts]:
    """Encode with a scale that takes amax to top."""

    def encode_scaled(x: Tensor, amax: Tensor, arithmetic: Arithmetic, words: Tensor | None) -> Parts:
        if arithmetic.convention is Convention.DECODE:
            scale = torch.where(amax == 0, 1.0, torch.div(amax, torch.full_like(amax, top)))
            # A scale that underflows to 0 leaves nothing to divide by; such rows decode to zeros.
            return encode(torch.where(scale == 0, x.sign() * top, torch.div(x, scale)), words), None, scale
        e = encode_scale(top, amax)
        if arithmetic.convention is Convention.ENCODE_POW2:
            e = (e.view(torch.int32) & 0x7F800000).view(torch.float32)
        return encode(x * e, words), None, divide(1.0, e)

    return encode_scaled
