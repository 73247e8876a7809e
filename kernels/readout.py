"""Readouts of steps between flushes, on the device: from products (output_only) or a rebuilt tile (state_output).

For x = k or q of step t, with P = Π α over the buffer and the step and w_j = Π α over j < i <= t:
    R(x) = S_c (P ⊙ x) + Σ_{j<t} û_j·((w_j ⊙ k_j)·x);   u = β(v − R(k)), or v;   o = R(q) + u (k·q)
Decays are exp of sums of g over j < i <= t, never a difference of running sums (g = −inf gives 0 and no NaN), never
exp of a positive sum. Names as in ``step.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgate.kernels.step import PTX, find_place
from driftgate.quant.device_products import multiply_stored, prepare_vectors, stack_columns, take_columns

__all__ = [
    "LEAST_PLACES", "load_buffered", "load_channel_decays", "load_decays", "load_keys", "multiply_keys",
    "multiply_tile", "prepare_products", "read_state_output",
]  # fmt: skip

LEAST_PLACES = 16
"""Least tile of buffered entries. On an H200 with Triton 3.6, tiles of 2, 4 and 8 gave wrong outputs at every step that
found entries, 16 and more right ones (tests/gpu compares every L); which operation goes wrong was not found out."""


@triton.jit
def load_buffered(
    p, h, base, places, n,
    ROW: tl.constexpr, RING: tl.constexpr, BL: tl.constexpr, BN: tl.constexpr,
    WIDTH: tl.constexpr = 8, NEWEST: tl.constexpr = False,
):  # fmt: skip
    """Entries 0 … h−1 of a buffer (NEWEST: h−1 … 0), of each the first n elements, ROW apart: [BL, BN], else 0.

    Loaded as [BL·BN/WIDTH, WIDTH], whose lanes lie along an entry before they go from one entry to the next: a load of
    [BL, BN] may have the shape of the state's tile and would then choose its layout. WIDTH: elements of a lane; with 4
    a warp holds 128 elements of every entry, so that a sum over entries needs no other lane.
    """
    o_r = tl.arange(0, BL * (BN // WIDTH))
    o_l = (o_r // (BN // WIDTH))[:, None]
    o_n = (o_r % (BN // WIDTH) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    o_e = h - 1 - o_l if NEWEST else o_l
    p_b = p + find_place(o_e, base, places, RING) * ROW + o_n
    b = tl.load(p_b, mask=(o_l < h) & (o_n < n), other=0.0)
    return tl.reshape(b, [BL, BN])


@triton.jit
def load_decays(
    h, base, places, p_log_decay, p_betas, b_rate, b_g,
    DK: tl.constexpr, RING: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
    BL: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """P, a number or [BK], and w [BL], or [BL, BK] with CHANNELS; rows at or beyond h of w are of no use."""
    o_l = tl.arange(0, BL)
    if CHANNELS:
        b_past = load_buffered(p_log_decay, h, base, places, DK, DK, RING, BL, BK)
        # e_j = g_{j+1}, the newest entry's is the current step's: suffix sums are Σ g over j < i <= t
        b_e = load_buffered(p_log_decay, h - 1, base + 1, places, DK, DK, RING, BL, BK) if RING else load_buffered(
            p_log_decay + DK, h - 1, base, places, DK, DK, RING, BL, BK
        )  # fmt: skip
        b_e = tl.where((o_l == h - 1)[:, None], b_g[None, :], b_e)
    else:
        o_p = find_place(o_l, base, places, RING)
        o_n = find_place(o_l + 1, base, places, RING)
        if DELTA:
            b_past = tl.load(p_log_decay + o_p, mask=o_l < h, other=0.0)
            b_e = tl.load(p_log_decay + o_n, mask=o_l + 1 < h, other=0.0)
        else:
            b_past = b_rate * tl.load(p_betas + o_p, mask=o_l < h, other=0.0)
            b_e = b_rate * tl.load(p_betas + o_n, mask=o_l + 1 < h, other=0.0)
        b_e = tl.where(o_l + 1 == h, b_g, b_e)
    b_P = tl.exp(tl.sum(b_past, axis=0) + b_g)
    return b_P, tl.exp(tl.cumsum(b_e, axis=0, reverse=True))


@triton.jit
def load_channel_decays(
    h, base, places, p_log_decay, b_g, DK: tl.constexpr, RING: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr
):
    """P [BK] and w [BL, BK] of decays per channel, the newest entry first; rows at or beyond h of w are of no use.

    Sums over later entries are running sums in this order, which a lane takes by itself; h is less than BL.
    """
    b_e = load_buffered(p_log_decay, h + 1, base, places, DK, DK, RING, BL, BK, 4, True)
    b_e = tl.where((tl.arange(0, BL) == 0)[:, None], b_g[None, :], b_e)  # w of entry j has the decays after it
    return tl.exp(tl.sum(b_e, axis=0)), tl.exp(tl.cumsum(b_e, axis=0))


@triton.jit
def load_keys(
    h, base, places, p_keys, p_betas,
    DK: tl.constexpr, RING: tl.constexpr, DELTA: tl.constexpr, NORMALISE: tl.constexpr,
    BL: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Buffered keys [BL, BK] as delivered, and the factor of each [BL]: 1 over its norm, or dt."""
    b_K = load_buffered(p_keys, h, base, places, DK, DK, RING, BL, BK).to(tl.float32)
    if NORMALISE:
        b_f = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(b_K * b_K, axis=1) + 1e-6))
    elif DELTA:
        b_f = tl.full([BL], 1.0, tl.float32)
    else:
        o_l = tl.arange(0, BL)
        b_f = tl.load(p_betas + find_place(o_l, base, places, RING), mask=o_l < h, other=0.0)
    return b_K, b_f


