"""Ablation by layers, and the plan that a run recommends: what is measured alone, in what order, on what grounds."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest
import torch
from rich.console import Console
from run_cases import Measured, lognormal, make_run

from driftgate import cli, load_run
from driftgate.accuracy.adapters.blocks import Block
from driftgate.accuracy.adapters.wrapping import wrap
from driftgate.accuracy.lockstep import LockstepRunner, Mismatch
from driftgate.accuracy.mixed import mix_layers
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.records import AblationRecord, VerdictRecord
from driftgate.dry_run import describe
from driftgate.errors import UsageError
from driftgate.evals.ablation import group_parts, list_ablation, measure_ablation
from driftgate.evals.run_records import bytes_record
from driftgate.kernels.contract import Backend, HeadShape, Recurrence
from driftgate.main_job import choose_suite
from driftgate.recommend import ablation_table, check_budget, recommend_plan

VOCAB, STEPS, LAYERS = 96, 40, [0, 2]
SHAPE = HeadShape(key_heads=2, value_heads=4, d_k=16, d_v=16)
CANDIDATES = {
    "fp32@4": PrecisionPlan.parse("fp32@4"),
    "nvfp4/fp8@4+sr": PrecisionPlan.parse("nvfp4/fp8@4+sr"),
    "above": mix_layers(PrecisionPlan.parse("fp32@4"), {"2": "nvfp4/fp32@4"}, name="above"),
}


def bytes_of(plan: PrecisionPlan):
    return bytes_record(plan, Recurrence.GDN, SHAPE, LAYERS, 4)


@pytest.fixture(scope="module")
def token_ids() -> np.ndarray:
    return np.random.default_rng(5).integers(3, VOCAB, (2, STEPS + 1))


@pytest.fixture(scope="module")
def lockstep(tiny_model, token_ids):
    """Runs plans on the same streams."""
    return lambda plans: LockstepRunner(tiny_model, plans, batch=2, backend=Backend.TORCH).run(token_ids)


@pytest.fixture(scope="module")
def measured(lockstep):
    groups = group_parts(list_ablation(CANDIDATES, LAYERS), n_plans=3)
    return measure_ablation(
        groups, lockstep=lockstep, find_bytes=bytes_of, n_heads=4, recurrence=Recurrence.GDN, stream_end=STEPS - 4
    )


@pytest.fixture(scope="module")
def by_head(lockstep):
    """Two layers of four heads each, of one plan."""
    text = "nvfp4/fp8@4"
    groups = group_parts(list_ablation({text: PrecisionPlan.parse(text)}, LAYERS, n_heads=4), n_plans=8)
    records, _ = measure_ablation(
        groups, lockstep=lockstep, find_bytes=bytes_of, n_heads=4, recurrence=Recurrence.GDN, stream_end=STEPS
    )
    return records


def test_every_layer_below_fp32_is_taken_alone_and_no_other():
    parts = list_ablation(CANDIDATES, LAYERS)
    assert [(p.name, p.layer) for p in parts] == [("nvfp4/fp8@4+sr", 0), ("nvfp4/fp8@4+sr", 2), ("above", 2)]
    for part in parts:
        other = next(index for index in LAYERS if index != part.layer)
        assert part.plan.at(part.layer) == CANDIDATES[part.name].at(part.layer)
        assert str(PrecisionPlan(options=part.plan.at(other))) == "fp32@4"
    assert len({part.key for part in parts}) == 3


@pytest.mark.parametrize(("n", "n_plans", "sizes"), [(9, 5, [5, 4]), (3, 2, [3]), (5, 1, [4, 1]), (0, 3, [])])
def test_a_lock_step_is_about_as_wide_as_that_of_the_run(n, n_plans, sizes):
    parts = [list_ablation(CANDIDATES, LAYERS)[0]] * n
    assert [len(group) for group in group_parts(parts, n_plans=n_plans)] == sizes


def test_a_layer_alone_is_measured_as_the_mixed_plan_that_it_is(measured, lockstep):
    records, _ = measured
    plan = mix_layers(PrecisionPlan.parse("fp32@4"), {"2": "nvfp4/fp32@4"}, name="above")
    alone = lockstep({"above": plan})
    (record,) = (r for r in records if r.plan == "above")
    assert record.kl_mean == pytest.approx(alone.kl["above"][:, alone.positions < STEPS - 4].mean(), rel=1e-12)
    assert record.read_error == alone.state["above"][1].mean["read_error"] > 0.05
    assert record.checkpoint_error == 0.0
    assert record.kl_ci_low < record.kl_mean < record.kl_ci_high


def test_bytes_saved_are_those_of_one_layer_against_fp32_replay(measured):
    whole, plain = (bytes_of(PrecisionPlan.parse(text)) for text in ("nvfp4/fp8@4+sr", "fp32@4"))
    for record in (r for r in measured[0] if r.plan == "nvfp4/fp8@4+sr"):
        assert record.bytes_saved == pytest.approx((plain.traffic_per_step - whole.traffic_per_step) / 2)
        assert record.state_ratio_saved == pytest.approx((plain.state_ratio - whole.state_ratio) / 2)
        assert record.kl_per_byte == record.kl_mean / record.bytes_saved


def test_the_cheapest_layer_of_a_plan_comes_first(measured):
    records, _ = measured
    assert [r.plan for r in records] == ["nvfp4/fp8@4+sr", "nvfp4/fp8@4+sr", "above"]
    assert records[0].kl_per_byte < records[1].kl_per_byte
    assert all(r.invalid is None for r in records)


def test_every_lock_step_shows_the_baseline_against_itself(measured, lockstep):
    assert [(r.invariant, r.equal) for r in measured[1]] == [("A/A", True)]

    def disturbed(plans):
        result = lockstep(plans)
        return type(result)(**{**vars(result), "again": Mismatch(step=3, layer=2)})

    groups = group_parts(list_ablation(CANDIDATES, LAYERS), n_plans=3)
    _, again = measure_ablation(
        groups, lockstep=disturbed, find_bytes=bytes_of, n_heads=4, recurrence=Recurrence.GDN, stream_end=STEPS
    )
    assert [(r.equal, r.first_different) for r in again] == [(False, {"step": 3, "layer": 2})]


@pytest.mark.parametrize(("text", "steps", "says"), [("nvfp4/fp32@64", 40, "not_requantized"), ("fp8@1", 40, None)])
def test_a_layer_that_was_not_measured_has_no_price(tiny_model, token_ids, text, steps, says):
    runner = LockstepRunner(tiny_model, {}, batch=2, backend=Backend.TORCH)

    def run(plans):
        runner.plans = dict(plans)
        return runner.run(token_ids[:, : steps + 1])

    groups = group_parts(list_ablation({text: PrecisionPlan.parse(text)}, LAYERS), n_plans=1)
    records, _ = measure_ablation(
        groups, lockstep=run, find_bytes=bytes_of, n_heads=4, recurrence=Recurrence.GDN, stream_end=steps + 1
    )
    for record in records:
        assert (record.invalid is None) == (says is None) == (record.kl_per_byte is not None)
        assert says is None or record.invalid.startswith(says)


def test_heads_are_taken_alone_in_every_layer_and_share_what_it_saves(by_head):
    assert sorted((r.layer, r.head) for r in by_head) == [(layer, head) for layer in LAYERS for head in range(4)]
    assert len({r.kl_mean for r in by_head}) == 8
    prices = [r.kl_per_byte for r in by_head]
    assert prices == sorted(prices)
    whole, plain = (bytes_of(PrecisionPlan.parse(text)) for text in ("nvfp4/fp8@4", "fp32@4"))
    assert sum(r.bytes_saved for r in by_head) == pytest.approx(plain.traffic_per_step - whole.traffic_per_step)
    assert sum(r.state_ratio_saved for r in by_head) == pytest.approx(plain.state_ratio - whole.state_ratio)


def test_errors_of_a_head_are_those_of_that_head(by_head, lockstep):
    """In the first layer inputs are the baseline's, so the heads' errors are those of the whole layer, head by head."""
    state = lockstep({"whole": PrecisionPlan.parse("nvfp4/fp8@4")}).state["whole"][0]
    first = [r for r in by_head if r.layer == 0]
    for error in ("read_error", "checkpoint_error", "output_error"):
        assert np.mean([getattr(r, error) for r in first]) == pytest.approx(state.mean[error], rel=1e-12)
    assert len({r.checkpoint_error for r in first}) == 4


@pytest.mark.parametrize("head", range(4))
def test_a_head_alone_is_its_own_and_all_others_are_fp32_replay(tiny_model, head):
    """To the bit in the first layer, where all plans have the same inputs."""
    low, plain = (PrecisionPlan.parse(text) for text in ("nvfp4/fp8@4", "fp32@4"))
    alone = PrecisionPlan(options=plain.options, layers=((0, low.options),), head=head)
    blocks, seen = [Block.of(str(i), plan) for i, plan in enumerate((low, plain, alone))], []
    ids = torch.arange(3, 43).reshape(2, 20)
    others = [h for h in range(4) if h != head]
    with wrap(tiny_model, blocks, n_sequences=2) as model:
        model.observers.append(lambda layer, _inputs, out: seen.append(out) if layer == 0 else None)
        model.prefill(ids[:, :2])
        for t in range(2, 16):
            model.step(ids[:, t])
        states = [block.read_checkpoint(0, torch.arange(2)) for block in blocks]
    for out in seen:
        whole, none, mine = (out[block.rows] for block in blocks)
        assert torch.equal(mine[:, head], whole[:, head])
        assert torch.equal(mine[:, others], none[:, others])
    assert len(seen) == 14 and not torch.equal(whole[:, others], none[:, others])
    assert torch.equal(states[2][:, head], states[0][:, head])
    assert torch.equal(states[2][:, others], states[1][:, others])
    assert not torch.equal(states[0], states[1])


def test_plans_without_a_format_below_fp32_cannot_be_taken_apart():
    with pytest.raises(UsageError, match="there is none; add one with --plan"):
        choose_suite("quick", {"plans": ["fp32@8"], "ablate": "layers"})
    assert choose_suite("quick", {"plans": ["fp8@8"], "ablate": "layers"}).ablate == "layers"
    with pytest.raises(UsageError, match="ablate"):
        choose_suite("quick", {"ablate": "neurons"})


def test_a_dry_run_says_that_it_would_take_plans_apart(tmp_path):
    found = [describe("quick", {"ablate": how}, out=tmp_path / "run").get("ablate") for how in (None, "heads")]
    assert found == [None, "heads, each alone in every candidate below FP32"]


# the recommendation


def advise(verdicts: dict[str, str], *, budget: float, of_run: str = "pass", ablation: tuple[AblationRecord, ...] = ()):
    """Advice of a run whose plans have state ratios 0.5, 0.2 and 0.1 and KL 1e-9, 1e-4 and 1e-2, in this order."""
    ratios, kl = (0.5, 0.2, 0.1), (1e-9, 1e-4, 1e-2)
    data = make_run({name: Measured(kl=lognormal(kl[i])) for i, name in enumerate(verdicts)})
    for name, ratio in zip(verdicts, ratios, strict=False):
        data.results.plans[name].bytes.state_ratio = ratio
    told = {**verdicts, "baseline": of_run}
    data.results.verdicts = [
        VerdictRecord(plan=plan, check="kl_mean", value=0.0, limit=1.0, verdict=verdict, reason="why")
        for plan, verdict in told.items()
    ]
    data.results.ablation = list(ablation)
    return recommend_plan(data, budget=budget)


ALL = {"fp32@4": "pass", "fp8/fp32@4": "pass", "nvfp4@4": "pass"}


@pytest.mark.parametrize(
    ("budget", "plan", "next_best"),
    [
        (0.5, "fp32@4", "fp8/fp32@4"),
        (0.4, "fp8/fp32@4", "nvfp4@4"),
        (0.2, "fp8/fp32@4", "nvfp4@4"),
        (0.1, "nvfp4@4", "fp8/fp32@4"),
        (0.09, None, "nvfp4@4"),
    ],
)
def test_the_least_kl_within_the_budget_is_recommended(budget, plan, next_best):
    advice = advise(ALL, budget=budget)
    assert (advice.plan, advice.next_best) == (plan, next_best)
    assert ("above the budget" in advice.next_reason) == (budget in (0.1, 0.09))


def test_a_plan_that_does_not_pass_is_never_recommended():
    advice = advise(ALL | {"fp8/fp32@4": "inconclusive"}, budget=0.2)
    assert (advice.plan, advice.next_best) == ("nvfp4@4", "fp32@4")
    advice = advise(ALL | {"fp8/fp32@4": "inconclusive", "nvfp4@4": "fail"}, budget=0.2)
    assert advice.plan is None
    assert advice.reason == "none of 2 within state ratio 0.2 passes every check"
    assert advice.next_best == "fp32@4"


def test_a_run_that_did_not_pass_recommends_nothing():
    advice = advise(ALL, budget=0.5, of_run="fail")
    assert (advice.plan, advice.reason) == (None, "the run itself did not pass: kl_mean: why")


def test_the_words_name_the_plan_its_figures_and_the_budget():
    lines = advise(ALL, budget=0.2).lines()
    assert lines[0].startswith("recommended: fp8/fp32@4: mean KL ")
    assert lines[0].endswith("state ratio 0.200; the least KL of 2 that pass within state ratio 0.2")
    assert lines[1].startswith("  next best: nvfp4@4: mean KL ") and len(lines) == 2


def alone(layer: int, kl: float, *, invalid: str | None = None) -> AblationRecord:
    return AblationRecord(
        plan="nvfp4@4", layer=layer, kl_mean=kl, kl_ci_low=kl, kl_ci_high=kl, read_error=None, checkpoint_error=0.1,
        output_error=0.1, bytes_saved=100.0, state_ratio_saved=0.2, kl_per_byte=None if invalid else kl / 100,
        invalid=invalid,
    )  # fmt: skip


def test_layers_that_an_ablation_finds_cheap_are_named_as_not_measured():
    advice = advise(ALL, budget=0.35, ablation=(alone(2, 1e-5), alone(0, 1e-3)))
    found = advice.untested
    assert (found.plan, found.layers, found.kl) == ("nvfp4@4", (2,), 1e-5)
    assert found.state_ratio == pytest.approx(0.3)  # nvfp4@4 has 0.1, and layer 0 gives back 0.2
    assert advice.lines()[-1].startswith("  not measured: nvfp4@4 in layers 2 alone: state ratio 0.300, about 1.00e-05")


@pytest.mark.parametrize("budget", [0.5, 0.29, 0.1])
def test_nothing_is_named_that_was_measured_or_is_above_the_budget(budget):
    """0.5 needs no layer below FP32; 0.29 and 0.1 need both, which is the plan itself."""
    assert advise(ALL, budget=budget, ablation=(alone(2, 1e-5), alone(0, 1e-3))).untested is None


def test_a_mixed_plan_whose_one_low_layer_was_taken_alone_is_that_plan():
    """It was measured: its other layers keep FP32 anyway."""
    assert advise(ALL, budget=0.29, ablation=(alone(2, 1e-5),)).untested is None


def test_a_layer_that_was_not_measured_is_not_counted_on():
    assert advise(ALL, budget=0.35, ablation=(alone(2, 1e-5, invalid="copy_not_read"),)).untested is None


@pytest.mark.parametrize(
    ("recommend", "budget", "says"),
    [
        (True, None, "--recommend goes with --budget RATIO"),
        (False, 0.5, "--budget goes with --recommend"),
        (True, 0.0, "expected a state ratio above 0"),
        (True, -1.0, "expected a state ratio above 0"),
        (True, float("nan"), "expected a state ratio above 0"),
        (True, float("inf"), "expected a state ratio above 0"),
    ],
)
def test_flags_that_do_not_fit_are_refused(recommend, budget, says):
    with pytest.raises(UsageError, match=says):
        check_budget(recommend, budget)


# from the command line


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """``driftgate run --ablate layers --recommend``: exit code and the document on standard output."""
    folder = tmp_path_factory.mktemp("ablation")
    command = [
        "driftgate", "run", "quick", "--plan", "nvfp4/fp32@2", "--control", "nvfp4@2", "--task", "none",
        "--steps", "63", "--sequences", "2", "--batch", "2", "--ablate", "layers", "--recommend", "--budget", "0.5",
        "--out", str(folder / "run"), "--json",
    ]  # fmt: skip
    stream = (folder / "stdout").open("w")
    with pytest.MonkeyPatch.context() as patch, stream, pytest.raises(SystemExit) as caught:
        patch.setattr(sys, "argv", command)
        patch.setattr(sys, "stdout", stream)
        cli.main()
    return caught.value.code, json.loads((folder / "stdout").read_text()), folder / "run"


def test_the_document_holds_ablation_and_recommendation_and_the_folder_the_ablation(told):
    code, document, folder = told
    assert code in (0, 1, 3)
    assert sorted(r["layer"] for r in document["ablation"]) == [1, 2, 3]
    assert {r["plan"] for r in document["ablation"]} == {"nvfp4/fp32@2"}
    assert all(r["kl_mean"] > 0 and r["checkpoint_error"] == 0 for r in document["ablation"])
    assert document["recommendation"]["budget"] == 0.5
    stored = json.loads((folder / "results.json").read_text())
    assert stored["ablation"] == document["ablation"]
    assert json.loads((folder / "manifest.json").read_text())["suite"]["ablate"] == "layers"


def test_the_table_names_every_layer(told):
    data = load_run(told[2])
    text = io.StringIO()
    Console(width=80, file=text).print(ablation_table(data))
    assert text.getvalue().count("nvfp4/fp32@2") == 3
    assert "KL per byte" in text.getvalue()


@pytest.mark.parametrize(("n", "rows", "more"), [(32, 32, None), (33, 33, "1 more"), (1152, 33, "1120 more")])
def test_a_long_table_shows_both_ends_and_says_how_many_it_leaves_out(n, rows, more):
    data = make_run({"nvfp4@4": Measured(kl=lognormal(1e-4))})
    data.results.ablation = [alone(layer, 1e-6 * (layer + 1)) for layer in range(n)]
    table = ablation_table(data)
    layers = list(table.columns[1].cells)
    assert table.row_count == rows
    assert (layers[0], layers[-1]) == ("0", str(n - 1))
    assert [cell for cell in layers if "more" in cell] == ([] if more is None else [more])
