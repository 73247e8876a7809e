"""Triton device functions that read and write tiles of a stored state, for the kernels of every recurrence.

Notable: the codes are those of :mod:`driftgate.quant.codecs` bit for bit. Every quotient is ``tl.div_rn``,
because ``/`` compiles to an approximation; no product is added to anything in here, so ``enable_fp_fusion``
changes nothing (a caller that adds to a loaded tile would let it: the last operation of a load is a product).
Elements of 16 bits are read and written as [BV, BK/8, 8], those of 8 bits as [BV, BK/16, 16], packed ones as
[BV, BK/2], never as [BV, BK]: Triton takes the layout of ``tl.sum``, hence its order of additions, from the widest
access of that shape, and a copy in another format must not move the bits of the recurrence. FP32 is read and written
as [BK/32 * BV, 32] (``_find_fp32``), as the baseline does.

One head as it is stored, contiguous, pointers at its first element::

    format    codes                                      block_scales            row_scales
    fp32      float32  [d_v, d_k]
    bf16      bfloat16 [d_v, d_k]
    fp16      float16  [d_v, d_k]
    fp8       uint8    [d_v, d_k], raw E4M3FN                                    float32 [d_v], decode scale
    fp8_e5m2  uint8    [d_v, d_k], raw E5M2                                      float32 [d_v], decode scale
    int8      int8     [d_v, d_k]                                                float32 [d_v], decode scale
    int16     int16    [d_v, d_k]                                                float32 [d_v], decode scale
    nvfp4     uint8    [d_v, 8*ceil(d_k/16)], even       uint8 [d_v, ceil(       float32 [d_v], decode scale
              element in the low nibble                  d_k/16)], raw E4M3FN
    mxfp4     uint8    [d_v, 16*ceil(d_k/32)], even      uint8 [d_v, ceil(
              element in the low nibble                  d_k/32)], E8M0
    mxfp8     uint8    [d_v, d_k], raw E4M3FN            uint8 [d_v, ceil(
                                                         d_k/32)], E8M0

Pointers that a format does not use are never read. Arguments shared by the functions:

* ``o_v``: int32 [BV], rows of the tile, ``i_v * BV + tl.arange(0, BV)``; rows at or beyond D_V do not exist.
* ``D_V``, ``D_K``: rows and row length of the head. ``BV``, ``BK``: the tile, powers of two, BK >=
  max(16, D_K).
* ``FORMAT``: a :class:`FormatId`, from ``FORMAT_IDS[format.name]``.
* ``CVT``: convert E4M3 and E5M2 by instruction (sm_89 and later, and the interpreter), or in integers, which
  gives the same bits.
* ``SR``: round elements at random, with ``words`` from :func:`draw_words`; scales stay nearest. Formats without
  stochastic rounding (fp32, mxfp4, mxfp8) refuse to compile with it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgate.quant.device_codecs import (
    BLOCKS,
    FORMAT_IDS,
    WIDTHS,
    FormatId,
    cast_tile,
    decode_elements,
    quantize_e2m1,
    quantize_mxfp8,
    quantize_rows,
)
from driftgate.quant.device_elements import decode_e2m1, decode_e4m3, decode_e8m0

__all__ = ["FORMAT_IDS", "FormatId", "draw_words", "load_tile", "round_trip_tile", "store_tile"]

_FP32 = tl.constexpr(int(FormatId.FP32))
_FP16 = tl.constexpr(int(FormatId.FP16))  # the last of those without scales
_NVFP4 = tl.constexpr(int(FormatId.NVFP4))
_MXFP8 = tl.constexpr(int(FormatId.MXFP8))
_INF = tl.constexpr(float("inf"))


@triton.jit
def _find_fp32(codes, o_v, D_V: tl.constexpr, D_K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    """Addresses of a tile of FP32 rows as [BK/W * BV, W], first the first W columns of all rows, and which exist.

    W is 32 elements, eight lanes of 16 bytes: a warp holds parts of four rows and not all of one, so that a sum over k
    takes 3 shuffles for four rows and not 5 for each.
    """
    W: tl.constexpr = min(32, BK)
    o_r = tl.reshape(tl.broadcast_to(o_v[None, :], (BK // W, BV)), [BK // W * BV])
    o_k = (tl.arange(0, BK // W * BV) // BV * W)[:, None] + tl.arange(0, W)[None, :]
    WHOLE: tl.constexpr = (D_V % BV == 0) and (D_K == BK)
    return codes + o_r[:, None] * D_K + o_k, (o_r < D_V)[:, None] & (o_k < D_K), WHOLE


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
    BLOCK: tl.constexpr = BLOCKS[FORMAT]
    WIDTH: tl.constexpr = WIDTHS[FORMAT]
    SCALED: tl.constexpr = FORMAT > _FP16
    B: tl.constexpr = min(BLOCK, BK)
    NB: tl.constexpr = (D_K + BLOCK - 1) // BLOCK
    if FORMAT == _FP32:
        p_codes, mask, WHOLE = _find_fp32(codes, o_v, D_V, D_K, BV, BK)
        if WHOLE:
            b_tile = tl.load(p_codes)
        else:
            b_tile = tl.load(p_codes, mask=mask, other=0.0)
        W: tl.constexpr = min(32, BK)
        b_tile = tl.reshape(tl.permute(tl.reshape(b_tile, [BK // W, BV, W]), (1, 0, 2)), [BV, BK])
    elif WIDTH == 2:
        o_p = tl.arange(0, BK // 2)
        mask = in_rows[:, None] & (o_p < NB * (BLOCK // 2))[None, :]
        p_codes = codes + o_v[:, None] * (NB * (BLOCK // 2)) + o_p[None, :]
        b_bytes = tl.load(p_codes, mask=mask, other=0).to(tl.int16)
        b_low = ((b_bytes << 12) >> 3) & -0x7200
        b_high = ((b_bytes << 8) >> 3) & -0x7200
        b_values = decode_e2m1(tl.reshape(tl.join(b_low, b_high), [BV, BK // B, B]))
        b_d = _load_block_scales(block_scales, row_scales, o_v, in_rows, NB, BK // B, FORMAT, CVT)
        b_tile = tl.reshape(b_values * b_d[:, :, None], [BV, BK])
        if D_K % BLOCK != 0:
            b_tile = tl.where((tl.arange(0, BK) < D_K)[None, :], b_tile, 0.0)
    else:
        o_k = tl.arange(0, BK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        mask = in_rows[:, None, None] & (o_k < D_K)[None, :, :]
        p_codes = codes + o_v[:, None, None] * D_K + o_k[None, :, :]
        b_codes = tl.load(p_codes, mask=mask, other=0)
        if FORMAT == _MXFP8:
            b_d = _load_block_scales(block_scales, row_scales, o_v, in_rows, NB, BK // B, FORMAT, CVT)
            b_values = tl.reshape(decode_e4m3(b_codes, CVT), [BV, BK // B, B]) * b_d[:, :, None]
        else:
            b_values = decode_elements(b_codes, FORMAT, CVT)
            if SCALED:
                b_scale = tl.load(row_scales + o_v, mask=in_rows, other=0.0)
                b_values = b_values * b_scale[:, None, None]
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
    SR: tl.constexpr = False,
    words=0,
):
    """Quantise ``tile`` (float32 [BV, BK]) into rows ``o_v`` of one head; 1 if it is not finite, else 0.

    The result is int32. Nearest even unless SR. Rows >= D_V and columns >= D_K of the tile are ignored and nothing
    outside the head is written; the last packed block of a row is filled up with zeros. Scales are taken over
    finite elements. A non-finite element is stored as E2M1: NaN +6, inf with its sign 6; E4M3 and E5M2: NaN 0x7F,
    inf with its sign the greatest value; integers: NaN and inf the greatest code, -inf its negative; else as it is.
    1 is returned for it, and for a finite element that becomes infinite in fp16 or bf16. Twin:
    ``driftgate.quant.encode_rows(nonfinite="saturate")``.
    """
    in_rows = o_v < D_V
    BLOCK: tl.constexpr = BLOCKS[FORMAT]
    WIDTH: tl.constexpr = WIDTHS[FORMAT]
    SCALED: tl.constexpr = FORMAT > _FP16
    B: tl.constexpr = min(BLOCK, BK)
    NB: tl.constexpr = (D_K + BLOCK - 1) // BLOCK
    if (D_V % BV) + (BK - D_K) > 0:
        tile = tl.where(in_rows[:, None] & (tl.arange(0, BK) < D_K)[None, :], tile, 0.0)
    if FORMAT == _FP32:
        tl.static_assert(not SR, "fp32 has no stochastic rounding")
        p_codes, mask, WHOLE = _find_fp32(codes, o_v, D_V, D_K, BV, BK)
        W: tl.constexpr = min(32, BK)
        b_rows = tl.reshape(tl.permute(tl.reshape(tile, [BV, BK // W, W]), (1, 0, 2)), [BK // W * BV, W])
        if WHOLE:
            tl.store(p_codes, b_rows)
        else:
            tl.store(p_codes, b_rows, mask=mask)
        # as integers, magnitudes are in the order of the floats, infinity and NaN above all others
        b_finite = tl.max(tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1) < 0x7F800000
    elif WIDTH == 2:
        _, b_code, b_sign, b_finite, b_scales, _, b_s2 = quantize_e2m1(tile, BV, BK, FORMAT, CVT, SR, words)
        b_code |= (b_sign >> 28) & 8
        b_low, b_high = tl.split(tl.reshape(b_code, [BV, BK // 2, 2]))
        o_p = tl.arange(0, BK // 2)
        mask = in_rows[:, None] & (o_p < NB * (BLOCK // 2))[None, :]
        b_bytes = (b_low | (b_high << 4)).to(tl.uint8)
        p_codes = codes + o_v[:, None] * (NB * (BLOCK // 2)) + o_p[None, :]
        tl.store(p_codes, b_bytes, mask=mask)
        if B < BLOCK:  # the tile is half a block: the other half is padding
            tl.store(p_codes + BK // 2, tl.zeros_like(b_bytes), mask=mask)
        _store_block_scales(block_scales, b_scales, o_v, in_rows, NB, BK // B)
        if FORMAT == _NVFP4:
            tl.store(row_scales + o_v, b_s2, mask=in_rows)
    else:
        if FORMAT == _MXFP8:
            b_codes, b_scales, b_finite = quantize_mxfp8(tile, BV, BK, CVT, SR)
            _store_block_scales(block_scales, b_scales, o_v, in_rows, NB, BK // B)
        elif not SCALED:
            b_codes = cast_tile(tile, FORMAT, SR, words)
            b_finite = tl.abs(b_codes.to(tl.float32)) < _INF
        else:
            b_codes, b_scale, b_finite = quantize_rows(tile, FORMAT, CVT, SR, words)
            tl.store(row_scales + o_v, b_scale, mask=in_rows)
        o_k = tl.arange(0, BK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        mask = in_rows[:, None, None] & (o_k < D_K)[None, :, :]
        p_codes = codes + o_v[:, None, None] * D_K + o_k[None, :, :]
        tl.store(p_codes, tl.reshape(b_codes, [BV, BK // WIDTH, WIDTH]), mask=mask)
    return tl.max(b_finite.to(tl.int32) ^ 1)


@triton.jit
def round_trip_tile(
    tile,
    D_K: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    CVT: tl.constexpr = True,
    SR: tl.constexpr = False,
    words=0,
):
    """What :func:`load_tile` gives after :func:`store_tile` of ``tile``, bit for bit: float32 [BV, BK].

    Touches no memory. Rows that do not exist must be zero in ``tile``; they stay zero.
    """
    BLOCK: tl.constexpr = BLOCKS[FORMAT]
    WIDTH: tl.constexpr = WIDTHS[FORMAT]
    SCALED: tl.constexpr = FORMAT > _FP16
    B: tl.constexpr = min(BLOCK, BK)
    if BK != D_K:
        tile = tl.where((tl.arange(0, BK) < D_K)[None, :], tile, 0.0)
    if FORMAT == _FP32:
        b_tile = tile
    elif WIDTH == 2:
        b_magnitude, _, b_sign, _, _, b_d, _ = quantize_e2m1(tile, BV, BK, FORMAT, CVT, SR, words)
        b_value = (b_magnitude.to(tl.int32, bitcast=True) | b_sign).to(tl.float32, bitcast=True)
        b_tile = tl.reshape(b_value * b_d[:, :, None], [BV, BK])
        if D_K % BLOCK != 0:
            b_tile = tl.where((tl.arange(0, BK) < D_K)[None, :], b_tile, 0.0)
    elif FORMAT == _MXFP8:
        b_codes, b_scales, _ = quantize_mxfp8(tile, BV, BK, CVT, SR)
        b_values = tl.reshape(decode_e4m3(b_codes, CVT), [BV, BK // B, B])
        b_tile = tl.reshape(b_values * decode_e8m0(b_scales.to(tl.int32))[:, :, None], [BV, BK])
    elif not SCALED:
        b_tile = cast_tile(tile, FORMAT, SR, words).to(tl.float32)
    else:
        b_codes, b_scale, _ = quantize_rows(tile, FORMAT, CVT, SR, words)
        b_tile = decode_elements(b_codes, FORMAT, CVT) * b_scale[:, None]
    return b_tile


@triton.jit
def draw_words(o_v, D_K: tl.constexpr, BK: tl.constexpr, seed, first_element, tokens, stream):
    """One random word for each element of a tile: uint32 [BV, BK]. Twin: ``driftgate.quant.Noise.words``.

    Philox4x32-10, key ``seed``, counter (index of the element within its layer's [heads, d_v, d_k], 64 bits; tokens,
    32; stream, 32), word 0.

    Args:
        o_v, D_K, BK: rows of the tile, row length, columns.
        seed: int64, of the plan.
        first_element: int64, index of the head's first element, ``i_head * d_v * d_k``.
        tokens: tokens that the sequence has seen, its low 32 bits count.
        stream: ``hash_stream`` of sequence and layer, its low 32 bits count.
    """
    o_k = tl.arange(0, BK).to(tl.int64)
    o = o_v.to(tl.int64)[:, None] * D_K + o_k[None, :] + first_element
    b_tokens = (tl.zeros_like(o) + tokens).to(tl.uint32)
    b_stream = (tl.zeros_like(o) + stream).to(tl.uint32)
    b_word, _, _, _ = tl.philox(seed, o.to(tl.uint32), (o >> 32).to(tl.uint32), b_tokens, b_stream, 10)
    return b_word


@triton.jit
def _load_block_scales(
    block_scales, row_scales, o_v, in_rows, NB: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr, CVT: tl.constexpr
):
    """Decode scales float32 [BV, N] of the blocks of each row, the row's scale included."""
    o_b = tl.arange(0, N)
    mask = in_rows[:, None] & (o_b < NB)[None, :]
    b_scales = tl.load(block_scales + o_v[:, None] * NB + o_b[None, :], mask=mask, other=0)
    if FORMAT == _NVFP4:
        b_s2 = tl.load(row_scales + o_v, mask=in_rows, other=0.0)
        b_d = decode_e4m3(b_scales, CVT) * b_s2[:, None]
    else:
        b_d = decode_e8m0(b_scales.to(tl.int32))
    return b_d


@triton.jit
def _store_block_scales(block_scales, b_scales, o_v, in_rows, NB: tl.constexpr, N: tl.constexpr):
    """Raw block scales uint8 [BV, N]."""
    o_b = tl.arange(0, N)
    mask = in_rows[:, None] & (o_b < NB)[None, :]
    tl.store(block_scales + o_v[:, None] * NB + o_b[None, :], b_scales, mask=mask)
