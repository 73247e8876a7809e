"""Suites: what the files may say, what flags replace, and the exit code of everything that does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from driftgate.accuracy.plans import Role
from driftgate.errors import DriftgateError, EmptyRunError, InputError, UsageError
from driftgate.evals.checkpoints import list_checkpoints
from driftgate.evals.suite import bundled_suites, load_suite, merge_plans
from driftgate.evals.tasks import load_task
from driftgate.main_job import choose_suite

GOOD = {
    "plans": [{"plan": "nvfp4/fp32@16"}, {"plan": "fp8/fp32@16"}, {"plan": "nvfp4@16", "role": "control"}],
    "tasks": ["recall"],
    "steps": 640,
}


def write(folder: Path, **changes: object) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(GOOD | changes))
    return str(path)


@pytest.mark.parametrize("name", list(bundled_suites()))
def test_a_bundled_suite_names_what_exists(name):
    suite = load_suite(name)
    assert suite.name == name and suite.title
    assert suite.model in list_checkpoints()
    assert all(load_task(task).name == task for task in suite.tasks)
    assert Role.CONTROL in suite.roles().values(), "without a control a run cannot show that it sees drift"
    assert choose_suite(name, {}) == suite.changed(stream="tasks")


def test_quick_is_bundled_and_is_what_runs_without_arguments():
    assert "quick" in bundled_suites()


def test_a_file_is_read_with_the_defaults_of_what_it_leaves_out(tmp_path):
    suite = load_suite(write(tmp_path))
    assert (suite.name, suite.model, suite.prefill, suite.seed, suite.cross_check_cycles) == (
        "mine",
        "tiny-gdn",
        1,
        0,
        2,
    )
    assert list(suite.named_plans()) == ["nvfp4/fp32@16", "fp8/fp32@16", "nvfp4@16"]
    assert [r.value for r in suite.roles().values()] == ["candidate", "candidate", "control"]


def test_plans_are_known_by_their_canonical_text(tmp_path):
    suite = load_suite(write(tmp_path, plans=[{"plan": " fp8_e4m3/fp32@16+exact "}]))
    assert list(suite.named_plans()) == list(suite.roles()) == ["fp8/fp32@16"]


BAD_FIELDS = {
    "name": 3, "title": [1], "model": None, "stream": "novel", "plans": [], "tasks": "recall", "sequences": 0,
    "batch": 0, "prefill": 0, "seed": -1, "cross_check_cycles": 1, "data": 3, "mode": "guess", "prompt": 1,
    "repeats": 0, "temperature": -1, "max_new_tokens": 0, "answer_prefill": "half", "limit": 0, "policy": 7,
    "generate": "maybe", "ablate": "neurons", "difficulty": {"pears": 3}, "reference_model": 3,
}  # fmt: skip
MORE_BAD_FIELDS = [
    ("plans", 3), ("plans", ["fp32@16"]), ("plans", [{}]), ("plans", [{"plan": "fp32@16", "role": "judge"}]),
    ("plans", [{"plan": "fp32@16", "layers": {}}]), ("tasks", [1]), ("sequences", 1.5), ("sequences", "many"),
    ("batch", -4), ("steps", "long"), ("steps", None), ("seed", 2**63), ("seed", None), ("stesp", 3),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [*BAD_FIELDS.items(), *MORE_BAD_FIELDS])
def test_a_bad_field_of_a_file_is_one_line_that_names_file_and_field(tmp_path, field, value):
    path = write(tmp_path, **{field: value})
    with pytest.raises(InputError) as caught:
        load_suite(path)
    assert caught.value.exit_code == 4
    assert path in str(caught.value) and field in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_field_has_a_bad_value_above(tmp_path):
    assert set(type(load_suite(write(tmp_path))).model_fields) == set(BAD_FIELDS) | {"steps"}


@pytest.mark.parametrize("steps", [0, -3])
def test_no_steps_are_an_empty_run_wherever_they_are_asked_for(tmp_path, steps):
    with pytest.raises(EmptyRunError, match=f"steps {steps}"):
        load_suite(write(tmp_path, steps=steps))
    with pytest.raises(EmptyRunError, match=f"steps {steps}"):
        choose_suite("quick", {"steps": steps})


def test_a_stream_without_room_for_its_questions_is_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(UsageError, match="at least 64 tokens, got 41"):
        choose_suite(write(tmp_path), {"steps": 40})


@pytest.mark.parametrize(
    ("plans", "says"),
    [
        (["fp32@16", "nvfp4@16", "fp32@16"], "plan fp32@16 is listed twice"),
        (["fp8@4", "fp8_e4m3@4+exact"], "plan fp8@4 is listed twice"),
        (["baseline", "fp32@16"], "baseline always runs"),
        (["fp33@16"], "unknown format 'fp33'"),
        (["fp32@0"], "L must be 1 to 256"),
        (["fp32"], "expected READ"),
        (["fp32@4+sr"], "fp32 is rounded to nearest alone"),
        (["nvfp4@4+head"], "not available in this version"),
    ],
)
def test_plans_that_do_not_fit_are_usage_errors(tmp_path, plans, says):
    path = write(tmp_path, plans=[{"plan": p} for p in plans])
    with pytest.raises(UsageError, match=says) as caught:
        load_suite(path)
    assert caught.value.exit_code == 2


def test_a_task_listed_twice_is_refused(tmp_path):
    with pytest.raises(UsageError, match="task recall is listed twice"):
        load_suite(write(tmp_path, tasks=["recall", "tracking", "recall"]))


@pytest.mark.parametrize(
    ("suite", "choices", "says"),
    [
        ("quikc", {}, "unknown suite 'quikc'; did you mean quick"),
        ("quick", {"plans": ["nvpf4@16"]}, "unknown format 'nvpf4'"),
        ("quick", {"controls": ["fp32@x"]}, "expected READ"),
        ("quick", {"tasks": ["recal"]}, "unknown task 'recal'; did you mean recall"),
        ("quick", {"tasks": ["recall", "recall"]}, "listed twice"),
        ("quick", {"plans": ["fp32@4", "fp32@4+exact"]}, "listed twice"),
        ("quick", {"plans": ["nvfp4@16"], "controls": ["nvfp4@16"]}, "listed twice"),
        ("quick", {"plans": ["baseline"]}, "baseline always runs"),
        ("quick", {"plans": ["nvfp4/fp32@16+spec=2"]}, "a model decodes single tokens in a run"),
        ("quick", {"controls": ["fp32@16"]}, "control fp32@16 keeps FP32 and cannot drift; take one below FP32"),
        ("quick", {"seed": -1}, "seed"),
        ("quick", {"sequences": 0}, "sequences"),
        ("quick", {"batch": 0}, "batch"),
    ],
)
def test_what_the_command_line_alone_shows_is_a_usage_error(suite, choices, says):
    with pytest.raises(UsageError, match=says) as caught:
        choose_suite(suite, choices)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_an_unknown_task_in_a_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="unknown task 'recal'"):
        choose_suite(write(tmp_path, tasks=["recal"]), {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a mapping"), ("- plans", "expected a mapping"), ("plans: [", "no readable YAML"),
        ("plans: !!python/name:os.system", "no readable YAML"), ("1: 2", "plans"), ("name: x", "plans"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_suite_is_named(tmp_path, text, says):
    path = tmp_path / "mine.yml"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        load_suite(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("plans: [{name: a, plan: fp32@4, layers: {0: fp8@4, 0: nvfp4@4}}]", "0 stands twice in one mapping"),
        ("plans: [{name: a, plan: fp32@4, layers: {0: fp8@4, '0': nvfp4@4}}]", "0 stands twice in one mapping"),
        ("plans: [{name: a, plan: fp32@4, layers: {010: fp8@4}}]", "010 would be read as another number"),
        ("plans: [{plan: fp32@4}]\nsteps: 64\nsteps: 512", "steps stands twice"),
        ("plans: [{plan: fp32@4}]\nsteps: 1:30", "1:30 would be read as another number"),
        ("plans: [{plan: fp32@4}]\nseed: 2020-99-99", "no readable YAML"),
        ("[" * 20_000, "no readable YAML"),
    ],
)
def test_what_yaml_would_take_for_something_else_in_silence_is_refused(tmp_path, text, says):
    """Plain YAML keeps the last of two keys, and reads 010 as eight."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        load_suite(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_merged_mappings_and_decimal_numbers_are_read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("plans:\n  - &a {plan: fp8@4, role: control}\n  - {<<: *a, plan: nvfp4@4}\nsteps: 1_024\nseed: 0\n")
    suite = load_suite(str(path))
    assert [(e.plan, e.role) for e in suite.plans] == [("fp8@4", "control"), ("nvfp4@4", "control")]
    assert (suite.steps, suite.seed) == (1024, 0)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("nvfp4/fp32@4", "write a plan as a mapping, e.g. - plan: nvfp4/fp32@4"),
        ({"name": "a", "plan": "fp32@4", "layers": [0, 2]}, "expected decoder-layer indices with a plan text each"),
        ({"name": "a", "plan": "fp32@4", "layers": "0,2"}, "expected decoder-layer indices with a plan text each"),
        ({"name": "a", "plan": "fp32@4", "layers": {0: None}}, "expected decoder-layer indices with a plan text each"),
    ],
)
def test_a_plan_that_is_written_otherwise_is_told_how(tmp_path, entry, says):
    with pytest.raises(InputError, match=says):
        load_suite(write(tmp_path, plans=[entry]))


