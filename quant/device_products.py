"""Products of a stored tile with two vectors, S x and S y, for readouts of narrow formats: on tensor cores.

Notable: codes of E2M1 times their E4M3 block scale, of E4M3, E5M2, INT8 and FP16 are float16 numbers without rounding,
so a tile is never converted to float32. The vectors are: each is brought to a fixed magnitude by a power of two and
split into three float16 that add up to x (to 2^-22 of it or better), and these columns go through one ``tl.dot`` with
float32 accumulation. Formats whose codes are no float16 (fp32, bf16, int16, MX) take sums over the tile instead.
Nothing here is bit-exact with a sum over ``load_tile``; exact routes do not use it. Arguments as in ``device.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgate.quant.device import load_tile
from driftgate.quant.device_codecs import FormatId
from driftgate.quant.device_elements import decode_e4m3

__all__ = ["load_stored", "multiply_stored", "prepare_vectors", "stack_columns", "take_columns"]

_FP16 = tl.constexpr(int(FormatId.FP16))
_FP8 = tl.constexpr(int(FormatId.FP8))
_FP8_E5M2 = tl.constexpr(int(FormatId.FP8_E5M2))
_HALVES = tl.constexpr(tuple(f.name in ("FP16", "FP8", "FP8_E5M2", "INT8") for f in FormatId))
"""By FORMAT: whether a code is a float16 as it is."""
_NVFP4 = tl.constexpr(int(FormatId.NVFP4))
_UNPACK = tl.constexpr(
    """{
    .reg .b32 a, b;
    shl.b32 a, $8, 9;  and.b32 a, a, 0x0E000E00; shl.b32 b, $8, 12; lop3.b32 a, b, 0x80008000, a, 0xEA;
    mul.f16x2 a, a, $9; mov.b32 {$0, $1}, a;
    shl.b32 a, $8, 5;  and.b32 a, a, 0x0E000E00; shl.b32 b, $8, 8;  lop3.b32 a, b, 0x80008000, a, 0xEA;
    mul.f16x2 a, a, $9; mov.b32 {$2, $3}, a;
    shl.b32 a, $8, 1;  and.b32 a, a, 0x0E000E00; shl.b32 b, $8, 4;  lop3.b32 a, b, 0x80008000, a, 0xEA;
    mul.f16x2 a, a, $9; mov.b32 {$4, $5}, a;
    shr.b32 a, $8, 3;  and.b32 a, a, 0x0E000E00; lop3.b32 a, $8, 0x80008000, a, 0xEA;
    mul.f16x2 a, a, $9; mov.b32 {$6, $7}, a;
    }"""
)
"""A word of eight E2M1 codes n0 … n7 to float16 in the order n0 n4 n1 n5 n2 n6 n3 n7, times two equal float16.