@triton.jit
def multiply_keys(
    h, base, places, p_keys, b_w, b_k, b_q,
    DK: tl.constexpr, RING: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr,
    BL: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Products k_j·k and k_j·q of the buffered keys, with CHANNELS of w_j ⊙ k_j, newest first: float32 [BL] each.

    Keys of 16 bits are multiplied on tensor cores, exactly, with k and q in three parts; their norms likewise.
    """
    b_K = load_buffered(p_keys, h, base, places, DK, DK, RING, BL, BK, 4 if CHANNELS else 8, CHANNELS)
    KIND: tl.constexpr = b_K.dtype
    if CHANNELS or KIND.primitive_bitwidth == 32:
        b_K = b_K.to(tl.float32)
        b_sums = tl.sum(b_K * b_K, axis=1)
        if CHANNELS:
            b_K = b_K * b_w
        b_ck = tl.sum(b_K * b_k[None, :], axis=1)
        b_cq = tl.sum(b_K * b_q[None, :], axis=1)
    else:
        b_ck, b_cq = take_columns(tl.dot(b_K, stack_columns(b_k, b_q, BK, KIND)), BL)
        b_squares = tl.dot(b_K, tl.trans(b_K))
        o_l = tl.arange(0, BL)
        b_sums = tl.sum(tl.where(o_l[:, None] == o_l[None, :], b_squares, 0.0), axis=1)
    if NORMALISE:
        b_f = tl.div_rn(1.0, tl.sqrt_rn(b_sums + 1e-6))
        b_ck, b_cq = b_ck * b_f, b_cq * b_f
    return b_ck, b_cq


@triton.jit
def prepare_products(
    h, base, places, p_products, p_vectors, p_log_decay, p_betas, b_rate, b_q, b_k, b_g, o_k,
    DK: tl.constexpr, FORMAT: tl.constexpr, RING: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
    BL: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """What all tiles of a readout from products share, for ``multiply_tile``.

    p_products: what ``multiply_keys`` gave, [2, BL]; p_vectors: P ⊙ k and P ⊙ q, [2, d_k], with CHANNELS.
    """
    o_l = tl.arange(0, BL)
    b_ck, b_cq = tl.load(p_products + o_l), tl.load(p_products + BL + o_l)
    b_P = 1.0
    b_Pk, b_Pq = b_k, b_q
    if CHANNELS:
        b_Pk = tl.load(p_vectors + o_k, mask=o_k < DK, other=0.0)
        b_Pq = tl.load(p_vectors + DK + o_k, mask=o_k < DK, other=0.0)
    else:
        b_P, b_w = load_decays(h, base, places, p_log_decay, p_betas, b_rate, b_g, DK, RING, DELTA, False, BL, BK)
        if not DELTA:
            b_w = b_w * tl.load(p_betas + find_place(o_l, base, places, RING), mask=o_l < h, other=0.0)
        b_ck, b_cq = b_ck * b_w, b_cq * b_w
    return prepare_vectors(b_Pq, b_Pk, BK, FORMAT, PTX), b_P, b_ck, b_cq, tl.sum(b_k * b_q, axis=0)


@triton.jit
def multiply_tile(
    b_stored, b_U, b_shared, b_v, b_beta,
    DELTA: tl.constexpr, FORMAT: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Output and u of a tile of d_v, without building the state.

    b_stored: of ``load_stored``; b_U: û (or v without DELTA) of the buffer [BL, BV] as stored.
    """
    b_vectors, b_P, b_ck, b_cq, b_kq = b_shared
    b_U = b_U.to(tl.float32)
    b_Sq, b_Sk = multiply_stored(b_stored, b_vectors, BV, BK, FORMAT, DELTA, PTX)
    b_Rq = b_Sq * b_P + tl.sum(b_U * b_cq[:, None], axis=0)
    if DELTA:
        b_u = b_beta * (b_v - (b_Sk * b_P + tl.sum(b_U * b_ck[:, None], axis=0)))
    else:
        b_u = b_v
    return b_Rq + b_u * b_kq, b_u


@triton.jit
def read_state_output(
    b_S, h, base, places, p_keys, p_added, p_log_decay, p_betas, b_rate, b_q, b_k, b_v, b_g, b_beta, i_v,
    DV: tl.constexpr, DK: tl.constexpr, RING: tl.constexpr, DELTA: tl.constexpr,
    CHANNELS: tl.constexpr, NORMALISE: tl.constexpr, DOT: tl.constexpr,
    BL: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Output and u of a step from the decayed old state, which one matrix product rebuilds. DOT: ieee, tf32 or bf16."""
    b_P, b_w = load_decays(h, base, places, p_log_decay, p_betas, b_rate, b_g, DK, RING, DELTA, CHANNELS, BL, BK)
    b_K, b_f = load_keys(h, base, places, p_keys, p_betas, DK, RING, DELTA, NORMALISE, BL, BK)
    b_U = load_buffered(p_added + i_v * BV, h, base, places, DV - i_v * BV, DV, RING, BL, BV).to(tl.float32)
    if CHANNELS:
        b_K = b_K * b_w * b_f[:, None]
        b_S = b_S * b_P[None, :]
    else:
        b_K = b_K * (b_w * b_f)[:, None]
        b_S = b_S * b_P
    if DOT == "bf16":
        b_S += tl.dot(tl.trans(b_U).to(tl.bfloat16), b_K.to(tl.bfloat16))
    else:
        b_S += tl.dot(tl.trans(b_U), b_K, input_precision=DOT)
    if DELTA:
        b_u = b_beta * (b_v - tl.sum(b_S * b_k[None, :], axis=1))
    else:
        b_u = b_v
    return tl.sum(b_S * b_q[None, :], axis=1) + b_u * tl.sum(b_k * b_q, axis=0), b_u
