"""All plans on one layer of a dump, step by step beside the FP32 baseline and the recurrence in FP64.

Notable: of a plan that folds cached corrections the law of the leak is computed beside what is measured. Steps 1 … h of
a cycle read Q(S) = S + E and cache û; the checkpoint, off by e from that of the exact fold when the cycle began, is off
by e·M_h T_{h+1} + E·(M_h − P_h)·T_{h+1} when it is written, T_t = D_t (I − β_t k_t k_tᵀ), M = Π T, P = Π D. E and e are
read from what is stored; M and P act on them one step at a time, in FP64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from driftgate.accuracy.bits import BitTally
from driftgate.accuracy.dump_layers import LayerDump
from driftgate.accuracy.metrics.state_error import relative_error
from driftgate.accuracy.replay_track import Exact, Steps, Track, reference_of
from driftgate.errors import InputError
from driftgate.kernels.contract import Backend, Fold, Readout, ReplayOptions
from driftgate.quant.codecs import encode_rows
from driftgate.quant.formats import get_format

__all__ = ["BaselineErrors", "LayerRun", "PlanErrors"]


@dataclass(frozen=True, kw_only=True)
class PlanErrors:
    """What one plan did in one layer; relative Frobenius norms in FP64.

    Attributes:
        offsets: [n_steps] buffered entries that each step found.
        output_error: [sequences, HV, n_steps], against the baseline's outputs.
        checkpoint_error: [sequences, HV, flushes], against the baseline's state.
        read_error: the copy against the checkpoint, or None without a copy.
        leak: the checkpoint against that of the exact fold; None where the plan is that exact fold.
        leak_predicted: what the law says; 0 for exact folds and for Mamba-2, whose update never reads the state.
        leak_unexplained: the checkpoint against exact fold plus prediction.
        flushes, low_precision_reads, requantizations, nonfinite_states: counters, (row, step) of this layer.
        tallies: bits that have to be equal, by invariant.
    """

    offsets: list[int]
    output_error: torch.Tensor
    checkpoint_error: torch.Tensor
    read_error: torch.Tensor | None
    leak: torch.Tensor | None
    leak_predicted: torch.Tensor | None
    leak_unexplained: torch.Tensor | None
    flushes: int
    low_precision_reads: int
    requantizations: int
    nonfinite_states: int
    tallies: dict[str, BitTally]


@dataclass(frozen=True, kw_only=True)
class BaselineErrors:
    """How far the FP32 baseline is from the recurrence in FP64: below this nothing can be told apart.

    Attributes:
        output_error: [sequences, HV, n_steps].
        state_error: [sequences, HV], after the last step.
    """

    output_error: torch.Tensor
    state_error: torch.Tensor


class LayerRun:
    """Runs plans on one layer of a dump.

    Args:
        layer: its inputs.
        plans: by name; no step-by-step plan, no speculative windows.
        n_steps: leading steps that are taken.
        start: tokens that every sequence had seen before the first.
        backend, device: which code takes the steps, and where.
        seed: key of stochastic rounding.
    """

    def __init__(
        self,
        layer: LayerDump,
        plans: Mapping[str, ReplayOptions],
        *,
        n_steps: int,
        start: int = 0,
        backend: Backend = Backend.TORCH,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.steps = Steps(layer, n_steps=n_steps, start=start, backend=backend, device=device, seed=seed)
        self.exact = Exact(self.steps)
        self.baseline = Track(self.steps, ReplayOptions())
        self.tracks = {name: Track(self.steps, options) for name, options in plans.items()}
        others = {reference_of(o) for o in plans.values()} - {ReplayOptions()} - set(plans.values())
        made = {o: Track(self.steps, o) for o in sorted(others, key=repr)}
        made |= {track.options: track for track in self.tracks.values()} | {ReplayOptions(): self.baseline}
        self.others = [track for track in made.values() if track.options in others]
        self.observers = {
            name: _Observer(track, self.baseline, made[reference_of(track.options)], self.exact)
            for name, track in self.tracks.items()
        }

    def measure(self, progress: Callable[[int], None] | None = None) -> tuple[dict[str, PlanErrors], BaselineErrors]:
        """Take all steps; ``progress`` is called with 1 after each.

        Raises:
            InputError: the FP32 baseline itself gives NaN or infinity on these inputs.
        """
        floor, finite = [], []
        for t in range(self.steps.n_steps):
            expected = self.exact.step(t)
            out = self.baseline.step(t)
            floor.append(relative_error(out, expected, -1))
            finite.append(out.isfinite().all())
            for track in (*self.others, *self.tracks.values()):
                track.step(t)
            for observer in self.observers.values():
                observer.observe(t)
            if progress is not None:
                progress(1)
        bad = (~torch.stack(finite)).nonzero()
        if len(bad):
            where = f"layers.{self.steps.layer.layer}, step {int(bad[0])}"
            raise InputError(f"{where}: the FP32 baseline's own output is not finite; see what the recorder wrote")
        state = relative_error(self.baseline.checkpoint(), self.exact.state, (-2, -1))
        errors = BaselineErrors(output_error=torch.stack(floor, dim=-1).cpu(), state_error=state.cpu())
        return {name: observer.errors() for name, observer in self.observers.items()}, errors


@dataclass
class _Observer:
    """Compares one plan with the baseline and with the exact fold after each step."""

    track: Track
    baseline: Track
    reference: Track
    exact: Exact
    tallies: dict[str, BitTally] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.errors_of: dict[str, list[torch.Tensor]] = {
            name: [] for name in ("output", "checkpoint", "read", "leak", "predicted", "unexplained")
        }
        self.offset, self.offsets = 0, list[int]()
        self.error = self.faded = torch.zeros(0, dtype=torch.float64)
        options = self.track.options
        self.leaks = options.fold is Fold.CACHED and self.exact.steps.recurrence.delta_rule
        if self.leaks:
            self._begin_cycle()

    def observe(self, t: int) -> None:
        """After step t of all tracks."""
        flushed = self.track.flushes[t]
        self.offsets.append(self.offset)
        self.offset = 0 if flushed else self.offset + 1
        self.errors_of["output"].append(relative_error(self.track.out, self.baseline.out, -1))
        if flushed:
            checkpoint = self.track.checkpoint()
            self.errors_of["checkpoint"].append(relative_error(checkpoint, self.baseline.checkpoint(), (-2, -1)))
            copy = self.track.copy()
            if copy is not None:
                self.errors_of["read"].append(relative_error(copy, checkpoint, (-2, -1)))
            self._observe_leak(t, checkpoint)
        elif self.leaks:
            self.error = self.exact.carry(self.error, t)
            self.faded = self.exact.fade(self.faded, t)
        self._compare_bits(t, flushed)

    def _begin_cycle(self) -> None:
        """``error`` becomes (e + E)·M, ``faded`` E·P; their difference is e·M + E·(M − P)."""
        offset = self.track.read_offset()
        e = self.track.checkpoint().double() - self.reference.checkpoint().double()
        self.error, self.faded = e + offset, offset

    def _observe_leak(self, t: int, checkpoint: torch.Tensor) -> None:
        if self.reference is self.track:
            return
        expected = self.reference.checkpoint().double()
        self.errors_of["leak"].append(relative_error(checkpoint.double(), expected, (-2, -1)))
        predicted = expected + self.exact.carry(self.error - self.faded, t) if self.leaks else expected
        self.errors_of["predicted"].append(relative_error(predicted, expected, (-2, -1)))
        self.errors_of["unexplained"].append(relative_error(checkpoint.double(), predicted, (-2, -1)))
        if self.leaks:
            self._begin_cycle()

    def _compare_bits(self, t: int, flushed: bool) -> None:
        """I1 at L = 1; I2 and I3 for exact folds and for Mamba-2; not for the route that engines run."""
        options, track = self.track.options, self.track
        if options.readout is Readout.STATE_OUTPUT:
            return
        if options.length == 1:
            self._compare("I1", "output", self.reference.out, track.out, t)
            self._compare("I1", "checkpoint", self.reference.checkpoint(), track.checkpoint(), t)
        elif not self.leaks and self.reference is not track:
            name = "I2" if options.recurrence == "fp32" else "I3"
            if flushed:
                self._compare(name, "checkpoint", self.reference.checkpoint(), track.checkpoint(), t)
            if name == "I2" and options.readout is Readout.EXACT_READOUT and not options.split:
                self._compare(name, "output", self.reference.out, track.out, t)
        if flushed and track.pool.copy is not None:
            slots = track.steps.slots.long()
            rebuilt = encode_rows(track.pool.copy.format, track.checkpoint(), nonfinite="saturate")
            for old, new in zip([x for x in rebuilt if x is not None], track.pool.copy.tensors(), strict=True):
                self._compare("I3", "copy", old, new[0, slots], t)

    def _compare(self, invariant: str, what: str, expected: torch.Tensor, got: torch.Tensor, t: int) -> None:
        """Count bits that differ; where what is compared with overflowed, in a narrow format, nothing is promised."""
        if not bool(expected.isfinite().all()):
            return
        tally = self.tallies.setdefault(invariant, BitTally())
        tally.compare(what, expected, got, step=t, rows=range(len(got)))

    def errors(self) -> PlanErrors:
        """Everything that was observed."""
        found = {name: torch.stack(x, dim=-1).cpu() if x else None for name, x in self.errors_of.items()}
        output, checkpoint = found["output"], found["checkpoint"]
        assert output is not None
        assert checkpoint is not None
        options, rows = self.track.options, self.track.steps.n_rows
        low_read, low_recurrence = (get_format(f).low_precision for f in (options.read, options.recurrence))
        flushes = sum(self.track.flushes) * rows
        between = self.track.steps.n_steps * rows - flushes
        return PlanErrors(
            offsets=self.offsets,
            output_error=output,
            checkpoint_error=checkpoint,
            read_error=found["read"],
            leak=found["leak"],
            leak_predicted=found["predicted"],
            leak_unexplained=found["unexplained"],
            flushes=flushes,
            low_precision_reads=between * low_read + flushes * low_recurrence,
            requantizations=flushes * (low_recurrence or (options.split and low_read)),
            nonfinite_states=int((self.track.pool.error[: self.track.steps.n_rows] != 0).sum()),
            tallies=self.tallies,
        )
