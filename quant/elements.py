"""Elements of the formats in torch, CPU and CUDA: float32 to raw codes and back, nearest even or stochastic.

Values are clamped before an FP8 cast, because torch saturates some types and overflows others; nothing passes
through another narrow float on its way. ``words`` are random words, int64 in [0, 2^32), of which a rounding
takes the low ``random_bits``: they are added to the top of what would be discarded, and the carry decides, so
that P(away from zero) = floor(frac * 2^n) / 2^n with frac the distance to the nearer-to-zero code in quanta.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

__all__ = ["BF16", "E2M1", "E4M3", "E5M2", "FP16", "Element", "cast_e2m1", "cast_e4m3", "cast_e5m2"]
__all__ += ["cast_e2m1_in_place", "look_up", "round_integer"]

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Element:
    """A narrow binary float.

    Attributes:
        nearest: raw codes of float32 without NaN, nearest even.
        mantissa_bits: width of the mantissa.
        min_exponent: exponent of the least normal value.
        max_value: greatest finite magnitude.
        saturates: whether what lies beyond becomes max_value, not infinity.
        random_bits: that a stochastic rounding takes.
    """

    nearest: Callable[[Tensor], Tensor]
    mantissa_bits: int
    min_exponent: int
    max_value: float
    saturates: bool
    random_bits: int

    def encode(self, x: Tensor, words: Tensor | None = None, *, random_bits: int | None = None) -> Tensor:
        """Raw codes of float32 x without NaN: nearest even, or with words stochastic."""
        return self.nearest(x if words is None else self.round_stochastic(x, words, random_bits or self.random_bits))

    def round_stochastic(self, x: Tensor, words: Tensor, random_bits: int) -> Tensor:
        """Float32 values of codes on either side of finite x; a value beyond an infinity's threshold stays.

        In float64 dividing by a quantum, a power of two, is exact even where both are float32 subnormals.
        """
        a = x.abs().double()
        if self.saturates:
            a = a.clamp_(max=self.max_value)
        exponent = (a.clamp(min=2.0**self.min_exponent).view(torch.int64) >> 52) - self.mantissa_bits
        quantum = (exponent << 52).view(torch.float64)
        quanta = a / quantum
        whole = quanta.floor()
        discarded = ((quanta - whole) * 2**random_bits).long()
        away = discarded + (words & (2**random_bits - 1)) >= 2**random_bits
        return torch.copysign((whole + away) * quantum, x).float()


def cast_e4m3(x: Tensor) -> Tensor:
    """Raw E4M3FN bits, uint8, of float32 x without NaN: nearest even, saturating beyond ±448."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def cast_e5m2(x: Tensor) -> Tensor:
    """Raw E5M2 bits, uint8, of float32 x without NaN: nearest even, saturating beyond ±57344."""
    return x.clamp(-57344.0, 57344.0).to(torch.float8_e5m2).view(torch.uint8)


def cast_e2m1(x: Tensor) -> Tensor:
    """E2M1 codes 0..15, uint8, of float32 x without NaN: nearest even, saturating beyond ±6; -0.0 is 8."""
    return cast_e2m1_in_place(x.clone())


def cast_e2m1_in_place(x: Tensor) -> Tensor:
    """:func:`cast_e2m1`, using x as scratch: fresh buffers cost more than the arithmetic.

    The unrounded code of a magnitude a is concave and piecewise linear, 2a below 2, a + 2 below 4, a/2 + 4
    above, so it is the least of the three. Rounding each to the nearest even integer before is exact, since
    the offsets are even.
    """
    sign = (x.view(torch.int32) >> 28).bitwise_and_(8)
    a = x.abs_().clamp_(max=6.0)
    magnitude = (2 * a).round_()
    torch.minimum(magnitude, torch.round(a).add_(2), out=magnitude)
    torch.minimum(magnitude, a.mul_(0.5).round_().add_(4), out=magnitude)
    return sign.bitwise_or_(magnitude.to(torch.int32)).to(torch.uint8)


def round_integer(x: Tensor, top: int, words: Tensor | None = None) -> Tensor:
    """Float32 integers in [-top, top] of finite x: half to even, or floor(fl(x + word * 2^-24)), 24 bits of each.

    Stochastic is unbiased up to the float32 sum: by 2^-18 of a quantum for codes of 8 bits, 2^-10 for 16.
    """
    if words is None:
        return x.round().clamp_(-top, top)
    return (x + (words & 0xFFFFFF).float() * 2.0**-24).floor_().clamp_(-top, top)


E2M1 = Element(cast_e2m1, 1, 0, 6.0, True, 16)
E4M3 = Element(cast_e4m3, 3, -6, 448.0, True, 16)
E5M2 = Element(cast_e5m2, 2, -14, 57344.0, True, 16)
FP16 = Element(lambda x: x.to(torch.float16), 10, -14, 65504.0, False, 13)
BF16 = Element(lambda x: x.to(torch.bfloat16), 7, -126, torch.finfo(torch.bfloat16).max, False, 16)

Table = Literal["e4m3", "e5m2", "e8m0", "e2m1 pairs"]


@lru_cache(maxsize=64)
def _table(name: Table, device: torch.device) -> Tensor:
    """Values by byte: float32 [256]; for pairs int64 [256], the two float32 of a packed E2M1 byte."""
    byte = torch.arange(256, dtype=torch.uint8)
    if name == "e4m3":
        return byte.view(torch.float8_e4m3fn).to(torch.float32).to(device)
    if name == "e5m2":
        return byte.view(torch.float8_e5m2).to(torch.float32).to(device)
    if name == "e8m0":
        powers = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [torch.nan], dtype=torch.float64)
        return powers.to(torch.float32).to(device)
    values = torch.tensor((*_E2M1_VALUES, *(-v for v in _E2M1_VALUES)), dtype=torch.float32)
    pairs = torch.stack((values[(byte & 15).int()], values[(byte >> 4).int()]), dim=-1)
    return pairs.view(torch.int64).squeeze(-1).to(device)


def look_up(name: Table, codes: Tensor) -> Tensor:
    """Values of raw codes, uint8 [...]: float32 [...], of E2M1 pairs as int64 that hold two float32."""
    table = _table(name, codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)
