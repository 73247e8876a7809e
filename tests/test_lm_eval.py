"""lm-eval's tasks on plans: tokens and numbers against lm-eval's own HFLM, tasks from local files end to end."""

from __future__ import annotations

import json
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
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from driftgate.accuracy.answers import AnswerRunner
from driftgate.accuracy.items import paired_record
from driftgate.accuracy.prompts import Decoded
from driftgate.errors import InputError, UsageError
from driftgate.evals.lm_eval import DriftgateLM, paired_items
from driftgate.evals.lm_requests import encode, encode_pair, make_prompts, read_responses
from driftgate.evals.tasks import load_task, make_streams
from driftgate.evals.tasks.item_task import ModelText, TaskOptions

DOCS = Path(__file__).resolve().parents[1] / "docs" / "lm-eval.md"
SIGNS = ["+", "-", "*", "/"]
PLAN = "nvfp4@16"
PAIRS = [
    ("<bos>o-n+?o", "-"), ("o-n+", "?o-"), ("o-n+  \n", "o"), ("", "o-n"), ("", "<bos>o-"), (" \n", "o"),
]  # fmt: skip
TEXTS = ["<bos>o-n+?o-", "o-n+?o-p*q", "ö"]


def ask(kind: str, *arguments: object, doc: int = 0) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("t", doc, 1))


@pytest.fixture(scope="module")
def lm() -> DriftgateLM:
    return DriftgateLM("tiny-gdn", PLAN, batch=16, device="cpu")


