"""I4: a row's bits depend neither on the other rows, on its slot, on padded rows nor on strides.

Notable: the pool of a row that runs alone has 5,003 slots where heads are small, and the row lies in the last.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

from driftgate.accuracy.bits import BitTally
from driftgate.accuracy.cases import Case
from driftgate.accuracy.causes import name_cause
from driftgate.accuracy.plan_run import Kernels, PlanRun
from driftgate.accuracy.step_data import StepData
from driftgate.kernels.contract import ReplayOptions
from driftgate.kernels.pool import PAD_SLOT

__all__ = ["check_padding", "check_rows"]

_MANY_SLOTS, _SMALL_STATE = 5003, 1024
"""Slots of the large pool, and elements of a state up to which it is made."""


def check_rows(kernels: Kernels, case: Case, data: StepData) -> list[tuple[ReplayOptions, BitTally]]:
    """Each row alone, all rows at other places and in other slots, and inputs and states with other strides."""
    results = []
    for plan in case.plans:
        tally = BitTally()
        whole = PlanRun(kernels, plan, data)
        others = list(_rearrange(kernels, plan, data))
        for t in range(data.n_steps):
            out, _ = whole.step(t)
            states = whole.stored(whole.pool.checkpoint)
            for name, run in others:
                got, _ = run.step(t)
                sources = [run.data.sources[row] for row in run.live]
                order = [whole.live.index(row) for row in sources]
                tally.compare(f"output, {name}", out[sources], got[run.live], step=t, rows=sources)
                for one, other in zip(states, run.stored(run.pool.checkpoint), strict=True):
                    tally.compare(f"checkpoint, {name}", one[order], other, step=t, rows=sources)
                padded = run.data.padded_rows
                tally.compare("padding", torch.zeros_like(got[padded]), got[padded], step=t, rows=padded)
        for _, run in others:
            _check_untouched(tally, run, data.n_steps - 1)
        tally.looks_like = name_cause(tally, None, data)
        results.append((plan, tally))
    return results


def _rearrange(kernels: Kernels, plan: ReplayOptions, data: StepData) -> Iterator[tuple[str, PlanRun]]:
    """The same sequences in other batches and pools."""
    live = data.live_rows
    shape = data.shape
    small = shape.value_heads * shape.d_v * shape.d_k <= _SMALL_STATE and not plan.stochastic
    for row, n_slots in ((live[0], 1), (live[-1], _MANY_SLOTS if small else 97)):
        yield "row alone", PlanRun(kernels, plan, data.place([row], [n_slots - 1], n_slots=n_slots))
    n = len(live)
    rows = [live[-1], *live[:-1]]
    moved = data.place([None, *rows, None], [n + 4 - i for i in range(n)], n_slots=n + 6)
    yield "moved", PlanRun(kernels, plan, moved)
    yield "strided", PlanRun(kernels, plan, data.stride(), adopt=True)


def _check_untouched(tally: BitTally, run: PlanRun, step: int) -> None:
    """Slots of no row, and the gaps of a strided pool, hold what they held."""
    unused = run.data.unused_slots
    for old, new in zip(run.before, run.pool.checkpoint.tensors(), strict=True):
        tally.compare("unused slot", old[unused], new[0][unused], step=step, rows=[-1] * len(unused))
    if run.gaps is not None:
        gaps = run.gaps[:, None]
        tally.compare("gaps between slots", torch.full_like(gaps, 0x7F), gaps, step=step, rows=run.data.row_of_slot)


def check_padding(kernels: Kernels, case: Case, data: StepData) -> list[tuple[ReplayOptions, BitTally]]:
    """Batch 0, and a batch of padded rows alone, in the middle of a run: zeros, and nothing is written."""
    results = []
    for plan in case.plans:
        run, tally = PlanRun(kernels, plan, data), BitTally()
        for t in range(2):
            run.step(t)
        take = kernels.decode_step if plan.step_by_step else kernels.replay_step
        padded = torch.full_like(data.slots, PAD_SLOT)
        for name, slots in (("batch 0", data.slots[:0]), ("padded rows", padded)):
            before = _list_tensors(run)
            rows = {key: x[: len(slots)] for key, x in data.stream_inputs(2).items()}
            out = take(**rows, **data.constants, pool=run.pool, layer=0, slots=slots)
            run.pool.advance(slots)
            tally.compare(f"output, {name}", torch.zeros_like(out), out, step=2, rows=range(len(slots)))
            for one, other in zip(before, _list_tensors(run), strict=True):
                tally.compare_bytes(f"pool, {name}", one, other, step=2, rows=range(len(one)))
        tally.looks_like = name_cause(tally, None, data)
        results.append((plan, tally))
    return results


def _list_tensors(run: PlanRun) -> list[torch.Tensor]:
    """Copies of everything that the pool stores of its slots, the first axis counting slots."""
    pool = run.pool
    states = [s for s in (pool.checkpoint, pool.copy) if s is not None]
    stored = [t[0] for s in states for t in s.tensors()] + [b[0] for b in pool.buffers().values()]
    counters = [x[: pool.n_slots, None] for x in (pool.cursor, pool.flush, pool.tokens, pool.base, pool.error)]
    return [copy.deepcopy(t) for t in (*stored, *counters)]
