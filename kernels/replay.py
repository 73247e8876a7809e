"""The Triton kernels of all recurrences: baseline, flush, and readouts between flushes.

Notable: whether a row flushes is read from a device tensor, so the same launches serve all rows at any cursors and can
be captured in a CUDA Graph. Programs are (row and head, tile of d_v). Everything that depends on L is an ordinary
argument, so that one binary serves all L up to 17. How they are launched: ``dispatch.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgate.kernels.contract import Readout
from driftgate.kernels.readout import (
    load_buffered,
    load_channel_decays,
    multiply_keys,
    multiply_tile,
    prepare_products,
    read_state_output,
)
from driftgate.kernels.step import (
    PTX,
    find_head,
    find_place,
    finish_output,
    fold_buffer,
    load_log_decay,
    load_vector,
    multiply_rows,
    normalise,
    prepare_key,
    store_states,
    take_step,
)
from driftgate.quant.device import load_tile
from driftgate.quant.device_products import load_stored

__all__ = ["READOUTS", "decode_kernel", "flush_kernel", "key_kernel", "product_kernel", "read_kernel"]

READOUTS = {Readout.OUTPUT_ONLY: 0, Readout.EXACT_READOUT: 1, Readout.STATE_OUTPUT: 2}
_EXACT_READOUT = tl.constexpr(READOUTS[Readout.EXACT_READOUT])


@triton.jit(do_not_specialize=["codes_slot"])
def decode_kernel(
    q, k, v, g, beta, D, z, out, slots, error, seed, tokens, streams,
    codes, block_scales, row_scales, codes_slot, blocks_slot, rows_slot, scale,
    PAD: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    ROW: tl.constexpr, BLOCKS: tl.constexpr, FORMAT: tl.constexpr, SR: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Baseline: one step per row, the checkpoint read and written in place. Arguments as ``StepArguments`` has them."""
    i_row = (tl.program_id(0) // HV).to(tl.int64)
    i_hv = tl.program_id(0) % HV
    o_v = tl.program_id(1) * BV + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    slot = tl.load(slots + i_row).to(tl.int64)
    i_head = i_row * HV + i_hv
    if slot == PAD:
        tl.store(out + i_head * DV + o_v, tl.zeros([BV], tl.float32).to(out.dtype.element_ty), mask=o_v < DV)
        return
    p_codes, p_blocks, p_rows = find_head(
        codes, block_scales, row_scales, codes_slot, blocks_slot, rows_slot, slot, i_hv, DV, ROW, BLOCKS
    )
    b_S = load_tile(p_codes, p_blocks, p_rows, o_v, DV, DK, BV, BK, FORMAT)
    b_rate = 0.0 if DELTA else tl.load(g + i_hv)
    b_q, b_k, b_v, b_g, b_beta = load_inputs(
        q, k, v, g, beta, b_rate, i_row, i_hv // (HV // H), i_hv, o_v, o_k, scale,
        H, HV, DK, DV, DELTA, CHANNELS, NORMALISE,
    )  # fmt: skip
    b_S, _ = take_step(b_S, b_k, b_v, b_g, b_beta, DELTA, CHANNELS, BV, BK)
    b_o = multiply_rows(b_S, b_q, BV, BK)
    b_o = finish_output(b_o, b_v, D + i_hv, z + i_head * DV, o_v, DV, HAS_D, HAS_Z)
    tl.store(out + i_head * DV + o_v, b_o.to(out.dtype.element_ty), mask=o_v < DV)
    store_states(
        b_S, p_codes, p_blocks, p_rows, p_codes, p_blocks, p_rows, error + slot, o_v, i_hv,
        seed, tl.load(tokens + slot) + 1, streams + slot, DV, DK, FORMAT, FORMAT, False, SR, BV, BK,
    )  # fmt: skip


@triton.jit
def load_inputs(
    q, k, v, g, beta, b_rate, i_row, i_h, i_hv, o_v, o_k, scale,
    H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """One step of a row and head as the recurrence uses it: q, k, v, log decay, β; all loads before any use."""
    p_k = (i_row * H + i_h) * DK
    i_head = i_row * HV + i_hv
    WIDTH: tl.constexpr = DK if CHANNELS else 1
    b_beta = tl.load(beta + i_head)
    b_k = load_vector(k + p_k, o_k, DK, False)
    b_q = load_vector(q + p_k, o_k, DK, False)
    b_v = tl.load(v + i_head * DV + o_v, mask=o_v < DV, other=0.0).to(tl.float32)
    b_g = load_log_decay(g + i_head * WIDTH, b_beta, b_rate, o_k, DK, DELTA, CHANNELS)
    return normalise(b_q, NORMALISE) * scale, prepare_key(b_k, b_beta, DELTA, NORMALISE), b_v, b_g, b_beta


@triton.jit
def find_buffer(
    keys, values, log_decay, betas, corrections, slot, i_h, i_hv, places,
    H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Pointers at one head of a slot's buffers, in the order of the arguments."""
    WIDTH: tl.constexpr = DK if CHANNELS else 1
    i_buffer = (slot * HV + i_hv) * places
    p_keys = keys + (slot * H + i_h) * places * DK
    return p_keys, values + i_buffer * DV, log_decay + i_buffer * WIDTH, betas + i_buffer, corrections + i_buffer * DV


@triton.jit(do_not_specialize=["places", "n_rows", "codes_slot", "copy_codes_slot"])
def flush_kernel(
    q, k, v, g, beta, D, z, out, slots, cursor, base, flush, error, seed, tokens, streams,
    codes, block_scales, row_scales, codes_slot, blocks_slot, rows_slot,
    copy_codes, copy_blocks, copy_rows, copy_codes_slot, copy_blocks_slot, copy_rows_slot,
    keys, values, log_decay, betas, corrections, scale, places, n_rows,
    PAD: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    RING: tl.constexpr, ROW: tl.constexpr, BLOCKS: tl.constexpr, FORMAT: tl.constexpr,
    SR: tl.constexpr, SPLIT: tl.constexpr, COPY_ROW: tl.constexpr, COPY_BLOCKS: tl.constexpr,
    COPY_FORMAT: tl.constexpr, EXACT_FOLD: tl.constexpr,
    TAKE_STEP: tl.constexpr, ROWS: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Flush the rows whose flush word is set and take their step; without TAKE_STEP every row with entries, no step.

    A program serves ROWS rows, so that a step at which no row flushes costs few programs, which look and end.
    """
    i_hv = tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    o_v = tl.program_id(1) * BV + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    due = flush if TAKE_STEP else cursor
    first_row = (tl.program_id(0) // HV).to(tl.int64) * ROWS
    if ROWS > 1:
        o_r = first_row + tl.arange(0, ROWS)
        b_slots = tl.load(slots + o_r, mask=o_r < n_rows, other=PAD).to(tl.int64)
        b_due = tl.load(due + b_slots, mask=(b_slots != PAD) & (o_r < n_rows), other=0)
        if tl.max(b_due, axis=0) == 0:
            return
    b_rate = 0.0 if DELTA else tl.load(g + i_hv)
    for row in range(ROWS):
        i_row = first_row + row
        slot = tl.load(slots + i_row, mask=i_row < n_rows, other=PAD).to(tl.int64)
        if tl.load(due + slot, mask=slot != PAD, other=0) != 0:
            h = tl.load(cursor + slot)
            first = 0
            if RING:
                first = tl.load(base + slot)
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
            b_S = load_tile(p_codes, p_blocks, p_rows, o_v, DV, DK, BV, BK, FORMAT)
            b_S = fold_buffer(
                b_S, h, first, places, p_keys, p_values, p_log_decay, p_betas, p_corrections, b_rate, o_v, o_k,
                DV, DK, RING, DELTA, CHANNELS, NORMALISE, EXACT_FOLD, BV, BK,
            )  # fmt: skip
            seen = tl.load(tokens + slot)
            if TAKE_STEP:
                seen += 1
                b_q, b_k, b_v, b_g, b_beta = load_inputs(
                    q, k, v, g, beta, b_rate, i_row, i_h, i_hv, o_v, o_k, scale,
                    H, HV, DK, DV, DELTA, CHANNELS, NORMALISE,
                )  # fmt: skip
                b_S, _ = take_step(b_S, b_k, b_v, b_g, b_beta, DELTA, CHANNELS, BV, BK)
                b_o = multiply_rows(b_S, b_q, BV, BK)
                p_v = (i_row * HV + i_hv) * DV
                b_o = finish_output(b_o, b_v, D + i_hv, z + p_v, o_v, DV, HAS_D, HAS_Z)
                tl.store(out + p_v + o_v, b_o.to(out.dtype.element_ty), mask=o_v < DV)
            store_states(
                b_S, p_codes, p_blocks, p_rows, p_copy_codes, p_copy_blocks, p_copy_rows, error + slot, o_v, i_hv,
                seed, seen, streams + slot, DV, DK, FORMAT, COPY_FORMAT, SPLIT, SR, BV, BK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["places"])
def key_kernel(
    q, k, g, slots, cursor, base, flush, keys, log_decay, products, vectors, scale, places,
    PAD: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, BL: tl.constexpr, RING: tl.constexpr,
    CHANNELS: tl.constexpr, NORMALISE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """What all tiles of a readout from products share: the buffered keys times k and q of the step.

    One program per row and key head, with CHANNELS per value head, whose decays go into the products. products:
    [B, heads, 2, BL] float32; vectors: P ⊙ k and P ⊙ q, [B, HV, 2, d_k] float32, with CHANNELS.
    """
    HEADS: tl.constexpr = HV if CHANNELS else H
    i_row = (tl.program_id(0) // HEADS).to(tl.int64)
    i_head = tl.program_id(0) % HEADS
    i_h = i_head // (HEADS // H)
    o_k = tl.arange(0, BK)
    o_l = tl.arange(0, BL)
    slot = tl.load(slots + i_row).to(tl.int64)
    if slot == PAD:
        return
    h = tl.load(cursor + slot)
    if tl.load(flush + slot) != 0:
        return
    first = 0
    if RING:
        first = tl.load(base + slot)
    p_k = (i_row * H + i_h) * DK
    b_k = load_vector(k + p_k, o_k, DK, NORMALISE)
    b_q = load_vector(q + p_k, o_k, DK, NORMALISE) * scale
    p_keys = keys + (slot * H + i_h) * places * DK
    i_out = i_row * HEADS + i_head
    b_w = 0.0
    if CHANNELS:
        p_log_decay = log_decay + (slot * HV + i_head) * places * DK
        b_g = tl.load(g + i_out * DK + o_k, mask=o_k < DK, other=0.0)
        b_P, b_w = load_channel_decays(h, first, places, p_log_decay, b_g, DK, RING, BL, BK)
        tl.store(vectors + i_out * 2 * DK + o_k, b_k * b_P, mask=o_k < DK)
        tl.store(vectors + (i_out * 2 + 1) * DK + o_k, b_q * b_P, mask=o_k < DK)
    b_ck, b_cq = multiply_keys(h, first, places, p_keys, b_w, b_k, b_q, DK, RING, CHANNELS, NORMALISE, BL, BK)
    o_e = tl.where(o_l < h, h - 1 - o_l, o_l) if CHANNELS else o_l
    tl.store(products + i_out * 2 * BL + o_e, b_ck)
    tl.store(products + (i_out * 2 + 1) * BL + o_e, b_cq)


@triton.jit
def append_gates(
    place, p_keys, p_log_decay, p_betas, p_k, b_g, b_beta, o_k, first_of_group,
    DK: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr, KEEP_INPUTS: tl.constexpr,
):  # fmt: skip
    """Write a step's key as delivered (the first value head of its group does), log decay and β into the buffer."""
    if first_of_group:
        b_raw = tl.load(p_k + o_k, mask=o_k < DK, other=0.0)
        tl.store(p_keys + place * DK + o_k, b_raw, mask=o_k < DK)
    if CHANNELS:
        tl.store(p_log_decay + place * DK + o_k, b_g, mask=o_k < DK)
    elif DELTA:
        tl.store(p_log_decay + place, b_g)
    if KEEP_INPUTS:
        tl.store(p_betas + place, b_beta)


@triton.jit(do_not_specialize=["places", "copy_codes_slot"])
def read_kernel(
    q, k, v, g, beta, D, z, out, slots, cursor, base, flush,
    copy_codes, copy_blocks, copy_rows, copy_codes_slot, copy_blocks_slot, copy_rows_slot,
    keys, values, log_decay, betas, corrections, scale, places,
    PAD: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BL: tl.constexpr, RING: tl.constexpr,
    COPY_ROW: tl.constexpr, COPY_BLOCKS: tl.constexpr,
    COPY_FORMAT: tl.constexpr, READOUT: tl.constexpr, DOT: tl.constexpr,
    KEEP_INPUTS: tl.constexpr, KEEP_CORRECTIONS: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A buffered step of the rows whose flush word is not set, from a rebuilt state, and one buffer entry.

    The buffer is read at entries below cursor[slot] only: what lies behind may be NaN from an earlier request.
    """
    i_row = (tl.program_id(0) // HV).to(tl.int64)
    i_hv = tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    i_v = tl.program_id(1)
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    slot = tl.load(slots + i_row).to(tl.int64)
    p_v = (i_row * HV + i_hv) * DV
    if slot == PAD:
        tl.store(out + p_v + o_v, tl.zeros([BV], tl.float32).to(out.dtype.element_ty), mask=o_v < DV)
        return
    h = tl.load(cursor + slot)
    if tl.load(flush + slot) != 0:
        return
    first = 0
    if RING:
        first = tl.load(base + slot)
    p_codes, p_blocks, p_rows = find_head(
        copy_codes, copy_blocks, copy_rows, copy_codes_slot, copy_blocks_slot, copy_rows_slot, slot, i_hv,
        DV, COPY_ROW, COPY_BLOCKS,
    )  # fmt: skip
    p_keys, p_values, p_log_decay, p_betas, p_corrections = find_buffer(
        keys, values, log_decay, betas, corrections, slot, i_h, i_hv, places, H, HV, DK, DV, CHANNELS
    )
    p_added = p_corrections if DELTA else p_values
    b_rate = 0.0 if DELTA else tl.load(g + i_hv)
    b_S = load_tile(p_codes, p_blocks, p_rows, o_v, DV, DK, BV, BK, COPY_FORMAT)
    b_q, b_k, b_v, b_g, b_beta = load_inputs(
        q, k, v, g, beta, b_rate, i_row, i_h, i_hv, o_v, o_k, scale, H, HV, DK, DV, DELTA, CHANNELS, NORMALISE
    )
    if READOUT == _EXACT_READOUT:
        b_S = fold_buffer(
            b_S, h, first, places, p_keys, p_values, p_log_decay, p_betas, p_corrections, b_rate, o_v, o_k,
            DV, DK, RING, DELTA, CHANNELS, NORMALISE, True, BV, BK,
        )  # fmt: skip
        b_S, b_u = take_step(b_S, b_k, b_v, b_g, b_beta, DELTA, CHANNELS, BV, BK)
        b_o = multiply_rows(b_S, b_q, BV, BK)
    else:
        b_o, b_u = read_state_output(
            b_S, h, first, places, p_keys, p_added, p_log_decay, p_betas, b_rate, b_q, b_k, b_v, b_g, b_beta, i_v,
            DV, DK, RING, DELTA, CHANNELS, NORMALISE, DOT, BL, BV, BK,
        )  # fmt: skip
    b_o = finish_output(b_o, b_v, D + i_hv, z + p_v, o_v, DV, HAS_D, HAS_Z)
    tl.store(out + p_v + o_v, b_o.to(out.dtype.element_ty), mask=o_v < DV)
    place = find_place(h, first, places, RING)
    if i_v == 0:
        append_gates(
            place, p_keys, p_log_decay, p_betas, k + (i_row * H + i_h) * DK, b_g, b_beta, o_k, i_hv % (HV // H) == 0,
            DK, DELTA, CHANNELS, KEEP_INPUTS,
        )  # fmt: skip
    if KEEP_INPUTS:
        tl.store(p_values + place * DV + o_v, b_v.to(values.dtype.element_ty), mask=o_v < DV)
    if KEEP_CORRECTIONS:
        tl.store(p_corrections + place * DV + o_v, b_u.to(corrections.dtype.element_ty), mask=o_v < DV)


@triton.jit(do_not_specialize=["places", "copy_codes_slot"])
def product_kernel(
    q, k, v, g, beta, D, z, out, slots, cursor, base, flush,
    copy_codes, copy_blocks, copy_rows, copy_codes_slot, copy_blocks_slot, copy_rows_slot,
    keys, values, log_decay, betas, corrections, products, vectors, scale, places,
    PAD: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BL: tl.constexpr, RING: tl.constexpr,
    COPY_ROW: tl.constexpr, COPY_BLOCKS: tl.constexpr,
    COPY_FORMAT: tl.constexpr,
    KEEP_INPUTS: tl.constexpr, KEEP_CORRECTIONS: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A buffered step of the rows whose flush word is not set, from products, and one buffer entry.

    One program per row and head: what all tiles of d_v share is done once, and while one tile is multiplied the next
    is on its way. The buffer is read at entries below cursor[slot] only, as in ``read_kernel``.
    """
    TILES: tl.constexpr = (DV + BV - 1) // BV
    i_row = (tl.program_id(0) // HV).to(tl.int64)
    i_hv = tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, BK)
    slot = tl.load(slots + i_row).to(tl.int64)
    i_head = i_row * HV + i_hv
    p_v = i_head * DV
    if slot == PAD:
        for i_v in range(TILES):
            o_v = i_v * BV + tl.arange(0, BV)
            tl.store(out + p_v + o_v, tl.zeros([BV], tl.float32).to(out.dtype.element_ty), mask=o_v < DV)
        return
    h = tl.load(cursor + slot)
    if tl.load(flush + slot) != 0:
        return
    first = 0
    if RING:
        first = tl.load(base + slot)
    p_codes, p_blocks, p_rows = find_head(
        copy_codes, copy_blocks, copy_rows, copy_codes_slot, copy_blocks_slot, copy_rows_slot, slot, i_hv,
        DV, COPY_ROW, COPY_BLOCKS,
    )  # fmt: skip
    p_keys, p_values, p_log_decay, p_betas, p_corrections = find_buffer(
        keys, values, log_decay, betas, corrections, slot, i_h, i_hv, places, H, HV, DK, DV, CHANNELS
    )
    p_added = p_corrections if DELTA else p_values
    o_v = tl.arange(0, BV)
    b_next = load_stored(p_codes, p_blocks, p_rows, o_v, DV, DK, BV, BK, COPY_FORMAT, PTX)
    b_next_U = load_buffered(p_added, h, first, places, DV, DV, RING, BL, BV)
    b_rate = 0.0 if DELTA else tl.load(g + i_hv)
    b_q, b_k, _, b_g, b_beta = load_inputs(
        q, k, v, g, beta, b_rate, i_row, i_h, i_hv, o_v, o_k, scale, H, HV, DK, DV, DELTA, CHANNELS, NORMALISE
    )
    i_products = i_head if CHANNELS else i_row * H + i_h
    b_shared = prepare_products(
        h, first, places, products + i_products * 2 * BL, vectors + i_products * 2 * DK, p_log_decay, p_betas, b_rate,
        b_q, b_k, b_g, o_k, DK, COPY_FORMAT, RING, DELTA, CHANNELS, BL, BK,
    )  # fmt: skip
    place = find_place(h, first, places, RING)
    for i_v in tl.static_range(TILES):
        b_stored, b_U = b_next, b_next_U
        o_v = i_v * BV + tl.arange(0, BV)
        i_next = min(i_v + 1, TILES - 1) * BV
        b_next = load_stored(p_codes, p_blocks, p_rows, i_next + tl.arange(0, BV), DV, DK, BV, BK, COPY_FORMAT, PTX)
        b_next_U = load_buffered(p_added + i_next, h, first, places, DV - i_next, DV, RING, BL, BV)
        b_v = tl.load(v + p_v + o_v, mask=o_v < DV, other=0.0).to(tl.float32)
        b_o, b_u = multiply_tile(b_stored, b_U, b_shared, b_v, b_beta, DELTA, COPY_FORMAT, BV, BK)
        b_o = finish_output(b_o, b_v, D + i_hv, z + p_v, o_v, DV, HAS_D, HAS_Z)
        tl.store(out + p_v + o_v, b_o.to(out.dtype.element_ty), mask=o_v < DV)
        if KEEP_INPUTS:
            tl.store(p_values + place * DV + o_v, b_v.to(values.dtype.element_ty), mask=o_v < DV)
        if KEEP_CORRECTIONS:
            tl.store(p_corrections + place * DV + o_v, b_u.to(corrections.dtype.element_ty), mask=o_v < DV)
    append_gates(
        place, p_keys, p_log_decay, p_betas, k + (i_row * H + i_h) * DK, b_g, b_beta, o_k, i_hv % (HV // H) == 0,
        DK, DELTA, CHANNELS, KEEP_INPUTS,
    )  # fmt: skip
