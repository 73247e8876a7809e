"""Codecs of the MX formats: blocks of 32 along a row, one power of two each (E8M0), no scale beside.

    code of the scale = u + 127, u in [-127, 127], 0 for a block of zeros; the rules for u: see ``MxRule``
    code = round(x * 2^-u), nearest even and saturating        x' = fl(code * 2^u)

Exponents are integers from the bits of a float32: log2 in float32 is wrong next to powers of two. A NaN makes
its block's scale 255 and the whole block NaN; ``encode_rows`` and ``quantize`` never let one in.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from driftgate.quant.arithmetic import Arithmetic, MxRule
from driftgate.quant.codec import Codec, Parts, max_magnitude, pack_pairs, saturate_e2m1, to_blocks
from driftgate.quant.elements import E2M1, Element, look_up

__all__ = ["BLOCK", "choose_exponents", "mx_codec", "mxfp4_codec"]

BLOCK = 32
_MANTISSA = 0x7FFFFF


def choose_exponents(bmax: Tensor, element: Element, rule: MxRule) -> Tensor:
    """E8M0 codes of blocks.

    Args:
        bmax: float32 [...], greatest magnitude of each block, not negative.
        element: type of the elements.
        rule: how the exponent is chosen.

    Returns:
        uint8 [...]; 255 where bmax is NaN.
    """
    emax = (torch.tensor(element.max_value).view(torch.int32) >> 23).item() - 127
    if rule is MxRule.RCEIL:
        ratio = torch.div(bmax, torch.full_like(bmax, element.max_value))
        bits = ratio.view(torch.int32)
        # Below 2^-126 a float32 counts 2^-149, and 2^-127, the half of that, is the least power of two there is.
        above = torch.where(bits > _MANTISSA, (bits & _MANTISSA) > 0, bits > 0x400000)
        code = (bits >> 23) + above
    else:
        bits = bmax.view(torch.int32)
        if rule is MxRule.EVEN:
            bits = bits + (1 << (22 - element.mantissa_bits))
        code = (bits >> 23) - emax
        if rule is MxRule.CEIL:
            code = code + ((bits & _MANTISSA) > 0)
    return torch.where(bmax.isnan(), 255, code.clamp(0, 254)).to(torch.uint8)


def mx_codec(element: Element, table: Literal["e4m3", "e5m2"]) -> Codec:
    """Codec of 8-bit elements, stored unpadded."""

    def encode(x: Tensor, amax: Tensor, arithmetic: Arithmetic, words: Tensor | None) -> Parts:
        codes, scales = _encode_blocks(x, element, arithmetic.mx_rule)
        return codes[..., : x.shape[-1]].contiguous(), scales, None

    def decode(codes: Tensor, block_scales: Tensor | None, scales: Tensor | None, d_k: int) -> Tensor:
        assert block_scales is not None
        return _scale_blocks(look_up(table, codes), block_scales, d_k)

    def saturate(codes: Tensor, x: Tensor) -> Tensor:
        codes = torch.where(x.isinf(), element.nearest(x.nan_to_num(0.0)), codes)
        return codes.masked_fill_(x.isnan(), 0x7F)

    return Codec(encode, decode, saturate)


def mxfp4_codec() -> Codec:
    """Codec of E2M1 elements, two a byte, rows filled up with zeros to whole blocks."""

    def encode(x: Tensor, amax: Tensor, arithmetic: Arithmetic, words: Tensor | None) -> Parts:
        codes, scales = _encode_blocks(x, E2M1, arithmetic.mx_rule)
        return pack_pairs(codes), scales, None

    def decode(codes: Tensor, block_scales: Tensor | None, scales: Tensor | None, d_k: int) -> Tensor:
        assert block_scales is not None
        return _scale_blocks(look_up("e2m1 pairs", codes).view(torch.float32), block_scales, d_k)

    return Codec(encode, decode, saturate_e2m1)


def _encode_blocks(x: Tensor, element: Element, rule: MxRule) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., whole blocks], unpacked, and E8M0 codes [..., n_blocks] of x [..., d_k]."""
    blocks = to_blocks(x, BLOCK)
    scales = choose_exponents(max_magnitude(blocks).squeeze(-1), element, rule)
    inverse = look_up("e8m0", 254 - scales.clamp(max=254))
    return element.nearest(blocks * inverse.unsqueeze(-1)).flatten(-2), scales


def _scale_blocks(values: Tensor, block_scales: Tensor, d_k: int) -> Tensor:
    blocks = to_blocks(values, BLOCK) * look_up("e8m0", block_scales).unsqueeze(-1)
    return blocks.flatten(-2)[..., :d_k].contiguous()
