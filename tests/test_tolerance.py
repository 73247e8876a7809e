"""T1, the part of the certificate with a tolerance: what it measures, its bounds, and that it can fail."""

from __future__ import annotations

import pickle
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from step_bounds import bound_dot, bound_output, bound_state

from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.run_tolerance import list_run_tolerance, measure_run_tolerance
from driftgate.accuracy.running_bounds import ROUNDOFF, ExactStep, RunningBounds, bound_elements
from driftgate.accuracy.tolerance import (
    count_tolerance,
    list_tolerance_groups,
    measure_tolerance,
    run_tolerance_group,
)
from driftgate.errors import EmptyRunError, UsageError
from driftgate.kernels import twin
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
    assert all(r.error <= r.greatest_error < r.scale / 100 and r.scale > 0.1 for r in records)


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


ROUND = {
    Dot.IEEE: lambda x: x,
    Dot.TF32: lambda x: (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32),  # truncated, as hardware does
    Dot.BF16: lambda x: x.to(torch.bfloat16).float(),
}


def read_state_output(rows: twin.Rows) -> None:
    """The readout of engines in FP32 torch: both operands of the product that rebuilds the state are rounded."""
    entries, state = rows.entries(), rows.load(rows.pool.read_states)
    total, weights = twin._decays(entries, rows.g)
    tile = state * (total[..., None, :] if total.ndim == 3 else total[..., None, None])
    if entries.n:
        keys = entries.keys() * (weights if weights.ndim == 4 else weights[..., None])
        cut = ROUND[rows.pool.options.dot]
        tile = tile + torch.matmul(cut(entries.corrections()).transpose(-1, -2), cut(keys))
    u = rows.beta[..., None] * (rows.v - twin.contract(tile, rows.k)) if rows.rates is None else rows.v
    rows.write_output(twin.contract(tile, rows.q) + u * (rows.k * rows.q).sum(-1, keepdim=True))
    rows.append(u)


def shrink_buffered(recurrence: Recurrence, factor: float) -> SimpleNamespace:
    """The twin with outputs of steps that find entries times ``factor``."""
    module = import_module(f"driftgate.kernels.{recurrence.value}.reference")

    def replay_step(*args, pool, slots, **kwargs):  # type: ignore[no-untyped-def]
        live = slots >= 0
        index = slots[live].long()
        found = torch.zeros_like(live)
        found[live] = (pool.flush[index] == 0) & (pool.cursor[index] > 0)
        out = module.replay_step(*args, pool=pool, slots=slots, **kwargs)
        return torch.where(found[:, None, None], out * factor, out)

    return SimpleNamespace(decode_step=module.decode_step, replay_step=replay_step, flush_now=module.flush_now)


def state_output_groups(recurrence: Recurrence, dot: Dot, **choices: Any) -> list[Any]:
    """Groups of FP32 activations, which round nothing else, as a GPU has them."""
    groups = list_tolerance_groups(backend=Backend.TRITON, recurrences=[recurrence], **choices)
    return [
        g
        for g in groups
        if g.activation == torch.float32 and g.plans[0].readout.value == "state_output" and g.plans[0].dot is dot
    ]


@pytest.mark.parametrize("dot", [Dot.TF32, Dot.BF16])
@pytest.mark.parametrize("recurrence", Recurrence)
def test_rounded_products_come_near_their_bounds_and_keep_them(
    monkeypatch: pytest.MonkeyPatch, recurrence: Recurrence, dot: Dot
) -> None:
    monkeypatch.setattr(twin, "_step_output_only", read_state_output)
    records = [
        r
        for group in state_output_groups(recurrence, dot, lengths=(4, 16))
        for r in run_tolerance_group(group, backend=Backend.TORCH)
        if r.what == "output"
    ]
    assert [r for r in records if not r.within] == []
    assert max(r.error / r.bound for r in records) > 0.1, "a bound so far off would judge nothing"
    relative = max(r.greatest_error / r.scale for r in records)
    assert {Dot.TF32: 5e-5, Dot.BF16: 5e-4}[dot] < relative < {Dot.TF32: 2e-3, Dot.BF16: 1e-2}[dot]


@pytest.mark.parametrize("dot", Dot)
@pytest.mark.parametrize("recurrence", Recurrence)
def test_outputs_that_shrink_are_outside_whatever_the_product(recurrence: Recurrence, dot: Dot) -> None:
    """Bounds from the greatest norms of a whole run let half an output through in BF16."""
    kernels = shrink_buffered(recurrence, 0.99)
    for group in state_output_groups(recurrence, dot, lengths=(8,)):
        records = run_tolerance_group(group, backend=Backend.TORCH, implementation=kernels)
        assert {r.within for r in records if r.what == "output"} == {False}
        assert {r.within for r in records if r.what == "state"} == {True}


