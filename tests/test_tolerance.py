"""T1, the part of the certificate with a tolerance: what it measures, its bounds, and that it can fail."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from driftgate.accuracy.bounds import ROUNDOFF, bound_dot, bound_output, bound_state
from driftgate.accuracy.tolerance import (
    count_tolerance,
    list_tolerance_groups,
    measure_tolerance,
    run_tolerance_group,
)
from driftgate.errors import EmptyRunError, UsageError
from driftgate.kernels.contract import Backend, Dot, HeadShape, Recurrence
from driftgate.kernels.gdn import reference

CASES = Path(__file__).parent / "certify_cases.py"
SMALL = HeadShape(key_heads=1, value_heads=2, d_k=16, d_v=16)


@pytest.mark.parametrize("recurrence", Recurrence)
def test_the_torch_twin_is_within_its_bounds(recurrence: Recurrence) -> None:
    seen: list[int] = []
    choices: dict[str, Any] = {"backend": Backend.TORCH, "recurrences": [recurrence], "lengths": (1, 8)}
    records = measure_tolerance(**choices, progress=seen.append)
    assert [r for r in records if not r.within] == []
    assert sum(seen) == len(records) == count_tolerance(**choices)
    assert {r.what for r in records} == {"output", "state"}
    assert {r.case["flushes"] for r in records if r.case["length"] > 1} == {"natural", "forced"}
    assert {r.case["readout"] for r in records} == {"output_only", "state_output"}
    assert {r.case["activation"] for r in records} == {"float32", "bfloat16"}
    assert all(r.case["n_compared"] > 0 and r.error is not None and 0 < r.error <= r.bound for r in records)


@pytest.mark.parametrize(
    ("recurrence", "shape"), [("gdn", [1, 1, 24, 16]), ("kda", [1, 1, 16, 16]), ("mamba2", [1, 1, 64, 40])]
)
def test_the_kernels_are_within_their_bounds(interpreted, recurrence: str, shape: list[int]) -> None:
    records = interpreted(
        CASES, "measure", recurrence=recurrence, shape=shape, lengths=[3],
        readouts=["output_only", "state_output"], activations=["float32" if recurrence == "kda" else "bfloat16"],
    )  # fmt: skip
    assert [r for r in records if not r["within"]] == []
    assert {(r["what"], r["case"]["readout"]) for r in records} == {
        (what, readout) for what in ("output", "state") for readout in ("output_only", "state_output")
    }


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recurrence", ["gdn", "kda", "mamba2"])
def test_the_kernels_are_within_their_bounds_on_odd_heads(interpreted, recurrence: str) -> None:
    records = interpreted(
        CASES, "measure", recurrence=recurrence, shape=[1, 2, 40, 24], lengths=[1, 4, 8],
        readouts=["output_only", "state_output"], activations=["float32", "bfloat16"],
    )  # fmt: skip
    assert [r for r in records if not r["within"]] == []


def test_groups_share_a_binary_and_can_be_pickled() -> None:
    choices: dict[str, Any] = {"backend": Backend.TRITON, "shapes": [SMALL], "lengths": [1, 4]}
    groups = pickle.loads(pickle.dumps(list_tolerance_groups(**choices)))
    assert len({str(group) for group in groups}) == len(groups) == 3 * 2 * 4
    for group in groups:
        assert len({(plan.readout, plan.dot) for plan in group.plans}) == 1
    assert {plan.dot for group in groups for plan in group.plans} == set(Dot)
    interpreted = list_tolerance_groups(**choices | {"backend": Backend.TRITON_INTERPRET})
    assert {plan.dot for group in interpreted for plan in group.plans} == {Dot.IEEE}


def disturb(change: Any) -> SimpleNamespace:
    """The GDN twin with a change of its replayed steps: change(out, pool)."""

    def replay_step(*args, pool, **kwargs):  # type: ignore[no-untyped-def]
        return change(reference.replay_step(*args, pool=pool, **kwargs), pool)

    return SimpleNamespace(decode_step=reference.decode_step, replay_step=replay_step, flush_now=reference.flush_now)


def scale_state(out: torch.Tensor, pool: Any) -> torch.Tensor:
    pool.checkpoint.codes.mul_(1 + 2.0**-10)
    return out


DISTURBED: dict[str, tuple[Any, set[str]]] = {
    "nothing": (lambda out, pool: out, set()),
    "outputs a thousandth too large": (lambda out, pool: out * 1.001, {"output"}),
    "NaN": (lambda out, pool: out * torch.nan, {"output"}),
    "states a thousandth too large": (scale_state, {"output", "state"}),
}


@pytest.mark.parametrize("name", DISTURBED)
def test_what_is_off_is_outside(name: str) -> None:
    change, whats = DISTURBED[name]
    (group,) = (
        group
        for group in list_tolerance_groups(
            backend=Backend.TORCH, recurrences=[Recurrence.GDN], shapes=[SMALL], lengths=[4]
        )
        if group.activation == torch.float32 and group.plans[0].readout.value == "output_only"
    )
    records = run_tolerance_group(group, backend=Backend.TORCH, implementation=disturb(change))
    outside = [r for r in records if not r.within]
    assert {r.what for r in outside} == whats
    if name == "NaN":
        assert {r.error for r in outside} == {None}


def test_bounds_grow_with_what_they_bound() -> None:
    assert bound_state(3, 16, 5.0) == 2 * 3 * 24 * ROUNDOFF * 5.0
    assert bound_dot(Dot.IEEE, 5.0, 3) == 0.0
    assert bound_dot(Dot.BF16, 5.0, 3) == 8 * bound_dot(Dot.TF32, 5.0, 3) > 0
    x = torch.ones(2)
    plain = bound_output(x, activation=torch.float32, read=1e-6)
    assert bool((bound_output(x, activation=torch.bfloat16, read=1e-6) - plain > 0.9 * 2.0**-8).all())
    assert bool((bound_output(x, activation=torch.float32, read=1e-6, skip=2.0) > plain).all())
    assert bool((bound_output(x, activation=torch.float32, read=1e-6, gates=3.0) > 3e-6).all())


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(EmptyRunError, match="nothing to measure"):
        measure_tolerance(backend=Backend.TORCH, lengths=[])
    with pytest.raises(UsageError, match="one recurrence"):
        measure_tolerance(backend=Backend.TORCH, lengths=[1], implementation=reference)
