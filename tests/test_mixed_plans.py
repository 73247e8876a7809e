"""Mixed plans: another precision in some layers, in the lock step, in answers, in suites and in a whole run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from run_cases import Measured, lognormal, make_run

from driftgate import load_run
from driftgate.accuracy.adapters.blocks import Block
from driftgate.accuracy.adapters.wrapping import wrap
from driftgate.accuracy.answers import AnswerRunner
from driftgate.accuracy.crosscheck import certified, steps_needed
from driftgate.accuracy.lockstep import LockstepResult, LockstepRunner
from driftgate.accuracy.mixed import check_layers, describe_plan, find_plan, mix_layers, read_plan
from driftgate.accuracy.models import load_model
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.policy import decide
from driftgate.accuracy.policy_file import load_policy
from driftgate.accuracy.prompts import Prompt
from driftgate.accuracy.run_tolerance import list_run_tolerance
from driftgate.errors import InputError, UsageError
from driftgate.evals.checkpoints import find_checkpoint
from driftgate.evals.run_records import bytes_record, lockstep_bitwise
from driftgate.evals.suite import load_suite, merge_plans
from driftgate.kernels.contract import Backend, HeadShape, Recurrence
from driftgate.main_job import run

VOCAB, SEQUENCES, STEPS = 96, 3, 40
LAYERS = [0, 2]
"""Recurrent layers of the tiny model."""
SHAPE = HeadShape(key_heads=2, value_heads=4, d_k=16, d_v=16)


def mixed(base: str, **layers: str) -> PrecisionPlan:
    """``mixed("fp32@4", l0="fp8@4")``."""
    return mix_layers(PrecisionPlan.parse(base), {k[1:]: v for k, v in layers.items()}, name="mine")


MIXED = {
    "same": mixed("nvfp4/fp8@4", l0="nvfp4/fp8@4", l2="nvfp4/fp8@4"),
    "swapped": mixed("fp32@4", l0="nvfp4/fp8@4", l2="nvfp4/fp8@4"),
    "last": mixed("fp32@4", l2="nvfp4/fp8@4"),
    "first": mixed("fp32@4", l0="nvfp4@4"),
    "both": mixed("nvfp4/fp8@4", l0="fp8@4"),
    "rounded": mixed("fp32@4", l2="nvfp4/fp8@4+sr"),
}
PLAIN = {text: PrecisionPlan.parse(text) for text in ("nvfp4/fp8@4", "nvfp4@4", "fp32@4")}


@pytest.fixture(scope="module")
def token_ids() -> np.ndarray:
    return np.random.default_rng(5).integers(3, VOCAB, (SEQUENCES, STEPS + 1))


@pytest.fixture(scope="module")
def result(tiny_model, token_ids) -> LockstepResult:
    runner = LockstepRunner(tiny_model, PLAIN | MIXED, batch=SEQUENCES, backend=Backend.TORCH)
    return runner.run(token_ids, keep_logits=STEPS)


# the lock step


@pytest.mark.parametrize("name", ["same", "swapped"])
def test_layers_that_all_have_one_plan_are_that_plan_bit_for_bit(result, name):
    plain = "nvfp4/fp8@4"
    assert (result.first_logits[name] == result.first_logits[plain]).all()
    assert result.kl[name].tobytes() == result.kl[plain].tobytes()
    assert result.counters[name] == result.counters[plain]
    assert result.state[name] == result.state[plain]


def test_fp32_everywhere_but_in_one_layer_has_read_errors_there_alone(result):
    errors = [layer.mean["read_error"] for layer in result.state["last"]]
    assert errors[0] is None
    assert 0.05 < errors[1] < 0.2  # E2M1: about 9 %
    assert result.state["last"][0].mean["checkpoint_error"] == 0.0
    assert result.state["last"][1].mean["checkpoint_error"] > 1e-4
    assert result.state["last"][0].mean["trajectory_error"] == 0.0, "layers below it see the baseline's inputs"


def test_a_layer_alone_has_the_state_that_it_has_in_the_whole_plan_where_inputs_are_the_same(result):
    assert result.state["first"][0] == result.state["nvfp4@4"][0]
    assert (
        result.state["first"][1].mean["checkpoint_error"] == 0.0 != result.state["nvfp4@4"][1].mean["checkpoint_error"]
    )


def test_every_mixture_is_seen_to_differ_from_its_parts(result):
    logits = [result.first_logits[name] for name in ("nvfp4/fp8@4", "fp32@4", "last", "first", "both", "rounded")]
    assert len({x.tobytes() for x in logits}) == len(logits)


@pytest.mark.parametrize(
    ("name", "reads", "requantizations"),
    [  # of one row in 40 steps with 10 flushes
        ("same", 80, 20),
        ("last", 40, 10),
        ("first", 40, 10),
        ("both", 80, 20),
        ("fp32@4", 0, 0),
    ],
)
def test_counters_equal_a_hand_count_by_the_formats_of_each_layer(result, name, reads, requantizations):
    counters = result.counters[name]
    assert (counters.low_precision_reads, counters.flushes, counters.requantizations, counters.nonfinite_states) == (
        SEQUENCES * reads, SEQUENCES * 20, SEQUENCES * requantizations, 0
    )  # fmt: skip


def test_an_override_of_the_read_copy_alone_counts_no_flush_step_as_a_read(tiny_model, token_ids):
    plans = {"copy": mixed("fp32@4", l2="nvfp4/fp32@4")}
    counters = LockstepRunner(tiny_model, plans, batch=SEQUENCES, backend=Backend.TORCH).run(token_ids).counters["copy"]
    assert counters.low_precision_reads == SEQUENCES * 30


def test_a_state_that_is_not_finite_is_seen_in_the_second_pool(tiny_model):
    block = Block.of("mine", MIXED["last"])
    with wrap(tiny_model, [block], n_sequences=2) as model:
        model.prefill(torch.full((2, 1), 5))
        block.pools[1].error[1] = 1
        assert [pool.n_layers for pool in block.pools] == [1, 1]
    assert block.errors().tolist() == [False, True]


def test_draws_of_a_layer_are_those_that_it_has_in_the_whole_plan(tiny_model):
    blocks = [Block.of("all", PrecisionPlan.parse("nvfp4/fp8@4+sr")), Block.of("last", MIXED["rounded"])]
    with wrap(tiny_model, blocks, n_sequences=2) as model:
        model.prefill(torch.full((2, 1), 5))
        (whole, number), (alone, own) = (block.place(1) for block in blocks)
        assert (number, own, alone.n_layers) == (1, 0, 1)
        assert torch.equal(alone.streams[own, :2], whole.streams[number, :2])
        assert not torch.equal(alone.streams[own, :2], whole.streams[0, :2])


def test_a_mixed_plan_goes_on_from_its_own_states(tiny_model):
    """Continuations fold every pool; the model then starts from all of them."""
    plans = [PrecisionPlan.parse("fp32@4"), MIXED["swapped"], PrecisionPlan.parse("nvfp4/fp8@4"), MIXED["last"]]
    blocks = [Block.of(str(i), plan) for i, plan in enumerate(plans)]
    ids = torch.arange(3, 23).reshape(2, 10)
    with wrap(tiny_model, blocks, n_sequences=2) as model:
        model.prefill(ids[:, :2])
        for t in range(2, 5):
            model.step(ids[:, t])
        logits = model.extend(ids[:, 5:])
    assert torch.equal(logits[1], logits[2])
    assert not torch.equal(logits[3], logits[2]) and not torch.equal(logits[3], logits[0])


def test_each_pool_folds_with_the_constants_of_its_own_layers():
    """Mamba-2 keeps no corrections, so +buf=bf16 changes no bit; what is left is that two pools do the work of one."""
    loaded = load_model(find_checkpoint("tiny-mamba2"), name="tiny-mamba2", device="cpu", dtype=None)
    (base, same), ids = (PrecisionPlan.parse(text) for text in ("fp8@4", "fp8@4+buf=bf16")), torch.arange(3, 23)
    with wrap(loaded.model, [base]) as model:
        first, *_, last = model.layer_indices
    split = PrecisionPlan(options=base.options, layers=((first, same.options), (last, same.options)))
    blocks = [Block.of("one", base), Block.of("two", split)]
    with wrap(loaded.model, blocks) as model:
        model.prefill(ids[None, :2])
        for t in range(2, 5):
            model.step(ids[t : t + 1])
        logits = model.extend(ids[None, 5:])
        assert [pool.n_layers for pool in blocks[1].pools] == [2, model.n_layers - 2]
    assert torch.equal(logits[0], logits[1])


def test_answers_count_reads_by_layer(tiny_model):
    plans = {"last": MIXED["last"], "whole": PLAIN["nvfp4/fp8@4"], "alone": mixed("nvfp4/fp8@4", l0="fp32@4")}
    runner = AnswerRunner(tiny_model, plans, batch=1, backend=Backend.TORCH)
    found = runner.run([Prompt(item_id="a", token_ids=(5, 6, 7), max_new_tokens=6)])
    reads = {name: answers[0].low_precision_reads for name, answers in found.items()}
    assert reads["whole"] == 2 * reads["last"] > 0 == reads["baseline"]
    assert found["alone"][0].token_ids == found["last"][0].token_ids


# parts of a run's records


def test_bytes_are_those_of_the_layers_added_up():
    parts = [bytes_record(PLAIN[n], Recurrence.GDN, SHAPE, [0], 4) for n in ("fp32@4", "nvfp4/fp8@4")]
    whole = bytes_record(MIXED["last"], Recurrence.GDN, SHAPE, LAYERS, 4)
    for field in ("checkpoint", "read_copy", "buffer", "traffic_per_step"):
        assert getattr(whole, field) == sum(getattr(part, field) for part in parts)
    for field in ("traffic_ratio", "state_ratio"):
        assert getattr(whole, field) == pytest.approx(np.mean([getattr(part, field) for part in parts]))


def test_the_certificate_and_the_tolerance_take_the_formats_of_every_layer():
    assert certified({"mine": MIXED["both"]}) == {"lengths": [1, 4], "formats": ["fp32", "fp8", "nvfp4"]}
    assert steps_needed({"mine": MIXED["both"]}) == 8
    groups = list_run_tolerance({"mine": MIXED["both"]}, recurrence=Recurrence.GDN, backend=Backend.TORCH)
    assert [[plan.length for plan in group.plans] for group in groups] == [[4]]


def test_bits_are_promised_where_every_layer_promises_them(tiny_model, token_ids):
    plans = {
        "kept": mixed("fp32@4+exact_readout", l2="fp32@4+exact_readout+cached"),
        "one": mixed("fp32@1", l2="fp8/fp32@1"),
        "lost": mixed("fp32@1", l2="fp8@1"),
    }
    runner = LockstepRunner(tiny_model, plans, batch=SEQUENCES, backend=Backend.TORCH)
    records = lockstep_bitwise(runner.run(token_ids[:, :12]), plans, Recurrence.GDN)
    assert [(r.invariant, r.case.get("plan"), r.equal) for r in records[1:]] == [("I1", "one", True)]


@pytest.mark.parametrize("name", list(MIXED))
def test_a_plan_is_read_back_as_it_was_described(name):
    assert read_plan(name, describe_plan(MIXED[name])) == MIXED[name]


def test_a_plain_plan_is_its_text_in_runs_old_and_new():
    plan = PLAIN["nvfp4/fp8@4"]
    assert describe_plan(plan) == {"plan": "nvfp4/fp8@4"}
    assert read_plan("nvfp4/fp8@4", {}) == read_plan("nvfp4/fp8@4", {"role": "control", **describe_plan(plan)}) == plan


def test_a_mixed_plan_is_judged_by_the_formats_of_its_layers():
    data = make_run({"fp32@4": Measured(kl=lognormal(1e-6), reads=0)})
    data.results.plans["mine"] = data.results.plans.pop("fp32@4")
    for frame in (data.steps, data.items):
        frame["plan"] = frame["plan"].astype(str).replace("fp32@4", "mine")
    verdicts = {}
    for case, plan in (("low", MIXED["last"]), ("fp32", mixed("fp32@4", l0="fp32@4+cached"))):
        data.manifest.plans["mine"] = {"role": "candidate", **describe_plan(plan)}
        assert find_plan(data, "mine") == plan
        decide(data, load_policy(None))
        verdicts[case] = {v.check: v.reason for v in data.results.verdicts if v.plan == "mine"}
    assert verdicts["low"]["kl_mean"].startswith("copy_not_read")
    assert not verdicts["fp32"]["kl_mean"].startswith("copy_not_read")


# suites


ENTRY = {"name": "mine", "plan": "fp32@4", "layers": {"0,2": "nvfp4/fp8@4"}}


def write(folder: Path, *entries: dict, **fields: object) -> str:
    path = folder / "mixed.yaml"
    path.write_text(yaml.safe_dump({"plans": list(entries), **fields}))
    return str(path)


def test_a_suite_names_layers_as_the_checkpoint_does(tmp_path):
    suite = load_suite(write(tmp_path, ENTRY, {"plan": "fp32@4"}, ENTRY | {"name": "other", "layers": {2: "fp8@4"}}))
    assert suite.named_plans() == {
        "mine": MIXED["swapped"], "fp32@4": PLAIN["fp32@4"], "other": mixed("fp32@4", l2="fp8@4")
    }  # fmt: skip
    assert list(suite.roles()) == ["mine", "fp32@4", "other"]
    assert suite.changed(seed=3).named_plans() == suite.named_plans()


def test_plans_of_the_command_line_replace_mixed_candidates_and_keep_mixed_controls(tmp_path):
    suite = load_suite(write(tmp_path, ENTRY, ENTRY | {"name": "bad", "role": "control"}))
    assert [entry.key for entry in merge_plans(suite, ["fp8@4"], [])] == ["fp8@4", "bad"]
    assert [entry.key for entry in merge_plans(suite, [], ["nvfp4@4"])] == ["mine", "nvfp4@4"]


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"layers": {"2": "fp8@8"}}, UsageError, "one cursor serves all layers; expected L = 4, got 8"),
        ({"layers": {"2": "baseline"}}, UsageError, "expected L = 4, got 0"),
        ({"layers": {"2": "fp8@4+track=8"}}, UsageError, r"expected \+track = 0, got 8"),
        ({"layers": {"2": "fp8@4+spec=2"}}, UsageError, r"expected \+spec = 0, got 2"),
        ({"layers": {"2": "fp8@4+exact_readout"}}, UsageError, "readout = output_only, got exact_readout"),
        ({"layers": {"2": "fp9@4"}}, UsageError, "unknown format 'fp9'"),
        ({"layers": {"0,2": "fp8@4", "2": "nvfp4@4"}}, UsageError, "plan mine: layer 2 is named twice"),
        ({"layers": {"0-2": "fp8@4"}}, UsageError, "layers '0-2': expected decoder-layer indices, e.g. 0,3"),
        ({"layers": {"-1": "fp8@4"}}, UsageError, "expected decoder-layer indices"),
        ({"layers": {}}, UsageError, "names no layer"),
        ({"plan": "baseline"}, UsageError, "baseline always runs"),
        ({"name": "baseline (A/A)"}, UsageError, "plan name"),
        ({"name": "fp8@4"}, UsageError, "plan name 'fp8@4': expected up to 64 letters"),
        ({"name": "nvfp4*"}, UsageError, "plan name"),
        ({"name": None}, InputError, "needs a name"),
        ({"layers": None}, InputError, "name is for a plan with layers"),
        ({"layers": ["0"]}, InputError, "layers"),
        ({"layers": {"0": 8}}, InputError, "layers"),
    ],
)
def test_a_mixed_plan_that_does_not_fit_is_one_line(tmp_path, changes, kind, says):
    entry = {k: v for k, v in (ENTRY | changes).items() if v is not None}
    with pytest.raises(kind, match=says) as caught:
        load_suite(write(tmp_path, entry))
    assert "\n" not in str(caught.value)


def test_one_name_for_two_plans_is_refused(tmp_path):
    with pytest.raises(UsageError, match="plan mine is listed twice"):
        load_suite(write(tmp_path, ENTRY, ENTRY | {"plan": "fp8@4"}))


def test_a_layer_that_the_model_has_not_names_those_that_it_has(tiny_model):
    with pytest.raises(InputError, match=r"plan mine: layer 1 is no recurrent layer of the model; these are 0, 2"):
        check_layers({"mine": mixed("fp32@4", l1="fp8@4")}, LAYERS)
    with pytest.raises(InputError, match=r"layer 7 is no recurrent layer"):
        wrap(tiny_model, [Block.of("mine", mixed("fp32@4", l7="fp8@4"))])


# a whole run


def test_a_run_keeps_the_plan_behind_a_name_and_gates_it(tmp_path):
    entries = [
        {"name": "read copies above", "plan": "fp32@2", "layers": {"2,3": "nvfp4/fp32@2"}},
        {"plan": "nvfp4@2", "role": "control"},
    ]
    suite = write(tmp_path, *entries, sequences=2, steps=63, batch=2, tasks=["recall"])
    data = run(suite, out=tmp_path / "run")
    stored = load_run(tmp_path / "run")
    assert stored.manifest.plans["read copies above"] == {"role": "candidate", "plan": "fp32@2", "layers": {
        "2,3": "nvfp4/fp32@2"}}  # fmt: skip
    assert find_plan(stored, "read copies above") == mixed("fp32@2", l2="nvfp4/fp32@2", l3="nvfp4/fp32@2")
    assert [layer.read_error is None for layer in data.results.plans["read copies above"].state.layers] == [
        True, False, False
    ]  # fmt: skip
    assert data.results.backend.cross_check.by_plan.keys() == {"baseline", "read copies above", "nvfp4@2"}
    assert {v.check for v in data.results.verdicts if v.plan == "read copies above"} >= {"kl_mean", "task_loss:recall"}
    assert "read copies above" in (tmp_path / "run" / "report.md").read_text()


def test_a_run_with_a_layer_that_is_not_there_claims_no_folder(tmp_path):
    suite = write(tmp_path, {"name": "mine", "plan": "fp32@2", "layers": {"0": "fp8@2"}}, steps=63)
    with pytest.raises(InputError, match=r"layer 0 is no recurrent layer of the model; these are 1, 2, 3"):
        run(suite, out=tmp_path / "run")
    assert not (tmp_path / "run" / "request.json").exists()
