"""What a plan costs, by formula: bytes stored, operations of a step, batches that fit, gain of a whole decode step.

Notable: bytes moved are in ``traffic.py``; nothing here needs torch, a GPU or weights. Operations count a multiply-add
as two, on the elements of states and buffers; what is done once a head (norms, exp of a scalar) is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from driftgate.kernels.contract import Fold, HeadShape, Readout, Recurrence, ReplayOptions
from driftgate.kernels.traffic import entry_bytes
from driftgate.quant.formats import get_format

__all__ = [
    "SequenceBytes", "conv_bytes", "end_to_end_gain", "greatest_batch", "ideal_ratio", "mean_operations",
    "sequence_bytes", "step_operations",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SequenceBytes:
    """Bytes that one sequence keeps in one recurrent layer: checkpoint, read copy, buffer."""

    checkpoint: int
    read_copy: int
    buffer: int

    @property
    def state(self) -> int:
        """Checkpoint and copy, which a snapshot holds; a buffer is written behind its cursor instead."""
        return self.checkpoint + self.read_copy

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.buffer


def sequence_bytes(
    recurrence: Recurrence, shape: HeadShape, options: ReplayOptions, *, activation_bytes: int
) -> SequenceBytes:
    """What a ``StatePool`` holds for a sequence and layer; activation_bytes: of an element of q, k, v (C, B, x)."""
    rows = shape.value_heads * shape.d_v
    checkpoint, read = (get_format(name).bytes_per_row(shape.d_k) for name in (options.recurrence, options.read))
    places = 0 if options.step_by_step else options.places
    entry = entry_bytes(recurrence, shape, options, activation_bytes)
    return SequenceBytes(
        checkpoint=rows * checkpoint,
        read_copy=rows * read if options.split else 0,
        buffer=places * entry.adds,
    )


def conv_bytes(shape: HeadShape, *, kernel: int, activation_bytes: int) -> int:
    """The convolution's last inputs of a layer and sequence: q, k, v (C, B, x) of ``kernel`` tokens."""
    channels = 2 * shape.key_heads * shape.d_k + shape.value_heads * shape.d_v
    return channels * kernel * activation_bytes


def ideal_ratio(length: int, *, passes: int = 1) -> float:
    """State traffic over the baseline's if buffers cost nothing: (1 + passes / L) / 2.

    One pass: L reads and one write a cycle. Two: the flush reads the state once more, in a pass of its own, or writes
    a copy as wide as the checkpoint.

    Raises:
        ValueError: no buffer, or another number of passes.
    """
    if length < 1 or passes not in (1, 2):
        raise ValueError(f"length and passes: expected at least 1, and 1 or 2, got {length} and {passes}")
    return (1 + passes / length) / 2


def step_operations(recurrence: Recurrence, shape: HeadShape, options: ReplayOptions, *, offset: int) -> int:
    """Floating-point operations of a step that finds ``offset`` entries, per layer and sequence.

    With d = d_v·d_k of a value head: a decay takes d, S k and S q 2d each, adding u kᵀ 2d. A step is all of them, 7d,
    without the delta rule 5d. A readout from products takes S k and S q and, for each entry, two products over d_k
    (of a key head, or of a value head where channels decay) and two over d_v.

    Raises:
        ValueError: an offset outside the natural cycle.
    """
    last = max(options.length - 1, 0)
    if not 0 <= offset <= last:
        raise ValueError(f"offset: expected 0 to {last}, got {offset}")
    delta = recurrence.delta_rule
    state = shape.value_heads * shape.d_v * shape.d_k
    step, folded, reads = (7, 5, 2) if delta else (5, 3, 1)
    if options.step_by_step or (offset == last and options.fold is Fold.EXACT):
        return (offset * folded + step) * state
    if offset == last:  # cached: decay and add what earlier steps computed
        return (offset * 3 + step) * state
    if options.readout is Readout.EXACT_READOUT:
        return (offset * folded + step) * state
    if options.readout is Readout.STATE_OUTPUT:
        return (2 * offset + 1 + 2 * reads) * state
    keys = shape.value_heads if recurrence.channel_decay else shape.key_heads
    entries = 2 * reads * offset * (keys * shape.d_k + shape.value_heads * shape.d_v)
    return 2 * reads * state + entries


def mean_operations(recurrence: Recurrence, shape: HeadShape, options: ReplayOptions) -> float:
    """Operations of a step, mean over a natural cycle, per layer and sequence."""
    steps = range(max(options.length, 1))
    return sum(step_operations(recurrence, shape, options, offset=h) for h in steps) / len(steps)


def greatest_batch(memory: float, *, weights: float, per_sequence: float) -> int:
    """Sequences that fit beside the weights, all in bytes; 0 where none does.

    Raises:
        ValueError: a sequence without bytes, of which any number fits.
    """
    if per_sequence <= 0:
        raise ValueError(f"per_sequence: expected more than 0 bytes, got {per_sequence}")
    return max(0, int((memory - weights) // per_sequence))


def end_to_end_gain(share: float, ratio: float) -> float:
    """Speed-up of a decode step, by Amdahl's law.

    Args:
        share: fraction of the baseline's step that its state traffic takes, 0 to 1.
        ratio: traffic over the baseline's.
    """
    if not 0 <= share <= 1 or ratio <= 0:
        raise ValueError(f"share and ratio: expected 0 to 1, and more than 0, got {share} and {ratio}")
    return 1 / (1 - share + share * ratio)
