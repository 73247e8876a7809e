"""Tasks of lm-eval on plans, ``--task lm_eval:NAME``: from local files end to end, and what is refused."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'driftgate[lm-eval]'")

import lm_eval.tasks
import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval_cases import CHOOSE, GENERATE, PLAN, load_lm, write_documents, write_task

from driftgate.accuracy.answers import AnswerRunner
from driftgate.accuracy.items import paired_record
from driftgate.accuracy.prompts import Decoded
from driftgate.errors import InputError, UsageError
from driftgate.evals.lm_eval import DriftgateLM, paired_items
from driftgate.evals.tasks import load_task
from driftgate.evals.tasks.item_task import ModelText, TaskOptions


@pytest.fixture(scope="module")
def lm() -> DriftgateLM:
    return load_lm()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_documents(folder)
    return folder


def decode(lm: DriftgateLM, prompts: list) -> dict[str, list[Decoded]]:
    runner = AnswerRunner(lm.loaded.model, lm._plans, batch=16, backend=lm.backend, vocab_size=264, seed=0)
    return runner.run(prompts)


def evaluate(lm: DriftgateLM, path: str) -> dict[str, Any]:
    return simple_evaluate(model=lm, tasks=[path], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0)


def test_simple_evaluate_and_a_run_say_the_same(lm, folder):
    path = write_task(folder, "choose", **CHOOSE)
    results = {"baseline": evaluate(lm.baseline, path), PLAN: evaluate(lm, path)}
    assert results["baseline"]["results"]["choose"]["acc,none"] >= 0.75
    assert results["baseline"]["config"]["first_token_ids"][:1] == [257]
    assert results[PLAN]["config"]["plan"] == PLAN
    items = paired_items(results, task="choose", metric="acc")

    task = load_task(f"lm_eval:{path}")
    prompts = task.build(TaskOptions(repeats=3), lm.text)  # scoring a choice again would score the same
    rows = task.score(prompts, decode(lm, prompts), lm.text)
    shared = ["plan", "item_id", "repeat", "correct"]
    pd.testing.assert_frame_equal(rows[shared], items[shared])
    assert set(rows["task"]) == {task.name}
    own, other = paired_record(rows, PLAN, task.name), paired_record(items, PLAN, "choose")
    assert (own.lost, own.gained, own.delta, own.p_value) == (other.lost, other.gained, other.delta, other.p_value)
    assert (own.n, task.chance, task.version) == (6, 0.25, 2.5)
    assert set(rows["answer"]) | set(rows["gold"]) <= set("ABCD")
    assert ((rows["answer"] == rows["gold"]) == rows["correct"]).all()
    assert set(rows["n_tokens"]) == {4}
    reads = rows.groupby("plan")["low_precision_reads"]
    assert (reads.get_group("baseline") == 0).all()
    assert (reads.get_group(PLAN) >= 4 * 3).all()  # four choices, three recurrent layers


def test_generated_answers_with_repeats(lm, folder):
    task = load_task(f"lm_eval:{write_task(folder, 'generate', **GENERATE)}")
    prompts = task.build(TaskOptions(repeats=2, temperature=0.7, max_new_tokens=1), lm.text)
    assert {(p.max_new_tokens, p.temperature) for p in prompts} == {(1, 0.7)}
    rows = task.score(prompts, decode(lm, prompts), lm.text)
    assert rows.groupby(["plan", "item_id"]).size().eq(2).all()
    assert rows["correct"].mean() > 0.5
    assert ((rows["answer"] == rows["gold"]) == rows["correct"]).all()
    assert task.chance == 0


def test_repeats_of_the_task_are_one_answer(lm, folder):
    vote = {"name": "vote", "filter": [{"function": "majority_vote"}, {"function": "take_first"}]}
    task = load_task(f"lm_eval:{write_task(folder, 'vote', repeats=3, filter_list=[vote], **GENERATE)}")
    prompts = task.build(TaskOptions(repeats=2), lm.text)
    assert len(prompts) == 6 * 3 * 2

    def answer(p):
        return Decoded(item_id=p.item_id, repeat=p.repeat, token_ids=(ord("+-+--+"[p.repeat]), 258))

    rows = task.score(prompts, {"baseline": [answer(p) for p in prompts]}, lm.text)
    assert rows[rows["repeat"] == 0]["answer"].eq("+").all()
    assert rows[rows["repeat"] == 1]["answer"].eq("-").all()


def test_why_there_is_no_answer(lm, folder):
    regex = {"name": "sign", "filter": [{"function": "regex", "regex_pattern": "is (.)"}, {"function": "take_first"}]}
    task = load_task(f"lm_eval:{write_task(folder, 'sign', filter_list=[regex], **GENERATE)}")
    prompts = task.build(TaskOptions(), lm.text)[:4]
    answers = [
        Decoded(item_id=p.item_id, repeat=0, token_ids=tuple(said.encode()), capped=capped, finite=finite)
        for p, (said, capped, finite) in zip(
            prompts,
            [("it is +", False, True), ("it is", True, True), ("none", False, True), ("it is +", False, False)],
            strict=True,
        )
    ]
    rows = task.score(prompts, {"baseline": answers}, lm.text)
    assert list(rows["parse_reason"]) == ["ok", "truncated", "none", "nonfinite"]
    assert list(rows["capped"]) == [False, True, False, False]
    assert not rows["correct"][1:].any()
    assert list(rows["answer"].isna()) == [False, False, False, True]


def test_a_nan_never_wins(lm, folder):
    task = load_task(f"lm_eval:{write_task(folder, 'nan', **CHOOSE)}")
    prompts = task.build(TaskOptions(), lm.text)
    golds = {p.item_id: p.detail.instance.doc["gold"] for p in prompts}
    answers = [
        Decoded(item_id=p.item_id, repeat=p.repeat, logprobs=(float("nan"),), finite=False)
        if p.repeat == golds[p.item_id]
        else Decoded(item_id=p.item_id, repeat=p.repeat, logprobs=(-1.0,))
        for p in prompts
    ]
    rows = task.score(prompts, {"baseline": answers}, lm.text)
    assert not rows["correct"].any()
    assert set(rows["parse_reason"]) == {"nonfinite"}


def test_a_long_answer_is_kept_as_a_hash(lm, folder):
    task = load_task(f"lm_eval:{write_task(folder, 'long', **GENERATE)}")
    prompts = task.build(TaskOptions(), lm.text)[:2]
    said = ["The question was o-n+, was it not", "o-n+"]
    answers = [
        Decoded(item_id=p.item_id, repeat=0, token_ids=tuple(s.encode())) for p, s in zip(prompts, said, strict=True)
    ]
    rows = task.score(prompts, {"baseline": answers}, lm.text)
    assert re.fullmatch(r"sha256:[0-9a-f]{12}", rows["answer"][0])
    assert rows["answer"][1] == "o-n+"


def test_a_metric_can_be_named(lm, folder):
    fields = CHOOSE | {"doc_to_choice": ["+ + + +", "-", "*", "/"], "doc_to_target": 0}
    path = write_task(folder, "norm", **fields)
    prompts = load_task(f"lm_eval:{path}").build(TaskOptions(), lm.text)
    scores = {0: -2.0, 1: -1.0, 2: -3.0, 3: -4.0}  # the long choice is best by its length alone
    answers = [Decoded(item_id=p.item_id, repeat=p.repeat, logprobs=(scores[p.repeat],)) for p in prompts]
    for metric, right in (("", False), ("#acc", False), ("#acc_norm", True), ("#acc_norm,none", True)):
        task = load_task(f"lm_eval:{path}{metric}")
        rows = task.score(task.build(TaskOptions(), lm.text), {"baseline": answers}, lm.text)
        assert rows["correct"].eq(right).all(), metric
        assert task.metric == ("acc_norm" if right else "acc")
        turned = task.score(task.build(TaskOptions(), lm.text)[::-1], {"baseline": answers[::-1]}, lm.text)
        assert set(turned["answer"]) == set(rows["answer"]) == {"B"}
        assert set(rows["task"]) == {f"lm_eval:{path}{metric}"}


def test_a_group_has_the_documents_of_its_tasks(lm, folder, tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(Path(write_task(folder, name, **CHOOSE)).read_text())
    (tmp_path / "group.yaml").write_text(yaml.safe_dump({"group": "both", "task": ["one", "two"]}))
    shipped = TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr("driftgate.evals.tasks.harness_source._index", lambda: shipped)
    task = load_task("lm_eval:both")
    prompts = task.build(TaskOptions(), lm.text)
    answers = [Decoded(item_id=p.item_id, repeat=p.repeat, logprobs=(-1.0 - p.repeat,)) for p in prompts]
    rows = task.score(prompts, {"baseline": answers}, lm.text)
    assert rows["item_id"].str.split("/").str[0].value_counts().to_dict() == {"one": 6, "two": 6}
    assert rows["item_id"].is_unique


def test_a_chat_template_is_applied_once(lm, folder):
    tokenizer = pickle.loads(pickle.dumps(lm.tokenizer))
    tokenizer.chat_template = (
        "<bos>{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    text = ModelText(name="m", tokenizer=tokenizer, vocab_size=264, bos_id=257, eos_ids=(258,))
    task = load_task(f"lm_eval:{write_task(folder, 'chat', **GENERATE | {'doc_to_text': 'answer'})}")
    for prompt in task.build(TaskOptions(prompt="chat"), text):
        assert (prompt.token_ids[0], prompt.token_ids.count(257), prompt.token_ids[-1]) == (257, 1, ord(":"))
    with pytest.raises(InputError, match="has no chat template"):
        task.build(TaskOptions(prompt="chat"), lm.text)
    with pytest.raises(UsageError, match="did you mean chat"):
        task.build(TaskOptions(prompt="chta"), lm.text)


@pytest.mark.parametrize(
    ("fields", "suffix", "kind", "message"),
    [
        ({"output_type": "loglikelihood_rolling", "doc_to_target": "answer", "doc_to_text": ""}, "", InputError,
         "measures perplexity"),
        (CHOOSE, "#accuracy", UsageError, "unknown lm-eval metric"),
        (CHOOSE, "#acc,strict", UsageError, "unknown lm-eval filter"),
        (GENERATE | {"metric_list": [{"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}]}, "",
         InputError, "none of bleu is right (1) or wrong (0)"),
        (GENERATE | {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": False}]}, "",
         InputError, "none of exact_match is right"),
        (GENERATE | {"unsafe_code": True}, "", InputError, "runs code that the model writes"),
        (CHOOSE | {"doc_to_text": "{{nothing.there}}"}, "", InputError, "UndefinedError"),
        (CHOOSE | {"dataset_kwargs": {"data_files": {"test": "/nowhere.jsonl"}}}, "", InputError, "/nowhere.jsonl"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_or_judged_is_one_line_before_decoding(lm, folder, fields, suffix, kind, message):
    path = write_task(folder, "refused", **fields)
    with pytest.raises(kind, match=re.escape(message)) as caught:
        load_task(f"lm_eval:{path}{suffix}").build(TaskOptions(), lm.text)
    assert "\n" not in str(caught.value)


def test_unknown_tasks_are_named_with_the_nearest(monkeypatch):
    arc = Path(lm_eval.tasks.__file__).parent / "arc"
    shipped = TaskManager(include_path=str(arc), include_defaults=False)
    monkeypatch.setattr("driftgate.evals.tasks.harness_source._index", lambda: shipped)
    with pytest.raises(UsageError, match=r"unknown task 'lm_eval:arc_eazy'; did you mean .*arc_easy") as caught:
        load_task("lm_eval:arc_eazy")
    assert len(str(caught.value)) < 200
    with pytest.raises(UsageError, match=r"unknown task 'lm_eval:0'; `lm-eval ls tasks` lists them"):
        load_task("lm_eval:0")
    with pytest.raises(InputError, match=r"task file nothing.yaml does not exist"):
        load_task("lm_eval:nothing.yaml")


OFFLINE = """
import sys
from driftgate.evals.tasks import load_task
from driftgate.evals.tasks.item_task import ModelText, TaskOptions
try:
    load_task("lm_eval:" + sys.argv[1]).build(TaskOptions(), ModelText(name="m", tokenizer=None, vocab_size=2))
except Exception as error:
    print(error.exit_code, error)
print("torch" in sys.modules)
"""


def test_data_that_is_not_here_is_one_line_where_there_is_no_network(folder, tmp_path):
    path = write_task(folder, "far", **CHOOSE | {"dataset_path": "nobody/nothing", "dataset_kwargs": {}})
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", OFFLINE, path], capture_output=True, text=True, env=environment, timeout=120
    )
    (line, *_) = done.stdout.splitlines()
    assert re.match(
        rf"4 task lm_eval:{re.escape(path)}: ConnectionError: .*nobody/nothing.*; fetch its data once", line
    )
    assert done.stderr == ""
