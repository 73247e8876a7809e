"""T1, the part of the certificate with a tolerance: replay in FP32 against the recurrence in FP64, stepped by itself.

Notable: the FP64 side knows neither buffers nor flushes and is never set to what a kernel stored, so errors that
baseline and replay share show here, and so does what builds up. Outputs are compared at every step, states at flushes.
Bounds are derived in ``running_bounds.py`` and follow the FP64 side. ``scale`` of a record, the greatest FP64 result,
turns errors and bounds into relative ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

import torch

from driftgate.accuracy.cases import FORCED_AT
from driftgate.accuracy.certify import DEFAULT_RECURRENCES, DEFAULT_SHAPES, find_kernels
from driftgate.accuracy.plan_run import Kernels, PlanRun
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.records import ToleranceRecord
from driftgate.accuracy.running_bounds import ExactStep, RunningBounds, bound_elements
from driftgate.accuracy.step_data import StepData, draw_inputs
from driftgate.errors import EmptyRunError, UsageError
from driftgate.kernels.contract import Backend, Dot, HeadShape, Readout, Recurrence, ReplayOptions
from driftgate.kernels.twin import contract, normalise

__all__ = [
    "TOLERANCE_LENGTHS", "ToleranceGroup", "count_tolerance", "list_tolerance_groups", "measure_tolerance",
    "run_tolerance_group",
]  # fmt: skip

Compared = Literal["output", "state"]
TOLERANCE_LENGTHS = (1, 4, 8, 16)
_FOLDED_AT = 3
"""Step after which, where flushes are forced, the last row's buffer is folded without a step."""


@dataclass(frozen=True, kw_only=True)
class ToleranceGroup:
    """Plans fp32@L that run the same binary: one recurrence, shape, activation type and readout.

    Attributes:
        n_rows: live rows.
        cycles: natural flush cycles of each run, at the least.
        natural_only: leave out the runs with forced flushes.
    """

    recurrence: Recurrence
    shape: HeadShape
    activation: torch.dtype
    plans: tuple[ReplayOptions, ...]
    n_rows: int = 3
    cycles: int = 2
    natural_only: bool = False

    @property
    def runs(self) -> list[tuple[ReplayOptions, bool]]:
        """Plans, and whether flushes are forced on them; at L = 1 all steps flush by themselves."""
        forced = [False] if self.natural_only else [False, True]
        return [(plan, force) for plan in self.plans for force in forced if not (force and plan.length == 1)]

    @property
    def n_records(self) -> int:
        """Results of the group: outputs and states of each run."""
        return 2 * len(self.runs)

    def __str__(self) -> str:
        shape, plan = self.shape, self.plans[0]
        heads = f"{shape.key_heads}/{shape.value_heads} heads {shape.d_v}x{shape.d_k}"
        kind = str(self.activation).removeprefix("torch.")
        return f"{self.recurrence.value} {heads} {plan.readout.value} {plan.dot.value} {kind}"


def list_tolerance_groups(
    *,
    backend: Backend,
    recurrences: Sequence[Recurrence] = DEFAULT_RECURRENCES,
    shapes: Sequence[HeadShape] = DEFAULT_SHAPES,
    lengths: Sequence[int] = TOLERANCE_LENGTHS,
) -> list[ToleranceGroup]:
    """What ``measure_tolerance`` runs, in groups that share a compiled kernel and can be pickled.

    Products in TF32 and BF16 exist on a GPU alone: on other backends their groups are absent, not passed.

    Raises:
        EmptyRunError: there is none.
    """
    dots = tuple(Dot) if backend is Backend.TRITON else (Dot.IEEE,)
    ways = [(Readout.OUTPUT_ONLY, Dot.IEEE), *((Readout.STATE_OUTPUT, dot) for dot in dots)]
    groups = [
        ToleranceGroup(
            recurrence=recurrence,
            shape=shape,
            activation=kind,
            plans=tuple(ReplayOptions(length=n, readout=readout, dot=dot) for n in sorted(set(lengths))),
        )
        for recurrence in recurrences
        for shape in shapes
        for kind in (torch.float32, torch.bfloat16)
        for readout, dot in ways
    ]
    if not groups or not lengths:
        raise EmptyRunError("nothing to measure; give at least one recurrence, shape and length")
    return groups


