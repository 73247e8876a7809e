"""What the torch twins of all recurrences share: rows, buffers, folds, readouts, write-backs, in any compute dtype.

Written for reading, vectorised over rows and heads, on the same StatePool as the kernels: with ``torch.float64`` it is
the reference that they are checked against, with ``torch.float32`` it is the backend ``torch``. A recurrence's own
formula is the ``step`` of its ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from driftgate.kernels.arguments import StepArguments
from driftgate.kernels.contract import Fold, Readout
from driftgate.kernels.pool import PAD_SLOT, StatePool, StoredStates
from driftgate.kernels.validate import check_rows

__all__ = ["Step", "add_outer", "contract", "normalise", "twin_baseline", "twin_flush", "twin_replay"]

EPSILON = 1e-6

Step = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""step(state [..., d_v, d_k], k [..., d_k], v [..., d_v], g [...] or [..., d_k], beta [...], *, by_matmul): S, u."""


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Divide by sqrt(sum x² + 1e-6) along the last axis."""
    return x * (1.0 / torch.sqrt((x * x).sum(-1, keepdim=True) + EPSILON))


def contract(state: torch.Tensor, x: torch.Tensor, *, by_matmul: bool = False) -> torch.Tensor:
    """S x, [..., d_v]; as a matrix product it adds in another order."""
    return torch.matmul(state, x[..., None])[..., 0] if by_matmul else (state * x[..., None, :]).sum(-1)


def add_outer(state: torch.Tensor, u: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """S + u kᵀ."""
    return state + u[..., None] * k[..., None, :]


def decay(state: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """exp(g)·S, g a number a head [...] or one per key channel [..., d_k]."""
    return state * (g.exp()[..., None, :] if g.ndim == state.ndim - 1 else g.exp()[..., None, None])


def twin_baseline(
    step: Step,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    arguments: StepArguments,
    *,
    pad_slot: int,
    compute_dtype: torch.dtype,
    alternative: bool,
) -> torch.Tensor:
    """Twin of ``replay.take_baseline_step``; ``alternative`` adds in another order, for the noise floor."""
    rows = read_rows(step, pool, layer, slots, arguments, pad_slot, compute_dtype)
    if rows.any:
        state, _ = step(rows.load(pool.checkpoint), rows.k, rows.v, rows.g, rows.beta, by_matmul=alternative)
        rows.write_output(contract(state, rows.q, by_matmul=alternative))
        write_back(pool, layer, rows.slots, state, ahead=1)
    return rows.out


def twin_replay(
    step: Step,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    arguments: StepArguments,
    *,
    pad_slot: int,
    compute_dtype: torch.dtype,
) -> torch.Tensor:
    """Twin of ``replay.take_replay_step``."""
    rows = read_rows(step, pool, layer, slots, arguments, pad_slot, compute_dtype)
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


def twin_flush(
    step: Step,
    pool: StatePool,
    slots: torch.Tensor,
    *,
    rates: torch.Tensor | None,
    qk_l2norm: bool,
    compute_dtype: torch.dtype,
) -> None:
    """Twin of ``replay.fold_now``; rates: A [n_layers, HV] of Mamba-2."""
    check_rows(pool, 0, slots, PAD_SLOT)
    if pool.options.step_by_step:
        return
    pending = slots[pool.cursor[slots.long()] > 0].long()
    if len(pending):
        for layer in range(pool.n_layers):
            rate = None if rates is None else rates[layer].to(compute_dtype)
            entries = Entries(pool, layer, pending, rate, qk_l2norm, compute_dtype)
            state = fold_entries(
                step, entries, pool.checkpoint.read(layer, pending).to(compute_dtype), pool.options.fold
            )
            write_back(pool, layer, pending, state, ahead=0)
        pool.empty_buffers(pending)


class Entries:
    """The buffered entries of some slots, oldest first, in the compute dtype; unused ones are 0 whatever they hold."""

    def __init__(
        self,
        pool: StatePool,
        layer: int,
        slots: torch.Tensor,
        rates: torch.Tensor | None,
        qk_l2norm: bool,
        dtype: torch.dtype,
    ) -> None:
        self.pool, self.rates, self.qk_l2norm, self.dtype = pool, rates, qk_l2norm, dtype
        self.layer, self.slots = layer, slots
        self.cursor = pool.cursor[slots]
        self.n = int(self.cursor.max())
        self.alike = bool((self.cursor == self.cursor[0]).all())
        order = torch.arange(self.n, device=slots.device)
        self.used = order < self.cursor[:, None]
        self.places = (pool.base[slots][:, None] + order) % pool.options.places if pool.options.window else None

    def load(self, buffer: torch.Tensor) -> torch.Tensor:
        """[slots, heads, n, ...] of one buffer."""
        if self.places is None:
            rows = buffer[self.layer, self.slots, :, : self.n]
        else:
            rows = buffer[self.layer, self.slots]
            index = self.places[:, None].expand(-1, rows.shape[1], -1)
            index = index.reshape(*index.shape, *[1] * (rows.ndim - 3)).expand(-1, -1, -1, *rows.shape[3:])
            rows = rows.gather(2, index)
        unused = ~self.used.reshape(len(self.slots), 1, self.n, *[1] * (rows.ndim - 3))
        return rows.to(self.dtype).masked_fill(unused, 0)

    def keys(self) -> torch.Tensor:
        """As a step uses them, [slots, HV, n, d_k]: normalised where asked, or dt·B."""
        keys = self.load(self.pool.keys)
        keys = normalise(keys) if self.qk_l2norm else keys
        keys = keys.repeat_interleave(self.pool.shape.group, dim=1)
        return keys if self.rates is None else keys * self.betas()[..., None]

    def log_decays(self) -> torch.Tensor:
        """[slots, HV, n], or [slots, HV, n, d_k]."""
        return self.load(self.pool.log_decay) if self.rates is None else self.rates[:, None] * self.betas()

    def betas(self) -> torch.Tensor:
        """β or dt, [slots, HV, n]."""
        return self.load(self.pool.beta)

    def values(self) -> torch.Tensor:
        """[slots, HV, n, d_v]."""
        return self.load(self.pool.values)

    def corrections(self) -> torch.Tensor:
        """û [slots, HV, n, d_v]; in Mamba-2 it is x."""
        return self.load(self.pool.corrections) if self.rates is None else self.values()


@dataclass(kw_only=True)
class Rows:
    """The live rows of one step: inputs in the compute dtype as the step uses them, raw ones for the buffer."""

    step: Step
    pool: StatePool
    layer: int
    index: torch.Tensor
    slots: torch.Tensor
    raw: dict[str, torch.Tensor]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    rates: torch.Tensor | None
    qk_l2norm: bool
    out: torch.Tensor

    @property
    def any(self) -> bool:
        return len(self.slots) > 0

    def select(self, mask: torch.Tensor) -> Rows:
        """Some of the rows; the same object where the mask holds everywhere."""
        if bool(mask.all()):
            return self
        parts = {name: getattr(self, name)[mask] for name in ("index", "slots", "q", "k", "v", "g", "beta")}
        z = None if self.z is None else self.z[mask]
        return replace(self, **parts, z=z, raw={name: x[mask] for name, x in self.raw.items()})

    def load(self, states: StoredStates) -> torch.Tensor:
        return states.read(self.layer, self.slots).to(self.v.dtype)

    def entries(self) -> Entries:
        return Entries(self.pool, self.layer, self.slots, self.rates, self.qk_l2norm, self.v.dtype)

    def write_output(self, o: torch.Tensor) -> None:
        """Store an output, with D·v added and times silu(z), rounded once."""
        if self.D is not None:
            o = o + self.D[:, None] * self.v
        if self.z is not None:
            o = o * (self.z / (1.0 + torch.exp(-self.z)))  # torch's silu rounds by the element's place in the batch
        self.out[self.index] = o.to(self.out.dtype)

    def append(self, u: torch.Tensor) -> None:
        """Write the step's inputs and correction at each row's cursor."""
        pool = self.pool
        place = pool.cursor[self.slots].long()
        if pool.options.window:
            place = (place + pool.base[self.slots]) % pool.options.places
        for name, value in (self.raw | {"corrections": u}).items():
            buffer = getattr(pool, name)
            if buffer is not None:
                buffer[self.layer, self.slots, :, place] = value.to(buffer.dtype)


def read_rows(
    step: Step,
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    arguments: StepArguments,
    pad_slot: int,
    dtype: torch.dtype,
) -> Rows:
    a, group = arguments, pool.shape.group
    live = (slots != pad_slot).nonzero()[:, 0]
    everything = len(live) == len(slots)
    delta = pool.recurrence.delta_rule
    named = {"q": a.q, "k": a.k, "v": a.v, "beta": a.beta} | ({"g": a.g} if delta else {})
    raw = {name: x if everything else x[live] for name, x in named.items()}
    x = {name: tensor.to(dtype) for name, tensor in raw.items()}
    norm = normalise if a.normalise else torch.clone
    q = (norm(x["q"]) * a.scale).repeat_interleave(group, dim=1)
    k = norm(x["k"]).repeat_interleave(group, dim=1)
    rates = None if delta else a.g.to(dtype)
    if rates is not None:
        k = x["beta"][..., None] * k
    return Rows(
        step=step,
        pool=pool,
        layer=layer,
        index=live,
        slots=slots[live].long(),
        raw={"keys": raw["k"], "values": raw["v"], "beta": raw["beta"]} | ({"log_decay": raw["g"]} if delta else {}),
        q=q,
        k=k,
        v=x["v"],
        g=x["g"] if rates is None else rates * x["beta"],
        beta=x["beta"],
        D=None if a.D is None else a.D.to(dtype),
        z=None if a.z is None else a.z[live].to(dtype),
        rates=rates,
        qk_l2norm=a.normalise,
        out=torch.zeros_like(a.v),
    )


def _step_on_state(rows: Rows, *, flush: bool) -> None:
    """Bring the state to S_{t-1}, take the step as the baseline does; a flush stores it, else the buffer grows."""
    pool = rows.pool
    state = rows.load(pool.checkpoint if flush else pool.read_states)
    state = fold_entries(rows.step, rows.entries(), state, pool.options.fold if flush else Fold.EXACT)
    state, u = rows.step(state, rows.k, rows.v, rows.g, rows.beta)
    rows.write_output(contract(state, rows.q))
    if flush:
        write_back(pool, rows.layer, rows.slots, state, ahead=1)
    else:
        rows.append(u)


def _step_output_only(rows: Rows) -> None:
    """No state is built: R(x) = S_c (P ⊙ x) + Σ_{j<t} û_j (w_j ⊙ k_j)·x; u = β(v − R(k)) or v; o = R(q) + u (k·q)."""
    entries = rows.entries()
    state = rows.load(rows.pool.read_states)
    total, weights = _decays(entries, rows.g)
    keys = entries.keys() if entries.n else None
    corrections = entries.corrections() if entries.n else None
    queries = torch.stack((rows.k, rows.q), dim=-1)  # [B, HV, d_k, 2]
    if total.ndim == 3:
        reads = torch.matmul(state, queries * total[..., None])  # [B, HV, d_v, 2]
    else:
        reads = torch.matmul(state, queries) * total[..., None, None]
    if keys is not None and corrections is not None:
        if weights.ndim == 4:
            products = torch.matmul(keys * weights, queries)
        else:
            products = torch.matmul(keys, queries) * weights[..., None]
        reads = reads + torch.matmul(corrections.transpose(-1, -2), products)
    u = rows.beta[..., None] * (rows.v - reads[..., 0]) if rows.rates is None else rows.v
    rows.write_output(reads[..., 1] + u * (rows.k * rows.q).sum(-1, keepdim=True))
    rows.append(u)


def _decays(entries: Entries, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """P [B, HV] and w [B, HV, n], each with a last axis d_k for channels: exp of sums of g over j < i <= t."""
    steps = g[:, :, None]
    if entries.n:
        steps = torch.cat((entries.log_decays(), steps), dim=2)
    sums = steps.flip(2).cumsum(2).flip(2)  # entry j: sum over i >= j
    return sums[:, :, 0].exp(), sums[:, :, 1:].exp()


def fold_entries(step: Step, entries: Entries, state: torch.Tensor, fold: Fold) -> torch.Tensor:
    """Apply the buffered steps of each row to its state [B, HV, d_v, d_k]."""
    if not entries.n:
        return state
    keys, decays = entries.keys(), entries.log_decays()
    exact = fold is Fold.EXACT or entries.rates is not None
    values, betas = (entries.values(), entries.betas()) if exact else (entries.corrections(), None)
    for j in range(entries.n):
        k, g, v = keys[:, :, j], decays[:, :, j], values[:, :, j]
        after = add_outer(decay(state, g), v, k) if betas is None else step(state, k, v, g, betas[:, :, j])[0]
        state = after if entries.alike else torch.where((entries.cursor > j)[:, None, None, None], after, state)
    return state


def write_back(pool: StatePool, layer: int, slots: torch.Tensor, state: torch.Tensor, *, ahead: int) -> None:
    """Store the checkpoint, and the copy made from what the checkpoint will be read back as."""
    noise = pool.noise(layer, slots, ahead=ahead)
    read_back, bad = pool.checkpoint.write(layer, slots, state.float(), nonfinite="saturate", noise=noise)
    if pool.copy is not None:
        pool.copy.write(layer, slots, read_back, nonfinite="saturate")
    pool.error[slots] |= bad.to(torch.int32)
