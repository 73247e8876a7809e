"""The memory of a run that measures layers or heads alone: as wide as its widest lock step."""

from __future__ import annotations

import numpy as np
import pytest

from driftgate import memory
from driftgate.accuracy.lockstep import LockstepRunner
from driftgate.accuracy.plans import Role
from driftgate.dry_run import describe
from driftgate.evals.ablation import group_parts, list_ablation
from driftgate.evals.suite import load_suite, merge_plans
from driftgate.kernels.contract import Backend

SIZES = {"sequences": 2, "batch": 2, "steps": 40}
PLANS = {
    "two plans": (["nvfp4/fp32@4"], ["nvfp4@4"]),
    "as many plans as lock steps are wide": (["nvfp4/fp32@4", "fp8/fp32@4", "fp8@4"], ["nvfp4@4"]),
    "six plans, one below FP32": (["nvfp4/fp32@4", "fp32@1", "fp32@2", "fp32@3", "fp32@4"], ["nvfp4@4"]),
}


def make_suite(plans: str, ablate: str | None):
    suite = load_suite("quick")
    return suite.changed(**SIZES, plans=merge_plans(suite, *PLANS[plans]), ablate=ablate)


@pytest.mark.parametrize("ablate", [None, "layers", "heads"])
@pytest.mark.parametrize("plans", PLANS)
def test_rows_are_those_of_the_widest_lock_step_that_is_made(tiny_model, monkeypatch, plans, ablate):
    """Lock steps of one step on the model itself, as a run makes them; rows as its blocks have them."""
    from driftgate.accuracy import lockstep

    rows, made = [], lockstep.wrap

    def wrap(model, blocks, *, n_sequences, **options):
        rows.append(len(blocks) * n_sequences)
        return made(model, blocks, n_sequences=n_sequences, **options)

    monkeypatch.setattr(lockstep, "wrap", wrap)
    suite = make_suite(plans, ablate)
    roles, named = suite.roles(), suite.named_plans()
    steps = [named]
    if ablate is not None:
        candidates = {name: plan for name, plan in named.items() if roles[name] is Role.CANDIDATE}
        parts = list_ablation(candidates, [0, 2], n_heads=4 if ablate == "heads" else None)
        steps += [{part.key: part.plan for part in group} for group in group_parts(parts, n_plans=len(named))]
    tokens = np.random.default_rng(0).integers(3, 96, (2, 2))
    for group in steps:
        LockstepRunner(tiny_model, group, batch=2, backend=Backend.TORCH).run(tokens)
    assert len(rows) == len(steps)
    assert memory.count_rows(suite, tiny_model.config) == max(rows)


def test_an_ablation_wider_than_the_run_needs_more_of_everything(tiny_model):
    config = tiny_model.config
    plain, layers, heads = (make_suite("two plans", ablate) for ablate in (None, "layers", "heads"))
    for suite in (layers, heads):  # 2 layers of 4 heads: 2 parts beside 2 plans, or 8 in lock steps of 4
        assert memory.needed_memory(suite, config) > memory.needed_memory(plain, config)
    held = [memory.held_memory(suite, config, weights=0) for suite in (plain, layers, heads)]
    assert held[0] == held[1]
    assert held[2] * (2 + 3) == held[0] * (4 + 3)
    figures = 40 * (memory.STEP_BYTES + memory.CELL_BYTES * 2 * (2 + 3))
    grown = memory.needed_memory(layers, config, device="cuda") - memory.needed_memory(plain, config, device="cuda")
    assert grown == figures  # one lock step more, as wide as the run's own


def test_a_dry_run_says_the_rows_of_the_widest_forward(tmp_path):
    choices = SIZES | {"steps": 63, "plans": ["nvfp4/fp32@4"], "controls": ["nvfp4@4"]}
    rows = [
        describe("quick", choices | {"ablate": ablate}, out=tmp_path / "run")["rows of a forward"]
        for ablate in (None, "layers", "heads")
    ]
    assert rows == [2 * (2 + 3), 2 * (3 + 3), 2 * (4 + 3)]  # tiny-gdn: 3 recurrent layers of several heads
