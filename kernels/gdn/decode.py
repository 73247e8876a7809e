"""Gated DeltaNet decode in Triton: baseline step, replay step and flush.

Notable: one jitted step function is inlined by all three, with an explicit ``tl.fma`` for the rank-1 update and no
``tl.dot``, so that with equal tiles the exact route gives the baseline's bits. Whether a row flushes is read from a
device tensor, so one launch serves all rows. Two grids are merged in one: program (row·HV + head, tile of d_v).
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from driftgate.kernels.contract import Backend, Fold, Readout
from driftgate.kernels.launch import Launch, choose_launch
from driftgate.kernels.pool import PAD_SLOT, StatePool, StoredStates
from driftgate.kernels.validate import check_gates, check_kind, check_rows
from driftgate.quant.device import FORMAT_IDS, load_tile, round_trip_tile, store_tile

__all__ = ["decode_step", "flush_now", "replay_step", "require"]

LEAST_PLACES = 16
"""Least tile of buffered entries. On an H200 with Triton 3.6, tiles of 2, 4 and 8 gave wrong outputs at every step that
found entries, 16 and more right ones (tests/gpu compares every L); which operation goes wrong was not found out."""

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
if INTERPRETED:
    from driftgate.kernels import interpreter

    interpreter.install()


@triton.jit
def gdn_step(b_S, b_k, b_v, b_g, b_beta, BV: tl.constexpr, BK: tl.constexpr):
    """S = exp(g)·S; u = β(v − S k); S = fma(u, k, S). b_S [BV, BK], b_k [BK], b_v [BV] float32; returns S, u."""
    b_S = b_S * tl.exp(b_g)
    b_u = b_beta * (b_v - tl.sum(b_S * b_k[None, :], axis=1))
    u = tl.broadcast_to(b_u[:, None], (BV, BK))
    k = tl.broadcast_to(b_k[None, :], (BV, BK))
    return tl.fma(u, k, b_S), b_u


@triton.jit
def load_vector(p, o, N: tl.constexpr, NORMALISE: tl.constexpr):
    """A vector of N elements in FP32, divided by sqrt(sum x² + 1e-6) if asked. p: first element; o: arange."""
    b = tl.load(p + o, mask=o < N, other=0.0).to(tl.float32)
    if NORMALISE:
        b = b * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(b * b, axis=0) + 1e-6))
    return b


@triton.jit
def load_buffered(p, h, n, ROW: tl.constexpr, BL: tl.constexpr, BN: tl.constexpr):
    """The first h vectors of a buffer and of each the first n elements, ROW apart: float32 [BL, BN], else 0.

    Loaded as [BL, BN/8, 8]: a load of [BL, BN] may have the shape of the state's tile and would then choose its layout.
    """
    o_l = tl.arange(0, BL)[:, None, None]
    o_n = tl.arange(0, BN // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    b = tl.load(p + o_l * ROW + o_n, mask=(o_l < h) & (o_n < n), other=0.0)
    return tl.reshape(b.to(tl.float32), [BL, BN])


@triton.jit
def fold_buffer(
    b_S, h, p_keys, p_values, p_log_decay, p_betas, p_corrections, o_v, o_k,
    DV: tl.constexpr, DK: tl.constexpr, NORMALISE: tl.constexpr, EXACT: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Bring a state over h buffered steps: as the baseline takes them (EXACT), or with the corrections û as stored."""
    for j in range(0, h):
        b_k = load_vector(p_keys + j * DK, o_k, DK, NORMALISE)
        b_g = tl.load(p_log_decay + j)
        if EXACT:
            b_v = tl.load(p_values + j * DV + o_v, mask=o_v < DV, other=0.0).to(tl.float32)
            b_S, _ = gdn_step(b_S, b_k, b_v, b_g, tl.load(p_betas + j), BV, BK)
        else:
            b_u = tl.load(p_corrections + j * DV + o_v, mask=o_v < DV, other=0.0).to(tl.float32)
            u = tl.broadcast_to(b_u[:, None], (BV, BK))
            b_S = tl.fma(u, tl.broadcast_to(b_k[None, :], (BV, BK)), b_S * tl.exp(b_g))
    return b_S


