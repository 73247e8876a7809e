"""Speculative windows of all recurrences: the Triton kernel that verifies a window in one call, and its launch.

A row feeds n tokens, the last sampled one and its drafts; the kernel gives the outputs of all and writes their entries
behind the h committed ones in the ring. ``pool.commit`` then moves the cursor over those that were accepted: what lies
beyond it is never read, so a rejected draft leaves no trace and no state is copied per draft.
A row with h + n + T_max > L flushes in the call: its h entries, never a draft, are folded from the checkpoint and
stored, and the outputs come from the folded FP32 state before it was rounded. Else ``exact_readout`` brings the state
that steps read over the buffer and takes the window's steps as the baseline does, and ``output_only`` solves
(I + A) U = diag(β)(V - R(k)) by forward substitution: token i uses the u_j of j < i alone, never a later one as 0·NaN.
Names as in ``step.py``; n: tokens of the row; t: token in [B·T].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from driftgate.kernels.arguments import StepArguments
from driftgate.kernels.contract import Fold, Readout
from driftgate.kernels.dispatch import (
    find_grid,
    layer_buffers,
    plan_constants,
    stage_inputs,
    stored_arguments,
    stored_constants,
)
from driftgate.kernels.launch import Launch, choose_launch
from driftgate.kernels.pool import StatePool
from driftgate.kernels.readout import LEAST_PLACES, load_buffered, load_decays, load_keys
from driftgate.kernels.replay import find_buffer, load_inputs
from driftgate.kernels.step import (
    INTERPRETED,
    find_head,
    find_place,
    finish_output,
    fold_buffer,
    store_states,
    take_step,
)
from driftgate.quant.device import load_tile

__all__ = ["take_window"]


@triton.jit
def write_token(
    t, place, b_o, b_u, b_v, b_g, b_beta, k, D, z, out, p_keys, p_values, p_log_decay, p_betas, p_corrections,
    i_h, i_hv, i_v, o_v, o_k,
    H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
    KEEP_INPUTS: tl.constexpr, KEEP_CORRECTIONS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """Store a token's output, and its entry at a place of the ring: inputs as delivered, and the correction."""
    i_head = t * HV + i_hv
    b_o = finish_output(b_o, b_v, D + i_hv, z + i_head * DV, o_v, DV, HAS_D, HAS_Z)
    tl.store(out + i_head * DV + o_v, b_o.to(out.dtype.element_ty), mask=o_v < DV)
    if i_v == 0:
        if i_hv % (HV // H) == 0:
            raw_k = tl.load(k + (t * H + i_h) * DK + o_k, mask=o_k < DK, other=0.0)
            tl.store(p_keys + place * DK + o_k, raw_k, mask=o_k < DK)
        if CHANNELS:
            tl.store(p_log_decay + place * DK + o_k, b_g, mask=o_k < DK)
        elif DELTA:
            tl.store(p_log_decay + place, b_g)
        if KEEP_INPUTS:
            tl.store(p_betas + place, b_beta)
    if KEEP_INPUTS:
        tl.store(p_values + place * DV + o_v, b_v.to(p_values.dtype.element_ty), mask=o_v < DV)
    if KEEP_CORRECTIONS:
        tl.store(p_corrections + place * DV + o_v, b_u.to(p_corrections.dtype.element_ty), mask=o_v < DV)


@triton.jit
def take_tokens(
    b_S, n, t, h, first, places, q, k, v, g, beta, D, z, out, scale, b_rate,
    p_keys, p_values, p_log_decay, p_betas, p_corrections, i_h, i_hv, i_v, o_v, o_k,
    H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
    NORMALISE: tl.constexpr, KEEP_INPUTS: tl.constexpr, KEEP_CORRECTIONS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The window on a state in registers, step by step as the baseline takes them."""
    for i in range(0, n):
        b_q, b_k, b_v, b_g, b_beta = load_inputs(
            q, k, v, g, beta, b_rate, t + i, i_h, i_hv, o_v, o_k, scale, H, HV, DK, DV, DELTA, CHANNELS, NORMALISE
        )
        b_S, b_u = take_step(b_S, b_k, b_v, b_g, b_beta, DELTA, CHANNELS, BV, BK)
        b_o = tl.sum(b_S * b_q[None, :], axis=1)
        write_token(
            t + i, find_place(h + i, first, places, True), b_o, b_u, b_v, b_g, b_beta, k, D, z, out,
            p_keys, p_values, p_log_decay, p_betas, p_corrections, i_h, i_hv, i_v, o_v, o_k,
            H, HV, DK, DV, DELTA, CHANNELS, KEEP_INPUTS, KEEP_CORRECTIONS, HAS_D, HAS_Z,
        )  # fmt: skip


@triton.jit
def read_past(b_S, b_P, b_K, b_U, b_x):
    """S (P ⊙ x) + Σ u_j k_j·x of decayed keys."""
    b_c = tl.sum(b_K * b_x[None, :], axis=1)
    return tl.sum(b_S * (b_P * b_x)[None, :], axis=1) + tl.sum(b_U * b_c[:, None], axis=0)


@triton.jit
def substitute_tokens(
    n, t, h, first, places, p_codes, p_blocks, p_rows, q, k, v, g, beta, D, z, out, scale, b_rate,
    p_keys, p_values, p_log_decay, p_betas, p_corrections, i_h, i_hv, i_v, o_v, o_k,
    H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, FORMAT: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr, KEEP_INPUTS: tl.constexpr,
    KEEP_CORRECTIONS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    BL: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The window from products with the stored state, the buffer and the tokens before, without building a state.

    Tiles of keys and û have room for the window's: a row that does not flush ends at h + n <= L - T_max. Rows of tokens
    to come are zero in both.
    """
    b_none = 0.0  # the buffer's own decays: no step is taken after it
    if CHANNELS:
        b_none = tl.zeros([BK], tl.float32)
    b_P, b_w = load_decays(h, first, places, p_log_decay, p_betas, b_rate, b_none, DK, True, DELTA, CHANNELS, BL, BK)
    b_K, b_f = load_keys(h, first, places, p_keys, p_betas, DK, True, DELTA, NORMALISE, BL, BK)
    if CHANNELS:
        b_K = b_K * b_w * b_f[:, None]
    else:
        b_K = b_K * (b_w * b_f)[:, None]
    p_added = p_corrections if DELTA else p_values
    b_U = load_buffered(p_added + i_v * BV, h, first, places, DV - i_v * BV, DV, True, BL, BV).to(tl.float32)
    b_S = load_tile(p_codes, p_blocks, p_rows, o_v, DV, DK, BV, BK, FORMAT)
    o_l = tl.arange(0, BL)[:, None]
    b_P = b_P * tl.full([BK], 1.0, tl.float32)
    for i in range(0, n):
        b_q, b_k, b_v, b_g, b_beta = load_inputs(
            q, k, v, g, beta, b_rate, t + i, i_h, i_hv, o_v, o_k, scale, H, HV, DK, DV, DELTA, CHANNELS, NORMALISE
        )
        b_a = tl.exp(b_g)
        b_P = b_P * b_a
        if CHANNELS:
            b_K = b_K * b_a[None, :]
        else:
            b_K = b_K * b_a
        if DELTA:
            b_u = b_beta * (b_v - read_past(b_S, b_P, b_K, b_U, b_k))
        else:
            b_u = b_v
        b_o = read_past(b_S, b_P, b_K, b_U, b_q) + b_u * tl.sum(b_k * b_q, axis=0)
        b_K = tl.where(o_l == h + i, b_k[None, :], b_K)
        b_U = tl.where(o_l == h + i, b_u[None, :], b_U)
        write_token(
            t + i, find_place(h + i, first, places, True), b_o, b_u, b_v, b_g, b_beta, k, D, z, out,
            p_keys, p_values, p_log_decay, p_betas, p_corrections, i_h, i_hv, i_v, o_v, o_k,
            H, HV, DK, DV, DELTA, CHANNELS, KEEP_INPUTS, KEEP_CORRECTIONS, HAS_D, HAS_Z,
        )  # fmt: skip


@triton.jit
def write_zeros(n, n_tokens, t, out, i_hv, o_v, HV: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr):
    """Outputs of the tokens from n on."""
    for i in range(n, n_tokens):
        b_o = tl.zeros([BV], tl.float32).to(out.dtype.element_ty)
        tl.store(out + ((t + i) * HV + i_hv) * DV + o_v, b_o, mask=o_v < DV)


@triton.jit(do_not_specialize=["places", "codes_slot", "copy_codes_slot", "length", "window", "n_tokens"])
def window_kernel(
    q, k, v, g, beta, D, z, out, slots, lengths, cursor, base, error, seed, tokens, streams,
    codes, block_scales, row_scales, codes_slot, blocks_slot, rows_slot,
    copy_codes, copy_blocks, copy_rows, copy_codes_slot, copy_blocks_slot, copy_rows_slot,
    keys, values, log_decay, betas, corrections, scale, places, length, window, n_tokens,
    PAD: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BL: tl.constexpr, ROW: tl.constexpr, BLOCKS: tl.constexpr, FORMAT: tl.constexpr,
    SR: tl.constexpr, SPLIT: tl.constexpr, COPY_ROW: tl.constexpr, COPY_BLOCKS: tl.constexpr,
    COPY_FORMAT: tl.constexpr, FLUSH: tl.constexpr, EXACT_READOUT: tl.constexpr, EXACT_FOLD: tl.constexpr,
    KEEP_INPUTS: tl.constexpr, KEEP_CORRECTIONS: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One row's window: with FLUSH those of rows that flush, else those of all others.

    Places below h of the ring are read, those from h on written: programs do not meet in it.
    """
    i_row = (tl.program_id(0) // HV).to(tl.int64)
    i_hv = tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    i_v = tl.program_id(1)
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    slot = tl.load(slots + i_row).to(tl.int64)
    t = i_row * n_tokens
    if slot == PAD:
        if not FLUSH:
            write_zeros(0, n_tokens, t, out, i_hv, o_v, HV, DV, BV)
        return
    n, h, first = tl.load(lengths + i_row), tl.load(cursor + slot), tl.load(base + slot)
    if (h + n + window > length) != FLUSH:
        return
    write_zeros(n, n_tokens, t, out, i_hv, o_v, HV, DV, BV)
    p_codes, p_blocks, p_rows = find_head(
        codes, block_scales, row_scales, codes_slot, blocks_slot, rows_slot, slot, i_hv, DV, ROW, BLOCKS
    )
    p_copy_codes, p_copy_blocks, p_copy_rows = find_head(
        copy_codes, copy_blocks, copy_rows, copy_codes_slot, copy_blocks_slot, copy_rows_slot, slot, i_hv,
        DV, COPY_ROW, COPY_BLOCKS,
    )  # fmt: skip
    p_keys, p_values, p_log_decay, p_betas, p_corrections = find_buffer(
        keys, values, log_decay, betas, corrections, slot, i_h, i_hv, places, H, HV, DK, DV, CHANNELS
    )
    b_rate = 0.0 if DELTA else tl.load(g + i_hv)
    if FLUSH or EXACT_READOUT:
        if FLUSH:
            b_S = load_tile(p_codes, p_blocks, p_rows, o_v, DV, DK, BV, BK, FORMAT)
        else:
            b_S = load_tile(p_copy_codes, p_copy_blocks, p_copy_rows, o_v, DV, DK, BV, BK, COPY_FORMAT)
        b_S = fold_buffer(
            b_S, h, first, places, p_keys, p_values, p_log_decay, p_betas, p_corrections, b_rate, o_v, o_k,
            DV, DK, True, DELTA, CHANNELS, NORMALISE, EXACT_FOLD or not FLUSH, BV, BK,
        )  # fmt: skip
        if FLUSH:
            store_states(
                b_S, p_codes, p_blocks, p_rows, p_copy_codes, p_copy_blocks, p_copy_rows, error + slot, o_v, i_hv,
                seed, tl.load(tokens + slot), streams + slot, DV, DK, FORMAT, COPY_FORMAT, SPLIT, SR, BV, BK,
            )  # fmt: skip
        take_tokens(
            b_S, n, t, h, first, places, q, k, v, g, beta, D, z, out, scale, b_rate,
            p_keys, p_values, p_log_decay, p_betas, p_corrections, i_h, i_hv, i_v, o_v, o_k,
            H, HV, DK, DV, DELTA, CHANNELS, NORMALISE, KEEP_INPUTS, KEEP_CORRECTIONS, HAS_D, HAS_Z, BV, BK,
        )  # fmt: skip
    else:
        substitute_tokens(
            n, t, h, first, places, p_copy_codes, p_copy_blocks, p_copy_rows,
            q, k, v, g, beta, D, z, out, scale, b_rate,
            p_keys, p_values, p_log_decay, p_betas, p_corrections, i_h, i_hv, i_v, o_v, o_k,
            H, HV, DK, DV, COPY_FORMAT, DELTA, CHANNELS, NORMALISE, KEEP_INPUTS, KEEP_CORRECTIONS, HAS_D, HAS_Z,
            BL, BV, BK,
        )  # fmt: skip


def take_window(
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    arguments: StepArguments,
    *,
    pad_slot: int,
    launch: Launch | None,
) -> torch.Tensor:
    """Launch the window kernel on checked arguments; o [B, T, HV, d_v] of v's type.

    As in replay, rows that flush and rows that do not have a launch each, here of one configuration.
    """
    options, recurrence = pool.options, pool.recurrence
    inputs, out = stage_inputs(arguments)
    if not len(slots):
        return out
    chosen = choose_launch(pool.shape, interpreted=INTERPRETED) if launch is None else launch
    copy = pool.copy if pool.copy is not None else pool.checkpoint
    copy_constants = stored_constants(copy)
    for flush in (True, False):
        window_kernel[find_grid(pool, slots, chosen)](
            *inputs, out, slots, lengths, pool.cursor, pool.base, pool.error, pool.seed, pool.tokens,
            pool.streams[layer], *stored_arguments(pool.checkpoint, layer), *stored_arguments(copy, layer),
            *layer_buffers(pool, layer),
            arguments.scale, options.places, options.length, options.window, out.shape[1],
            **plan_constants(pool, pad_slot, chosen, arguments), **stored_constants(pool.checkpoint),
            **{f"COPY_{name}": copy_constants[name] for name in ("ROW", "BLOCKS", "FORMAT")},
            BL=max(LEAST_PLACES, triton.next_power_of_2(options.length - 1)), SPLIT=options.split, FLUSH=flush,
            EXACT_READOUT=options.readout is Readout.EXACT_READOUT, EXACT_FOLD=options.fold is Fold.EXACT,
            KEEP_INPUTS=options.keeps_inputs(recurrence), KEEP_CORRECTIONS=options.keeps_corrections(recurrence),
            **chosen.flags(),
        )  # fmt: skip
    return out
