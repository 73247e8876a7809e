"""How the bit-exact invariants I1, I2, I3 and I7 are checked, and the table of all checks.

Notable: the baseline is the step of the kernel under test, so what both share is judged by the tolerance part, against
FP64, not here. Rows stand at different cursors, one row is padded and holds NaN, buffers start full of NaN, two slots
belong to no row and must not move. A case that compared nothing raises; it never passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from driftgate.accuracy.bits import BitTally
from driftgate.accuracy.cases import INVARIANTS, Case, CaseGroup, Check, list_groups
from driftgate.accuracy.causes import name_cause
from driftgate.accuracy.independence import check_padding, check_rows
from driftgate.accuracy.plan_run import Kernels, PlanRun
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.repeats import check_again, check_draws, check_graph
from driftgate.accuracy.step_data import StepData, draw_inputs, replay_recorded
from driftgate.accuracy.windows import check_windows
from driftgate.errors import EmptyRunError
from driftgate.kernels.contract import Backend, HeadShape, Readout, Recurrence, ReplayOptions
from driftgate.kernels.pool import StatePool
from driftgate.quant.codecs import encode_rows

if TYPE_CHECKING:
    from driftgate.accuracy.observers import RecordedInputs

__all__ = ["Found", "check_cases", "check_group"]

FOLDED_AT = 3
"""Step after which the last row's buffer is folded without a step."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one plan of a case gave."""

    case: Case
    data: StepData
    plan: ReplayOptions
    tally: BitTally


