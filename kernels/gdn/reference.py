"""Torch twin of the Gated DeltaNet decode kernels, vectorised over rows and heads.

Recurrence (Yang et al., Gated Delta Networks, arXiv 2412.06464, eq. 10; per value head, state S [d_v, d_k]):
    S = exp(g)·S;   u = β(v − S k);   S = S + u kᵀ;   o = S q
with k, q divided by sqrt(sum x² + 1e-6) where the model asks for it, and q multiplied by d_k^-1/2.

The same functions as ``decode.py``, on the same StatePool, in any compute dtype: with ``torch.float64`` they are the
reference that the kernels are checked against, with ``torch.float32`` they are the backend ``torch``.
"""

from __future__ import annotations

import torch

from driftgate.kernels.contract import Fold, Readout
from driftgate.kernels.pool import PAD_SLOT, StatePool, StoredStates
from driftgate.kernels.validate import check_gates, check_kind, check_rows

__all__ = ["decode_step", "flush_now", "normalise", "replay_step", "step"]

EPSILON = 1e-6


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Divide by sqrt(sum x² + 1e-6) along the last axis."""
    return x * (1.0 / torch.sqrt((x * x).sum(-1, keepdim=True) + EPSILON))


def step(
    state: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    by_matmul: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of the recurrence.

    Args:
        state: [..., d_v, d_k].
        k: [..., d_k], already normalised; v: [..., d_v]; g, beta: [...].
        by_matmul: form S k as a matrix product, which adds in another order.

    Returns:
        The new state and the correction u [..., d_v].
    """
    state = state * g.exp()[..., None, None]
    u = beta[..., None] * (v - _contract(state, k, by_matmul=by_matmul))
    return state + u[..., None] * k[..., None, :], u