def test_a_missing_file_a_folder_and_other_bytes_are_named(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("none.yaml", "folder.yaml", "bytes.yaml"):
        with pytest.raises(InputError, match=name.replace(".", r"\.")):
            load_suite(str(tmp_path / name))


def texts(suite, plans=(), controls=()) -> dict[str, str]:
    return {e.plan: e.role for e in merge_plans(suite, plans, controls)}


def test_plans_replace_candidates_and_keep_controls(tmp_path):
    suite = load_suite(write(tmp_path))
    assert texts(suite, ["fp16@8", "bf16@8"]) == {"fp16@8": "candidate", "bf16@8": "candidate", "nvfp4@16": "control"}


def test_controls_replace_controls_and_keep_candidates(tmp_path):
    suite = load_suite(write(tmp_path))
    assert texts(suite, (), ["mxfp4@16"]) == {
        "nvfp4/fp32@16": "candidate", "fp8/fp32@16": "candidate", "mxfp4@16": "control"
    }  # fmt: skip


def test_both_replace_everything(tmp_path):
    suite = load_suite(write(tmp_path))
    assert texts(suite, ["fp16@8"], ["int8@8"]) == {"fp16@8": "candidate", "int8@8": "control"}


def test_a_control_named_as_candidate_is_one_and_no_control_is_left(tmp_path):
    suite = load_suite(write(tmp_path))
    assert texts(suite, ["nvfp4@16+exact"]) == {"nvfp4@16": "candidate"}


def test_a_candidate_named_as_control_is_one(tmp_path):
    suite = load_suite(write(tmp_path))
    assert texts(suite, (), ["fp8/fp32@16"]) == {"nvfp4/fp32@16": "candidate", "fp8/fp32@16": "control"}


def test_no_plans_leave_the_suite_as_it_is(tmp_path):
    suite = load_suite(write(tmp_path))
    assert merge_plans(suite, (), ()) is None
    assert choose_suite(write(tmp_path), {}) == suite.changed(stream="tasks")


def test_flags_replace_fields_and_an_empty_list_of_tasks_means_none(tmp_path):
    path = write(tmp_path)
    chosen = choose_suite(path, {"tasks": [], "steps": 128, "sequences": 3, "batch": 2, "seed": 9, "model": "x"})
    assert (chosen.tasks, chosen.steps, chosen.sequences, chosen.batch, chosen.seed, chosen.model) == (
        (), 128, 3, 2, 9, "x",
    )  # fmt: skip
    assert choose_suite(path, {"tasks": None}).tasks == ("recall",)


@pytest.mark.parametrize(
    ("model", "tasks", "stream", "chosen"),
    [
        ("tiny-gdn", None, "auto", "tasks"),
        ("./mine", [], "auto", "generation"),
        ("./mine", ["recall"], "auto", "tasks"),
        ("tiny-gdn", None, "generation", "generation"),
    ],
)
def test_streams_are_those_of_the_tasks_where_the_model_knows_them(tmp_path, model, tasks, stream, chosen):
    path = write(tmp_path, model=model, stream=stream, tasks=[])
    assert choose_suite(path, {"tasks": tasks}).stream == chosen


def test_an_error_of_a_flag_names_the_suite_and_not_a_file():
    with pytest.raises(DriftgateError, match=r"^suite quick: seed: "):
        choose_suite("quick", {"seed": 2**63})
