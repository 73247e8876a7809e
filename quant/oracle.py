"""Exact oracle of the formats: NumPy, one element and one row at a time, slow, meant to be read.

Element values follow from exponent and mantissa widths; a code is found by searching the ordered magnitudes
and comparing with the midpoint, in float64, where both are exact. It shares nothing with
:mod:`driftgate.quant.codecs`. Scale rules: see there; every float32 operation below is one ``np.float32``
operation, hence one rounding.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from math import copysign, inf, isfinite, isinf, isnan

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "ELEMENTS",
    "INTEGERS",
    "ElementType",
    "OracleRow",
    "decode_row",
    "encode_row",
    "pack_nibbles",
]

_F32 = np.float32
_FLT_MAX = np.finfo(np.float32).max


@dataclass(frozen=True)
class ElementType:
    """A binary float with sign, exponent and mantissa fields and subnormals; bias 2^(exponent_bits-1) - 1.

    Attributes:
        exponent_bits: width of the exponent.
        mantissa_bits: width of the mantissa.
        top: code of the greatest finite magnitude.
        inf_code: code of infinity, None where there is none.
        nan_code: code that a NaN is given.
        saturates: whether values beyond the top become the top, not infinity.
    """

    exponent_bits: int
    mantissa_bits: int
    top: int
    inf_code: int | None
    nan_code: int
    saturates: bool = True

    @property
    def sign_code(self) -> int:
        """The sign bit."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def magnitude(self, code: int) -> float:
        """Value of a code without sign; beyond ``top`` what the fields would mean if they were finite."""
        bias = 2 ** (self.exponent_bits - 1) - 1
        exponent, mantissa = code >> self.mantissa_bits, code % (1 << self.mantissa_bits)
        if exponent == 0:
            return float(mantissa * 2.0 ** (1 - bias - self.mantissa_bits))
        return float((mantissa + (1 << self.mantissa_bits)) * 2.0 ** (exponent - bias - self.mantissa_bits))

    def value(self, code: int) -> float:
        """Value of a code with sign."""
        unsigned = code & ~self.sign_code
        if unsigned > self.top:
            magnitude = inf if unsigned == self.inf_code else float("nan")
        else:
            magnitude = self.magnitude(unsigned)
        return copysign(magnitude, -1 if code & self.sign_code else 1)

    def nearest(self, x: float) -> int:
        """Code nearest to x, ties to the even code."""
        if isnan(x):
            return self.nan_code
        a = abs(x)
        beyond = self.top + 1
        if isinf(a):
            code = beyond
        else:
            below = bisect_right(range(beyond + 1), a, key=self.magnitude) - 1
            midpoint = (self.magnitude(below) + self.magnitude(below + 1)) / 2
            round_up = a > midpoint or (a == midpoint and below % 2 == 1)
            code = min(below + round_up, beyond)
        return self._signed(code, x)

    def stochastic(self, x: float, bits: int, n_bits: int) -> int:
        """Code on either side of finite x: the one away from zero if frac*2^n, cut off, and the bits reach 2^n.

        frac is the distance from the code towards zero, in units of the distance between the two.
        """
        a = min(abs(x), self.magnitude(self.top)) if self.saturates else abs(x)
        beyond = self.top + 1
        below = min(bisect_right(range(beyond + 1), a, key=self.magnitude) - 1, beyond)
        low, high = (Fraction(self.magnitude(code)) for code in (below, below + 1))
        discarded = int((Fraction(a) - low) / (high - low) * 2**n_bits)
        away = below < beyond and discarded + bits >= 2**n_bits
        return self._signed(below + away, x)

    def _signed(self, code: int, x: float) -> int:
        """A code with the sign of x, what lies beyond the top saturated or infinite."""
        if code > self.top:
            code = self.top if self.saturates or self.inf_code is None else self.inf_code
        return code | self.sign_code if copysign(1, x) < 0 else code


E2M1 = ElementType(2, 1, top=0x7, inf_code=None, nan_code=0x7)
E4M3 = ElementType(4, 3, top=0x7E, inf_code=None, nan_code=0x7F)
E5M2 = ElementType(5, 2, top=0x7B, inf_code=0x7C, nan_code=0x7F)

#: Element type by format; fp32 is the input itself.
ELEMENTS = {
    "bf16": ElementType(8, 7, top=0x7F7F, inf_code=0x7F80, nan_code=0x7FC0, saturates=False),
    "fp16": ElementType(5, 10, top=0x7BFF, inf_code=0x7C00, nan_code=0x7E00, saturates=False),
    "fp8": E4M3,
    "fp8_e5m2": E5M2,
    "nvfp4": E2M1,
    "mxfp4": E2M1,
    "mxfp8": E4M3,
}

#: Greatest code of the integer formats.
INTEGERS = {"int8": 127, "int16": 32767}


