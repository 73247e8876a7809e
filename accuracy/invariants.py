"""How the bit-exact invariants are checked: cases, plans run beside one baseline, and what is compared after each step.

Notable: the baseline is the step of the kernel under test, so what both share is judged by the comparison with the FP64
twin, not here. Rows stand at different cursors, one row is padded and holds NaN, buffers start full of NaN, two slots
belong to no row and must not move. Flushes are predicted by counting, not read from the pool. A case that compared
nothing raises; it never passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from driftgate.accuracy.bits import BitTally
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.step_data import StepData, draw_inputs, replay_recorded
from driftgate.errors import EmptyRunError
from driftgate.kernels.contract import HeadShape, Readout, ReplayOptions
from driftgate.kernels.pool import StatePool, StoredStates
from driftgate.quant.codecs import encode_rows
from driftgate.quant.formats import get_format

if TYPE_CHECKING:
    from driftgate.accuracy.observers import RecordedInputs

__all__ = ["Case", "Found", "Kernels", "check_cases", "list_cases"]


class Kernels(Protocol):
    """What is certified: a module or object with the three functions of ``driftgate.kernels.gdn``."""

    decode_step: Callable[..., torch.Tensor]
    replay_step: Callable[..., torch.Tensor]
    flush_now: Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Plans that run beside one baseline on the same inputs; each gives one record."""

    invariant: str
    shape: HeadShape
    activation: torch.dtype
    baseline: ReplayOptions
    plans: tuple[ReplayOptions, ...]

    @property
    def n_steps(self) -> int:
        """Two natural flushes for every row, those included that were flushed out of turn."""
        return max(2 * plan.length + len(_FORCED_AT) for plan in self.plans)


_FORCED_AT = (None, 1, 2)
"""Step before which each row's flush is forced, so that the rows stand at different cursors afterwards."""


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
    recorded: RecordedInputs | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[Found]:
    """Run all cases; arguments and errors as ``certify`` has them."""
    for case in list_cases(shapes, lengths, formats, recorded):
        n_steps = case.n_steps
        if recorded is None:
            data = draw_inputs(case.shape, case.activation, n_rows=3, n_steps=n_steps, seed=seed, device=device)
        else:
            data = replay_recorded(recorded, n_steps=n_steps, device=device)
        for plan, tally in _CHECKS[case.invariant](kernels, case, data):
            yield Found(case=case, data=data, plan=plan, tally=tally)


def list_cases(
    shapes: Sequence[HeadShape],
    lengths: Sequence[int],
    formats: Sequence[str],
    recorded: RecordedInputs | None,
) -> Iterator[Case]:
    """Cases in the order of the invariants; I2 and I3 take BF16 activations for every other shape only."""
    names = tuple(dict.fromkeys(get_format(name).name for name in formats))
    if recorded is not None:
        shapes, every = (recorded.shape,), [recorded.inputs[0][0].q.dtype]
    else:
        every = [torch.float32, torch.bfloat16]
    for n, shape in enumerate(shapes):
        one = every[(n + 1) % len(every)]
        for name in names:
            base = ReplayOptions(read=name, recurrence=name)
            if 1 in lengths:
                plan = ReplayOptions(read=name, recurrence=name, length=1)
                for kind in every:
                    yield Case(invariant="I1", shape=shape, activation=kind, baseline=base, plans=(plan,))
        if "fp32" in names:
            for length in lengths:
                variants = [ReplayOptions(length=length, readout=readout) for readout in Readout]
                if length > 1:
                    variants.append(ReplayOptions(length=length, track=length + 1))
                yield Case(invariant="I2", shape=shape, activation=one, baseline=ReplayOptions(), plans=tuple(variants))
        for name in names:
            for length in lengths:
                base = ReplayOptions(read=name, recurrence=name, length=length)
                plans = _split_plans(name, names, length)
                if plans:
                    yield Case(invariant="I3", shape=shape, activation=one, baseline=base, plans=plans)
        if "fp32" in names:
            for length in lengths:
                base = ReplayOptions(length=length)
                splits = _split_plans("fp32", names, length) if length == max(lengths) else ()
                plans = (base, *splits)
                yield Case(invariant="I7", shape=shape, activation=torch.bfloat16, baseline=base, plans=plans)