@pytest.fixture(scope="module")
def hf(lm):
    """lm-eval's own model on the same weights, one request at a time."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=lm.loaded.model, tokenizer=lm.tokenizer, batch_size=1, device="cpu")


@pytest.fixture
def text(lm) -> ModelText:
    return lm.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task files: a recall question of each of six streams, to be chosen among, generated and scored."""
    folder = tmp_path_factory.mktemp("tasks")
    streams = make_streams(tasks=["recall"], n_sequences=6, length=64, seed=5)
    docs, seen = [], set()
    for q in streams.questions:
        if q.sequence in seen:
            continue
        seen.add(q.sequence)
        words = [chr(t) if t < 256 else "<bos>" for t in streams.token_ids[q.sequence, : q.position + 1]]
        docs.append({"stream": "".join(words), "choices": [chr(c) for c in q.choices], "gold": q.gold})
        docs[-1]["answer"] = docs[-1]["choices"][q.gold]
    (folder / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    return folder


def write_task(folder: Path, name: str, **fields: Any) -> str:
    """A task file over the documents; returns its path."""
    common = {
        "task": name, "dataset_path": "json", "test_split": "test", "target_delimiter": "",
        "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}, "cache_dir": str(folder / "cache")},
        "doc_to_text": "stream", "metadata": {"version": 2.5},
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(common | fields))
    return str(path)


CHOOSE = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"}
GENERATE = {
    "output_type": "generate_until", "doc_to_target": "answer",
    "generation_kwargs": {"until": ["?"], "max_gen_toks": 4},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip


def decode(lm: DriftgateLM, prompts: list) -> dict[str, list[Decoded]]:
    runner = AnswerRunner(lm.loaded.model, lm._plans, batch=16, backend=lm.backend, vocab_size=264, seed=0)
    return runner.run(prompts)


def evaluate(lm: DriftgateLM, path: str) -> dict[str, Any]:
    return simple_evaluate(model=lm, tasks=[path], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0)


# Tokens


@pytest.mark.parametrize(("context", "continuation"), PAIRS[:4])
def test_a_pair_has_the_tokens_that_lm_eval_gives_it(text, hf, context, continuation):
    seen = []
    hf_tokens = hf._loglikelihood_tokens
    hf._loglikelihood_tokens = lambda requests, **_: seen.extend(requests) or [(0.0, False)]
    try:
        hf.loglikelihood([ask("loglikelihood", context, continuation)])
    finally:
        hf._loglikelihood_tokens = hf_tokens
    ((_, start, rest),) = seen
    assert encode_pair(text, context, continuation) == (start, rest)


def test_a_context_without_tokens_is_bos(text):
    assert encode_pair(text, "", "<bos>o-") == ([257], [111, 45])
    assert encode_pair(text, " \n", "o") == ([257], [32, 10, 111])


@pytest.fixture
def adds_bos(text) -> ModelText:
    """The same tokenizer, putting BOS before every text by itself, as most do."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = pickle.loads(pickle.dumps(text.tokenizer))
    post = TemplateProcessing(single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 257)])
    tokenizer.backend_tokenizer.post_processor = post
    assert tokenizer.encode("o") == [257, 111]
    return ModelText(name="m", tokenizer=tokenizer, vocab_size=264, context=8, bos_id=257, eos_ids=(258,))


@pytest.mark.parametrize("context", ["o-n", "<bos>o-n"])
def test_bos_stands_once(adds_bos, context):
    instances = [
        ask("loglikelihood", context, "+"),
        ask("generate_until", context, {"max_gen_toks": 2}),
        ask("loglikelihood_rolling", context),
        ask("loglikelihood", "", context),
    ]
    for prompt in make_prompts(instances, options=TaskOptions(), text=adds_bos):
        tokens = [*prompt.token_ids, *prompt.continuation]
        assert (tokens[0], tokens.count(257)) == (257, 1)
    assert encode(adds_bos, "o", special=False) == [111]


def test_windows_of_a_long_text_score_every_token_once_and_fit(adds_bos):
    string = "abcdefghijklmnopqrstu"
    prompts = make_prompts([ask("loglikelihood_rolling", string)], options=TaskOptions(), text=adds_bos)
    assert "".join(chr(t) for p in prompts for t in p.continuation) == string
    assert len(prompts) == 3
    assert max(p.n_tokens for p in prompts) == adds_bos.context


@pytest.mark.parametrize(
    ("prefill", "kind", "expected"),
    [(None, "loglikelihood", 1), (None, "generate_until", 5), ("prompt", "loglikelihood", 5), (3, "generate_until", 3)],
)
def test_how_much_is_prefilled(text, prefill, kind, expected):
    instance = ask(kind, "abcde", "f" if kind == "loglikelihood" else {})
    (prompt,) = make_prompts([instance], options=TaskOptions(prefill=prefill), text=text)
    assert (len(prompt.token_ids), prompt.prefill) == (5, expected)


def test_prompts_of_a_document_share_an_item_and_survive_pickling(text):
    instances = [ask("loglikelihood", "a", "b"), ask("loglikelihood", "a", "c"), ask("loglikelihood", "a", "b", doc=1)]
    prompts = make_prompts(instances, options=TaskOptions(), text=text)
    assert [(p.item_id, p.repeat) for p in prompts] == [("t/0", 0), ("t/0", 1), ("t/1", 0)]
    assert pickle.loads(pickle.dumps(prompts)) == prompts


def test_a_continuation_without_tokens_is_refused(text):
    with pytest.raises(InputError, match=r"t/0: the continuation '' has no tokens"):
        make_prompts([ask("loglikelihood", "a", "")], options=TaskOptions(), text=text)


# Numbers


def test_log_likelihoods_are_those_of_lm_eval(lm, hf):
    requests = [ask("loglikelihood", *pair, doc=i) for i, pair in enumerate(PAIRS[:4])]
    for own, other in zip(lm.baseline.loglikelihood(requests), hf.loglikelihood(requests), strict=True):
        assert own[0] == pytest.approx(other[0], abs=1e-3)
        assert own[1] == other[1]
    requests = [ask("loglikelihood_rolling", string, doc=i) for i, string in enumerate(TEXTS[1:])]
    assert lm.baseline.loglikelihood_rolling(requests) == pytest.approx(hf.loglikelihood_rolling(requests), abs=1e-3)


def test_greedy_texts_are_those_of_lm_eval(lm, hf):
    arguments = [{"until": until, "max_gen_toks": 9} for until in (["/"], ["y/y"], "h", [])]
    requests = [ask("generate_until", "A1B2A", a, doc=i) for i, a in enumerate(arguments)]
    texts = lm.baseline.generate_until(requests)
    assert texts == hf.generate_until(requests)
    assert texts == ["8y", "8", "8y/y/y/y/", "8y/y/y/y/"]


def test_answers_come_in_the_order_of_the_requests(lm):
    requests = [ask("loglikelihood", "<bos>o-n+" + "p*" * (i % 5), sign, doc=i) for i in range(9) for sign in SIGNS]
    forward = lm.loglikelihood(requests)
    documents = [[requests[i] for i in range(4 * d, 4 * d + 4)] for d in (5, 2, 8, 0, 1, 7, 3, 6, 4)]
    backward = iter(lm.loglikelihood([r for own in documents for r in own]))
    by_document = {own[0].doc_id: [next(backward) for _ in own] for own in documents}
    assert forward == [answer for d in range(9) for answer in by_document[d]]
    assert len({likelihood for likelihood, _ in forward}) >= 20


def test_a_plan_reads_its_own_state(lm):
    requests = [ask("loglikelihood", "<bos>o-n+" + "p*q/" * 10, sign) for sign in SIGNS]
    plan, baseline = lm.loglikelihood(requests), lm.baseline.loglikelihood(requests)
    assert all(a[0] != b[0] for a, b in zip(plan, baseline, strict=True))


def test_plan_and_baseline_come_from_one_decode(lm, monkeypatch):
    calls = []
    run = AnswerRunner.run
    monkeypatch.setattr(AnswerRunner, "run", lambda self, *a, **k: calls.append(1) or run(self, *a, **k))
    requests = [ask("loglikelihood", "<bos>o-n+z", sign) for sign in SIGNS]
    lm.loglikelihood(requests)
    lm.baseline.loglikelihood(requests)
    assert calls == [1]


def test_the_same_request_twice_is_sampled_twice(lm):
    request = ask("generate_until", "<bos>o-n+", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8})
    first, second = lm.generate_until([request, request])
    assert first != second
    assert lm.generate_until([request, request]) == [first, second]


def test_logits_that_are_not_finite_are_no_answer(lm, monkeypatch):
    answer = Decoded(item_id="t/0", repeat=0, logprobs=(float("nan"),), finite=False)
    monkeypatch.setattr(AnswerRunner, "run", lambda self, prompts, **_: {"baseline": [answer], PLAN: [answer]})
    with pytest.raises(InputError, match=r"plan nvfp4@16, t/0: logits with NaN"):
        lm.loglikelihood([ask("loglikelihood", "not finite", "+")])


# Generation


def generated(text: ModelText, tokens: str, until: list[str], *, stopped: bool) -> tuple[Any, int, bool]:
    instance = ask("generate_until", "a", {"until": until, "max_gen_toks": 99})
    prompts = make_prompts([instance], options=TaskOptions(), text=text)
    ids = tuple(tokens.encode()) if not stopped else (*tokens.encode(), 258)
    decoded = [Decoded(item_id="t/0", repeat=0, token_ids=ids, capped=not stopped)]
    response = read_responses(prompts, decoded, text)[0]
    return response.value, response.n_tokens, response.capped


def test_a_text_ends_at_its_first_stop_and_what_follows_does_not_count(text):
    assert generated(text, "abc\n\nde##f", ["##", "\n\n"], stopped=False) == ("abc", 5, False)
    assert generated(text, "abc", ["##"], stopped=False) == ("abc", 3, True)
    assert generated(text, "abc", ["##"], stopped=True) == ("abc", 4, False)
    assert generated(text, "äb##", ["##"], stopped=False) == ("äb", 5, False)


def test_a_stop_of_one_token_ends_the_decoding(text):
    instance = ask("generate_until", "a", {"until": ["\n", "##", ""]})
    (prompt,) = make_prompts([instance], options=TaskOptions(), text=text)
    assert (prompt.stop_ids, prompt.max_new_tokens, prompt.temperature) == ((258, 10), 256, 0.0)


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ({"do_sample": True}, {}, 1.0),
        ({"do_sample": True, "temperature": 0.5}, {}, 0.5),
        ({"do_sample": False, "temperature": 0.5, "top_p": 0.9}, {}, 0.0),
        ({"temperature": 0.5}, {}, 0.5),
        ({"do_sample": True, "top_p": 0.9}, {"temperature": 0.0}, 0.0),
        ({"temperature": 0.5, "top_p": 1.0, "top_k": 0, "num_beams": 1}, {"temperature": 0.7}, 0.7),
    ],
)
def test_temperature(text, arguments, options, expected):
    (prompt,) = make_prompts([ask("generate_until", "a", arguments)], options=TaskOptions(**options), text=text)
    assert prompt.temperature == expected


@pytest.mark.parametrize(
    "arguments", [{"do_sample": True, "top_p": 0.9}, {"num_beams": 4}, {"repetition_penalty": 1.1}, {"shine": 1}]
)
def test_what_would_change_the_text_is_refused_not_ignored(text, arguments):
    name = list(arguments)[-1]
    with pytest.raises(InputError, match=rf"t/0: generation_kwargs {name}: .* is not available"):
        make_prompts([ask("generate_until", "a", arguments)], options=TaskOptions(), text=text)


def test_nothing_is_cut_off(lm):
    too_long = ask("generate_until", "o-n+", {"max_gen_toks": 262144})
    with pytest.raises(InputError, match=r"4 tokens of prompt and 262144 after it exceed the model's 262144 positions"):
        lm.generate_until([too_long])


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"model": "tiny-gnd"}, UsageError, "did you mean tiny-gdn"),
        ({"model": "./nowhere"}, InputError, "model folder ./nowhere does not exist"),
        ({"plan": "nvfp5@16"}, UsageError, "nvfp5"),
        ({"backend": "cuda"}, UsageError, "unknown backend 'cuda'"),
        ({"backend": "triton", "device": "cpu"}, UsageError, "backend triton needs a GPU"),
        ({"dtype": "fp8"}, UsageError, "unknown dtype 'fp8'"),
        ({"batch": 0}, UsageError, "batch 0"),
        ({"prefill": "all"}, UsageError, "prefill 'all': expected none, prompt, or a number"),
    ],
)
def test_what_does_not_fit_is_one_line(arguments, kind, message):
    with pytest.raises(kind, match=re.escape(message)) as caught:
        DriftgateLM(**{"model": "tiny-gdn", **arguments})
    assert "\n" not in str(caught.value)


# Tasks


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


def test_samples_that_do_not_decide_are_refused():
    sample = {"doc_id": 3, "filter": "none", "metrics": ["acc"], "acc": 0.5}
    with pytest.raises(InputError, match=r"baseline: acc of t/3 is 0.5, neither right nor wrong; it has acc"):
        paired_items({"baseline": {"samples": {"t": [sample]}}}, task="t", metric="acc")
    with pytest.raises(InputError, match=r"baseline: no samples of task u; call simple_evaluate with log_samples=True"):
        paired_items({"baseline": {"samples": {"t": [sample]}}}, task="u", metric="acc")
    with pytest.raises(InputError, match=r"baseline: no samples of task t went through filter strict"):
        paired_items({"baseline": {"samples": {"t": [sample]}}}, task="t", metric="acc", filter_name="strict")


def test_the_documented_example(tmp_path, monkeypatch, capsys):
    import datasets

    blocks = dict(re.findall(r"```(yaml|json|python)\n(.*?)```", DOCS.read_text("utf-8"), flags=re.DOTALL))
    (tmp_path / "signs.yaml").write_text(blocks["yaml"])
    (tmp_path / "signs.jsonl").write_text(blocks["json"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    exec(compile(blocks["python"], str(DOCS), "exec"), {})
    n, lost, gained, p = capsys.readouterr().out.split()[-4:]
    assert (n, float(p)) == ("2", 1.0)
    assert int(lost) == int(gained) == 0
