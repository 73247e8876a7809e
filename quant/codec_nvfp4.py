"""Codec of NVFP4: E2M1 elements, one E4M3 scale per 16 along a row, one FP32 scale a scope; 2688 = 6*448.

    te        S  = min(fl(2688/amax), FLT_MAX), 1 if amax = 0   scale = fl(1/S)
              s8 = e4m3(fl(bmax*fl(S*fl(1/6))))                 d = fl(s8*scale)
              code = e2m1(fl(x*min(fl(1/d), FLT_MAX)))          x' = fl(code*d)
    4/6       S  = fl(6*M/amax), b = fl(fl(bmax/6)*S); s8 = e4m3(min(fl(1.5*b), 448)) where that has the smaller
              error, else e4m3(b); errors of fl(fl(fl(code*s8)*amax)/(6*M)), summed in order; M = 256 or 448
    modelopt  scale = fl(amax/2688), s8 = e4m3(clip(fl(bmax/fl(6*scale)), 2^-9, 448)), 1 where that is 0
              code = e2m1(fl(x/d))
    torchao   scale = fl(amax/2688), s8 = e4m3(clip(fl(fl(bmax/6)/scale), 2^-6, 448))
              code = e2m1(fl(x*fl(fl(1/scale)/s8)))

amax and bmax are the greatest magnitudes of a scope and of a block. For a scope of zeros modelopt and torchao
divide 0 by 0 and store NaN; here its scale is 1. -0.0 keeps its sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from driftgate.quant.arithmetic import Arithmetic, BlockChoice, Profile
from driftgate.quant.codec import (
    FLT_MAX,
    Codec,
    Parts,
    divide,
    encode_scale,
    max_magnitude,
    pack_pairs,
    saturate_e2m1,
    to_blocks,
)
from driftgate.quant.elements import E2M1, cast_e2m1, cast_e2m1_in_place, cast_e4m3, look_up

__all__ = ["nvfp4_codec"]

_BLOCK = 16
_MAX_BLOCK_SCALE = {
    BlockChoice.MSE_256: 256.0,
    BlockChoice.MAE_256: 256.0,
    BlockChoice.MSE_448: 448.0,
    BlockChoice.MAE_448: 448.0,
}


def nvfp4_codec() -> Codec:
    """The codec."""
    return Codec(_encode, _decode, saturate_e2m1)


def _encode(x: Tensor, amax: Tensor, arithmetic: Arithmetic, words: Tensor | None) -> Parts:
    blocks = to_blocks(x, _BLOCK)
    bmax = max_magnitude(blocks).squeeze(-1)
    if arithmetic.profile is Profile.MODELOPT:
        scales = _decode_scale(amax)
        ratio = torch.div(bmax, scales * 6.0)
        block_scales = cast_e4m3(torch.where(ratio == 0, 1.0, ratio.clamp(min=2.0**-9)))
        scaled = torch.div(blocks, (look_up("e4m3", block_scales) * scales).unsqueeze(-1))
    elif arithmetic.profile is Profile.TORCHAO:
        scales = _decode_scale(amax)
        sixths = torch.div(bmax, torch.full_like(bmax, 6.0))
        block_scales = cast_e4m3(torch.div(sixths, scales).clamp(min=2.0**-6))
        inverse = torch.div(torch.div(torch.ones_like(scales), scales), look_up("e4m3", block_scales))
        scaled = blocks * inverse.unsqueeze(-1)
    else:
        scales, block_scales = _choose_scales(blocks, bmax, amax, arithmetic.block_choice)
        scaled = blocks * _invert(block_scales, scales)
    if words is None:
        codes = cast_e2m1_in_place(scaled)
    else:
        words = to_blocks(words, _BLOCK)
        codes = E2M1.encode(scaled, words, random_bits=arithmetic.e2m1_random_bits)
    return pack_pairs(codes.flatten(-2)), block_scales, scales


def _decode(codes: Tensor, block_scales: Tensor | None, scales: Tensor | None, d_k: int) -> Tensor:
    assert block_scales is not None
    assert scales is not None
    d = look_up("e4m3", block_scales) * scales
    values = look_up("e2m1 pairs", codes).view(torch.float32)
    x = (to_blocks(values, _BLOCK) * d.unsqueeze(-1)).flatten(-2)
    return x[..., :d_k].contiguous()


def _choose_scales(blocks: Tensor, bmax: Tensor, amax: Tensor, choice: BlockChoice) -> tuple[Tensor, Tensor]:
    """FP32 scales, shaped like amax, and E4M3 codes of the block scales, shaped like bmax."""
    if choice is BlockChoice.SIX:
        big_s = encode_scale(2688.0, amax)
        sixth = torch.div(torch.ones_like(amax), torch.full_like(amax, 6.0))
        return divide(1.0, big_s), cast_e4m3((bmax * (big_s * sixth)).clamp_(max=FLT_MAX))
    top = 6.0 * _MAX_BLOCK_SCALE[choice]
    big_s = encode_scale(top, amax)
    scales = divide(1.0, big_s)
    b = torch.div(bmax, torch.full_like(bmax, 6.0)) * big_s
    to_six, to_four = cast_e4m3(b), cast_e4m3(b * 1.5)
    errors = [_sum_errors(blocks, s8, scales, amax, top, choice) for s8 in (to_four, to_six)]
    return scales, torch.where(errors[0] < errors[1], to_four, to_six)


def _sum_errors(
    blocks: Tensor, block_scales: Tensor, scales: Tensor, amax: Tensor, top: float, choice: BlockChoice
) -> Tensor:
    """Error of each block [...] if it had these scales, in the units of x: squares or magnitudes."""
    codes = cast_e2m1(blocks * _invert(block_scales, scales))
    values = look_up("e2m1 pairs", codes).view(torch.float32)[..., ::2]  # a code alone is an even element
    values = values * look_up("e4m3", block_scales).unsqueeze(-1) * amax.unsqueeze(-1)
    error = torch.div(values, torch.full_like(values, top)) - blocks
    error = error.abs() if choice in (BlockChoice.MAE_256, BlockChoice.MAE_448) else error * error
    total = error[..., 0].clone()
    for i in range(1, _BLOCK):
        total += error[..., i]
    return total


def _invert(block_scales: Tensor, scales: Tensor) -> Tensor:
    """Factors [..., 1] that take the elements of a block to E2M1."""
    return divide(1.0, look_up("e4m3", block_scales) * scales).unsqueeze(-1)


def _decode_scale(amax: Tensor) -> Tensor:
    return torch.where(amax == 0, 1.0, torch.div(amax, torch.full_like(amax, 2688.0)))
