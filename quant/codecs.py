"""Fast codecs in torch, CPU and CUDA: every code and scale equals the oracle bit for bit.

What keeps the bits: each arrow below is one float32 rounding, so every product and quotient is an operation
of its own; quotients divide tensor by tensor (``448 / x`` is a rounded reciprocal times 448 in torch);
values are clamped before an FP8 cast; nothing passes through a 16-bit float on its way. fl() = one rounding
to nearest even.

    fp8    e  = min(fl(448/amax), FLT_MAX), 1 if amax = 0     scale = fl(1/e)
           code = e4m3(fl(x*e))                               x' = fl(code*scale)
    nvfp4  S  = min(fl(2688/amax), FLT_MAX), 1 if amax = 0    scale = fl(1/S)        2688 = 6*448
           s8 = e4m3(fl(bmax*fl(S*fl(1/6))))                  d = fl(s8*scale)
           code = e2m1(fl(x*min(fl(1/d), FLT_MAX)))           x' = fl(code*d)

amax and bmax are the greatest magnitudes of a scope and of a 16-block. These are the ``encode`` rule of
FlashInfer's state kernels and the exact-math NVFP4 rule of TransformerEngine and FlashInfer. -0.0 keeps its
sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from driftgate.quant.formats import Format

__all__ = ["CODECS", "Codec", "EncodedRows", "cast_e2m1", "cast_e4m3", "decode_rows", "encode_rows"]
__all__ += ["find_nonfinite_rows", "raise_nonfinite"]

_FLT_MAX = torch.finfo(torch.float32).max
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 16


class EncodedRows(NamedTuple):
    """Rows as a state pool stores them; see :meth:`Format.bytes_per_row` for their size.

    Attributes:
        codes: [..., d_v, d_k] in the storage dtype; nvfp4: packed uint8 [..., d_v, 8*ceil(d_k/16)].
        block_scales: nvfp4: raw E4M3 bits, uint8 [..., d_v, ceil(d_k/16)]; None for formats without blocks.
        row_scales: FP32 decode scales [..., d_v]; None for formats without scales.
    """

    codes: Tensor
    block_scales: Tensor | None
    row_scales: Tensor | None


@dataclass(frozen=True)
class Codec:
    """How one format computes.

    Attributes:
        encode: finite x [..., d_k] float32 and amax of each scope, broadcastable to [..., 1], to codes, block
            scales or None, and FP32 scales shaped like amax or None. May return x itself as codes.
        decode: codes, block scales, scales and d_k to float32 [..., d_k].
        saturate: codes and x, the codes of non-finite elements replaced by what the format makes of them.
    """

    encode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None, Tensor | None]]
    decode: Callable[[Tensor, Tensor | None, Tensor | None, int], Tensor]
    saturate: Callable[[Tensor, Tensor], Tensor]


def encode_rows(fmt: Format, x: Tensor, *, nonfinite: Literal["raise", "saturate"] = "raise") -> EncodedRows:
    """Quantise each row x[..., :] over d_k, nearest even, with one FP32 scale a row where the format has one.

    Args:
        fmt: target format.
        x: float32 [..., d_v, d_k], any leading axes (also of length 0), any strides.
        nonfinite: ``raise``, or what kernels do: ``saturate`` takes amax over finite elements and saturates
            the code of each other one (nvfp4: NaN +6, inf ±6; fp8: NaN 0x7F, inf ±448; wide formats keep it);
            :func:`find_nonfinite_rows` tells where.

    Returns:
        Codes and scales on x's device. For fp32 the codes are x itself, not a copy. A finite element beyond
        the greatest fp16 or bf16 becomes an infinite code.

    Raises:
        ValueError: x is not float32 or has no d_k; a non-finite element and ``nonfinite="raise"``.
    """
    if x.dtype != torch.float32 or x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: expected float32 [..., d_k], got {x.dtype} {list(x.shape)}")
    if nonfinite not in ("raise", "saturate"):
        raise ValueError(f"nonfinite: expected 'raise' or 'saturate', got {nonfinite!r}")
    codec = CODECS[fmt.name]
    x = x.detach()
    amax = _max_magnitude(x)
    if bool(amax.isfinite().all()):
        codes, block_scales, scales = codec.encode(x, amax)
    elif nonfinite == "raise":
        raise_nonfinite(fmt, x)
    else:
        finite = torch.where(x.isfinite(), x, 0.0)
        codes, block_scales, scales = codec.encode(finite, _max_magnitude(finite))
        codes = codec.saturate(codes, x)
    return EncodedRows(codes, block_scales, None if scales is None else scales.squeeze(-1))


def decode_rows(
    fmt: Format,
    codes: Tensor,
    block_scales: Tensor | None,
    row_scales: Tensor | None,
    d_k: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values that :func:`encode_rows` stored.

    Args:
        fmt: format of the codes.
        codes: as :class:`EncodedRows`, any leading axes.
        block_scales: as :class:`EncodedRows`.
        row_scales: as :class:`EncodedRows`.
        d_k: elements of a row; the padding of a last block is dropped.
        dtype: of the result; values are computed in float32 and then cast.

    Returns:
        x [..., d_v, d_k]; for fp32 the codes themselves, not a copy.

    Raises:
        ValueError: codes have another dtype or row length, or a scale is missing or not expected.
    """
    if codes.dtype != fmt.storage_dtype or codes.shape[-1] != fmt.codes_per_row(d_k):
        raise ValueError(
            f"codes: expected {fmt.storage} [..., {fmt.codes_per_row(d_k)}] for {fmt.name} rows of {d_k}, "
            f"got {codes.dtype} {list(codes.shape)}"
        )
    for name, scales, wanted in (
        ("block_scales", block_scales, fmt.block_scaled),
        ("row_scales", row_scales, fmt.scope_scaled),
    ):
        if (scales is not None) != wanted:
            expected, got = ("a tensor", "None") if wanted else ("None", "a tensor")
            raise ValueError(f"{name}: expected {expected} for {fmt.name}, got {got}")
    scales = None if row_scales is None else row_scales.unsqueeze(-1)
    return CODECS[fmt.name].decode(codes, block_scales, scales, d_k).to(dtype)