def _contract(state: torch.Tensor, x: torch.Tensor, *, by_matmul: bool = False) -> torch.Tensor:
    """S x, [..., d_v]."""
    return torch.matmul(state, x[..., None])[..., 0] if by_matmul else (state * x[..., None, :]).sum(-1)


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
    compute_dtype: torch.dtype = torch.float32,
    alternative: bool = False,
) -> torch.Tensor:
    """Step-by-step baseline: reads and writes the checkpoint. Arguments and result as ``decode.decode_step``.

    ``alternative`` adds in another order (a matrix product), for the noise floor.
    """
    check_kind(pool, step_by_step=True)
    rows = _Rows(q, k, v, g, beta, pool, layer, slots, pad_slot, scale, qk_l2norm, compute_dtype)
    if rows.any:
        state, _ = step(rows.load(pool.checkpoint), rows.k, rows.v, rows.g, rows.beta, by_matmul=alternative)
        rows.write_output(_contract(state, rows.q, by_matmul=alternative))
        _write_back(pool, layer, rows.slots, state)
    return rows.out


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
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Replay step, a flush where ``pool.flush`` says so. Arguments and result as ``decode.replay_step``."""
    check_kind(pool, step_by_step=False)
    rows = _Rows(q, k, v, g, beta, pool, layer, slots, pad_slot, scale, qk_l2norm, compute_dtype)
    if not rows.any:
        return rows.out
    flushing = pool.flush[rows.slots] != 0
    for part, flush in ((rows.select(flushing), True), (rows.select(~flushing), False)):
        if not part.any:
            continue
        if flush or pool.options.readout is Readout.EXACT_READOUT:
            _step_on_state(part, flush=flush)
        else:
            _step_output_only(part)
    return rows.out


def flush_now(
    pool: StatePool, slots: torch.Tensor, *, qk_l2norm: bool = True, compute_dtype: torch.dtype = torch.float32
) -> None:
    """Fold the buffers of slots [n] without a step, in every layer; a slot at cursor 0 is left as it is."""
    check_rows(pool, 0, slots, PAD_SLOT)
    if pool.options.step_by_step:
        return
    pending = slots[pool.cursor[slots.long()] > 0].long()
    if len(pending):
        for layer in range(pool.n_layers):
            state = pool.checkpoint.read(layer, pending).to(compute_dtype)
            state = _fold(pool, layer, pending, state, pool.options.fold, qk_l2norm)
            _write_back(pool, layer, pending, state)
        pool.cursor[pending] = 0
        pool.flush[pending] = pool._flushes(pool.cursor[pending], pool.tokens[pending])


class _Rows:
    """Inputs of the live rows of one step, in the compute dtype, and the output that they write to."""

    def __init__(self, q, k, v, g, beta, pool, layer, slots, pad_slot, scale, qk_l2norm, compute_dtype) -> None:  # type: ignore[no-untyped-def]
        check_rows(pool, layer, slots, pad_slot)
        check_gates(q, k, v, {"g": g, "beta": beta}, pool, len(slots))
        self.pool, self.layer, self.qk_l2norm = pool, layer, qk_l2norm
        self.out = torch.zeros_like(v)
        live = (slots != pad_slot).nonzero()[:, 0]
        self.index, self.slots = live, slots[live].long()
        everything = len(live) == len(slots)
        raw = [x if everything else x[live] for x in (q, k, v, g, beta)]
        self.raw_k, self.raw_v = raw[1], raw[2]
        q, k, v, self.g, self.beta = (x.to(compute_dtype) for x in raw)
        self.v = v
        group = pool.shape.group
        norm = normalise if qk_l2norm else torch.clone
        scale = pool.shape.d_k**-0.5 if scale is None else scale
        self.q = (norm(q) * scale).repeat_interleave(group, dim=1)
        self.k = norm(k).repeat_interleave(group, dim=1)

    @property
    def any(self) -> bool:
        return len(self.slots) > 0

    def select(self, mask: torch.Tensor) -> _Rows:
        """Some of the rows; the same object where the mask holds everywhere."""
        if bool(mask.all()):
            return self
        part = object.__new__(_Rows)
        part.pool, part.layer, part.qk_l2norm, part.out = self.pool, self.layer, self.qk_l2norm, self.out
        for name in ("index", "slots", "raw_k", "raw_v", "q", "k", "v", "g", "beta"):
            setattr(part, name, getattr(self, name)[mask])
        return part

    def load(self, states: StoredStates) -> torch.Tensor:
        return states.read(self.layer, self.slots).to(self.v.dtype)

    def write_output(self, o: torch.Tensor) -> None:
        self.out[self.index] = o.to(self.out.dtype)


def _step_on_state(rows: _Rows, *, flush: bool) -> None:
    """Bring the state to S_{t-1}, take the step as the baseline does; a flush stores it, else the buffer grows."""
    pool = rows.pool
    state = rows.load(pool.checkpoint if flush else pool.read_states)
    fold = pool.options.fold if flush else Fold.EXACT
    state = _fold(pool, rows.layer, rows.slots, state, fold, rows.qk_l2norm)
    state, u = step(state, rows.k, rows.v, rows.g, rows.beta)
    rows.write_output(_contract(state, rows.q))
    if flush:
        _write_back(pool, rows.layer, rows.slots, state)
    else:
        _append(rows, u)


def _step_output_only(rows: _Rows) -> None:
    """o_t = P_t S_c q + Σ_{j<t} û_j w_{j,t} (k_j·q) + û_t (k_t·q), û_t = β(v − the same with k); no state is built."""
    pool, layer, slots = rows.pool, rows.layer, rows.slots
    cursor = pool.cursor[slots]
    n = int(cursor.max())
    queries = torch.stack((rows.k, rows.q), dim=-1)  # [B, HV, d_k, 2]
    reads = torch.matmul(rows.load(pool.read_states), queries)  # [B, HV, d_v, 2]
    decay, weights = _decays(pool, layer, slots, rows.g, n)
    reads = reads * decay[..., None, None]
    if n:
        keys = _buffered_keys(pool, layer, slots, n, rows.qk_l2norm, reads.dtype)
        products = torch.matmul(keys, queries) * weights[..., None]  # [B, HV, n, 2]
        corrections = pool.corrections[layer, slots, :, :n].to(reads.dtype)
        corrections = corrections.masked_fill(~_used(cursor, n)[:, None, :, None], 0)
        reads = reads + torch.matmul(corrections.transpose(-1, -2), products)
    u = rows.beta[..., None] * (rows.v - reads[..., 0])
    rows.write_output(reads[..., 1] + u * (rows.k * rows.q).sum(-1, keepdim=True))
    _append(rows, u)


def _used(cursor: torch.Tensor, n: int) -> torch.Tensor:
    """[B, n] bool: places that hold an entry of this sequence."""
    return torch.arange(n, device=cursor.device) < cursor[:, None]


def _decays(
    pool: StatePool, layer: int, slots: torch.Tensor, g: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """P_t [B, HV] and w_{j,t} [B, HV, n]: exp of sums of g over j < i <= t, never a difference of running sums."""
    used = _used(pool.cursor[slots], n)[:, None]
    past = pool.log_decay[layer, slots, :, :n].to(g.dtype).masked_fill(~used, 0)
    steps = torch.cat((past, g[..., None]), dim=-1)
    sums = steps.flip(-1).cumsum(-1).flip(-1)  # entry j: sum over i >= j
    return sums[..., 0].exp(), sums[..., 1:].exp()


def _buffered_keys(
    pool: StatePool, layer: int, slots: torch.Tensor, n: int, qk_l2norm: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The first n keys [B, HV, n, d_k], normalised; unused places are zero whatever they hold."""
    used = _used(pool.cursor[slots], n)[:, None, :, None]
    keys = pool.keys[layer, slots, :, :n].to(dtype).masked_fill(~used, 0)
    keys = normalise(keys) if qk_l2norm else keys
    return keys.repeat_interleave(pool.shape.group, dim=1)


