"""Triton device functions that read and write tiles of a stored state, for the kernels of every recurrence.

Notable: the codes are those of :mod:`driftgate.quant.codecs` bit for bit. Every quotient is ``tl.div_rn``,
because ``/`` compiles to an approximation; no product is added to anything in here, so ``enable_fp_fusion``
changes nothing (a caller that adds to a loaded tile would let it: the last operation of a load is a product).
Low-precision elements are read and written as [BV, BK/16, 16], packed ones as [BV, BK/2],
never as [BV, BK]: Triton takes the layout of ``tl.sum``, hence its order of additions, from the widest access
of that shape, and a copy in another format must not move the bits of the recurrence. FP32 alone uses the
plain tile, as the baseline does.

One head as it is stored, contiguous, pointers at its first element::

    format   codes                                      block_scales            row_scales
    fp32     float32  [d_v, d_k]
    bf16     bfloat16 [d_v, d_k]
    fp16     float16  [d_v, d_k]
    fp8      uint8    [d_v, d_k], raw E4M3FN                                    float32 [d_v], decode scale
    nvfp4    uint8    [d_v, 8*ceil(d_k/16)], even       uint8 [d_v, ceil(       float32 [d_v], decode scale
             element in the low nibble                  d_k/16)], raw E4M3FN

Pointers that a format does not use are never read. Arguments shared by the functions:

* ``o_v``: int32 [BV], rows of the tile, ``i_v * BV + tl.arange(0, BV)``; rows at or beyond D_V do not exist.
* ``D_V``, ``D_K``: rows and row length of the head. ``BV``, ``BK``: the tile, powers of two, BK >=
  max(16, D_K).
* ``FORMAT``: a :class:`FormatId`, from ``FORMAT_IDS[format.name]``.
* ``CVT``: convert E4M3 by instruction (sm_89 and later, and the interpreter), or in integers, which gives the
  same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

import triton
import triton.language as tl

__all__ = ["FORMAT_IDS", "FormatId", "load_tile", "round_trip_tile", "store_tile"]


class FormatId(IntEnum):
    """The formats that kernels know, as the constexpr ``FORMAT``."""

    FP32 = 0
    BF16 = 1
    FP16 = 2
    FP8 = 3
    NVFP4 = 4


#: Format name, as in ``driftgate.quant.FORMATS``, to the ``FORMAT`` of kernels.
FORMAT_IDS: Mapping[str, FormatId] = MappingProxyType({member.name.lower(): member for member in FormatId})

_FP32 = tl.constexpr(int(FormatId.FP32))
_FP8 = tl.constexpr(int(FormatId.FP8))
_NVFP4 = tl.constexpr(int(FormatId.NVFP4))
_BF16 = tl.constexpr(int(FormatId.BF16))
_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_INF = tl.constexpr(float("inf"))


@triton.jit
def load_tile(
    codes,
    block_scales,
    row_scales,
    o_v,
    D_V: tl.constexpr,
    D_K: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    CVT: tl.constexpr = True,
):
    """Rows ``o_v`` of one head, dequantised: float32 [BV, BK], 0 in rows >= D_V and columns >= D_K.

    Nothing outside the head is read. Twin: ``driftgate.quant.decode_rows``.
    """
    in_rows = o_v < D_V
    if FORMAT == _FP32:
        o_k = tl.arange(0, BK)
        mask = in_rows[:, None] & (o_k < D_K)[None, :]
        b_tile = tl.load(codes + o_v[:, None] * D_K + o_k[None, :], mask=mask, other=0.0)
    elif FORMAT == _NVFP4:
        NB: tl.constexpr = (D_K + 15) // 16
        o_p = tl.arange(0, BK // 2)
        mask = in_rows[:, None] & (o_p < NB * 8)[None, :]
        b_bytes = tl.load(codes + o_v[:, None] * (NB * 8) + o_p[None, :], mask=mask, other=0).to(tl.int16)
        # A nibble s|ee|m at bits 15, 11, 10, 9 is a float16 of 2^-14 times its value, the subnormal 0.5
        # included.
        b_low = ((b_bytes << 12) >> 3) & -0x7200
        b_high = ((b_bytes << 8) >> 3) & -0x7200
        b_half = tl.reshape(tl.join(b_low, b_high), [BV, BK // 16, 16]).to(tl.float16, bitcast=True)
        o_b = tl.arange(0, BK // 16)
        mask = in_rows[:, None] & (o_b < NB)[None, :]
        b_s8 = tl.load(block_scales + o_v[:, None] * NB + o_b[None, :], mask=mask, other=0)
        b_s2 = tl.load(row_scales + o_v, mask=in_rows, other=0.0)
        b_d = _decode_e4m3(b_s8, CVT) * b_s2[:, None]
        b_tile = tl.reshape((b_half.to(tl.float32) * 16384.0) * b_d[:, :, None], [BV, BK])
        if D_K % 16 != 0:
            b_tile = tl.where((tl.arange(0, BK) < D_K)[None, :], b_tile, 0.0)
    else:
        WIDTH: tl.constexpr = 16 if FORMAT == _FP8 else 8
        o_k = tl.arange(0, BK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        mask = in_rows[:, None, None] & (o_k < D_K)[None, :, :]
        p_codes = codes + o_v[:, None, None] * D_K + o_k[None, :, :]
        if FORMAT == _FP8:
            b_scale = tl.load(row_scales + o_v, mask=in_rows, other=0.0)
            b_values = _decode_e4m3(tl.load(p_codes, mask=mask, other=0), CVT) * b_scale[:, None, None]
        else:
            b_values = tl.load(p_codes, mask=mask, other=0.0).to(tl.float32)
        b_tile = tl.reshape(b_values, [BV, BK])
    return b_tile


@triton.jit
def store_tile(
    codes,
    block_scales,
    row_scales,
    tile,
    o_v,
    D_V: tl.constexpr,
    D_K: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    CVT: tl.constexpr = True,
):
    """Quantise ``tile`` (float32 [BV, BK]) into rows ``o_v`` of one head; 1 if it is not finite, else 0.

    The result is int32. Nearest even. Rows >= D_V and columns >= D_K of the tile are ignored and nothing
    outside the head is written; the last NVFP4 block of a row is filled up with zeros. Scales are taken over
    finite elements. A non-finite element is stored as nvfp4: NaN +6, inf with its sign 6; fp8: NaN 0x7F, inf
    with its sign 448; else as it is. 1 is returned for it, and for a finite element that becomes infinite in
    fp16 or bf16. Twin: ``driftgate.quant.encode_rows(nonfinite="saturate")``.
    """
    in_rows = o_v < D_V
    if (D_V % BV) + (BK - D_K) > 0:
        tile = tl.where(in_rows[:, None] & (tl.arange(0, BK) < D_K)[None, :], tile, 0.0)
    if FORMAT == _FP32:
        o_k = tl.arange(0, BK)
        mask = in_rows[:, None] & (o_k < D_K)[None, :]
        tl.store(codes + o_v[:, None] * D_K + o_k[None, :], tile, mask=mask)
        bad = tl.max((tl.abs(tile) < _INF).to(tl.int32) ^ 1)
    elif FORMAT == _NVFP4:
        NB: tl.constexpr = (D_K + 15) // 16
        _, b_code, b_sign, b_finite, b_s8, _, b_s2 = _quantize_nvfp4(tile, BV, BK, CVT)
        b_code |= (b_sign >> 28) & 8
        b_low, b_high = tl.split(tl.reshape(b_code, [BV, BK // 2, 2]))
        o_p = tl.arange(0, BK // 2)
        mask = in_rows[:, None] & (o_p < NB * 8)[None, :]
        b_bytes = (b_low | (b_high << 4)).to(tl.uint8)
        tl.store(codes + o_v[:, None] * (NB * 8) + o_p[None, :], b_bytes, mask=mask)
        o_b = tl.arange(0, BK // 16)
        mask = in_rows[:, None] & (o_b < NB)[None, :]
        tl.store(block_scales + o_v[:, None] * NB + o_b[None, :], b_s8, mask=mask)
        tl.store(row_scales + o_v, b_s2, mask=in_rows)
        bad = tl.max(b_finite.to(tl.int32) ^ 1)
    else:
        WIDTH: tl.constexpr = 16 if FORMAT == _FP8 else 8
        o_k = tl.arange(0, BK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        mask = in_rows[:, None, None] & (o_k < D_K)[None, :, :]
        p_codes = codes + o_v[:, None, None] * D_K + o_k[None, :, :]
        if FORMAT == _FP8:
            b_codes, b_scale, b_finite = _quantize_fp8(tile, CVT)
            tl.store(row_scales + o_v, b_scale, mask=in_rows)
        else:
            b_codes = tile.to(tl.bfloat16) if FORMAT == _BF16 else tile.to(tl.float16)
            b_finite = tl.abs(b_codes.to(tl.float32)) < _INF
        tl.store(p_codes, tl.reshape(b_codes, [BV, BK // WIDTH, WIDTH]), mask=mask)
        bad = tl.max(b_finite.to(tl.int32) ^ 1)
    return bad


@triton.jit
def round_trip_tile(
    tile,
    D_K: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    CVT: tl.constexpr = True,
):
    """What :func:`load_tile` gives after :func:`store_tile` of ``tile``, bit for bit: float32 [BV, BK].

    Touches no memory. Rows that do not exist must be zero in ``tile``; they stay zero.
    """
    if BK != D_K:
        tile = tl.where((tl.arange(0, BK) < D_K)[None, :], tile, 0.0)
    if FORMAT == _FP32:
        b_tile = tile
    elif FORMAT == _NVFP4:
        b_magnitude, _, b_sign, _, _, b_d, _ = _quantize_nvfp4(tile, BV, BK, CVT)
        b_value = (b_magnitude.to(tl.int32, bitcast=True) | b_sign).to(tl.float32, bitcast=True)
        b_tile = tl.reshape(b_value * b_d[:, :, None], [BV, BK])
        if D_K % 16 != 0:
            b_tile = tl.where((tl.arange(0, BK) < D_K)[None, :], b_tile, 0.0)
    elif FORMAT == _FP8:
        b_codes, b_scale, _ = _quantize_fp8(tile, CVT)
        b_tile = _decode_e4m3(b_codes, CVT) * b_scale[:, None]
    elif FORMAT == _BF16:
        b_tile = tile.to(tl.bfloat16).to(tl.float32)
    else:
        b_tile = tile.to(tl.float16).to(tl.float32)
    return b_tile


@triton.jit
def _quantize_fp8(tile, CVT: tl.constexpr):
    """Raw E4M3 codes uint8 [BV, BK], decode scale float32 [BV], and where the tile is finite."""
    b_abs = tl.abs(tile)
    b_finite = b_abs < _INF
    b_amax = tl.max(tl.where(b_finite, b_abs, 0.0), axis=1)
    b_e = tl.where(b_amax == 0.0, 1.0, tl.minimum(tl.div_rn(448.0, b_amax), _FLT_MAX))
    b_codes = _encode_e4m3(tile * b_e[:, None], CVT)
    b_codes = tl.where(tile == tile, b_codes, 0x7F)
    return b_codes, tl.div_rn(1.0, b_e), b_finite


@triton.jit
def _quantize_nvfp4(tile, BV: tl.constexpr, BK: tl.constexpr, CVT: tl.constexpr):
    """Everything that a tile becomes in NVFP4: elements [BV, BK/16, 16], blocks [BV, BK/16], rows [BV].

    Returns:
        Magnitudes float32 in {0, .5, 1, 1.5, 2, 3, 4, 6}, their codes int32 0..7, sign bits int32 (bit 31),
        where the tile is finite, raw E4M3 block scales uint8, decode scales of blocks float32, decode scales
        of rows float32.
    """
    b_x = tl.reshape(tile, [BV, BK // 16, 16])
    b_x = tl.where(b_x == b_x, b_x, _INF)
    b_abs = tl.abs(b_x)
    b_finite = b_abs < _INF
    b_bmax = tl.max(tl.where(b_finite, b_abs, 0.0), axis=2)
    b_amax = tl.max(b_bmax, axis=1)
    b_big_s = tl.where(b_amax == 0.0, 1.0, tl.minimum(tl.div_rn(2688.0, b_amax), _FLT_MAX))
    b_s2 = tl.div_rn(1.0, b_big_s)
    b_s8 = _encode_e4m3(b_bmax * (b_big_s * 0.16666666666666666)[:, None], CVT)
    b_d = _decode_e4m3(b_s8, CVT) * b_s2[:, None]
    b_r = tl.minimum(tl.div_rn(1.0, b_d), _FLT_MAX)
    b_y = tl.minimum(b_abs * b_r[:, :, None], 6.0)
    # E2M1 has a quantum of .5, 1 or 2 by binade from 1 on. Adding 2^22 times the binade's power of two leaves
    # exactly that quantum as the last place, so the addition rounds, to nearest even, and the sum's bits
    # count quanta.
    b_binade = tl.maximum(b_y, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
    b_shift = b_binade + 0x0B000000
    b_sum = b_y + b_shift.to(tl.float32, bitcast=True)
    b_magnitude = b_sum - b_shift.to(tl.float32, bitcast=True)
    b_code = b_sum.to(tl.int32, bitcast=True) - b_shift + ((b_binade >> 22) - 254)
    b_sign = b_x.to(tl.int32, bitcast=True) & -0x80000000
    return b_magnitude, b_code, b_sign, b_finite, b_s8, b_d, b_s2


@triton.jit
def _encode_e4m3(x, CVT: tl.constexpr):
    """Raw E4M3FN bits uint8 of float32 x, nearest even, saturating at ±448; a NaN gives any code."""
    x = tl.clamp(x, -448.0, 448.0)
    if CVT:
        b_codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        b_bits = x.to(tl.int32, bitcast=True)
        b_abs = tl.abs(x)
        b_magnitude = b_bits & 0x7FFFFFFF
        b_normal = ((b_magnitude + 0x7FFFF + ((b_magnitude >> 20) & 1)) >> 20) - 960
        # Below 2^-6 the quantum is 2^-9, the last place of 2^14.
        b_tiny = (b_abs + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        b_codes = tl.where(b_abs < 0.015625, b_tiny, b_normal) | ((b_bits >> 24) & 0x80)
        b_codes = b_codes.to(tl.uint8)
    return b_codes


@triton.jit
def _decode_e4m3(codes, CVT: tl.constexpr):
    """Float32 values of raw E4M3FN bits uint8."""
    if CVT:
        b_values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # s|eeee|mmm at bits 15, 13..10, 9..7 is a float16 of 2^-8 times its value, subnormals included.
        b_half = ((codes.to(tl.int16) << 8) >> 1) & -0x4080
        b_values = b_half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        b_values = tl.where((codes & 0x7F) == 0x7F, float("nan"), b_values)
    return b_values