def count_tolerance(
    *,
    backend: Backend,
    recurrences: Sequence[Recurrence] = DEFAULT_RECURRENCES,
    shapes: Sequence[HeadShape] = DEFAULT_SHAPES,
    lengths: Sequence[int] = TOLERANCE_LENGTHS,
) -> int:
    """Records that ``measure_tolerance`` returns for these arguments."""
    groups = list_tolerance_groups(backend=backend, recurrences=recurrences, shapes=shapes, lengths=lengths)
    return sum(group.n_records for group in groups)


def measure_tolerance(
    *,
    backend: Backend,
    recurrences: Sequence[Recurrence] = DEFAULT_RECURRENCES,
    shapes: Sequence[HeadShape] = DEFAULT_SHAPES,
    lengths: Sequence[int] = TOLERANCE_LENGTHS,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    implementation: Kernels | None = None,
) -> list[ToleranceRecord]:
    """Outputs and states of fp32@L, output_only and state_output, against FP64; natural and forced flushes.

    Args:
        backend: which code takes the steps; with ``implementation`` only its name in the records.
        recurrences: whose kernels; with ``implementation`` one.
        shapes: heads.
        lengths: values of L.
        device: where everything runs.
        seed: of the random inputs and states.
        progress: called with the number of new records after each group.
        implementation: the kernels to measure; None for driftgate's own on that backend.

    Returns:
        One record for the outputs and one for the states of each run.

    Raises:
        EmptyRunError: nothing to compare.
        RuntimeError: this process cannot run the backend.
        UsageError: an implementation for more than one recurrence.
    """
    groups = list_tolerance_groups(backend=backend, recurrences=recurrences, shapes=shapes, lengths=lengths)
    if implementation is not None and len({group.recurrence for group in groups}) > 1:
        raise UsageError("an implementation goes with one recurrence; name it")
    records = []
    for group in groups:
        new = run_tolerance_group(group, backend=backend, device=device, seed=seed, implementation=implementation)
        records += new
        if progress is not None:
            progress(len(new))
    return records


def run_tolerance_group(
    group: ToleranceGroup,
    *,
    backend: Backend,
    device: torch.device | str = "cpu",
    seed: int = 0,
    implementation: Kernels | None = None,
) -> list[ToleranceRecord]:
    """Measure one group; arguments and errors as ``measure_tolerance`` has them."""
    kernels = implementation or find_kernels(group.recurrence, backend, group.shape)
    records = []
    for plan, forced in group.runs:
        data = draw_inputs(
            group.shape, group.activation, n_rows=group.n_rows,
            n_steps=group.cycles * plan.length + max(FORCED_AT.values()) + 1, seed=seed, recurrence=group.recurrence,
            device=device,
        )  # fmt: skip
        case = _describe(group, plan, forced=forced, n_steps=data.n_steps) | {"backend": backend.value, "seed": seed}
        for what, found in _compare(kernels, plan, data, forced=forced).items():
            if not found.n_compared:
                raise EmptyRunError(f"T1, {case['plan']}: {data.n_steps} steps compared no {what}; give more steps")
            records.append(
                ToleranceRecord(
                    recurrence=group.recurrence.value,
                    case=case | {"n_compared": found.n_compared},
                    what=what,
                    error=found.error,
                    bound=found.bound,
                    scale=found.scale,
                    greatest_error=found.greatest,
                    within=found.ratio <= 1.0,
                )
            )
    return records


def _describe(group: ToleranceGroup, plan: ReplayOptions, *, forced: bool, n_steps: int) -> dict[str, object]:
    shape = group.shape
    return {
        "plan": str(PrecisionPlan(options=plan)),
        "readout": plan.readout.value,
        "dot": plan.dot.value,
        "length": plan.length,
        "flushes": "forced" if forced else "natural",
        "key_heads": shape.key_heads,
        "value_heads": shape.value_heads,
        "d_k": shape.d_k,
        "d_v": shape.d_v,
        "activation": str(group.activation).removeprefix("torch."),
        "steps": n_steps,
    }