def _split_plans(recurrence: str, names: Sequence[str], length: int) -> tuple[ReplayOptions, ...]:
    """One plan for every read format below a recurrence format, the readouts in turn."""
    bits = get_format(recurrence).bits
    reads = [name for name in names if name != recurrence and get_format(name).bits <= bits]
    readouts = list(Readout)
    return tuple(
        ReplayOptions(read=read, recurrence=recurrence, length=length, readout=readouts[(n + length) % len(readouts)])
        for n, read in enumerate(reads)
    )


class _Run:
    """One plan on the rows of the data: its pool, and which of its rows flush.

    Flushes are predicted here, by counting, not read from the pool.
    """

    def __init__(self, kernels: Kernels, options: ReplayOptions, data: StepData) -> None:
        self.kernels, self.options, self.data = kernels, options, data
        self.tally = BitTally()
        self.live = data.live_rows
        self.slots_of_live = data.slots[self.live].long()
        pool = StatePool(
            data.shape,
            options,
            n_slots=data.n_slots,
            activation_dtype=data.activation,
            device=data.slots.device,
        )
        pool.audit()
        pool.write(0, torch.arange(data.n_slots, device=data.slots.device), data.states)
        for buffer in (pool.keys, pool.values, pool.log_decay, pool.beta, pool.corrections):
            if buffer is not None:
                buffer.fill_(torch.nan)
        self.pool = pool
        self.before = self.stored(pool.checkpoint, all_slots=True)
        self.cursor = [0] * len(self.live)
        self.flushes = 0

    def step(self, t: int) -> tuple[torch.Tensor, list[int]]:
        """Take step t; the output of all rows [B, HV, d_v], and the live rows (by their order) that flushed."""
        forced = [i for i in range(len(self.live)) if not self.options.step_by_step and _FORCED_AT[i] == t]
        if forced:
            self.pool.force_flush(self.slots_of_live[forced])
        options = self.options
        tracked = bool(options.track) and (t + 1) % options.track == 0
        flushed = [
            i
            for i, cursor in enumerate(self.cursor)
            if cursor >= options.length - 1 or tracked or i in forced or options.step_by_step
        ]
        self.cursor = [0 if i in flushed else cursor + 1 for i, cursor in enumerate(self.cursor)]
        self.flushes += len(flushed)
        take = self.kernels.decode_step if options.step_by_step else self.kernels.replay_step
        out = take(*self.data.inputs(t), pool=self.pool, layer=0, slots=self.data.slots)
        self.pool.advance(self.data.slots)
        return out, flushed

    def flush_now(self, i: int) -> bool:
        """Fold the buffer of a live row without a step; whether there was anything to fold."""
        pending = self.cursor[i] > 0
        self.kernels.flush_now(self.pool, self.data.slots[self.live[i] : self.live[i] + 1])
        self.cursor[i] = 0
        self.flushes += pending
        return pending

    def stored(self, states: StoredStates, *, all_slots: bool = False) -> tuple[torch.Tensor, ...]:
        """Copies of what is stored, [slots, HV, ...], for the live rows in their order or for all slots."""
        return tuple(t[0].clone() if all_slots else t[0][self.slots_of_live] for t in states.tensors())

    def check_unused(self, step: int) -> None:
        """Slots of no row hold what they held, and padded rows gave zeros (see ``check_padding``)."""
        unused = self.data.unused_slots
        now = self.stored(self.pool.checkpoint, all_slots=True)
        for old, new in zip(self.before, now, strict=True):
            self.tally.compare(
                "unused slot", old[unused], new[unused], step=step, rows=[-1] * len(self.data.unused_slots)
            )

    def check_padding(self, out: torch.Tensor, step: int) -> None:
        padded = self.data.padded_rows
        self.tally.compare("padding", torch.zeros_like(out[padded]), out[padded], step=step, rows=padded)