def find_nonfinite_rows(x: Tensor) -> Tensor:
    """Which rows x[..., :] hold a NaN or an infinity: bool [..., d_v]. Does not wait for the device."""
    return _max_magnitude(x.detach()).isfinite().logical_not_().squeeze(-1)


def raise_nonfinite(fmt: Format, x: Tensor) -> NoReturn:
    """Raise a ValueError that names the first non-finite element of x [slots, heads, d_v, d_k].

    A tensor with other than four axes counts as one slot and one head, its leading axes as rows.
    """
    bad = x.isfinite().logical_not_()
    index: list[int] = bad.nonzero()[0].tolist()
    slot, head, leading = (*index[:2], 2) if x.dim() == 4 else (0, 0, 0)
    row = 0
    for i, length in zip(index[leading:-1], x.shape[leading:-1], strict=True):
        row = row * length + i
    value = x[tuple(index)].item()
    raise ValueError(
        f"x: expected finite values for {fmt.name}, got {value} at slot {slot}, head {head}, "
        f"row {row}, element {index[-1]} (x{index}; {int(bad.sum())} of {x.numel()} are not finite)"
    )


def cast_e4m3(x: Tensor) -> Tensor:
    """Raw E4M3FN bits, uint8, of float32 x without NaN: nearest even, saturating beyond ±448."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def cast_e2m1(x: Tensor) -> Tensor:
    """E2M1 codes 0..15, uint8, of float32 x without NaN: nearest even, saturating beyond ±6; -0.0 is 8."""
    return _cast_e2m1_in_place(x.clone())


def _cast_e2m1_in_place(x: Tensor) -> Tensor:
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


def _max_magnitude(x: Tensor) -> Tensor:
    """Greatest magnitude over the last axis, kept; inf or NaN where an element is.

    Magnitudes of floats order as their bits do, and integer maxima over short axes are the faster ones.
    """
    bits = x.view(torch.int32) & 0x7FFFFFFF
    return bits.amax(-1, keepdim=True).view(torch.float32)


def _divide(numerator: float, x: Tensor) -> Tensor:
    """fl(numerator / x), capped at FLT_MAX."""
    return torch.div(torch.full_like(x, numerator), x).clamp_(max=_FLT_MAX)


def _encode_scale(max_code: float, amax: Tensor) -> Tensor:
    """The factor that takes amax to max_code; 1 for a scope of zeros."""
    return torch.where(amax == 0, 1.0, _divide(max_code, amax))


@lru_cache(maxsize=64)
def _table(name: Literal["e4m3", "e2m1 pairs"], device: torch.device) -> Tensor:
    """Values by byte: float32 [256] of E4M3; int64 [256], the two float32 of a packed E2M1 byte."""
    byte = torch.arange(256, dtype=torch.uint8)
    if name == "e4m3":
        return byte.view(torch.float8_e4m3fn).to(torch.float32).to(device)
    values = torch.tensor((*_E2M1_VALUES, *(-v for v in _E2M1_VALUES)), dtype=torch.float32)
    pairs = torch.stack((values[(byte & 15).int()], values[(byte >> 4).int()]), dim=-1)
    return pairs.view(torch.int64).squeeze(-1).to(device)


def _look_up(name: Literal["e4m3", "e2m1 pairs"], codes: Tensor) -> Tensor:
    table = _table(name, codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def _encode_fp8(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    e = _encode_scale(448.0, amax)
    return cast_e4m3(x * e), None, _divide(1.0, e)


def _decode_fp8(codes: Tensor, block_scales: Tensor | None, scales: Tensor | None, d_k: int) -> Tensor:
    assert scales is not None
    return _look_up("e4m3", codes) * scales


def _saturate_fp8(codes: Tensor, x: Tensor) -> Tensor:
    codes = torch.where(x.isinf(), cast_e4m3(x.nan_to_num(0.0)), codes)
    return codes.masked_fill_(x.isnan(), 0x7F)


def _to_blocks(x: Tensor) -> Tensor:
    """[..., n*16] as [..., n, 16]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // _BLOCK, _BLOCK)


