"""What the certificate asks: cases, each some plans and one question, in groups that share compiled kernels.

Notable: a group and all in it can be pickled, so that processes can share a certificate. Every L up to 17 runs the same
binaries; another recurrence, shape, activation type or format compiles anew, so a group is one of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import TYPE_CHECKING

import torch

from driftgate.errors import EmptyRunError, UsageError
from driftgate.kernels.contract import Backend, Fold, HeadShape, Readout, Recurrence, ReplayOptions
from driftgate.quant.formats import get_format

if TYPE_CHECKING:
    from driftgate.accuracy.observers import RecordedInputs

__all__ = ["FORCED_AT", "INVARIANTS", "Case", "CaseGroup", "Check", "list_groups"]

FORCED_AT = {2: 1, 3: 2}
"""By row, the step before which its flush is forced, so that the rows stand at different cursors afterwards."""


class Check(Enum):
    """The question of a case."""

    BASELINE = "equals the baseline"
    READ_FORMATS = "same for every read format"
    FOLD = "folds from the dequantised checkpoint"
    VALUES = "keeps its bits"
    ROWS = "row alone, moved, strided"
    PADDING = "nothing to do"
    AGAIN = "two runs"
    DRAWS = "stochastic rounding"
    GRAPH = "CUDA Graph"
    WINDOWS = "speculative windows"


INVARIANTS = {
    "I1": (Check.BASELINE,),
    "I2": (Check.BASELINE,),
    "I3": (Check.READ_FORMATS, Check.FOLD),
    "I4": (Check.ROWS, Check.PADDING),
    "I5": (Check.AGAIN, Check.DRAWS, Check.GRAPH),
    "I6": (Check.WINDOWS,),
    "I7": (Check.VALUES,),
}
"""The invariants and their questions."""

_ONE_FLUSH = (Check.ROWS, Check.PADDING, Check.AGAIN, Check.DRAWS)
_OF_RECORDED = (Check.BASELINE, Check.READ_FORMATS, Check.VALUES)
_WINDOW, _LEAST_WINDOW = 4, 2
_READOUTS = (Readout.OUTPUT_ONLY, Readout.EXACT_READOUT)  # ``state_output`` promises no bits


@dataclass(frozen=True, kw_only=True)
class Case:
    """Plans that run on the same inputs, beside ``baseline`` where the question needs one; each gives one result."""

    invariant: str
    check: Check
    recurrence: Recurrence
    shape: HeadShape
    activation: torch.dtype
    baseline: ReplayOptions
    plans: tuple[ReplayOptions, ...]

    @property
    def n_steps(self) -> int:
        """Two natural flushes for every row, those included that were flushed out of turn; one for I4 and I5."""
        greatest = max(1, *(plan.length for plan in self.plans))
        if self.check in _ONE_FLUSH:
            return max(greatest, max(FORCED_AT.values())) + 2
        return 2 * greatest + max(FORCED_AT.values()) + 1


@dataclass(frozen=True, kw_only=True)
class CaseGroup:
    """Cases that run the same binaries: one recurrence, shape, activation type and recurrence format."""

    recurrence: Recurrence
    shape: HeadShape
    activation: torch.dtype
    format: str
    cases: tuple[Case, ...]

    @property
    def n_records(self) -> int:
        """Results of the group."""
        return sum(len(case.plans) for case in self.cases)

    def __str__(self) -> str:
        shape, kind = self.shape, str(self.activation).removeprefix("torch.")
        heads = f"{shape.key_heads}/{shape.value_heads} heads {shape.d_v}x{shape.d_k}"
        return f"{self.recurrence.value} {heads} {self.format} {kind}"


def list_groups(
    *,
    backend: Backend,
    recurrences: Sequence[Recurrence],
    shapes: Sequence[HeadShape],
    lengths: Sequence[int],
    formats: Sequence[str],
    invariants: Sequence[str] = tuple(INVARIANTS),
    recorded: RecordedInputs | None = None,
) -> list[CaseGroup]:
    """All cases, by what they compile; arguments as ``certify`` has them.

    Args:
        backend: CUDA Graphs are replayed on ``triton`` alone; elsewhere that question is absent, not passed.
        recurrences, shapes, lengths, formats, invariants: what to certify. The first shape takes every length, the
            others 1 and the middle one.
        recorded: with it, its own recurrence, shape and activation type, and questions that random inputs answer no
            better.

    Raises:
        EmptyRunError: there is none.
        UsageError: an unknown format or invariant.
    """
    unknown = [name for name in invariants if name not in INVARIANTS]
    if unknown:
        raise UsageError(f"invariant {unknown[0]!r} is unknown; known: {' '.join(INVARIANTS)}")
    names = tuple(dict.fromkeys(get_format(name).name for name in formats))
    kinds: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    if recorded is not None:
        recurrences, shapes = (recorded.recurrence,), (recorded.shape,)
        kinds = (recorded.inputs[0][0].values.dtype,)
    ordered = sorted(set(lengths))

    def is_asked(case: Case) -> bool:
        runs_here = case.check is not Check.GRAPH or backend is Backend.TRITON
        return case.invariant in invariants and runs_here and (recorded is None or case.check in _OF_RECORDED)

    groups = []
    for recurrence in recurrences:
        for n, shape in enumerate(shapes):
            chosen = [length for length in ordered if n == 0 or length in (1, _middle(ordered))]
            main = kinds[(n + 1) % len(kinds)]  # both activation types for I1 alone, else in turn
            for kind, name in product(kinds, names):
                listed = _list_cases(recurrence, shape, kind, name, names, chosen, kind is main)
                cases = tuple(_suit(case, backend) for case in listed if is_asked(case))
                if cases:
                    groups.append(
                        CaseGroup(recurrence=recurrence, shape=shape, activation=kind, format=name, cases=cases)
                    )
    if not groups:
        raise EmptyRunError("no case to certify; give at least one recurrence, shape, length and format")
    return groups


def _suit(case: Case, backend: Backend) -> Case:
    """The case as a backend can answer it.

    Twins compare rows in the exact readout: their ``output_only`` takes a matrix product of torch, which adds up in an
    order that depends on the batch.
    """
    if backend is not Backend.TORCH or case.check is not Check.ROWS:
        return case
    plans = (p if p.step_by_step else replace(p, readout=Readout.EXACT_READOUT) for p in case.plans)
    return replace(case, plans=tuple(plans))


def _list_cases(
    recurrence: Recurrence,
    shape: HeadShape,
    activation: torch.dtype,
    name: str,
    names: Sequence[str],
    lengths: Sequence[int],
    main: bool,
) -> Iterator[Case]:
    """Cases of one recurrence format in one activation type; all but I1 in the ``main`` type only."""

    def plan(length: int, **options: object) -> ReplayOptions:
        return ReplayOptions(**({"read": name, "recurrence": name, "length": length} | options))  # type: ignore[arg-type]

    def case(check: Check, baseline: ReplayOptions, *plans: ReplayOptions, invariant: str = "") -> Case:
        named = invariant or next(key for key, checks in INVARIANTS.items() if check in checks)
        return Case(
            invariant=named, check=check, recurrence=recurrence, shape=shape, activation=activation,
            baseline=baseline, plans=plans,
        )  # fmt: skip

    wide, stochastic = name == "fp32", get_format(name).stochastic
    middle = _middle(lengths)
    if 1 in lengths:
        yield case(Check.BASELINE, plan(0), plan(1))
        if main and stochastic:
            yield case(Check.BASELINE, plan(0, stochastic=True), plan(1, stochastic=True))
    if not main:
        return
    for length in lengths:
        if wide:
            variants = [plan(length, readout=readout) for readout in _READOUTS]
            if length > 1:
                variants.append(plan(length, track=length + 1))
            if not recurrence.delta_rule:
                variants.append(plan(length, fold=Fold.CACHED))  # what Mamba-2 caches is exact
            yield case(Check.BASELINE, plan(0), *variants, invariant="I2")
        splits = _split_plans(name, names, length)
        if splits:
            yield case(Check.READ_FORMATS, plan(length), *splits)
        if splits and stochastic and length == middle:
            yield case(
                Check.READ_FORMATS, plan(length, stochastic=True), plan(length, stochastic=True, read=splits[-1].read)
            )
        if not wide and length > 1:
            drawn = [plan(length, stochastic=True)] if stochastic and length == middle else []
            yield case(Check.FOLD, plan(0, read="fp32", recurrence="fp32"), plan(length), *drawn)
        if wide:
            held = splits if length == max(lengths) else ()
            yield case(Check.VALUES, plan(length), plan(length), *held)
    if middle:
        several = [plan(0), plan(middle), *_split_plans(name, names, middle)[-1:]]
        drawn = [plan(middle, stochastic=True)] if stochastic else []
        yield case(Check.ROWS, plan(0), *several, *drawn)
        yield case(Check.PADDING, plan(0), *several)
        yield case(Check.AGAIN, plan(0), *several, *drawn)
        if drawn:
            yield case(Check.DRAWS, plan(0), plan(lengths[0], stochastic=True))
        yield case(Check.GRAPH, plan(0), *several, *drawn)
    long = [length for length in lengths if length >= 2 * _LEAST_WINDOW]
    if long:
        length = next((n for n in long if n >= 2 * _WINDOW), long[-1])
        splits = _split_plans(name, names, length)
        yield case(
            Check.WINDOWS,
            plan(0),
            plan(length, window=min(_WINDOW, length // 2)),
            plan(
                length,
                window=min(_WINDOW, length // 2),
                readout=Readout.EXACT_READOUT,
                read=name if wide or not splits else splits[-1].read,
            ),
        )


def _middle(lengths: Sequence[int]) -> int:
    """The L of questions that one answers; 0 where there is none."""
    return lengths[len(lengths) // 2] if lengths else 0


def _split_plans(recurrence: str, names: Sequence[str], length: int) -> tuple[ReplayOptions, ...]:
    """One plan for every read format below a recurrence format, the readouts in turn."""
    bits = get_format(recurrence).bits
    reads = [name for name in names if name != recurrence and get_format(name).bits <= bits]
    return tuple(
        ReplayOptions(read=read, recurrence=recurrence, length=length, readout=_READOUTS[(n + length) % len(_READOUTS)])
        for n, read in enumerate(reads)
    )
