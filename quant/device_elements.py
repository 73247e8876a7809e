"""Triton device functions of elements and scales: float32 to codes and back, under :mod:`driftgate.quant.device`.

Notable: quotients are ``tl.div_rn``. Where a sum follows a product, something stands between that no compiler
contracts, or the product is exact. Stochastic roundings take the low bits of a word for each element and add them
to the top of what is discarded, as :mod:`driftgate.quant.elements` does; infinity and NaN are the caller's.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "decode_e2m1",
    "decode_e4m3",
    "decode_e5m2",
    "decode_e8m0",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e5m2",
    "encode_integer",
    "find_e8m0",
    "round_stochastic",
    "scale_rows",
]

_FLT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def scale_rows(b_abs, b_finite, TOP: tl.constexpr):
    """The factor [BV] that takes the greatest finite magnitude of each row of b_abs [BV, BK] to TOP; 1 for zeros."""
    b_amax = tl.max(tl.where(b_finite, b_abs, 0.0), axis=1)
    return tl.where(b_amax == 0.0, 1.0, tl.minimum(tl.div_rn(TOP, b_amax), _FLT_MAX))


@triton.jit
def round_stochastic(a, words, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, BITS: tl.constexpr):
    """Codes int32, without sign, of magnitudes a float32: BITS low bits of words [uint32] decide."""
    DISCARDED: tl.constexpr = 23 - MANTISSA
    b_random = (words & ((1 << BITS) - 1)).to(tl.int32)
    b_bits = a.to(tl.int32, bitcast=True)
    b_code = (b_bits + (b_random << (DISCARDED - BITS))) >> DISCARDED
    if MIN_EXPONENT > -126:
        b_code -= (MIN_EXPONENT + 126) << MANTISSA
        # Below the least normal value the quantum is fixed; all of this is exact.
        LEAST: tl.constexpr = 2.0**MIN_EXPONENT
        b_quanta = tl.minimum(a, LEAST) * (2.0 ** (MANTISSA - MIN_EXPONENT))
        b_whole = b_quanta.to(tl.int32)
        b_rest = ((b_quanta - b_whole.to(tl.float32)) * (2.0**BITS)).to(tl.int32)
        b_code = tl.where(a < LEAST, b_whole + ((b_rest + b_random) >> BITS), b_code)
    return b_code


@triton.jit
def encode_e4m3(x, CVT: tl.constexpr, SR: tl.constexpr, words):
    """Raw E4M3FN bits uint8 of float32 x, saturating at ±448; a NaN gives any code."""
    x = tl.clamp(x, -448.0, 448.0)
    b_bits = x.to(tl.int32, bitcast=True)
    b_sign = (b_bits >> 24) & 0x80
    if SR:
        b_codes = (round_stochastic(tl.abs(x), words, 3, -6, 16) | b_sign).to(tl.uint8)
    elif CVT:
        b_codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        b_magnitude = b_bits & 0x7FFFFFFF
        b_normal = ((b_magnitude + 0x7FFFF + ((b_magnitude >> 20) & 1)) >> 20) - 960
        # Below 2^-6 the quantum is 2^-9, the last place of 2^14.
        b_abs = tl.abs(x)
        b_tiny = (b_abs + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        b_codes = (tl.where(b_abs < 0.015625, b_tiny, b_normal) | b_sign).to(tl.uint8)
    return b_codes


@triton.jit
def decode_e4m3(codes, CVT: tl.constexpr):
    """Float32 values of raw E4M3FN bits uint8."""
    if CVT:
        b_values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # s|eeee|mmm at bits 15, 13..10, 9..7 is a float16 of 2^-8 times its value, subnormals included.
        b_half = ((codes.to(tl.int16) << 8) >> 1) & -0x4080
        b_values = b_half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        b_values = tl.where((codes & 0x7F) == 0x7F, float("nan"), b_values)
    return b_values


@triton.jit
def encode_e5m2(x, CVT: tl.constexpr, SR: tl.constexpr, words):
    """Raw E5M2 bits uint8 of float32 x, saturating at ±57344; a NaN gives any code."""
    x = tl.clamp(x, -57344.0, 57344.0)
    b_bits = x.to(tl.int32, bitcast=True)
    b_sign = (b_bits >> 24) & 0x80
    if SR:
        b_codes = (round_stochastic(tl.abs(x), words, 2, -14, 16) | b_sign).to(tl.uint8)
    elif CVT:
        b_codes = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        b_magnitude = b_bits & 0x7FFFFFFF
        b_normal = ((b_magnitude + 0xFFFFF + ((b_magnitude >> 21) & 1)) >> 21) - 448
        # Below 2^-14 the quantum is 2^-16, the last place of 2^7.
        b_abs = tl.abs(x)
        b_tiny = (b_abs + 128.0).to(tl.int32, bitcast=True) - 0x43000000
        b_codes = (tl.where(b_abs < 6.103515625e-05, b_tiny, b_normal) | b_sign).to(tl.uint8)
    return b_codes


@triton.jit
def decode_e5m2(codes):
    """Float32 values of raw E5M2 bits uint8: the upper half of a float16."""
    return (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def encode_integer(x, TOP: tl.constexpr, SR: tl.constexpr, words):
    """Integers int32 within ±TOP of float32 x; a NaN gives any: half to even, or floor(fl(x + 24 bits * 2^-24))."""
    x = tl.clamp(x, -TOP, TOP)
    if SR:
        b_random = (words & 0xFFFFFF).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
        # Cut off, then one down where that went up: tl.floor compiles to an instruction that flushes subnormals.
        b_sum = x + b_random
        b_codes = b_sum.to(tl.int32)
        b_codes = tl.maximum(b_codes - (b_codes.to(tl.float32) > b_sum).to(tl.int32), -int(TOP))
        b_codes = tl.minimum(b_codes, int(TOP))
    else:
        # The last place of 3*2^22 is 1, and so it is for 2^22 on either side.
        b_codes = (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return b_codes


@triton.jit
def encode_e2m1(y, SR: tl.constexpr, words):
    """Magnitudes float32 in {0, .5, 1, 1.5, 2, 3, 4, 6} and codes int32 0..7 of y >= 0, saturating at 6."""
    y = tl.minimum(y, 6.0)
    if SR:
        b_code = round_stochastic(y, words, 1, 0, 16)
        b_magnitude = decode_e2m1((b_code << 9).to(tl.int16))
    else:
        # E2M1 has a quantum of .5, 1 or 2 by binade from 1 on. Adding 2^22 times the binade's power of two leaves
        # exactly that quantum as the last place, so the addition rounds, to nearest even, and the sum's bits
        # count quanta.
        b_binade = tl.maximum(y, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
        b_shift = b_binade + 0x0B000000
        b_sum = y + b_shift.to(tl.float32, bitcast=True)
        b_magnitude = b_sum - b_shift.to(tl.float32, bitcast=True)
        b_code = b_sum.to(tl.int32, bitcast=True) - b_shift + ((b_binade >> 22) - 254)
    return b_magnitude, b_code


@triton.jit
def decode_e2m1(b_half):
    """Float32 values of E2M1 codes s|ee|m at bits 15, 11, 10, 9 of int16: float16 of 2^-14 times the value."""
    return b_half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def find_e8m0(b_bmax, TOP: tl.constexpr):
    """Codes int32 of the least powers of two that take blocks of greatest magnitude b_bmax to TOP or below."""
    b_bits = tl.div_rn(b_bmax, TOP).to(tl.int32, bitcast=True)
    b_fraction = b_bits & 0x7FFFFF
    # Below 2^-126 a float32 counts 2^-149, and 2^-127, the half of that, is the least power of two there is.
    b_above = tl.where(b_bits > 0x7FFFFF, b_fraction > 0, b_bits > 0x400000)
    return tl.minimum((b_bits >> 23) + b_above.to(tl.int32), 254)


@triton.jit
def decode_e8m0(codes):
    """Float32 powers of two of E8M0 codes int32; 255 is NaN."""
    b_bits = tl.maximum(codes << 23, 0x400000)
    return tl.where(codes == 255, float("nan"), b_bits.to(tl.float32, bitcast=True))
