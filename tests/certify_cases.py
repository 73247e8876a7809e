"""Called by tests/test_certify.py under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mutants import load_mutant

from driftgate.accuracy.cases import INVARIANTS
from driftgate.accuracy.certify import Kernels, list_groups, run_group, tile_kernels
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.tolerance import list_tolerance_groups, run_tolerance_group
from driftgate.kernels.contract import Backend, HeadShape, Recurrence

BACKEND = Backend.TRITON_INTERPRET


def make_shape(shape: list[int]) -> HeadShape:
    """From H, HV, d_k, d_v."""
    key_heads, value_heads, d_k, d_v = shape
    return HeadShape(key_heads=key_heads, value_heads=value_heads, d_k=d_k, d_v=d_v)


def find_mutant(path: str | None, recurrence: str, shape: HeadShape) -> Kernels | None:
    """Kernels of a package that ``mutants.write_mutant`` made; None for the real ones."""
    return None if path is None else tile_kernels(load_mutant(path, recurrence), shape)


def run(
    *,
    recurrence: str = "gdn",
    shape: list[int],
    lengths: list[int],
    formats: list[str],
    invariants: list[str] | None = None,
    checks: list[str] | None = None,
    plans: list[str] | None = None,
    kernels: str | None = None,
) -> list[dict[str, Any]]:
    """Records of ``certify`` as JSON, of some questions and plans alone where they are named."""
    heads = make_shape(shape)
    records = []
    for group in list_groups(
        backend=BACKEND, recurrences=[Recurrence(recurrence)], shapes=[heads], lengths=lengths, formats=formats,
        invariants=invariants or tuple(INVARIANTS),
    ):  # fmt: skip
        chosen = []
        for case in group.cases:
            kept = tuple(p for p in case.plans if plans is None or str(PrecisionPlan(options=p)) in plans)
            if kept and (checks is None or case.check.value in checks):
                chosen.append(replace(case, plans=kept))
        some = replace(group, cases=tuple(chosen))
        records += run_group(some, backend=BACKEND, implementation=find_mutant(kernels, recurrence, heads))
    return [record.model_dump() for record in records]


def measure(
    *,
    recurrence: str = "gdn",
    shape: list[int],
    lengths: list[int],
    readouts: list[str],
    activations: list[str],
    kernels: str | None = None,
) -> list[dict[str, Any]]:
    """Records of ``measure_tolerance`` as JSON, of some readouts and activation types."""
    heads = make_shape(shape)
    groups = list_tolerance_groups(
        backend=BACKEND, recurrences=[Recurrence(recurrence)], shapes=[heads], lengths=lengths
    )
    records = [
        record
        for group in groups
        if group.plans[0].readout.value in readouts and str(group.activation).removeprefix("torch.") in activations
        for record in run_tolerance_group(
            group, backend=BACKEND, implementation=find_mutant(kernels, recurrence, heads)
        )
    ]
    return [record.model_dump() for record in records]
