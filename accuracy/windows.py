"""I6, speculative windows on the kernels themselves: equality of bits, never a tolerance.

Exact route, FP32 checkpoint read in FP32: outputs of committed tokens, and states at flushes, equal those of the
step-by-step baseline. Every plan and route: a second run, whose rejected drafts have other values, gives the same bits
of committed outputs and of stored states from then on.

Notable: every row goes through every pair of window length and committed tokens, 0 included, in an order of its own, so
rows of one call differ in both; single steps come in between and end the run. Inputs behind a row's length are NaN, as
are the buffers at first. Flushes and cursors are predicted by counting, not read from the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from driftgate.accuracy.bits import BitTally
from driftgate.accuracy.step_data import StepData, draw_inputs
from driftgate.errors import EmptyRunError
from driftgate.kernels.contract import Fold, HeadShape, Readout, Recurrence, ReplayOptions
from driftgate.kernels.pool import StatePool

__all__ = ["WindowKernels", "check_windows"]

_N_ROWS = 3
_LENGTHS = (1, 3, 2, 4)


class WindowKernels(Protocol):
    """What is certified: a module or object with these functions of a recurrence's room."""

    decode_step: Callable[..., torch.Tensor]
    replay_step: Callable[..., torch.Tensor]
    verify_window: Callable[..., torch.Tensor]
    flush_now: Callable[..., None]