def _encode_nvfp4(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    pad = -x.shape[-1] % _BLOCK
    if pad:
        x = torch.nn.functional.pad(x, (0, pad))
    blocks = _to_blocks(x)
    big_s = _encode_scale(2688.0, amax)
    scales = _divide(1.0, big_s)
    sixth = torch.div(torch.ones_like(amax), torch.full_like(amax, 6.0))
    bmax = _max_magnitude(blocks).squeeze(-1)
    block_scales = cast_e4m3((bmax * (big_s * sixth)).clamp_(max=_FLT_MAX))
    d = _look_up("e4m3", block_scales) * scales
    codes = _cast_e2m1_in_place(blocks * _divide(1.0, d).unsqueeze(-1))
    return _pack(codes.flatten(-2)), block_scales, scales


def _decode_nvfp4(codes: Tensor, block_scales: Tensor | None, scales: Tensor | None, d_k: int) -> Tensor:
    assert block_scales is not None
    assert scales is not None
    d = _look_up("e4m3", block_scales) * scales
    values = _look_up("e2m1 pairs", codes).view(torch.float32)
    x = (_to_blocks(values) * d.unsqueeze(-1)).flatten(-2)
    return x[..., :d_k].contiguous()


def _saturate_nvfp4(codes: Tensor, x: Tensor) -> Tensor:
    saturated = cast_e2m1(x.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf))
    pad = 2 * codes.shape[-1] - x.shape[-1]
    finite = torch.nn.functional.pad(x.isfinite(), (0, pad), value=True)
    saturated = torch.nn.functional.pad(saturated, (0, pad))
    unpacked = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return _pack(torch.where(finite, unpacked, saturated))


def _pack(codes: Tensor) -> Tensor:
    """Two E2M1 codes a byte, the even element in the low nibble; reads pairs as little-endian words."""
    pairs = codes.contiguous().view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def _cast_codec(dtype: torch.dtype) -> Codec:
    """A format that is a torch dtype: a cast each way, non-finite values kept, overflow becomes inf."""
    return Codec(
        encode=lambda x, amax: (x.to(dtype), None, None),
        decode=lambda codes, block_scales, scales, d_k: codes.to(torch.float32),
        saturate=lambda codes, x: torch.where(x.isfinite(), codes, x.to(dtype)),
    )


#: One codec a format, by canonical name.
CODECS = {
    "fp32": _cast_codec(torch.float32),
    "bf16": _cast_codec(torch.bfloat16),
    "fp16": _cast_codec(torch.float16),
    "fp8": Codec(_encode_fp8, _decode_fp8, _saturate_fp8),
    "nvfp4": Codec(_encode_nvfp4, _decode_nvfp4, _saturate_nvfp4),
}
