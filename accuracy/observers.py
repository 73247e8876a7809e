"""What is watched inside a forward: state errors of the first sequence, and the inputs of recurrent layers.

State errors (relative Frobenius norms per head, mean over heads): ``checkpoint_error`` at flushes against the FP32
recurrence on the plan's OWN inputs (a shadow state, taken by the baseline kernel, so that an exact fold of an FP32
recurrence gives exactly 0); ``trajectory_error`` at flushes against the baseline of that position; ``read_error`` at
flushes, the copy against the checkpoint; ``output_error`` at every step against the shadow's output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from driftgate.accuracy.adapters.decode_functions import StepInputs
from driftgate.accuracy.adapters.wrapping import WrappedModel
from driftgate.accuracy.metrics.state_error import relative_error
from driftgate.kernels.contract import HeadShape, Recurrence, ReplayOptions

__all__ = ["InputRecorder", "RecordedInputs", "StateObserver", "StateSums"]

ERRORS = ("read_error", "checkpoint_error", "trajectory_error", "output_error")


@dataclass(frozen=True, kw_only=True)
class StateSums:
    """Errors of one plan in one layer.

    Attributes:
        mean: by error, mean over heads and flushes (output: steps); None where nothing was observed.
        greatest: by error, the greatest of any head; None likewise.
    """

    mean: dict[str, float | None]
    greatest: dict[str, float | None]


class StateObserver:
    """Shadow states of every plan's first sequence, and the errors against them.

    Args:
        model: entered and not yet prefilled.
        first_plan: index of the first block that is a plan; block 0 is the baseline.
    """

    def __init__(self, model: WrappedModel, *, first_plan: int) -> None:
        self.model = model
        self.plans = list(range(first_plan, len(model.blocks)))
        self.rows = torch.tensor([model.blocks[i].rows.start for i in self.plans], device=model.device)
        self.slots = torch.arange(len(self.plans), dtype=torch.int32, device=model.device)
        self.shadow = model.make_pool(ReplayOptions(), n_slots=max(1, len(self.plans)))
        self.sequence = torch.zeros(1, dtype=torch.int64, device=model.device)
        shape = (len(ERRORS), len(self.plans), model.n_layers)
        self.sum = torch.zeros(shape, dtype=torch.float64, device=model.device)
        self.greatest = torch.zeros_like(self.sum)
        self.count = torch.zeros(shape, dtype=torch.int64)
        self.counted = _counted_heads([model.blocks[i].head for i in self.plans], model.shape.value_heads, model.device)
        self.clocks = [_Clock(model.blocks[i].options) for i in self.plans]
        self.started = False

    def before_step(self) -> None:
        """Once per forward: copy the prefilled states at the first, and look up which plans flush."""
        if not self.started:
            first = self.sequence
            for layer in range(self.model.n_layers):
                state = self.model.blocks[0].pool.checkpoint.read(layer, first)
                self.shadow.write(layer, self.slots.long(), state.expand(len(self.plans), -1, -1, -1))
            tokens = int(self.model.blocks[0].pool.tokens[0])
            for clock in self.clocks:
                clock.tokens = tokens
            self.started = True
        self.flushing = [clock.tick() for clock in self.clocks]

    def observe(self, layer: int, inputs: StepInputs, out: torch.Tensor) -> None:
        """After a layer's step of all rows."""
        if not self.plans:
            return
        own = inputs.take_rows(self.rows)
        expected = self.model.run_kernel(own, self.shadow, layer, self.slots)
        self._add("output_error", slice(None), layer, relative_error(out[self.rows], expected, (-1,)))
        if not any(self.flushing):
            return
        shadow = self.shadow.checkpoint.read(layer, self.slots.long())
        baseline = self.model.blocks[0].pool.checkpoint.read(layer, self.sequence)
        for p, flushing in enumerate(self.flushing):
            if not flushing:
                continue
            pool, own = self.model.blocks[self.plans[p]].place(layer)
            checkpoint = self.model.blocks[self.plans[p]].read_checkpoint(layer, self.sequence)
            self._add("checkpoint_error", p, layer, relative_error(checkpoint, shadow[p : p + 1], (-2, -1)))
            self._add("trajectory_error", p, layer, relative_error(checkpoint, baseline, (-2, -1)))
            if pool.copy is not None:
                read = pool.copy.read(own, self.sequence)
                held = pool.checkpoint.read(own, self.sequence)
                self._add("read_error", p, layer, relative_error(read, held, (-2, -1)))

    def _add(self, error: str, plans: int | slice, layer: int, by_head: torch.Tensor) -> None:
        """by_head: [plans, heads] float64."""
        e = ERRORS.index(error)
        index = slice(plans, plans + 1) if isinstance(plans, int) else plans
        counted = self.counted[index]
        by_head = by_head.where(counted, 0.0)
        self.sum[e, index, layer] += by_head.sum(-1) / counted.sum(-1)
        self.greatest[e, index, layer] = torch.maximum(self.greatest[e, index, layer], by_head.amax(-1))
        self.count[e, index, layer] += 1

    def sums(self, block: int) -> list[StateSums]:
        """Errors of one plan, by layer."""
        p = self.plans.index(block)
        total, greatest = self.sum[:, p].cpu(), self.greatest[:, p].cpu()
        result = []
        for layer in range(self.model.n_layers):
            seen = {e: int(self.count[i, p, layer]) for i, e in enumerate(ERRORS)}
            result.append(
                StateSums(
                    mean={e: float(total[i, layer]) / seen[e] if seen[e] else None for i, e in enumerate(ERRORS)},
                    greatest={e: float(greatest[i, layer]) if seen[e] else None for i, e in enumerate(ERRORS)},
                )
            )
        return result


