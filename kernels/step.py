"""What the kernels of all recurrences share on the device: the step itself, entries of the buffer, folds and stores.

Notable: Mamba-2, Gated DeltaNet and Kimi Delta Attention are one step with two properties, constants of a kernel:
DELTA (u is corrected by what the state holds; else u = v, k is dt·B and the log decay A·dt) and CHANNELS (decay per key
channel). ``take_step`` is inlined by baseline, replay, flush and speculative window, with an explicit ``tl.fma`` for
the rank-1 update and no ``tl.dot``: with equal tiles they give equal bits.

Names: b_S [BV, BK] tile of a state; o_v [BV], o_k [BK] its rows and columns; b_k, b_q [BK]; b_v, b_u [BV]; b_g a
number, or [BK] with CHANNELS; b_beta β or dt, a number; b_rate A of the head; all float32. h: buffered entries; base:
place of the oldest in a ring of ``places`` (0 unless RING).
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from driftgate.quant.device import draw_words, round_trip_tile, store_tile

__all__ = [
    "INTERPRETED", "PTX", "find_head", "find_place", "finish_output", "fold_buffer", "load_log_decay", "load_vector",
    "multiply_rows", "prepare_key", "store_states", "take_step",
]  # fmt: skip

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
if INTERPRETED:
    from driftgate.kernels import interpreter

    interpreter.install()

PTX = tl.constexpr(not INTERPRETED)


@triton.jit
def take_step(
    b_S, b_k, b_v, b_g, b_beta, DELTA: tl.constexpr, CHANNELS: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr
):
    """S = exp(g)·S; u = β(v − S k), or v without DELTA; S = fma(u, k, S). Returns S and u."""
    if CHANNELS:
        b_S = b_S * tl.exp(b_g)[None, :]
    else:
        b_S = b_S * tl.exp(b_g)
    if DELTA:
        b_u = b_beta * (b_v - multiply_rows(b_S, b_k, BV, BK))
    else:
        b_u = b_v
    return add_outer(b_S, b_u, b_k, BV, BK), b_u


@triton.jit
def add_outer(b_S, b_u, b_k, BV: tl.constexpr, BK: tl.constexpr):
    """fma(u, k, S), the rank-1 update."""
    u = tl.broadcast_to(b_u[:, None], (BV, BK))
    return tl.fma(u, tl.broadcast_to(b_k[None, :], (BV, BK)), b_S)


@triton.jit
def multiply_rows(b_S, b_x, BV: tl.constexpr, BK: tl.constexpr):
    """S x, [BV]: one order of additions for baseline, replay and flush, that of ``tl.sum`` in one layout."""
    return tl.sum(b_S * b_x[None, :], axis=1)


@triton.jit
def load_vector(p, o, N: tl.constexpr, NORMALISE: tl.constexpr):
    """A vector of N elements, divided by sqrt(sum x² + 1e-6) if asked. p: first element; o: arange."""
    return normalise(tl.load(p + o, mask=o < N, other=0.0).to(tl.float32), NORMALISE)


@triton.jit
def normalise(b, NORMALISE: tl.constexpr):
    """The vector divided by sqrt(sum x² + 1e-6), if asked."""
    if NORMALISE:
        b = b * tl.rsqrt(tl.sum(b * b, axis=0) + 1e-6)  # to 2^-22; without the branches of exact roots
    return b


@triton.jit
def prepare_key(b_k, b_beta, DELTA: tl.constexpr, NORMALISE: tl.constexpr):
    """The key that a step uses: k, normalised if asked, or dt·B, in FP32."""
    b_k = normalise(b_k, NORMALISE)
    if not DELTA:
        b_k = b_beta * b_k
    return b_k


@triton.jit
def load_log_decay(p_g, b_beta, b_rate, o_k, DK: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr):
    """Log decay of one step: as stored, a number or [BK], or A·dt."""
    if CHANNELS:
        b_g = tl.load(p_g + o_k, mask=o_k < DK, other=0.0)
    elif DELTA:
        b_g = tl.load(p_g)
    else:
        b_g = b_rate * b_beta
    return b_g


@triton.jit
def find_place(j, base, places, RING: tl.constexpr):
    """Place of buffered entry j."""
    if RING:
        j = (base + j) % places
    return j


@triton.jit
def load_entry(
    i, h, base, places, p_keys, p_added, p_log_decay, p_betas, b_rate, o_v, o_k,
    DV: tl.constexpr, DK: tl.constexpr, RING: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
    NORMALISE: tl.constexpr, WITH_BETA: tl.constexpr,
):  # fmt: skip
    """Key, log decay, β and v (or û) of buffered entry i; zeros at or beyond h, β also unless it is used."""
    j = find_place(i, base, places, RING)
    used = i < h
    b_beta = tl.full((), 0.0, tl.float32)
    if WITH_BETA:
        b_beta = tl.load(p_betas + j, mask=used, other=0.0)
    if CHANNELS:
        b_g = tl.load(p_log_decay + j * DK + o_k, mask=(o_k < DK) & used, other=0.0)
    elif DELTA:
        b_g = tl.load(p_log_decay + j, mask=used, other=0.0)
    else:
        b_g = b_rate * b_beta
    b_k = tl.load(p_keys + j * DK + o_k, mask=(o_k < DK) & used, other=0.0).to(tl.float32)
    b_v = tl.load(p_added + j * DV + o_v, mask=(o_v < DV) & used, other=0.0).to(tl.float32)
    return prepare_key(b_k, b_beta, DELTA, NORMALISE), b_g, b_beta, b_v


@triton.jit
def fold_buffer(
    b_S, h, base, places, p_keys, p_values, p_log_decay, p_betas, p_corrections, b_rate, o_v, o_k,
    DV: tl.constexpr, DK: tl.constexpr, RING: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
    NORMALISE: tl.constexpr, EXACT: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Bring a state over h buffered steps: as the baseline takes them (EXACT), or with the corrections û as stored."""
    REPLAYED: tl.constexpr = EXACT or not DELTA  # without DELTA û is v
    p_added = p_values if REPLAYED else p_corrections
    b_k, b_g, b_beta, b_v = load_entry(
        0, h, base, places, p_keys, p_added, p_log_decay, p_betas, b_rate, o_v, o_k,
        DV, DK, RING, DELTA, CHANNELS, NORMALISE, REPLAYED,
    )  # fmt: skip
    for i in range(0, h):  # the next entry is on its way while this one is applied
        b_next_k, b_next_g, b_next_beta, b_next_v = load_entry(
            i + 1, h, base, places, p_keys, p_added, p_log_decay, p_betas, b_rate, o_v, o_k,
            DV, DK, RING, DELTA, CHANNELS, NORMALISE, REPLAYED,
        )  # fmt: skip
        b_S, _ = take_step(b_S, b_k, b_v, b_g, b_beta, DELTA and REPLAYED, CHANNELS, BV, BK)
        b_k, b_g, b_beta, b_v = b_next_k, b_next_g, b_next_beta, b_next_v
    return b_S


