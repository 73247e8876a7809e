"""Triton device functions that quantise a tile in registers, one for each kind of scale, and the formats' numbers.

Notable: no memory is touched here, and no product is added to anything; :mod:`driftgate.quant.device` loads and
stores. Arguments: see there.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

import triton
import triton.language as tl

from driftgate.quant.device_elements import (
    decode_e4m3,
    decode_e5m2,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e5m2,
    encode_integer,
    find_e8m0,
    round_stochastic,
    scale_rows,
)

__all__ = [
    "BLOCKS",
    "FORMAT_IDS",
    "WIDTHS",
    "FormatId",
    "cast_tile",
    "decode_elements",
    "quantize_e2m1",
    "quantize_mxfp8",
    "quantize_rows",
]


class FormatId(IntEnum):
    """The formats that kernels know, as the constexpr ``FORMAT``."""

    FP32 = 0
    BF16 = 1
    FP16 = 2
    FP8 = 3
    NVFP4 = 4
    FP8_E5M2 = 5
    INT8 = 6
    INT16 = 7
    MXFP4 = 8
    MXFP8 = 9


#: Format name, as in ``driftgate.quant.FORMATS``, to the ``FORMAT`` of kernels.
FORMAT_IDS: Mapping[str, FormatId] = MappingProxyType({member.name.lower(): member for member in FormatId})

_BF16 = tl.constexpr(int(FormatId.BF16))
_FP8 = tl.constexpr(int(FormatId.FP8))
_NVFP4 = tl.constexpr(int(FormatId.NVFP4))
_FP8_E5M2 = tl.constexpr(int(FormatId.FP8_E5M2))
_INT8 = tl.constexpr(int(FormatId.INT8))
_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_INF = tl.constexpr(float("inf"))
# By FORMAT: greatest code of what has a scale a row; elements in the last axis of an access (1: the plain tile, 2:
# packed bytes); elements of a block.
_TOPS = tl.constexpr((0.0, 0.0, 0.0, 448.0, 0.0, 57344.0, 127.0, 32767.0, 0.0, 0.0))
WIDTHS = tl.constexpr((1, 8, 8, 16, 2, 16, 16, 8, 2, 16))
BLOCKS = tl.constexpr((16, 16, 16, 16, 16, 16, 16, 16, 32, 32))


@triton.jit
def decode_elements(codes, FORMAT: tl.constexpr, CVT: tl.constexpr):
    """Values float32 of codes without their scale, in the shape of codes."""
    if FORMAT == _FP8:
        b_values = decode_e4m3(codes, CVT)
    elif FORMAT == _FP8_E5M2:
        b_values = decode_e5m2(codes)
    else:
        b_values = codes.to(tl.float32)
    return b_values


@triton.jit
def cast_tile(tile, FORMAT: tl.constexpr, SR: tl.constexpr, words):
    """The tile in bfloat16 or float16; what is not finite stays what it is."""
    b_codes = tile.to(tl.bfloat16) if FORMAT == _BF16 else tile.to(tl.float16)
    if SR:
        b_sign = (tile.to(tl.int32, bitcast=True) >> 16) & -0x8000
        b_abs = tl.abs(tile)
        if FORMAT == _BF16:
            b_code = round_stochastic(b_abs, words, 7, -126, 16)
        else:
            b_code = tl.minimum(round_stochastic(b_abs, words, 10, -14, 13), 0x7C00)
        b_random = (b_code | b_sign).to(tl.int16)
        b_finite = b_abs < _INF
        b_codes = tl.where(b_finite, b_random, b_codes.to(tl.int16, bitcast=True)).to(b_codes.dtype, bitcast=True)
    return b_codes


@triton.jit
def quantize_rows(tile, FORMAT: tl.constexpr, CVT: tl.constexpr, SR: tl.constexpr, words):
    """Codes in their storage type [BV, BK], decode scale float32 [BV], and where the tile is finite."""
    TOP: tl.constexpr = _TOPS[FORMAT]
    b_abs = tl.abs(tile)
    b_finite = b_abs < _INF
    b_e = scale_rows(b_abs, b_finite, TOP)
    b_y = tile * b_e[:, None]
    if FORMAT == _FP8:
        b_codes = tl.where(tile == tile, encode_e4m3(b_y, CVT, SR, words), 0x7F)
    elif FORMAT == _FP8_E5M2:
        b_codes = tl.where(tile == tile, encode_e5m2(b_y, CVT, SR, words), 0x7F)
    else:
        b_codes = tl.where(tile == tile, encode_integer(b_y, TOP, SR, words), int(TOP))
        b_codes = b_codes.to(tl.int8) if FORMAT == _INT8 else b_codes.to(tl.int16)
    return b_codes, tl.div_rn(1.0, b_e), b_finite


@triton.jit
def quantize_e2m1(
    tile, BV: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, CVT: tl.constexpr, SR: tl.constexpr, words
):
    """Everything that a tile becomes in NVFP4 or MXFP4: elements [BV, n, block], blocks [BV, n], rows [BV].

    Returns:
        Magnitudes float32 in {0, .5, 1, 1.5, 2, 3, 4, 6}, their codes int32 0..7, sign bits int32 (bit 31),
        where the tile is finite, raw block scales uint8, decode scales of blocks float32, decode scales of rows
        float32 (mxfp4: the greatest magnitude of the row, of no use).
    """
    B: tl.constexpr = min(BLOCKS[FORMAT], BK)
    b_x = tl.reshape(tile, [BV, BK // B, B])
    b_x = tl.where(b_x == b_x, b_x, _INF)
    b_abs = tl.abs(b_x)
    b_finite = b_abs < _INF
    b_bmax = tl.max(tl.where(b_finite, b_abs, 0.0), axis=2)
    b_amax = tl.max(b_bmax, axis=1)
    if FORMAT == _NVFP4:
        b_big_s = tl.where(b_amax == 0.0, 1.0, tl.minimum(tl.div_rn(2688.0, b_amax), _FLT_MAX))
        b_s2 = tl.div_rn(1.0, b_big_s)
        b_scales = encode_e4m3(b_bmax * (b_big_s * 0.16666666666666666)[:, None], CVT, False, 0)
        b_d = decode_e4m3(b_scales, CVT) * b_s2[:, None]
        b_r = tl.minimum(tl.div_rn(1.0, b_d), _FLT_MAX)
    else:
        tl.static_assert(not SR, "mxfp4 has no stochastic rounding")
        b_s2 = b_amax
        b_exponent = find_e8m0(b_bmax, 6.0)
        b_scales = b_exponent.to(tl.uint8)
        b_d = decode_e8m0(b_exponent)
        b_r = decode_e8m0(254 - b_exponent)
    b_words = tl.reshape(words, [BV, BK // B, B]) if SR else 0
    b_magnitude, b_code = encode_e2m1(b_abs * b_r[:, :, None], SR, b_words)
    b_sign = b_x.to(tl.int32, bitcast=True) & -0x80000000
    return b_magnitude, b_code, b_sign, b_finite, b_scales, b_d, b_s2


@triton.jit
def quantize_mxfp8(tile, BV: tl.constexpr, BK: tl.constexpr, CVT: tl.constexpr, SR: tl.constexpr):
    """Raw E4M3 codes uint8 [BV, n, block], raw block scales uint8 [BV, n], and where the tile is finite."""
    tl.static_assert(not SR, "mxfp8 has no stochastic rounding")
    B: tl.constexpr = min(32, BK)
    b_x = tl.reshape(tile, [BV, BK // B, B])
    b_abs = tl.abs(b_x)
    b_finite = b_abs < _INF
    b_exponent = find_e8m0(tl.max(tl.where(b_finite, b_abs, 0.0), axis=2), 448.0)
    b_codes = encode_e4m3(b_x * decode_e8m0(254 - b_exponent)[:, :, None], CVT, False, 0)
    return tl.where(b_x == b_x, b_codes, 0x7F), b_exponent.to(tl.uint8), b_finite
