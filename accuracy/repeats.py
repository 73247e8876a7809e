"""I5: two runs are equal, stochastic rounding draws by seed, sequence and token, a CUDA Graph replays the bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from driftgate.accuracy.bits import BitTally
from driftgate.accuracy.cases import Case
from driftgate.accuracy.causes import name_cause
from driftgate.accuracy.plan_run import SEED, Kernels, PlanRun
from driftgate.accuracy.step_data import StepData
from driftgate.kernels.contract import ReplayOptions
from driftgate.kernels.pool import PAD_SLOT

__all__ = ["check_again", "check_draws", "check_graph"]


def check_again(kernels: Kernels, case: Case, data: StepData) -> list[tuple[ReplayOptions, BitTally]]:
    """The same steps twice, with equal seeds."""
    results = []
    for plan in case.plans:
        one, other = PlanRun(kernels, plan, data), PlanRun(kernels, plan, data)
        for t in range(data.n_steps):
            (out, _), (got, _) = one.step(t), other.step(t)
            other.compare("output", out[one.live], got[one.live], step=t)
            other.compare_stored("checkpoint", other.pool.checkpoint, one.stored(one.pool.checkpoint), step=t)
        other.tally.looks_like = "a race, or memory that nothing wrote"
        results.append((plan, other.tally))
    return results


def check_draws(kernels: Kernels, case: Case, data: StepData) -> list[tuple[ReplayOptions, BitTally]]:
    """Another seed, token count or sequence rounds otherwise at the first flush; another slot does not."""
    results = []
    rows = [row if row in data.live_rows else None for row in range(len(data.slots))]
    moved = data.place(rows, [data.n_slots + row for row in data.live_rows], n_slots=2 * data.n_slots)
    for plan in case.plans:
        tally = BitTally()
        one, slot = PlanRun(kernels, plan, data), PlanRun(kernels, plan, moved)
        others = {
            "other seed": PlanRun(kernels, plan, data, seed=SEED + 1),
            "other tokens": PlanRun(kernels, plan, data, tokens=5),
            "other sequence": PlanRun(kernels, plan, data, first_sequence=9),
        }
        seen: set[int] = set()
        for t in range(data.n_steps):
            _, flushed = one.step(t)
            slot.step(t)
            codes = one.stored(one.pool.checkpoint)[0]
            for i in flushed:
                row = one.live[i]
                tally.compare("other slot", codes[[i]], slot.stored(slot.pool.checkpoint)[0][[i]], step=t, rows=[row])
            for name, run in others.items():
                run.step(t)
                new = run.stored(run.pool.checkpoint)[0]
                for i in set(flushed) - seen:
                    tally.require_other(name, codes[i], new[i], step=t, row=one.live[i])
            seen |= set(flushed)
        tally.looks_like = name_cause(tally, None, data)
        results.append((plan, tally))
    return results


def check_graph(kernels: Kernels, case: Case, data: StepData) -> list[tuple[ReplayOptions, BitTally]]:
    """One captured step, replayed on new inputs and slots; a row that becomes padding leaves its slot alone."""
    results = []
    for plan in case.plans:
        eager, captured = PlanRun(kernels, plan, data), PlanRun(kernels, plan, data)
        inputs = {name: x.clone() for name, x in data.stream_inputs(0).items()}
        slots = torch.full_like(data.slots, PAD_SLOT)
        out, replay = _capture(partial(_take_step, captured, inputs, slots))
        tally = BitTally()
        for t in range(data.n_steps):
            rows = data.slots.clone()
            if t % 3 == 2:
                rows[data.live_rows[t % 2]] = PAD_SLOT
            expected = _take_step(eager, data.stream_inputs(t), rows)
            for name, new in data.stream_inputs(t).items():
                inputs[name].copy_(new)
            slots.copy_(rows)
            replay()
            tally.compare("output", expected, out, step=t, rows=range(len(rows)))
            stored = (run.stored(run.pool.checkpoint) for run in (eager, captured))
            for one, other in zip(*stored, strict=True):
                tally.compare("checkpoint", one, other, step=t, rows=eager.live)
            for name in ("cursor", "tokens", "flush", "error"):
                one, other = (getattr(run.pool, name)[:-1, None] for run in (eager, captured))
                tally.compare("counters", one, other, step=t, rows=data.row_of_slot)
        tally.looks_like = name_cause(tally, None, data)
        results.append((plan, tally))
    return results


def _take_step(run: PlanRun, inputs: Mapping[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """One step of a plan, cursors included; inputs without constants."""
    take = run.kernels.decode_step if run.options.step_by_step else run.kernels.replay_step
    out = take(**inputs, **run.data.constants, pool=run.pool, layer=0, slots=slots)
    run.pool.advance(slots)
    return out


def _capture(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """Capture a step whose rows are all padding, so that nothing is written yet; its output, and how to replay it."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())  # else it may read slots and states before they are filled
    with torch.cuda.stream(side):  # compiles
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return out, graph.replay
