"""Rows of a state pool in every format, torch, CPU and CUDA: codes and scales equal the oracle bit for bit.

What keeps the bits: each step of a rule is one float32 rounding, so every product and quotient is an operation
of its own. The rules stand in the modules of the codecs: ``codec_scaled`` (fp8, fp8_e5m2, int8, int16),
``codec_nvfp4``, ``codec_mx`` (mxfp4, mxfp8); a wide format is a cast each way.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from driftgate.quant.arithmetic import Arithmetic
from driftgate.quant.codec import Codec, max_magnitude
from driftgate.quant.codec_mx import mx_codec, mxfp4_codec
from driftgate.quant.codec_nvfp4 import nvfp4_codec
from driftgate.quant.codec_scaled import float_codec, integer_codec
from driftgate.quant.elements import BF16, E4M3, E5M2, FP16, Element, cast_e2m1, cast_e4m3, cast_e5m2
from driftgate.quant.formats import Format
from driftgate.quant.philox import Noise

__all__ = ["CODECS", "Codec", "EncodedRows", "cast_e2m1", "cast_e4m3", "cast_e5m2", "decode_rows", "encode_rows"]
__all__ += ["find_nonfinite_rows", "raise_nonfinite"]

_DEFAULT = Arithmetic()


class EncodedRows(NamedTuple):
    """Rows as a state pool stores them; see :meth:`Format.bytes_per_row` for their size.

    Attributes:
        codes: [..., d_v, d_k] in the storage dtype; packed uint8 for nvfp4 [..., d_v, 8*ceil(d_k/16)] and mxfp4
            [..., d_v, 16*ceil(d_k/32)], the even element in the low nibble, rows filled up with zeros.
        block_scales: uint8 [..., d_v, ceil(d_k/block)], raw E4M3 bits for nvfp4 and E8M0 for mxfp4 and mxfp8; None
            for formats without blocks.
        row_scales: FP32 decode scales [..., d_v]; None for formats without such scales.
    """

    codes: Tensor
    block_scales: Tensor | None
    row_scales: Tensor | None


def encode_rows(
    fmt: Format,
    x: Tensor,
    *,
    nonfinite: Literal["raise", "saturate"] = "raise",
    noise: Noise | None = None,
) -> EncodedRows:
    """Quantise each row x[..., :] over d_k, with one FP32 scale a row where the format has one.

    Args:
        fmt: target format.
        x: float32 [..., d_v, d_k], any leading axes (also of length 0), any strides.
        nonfinite: ``raise``, or what kernels do: ``saturate`` takes amax over finite elements and saturates
            the code of each other one (E2M1: NaN +6, inf ±6; FP8: NaN 0x7F, inf the greatest value; integers:
            NaN and inf the greatest code; wide formats keep it); :func:`find_nonfinite_rows` tells where.
        noise: where the random bits of a stochastic rounding come from; None: nearest even. Scales are nearest
            even in either case.

    Returns:
        Codes and scales on x's device. For fp32 the codes are x itself, not a copy. A finite element beyond
        the greatest fp16 or bf16 becomes an infinite code.

    Raises:
        ValueError: x is not float32 or has no d_k; a non-finite element and ``nonfinite="raise"``; noise for a
            format that has no stochastic rounding.
    """
    if x.dtype != torch.float32 or x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: expected float32 [..., d_k], got {x.dtype} {list(x.shape)}")
    if nonfinite not in ("raise", "saturate"):
        raise ValueError(f"nonfinite: expected 'raise' or 'saturate', got {nonfinite!r}")
    if noise is not None and not fmt.stochastic:
        raise ValueError(f"noise: expected None for {fmt.name}, which is rounded to nearest alone, got {noise}")
    codec = CODECS[fmt.name]
    x = x.detach()
    words = None if noise is None else noise.words(x.shape, x.device)
    amax = max_magnitude(x)
    if bool(amax.isfinite().all()):
        codes, block_scales, scales = codec.encode(x, amax, _DEFAULT, words)
    elif nonfinite == "raise":
        raise_nonfinite(fmt, x)
    else:
        finite = torch.where(x.isfinite(), x, 0.0)
        codes, block_scales, scales = codec.encode(finite, max_magnitude(finite), _DEFAULT, words)
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
    return max_magnitude(x.detach()).isfinite().logical_not_().squeeze(-1)


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


def _float_codec(element: Element, dtype: torch.dtype) -> Codec:
    """A format that is a torch dtype: a cast each way, non-finite values kept, overflow becomes inf."""
    return Codec(
        encode=lambda x, amax, arithmetic, words: (element.encode(x, words), None, None),
        decode=lambda codes, block_scales, scales, d_k: codes.to(torch.float32),
        saturate=lambda codes, x: torch.where(x.isfinite(), codes, x.to(dtype)),
    )


_FP32 = Codec(
    encode=lambda x, amax, arithmetic, words: (x, None, None),
    decode=lambda codes, block_scales, scales, d_k: codes,
    saturate=lambda codes, x: x,
)

#: One codec a format, by canonical name.
CODECS = {
    "fp32": _FP32,
    "bf16": _float_codec(BF16, torch.bfloat16),
    "fp16": _float_codec(FP16, torch.float16),
    "int16": integer_codec(torch.int16),
    "fp8": float_codec(E4M3, "e4m3"),
    "fp8_e5m2": float_codec(E5M2, "e5m2"),
    "int8": integer_codec(torch.int8),
    "mxfp8": mx_codec(E4M3, "e4m3"),
    "nvfp4": nvfp4_codec(),
    "mxfp4": mxfp4_codec(),
}