def check_cases(
    kernels: Kernels,
    *,
    shapes: Sequence[HeadShape],
    lengths: Sequence[int],
    formats: Sequence[str],
    recurrence: Recurrence = Recurrence.GDN,
    invariants: Sequence[str] = tuple(INVARIANTS),
    backend: Backend = Backend.TRITON,
    recorded: RecordedInputs | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[Found]:
    """Run all cases of one recurrence; arguments and errors as ``certify`` has them."""
    for group in list_groups(
        backend=backend, recurrences=[recurrence], shapes=shapes, lengths=lengths, formats=formats,
        invariants=invariants, recorded=recorded,
    ):  # fmt: skip
        yield from check_group(kernels, group, recorded=recorded, seed=seed, device=device)


def check_group(
    kernels: Kernels,
    group: CaseGroup,
    *,
    recorded: RecordedInputs | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[Found]:
    """Run the cases of a group; I6 is left out for kernels without ``verify_window``.

    Raises:
        EmptyRunError: a case compared nothing, or the baseline left its states as they were.
    """
    for case in group.cases:
        if case.check is Check.WINDOWS and not hasattr(kernels, "verify_window"):
            continue
        if recorded is None:
            data = draw_inputs(
                case.shape, case.activation, n_rows=3, n_steps=case.n_steps, seed=seed, recurrence=case.recurrence,
                device=device,
            )  # fmt: skip
        else:
            data = replay_recorded(recorded, n_steps=case.n_steps, device=device)
        for plan, tally in CHECKS[case.check](kernels, case, data):
            missing = [what for what in WANTED[case.check] if not tally.n_compared.get(what)]
            if missing:
                raise EmptyRunError(
                    f"{case.invariant} ({case.check.value}), plan {PrecisionPlan(options=plan)}: {data.n_steps} steps "
                    f"compared no {' and no '.join(missing)}; give more steps"
                )
            yield Found(case=case, data=data, plan=plan, tally=tally)


def _check_baseline(kernels: Kernels, case: Case, data: StepData) -> list[tuple[ReplayOptions, BitTally]]:
    """I1 and I2: outputs and states are those of the step-by-step kernel."""
    base = PlanRun(kernels, case.baseline, data)
    runs = [PlanRun(kernels, plan, data) for plan in case.plans]
    expected = [list(base.stored(base.pool.checkpoint)) for _ in runs]  # state at the last flush
    for t in range(data.n_steps):
        out, _ = base.step(t)
        now = base.stored(base.pool.checkpoint)
        for run, last in zip(runs, expected, strict=True):
            got, flushed = run.step(t)
            at_every_step = run.options.readout is Readout.EXACT_READOUT or run.options.length == 1
            rows = list(range(len(run.live))) if at_every_step else list(flushed)
            if t == FOLDED_AT and run.flush_now(len(run.live) - 1, t=t):
                flushed = [*flushed, len(run.live) - 1]
            for state, new in zip(last, now, strict=True):
                state[flushed] = new[flushed]
            run.compare("output", out[run.live], got[run.live], step=t, rows=rows)
            run.check_output(got, t)
            run.compare_stored("checkpoint", run.pool.checkpoint, last, step=t)
    if all(torch.equal(a, b[0]) for a, b in zip(base.before, base.pool.checkpoint.tensors(), strict=True)):
        raise EmptyRunError(f"{case.invariant}: the baseline left every state as it was; its kernel computes nothing")
    return _finish(case, runs, data)


def _check_read_formats(kernels: Kernels, case: Case, data: StepData) -> list[tuple[ReplayOptions, BitTally]]:
    """I3: checkpoints, and outputs at flushes, do not depend on the read format; copies are made from checkpoints."""
    base = PlanRun(kernels, case.baseline, data)
    runs = [PlanRun(kernels, plan, data) for plan in case.plans]
    for t in range(-1, data.n_steps):
        out, flushed = base.step(t) if t >= 0 else (None, [])
        expected = base.stored(base.pool.checkpoint)
        for run in runs:
            if out is not None:
                got, _ = run.step(t)
                run.compare("output", out[run.live], got[run.live], step=t, rows=flushed)
                run.check_output(got, t)
            run.compare_stored("checkpoint", run.pool.checkpoint, expected, step=t)
            assert run.pool.copy is not None
            run.compare_stored("copy", run.pool.copy, _rebuild_copy(run.pool, run.slots), step=t)
    return _finish(case, runs, data)


def _rebuild_copy(pool: StatePool, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """quantize(dequantize(checkpoint)) of slots, from stored bytes, by the torch codecs."""
    assert pool.copy is not None
    encoded = encode_rows(pool.copy.format, pool.checkpoint.read(0, slots), nonfinite="saturate")
    return tuple(t for t in encoded if t is not None)


def _check_fold(kernels: Kernels, case: Case, data: StepData) -> list[tuple[ReplayOptions, BitTally]]:
    """I3, shared plans: a flush stores what FP32 baseline steps make of the dequantised checkpoint.

    Kernels of two formats add up a row in different orders, as their loads differ; hence one element a key and query.
    """
    thin = data.thin()
    runs = [PlanRun(kernels, plan, thin) for plan in case.plans]
    shadows = [PlanRun(kernels, case.baseline, thin) for _ in runs]
    expected = []
    for run, shadow in zip(runs, shadows, strict=True):
        shadow.pool.write(0, shadow.slots, run.anchor)
        expected.append(list(run.stored(run.pool.checkpoint)))
    for t in range(thin.n_steps):
        for run, shadow, last in zip(runs, shadows, expected, strict=True):
            out, _ = shadow.step(t)
            got, flushed = run.step(t)
            run.compare("output", out[run.live], got[run.live], step=t, rows=flushed)
            run.check_output(got, t)
            if t == FOLDED_AT and run.flush_now(len(run.live) - 1, t=t):
                flushed = [*flushed, len(run.live) - 1]
            if flushed:
                slots = run.slots[flushed]
                folded = shadow.pool.checkpoint.read(0, slots)
                noise = run.pool.noise(0, slots)
                encoded = encode_rows(run.pool.checkpoint.format, folded, nonfinite="saturate", noise=noise)
                for state, new in zip(last, (part for part in encoded if part is not None), strict=True):
                    state[flushed] = new
            run.compare_stored("checkpoint", run.pool.checkpoint, last, step=t)
            if flushed:
                shadow.pool.write(0, slots, run.pool.checkpoint.read(0, slots))
    return _finish(case, runs, thin)


def _check_values(kernels: Kernels, case: Case, data: StepData) -> list[tuple[ReplayOptions, BitTally]]:
    """I7: nothing may change a state that neither decays nor is written to."""
    value = 1.0 + 2.0**-12
    still = data.hold(value)
    runs = [PlanRun(kernels, plan, still) for plan in case.plans]
    for run in runs:
        expected = torch.full_like(run.anchor, value)
        for t in range(still.n_steps):
            run.step(t)
            run.compare_stored("checkpoint", run.pool.checkpoint, (expected,), step=t)
    return _finish(case, runs, still)


def _check_windows(kernels: Kernels, case: Case, data: StepData) -> list[tuple[ReplayOptions, BitTally]]:
    """I6: see ``windows.py``, which draws inputs of its own."""
    found = []
    for plan in case.plans:
        tally, _ = check_windows(
            kernels,  # type: ignore[arg-type]
            recurrence=case.recurrence, shape=case.shape, activation=case.activation, options=plan,
            device=data.slots.device,
        )  # fmt: skip
        tally.looks_like = name_cause(tally, None, data)
        found.append((plan, tally))
    return found


def _finish(case: Case, runs: Sequence[PlanRun], data: StepData) -> list[tuple[ReplayOptions, BitTally]]:
    """Results of the runs, with the cause that a difference looks like."""
    for run in runs:
        run.check_unused(data.n_steps - 1)
        if not run.flushes:
            raise EmptyRunError(
                f"{case.invariant} ({case.check.value}), plan {PrecisionPlan(options=run.options)}: {data.n_steps} "
                "steps without a flush; give more steps"
            )
        run.tally.looks_like = name_cause(run.tally, run.evidence, data)
    return [(run.options, run.tally) for run in runs]


CHECKS: dict[Check, Callable[[Kernels, Case, StepData], list[tuple[ReplayOptions, BitTally]]]] = {
    Check.BASELINE: _check_baseline,
    Check.READ_FORMATS: _check_read_formats,
    Check.FOLD: _check_fold,
    Check.VALUES: _check_values,
    Check.ROWS: check_rows,
    Check.PADDING: check_padding,
    Check.AGAIN: check_again,
    Check.DRAWS: check_draws,
    Check.GRAPH: check_graph,
    Check.WINDOWS: _check_windows,
}
"""How each question is answered; a new one is an entry here, in ``WANTED`` and in ``cases.py``."""

WANTED: dict[Check, tuple[str, ...]] = {
    Check.BASELINE: ("output", "checkpoint", "padding", "unused slot"),
    Check.READ_FORMATS: ("output", "checkpoint", "copy", "padding", "unused slot"),
    Check.FOLD: ("output", "checkpoint", "padding", "unused slot"),
    Check.VALUES: ("checkpoint", "unused slot"),
    Check.ROWS: (
        *(f"{what}, {way}" for what in ("output", "checkpoint") for way in ("row alone", "moved", "strided")),
        "unused slot",
        "gaps between slots",
    ),
    Check.PADDING: ("pool, batch 0", "pool, padded rows", "output, padded rows"),
    Check.AGAIN: ("output", "checkpoint"),
    Check.DRAWS: ("other seed", "other tokens", "other sequence", "other slot"),
    Check.GRAPH: ("output", "checkpoint", "counters"),
    Check.WINDOWS: ("padding", "unused slot"),
}
"""What a case must have compared."""