def _counted_heads(heads: list[int | None], n_heads: int, device: torch.device) -> torch.Tensor:
    """Heads that enter the errors of each plan, [plans, heads] bool: all, or the one that a plan is about."""
    every = torch.arange(n_heads, device=device)
    rows = [torch.ones_like(every, dtype=torch.bool) if head is None else every == head for head in heads]
    return torch.stack(rows) if rows else torch.ones(0, n_heads, dtype=torch.bool, device=device)


class _Clock:
    """Host-side mirror of one slot's cursor, so that the loop never waits for the device."""

    def __init__(self, options: ReplayOptions) -> None:
        self.options, self.cursor, self.tokens = options, 0, 0

    def tick(self) -> bool:
        """Take a step; whether it flushes."""
        o = self.options
        self.tokens += 1
        flush = o.step_by_step or self.cursor >= o.length - 1 or bool(o.track and self.tokens % o.track == 0)
        self.cursor = 0 if flush else self.cursor + 1
        return flush


@dataclass(frozen=True, kw_only=True)
class RecordedInputs:
    """Inputs of the recurrent layers for the baseline's first sequence.

    Attributes:
        recurrence: whose inputs they are.
        shape: heads.
        inputs: [layer][step], each with leading axis 1.
        initial: [n_layers, HV, d_v, d_k] float32, states before the first recorded step.
    """

    recurrence: Recurrence
    shape: HeadShape
    inputs: list[list[StepInputs]]
    initial: torch.Tensor


class InputRecorder:
    """Keeps what the recurrent layers of the baseline's first sequence were given, for the first ``steps`` steps."""

    def __init__(self, model: WrappedModel, *, steps: int) -> None:
        self.model, self.steps = model, steps
        self.inputs: list[list[StepInputs]] = [[] for _ in range(model.n_layers)]
        self.initial: torch.Tensor | None = None

    def start(self) -> None:
        """After the prefill: keep the states that the first step finds."""
        if self.steps:
            pool, first = self.model.blocks[0].pool, torch.zeros(1, dtype=torch.int64, device=self.model.device)
            self.initial = torch.cat([pool.checkpoint.read(n, first) for n in range(self.model.n_layers)]).cpu()

    def observe(self, layer: int, inputs: StepInputs, _out: torch.Tensor) -> None:
        """After a layer's step of all rows."""
        if len(self.inputs[layer]) < self.steps:
            one = inputs.take_rows(slice(0, 1))
            streams, constants = (
                {name: x.detach().clone().cpu() for name, x in part.items()} for part in (one.streams, one.constants)
            )
            self.inputs[layer].append(StepInputs(streams=streams, constants=constants))

    def recorded(self) -> RecordedInputs | None:
        """None where nothing was asked for."""
        if self.initial is None:
            return None
        return RecordedInputs(
            recurrence=self.model.family.recurrence, shape=self.model.shape, inputs=self.inputs, initial=self.initial
        )