def _fold(
    pool: StatePool, layer: int, slots: torch.Tensor, state: torch.Tensor, fold: Fold, qk_l2norm: bool
) -> torch.Tensor:
    """Apply the buffered steps of each row to its state [B, HV, d_v, d_k]."""
    cursor = pool.cursor[slots]
    n, alike = int(cursor.max()), bool((cursor == cursor[0]).all())
    keys = _buffered_keys(pool, layer, slots, n, qk_l2norm, state.dtype)
    for j in range(n):
        k, g = keys[:, :, j], pool.log_decay[layer, slots, :, j].to(state.dtype)
        if fold is Fold.EXACT:
            v, beta = (b[layer, slots, :, j].to(state.dtype) for b in (pool.values, pool.beta))
            after, _ = step(state, k, v, g, beta)
        else:
            u = pool.corrections[layer, slots, :, j].to(state.dtype)
            after = state * g.exp()[..., None, None] + u[..., None] * k[..., None, :]
        state = after if alike else torch.where((cursor > j)[:, None, None, None], after, state)
    return state


def _append(rows: _Rows, u: torch.Tensor) -> None:
    """Write the step's inputs and correction at each row's cursor."""
    pool, slots = rows.pool, rows.slots
    place = pool.cursor[slots].long()
    for buffer, value in (
        (pool.keys, rows.raw_k),
        (pool.values, rows.raw_v),
        (pool.log_decay, rows.g),
        (pool.beta, rows.beta),
        (pool.corrections, u),
    ):
        if buffer is not None:
            buffer[rows.layer, slots, :, place] = value.to(buffer.dtype)


def _write_back(pool: StatePool, layer: int, slots: torch.Tensor, state: torch.Tensor) -> None:
    """Store the checkpoint, and the copy made from what the checkpoint will be read back as."""
    read_back, bad = pool.checkpoint.write(layer, slots, state.float(), nonfinite="saturate")
    if pool.copy is not None:
        pool.copy.write(layer, slots, read_back, nonfinite="saturate")
    pool.error[slots] |= bad.to(torch.int32)
