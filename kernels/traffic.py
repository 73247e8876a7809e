"""Bytes that a decode step moves, by formula: mean over a natural flush cycle, activations and outputs excluded.

With C bytes of a checkpoint, R of what a step between flushes reads, a bytes that an entry adds to the buffer, r bytes
of an entry that a readout reads and f bytes of an entry that a fold reads:
    traffic = [Σ_{h=0}^{L-2} (R + h·r + a) + 2C + (L-1)·f + (R if split)] / L
"""

from __future__ import annotations

from dataclasses import dataclass

from driftgate.kernels.contract import Fold, HeadShape, Readout, ReplayOptions
from driftgate.quant.formats import get_format

__all__ = ["EntryBytes", "Traffic", "compute_traffic", "gdn_entry"]


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


def gdn_entry(shape: HeadShape, options: ReplayOptions, *, activation_bytes: int) -> EntryBytes:
    """Entry of a Gated DeltaNet layer."""
    s, hv = activation_bytes, shape.value_heads
    keys, gates = s * shape.key_heads * shape.d_k, 4 * hv
    raw = keys + s * hv * shape.d_v + 2 * gates
    correction = (4 if options.buffer == "fp32" else 2) * hv * shape.d_v
    if options.readout is Readout.EXACT_READOUT:
        extra = correction if options.fold is Fold.CACHED else 0
        return EntryBytes(adds=raw + extra, readout=raw, fold=keys + gates + correction if extra else raw)
    if options.fold is Fold.CACHED:
        cached = keys + gates + correction
        return EntryBytes(adds=cached, readout=cached, fold=cached)
    return EntryBytes(adds=raw + correction, readout=keys + gates + correction, fold=raw)


def compute_traffic(shape: HeadShape, options: ReplayOptions, entry: EntryBytes) -> Traffic:
    """Bytes of a plan's step in one layer, row scales included as stored."""
    rows = shape.value_heads * shape.d_v
    checkpoint = rows * get_format(options.recurrence).bytes_per_row(shape.d_k)
    read = rows * get_format(options.read).bytes_per_row(shape.d_k)
    baseline = 8 * rows * shape.d_k
    per_step = _mean(options, checkpoint, read, entry)
    state = _mean(options, checkpoint, read, EntryBytes(adds=0, readout=0, fold=0))
    return Traffic(per_step=per_step, ratio=per_step / baseline, state_ratio=state / baseline)


def _mean(options: ReplayOptions, checkpoint: float, read: float, entry: EntryBytes) -> float:
    if options.step_by_step:
        return 2.0 * checkpoint
    length = options.length
    between = (length - 1) * (read + entry.adds) + entry.readout * (length - 1) * (length - 2) / 2
    flush = 2 * checkpoint + (length - 1) * entry.fold + (read if options.split else 0)
    return (between + flush) / length
