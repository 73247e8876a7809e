"""Asking for what a fold will read while the state is on its way: hints that change no number."""

from __future__ import annotations

import triton
import triton.language as tl

from driftgate.kernels.step import PTX

__all__ = ["prefetch_entries"]


@triton.jit
def prefetch_entries(
    p_keys, p_added, p_log_decay, p_betas, h,
    DK: tl.constexpr, DV: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Have what a fold of h entries reads on its way, of at most 32 entries; places of a ring from the first."""
    KEY: tl.constexpr = DK * p_keys.dtype.element_ty.primitive_bitwidth // 8
    ADDED: tl.constexpr = DV * p_added.dtype.element_ty.primitive_bitwidth // 8
    p_tile = p_added + tl.program_id(1) * BV
    if h > 0:
        _prefetch(p_keys, 128, (h * KEY + 127) // 128, 32)
        _prefetch(p_tile, ADDED, h, 32)
        _prefetch(p_betas, 128, (h + 31) // 32, 1)
        if CHANNELS:
            _prefetch(p_log_decay, 128, (h * DK + 31) // 32, 64)
        elif DELTA:
            _prefetch(p_log_decay, 128, (h + 31) // 32, 1)


@triton.jit
def _prefetch(p, stride, n, N: tl.constexpr):
    """Have n lines of 128 bytes, of which N at most, brought into the L2 cache: those at p + i·stride bytes, i < n."""
    if PTX:
        o = tl.minimum(tl.arange(0, N), n - 1).to(tl.int64) * stride
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [p.to(tl.int64) + o],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