@dataclass(frozen=True)
class OracleRow:
    """One stored row.

    Attributes:
        codes: raw bits of each element, unpacked, integers signed; nvfp4 and mxfp4: padded to whole blocks.
        block_scales: raw bits of each block's scale: E4M3 of 16 elements (nvfp4), E8M0 of 32 (mxfp4, mxfp8).
        scale: FP32 decode scale, None for formats without.
    """

    codes: list[int]
    block_scales: list[int] | None = None
    scale: np.float32 | None = None


def encode_row(name: str, row: NDArray[np.float32], *, amax: np.float32 | None = None) -> OracleRow:
    """Store one row, nearest even. A non-finite element counts in no amax and saturates its own code.

    Args:
        name: format name.
        row: float32 [d_k].
        amax: greatest magnitude of the scope that the row belongs to; None: of the row.
    """
    if amax is None:
        amax = _amax(row)
    with np.errstate(all="ignore"):
        if name == "fp32":
            return OracleRow([int(bits) for bits in row.view(np.uint32)])
        if name in ("fp8", "fp8_e5m2"):
            element = ELEMENTS[name]
            e = _encode_scale(_F32(element.magnitude(element.top)), amax)
            return OracleRow([element.nearest(float(x * e)) for x in row], scale=_F32(1) / e)
        if name in INTEGERS:
            e = _encode_scale(_F32(INTEGERS[name]), amax)
            return OracleRow([_nearest_integer(float(x * e), INTEGERS[name]) for x in row], scale=_F32(1) / e)
        if name == "nvfp4":
            return _encode_nvfp4(row, amax)
        if name in ("mxfp4", "mxfp8"):
            return _encode_mx(name, row)
        return OracleRow([ELEMENTS[name].nearest(float(x)) for x in row])


def decode_row(name: str, stored: OracleRow, d_k: int) -> NDArray[np.float32]:
    """The values of a stored row, float32 [d_k]."""
    if name == "fp32":
        return np.array(stored.codes, np.uint32).view(np.float32)
    values = [_F32(code if name in INTEGERS else ELEMENTS[name].value(code)) for code in stored.codes]
    with np.errstate(all="ignore"):
        if name in ("fp8", "fp8_e5m2", *INTEGERS):
            assert stored.scale is not None
            values = [value * stored.scale for value in values]
        if name in ("mxfp4", "mxfp8"):
            assert stored.block_scales is not None
            values = [value * _F32(2.0 ** (stored.block_scales[i // 32] - 127)) for i, value in enumerate(values)]
        if name == "nvfp4":
            assert stored.scale is not None
            assert stored.block_scales is not None
            steps = [_F32(E4M3.value(s8)) * stored.scale for s8 in stored.block_scales]
            values = [value * steps[i // 16] for i, value in enumerate(values)]
    return np.array(values[:d_k], np.float32)


def pack_nibbles(codes: list[int]) -> list[int]:
    """Two 4-bit codes a byte, the even element in the low nibble."""
    return [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]


def _encode_nvfp4(row: NDArray[np.float32], amax: np.float32) -> OracleRow:
    padded = np.concatenate([row, np.zeros(-len(row) % 16, np.float32)])
    big_s = _encode_scale(_F32(2688), amax)
    scale = _F32(1) / big_s
    codes: list[int] = []
    block_scales: list[int] = []
    for block in padded.reshape(-1, 16):
        s8 = E4M3.nearest(float(_amax(block) * (big_s * (_F32(1) / _F32(6)))))
        d = _F32(E4M3.value(s8)) * scale
        r = min(_F32(1) / d, _FLT_MAX)
        block_scales.append(s8)
        codes += [E2M1.nearest(float(x * r)) for x in block]
    return OracleRow(codes, block_scales, scale)


def _encode_mx(name: str, row: NDArray[np.float32]) -> OracleRow:
    """Blocks of 32 by the rule ``rceil``: the least power of two that takes fl(bmax/max) to 1 or below."""
    element = ELEMENTS[name]
    padded = np.concatenate([row, np.zeros(-len(row) % 32, np.float32)])
    codes: list[int] = []
    block_scales: list[int] = []
    for block in padded.reshape(-1, 32):
        ratio = float(_amax(block) / _F32(element.magnitude(element.top)))
        exponent = next((u for u in range(-127, 128) if 2.0**u >= ratio), 127)
        block_scales.append(exponent + 127)
        codes += [element.nearest(float(x * _F32(2.0**-exponent))) for x in block]
    return OracleRow(codes if name == "mxfp4" else codes[: len(row)], block_scales)


def _nearest_integer(x: float, top: int) -> int:
    """Half to even, within ±top; NaN is top."""
    return top if isnan(x) else round(max(-top, min(top, x)))


def _amax(values: NDArray[np.float32]) -> np.float32:
    return _F32(max((abs(float(x)) for x in values if isfinite(x)), default=0.0))


def _encode_scale(top: np.float32, amax: np.float32) -> np.float32:
    return _F32(1) if amax == 0 else _F32(min(top / amax, _FLT_MAX))
