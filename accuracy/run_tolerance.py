"""The tolerance part of a run: a few cases of T1, of the model's recurrence and the plans' lengths.

A run shows three rungs: bits (the invariants on the checkpoint's own inputs), then errors against FP64 within derived
bounds, then tasks. ``driftgate certify`` measures all of T1; this is the part that a run can afford interpreted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.tolerance import ToleranceGroup, run_tolerance_group
from driftgate.kernels.contract import Backend, Dot, HeadShape, Readout, Recurrence, ReplayOptions

if TYPE_CHECKING:
    from driftgate.accuracy.records import ToleranceRecord

__all__ = ["list_run_tolerance", "measure_run_tolerance"]

_HEADS = HeadShape(key_heads=1, value_heads=1, d_k=16, d_v=16)
"""An interpreted step costs tens of milliseconds a head, whatever its size; larger heads are for ``certify``."""
_ROWS = 2
_ACTIVATION = torch.float32
"""Rounding an output to BF16 would hide everything else."""


def measure_run_tolerance(
    plans: Mapping[str, PrecisionPlan],
    *,
    recurrence: Recurrence,
    backend: Backend,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[ToleranceRecord]:
    """Outputs and states of fp32@L against FP64 for the lengths and readouts of the plans, natural flushes.

    Args:
        plans: of the run.
        recurrence: of its model.
        backend: which code takes the steps.
        device: where it runs.
        seed: of the random inputs and states.

    Returns:
        A record for the outputs and one for the states of each case; none where every plan is the baseline.

    Raises:
        RuntimeError: this process cannot run the backend.
    """
    return [
        record
        for group in list_run_tolerance(plans, recurrence=recurrence, backend=backend)
        for record in run_tolerance_group(group, backend=backend, device=device, seed=seed)
    ]


def list_run_tolerance(
    plans: Mapping[str, PrecisionPlan], *, recurrence: Recurrence, backend: Backend
) -> list[ToleranceGroup]:
    """The groups of ``measure_run_tolerance``: one for each readout, its lengths being those of the plans.

    ``exact_readout`` is judged by its bits; what its plans share with others, steps and folds, is measured as
    ``output_only``. Products in TF32 and BF16 exist compiled alone, elsewhere they are measured in FP32.
    """
    ways: dict[tuple[Readout, Dot], set[int]] = {}
    for options in (options for plan in plans.values() for options in plan.every):
        if not options.step_by_step:
            readout = Readout.STATE_OUTPUT if options.readout is Readout.STATE_OUTPUT else Readout.OUTPUT_ONLY
            dot = options.dot if backend is Backend.TRITON else Dot.IEEE
            ways.setdefault((readout, dot), set()).add(options.length)
    return [
        ToleranceGroup(
            recurrence=recurrence,
            shape=_HEADS,
            activation=_ACTIVATION,
            plans=tuple(ReplayOptions(length=n, readout=readout, dot=dot) for n in sorted(lengths)),
            n_rows=_ROWS,
            cycles=1,
            natural_only=True,
        )
        for (readout, dot), lengths in ways.items()
    ]
