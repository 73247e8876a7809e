"""What a precision plan means to a kernel: recurrence, head shapes, readout, fold, formats and length of the buffer.

Nothing here imports torch or triton, so that plan texts can be parsed and checked anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from driftgate.quant.formats import get_format

__all__ = ["Backend", "Dot", "Fold", "HeadShape", "Readout", "Recurrence", "ReplayOptions"]

MAX_WINDOW = 16
"""Greatest T of a speculative window."""


class Backend(Enum):
    """Which code takes the decode steps."""

    TRITON = "triton"
    TRITON_INTERPRET = "triton-interpret"
    TORCH = "torch"


class Recurrence(Enum):
    """Which recurrence; what tells them apart in a kernel are the two properties."""

    GDN = "gdn"
    """Gated DeltaNet: S = exp(g)·S; u = β(v - S k); S = S + u kᵀ; o = S q, g one number a head."""
    KDA = "kda"
    """Kimi Delta Attention: Gated DeltaNet with g per key channel."""
    MAMBA2 = "mamba2"
    """S = exp(A·dt)·S + x (dt·B)ᵀ; y = S C + D·x, times silu(z): v = x, k = dt·B, q = C, log decay A·dt."""

    @property
    def delta_rule(self) -> bool:
        """Whether what is added is corrected by what the state holds; else k is dt·B and the log decay A·dt."""
        return self is not Recurrence.MAMBA2

    @property
    def channel_decay(self) -> bool:
        """Whether a step decays each key channel by its own factor."""
        return self is Recurrence.KDA

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of a step's inputs, in the order of ``decode_step``."""
        return ("q", "k", "v", "g", "beta") if self.delta_rule else ("x", "B", "C", "dt")


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
    STATE_OUTPUT = "state_output"
    """Rebuild the old state tile by tile with one matrix product and read it twice (what engines do)."""


class Dot(Enum):
    """Precision of the matrix product of ``Readout.STATE_OUTPUT``."""

    IEEE = "ieee"
    TF32 = "tf32"
    BF16 = "bf16"


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Heads of one recurrent layer.

    Args:
        key_heads: number of key (and query) heads H; groups of B and C in Mamba-2.
        value_heads: number of value heads HV, a multiple of H; value head i reads key head ``i // (HV // H)``.
        d_k: entries of a key; Mamba-2: d_state.
        d_v: entries of a value; Mamba-2: d_head. A state is [d_v, d_k], contiguous along d_k.
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
        dot: precision of the matrix product of ``state_output``.
        stochastic: round the checkpoint's elements at random; scales and copies stay nearest even.
        window: T_max of speculative windows, 0 for none; the buffer is then a ring of L + T_max - 1 places.
    """

    recurrence: str = "fp32"
    read: str = "fp32"
    length: int = 0
    readout: Readout = Readout.OUTPUT_ONLY
    fold: Fold = Fold.EXACT
    buffer: str = "fp32"
    track: int = 0
    dot: Dot = Dot.IEEE
    stochastic: bool = False
    window: int = 0

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
        if self.stochastic and not recurrence.stochastic:
            raise ValueError(f"stochastic: {recurrence.name} is rounded to nearest alone, expected False")
        if self.dot is not Dot.IEEE and self.readout is not Readout.STATE_OUTPUT:
            raise ValueError(f"dot: only state_output has a matrix product, expected ieee, got {self.dot.value}")
        if not 0 <= self.window <= MAX_WINDOW:
            raise ValueError(f"window: expected 0 to {MAX_WINDOW}, got {self.window}")
        if 2 * self.window > self.length:
            raise ValueError(f"window: expected 2 T <= L = {self.length}, got T = {self.window}")
        if self.window and (self.track or self.readout is Readout.STATE_OUTPUT):
            raise ValueError("window: has neither forced flushes (track) nor state_output, expected 0")

    @property
    def step_by_step(self) -> bool:
        """Whether this is the baseline kernel, which has no buffer."""
        return self.length == 0

    @property
    def split(self) -> bool:
        """Whether a read copy is kept beside the checkpoint."""
        return self.read != self.recurrence

    def keeps_corrections(self, recurrence: Recurrence) -> bool:
        """Whether the buffer holds û; in Mamba-2 û is x itself."""
        uses = self.readout is not Readout.EXACT_READOUT or self.fold is Fold.CACHED
        return recurrence.delta_rule and not self.step_by_step and uses

    def keeps_inputs(self, recurrence: Recurrence) -> bool:
        """Whether the buffer holds v and β (x and dt) beside k and g."""
        uses = self.readout is Readout.EXACT_READOUT or self.fold is Fold.EXACT or not recurrence.delta_rule
        return uses and not self.step_by_step

    @property
    def places(self) -> int:
        """Places of a slot's buffer; the token of a natural flush comes from registers."""
        return self.length + self.window - 1 if self.window else max(self.length - 1, 1)