@triton.jit
def decode_kernel(
    q, k, v, g, beta, out, slots, error,
    codes, block_scales, row_scales, codes_slot, blocks_slot, rows_slot, scale,
    PAD: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    ROW: tl.constexpr, BLOCKS: tl.constexpr, FORMAT: tl.constexpr, NORMALISE: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Baseline: one step per row, the checkpoint read and written in place. Arguments as ``decode_step`` lays out."""
    i_row = (tl.program_id(0) // HV).to(tl.int64)
    i_hv = tl.program_id(0) % HV
    o_v = tl.program_id(1) * BV + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    slot = tl.load(slots + i_row).to(tl.int64)
    p_v = (i_row * HV + i_hv) * DV
    if slot == PAD:
        tl.store(out + p_v + o_v, tl.zeros([BV], tl.float32).to(out.dtype.element_ty), mask=o_v < DV)
        return
    p_k = (i_row * H + i_hv // (HV // H)) * DK
    b_k = load_vector(k + p_k, o_k, DK, NORMALISE)
    b_q = load_vector(q + p_k, o_k, DK, NORMALISE) * scale
    b_v = tl.load(v + p_v + o_v, mask=o_v < DV, other=0.0).to(tl.float32)
    p_codes = codes + slot * codes_slot + i_hv * (DV * ROW)
    p_blocks = block_scales + slot * blocks_slot + i_hv * (DV * BLOCKS)
    p_rows = row_scales + slot * rows_slot + i_hv * DV
    b_S = load_tile(p_codes, p_blocks, p_rows, o_v, DV, DK, BV, BK, FORMAT)
    b_g = tl.load(g + i_row * HV + i_hv)
    b_beta = tl.load(beta + i_row * HV + i_hv)
    b_S, _ = gdn_step(b_S, b_k, b_v, b_g, b_beta, BV, BK)
    b_o = tl.sum(b_S * b_q[None, :], axis=1)
    tl.store(out + p_v + o_v, b_o.to(out.dtype.element_ty), mask=o_v < DV)
    if store_tile(p_codes, p_blocks, p_rows, b_S, o_v, DV, DK, BV, BK, FORMAT) != 0:
        tl.store(error + slot, 1)


@triton.jit
def replay_kernel(
    q, k, v, g, beta, out, slots, cursor, flush, error,
    codes, block_scales, row_scales, codes_slot, blocks_slot, rows_slot,
    copy_codes, copy_blocks, copy_rows, copy_codes_slot, copy_blocks_slot, copy_rows_slot,
    keys, values, log_decay, betas, corrections, scale,
    PAD: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PLACES: tl.constexpr, BL: tl.constexpr, ROW: tl.constexpr, BLOCKS: tl.constexpr, FORMAT: tl.constexpr,
    SPLIT: tl.constexpr, COPY_ROW: tl.constexpr, COPY_BLOCKS: tl.constexpr, COPY_FORMAT: tl.constexpr,
    EXACT_READOUT: tl.constexpr, EXACT_FOLD: tl.constexpr, KEEP_INPUTS: tl.constexpr,
    KEEP_CORRECTIONS: tl.constexpr, TAKE_STEP: tl.constexpr, NORMALISE: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Replay: a flush where flush[slot] says so, else a buffered step; without TAKE_STEP a flush alone.

    The buffer is read at places below cursor[slot] only: what lies behind may be NaN from an earlier request.
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
        if TAKE_STEP:
            tl.store(out + p_v + o_v, tl.zeros([BV], tl.float32).to(out.dtype.element_ty), mask=o_v < DV)
        return
    h = tl.load(cursor + slot)
    if TAKE_STEP:
        flushing = tl.load(flush + slot) != 0
    else:
        if h == 0:
            return
        flushing: tl.constexpr = True

    p_codes = codes + slot * codes_slot + i_hv * (DV * ROW)
    p_blocks = block_scales + slot * blocks_slot + i_hv * (DV * BLOCKS)
    p_rows = row_scales + slot * rows_slot + i_hv * DV
    p_copy_codes = copy_codes + slot * copy_codes_slot + i_hv * (DV * COPY_ROW)
    p_copy_blocks = copy_blocks + slot * copy_blocks_slot + i_hv * (DV * COPY_BLOCKS)
    p_copy_rows = copy_rows + slot * copy_rows_slot + i_hv * DV
    p_keys = keys + (slot * H + i_h) * (PLACES * DK)
    p_gates = (slot * HV + i_hv) * PLACES
    p_values = p_gates * DV

    if TAKE_STEP:
        p_k = (i_row * H + i_h) * DK
        b_k = load_vector(k + p_k, o_k, DK, NORMALISE)
        b_q = load_vector(q + p_k, o_k, DK, NORMALISE) * scale
        b_v = tl.load(v + p_v + o_v, mask=o_v < DV, other=0.0).to(tl.float32)
        b_g = tl.load(g + i_row * HV + i_hv)
        b_beta = tl.load(beta + i_row * HV + i_hv)

    # State of a flush and state of a readout are loaded apart, each folded by itself: joined in one value, the copy's
    # wider loads would choose the layout of the flush's sums, and with it the bits of the recurrence.
    if flushing:
        b_S = load_tile(p_codes, p_blocks, p_rows, o_v, DV, DK, BV, BK, FORMAT)
        b_S = fold_buffer(
            b_S, h, p_keys, values + p_values, log_decay + p_gates, betas + p_gates, corrections + p_values, o_v, o_k,
            DV, DK, NORMALISE, EXACT_FOLD, BV, BK,
        )  # fmt: skip
        if TAKE_STEP:
            b_S, b_u = gdn_step(b_S, b_k, b_v, b_g, b_beta, BV, BK)
            b_o = tl.sum(b_S * b_q[None, :], axis=1)
        bad = store_tile(p_codes, p_blocks, p_rows, b_S, o_v, DV, DK, BV, BK, FORMAT)
        if SPLIT:
            b_S = round_trip_tile(b_S, DK, BV, BK, FORMAT)
            bad |= store_tile(p_copy_codes, p_copy_blocks, p_copy_rows, b_S, o_v, DV, DK, BV, BK, COPY_FORMAT)
        if bad != 0:
            tl.store(error + slot, 1)
    elif EXACT_READOUT:
        b_R = load_tile(p_copy_codes, p_copy_blocks, p_copy_rows, o_v, DV, DK, BV, BK, COPY_FORMAT)
        b_R = fold_buffer(
            b_R, h, p_keys, values + p_values, log_decay + p_gates, betas + p_gates, corrections + p_values, o_v, o_k,
            DV, DK, NORMALISE, True, BV, BK,
        )  # fmt: skip
        b_R, b_u = gdn_step(b_R, b_k, b_v, b_g, b_beta, BV, BK)
        b_o = tl.sum(b_R * b_q[None, :], axis=1)
    else:
        o_l = tl.arange(0, BL)
        used = o_l < h
        # e_j = g_{j+1}, the newest entry's is the current step's: suffix sums are Σ g over j < i <= t
        b_e = tl.load(log_decay + p_gates + 1 + o_l, mask=o_l + 1 < h, other=0.0)
        b_e = tl.where(o_l + 1 == h, b_g, b_e)
        b_w = tl.exp(tl.cumsum(b_e, axis=0, reverse=True))
        b_past = tl.load(log_decay + p_gates + o_l, mask=used, other=0.0)
        b_P = tl.exp(tl.sum(b_past, axis=0) + b_g)
        b_K = load_buffered(p_keys, h, DK, DK, BL, BK)
        if NORMALISE:
            b_w = b_w * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(b_K * b_K, axis=1) + 1e-6))
        b_ck = b_w * tl.sum(b_K * b_k[None, :], axis=1)
        b_cq = b_w * tl.sum(b_K * b_q[None, :], axis=1)
        b_U = load_buffered(corrections + p_values + i_v * BV, h, DV - i_v * BV, DV, BL, BV)
        b_R = load_tile(p_copy_codes, p_copy_blocks, p_copy_rows, o_v, DV, DK, BV, BK, COPY_FORMAT)
        b_Rk = b_P * tl.sum(b_R * b_k[None, :], axis=1) + tl.sum(b_U * b_ck[:, None], axis=0)
        b_Rq = b_P * tl.sum(b_R * b_q[None, :], axis=1) + tl.sum(b_U * b_cq[:, None], axis=0)
        b_u = b_beta * (b_v - b_Rk)
        b_o = b_Rq + b_u * tl.sum(b_k * b_q, axis=0)

    if TAKE_STEP:
        tl.store(out + p_v + o_v, b_o.to(out.dtype.element_ty), mask=o_v < DV)
        if not flushing:
            if (i_v == 0) & (i_hv % (HV // H) == 0):
                raw_k = tl.load(k + p_k + o_k, mask=o_k < DK, other=0.0)
                tl.store(p_keys + h * DK + o_k, raw_k, mask=o_k < DK)
            if i_v == 0:
                tl.store(log_decay + p_gates + h, b_g)
                if KEEP_INPUTS:
                    tl.store(betas + p_gates + h, b_beta)
            if KEEP_INPUTS:
                tl.store(values + p_values + h * DV + o_v, b_v.to(values.dtype.element_ty), mask=o_v < DV)
            if KEEP_CORRECTIONS:
                p_u = corrections + p_values + h * DV + o_v
                tl.store(p_u, b_u.to(corrections.dtype.element_ty), mask=o_v < DV)


def decode_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    pad_slot: int = PAD_SLOT,
    scale: float | None = None,
    qk_l2norm: bool = True,
    launch: Launch | None = None,
    alternative: bool = False,
) -> torch.Tensor:
    """Take one step per row with the step-by-step baseline kernel.

    Recurrence: S = exp(g)·S; u = β(v − S k); S = S + u kᵀ; o = S q (arXiv 2412.06464, eq. 10), in FP32; the state is
    rounded once, when it is stored in the pool's recurrence format. Twin: ``reference.decode_step``.

    Args:
        q, k: [B, H, d_k] of the pool's activation type, any strides (staged when not contiguous and aligned).
        v: [B, HV, d_v], likewise.
        g, beta: [B, HV] float32, log decay and β.
        pool: its checkpoint is updated in place; cursors are left to ``pool.advance``.
        layer: recurrent layer, counted from 0.
        slots: [B] int32 or int64, each slot at most once.
        pad_slot: rows with this slot write zeros to their output and nothing else.
        scale: multiplies q; None for d_k^-1/2.
        qk_l2norm: divide q and k by sqrt(sum x² + 1e-6).
        launch: None for the table's configuration.
        alternative: the table's other legal configuration, which adds in another order (for the noise floor).

    Returns:
        o [B, HV, d_v] of v's type.

    Raises:
        ValueError: an argument that does not fit; nothing is written.
    """
    check_kind(pool, step_by_step=True)
    if alternative:
        launch = choose_launch(pool.shape, interpreted=INTERPRETED, alternative=True)
    launch, grid, inputs, out, common = _prepare(
        q, k, v, g, beta, pool, layer, slots, pad_slot, scale, qk_l2norm, launch
    )
    if grid[0]:
        decode_kernel[grid](
            *inputs, out, slots, pool.error, *_stored(pool.checkpoint, layer)[:6], common.pop("scale"),
            **common, **_stored_constants(pool.checkpoint), **launch.flags(),
        )  # fmt: skip
    return out


def replay_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    pad_slot: int = PAD_SLOT,
    scale: float | None = None,
    qk_l2norm: bool = True,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Take one step per row with the replay kernel: a flush where ``pool.flush`` says so, else a buffered step.

    A flush reads the checkpoint, folds the buffer, takes the step as the baseline does, outputs from the FP32 state
    and writes checkpoint and copy (the copy from what the checkpoint reads back as). Any other step reads the copy,
    or the checkpoint where there is none, and writes its buffer entry only. Arguments, result, errors: ``decode_step``.
    """
    check_kind(pool, step_by_step=False)
    launch, grid, inputs, out, common = _prepare(
        q, k, v, g, beta, pool, layer, slots, pad_slot, scale, qk_l2norm, launch
    )
    if grid[0]:
        _launch_replay(pool, layer, slots, inputs, out, grid, common, launch, take_step=True)
    return out


def flush_now(pool: StatePool, slots: torch.Tensor, *, qk_l2norm: bool = True, launch: Launch | None = None) -> None:
    """Fold the buffers of slots [n] without a step, in every layer; a slot at cursor 0 is left as it is.

    For prefix snapshots and prompt continuation. Requantising is not idempotent to the bit, hence the exception.
    """
    check_rows(pool, 0, slots, PAD_SLOT)
    if pool.options.step_by_step or not len(slots):
        return
    shape = pool.shape
    launch = launch or choose_launch(shape, interpreted=INTERPRETED)
    grid = (len(slots) * shape.value_heads, triton.cdiv(shape.d_v, launch.block_v))
    dummy = pool.log_decay
    for layer in range(pool.n_layers):
        common = _common(pool, PAD_SLOT, None, qk_l2norm, launch)
        _launch_replay(pool, layer, slots, [dummy] * 5, dummy, grid, common, launch, take_step=False)
    index = slots.long()
    pool.cursor[index] = 0
    pool.flush[index] = pool._flushes(pool.cursor[index], pool.tokens[index])


def require(backend: Backend) -> None:
    """Check that this process runs the kernels the way that a backend says.

    Raises:
        RuntimeError: says which variable to set, or that there is no GPU.
    """
    if (backend is Backend.TRITON_INTERPRET) != INTERPRETED:
        wanted = "TRITON_INTERPRET=1" if backend is Backend.TRITON_INTERPRET else "no TRITON_INTERPRET"
        raise RuntimeError(f"backend {backend.value} needs a process that was started with {wanted}")
    if backend is Backend.TRITON and not torch.cuda.is_available():
        raise RuntimeError("backend triton needs a CUDA device; use --backend torch or triton-interpret")


def _launch_replay(pool, layer, slots, inputs, out, grid, common, launch, *, take_step) -> None:  # type: ignore[no-untyped-def]
    """Launch ``replay_kernel`` on one layer."""
    options = pool.options
    copy = pool.copy if pool.copy is not None else pool.checkpoint
    copy_constants = {f"COPY_{name}": value for name, value in _stored_constants(copy).items()}
    dummy = pool.log_decay
    buffers = [
        dummy if b is None else b[layer] for b in (pool.keys, pool.values, pool.log_decay, pool.beta, pool.corrections)
    ]
    replay_kernel[grid](
        *inputs, out, slots, pool.cursor, pool.flush, pool.error,
        *_stored(pool.checkpoint, layer), *_stored(copy, layer), *buffers, common.pop("scale"),
        **common, **_stored_constants(pool.checkpoint), **copy_constants,
        PLACES=options.places, BL=max(LEAST_PLACES, triton.next_power_of_2(options.places)), SPLIT=options.split,
        EXACT_READOUT=options.readout is Readout.EXACT_READOUT, EXACT_FOLD=options.fold is Fold.EXACT,
        KEEP_INPUTS=options.keeps_inputs, KEEP_CORRECTIONS=options.keeps_corrections, TAKE_STEP=take_step,
        **launch.flags(),
    )  # fmt: skip


def _prepare(q, k, v, g, beta, pool, layer, slots, pad_slot, scale, qk_l2norm, launch):  # type: ignore[no-untyped-def]
    """Checked and staged inputs, the output, grid and the arguments that both kernels share."""
    check_rows(pool, layer, slots, pad_slot)
    check_gates(q, k, v, {"g": g, "beta": beta}, pool, len(slots))
    launch = launch or choose_launch(pool.shape, interpreted=INTERPRETED)
    inputs = [_stage(x) for x in (q, k, v, g, beta)]
    out = torch.empty_like(inputs[2])
    grid = (len(slots) * pool.shape.value_heads, triton.cdiv(pool.shape.d_v, launch.block_v))
    return launch, grid, inputs, out, _common(pool, pad_slot, scale, qk_l2norm, launch)


def _common(pool: StatePool, pad_slot: int, scale: float | None, qk_l2norm: bool, launch: Launch) -> dict[str, object]:
    shape = pool.shape
    return {
        "scale": shape.d_k**-0.5 if scale is None else scale,
        "PAD": pad_slot, "H": shape.key_heads, "HV": shape.value_heads, "DK": shape.d_k, "DV": shape.d_v,
        "NORMALISE": qk_l2norm, "BV": launch.block_v, "BK": launch.block_k,
    }  # fmt: skip


def _stage(x: torch.Tensor) -> torch.Tensor:
    """Contiguous and 16-byte aligned, so that one specialisation of the kernels exists."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _stored(states: StoredStates, layer: int) -> tuple[object, ...]:
    """Pointers and slot strides (elements) of one layer's stored states; absent parts point at the codes."""
    codes = states.codes[layer]
    blocks = codes if states.block_scales is None else states.block_scales[layer]
    rows = codes if states.row_scales is None else states.row_scales[layer]
    return codes, blocks, rows, codes.stride(0), blocks.stride(0), rows.stride(0)


def _stored_constants(states: StoredStates) -> dict[str, int]:
    """Elements of a stored row, blocks of a row, and the format's id in kernels."""
    return {
        "ROW": states.codes.shape[-1],
        "BLOCKS": 0 if states.block_scales is None else states.block_scales.shape[-1],
        "FORMAT": int(FORMAT_IDS[states.format.name]),
    }