def _compare_with_baseline(kernels: Kernels, case: Case, data: StepData) -> list[tuple[ReplayOptions, BitTally]]:
    """I1 and I2."""
    base = _Run(kernels, case.baseline, data)
    runs = [_Run(kernels, plan, data) for plan in case.plans]
    expected = [[t.clone() for t in base.stored(base.pool.checkpoint)] for _ in runs]  # state at the last flush
    folded_at = len(_FORCED_AT)
    for t in range(data.n_steps):
        out, _ = base.step(t)
        now = base.stored(base.pool.checkpoint)
        for run, last in zip(runs, expected, strict=True):
            got, flushed = run.step(t)
            at_every_step = run.options.readout is Readout.EXACT_READOUT or run.options.length == 1
            rows = list(range(len(run.live))) if at_every_step else list(flushed)
            if t == folded_at and run.flush_now(len(run.live) - 1):
                flushed = [*flushed, len(run.live) - 1]
            for state, new in zip(last, now, strict=True):
                state[flushed] = new[flushed]
            _compare_rows(run, "output", out[run.live], got[run.live], t, rows)
            run.tally.require_finite("output", got[run.live], step=t, rows=run.live)
            run.check_padding(got, t)
            for old, new in zip(last, run.stored(run.pool.checkpoint), strict=True):
                _compare_rows(run, "checkpoint", old, new, t, list(range(len(run.live))))
    if all(
        torch.equal(a, b) for a, b in zip(base.before, base.stored(base.pool.checkpoint, all_slots=True), strict=True)
    ):
        raise EmptyRunError(f"{case.invariant}: the baseline left every state as it was; its kernel computes nothing")
    return _finish(case, runs, data, ("output", "checkpoint", "padding", "unused slot"))


def _compare_read_formats(kernels: Kernels, case: Case, data: StepData) -> list[tuple[ReplayOptions, BitTally]]:
    """I3."""
    base = _Run(kernels, case.baseline, data)
    runs = [_Run(kernels, plan, data) for plan in case.plans]
    rows = list(range(len(base.live)))
    for t in range(-1, data.n_steps):
        if t >= 0:
            base.step(t)
        for run in runs:
            if t >= 0:
                got, _ = run.step(t)
                run.tally.require_finite("output", got[run.live], step=t, rows=run.live)
            expected = base.stored(base.pool.checkpoint)
            for old, new in zip(expected, run.stored(run.pool.checkpoint), strict=True):
                _compare_rows(run, "checkpoint", old, new, t, rows)
            assert run.pool.copy is not None
            for old, new in zip(_rebuild_copy(run), run.stored(run.pool.copy), strict=True):
                _compare_rows(run, "copy", old, new, t, rows)
    return _finish(case, runs, data, ("checkpoint", "copy", "unused slot"))


def _rebuild_copy(run: _Run) -> tuple[torch.Tensor, ...]:
    """quantize(dequantize(checkpoint)) of the live rows, from stored bytes, by the torch codecs."""
    pool = run.pool
    assert pool.copy is not None
    values = pool.checkpoint.read(0, run.slots_of_live)
    encoded = encode_rows(pool.copy.format, values, nonfinite="saturate")
    return tuple(t for t in encoded if t is not None)


def _keep_values(kernels: Kernels, case: Case, data: StepData) -> list[tuple[ReplayOptions, BitTally]]:
    """I7: nothing may change a state that neither decays nor is written to."""
    value = 1.0 + 2.0**-12
    still = data.hold(value)
    runs = [_Run(kernels, plan, still) for plan in case.plans]
    for run in runs:
        expected = torch.full_like(still.states, value)
        for t in range(still.n_steps):
            run.step(t)
            got = run.pool.checkpoint.read(0, torch.arange(still.n_slots, device=expected.device))
            run.tally.compare("checkpoint", expected, got, step=t, rows=still.row_of_slot)
    return _finish(case, runs, still, ("checkpoint",))


_CHECKS = {
    "I1": _compare_with_baseline,
    "I2": _compare_with_baseline,
    "I3": _compare_read_formats,
    "I7": _keep_values,
}


def _compare_rows(run: _Run, what: str, expected: torch.Tensor, got: torch.Tensor, step: int, rows: list[int]) -> None:
    """Compare entries ``rows`` (by the order of live rows) of two tensors [live rows, ...]."""
    if rows:
        run.tally.compare(what, expected[rows], got[rows], step=step, rows=[run.live[i] for i in rows])


def _finish(
    case: Case, runs: list[_Run], data: StepData, wanted: tuple[str, ...]
) -> list[tuple[ReplayOptions, BitTally]]:
    for run in runs:
        if "unused slot" in wanted:
            run.check_unused(data.n_steps - 1)
        missing = [what for what in wanted if not run.tally.n_compared.get(what)]
        if missing or not run.flushes:
            raise EmptyRunError(
                f"{case.invariant}, plan {PrecisionPlan(options=run.options)}: {data.n_steps} steps with "
                f"{run.flushes} flushes compared no {' and no '.join(missing) or 'flushed state'}; give more steps"
            )
    return [(run.options, run.tally) for run in runs]