s|ee|m at bits 15, 11, 10, 9 is 2^-14 of E2M1's value. Both halves of a word hold their codes at the same bits, so that
one shift serves two: hence the order, in which ``prepare_vectors`` puts the vectors too.
"""


@triton.jit
def load_stored(
    codes,
    block_scales,
    row_scales,
    o_v,
    D_V: tl.constexpr,
    D_K: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    PTX: tl.constexpr,
):
    """Rows ``o_v`` of one head for ``multiply_stored``: elements, block scales and row scales as they are stored.

    Nothing is computed here, so that a caller has all its loads on their way before it uses one. Formats whose codes
    are no float16 are loaded as float32 tiles. PTX: E2M1 as words of eight.
    """
    WHOLE: tl.constexpr = (D_V % BV == 0) and (D_K == BK)
    in_rows = o_v < D_V
    b_scales, b_scale = 0, 1.0
    if (FORMAT == _NVFP4) and (BK >= 32):
        NB: tl.constexpr = (D_K + 15) // 16
        o_b = tl.arange(0, BK // 16)
        p_scales = block_scales + o_v[:, None] * NB + o_b[None, :]
        b_scale = tl.load(row_scales + o_v, mask=in_rows, other=0.0)
        if PTX:
            o_w = tl.arange(0, BK // 8)[None, :]
            p_codes = codes.to(tl.pointer_type(tl.int32), bitcast=True) + o_v[:, None] * (NB * 2) + o_w
            used = in_rows[:, None] & (o_w < NB * 2)
        else:
            o_p = tl.arange(0, BK // 2)[None, :]
            p_codes = codes + o_v[:, None] * (NB * 8) + o_p
            used = in_rows[:, None] & (o_p < NB * 8)
        if WHOLE:
            b_codes, b_scales = tl.load(p_codes), tl.load(p_scales)
        else:
            b_codes = tl.load(p_codes, mask=used, other=0)
            b_scales = tl.load(p_scales, mask=in_rows[:, None] & (o_b < NB)[None, :], other=0)
    elif _HALVES[FORMAT]:
        WIDTH: tl.constexpr = 8 if FORMAT == _FP16 else 16
        o_k = tl.arange(0, BK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        p_codes = codes + o_v[:, None, None] * D_K + o_k[None, :, :]
        if WHOLE:
            b_codes = tl.load(p_codes)
        else:
            b_codes = tl.load(p_codes, mask=in_rows[:, None, None] & (o_k < D_K)[None, :, :], other=0)
        if FORMAT != _FP16:
            b_scale = tl.load(row_scales + o_v, mask=in_rows, other=0.0)
    else:
        b_codes = load_tile(codes, block_scales, row_scales, o_v, D_V, D_K, BV, BK, FORMAT)
    return b_codes, b_scales, b_scale


@triton.jit
def prepare_vectors(b_x, b_y, BK: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr):
    """Two vectors float32 [BK], 0 in columns >= D_K, as ``multiply_stored`` takes them: once for all tiles."""
    if (FORMAT == _NVFP4) and (BK >= 32) and PTX:
        b_x = tl.reshape(tl.permute(tl.reshape(b_x, [BK // 8, 2, 4]), (0, 2, 1)), [BK])
        b_y = tl.reshape(tl.permute(tl.reshape(b_y, [BK // 8, 2, 4]), (0, 2, 1)), [BK])
    if _HALVES[FORMAT] or ((FORMAT == _NVFP4) and (BK >= 32)):
        b_x, b_fx = _scale_vector(b_x)
        b_y, b_fy = _scale_vector(b_y)
        return stack_columns(b_x, b_y, BK, tl.float16), b_fx, b_fy
    else:
        return b_x, b_y, 1.0


@triton.jit
def multiply_stored(
    b_stored, b_vectors, BV: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, BOTH: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """S x and S y (0 unless BOTH) of what ``load_stored`` gave: float32 [BV] each.

    b_vectors: of ``prepare_vectors``. PTX: unpack E2M1 with inline PTX, the same bits.
    Twin: ``driftgate.quant.decode_rows(...) @ x``.
    """
    b_codes, b_scales, b_scale = b_stored
    if _HALVES[FORMAT] or ((FORMAT == _NVFP4) and (BK >= 32)):
        if FORMAT == _NVFP4:
            b_tile = unpack_e2m1(b_codes, b_scales, BV, BK, PTX)
        elif FORMAT == _FP8:
            b_tile = b_codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        elif FORMAT == _FP8_E5M2:
            b_tile = (b_codes.to(tl.int16) << 8).to(tl.float16, bitcast=True)
        else:
            b_tile = b_codes.to(tl.float16)
        b_columns, b_fx, b_fy = b_vectors
        b_Sx, b_Sy = take_columns(tl.dot(tl.reshape(b_tile, [BV, BK]), b_columns), BV)
        if FORMAT == _NVFP4:
            b_scale = b_scale * 128.0
        b_Sx, b_Sy = b_Sx * b_scale * b_fx, b_Sy * b_scale * b_fy
    else:
        b_x, b_y, _ = b_vectors
        b_Sx = tl.sum(b_codes * b_x[None, :], axis=1)
        b_Sy = tl.zeros([BV], tl.float32)
        if BOTH:
            b_Sy = tl.sum(b_codes * b_y[None, :], axis=1)
    return b_Sx, b_Sy


@triton.jit
def unpack_e2m1(b_codes, b_scales, BV: tl.constexpr, BK: tl.constexpr, PTX: tl.constexpr):
    """NVFP4 rows times their block scales and 2^-7: float16 [BV, BK], exact: multiples of 2^-17 of six bits.

    With PTX the elements are in the order of ``_UNPACK``.
    """
    b_s = (decode_e4m3(b_scales, True) * 128.0).to(tl.float16)
    if PTX:
        b_bits = b_s.to(tl.uint16, bitcast=True).to(tl.int32)
        b_twice = tl.broadcast_to((b_bits | (b_bits << 16))[:, :, None], (BV, BK // 16, 2))
        b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7 = tl.inline_asm_elementwise(
            _UNPACK, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [b_codes, tl.reshape(b_twice, [BV, BK // 8])],
            dtype=(tl.float16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
        b_even = tl.join(tl.join(b_0, b_4), tl.join(b_2, b_6))
        b_odd = tl.join(tl.join(b_1, b_5), tl.join(b_3, b_7))
        b_tile = tl.join(b_even, b_odd)
    else:
        b_wide = b_codes.to(tl.int16)
        b_low = (((b_wide << 12) >> 3) & -0x7200).to(tl.float16, bitcast=True)
        b_high = (((b_wide << 8) >> 3) & -0x7200).to(tl.float16, bitcast=True)
        b_tile = tl.reshape(tl.join(b_low, b_high), [BV, BK // 16, 16]) * b_s[:, :, None]
    return tl.reshape(b_tile, [BV, BK])


@triton.jit
def _scale_vector(b_x):
    """x·f and 1/f, where the power of two f brings the greatest element to 2^13 … 2^14."""
    b_bits = tl.max(tl.abs(b_x), axis=0).to(tl.int32, bitcast=True) & 0x7F800000
    b_f = tl.where(b_bits >= 0x07000000, (0x7F000000 - b_bits) + 0x06800000, 0x3F800000)
    b_inverse = (0x7F000000 - b_f).to(tl.float32, bitcast=True)
    return b_x * b_f.to(tl.float32, bitcast=True), b_inverse


@triton.jit
def split_parts(b_x, KIND: tl.constexpr):
    """High, middle and low numbers of KIND (float16 or bfloat16) that add up to x, up to 2^-22 or better of x."""
    b_high = b_x.to(KIND)
    b_rest = b_x - b_high.to(tl.float32)
    b_middle = b_rest.to(KIND)
    return b_high, b_middle, (b_rest - b_middle.to(tl.float32)).to(KIND)


@triton.jit
def stack_columns(b_x, b_y, N: tl.constexpr, KIND: tl.constexpr):
    """The parts of two float32 vectors [N] as columns of KIND [N, 8], for ``take_columns``."""
    b_hx, b_mx, b_lx = split_parts(b_x, KIND)
    b_hy, b_my, b_ly = split_parts(b_y, KIND)
    b_zero = tl.zeros_like(b_hx)
    b_1 = tl.join(tl.join(b_hx, b_mx), tl.join(b_lx, b_zero))
    b_2 = tl.join(tl.join(b_hy, b_my), tl.join(b_ly, b_zero))
    return tl.reshape(tl.join(b_1, b_2), [N, 8])


@triton.jit
def take_columns(b_both, M: tl.constexpr):
    """Products with x and y, [M] each, from float32 [M, 8]."""
    return tl.split(tl.sum(tl.reshape(b_both, [M, 4, 2]), axis=1))