@triton.jit
def finish_output(b_o, b_v, p_D, p_z, o_v, DV: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr):
    """Output with D·v added and times silu(z), where the layer has them."""
    if HAS_D:
        b_o = b_o + tl.load(p_D) * b_v
    if HAS_Z:
        b_z = tl.load(p_z + o_v, mask=o_v < DV, other=0.0).to(tl.float32)
        b_o = b_o * tl.div_rn(b_z, 1.0 + tl.exp(-b_z))
    return b_o


@triton.jit
def find_head(
    codes, block_scales, row_scales, codes_slot, blocks_slot, rows_slot, slot, i_hv,
    DV: tl.constexpr, ROW: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Pointers at one head of a slot's stored state.

    slot: int64; codes_slot: stride in units of 16 bytes, whose divisibility no launch may specialise on: the layouts
    of the sums would depend on it. The other strides in elements.
    """
    UNIT: tl.constexpr = 128 // codes.dtype.element_ty.primitive_bitwidth
    p_codes = codes + slot * codes_slot * UNIT + i_hv * (DV * ROW)
    p_blocks = block_scales + slot * blocks_slot + i_hv * (DV * BLOCKS)
    return p_codes, p_blocks, row_scales + slot * rows_slot + i_hv * DV


@triton.jit
def store_states(
    b_S, p_codes, p_blocks, p_rows, p_copy_codes, p_copy_blocks, p_copy_rows, p_error, o_v, i_hv,
    seed, tokens, p_stream,
    DV: tl.constexpr, DK: tl.constexpr, FORMAT: tl.constexpr, COPY_FORMAT: tl.constexpr, SPLIT: tl.constexpr,
    SR: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store the checkpoint, and the copy from what the checkpoint reads back as; set the slot's error word.

    tokens: that the stored state has seen; with seed and p_stream it names the draws of stochastic rounding (SR).
    """
    words = 0
    if SR:
        first = i_hv.to(tl.int64) * (DV * DK)
        words = draw_words(o_v, DK, BK, tl.load(seed), first, tokens, tl.load(p_stream))
    bad = store_tile(p_codes, p_blocks, p_rows, b_S, o_v, DV, DK, BV, BK, FORMAT, True, SR, words)
    if SPLIT:
        b_S = round_trip_tile(b_S, DK, BV, BK, FORMAT, True, SR, words)
        bad |= store_tile(p_copy_codes, p_copy_blocks, p_copy_rows, b_S, o_v, DV, DK, BV, BK, COPY_FORMAT)
    if bad != 0:
        tl.store(p_error, 1)