@pytest.mark.parametrize("recurrence", Recurrence)
def test_no_bound_is_of_the_size_of_what_it_bounds(recurrence: Recurrence) -> None:
    for dot, most in ((Dot.IEEE, 1e-3), (Dot.TF32, 1e-2), (Dot.BF16, 4e-2)):
        for group in state_output_groups(recurrence, dot, lengths=(1, 16)):
            for record in run_tolerance_group(group, backend=Backend.TORCH):
                assert 0 < record.bound < most * record.scale


def one_step(*, g: float, u: float = 1.0) -> ExactStep:
    """A head of one row whose state is [1, 0], key [0, 1] and query [1, 1]."""
    before = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    k, q = (torch.tensor([[x]], dtype=torch.float64) for x in ([0.0, 1.0], [1.0, 1.0]))
    decay = torch.tensor([[[g]]], dtype=torch.float64)
    added = torch.tensor([[[u]]], dtype=torch.float64)
    after = before * decay.exp()[..., None] + added[..., None] * k[..., None, :]
    return ExactStep(before=before, after=after, q=q, k=k, u=added, g=decay, beta=torch.ones(1, 1, dtype=torch.float64))


def test_running_bounds_follow_decays_and_entries() -> None:
    def bounds(dot: Dot = Dot.BF16) -> RunningBounds:
        return RunningBounds(one_step(g=0.0).before, delta_rule=False, dot=dot)

    kept, forgotten, flushed = bounds(), bounds(), bounds()
    for _ in range(2):
        of_kept = kept.take(one_step(g=0.0), [])
        of_forgotten = forgotten.take(one_step(g=-float("inf")), [])
        of_flushed = flushed.take(one_step(g=0.0), [0])
    # the one entry, u = 1 along q, is read with both operands rounded to BF16; forgotten, or folded, it is not
    assert 2 * 2.0**-8 < float(of_kept) < 2.1 * 2.0**-8
    assert 0 < float(of_forgotten) < 1e-4 and 0 < float(of_flushed) < 1e-4
    assert float(kept.state) == float(flushed.state) > float(forgotten.state) > 0
    assert len(kept.entries) == 2 and not flushed.entries
    kept.fold([0], one_step(g=0.0).after)
    assert not kept.entries and float(kept.of_checkpoint) == float(kept.state)
    exact = bounds(Dot.IEEE)
    assert all(float(exact.take(one_step(g=0.0), [])) < 1e-4 for _ in range(2))


def test_bounds_of_elements_grow_with_gate_skip_and_type() -> None:
    x, read = torch.ones(2, dtype=torch.float64), torch.full((2,), 1e-6, dtype=torch.float64)
    plain = bound_elements(x, activation=torch.float32, read=read)
    assert bool((plain > 1e-6).all()) and bool((plain < 1.3e-6).all())
    assert bool((bound_elements(x, activation=torch.bfloat16, read=read) > 2.0**-8).all())
    assert bool((bound_elements(x, activation=torch.float32, read=read, skip=10 * x) > plain).all())
    z = torch.tensor([3.0, -30.0], dtype=torch.float64)
    opened, shut = bound_elements(0 * x, activation=torch.float32, read=read, z=z).tolist()
    assert opened > 2.8e-6 and 0 < shut < 1e-15


def parse(*texts: str) -> dict[str, PrecisionPlan]:
    return {text: PrecisionPlan.parse(text) for text in texts}


def test_a_run_measures_the_lengths_and_readouts_of_its_plans() -> None:
    plans = parse("nvfp4/fp32@16", "fp32@4+exact_readout", "fp8@4+state_output+dot=bf16", "fp32@4", "baseline")

    def cases(backend: Backend) -> list[str]:
        groups = list_run_tolerance(plans, recurrence=Recurrence.KDA, backend=backend)
        assert {g.recurrence for g in groups} == {Recurrence.KDA}
        return [str(PrecisionPlan(options=plan)) for g in groups for plan in g.plans]

    assert cases(Backend.TRITON_INTERPRET) == ["fp32@4", "fp32@16", "fp32@4+state_output"]
    assert cases(Backend.TRITON) == ["fp32@4", "fp32@16", "fp32@4+state_output+dot=bf16"]
    assert list_run_tolerance(parse("baseline"), recurrence=Recurrence.GDN, backend=Backend.TORCH) == []
    records = measure_run_tolerance(plans, recurrence=Recurrence.MAMBA2, backend=Backend.TORCH)
    assert len(records) == 6 and all(r.within for r in records)
    assert {(r.recurrence, r.case["flushes"]) for r in records} == {("mamba2", "natural")}
    assert all(r.case["steps"] > r.case["length"] for r in records), "each run has a flush"


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
