"""What a precision plan means to a kernel: head shapes, readout, fold, formats and length of the buffer.

Nothing here imports torch or triton, so that plan texts can be parsed and checked anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from driftgate.quant.formats import get_format

__all__ = ["Backend", "Fold", "HeadShape", "Readout", "ReplayOptions"]


class Backend(Enum):
    """Which code takes the decode steps."""

    TRITON = "triton"
    TRITON_INTERPRET = "triton-interpret"
    TORCH = "torch"


class Fold(Enum):
    """How a flush brings the checkpoint forward over the buffered steps."""

    EXACT = "exact"
    """Re-run the recurrence over the raw inputs, from the checkpoint, in the baseline's operation order."""
    CACHED = "cached"
    """Fold the corrections û that earlier steps computed from whatever they read (what engines do)."""


class Readout(Enum):
    """How a step that does not flush forms its output."""

    OUTPUT_ONLY = "output_only"
    """From products of the stored state and the buffer, without building the state."""
    EXACT_READOUT = "exact_readout"
    """Rebuild the state step by step in the baseline's operation order, then take the step."""


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Heads of one recurrent layer.

    Args:
        key_heads: number of key (and query) heads H.
        value_heads: number of value heads HV, a multiple of H; value head i reads key head ``i // (HV // H)``.
        d_k: entries of a key.
        d_v: entries of a value; a state is [d_v, d_k], contiguous along d_k.
    """

    key_heads: int
    value_heads: int
    d_k: int
    d_v: int

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "d_k", "d_v"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads: expected a multiple of key_heads = {self.key_heads}, got {self.value_heads}"
            )

    @property
    def group(self) -> int:
        """Value heads that share one key head."""
        return self.value_heads // self.key_heads


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """The numeric part of a plan.

    Args:
        recurrence: format of the checkpoint, by its canonical name.
        read: format that steps between flushes read; equal to ``recurrence`` when no copy is kept.
        length: L, a natural flush happens when a step finds L - 1 buffered entries; 0 is the step-by-step baseline,
            which reads and writes the checkpoint at every step.
        readout: how a step between flushes forms its output.
        fold: how a flush brings the checkpoint forward.
        buffer: storage type of the corrections û, ``"fp32"`` or ``"bf16"``.
        track: additional flush whenever the number of tokens seen becomes a multiple of it; 0 for none.
    """

    recurrence: str = "fp32"
    read: str = "fp32"
    length: int = 0
    readout: Readout = Readout.OUTPUT_ONLY
    fold: Fold = Fold.EXACT
    buffer: str = "fp32"
    track: int = 0

    def __post_init__(self) -> None:
        recurrence, read = get_format(self.recurrence), get_format(self.read)
        object.__setattr__(self, "recurrence", recurrence.name)
        object.__setattr__(self, "read", read.name)
        if read.bits > recurrence.bits:
            raise ValueError(f"read: expected a format no wider than recurrence = {recurrence.name}, got {read.name}")
        if self.length < 0 or self.track < 0:
            raise ValueError(f"length and track: expected 0 or more, got {self.length} and {self.track}")
        if self.length == 0 and self.split:
            raise ValueError("read: the step-by-step baseline keeps no copy, expected it equal to recurrence")
        if self.buffer not in ("fp32", "bf16"):
            raise ValueError(f"buffer: expected 'fp32' or 'bf16', got {self.buffer!r}")

    @property
    def step_by_step(self) -> bool:
        """Whether this is the baseline kernel, which has no buffer."""
        return self.length == 0

    @property
    def split(self) -> bool:
        """Whether a read copy is kept beside the checkpoint."""
        return self.read != self.recurrence

    @property
    def keeps_corrections(self) -> bool:
        """Whether the buffer holds û."""
        return not self.step_by_step and (self.readout is Readout.OUTPUT_ONLY or self.fold is Fold.CACHED)

    @property
    def keeps_inputs(self) -> bool:
        """Whether the buffer holds v and β beside k and g."""
        return not self.step_by_step and (self.readout is Readout.EXACT_READOUT or self.fold is Fold.EXACT)

    @property
    def places(self) -> int:
        """Places of a slot's buffer; the token of a natural flush comes from registers."""
        return max(self.length - 1, 1)