@dataclass(kw_only=True)
class _Worst:
    """The element that comes nearest to its bound, the greatest error and the greatest result."""

    n_compared: int = 0
    ratio: float = 0.0
    error: float = 0.0
    bound: float = 0.0
    greatest: float = 0.0
    scale: float = 0.0

    def add(self, expected: torch.Tensor, got: torch.Tensor, bound: torch.Tensor) -> None:
        """Compare float64 [rows, HV, ...] with bounds that broadcast to it."""
        self.n_compared += expected.numel()
        error = (expected - got.double()).abs()
        bound = bound.expand_as(error)
        # Where nothing may be off, nothing is; NaN is never near enough.
        ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=torch.inf)
        at = int(ratio.argmax())
        if self.bound == 0.0 or float(ratio.flatten()[at]) > self.ratio:
            self.ratio, self.error, self.bound = (float(x.flatten()[at]) for x in (ratio, error, bound))
        self.greatest = max(float(error.nan_to_num(nan=torch.inf).max()), self.greatest)
        self.scale = max(float(expected.abs().max()), self.scale)


class _Exact:
    """The live rows of the data in FP64, and the bounds that go along with them."""

    def __init__(self, data: StepData, slots: torch.Tensor, plan: ReplayOptions) -> None:
        self.data = data
        self.step_once = import_module(f"driftgate.kernels.{data.recurrence.value}.reference").step
        self.state = data.states[slots].double()
        self.bounds = RunningBounds(self.state, delta_rule=data.recurrence.delta_rule, dot=plan.dot)

    def step(self, t: int) -> tuple[torch.Tensor, Callable[[list[int]], torch.Tensor]]:
        """Output [live rows, HV, d_v], and what bounds it once it is known which rows flushed; call that once."""
        data = self.data
        x = {name: stream[t, data.live_rows].double() for name, stream in data.streams.items()}
        if data.recurrence.delta_rule:
            q, k, v, g, beta = normalise(x["q"]) * data.shape.d_k**-0.5, normalise(x["k"]), x["v"], x["g"], x["beta"]
        else:
            q, v, beta = x["C"], x["x"], x["dt"]
            k, g = x["B"], data.constants["A"].double() * beta
        q, k = (y.repeat_interleave(data.shape.group, dim=1) for y in (q, k))
        if not data.recurrence.delta_rule:
            k = beta[..., None] * k
        before = self.state
        self.state, u = self.step_once(before, k, v, g, beta)
        decays = g if data.recurrence.channel_decay else g[..., None]
        taken = ExactStep(before=before, after=self.state, q=q, k=k, u=u, g=decays, beta=beta)
        out = contract(self.state, q)
        skip, z = None, x.get("z")
        if "D" in data.constants:
            skip = data.constants["D"].double()[:, None] * v
            out = out + skip
        if z is not None:
            out = out * torch.nn.functional.silu(z)

        def bound(flushed: list[int]) -> torch.Tensor:
            read = self.bounds.take(taken, flushed)
            return bound_elements(out, activation=data.activation, read=read, skip=skip, z=z)

        return out, bound


def _compare(kernels: Kernels, plan: ReplayOptions, data: StepData, *, forced: bool) -> dict[Compared, _Worst]:
    """One plan against FP64."""
    run = PlanRun(kernels, plan, data, forced_at=FORCED_AT if forced else {})
    exact = _Exact(data, run.slots, plan)
    worst: dict[Compared, _Worst] = {"output": _Worst(), "state": _Worst()}
    for t in range(data.n_steps):
        expected, bound = exact.step(t)
        got, flushed = run.step(t)
        worst["output"].add(expected, got[run.live], bound(flushed))
        if forced and t == _FOLDED_AT and run.flush_now(len(run.live) - 1, t=t):
            flushed = [*flushed, len(run.live) - 1]
            exact.bounds.fold(flushed[-1:], exact.state)
        if flushed:
            states = run.pool.checkpoint.read(0, run.slots[flushed])
            worst["state"].add(exact.state[flushed], states, exact.bounds.state[flushed][..., None])
    return worst
