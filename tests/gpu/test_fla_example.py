"""The example adapter of flash-linear-attention, certified on a GPU where fla is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from driftgate.accuracy.cases import list_groups
from driftgate.accuracy.invariants import check_group
from driftgate.accuracy.user_kernels import limit_groups, load_kernel
from driftgate.kernels.contract import Backend, HeadShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention"),
    pytest.mark.filterwarnings("ignore"),  # fla's own
]

EXAMPLES = Path(__file__).parents[2] / "examples" / "kernels"
SHAPES = (
    HeadShape(key_heads=16, value_heads=32, d_k=128, d_v=128),
    HeadShape(key_heads=2, value_heads=4, d_k=40, d_v=24),
)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    return load_kernel("fla_gdn:step")


@pytest.mark.parametrize("shape", SHAPES, ids=["128x128", "24x40"])
def test_fla_depends_on_no_slot_and_leaves_other_slots_alone(kernel, shape):
    groups = list_groups(
        backend=Backend.TRITON, recurrences=[kernel.recurrence], shapes=[shape], lengths=(1,), formats=kernel.formats,
        invariants=("I1", "I4", "I7"),
    )  # fmt: skip
    alone = [group for group in limit_groups(groups) if group.cases[0].invariant != "I1"]
    found = [found for group in alone for found in check_group(kernel.kernels, group, device="cuda")]
    assert {f.case.invariant for f in found} == {"I4", "I7"}
    assert [(f.case, f.tally.report()) for f in found if f.tally.n_different] == []


@pytest.mark.parametrize("shape", SHAPES, ids=["128x128", "24x40"])
def test_fla_keeps_the_tolerance(kernel, shape):
    from driftgate.accuracy.tolerance import measure_tolerance

    records = measure_tolerance(
        backend=Backend.TRITON, recurrences=[kernel.recurrence], shapes=[shape], lengths=(1,), device="cuda",
        implementation=kernel.kernels,
    )  # fmt: skip
    assert records and [r for r in records if not r.within] == []
