"""Bytes that a decode step moves, by formula: mean over a natural flush cycle, activations and outputs excluded.

With C bytes of a checkpoint, R of what a step between flushes reads, a bytes that an entry adds to the buffer, r bytes
of an entry that a readout reads and f bytes of an entry that a fold reads:
    traffic = [Σ_{h=0}^{L-2} (R + h·r + a) + 2C + (L-1)·f + (R if split)] / L
"""

from __future__ import annotations

from dataclasses import dataclass

from driftgate.kernels.contract import Fold, HeadShape, Readout, Recurrence, ReplayOptions
from driftgate.quant.formats import get_format

__all__ = [
    "EntryBytes",
    "Traffic",
    "compute_traffic",
    "entry_bytes",
    "gdn_entry",
    "kda_entry",
    "mamba2_entry",
    "step_bytes",
]


@dataclass(frozen=True, kw_only=True)
class EntryBytes:
    """Bytes of one buffer entry of one layer: what a step adds, what a readout reads, what a fold reads."""

    adds: int
    readout: int
    fold: int


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes per step, sequence and layer, and the ratios to the step-by-step FP32 baseline (8·HV·d_v·d_k)."""

    per_step: float
    ratio: float
    state_ratio: float


def entry_bytes(recurrence: Recurrence, shape: HeadShape, options: ReplayOptions, activation_bytes: int) -> EntryBytes:
    """Entry of one layer of a recurrence; activation_bytes: of one element of q, k and v (C, B and x)."""
    entry = {Recurrence.GDN: gdn_entry, Recurrence.KDA: kda_entry, Recurrence.MAMBA2: mamba2_entry}[recurrence]
    return entry(shape, options, activation_bytes=activation_bytes)


def gdn_entry(shape: HeadShape, options: ReplayOptions, *, activation_bytes: int) -> EntryBytes:
    """Entry of a Gated DeltaNet layer: k, v, g and β, and û where it is kept."""
    return _delta_entry(shape, options, activation_bytes, decays=4 * shape.value_heads)


def kda_entry(shape: HeadShape, options: ReplayOptions, *, activation_bytes: int) -> EntryBytes:
    """Entry of a Kimi Delta Attention layer: as Gated DeltaNet, with g per key channel."""
    return _delta_entry(shape, options, activation_bytes, decays=4 * shape.value_heads * shape.d_k)


def mamba2_entry(shape: HeadShape, options: ReplayOptions, *, activation_bytes: int) -> EntryBytes:
    """Entry of a Mamba-2 layer: x, B and dt, whatever the readout and the fold."""
    inputs = shape.value_heads * shape.d_v + shape.key_heads * shape.d_k
    n = activation_bytes * inputs + 4 * shape.value_heads
    return EntryBytes(adds=n, readout=n, fold=n)


def step_bytes(shape: HeadShape, options: ReplayOptions, entry: EntryBytes, *, offset: int) -> float:
    """Bytes of one step of a natural cycle, per sequence and layer.

    Args:
        shape, options, entry: as ``compute_traffic`` has them.
        offset: buffered entries that the step finds, 0 to L - 1; the step at L - 1 is the flush. The step-by-step
            baseline has offset 0 alone.

    Raises:
        ValueError: an offset outside the cycle.
    """
    last = max(options.length - 1, 0)
    if not 0 <= offset <= last:
        raise ValueError(f"offset: expected 0 to {last}, got {offset}")
    checkpoint, read = _stored_bytes(shape, options)
    return _step(options, checkpoint, read, entry, offset)


def compute_traffic(shape: HeadShape, options: ReplayOptions, entry: EntryBytes) -> Traffic:
    """Bytes of a plan's step in one layer, row scales included as stored."""
    checkpoint, read = _stored_bytes(shape, options)
    baseline = 8 * shape.value_heads * shape.d_v * shape.d_k
    per_step = _mean(options, checkpoint, read, entry)
    state = _mean(options, checkpoint, read, EntryBytes(adds=0, readout=0, fold=0))
    return Traffic(per_step=per_step, ratio=per_step / baseline, state_ratio=state / baseline)


def _delta_entry(shape: HeadShape, options: ReplayOptions, activation_bytes: int, *, decays: int) -> EntryBytes:
    """Entry of a recurrence with the delta rule. decays: bytes of g."""
    s, hv = activation_bytes, shape.value_heads
    keys = s * shape.key_heads * shape.d_k
    raw = keys + s * hv * shape.d_v + decays + 4 * hv
    correction = (4 if options.buffer == "fp32" else 2) * hv * shape.d_v
    cached = keys + decays + correction
    if options.readout is Readout.EXACT_READOUT:
        extra = correction if options.fold is Fold.CACHED else 0
        return EntryBytes(adds=raw + extra, readout=raw, fold=cached if extra else raw)
    if options.fold is Fold.CACHED:
        return EntryBytes(adds=cached, readout=cached, fold=cached)
    return EntryBytes(adds=raw + correction, readout=cached, fold=raw)


def _stored_bytes(shape: HeadShape, options: ReplayOptions) -> tuple[float, float]:
    """Bytes of a checkpoint, and of what a step between flushes reads."""
    rows = shape.value_heads * shape.d_v
    checkpoint, read = (get_format(name).bytes_per_row(shape.d_k) for name in (options.recurrence, options.read))
    return rows * checkpoint, rows * read


def _step(options: ReplayOptions, checkpoint: float, read: float, entry: EntryBytes, offset: int) -> float:
    if options.step_by_step:
        return 2.0 * checkpoint
    if offset == options.length - 1:
        return 2 * checkpoint + offset * entry.fold + (read if options.split else 0)
    return read + offset * entry.readout + entry.adds


def _mean(options: ReplayOptions, checkpoint: float, read: float, entry: EntryBytes) -> float:
    steps = range(max(options.length, 1))
    return sum(_step(options, checkpoint, read, entry, offset) for offset in steps) / len(steps)
