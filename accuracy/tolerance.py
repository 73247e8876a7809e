"""T1, the part of the certificate with a tolerance: replay in FP32 against the recurrence in FP64, stepped by itself.

Notable: the FP64 side knows neither buffers nor flushes and is never set to what a kernel stored, so errors that
baseline and replay share show here, and so does what builds up. Outputs are compared at every step, states at flushes.
Bounds are derived in ``bounds.py`` from the magnitudes of the FP64 side, by row and head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

import torch

from driftgate.accuracy.bounds import bound_dot, bound_output, bound_state
from driftgate.accuracy.cases import FORCED_AT
from driftgate.accuracy.certify import DEFAULT_RECURRENCES, DEFAULT_SHAPES, find_kernels
from driftgate.accuracy.plan_run import Kernels, PlanRun
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.records import ToleranceRecord
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
    """Plans fp32@L that run the same binary: one recurrence, shape, activation type and readout."""

    recurrence: Recurrence
    shape: HeadShape
    activation: torch.dtype
    plans: tuple[ReplayOptions, ...]

    @property
    def runs(self) -> list[tuple[ReplayOptions, bool]]:
        """Plans, and whether flushes are forced on them; at L = 1 all steps flush by themselves."""
        return [(plan, forced) for plan in self.plans for forced in (False, True) if not (forced and plan.length == 1)]

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
            group.shape, group.activation, n_rows=3, n_steps=2 * plan.length + max(FORCED_AT.values()) + 1, seed=seed,
            recurrence=group.recurrence, device=device,
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
    """The element that comes nearest to its bound."""

    n_compared: int = 0
    ratio: float = 0.0
    error: float = 0.0
    bound: float = 0.0

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


class _Exact:
    """The live rows of the data in FP64, with the magnitudes that bounds need, [live rows, HV]."""

    def __init__(self, data: StepData, slots: torch.Tensor) -> None:
        self.data = data
        self.step_once = import_module(f"driftgate.kernels.{data.recurrence.value}.reference").step
        self.state = data.states[slots].double()
        self.greatest = self.state.norm(dim=-1).amax(-1)
        self.added = torch.zeros_like(self.greatest)

    def step(self, t: int) -> torch.Tensor:
        """Output [live rows, HV, d_v]; ``state`` is then S_t."""
        data, group = self.data, self.data.shape.group
        x = {name: stream[t, data.live_rows].double() for name, stream in data.streams.items()}
        if data.recurrence.delta_rule:
            q, k, v, g, beta = normalise(x["q"]) * data.shape.d_k**-0.5, normalise(x["k"]), x["v"], x["g"], x["beta"]
        else:
            q, v, beta = x["C"], x["x"], x["dt"]
            k, g = x["B"], data.constants["A"].double() * beta
        q, k = (y.repeat_interleave(group, dim=1) for y in (q, k))
        if not data.recurrence.delta_rule:
            k = beta[..., None] * k
        self.state, u = self.step_once(self.state, k, v, g, beta)
        self.greatest = torch.maximum(self.greatest, self.state.norm(dim=-1).amax(-1))
        self.added = torch.maximum(self.added, u.abs().amax(-1) * k.norm(dim=-1))
        self.queries = q.norm(dim=-1)
        out = contract(self.state, q)
        self.skip = torch.zeros_like(self.greatest)
        self.gates = None
        if "D" in data.constants:
            D = data.constants["D"].double()
            out, self.skip = out + D[:, None] * v, D.abs() * v.abs().amax(-1)
        if "z" in x:
            out, self.gates = out * torch.nn.functional.silu(x["z"]), x["z"].abs().amax(-1, keepdim=True)
        return out


def _compare(kernels: Kernels, plan: ReplayOptions, data: StepData, *, forced: bool) -> dict[Compared, _Worst]:
    """One plan against FP64."""
    run = PlanRun(kernels, plan, data, forced_at=FORCED_AT if forced else {})
    exact = _Exact(data, run.slots)
    worst: dict[Compared, _Worst] = {"output": _Worst(), "state": _Worst()}
    for t in range(data.n_steps):
        expected = exact.step(t)
        found = torch.tensor(run.cursor, device=run.slots.device)  # entries that each row's step finds
        got, flushed = run.step(t)
        found[flushed] = 0
        n, d_k = int(found.max()) + 1, data.shape.d_k
        of_state = bound_state(t + 1, d_k, exact.greatest)
        buffered = exact.greatest + n * exact.added
        of_readout = bound_state(n, d_k, buffered) + bound_dot(plan.dot, buffered, n)
        read = exact.queries * 2 * (of_state + torch.where(found[:, None] > 0, of_readout, 0.0))
        limit = bound_output(
            expected, activation=data.activation, read=read[..., None], skip=exact.skip[..., None], gates=exact.gates
        )
        worst["output"].add(expected, got[run.live], limit)
        if forced and t == _FOLDED_AT and run.flush_now(len(run.live) - 1, t=t):
            flushed = [*flushed, len(run.live) - 1]
        if flushed:
            states = run.pool.checkpoint.read(0, run.slots[flushed])
            worst["state"].add(exact.state[flushed], states, of_state[flushed][..., None, None])
    return worst
