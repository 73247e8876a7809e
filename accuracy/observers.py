"""What is watched inside a forward: state errors of the first sequence, and the inputs of recurrent layers.

State errors (relative Frobenius norms per head, mean over heads): ``checkpoint_error`` at flushes against the FP32
recurrence on the plan's OWN inputs (a shadow state, taken by the baseline kernel, so that an exact fold of an FP32
recurrence gives exactly 0); ``trajectory_error`` at flushes against the baseline of that position; ``read_error`` at
flushes, the copy against the checkpoint; ``output_error`` at every step against the shadow's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from driftgate.accuracy.adapters.blocks import Block
from driftgate.accuracy.adapters.decode_functions import StepInputs
from driftgate.accuracy.adapters.wrapping import WrappedModel
from driftgate.accuracy.metrics.state_error import relative_error
from driftgate.accuracy.plans import BASELINE
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
        self.shadow = Block.of("shadow", BASELINE)
        model.states.open_block(self.shadow, n_slots=max(1, len(self.plans)))
        heads = [model.blocks[i].head for i in self.plans]
        self.layers = [
            _LayerErrors(model, layer, self.plans, heads, shadow=self.shadow) for layer in range(model.n_layers)
        ]
        self.clocks = [_Clock(model.blocks[i].options) for i in self.plans]
        self.n_steps = 0
        self.n_flushes = [0] * len(self.plans)

    def before_step(self) -> None:
        """Once per forward: copy the prefilled states at the first, and look up which plans flush."""
        if not self.n_steps:
            first, slots = torch.zeros(1, dtype=torch.int64), torch.arange(len(self.plans))
            for layer in range(self.model.n_layers):
                state = self.model.blocks[0].read_checkpoint(layer, first)
                self.shadow.write(layer, slots, state.expand(len(self.plans), -1, -1, -1))
            tokens = int(self.model.blocks[0].pool.tokens[0])
            for clock in self.clocks:
                clock.tokens = tokens
        self.n_steps += 1
        self.flushing = [p for p, clock in enumerate(self.clocks) if clock.tick()]
        for p in self.flushing:
            self.n_flushes[p] += 1

    def observe_outputs(self, layer: int, inputs: StepInputs, out: torch.Tensor) -> None:
        """After a layer's step of all rows, on the device alone: take the shadow's step, add the output error."""
        if self.plans:
            self.layers[layer].add_output_error(inputs, out)

    def observe_flushes(self, layer: int, _inputs: object, _out: object) -> None:
        """After that: add the state errors of the plans that flushed."""
        for p in self.flushing:
            self.layers[layer].add_state_errors[p]()

    def sums(self, block: int) -> list[StateSums]:
        """Errors of one plan, by layer."""
        p = self.plans.index(block)
        result = []
        for layer, errors in enumerate(self.layers):
            copies = self.model.blocks[block].place(layer)[0].copy is not None
            seen = dict.fromkeys(ERRORS, self.n_flushes[p]) | {"output_error": self.n_steps}
            seen["read_error"] *= copies
            total, greatest = errors.sum[:, p].tolist(), errors.greatest[:, p].tolist()
            result.append(
                StateSums(
                    mean={e: total[i] / seen[e] if seen[e] else None for i, e in enumerate(ERRORS)},
                    greatest={e: greatest[i] if seen[e] else None for i, e in enumerate(ERRORS)},
                )
            )
        return result


class _LayerErrors:
    """Errors of all plans in one layer, summed on its device.

    Attributes:
        sum, greatest: [errors, plans] float64, over heads and what was seen.
        add_state_errors: by plan, adds the errors that a flush shows.
    """

    def __init__(
        self, model: WrappedModel, layer: int, plans: list[int], heads: list[int | None], *, shadow: Block
    ) -> None:
        device = model.states.devices[layer]
        self.model, self.layer, self.plans = model, layer, plans
        self.pool, self.own = shadow.place(layer)
        self.rows = torch.tensor([model.blocks[i].rows.start for i in plans], device=device)
        self.slots = torch.arange(len(plans), dtype=torch.int32, device=device)
        self.first = torch.zeros(1, dtype=torch.int64, device=device)
        self.sum = torch.zeros(len(ERRORS), len(plans), dtype=torch.float64, device=device)
        self.greatest = torch.zeros_like(self.sum)
        self.counted = _counted_heads(heads, model.shape.value_heads, device)
        self.add_state_errors = [
            model.states.record(partial(self._add_state_errors, p), device) for p in range(len(plans))
        ]

    def add_output_error(self, inputs: StepInputs, out: torch.Tensor) -> None:
        """Inputs and outputs of all rows."""
        expected = self.model.states.run_kernel(inputs.take_rows(self.rows), self.pool, self.own, self.slots)
        self._add("output_error", slice(None), relative_error(out[self.rows], expected, (-1,)))

    def _add_state_errors(self, p: int) -> None:
        block = self.model.blocks[self.plans[p]]
        shadow = self.pool.checkpoint.read(self.own, self.slots[p : p + 1].long())
        baseline = self.model.blocks[0].read_checkpoint(self.layer, self.first)
        checkpoint = block.read_checkpoint(self.layer, self.first)
        this = slice(p, p + 1)
        self._add("checkpoint_error", this, relative_error(checkpoint, shadow, (-2, -1)))
        self._add("trajectory_error", this, relative_error(checkpoint, baseline, (-2, -1)))
        pool, own = block.place(self.layer)
        if pool.copy is not None:
            read, held = pool.copy.read(own, self.first), pool.checkpoint.read(own, self.first)
            self._add("read_error", this, relative_error(read, held, (-2, -1)))

    def _add(self, error: str, plans: slice, by_head: torch.Tensor) -> None:
        """by_head: [plans, heads] float64."""
        e, counted = ERRORS.index(error), self.counted[plans]
        by_head = by_head.where(counted, 0.0)
        self.sum[e, plans] += by_head.sum(-1) / counted.sum(-1)
        self.greatest[e, plans] = torch.maximum(self.greatest[e, plans], by_head.amax(-1))


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
            block, first = self.model.blocks[0], torch.zeros(1, dtype=torch.int64)
            self.initial = torch.cat([block.read_checkpoint(n, first).cpu() for n in range(self.model.n_layers)])

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