def check_windows(
    kernels: WindowKernels,
    *,
    recurrence: Recurrence,
    shape: HeadShape,
    activation: torch.dtype,
    options: ReplayOptions,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[BitTally, int]:
    """Run windows of one plan twice, with other rejected drafts, and compare.

    Args:
        kernels: the functions under test.
        recurrence: whose.
        shape: heads.
        activation: type of q, k and v (C, B and x).
        options: a plan with a window.
        seed: of inputs, drafts and orders.
        device: where everything runs.

    Returns:
        What the comparisons found, and how many elements were compared.

    Raises:
        EmptyRunError: nothing was compared, no row flushed, or the baseline left its states as they were.
        ValueError: a plan without a window.
    """
    if not options.window:
        raise ValueError(f"options: expected a plan with a window, got window = 0 at L = {options.length}")
    calls = _list_calls(options, seed)
    n_steps = sum(call.kept[0] for call in calls)

    def draw(which: int) -> StepData:
        return draw_inputs(
            shape, activation, n_rows=_N_ROWS, n_steps=n_steps, seed=seed + which, recurrence=recurrence, device=device
        )

    data, drafts = draw(0), (draw(1), draw(2))
    exact_fold = options.fold is Fold.EXACT or not recurrence.delta_rule
    expected = _Baseline(kernels, data) if options.recurrence == "fp32" and exact_fold else None
    tally = BitTally()
    runs = [_Run(kernels, options, data, rejected, tally) for rejected in drafts]
    for number, call in enumerate(calls):
        _compare_call(runs, call, expected, tally, number)
    for run in runs:
        run.fold_all()
        run.compare_stored(expected, len(calls))
    _compare_runs(runs, tally, len(calls))
    _require_work(runs[0], tally, expected)
    return tally, sum(tally.n_compared.values())


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One call, by live row: tokens fed and committed; ``single`` for a replay step of all rows."""

    lengths: tuple[int, ...]
    kept: tuple[int, ...]
    single: bool = False


_SINGLE = _Call(lengths=(1,) * _N_ROWS, kept=(1,) * _N_ROWS, single=True)


def _list_calls(options: ReplayOptions, seed: int) -> list[_Call]:
    """Windows of every pair, each row in its own order, single steps between them, and L of these at the end."""
    lengths = sorted({min(length, options.window) for length in (*_LENGTHS, options.window)})
    pairs = [(length, kept) for length in lengths for kept in range(length + 1)]
    random = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(pairs), generator=random).tolist() for _ in range(_N_ROWS)]
    calls = []
    for number, chosen in enumerate(zip(*orders, strict=True)):
        of_rows = [pairs[i] for i in chosen]
        calls.append(_Call(lengths=tuple(p[0] for p in of_rows), kept=tuple(p[1] for p in of_rows)))
        if number % 3 == 2:
            calls += [_SINGLE] * (1 + number // 3 % options.window)
    return calls + [_SINGLE] * options.length


class _Baseline:
    """Outputs [rows, HV, d_v] and FP32 states [rows, HV, d_v, d_k] of every step of the step-by-step kernel."""

    def __init__(self, kernels: WindowKernels, data: StepData) -> None:
        pool = _make_pool(ReplayOptions(), data)
        slots = data.slots[data.live_rows].long()
        self.outputs, self.states = [], [pool.checkpoint.codes[0, slots]]
        for t in range(data.n_steps):
            out = kernels.decode_step(**data.inputs(t), pool=pool, layer=0, slots=data.slots)
            pool.advance(data.slots)
            self.outputs.append(out[data.live_rows])
            self.states.append(pool.checkpoint.codes[0, slots])
        if torch.equal(self.states[0], self.states[-1]):
            raise EmptyRunError("I6: the baseline left every state as it was; its kernel computes nothing")


class _Run:
    """One plan with one set of rejected drafts: its pool, and where each live row is, by counting."""

    def __init__(
        self, kernels: WindowKernels, options: ReplayOptions, data: StepData, rejected: StepData, tally: BitTally
    ) -> None:
        self.kernels, self.options, self.data, self.rejected = kernels, options, data, rejected
        self.tally = tally
        self.live, self.slots = data.live_rows, data.slots[data.live_rows].long()
        self.pool = _make_pool(options, data)
        for buffer in self.pool.buffers().values():
            buffer.fill_(torch.nan)
        self.untouched = self.stored(data.unused_slots)
        self.last = self.stored(self.slots.tolist())
        self.position, self.cursor, self.folded_at = [0] * _N_ROWS, [0] * _N_ROWS, [0] * _N_ROWS
        self.n_flushes = {"window": 0, "single": 0, "without a step": 0}

    def stored(self, slots: Sequence[int]) -> list[torch.Tensor]:
        """What checkpoint and copy hold in some slots, [slots, HV, ...]."""
        states = [self.pool.checkpoint, *([self.pool.copy] if self.pool.copy is not None else [])]
        return [tensor[0, list(slots)].clone() for s in states for tensor in s.tensors()]

    def take(self, call: _Call, number: int) -> tuple[list[torch.Tensor], list[int]]:
        """Outputs of each live row's committed tokens [n, HV, d_v], and the rows that flushed."""
        slots, pool, limit = self.data.slots, self.pool, self.options.length
        if call.single:
            flushed = [i for i, cursor in enumerate(self.cursor) if cursor >= limit - 1]
            inputs = {name: x[:, 0] for name, x in self._inputs(call, number).items()} | dict(self.data.constants)
            out = self.kernels.replay_step(**inputs, pool=pool, layer=0, slots=slots)[:, None]
            pool.advance(slots)
        else:
            flushed = [
                i for i, cursor in enumerate(self.cursor) if cursor + call.lengths[i] + self.options.window > limit
            ]
            inputs = self._inputs(call, number) | dict(self.data.constants)
            lengths, kept = self._spread(call.lengths), self._spread(call.kept)
            out = self.kernels.verify_window(**inputs, pool=pool, layer=0, slots=slots, lengths=lengths)
            pool.commit(slots, lengths, kept)
        self._count(call, flushed)
        self._check_zeros(out, call, number)
        return [out[row, : call.kept[i]] for i, row in enumerate(self.live)], flushed

    def _count(self, call: _Call, flushed: list[int]) -> None:
        """Where rows are after a call: a step's flush folds its own token too, a window's the tokens before it."""
        for i, kept in enumerate(call.kept):
            if i in flushed:
                self.folded_at[i] = self.position[i] + (1 if call.single else 0)
                self.cursor[i] = 0 if call.single else kept
            else:
                self.cursor[i] += kept
            self.position[i] += kept
        self.n_flushes["single" if call.single else "window"] += len(flushed)

    def _inputs(self, call: _Call, number: int) -> dict[str, torch.Tensor]:
        """Each stream [B, T, ...]: committed tokens, other ones in the place of rejected drafts, NaN behind."""
        inputs = {}
        for name, stream in self.data.streams.items():
            x = torch.full_like(stream[: max(call.lengths)].transpose(0, 1), torch.nan)
            for i, row in enumerate(self.live):
                n, length, at = call.kept[i], call.lengths[i], self.position[i]
                x[row, :n] = stream[at : at + n, row]
                wrong = (torch.arange(n, length) + number) % self.data.n_steps
                x[row, n:length] = self.rejected.streams[name][wrong.to(x.device), row]
            inputs[name] = x
        return inputs

    def _spread(self, numbers: Sequence[int]) -> torch.Tensor:
        """[B] int32 from the numbers of live rows; padded rows get nonsense."""
        spread = torch.full(self.data.slots.shape, -7, dtype=torch.int32)
        spread[self.live] = torch.tensor(numbers, dtype=torch.int32)
        return spread.to(self.data.slots.device)

    def _check_zeros(self, out: torch.Tensor, call: _Call, number: int) -> None:
        rows = {row: 0 for row in self.data.padded_rows} | dict(zip(self.live, call.lengths, strict=True))
        for row, length in rows.items():
            behind = out[row, length:]
            self.tally.compare("padding", torch.zeros_like(behind), behind, step=number, rows=[row] * len(behind))

    def fold_all(self) -> None:
        """``flush_now`` of all live rows."""
        self.kernels.flush_now(self.pool, self.data.slots[self.live], **self.data.fold_constants())
        self.n_flushes["without a step"] += sum(cursor > 0 for cursor in self.cursor)
        self.folded_at, self.cursor = list(self.position), [0] * _N_ROWS

    def compare_stored(self, expected: _Baseline | None, number: int) -> None:
        """Checkpoints are the baseline's at the last flush, slots of no row untouched, cursors as counted.

        Without ``expected`` there are no checkpoints to compare with but those of the other run.
        """
        for old, new in zip(self.untouched, self.stored(self.data.unused_slots), strict=True):
            self.tally.compare("unused slot", old, new, step=number, rows=[-1] * len(new))
        if expected is not None:
            states = torch.stack([expected.states[at][i] for i, at in enumerate(self.folded_at)])
            self.tally.compare(
                "checkpoint", states, self.pool.checkpoint.codes[0, self.slots], step=number, rows=self.live
            )
        device = self.slots.device
        for what, counted in (("cursor", self.cursor), ("tokens", self.position)):
            got = getattr(self.pool, what)[self.slots].to(torch.int32)[:, None]
            wanted = torch.tensor(counted, dtype=torch.int32, device=device)[:, None]
            self.tally.compare(what, wanted, got, step=number, rows=self.live)


def _make_pool(options: ReplayOptions, data: StepData) -> StatePool:
    device = data.slots.device
    pool = StatePool(
        data.shape,
        options,
        recurrence=data.recurrence,
        n_slots=data.n_slots,
        activation_dtype=data.activation,
        device=device,
    )
    slots = torch.arange(data.n_slots, device=device)
    pool.start(slots, tokens=0, sequences=slots)
    pool.write(0, slots, data.states)
    return pool


def _compare_call(runs: list[_Run], call: _Call, expected: _Baseline | None, tally: BitTally, number: int) -> None:
    """Take a call in all runs; committed outputs and stored states are those of the baseline, and of each other."""
    options = runs[0].options
    before = list(runs[0].position)
    (outs, flushed), *others = [run.take(call, number) for run in runs]
    every = options.read == "fp32" and options.readout is Readout.EXACT_READOUT
    for i, row in enumerate(runs[0].live):
        n = call.kept[i]
        if n and expected is not None and (every or i in flushed):
            wanted = torch.stack([expected.outputs[t][i] for t in range(before[i], before[i] + n)])
            tally.compare("output", wanted, outs[i], step=number, rows=[row] * n)
        for other, _ in others:
            if n:
                tally.compare("output of rejected drafts' other values", outs[i], other[i], step=number, rows=[row] * n)
    for run in runs:
        _compare_unmoved(run, flushed, tally, number)
        run.compare_stored(expected, number)
    _compare_runs(runs, tally, number)


def _compare_unmoved(run: _Run, flushed: list[int], tally: BitTally, number: int) -> None:
    """A call stores the states of the rows that flush, and no other."""
    now, rest = run.stored(run.slots.tolist()), [i for i in range(_N_ROWS) if i not in flushed]
    for old, new in zip(run.last, now, strict=True):
        if rest:
            tally.compare("unmoved state", old[rest], new[rest], step=number, rows=[run.live[i] for i in rest])
    run.last = now


def _compare_runs(runs: list[_Run], tally: BitTally, number: int) -> None:
    """What is stored does not depend on rejected drafts."""
    first, *others = [run.stored(run.slots.tolist()) for run in runs]
    for other in others:
        for a, b in zip(first, other, strict=True):
            tally.compare("state of rejected drafts' other values", a, b, step=number, rows=runs[0].live)


def _require_work(run: _Run, tally: BitTally, expected: _Baseline | None) -> None:
    wanted = ["padding", "unused slot", "unmoved state", "output of rejected drafts' other values"]
    wanted += ["output", "checkpoint"] if expected is not None else []
    missing = [what for what in wanted if not tally.n_compared.get(what)]
    missing += [f"flush ({kind})" for kind in ("window", "single") if not run.n_flushes[kind]]
    if missing:
        raise EmptyRunError(f"I6: {run.data.n_steps} committed tokens compared no {' and no '.join(missing)}")
