"""Plans through the decode kernels on the recorded inputs of a dump, with no model: errors, leak and drift.

Notable: every layer is measured by itself, on the same recorded inputs for every plan, so errors do not travel from
layer to layer as they do in a model. One number is a mean over sequences and steps (flushes) of a head, then over
heads, then over layers, each weighing the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from driftgate.accuracy.bits import BitTally
from driftgate.accuracy.dump import SCHEMA_VERSION, Dump, LayerDump
from driftgate.accuracy.dump_layers import name_type
from driftgate.accuracy.plans import PrecisionPlan, Role
from driftgate.accuracy.records import BitwiseRecord, CounterRecord
from driftgate.accuracy.replay_layer import BaselineErrors, LayerRun, PlanErrors
from driftgate.accuracy.replay_records import DumpRecord, PlanReplay, ReplayDocument
from driftgate.accuracy.replay_summary import (
    make_frame,
    mean_by_step,
    mean_errors,
    summarize_drift,
    summarize_floor,
    summarize_layer,
)
from driftgate.accuracy.replay_track import find_flushes
from driftgate.errors import EmptyRunError, InputError, UsageError
from driftgate.kernels.contract import Backend
from driftgate.quant.formats import get_format

__all__ = ["LEAST_FLUSHES", "Replay", "check_plans", "replay_dump", "steps_for_flushes"]

LEAST_FLUSHES = 2
SENSITIVITY = 3.0
"""A control is told from the baseline where its mean output error is above so many times the baseline's own."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What was measured.

    Attributes:
        document: replay.json.
        steps: plan, layer, head, sequence, position, window_offset, output_error; one row a step.
    """

    document: ReplayDocument
    steps: pd.DataFrame


def steps_for_flushes(plan: PrecisionPlan, *, start: int = 0) -> int:
    """Steps in which a plan flushes twice."""
    n_steps = LEAST_FLUSHES * max(plan.options.length, 1)
    flushes = np.flatnonzero(find_flushes(plan.options, n_steps, start=start))
    return int(flushes[LEAST_FLUSHES - 1]) + 1


def check_plans(plans: Mapping[str, PrecisionPlan], *, n_steps: int | None = None) -> None:
    """What plans alone show.

    Args:
        plans: by name.
        n_steps: steps that were asked for, None for all of the dump.

    Raises:
        UsageError: no plan, the baseline, speculative windows, or fewer steps asked for than two flushes take.
        EmptyRunError: less than one step is asked for.
    """
    if n_steps is not None and n_steps < 1:
        raise EmptyRunError(f"--steps {n_steps}: no step would be taken; give 1 or more")
    if not plans:
        raise UsageError("no plan: give at least one --plan, e.g. --plan nvfp4/fp32@16")
    for name, plan in plans.items():
        if plan.options.step_by_step:
            raise UsageError(f"plan {name} always runs; leave it out")
        if plan.options.window:
            raise UsageError(f"plan {name}: a dump holds no drafts to verify; leave +spec out")
        needed = LEAST_FLUSHES * plan.options.length if not plan.options.track else LEAST_FLUSHES
        if n_steps is not None and n_steps < needed:
            raise UsageError(f"--steps {n_steps}: plan {name} needs {needed} for {LEAST_FLUSHES} flushes; give more")


def replay_dump(
    dump: Dump,
    plans: Mapping[str, PrecisionPlan],
    *,
    roles: Mapping[str, Role] | None = None,
    file: str = "",
    n_steps: int | None = None,
    backend: Backend = Backend.TORCH,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Replay:
    """Measure plans on every layer of a dump.

    Args:
        dump: recorded inputs.
        plans: by name, in the order of the report.
        roles: by name; a plan that is not named is a candidate.
        file: what to call the dump.
        n_steps: leading steps that are taken; None for all.
        backend: which code takes the steps.
        device: where.
        seed: of stochastic rounding.
        progress: called with the number of layer-steps just done, ``len(dump.layers) * n_steps`` in all.

    Raises:
        UsageError, EmptyRunError: as ``check_plans``.
        InputError: the dump has fewer steps than wanted, or than two flushes of a plan take; or the baseline itself
            does not stay finite on it.
    """
    check_plans(plans, n_steps=n_steps)
    n_steps = _check_steps(dump, plans, n_steps)
    options = {name: plan.options for name, plan in plans.items()}
    found: list[tuple[dict[str, PlanErrors], BaselineErrors]] = []
    for layer in dump.layers:
        run = LayerRun(
            layer, options, n_steps=n_steps, start=dump.start, backend=backend, device=device, seed=seed
        )  # fmt: skip
        found.append(run.measure(progress))
    by_plan = {name: [errors[name] for errors, _ in found] for name in plans}
    floor = summarize_floor(dump.layers, [errors for _, errors in found])
    whole = {name: mean_by_step([e.output_error for e in layers]) for name, layers in by_plan.items()}
    records = {
        name: _plan(
            dump.layers, by_plan[name], plan, role=(roles or {}).get(name, Role.CANDIDATE), floor=floor.output_error,
            output=whole[name], reference=whole.get(_fp32_name(plan)),
        )
        for name, plan in plans.items()
    }  # fmt: skip
    statuses = {record.status for record in records.values()}
    document = ReplayDocument(
        verdict="fail" if "bits" in statuses else "inconclusive" if statuses - {"measured"} else "pass",
        dump=_describe(dump, file, n_steps),
        backend=backend.value,
        device=str(device),
        seed=seed,
        baseline=floor,
        plans=records,
        bitwise=[
            _bitwise(name, layer, invariant, tally)
            for name, layers in by_plan.items()
            for layer, errors in zip(dump.layers, layers, strict=True)
            for invariant, tally in sorted(errors.tallies.items())
        ],
    )
    return Replay(document=document, steps=make_frame(dump, by_plan))


def _describe(dump: Dump, file: str, n_steps: int) -> DumpRecord:
    return DumpRecord(
        file=file,
        schema_version=SCHEMA_VERSION,
        sha256=dump.digest,
        model=dump.model,
        recorder=dump.recorder,
        activation_dtype=name_type(dump.activation),
        layers=[layer.layer for layer in dump.layers],
        sequences=dump.n_sequences,
        steps=n_steps,
        steps_recorded=dump.n_steps,
        start=dump.start,
    )


def _check_steps(dump: Dump, plans: Mapping[str, PrecisionPlan], n_steps: int | None) -> int:
    if n_steps is not None and n_steps > dump.n_steps:
        raise InputError(f"--steps {n_steps}: the dump has {dump.n_steps}; give at most that, or record more")
    taken = dump.n_steps if n_steps is None else n_steps
    for name, plan in plans.items():
        needed = steps_for_flushes(plan, start=dump.start)
        if taken < needed:
            raise InputError(
                f"plan {name} needs {needed} steps for {LEAST_FLUSHES} flushes, there are {taken}; "
                "record more, or give a smaller L"
            )
    return taken


def _fp32_name(plan: PrecisionPlan) -> str:
    """The plan whose drift is that of reading alone, for plans with a recurrence below FP32."""
    if plan.options.recurrence == "fp32":
        return ""
    return str(PrecisionPlan.parse(f"{plan.options.read}/fp32@{plan.options.length}"))


def _plan(
    layers: Sequence[LayerDump],
    found: Sequence[PlanErrors],
    plan: PrecisionPlan,
    *,
    role: Role,
    floor: float | None,
    output: np.ndarray,
    reference: np.ndarray | None,
) -> PlanReplay:
    records = [summarize_layer(layer, errors, plan) for layer, errors in zip(layers, found, strict=True)]
    order = [np.inf if record.output_error is None else record.output_error for record in records]
    counters = CounterRecord(
        **{
            name: sum(getattr(errors, name) for errors in found)
            for name in ("low_precision_reads", "flushes", "requantizations", "nonfinite_states")
        }
    )
    n_nonfinite = sum(int((~errors.output_error.isfinite()).sum()) for errors in found)
    mean = mean_errors(records)
    status, reason = _judge(plan, role, found, counters, n_nonfinite, mean.output_error, floor)
    return PlanReplay(
        role=role.value,
        status=status,
        reason=reason,
        mean=mean,
        worst_layer=records[int(np.argmax(order))].layer,
        drift=summarize_drift(output, reference, plan, found[0].offsets),
        counters=counters,
        n_nonfinite=n_nonfinite,
        layers=records,
    )


def _judge(
    plan: PrecisionPlan,
    role: Role,
    found: Sequence[PlanErrors],
    counters: CounterRecord,
    n_nonfinite: int,
    error: float | None,
    floor: float | None,
) -> tuple[Any, str]:
    """Status of a plan and why; the first that applies."""
    options = plan.options
    low_read, low_recurrence = (get_format(f).low_precision for f in (options.read, options.recurrence))
    broken = [name for errors in found for name, tally in errors.tallies.items() if tally.n_different]
    if broken:
        return "bits", f"bits differ where {' and '.join(sorted(set(broken)))} wants them equal"
    if n_nonfinite or counters.nonfinite_states:
        return "invalid", f"{n_nonfinite} output errors and {counters.nonfinite_states} states are not finite"
    if (low_read or low_recurrence) and not counters.low_precision_reads:
        return "invalid", f"its {options.read} copy was never read: every step flushes; give a greater L"
    if (low_recurrence or (options.split and low_read)) and not counters.requantizations:
        return "invalid", "nothing was quantised after the first state; give more steps"
    if plan.low_precision and not any(bool(errors.output_error.any()) for errors in found):
        return "invalid", "its outputs equal the baseline's: nothing of the lower precision reached one"
    if role is Role.CONTROL and (error or 0.0) <= SENSITIVITY * (floor or 0.0):
        return (
            "no_sensitivity",
            f"control: mean output error {error or 0:.1e} is not above {SENSITIVITY:g} x the baseline's",
        )
    return "measured", ""


def _bitwise(name: str, layer: LayerDump, invariant: str, tally: BitTally) -> BitwiseRecord:
    return BitwiseRecord(
        invariant=invariant,
        recurrence=layer.recurrence.value,
        case={"plan": name, "layer": layer.layer, "compared": tally.n_compared},
        equal=tally.n_different == 0,
        n_different=tally.n_different,
        max_ulp=tally.max_ulp,
        first_different=tally.report(),
    )
