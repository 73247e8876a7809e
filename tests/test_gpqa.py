"""The task gpqa: prompts that are right token by token, scores that are a function of the answers alone."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from question_cases import BOS, CHAT, CHAT_THINKS, CHAT_WITH_BOS, ODD, make_tokenizer, write_gpqa
from scipy.stats import chisquare

from driftgate.accuracy.answers import AnswerRunner
from driftgate.accuracy.models import load_model
from driftgate.accuracy.policy_file import DEFAULT, load_policy
from driftgate.accuracy.prompts import Decoded, Prompt
from driftgate.errors import DriftgateError, EmptyRunError, InputError, UsageError
from driftgate.evals.checkpoints import find_checkpoint
from driftgate.evals.suite import load_suite
from driftgate.evals.tasks import load_task
from driftgate.evals.tasks.gpqa import COLUMNS, GpqaTask, order_of
from driftgate.evals.tasks.item_task import ModelText, TaskOptions
from driftgate.evals.tasks.question_file import load_questions
from driftgate.evals.tasks.wordings import WORDINGS, find_letters
from driftgate.kernels.contract import Backend

TASK = GpqaTask()
SPACE_LETTERS = tuple((" ", letter) for letter in "ABCD")
BRACKET_LETTERS = tuple(("(", letter) for letter in "ABCD")


def describe(tokenizer: Any = None, *, name: str = "some-model", context: int | None = None) -> ModelText:
    tokenizer = make_tokenizer() if tokenizer is None else tokenizer
    return ModelText(
        name=name,
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        context=context,
        bos_id=tokenizer.bos_token_id,
        eos_ids=(tokenizer.eos_token_id,),
    )


@pytest.fixture(scope="module")
def plain() -> ModelText:
    return describe()


def ask(text: ModelText, **options: Any) -> list[Prompt]:
    return TASK.build(TaskOptions(**options), text)


def words(text: ModelText, prompt: Prompt) -> str:
    return text.tokenizer.decode(prompt.token_ids)


def decode(prompts: list[Prompt], **answers: Any) -> list[Decoded]:
    return [Decoded(item_id=p.item_id, repeat=p.repeat, **answers) for p in prompts]


# ---- wordings ----------------------------------------------------------------------------------------------------


def test_wordings_are_those_of_the_benchmarks_letter_by_letter():
    filled = {
        (name, mode): WORDINGS[name].fill("Why {A}?", ["1", "2", "3", "4"], mode=mode)
        for name in WORDINGS
        for mode in ("loglikelihood", "generate")
    }
    simple = (
        "Answer the following multiple choice question. The last line of your response should be of the following "
        "format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering."
        "\n\nWhy {A}?\n\nA) 1\nB) 2\nC) 3\nD) 4"
    )
    lm_eval = "What is the correct answer to this question:Why {A}?\nChoices:\n(A) 1\n(B) 2\n(C) 3\n(D) 4\n"
    short = "Why {A}?\nA) 1\nB) 2\nC) 3\nD) 4\nAnswer:"
    assert filled == {
        ("simple-evals", "loglikelihood"): simple,
        ("simple-evals", "generate"): simple,
        ("lm-eval", "loglikelihood"): lm_eval + "Answer:",
        ("lm-eval", "generate"): lm_eval + "Let's think step by step: ",
        ("short", "loglikelihood"): short,
        ("short", "generate"): short,
    }


@pytest.mark.parametrize(
    ("mode", "chat", "name", "expected"),
    [
        ("loglikelihood", None, "some-model", "lm-eval"),
        ("loglikelihood", CHAT, "some-model", "simple-evals"),
        ("generate", None, "some-model", "simple-evals"),
        ("generate", CHAT, "some-model", "simple-evals"),
        ("loglikelihood", None, "tiny-gdn", "short"),
        ("generate", None, "tiny-gdn", "short"),
    ],
)
def test_the_wording_that_is_taken_when_none_is_named(mode, chat, name, expected):
    prompts = ask(describe(make_tokenizer(chat=chat), name=name), mode=mode, repeats=1)
    assert {p.detail.wording for p in prompts} == {expected}


def test_an_unknown_wording_is_a_usage_error(plain):
    with pytest.raises(UsageError, match="unknown wording 'simple-eval'; did you mean simple-evals"):
        ask(plain, prompt="simple-eval")


def test_row_18_a_prompt_holds_every_cell_verbatim(plain, tmp_path):
    data = str(write_gpqa(tmp_path / "q.csv"))
    for prompt, (_, question, choices) in zip(ask(plain, data=data, prompt="short"), ODD, strict=True):
        asked = [choices[i] for i in prompt.detail.order]
        lines = "".join(f"\n{letter}) {choice}" for letter, choice in zip("ABCD", asked, strict=True))
        assert words(plain, prompt) == f"{question}{lines}\nAnswer: "


# ---- tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["loglikelihood", "generate"])
@pytest.mark.parametrize(
    ("add_bos", "chat", "n_bos"),
    [
        (False, None, 0),
        (True, None, 1),
        (False, CHAT, 0),
        (True, CHAT, 1),
        (False, CHAT_WITH_BOS, 1),
        (True, CHAT_WITH_BOS, 1),
    ],
)
def test_row_12_there_is_one_bos_where_there_is_any(add_bos, chat, n_bos, mode):
    text = describe(make_tokenizer(add_bos=add_bos, chat=chat))
    prompt = ask(text, mode=mode, repeats=1)[0]
    assert prompt.token_ids.count(text.bos_id) == n_bos
    assert (prompt.token_ids[0] == text.bos_id) == bool(n_bos)
    after = words(text, prompt).removeprefix(BOS)
    assert after.startswith("<|user|>" if chat else ("What is" if mode == "loglikelihood" else "Answer the"))


def test_row_12_an_embedded_checkpoint_is_asked_as_it_was_trained():
    """Its streams begin with BOS, which its tokenizer does not add by itself."""
    prompt = ask(describe(name="tiny-gdn"))[0]
    assert prompt.token_ids[0] == describe().bos_id and prompt.token_ids.count(describe().bos_id) == 1


def test_a_chat_template_is_applied_with_the_turn_of_the_assistant():
    text = describe(make_tokenizer(chat=CHAT))
    assert words(text, ask(text, mode="generate", repeats=1)[0]).endswith("\n<|assistant|>")
    assert words(text, ask(text, mode="loglikelihood")[0]).endswith("\n<|assistant|>Answer: ")


def test_thinking_that_the_template_opens_is_closed_for_scored_letters_and_told_for_generated_answers():
    text = describe(make_tokenizer(chat=CHAT_THINKS))
    assert words(text, ask(text)[0]).endswith("<|assistant|><think>\n\n</think>\n\nAnswer: ")
    generated = ask(text, mode="generate", repeats=1)
    assert words(text, generated[0]).endswith("<|assistant|><think>\n")
    said = tuple(text.tokenizer("Answer: A</think>Answer: B", add_special_tokens=False)["input_ids"])
    items = TASK.score(generated, {"p": decode(generated, token_ids=said)}, text)
    assert set(items["answer"]) == {"B"}


def test_a_template_that_takes_no_user_turn_is_one_line():
    text = describe(make_tokenizer(chat="{{ raise_exception('no system turn') }}"))
    with pytest.raises(InputError, match="the chat template of the tokenizer cannot be used: no system turn"):
        ask(text)


@pytest.mark.parametrize(
    ("wording", "merges", "end", "tokens"),
    [
        ("short", (), "Answer: ", ["A", "B", "C", "D"]),
        ("short", SPACE_LETTERS, "Answer:", [" A", " B", " C", " D"]),
        ("lm-eval", (), "Answer: (", ["A", "B", "C", "D"]),
        ("lm-eval", BRACKET_LETTERS, "Answer: ", ["(A", "(B", "(C", "(D"]),
        ("simple-evals", SPACE_LETTERS, "\n\nAnswer:", [" A", " B", " C", " D"]),
    ],
)
def test_letters_are_the_tokens_that_the_tokenizer_writes_after_the_prompt(wording, merges, end, tokens):
    text = describe(make_tokenizer(merges=merges))
    for prompt in ask(text, prompt=wording)[:3]:
        assert words(text, prompt).endswith(end)
        assert [text.tokenizer.decode([i]) for i in prompt.choices] == tokens


@pytest.mark.parametrize("merges", [(SPACE_LETTERS[0],), ((":", " "), (": ", "B"))])
def test_a_letter_that_is_not_one_token_is_refused(merges):
    with pytest.raises(InputError, match=r"the letter [AB] is not one token after .*use another --prompt") as caught:
        ask(describe(make_tokenizer(merges=merges)), prompt="short")
    assert "\n" not in str(caught.value)


def test_a_letter_beyond_the_vocabulary_is_refused():
    tokenizer = make_tokenizer()
    with pytest.raises(InputError, match="the letter A is not one token"):
        find_letters(tokenizer, "Answer:", bos=None, vocab_size=tokenizer.convert_tokens_to_ids("A"))


def test_letters_that_share_a_token_are_refused():
    def unknown(text: str, **_options: Any) -> dict[str, list[int]]:
        return {"input_ids": [0] * len(text)}

    with pytest.raises(InputError, match="the letter A is not one token"):
        find_letters(unknown, "Answer:", bos=None, vocab_size=9)


def test_a_model_without_a_tokenizer_is_one_line(plain):
    with pytest.raises(InputError, match="some-model has no tokenizer"):
        ask(dataclasses.replace(plain, tokenizer=None))


# ---- options -----------------------------------------------------------------------------------------------------


def test_what_is_left_out(plain):
    scored, generated = ask(plain)[0], ask(plain, mode="generate")
    assert (scored.max_new_tokens, scored.prefill, len(scored.choices)) == (0, 1, 4)
    assert len(generated) == 16 * len(load_questions())
    assert {(p.max_new_tokens, p.temperature, p.stop_ids) for p in generated} == {(2048, 0.6, plain.eos_ids)}
    assert all(p.prefill == len(p.token_ids) and not p.choices for p in generated)
    assert {p.max_new_tokens for p in ask(describe(name="tiny-gdn"), mode="generate", repeats=1)} == {64}


def test_what_is_chosen(plain):
    chosen = ask(plain, mode="generate", repeats=3, temperature=0.0, max_new_tokens=7, prefill=5)
    assert {(p.max_new_tokens, p.temperature, p.prefill) for p in chosen} == {(7, 0.0, 5)}
    assert [p.repeat for p in chosen[:4]] == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"repeats": 0}, EmptyRunError, "repeats 0"),
        ({"max_new_tokens": 0}, UsageError, "max-new-tokens 0"),
        ({"temperature": -0.1}, UsageError, "temperature -0.1"),
        ({"temperature": math.nan}, UsageError, "temperature nan"),
    ],
)
def test_options_outside_their_range_are_one_line(plain, options, kind, message):
    with pytest.raises(kind, match=message):
        ask(plain, mode="generate", **options)


def test_row_20_a_prompt_that_does_not_fit_is_an_error_that_names_both_numbers(plain):
    longest = max(len(p.token_ids) for p in ask(plain, mode="generate", repeats=1))
    narrow = dataclasses.replace(plain, context=longest + 10)
    with pytest.raises(InputError, match=rf"{longest} tokens of prompt and 11 after it exceed .* {longest + 10} pos"):
        ask(narrow, mode="generate", repeats=1, max_new_tokens=11)
    assert {p.max_new_tokens for p in ask(narrow, mode="generate", repeats=1)} == {10}, "what the context leaves"
    for mode in ("generate", "loglikelihood"):
        with pytest.raises(InputError, match=r"tokens of prompt and [01] after it exceed the model's 100 positions"):
            ask(dataclasses.replace(plain, context=100), mode=mode, repeats=1)


def test_row_26_a_missing_file_is_told_when_prompts_are_built(plain):
    with pytest.raises(DriftgateError, match=r"none\.csv does not exist"):
        ask(plain, data="none.csv")


# ---- order of the choices ----------------------------------------------------------------------------------------


def test_the_order_is_a_function_of_seed_item_and_repeat():
    assert order_of(3, "rec1", 2) == order_of(3, "rec1", 2)
    assert [order_of(0, "recA", r) for r in range(3)] == [(0, 3, 2, 1), (3, 0, 2, 1), (3, 0, 1, 2)]
    assert len({order_of(3, "rec1", r) for r in range(24)}) == 24, "another one in each repeat"
    assert order_of(3, "rec1", 24) == order_of(3, "rec1", 0)
    assert len({tuple(order_of(s, f"rec{i}", 0) for i in range(20)) for s in range(5)}) == 5


def test_the_order_depends_on_no_other_item_and_on_no_number_of_repeats(plain, tmp_path):
    few, many = (str(write_gpqa(tmp_path / f"{n}.csv", n=n)) for n in (3, 7))
    one = {(p.item_id, p.repeat): p for p in ask(plain, data=few, seed=5, repeats=2)}
    all_of = {(p.item_id, p.repeat): p for p in ask(plain, data=many, seed=5, repeats=4)}
    assert one.items() <= all_of.items()
    assert one != {(p.item_id, p.repeat): p for p in ask(plain, data=few, seed=6, repeats=2)}


def test_the_gold_letter_is_that_of_the_right_choice(plain, tmp_path):
    for prompt in ask(plain, data=str(write_gpqa(tmp_path / "q.csv")), prompt="short", repeats=4):
        right = next(choices[0] for record, _, choices in ODD if record == prompt.item_id)
        assert f"\n{prompt.detail.gold}) {right}\n" in words(plain, prompt)


@pytest.mark.parametrize("seed", [0, 1])
def test_row_17_gold_letters_are_near_uniform(plain, tmp_path, seed):
    prompts = ask(plain, data=str(write_gpqa(tmp_path / "q.csv", n=198)), seed=seed)
    counts = Counter(p.detail.gold for p in prompts)
    assert len(prompts) == 198 and chisquare([counts[letter] for letter in "ABCD"]).pvalue > 0.05


# ---- scores ------------------------------------------------------------------------------------------------------


def test_the_greatest_letter_answers_and_the_mass_is_their_sum(plain):
    prompts = ask(plain)[:4]
    probabilities = [[0.1, 0.4, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25], [1e-4, 1e-9, 2e-4, 1e-9], [0.1, 0.1, 0.1, 0.6]]
    logits = np.log(probabilities)
    answers = [
        Decoded(item_id=p.item_id, repeat=p.repeat, choice_logprobs=tuple(row))
        for p, row in zip(prompts, logits, strict=True)
    ]
    items = TASK.score(prompts, {"baseline": answers, "nvfp4/fp32@16": answers}, plain)
    assert list(items.columns) == list(COLUMNS)
    assert list(items["plan"]) == ["baseline"] * 4 + ["nvfp4/fp32@16"] * 4
    own = items[items["plan"] == "baseline"]
    assert list(own["answer"]) == ["B", "A", "C", "D"], "ties go to the lower token"
    assert list(own["correct"]) == [p.detail.gold == a for p, a in zip(prompts, "BACD", strict=True)]
    assert np.allclose(own["mass"], [0.8, 1.0, 0.0003, 0.9])
    assert set(own["n_tokens"]) == {1} and set(own["parse_reason"]) == {"ok"} and not own["capped"].any()
    assert set(own["stream"]) == {-1} and own["stream"].dtype == np.int64 and own["correct"].dtype == bool


def test_ties_go_to_the_lower_token_id_not_to_the_first_letter(plain):
    prompt = dataclasses.replace(ask(plain)[0], choices=(9, 7, 8, 6))
    items = TASK.score([prompt], {"p": decode([prompt], choice_logprobs=(-1.0, -1.0, -2.0, -3.0))}, plain)
    assert list(items["answer"]) == ["B"]


def test_generated_answers_are_read_and_counted(plain):
    prompts = ask(plain, mode="generate", repeats=1)[:5]
    said = ["steps\nAnswer: C", "no idea", "Answer: A or B", "Answer: B\n and so", "<think>Answer: A"]
    capped = [False, False, False, True, True]
    answers = [
        Decoded(
            item_id=p.item_id,
            repeat=0,
            token_ids=(*plain.tokenizer(s, add_special_tokens=False)["input_ids"], *(() if c else plain.eos_ids)),
            capped=c,
        )
        for p, s, c in zip(prompts, said, capped, strict=True)
    ]
    items = TASK.score(prompts, {"p": answers}, plain)
    assert list(items["parse_reason"]) == ["ok", "none", "ambiguous", "ok", "truncated"]
    assert [None if a != a else a for a in items["answer"]] == ["C", None, None, "B", None]
    assert list(items["capped"]) == capped
    assert list(items["n_tokens"]) == [len(a.token_ids) for a in answers]
    assert items["mass"].isna().all() and not items["correct"][[1, 2, 4]].any()


@pytest.mark.parametrize("mode", ["loglikelihood", "generate"])
def test_logits_that_are_not_finite_are_no_answer(plain, mode):
    prompts = ask(plain, mode=mode, repeats=1)[:1]
    ids = tuple(plain.tokenizer(f"Answer: {prompts[0].detail.gold}", add_special_tokens=False)["input_ids"])
    came = {"finite": False, "token_ids": ids, "choice_logprobs": (-1.0,) * 4}
    for answer in [came, {"choice_logprobs": (math.nan, -1.0, -1.0, -1.0)}][: 2 if mode == "loglikelihood" else 1]:
        items = TASK.score(prompts, {"p": decode(prompts, **answer)}, plain)
        assert list(items["parse_reason"]) == ["nonfinite"] and not items["correct"].any()
        assert items["answer"].isna().all() and items["mass"].isna().all()


def test_answers_in_another_order_than_the_prompts_are_not_scored(plain):
    prompts = ask(plain)[:2]
    with pytest.raises(ValueError, match="answers"):
        TASK.score(prompts, {"p": decode(prompts[::-1], choice_logprobs=(-1.0,) * 4)}, plain)


def test_no_text_of_a_question_enters_the_items(plain, tmp_path):
    prompts = ask(plain, data=str(write_gpqa(tmp_path / "q.csv")))
    items = TASK.score(prompts, {"p": decode(prompts, choice_logprobs=(-1.0, -2.0, -3.0, -4.0))}, plain)
    text = items.to_csv()
    assert not any(cell in text for _, question, choices in ODD for cell in (question, *choices) if len(cell) > 4)


# ---- the suite, and the whole path -------------------------------------------------------------------------------


def test_the_suite_and_its_policy():
    suite = load_suite("gpqa")
    assert {str(plan): role.value for plan, role in suite.roles().items()} == {
        "nvfp4@16": "control",
        "nvfp4/fp32@16": "candidate",
        "nvfp4/fp16@16": "candidate",
        "nvfp4/fp8@16": "candidate",
        "fp8/fp16@16": "candidate",
    }
    assert (suite.tasks, suite.mode, suite.repeats, suite.policy) == (("gpqa",), "generate", 16, "gpqa")
    policy = load_policy(DEFAULT.with_name(f"{suite.policy}.yaml"))
    (loss,) = [c for c in policy.checks if c.check == "task_loss"]
    assert policy.name == suite.policy
    assert (loss.margin, loss.tasks) == (2, ("gpqa",))
    assert isinstance(load_task("gpqa"), GpqaTask)


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, ModelText]:
    folder = find_checkpoint("tiny-gdn")
    assert folder is not None
    model = load_model(folder, name="tiny-gdn", device="cpu")
    text = ModelText(
        name="tiny-gdn", tokenizer=model.tokenizer, vocab_size=model.vocab_size, bos_id=257, eos_ids=(258,)
    )
    return model, text


@pytest.mark.parametrize("mode", ["loglikelihood", "generate"])
def test_four_items_on_the_embedded_checkpoint(tiny, tmp_path, mode):
    model, text = tiny
    data = str(write_gpqa(tmp_path / "q.csv", n=4))
    prompts = ask(text, data=data, mode=mode, repeats=1, max_new_tokens=None if mode == "loglikelihood" else 20)
    plans = load_suite("gpqa").changed(plans=[{"plan": "nvfp4/fp32@16"}]).named_plans()
    runner = AnswerRunner(model.model, plans, batch=4, backend=Backend.TORCH, vocab_size=model.vocab_size, seed=0)
    items = TASK.score(prompts, runner.run(prompts), text)
    assert Counter(items["plan"]) == {"baseline": 4, "nvfp4/fp32@16": 4}
    if mode == "loglikelihood":
        assert items["mass"].between(0, 1).all() and set(items["parse_reason"]) == {"ok"}
        assert set(items["answer"]) <= set("ABCD")
        assert (items.groupby("item_id")["mass"].nunique() == 2).all(), "the plan's copy was read"
    else:
        assert items["n_tokens"].between(1, 20).all() and items["mass"].isna().all()
        assert (items["capped"] == (items["n_tokens"] == 20)).all()


def test_choices_that_read_the_same_are_counted_by_item(plain, tmp_path):
    same = tmp_path / "q.jsonl"
    rows = [
        {"question": "One?", "options": ["a", "b", "c", "d"], "answer": "A"},
        {"question": "Two?", "options": ["a", "a", "c", "d"], "answer": "C"},
    ]
    same.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = load_task("gpqa")
    assert task.describe(ask(plain, data=str(same), repeats=3)) == {"equal_choices": 1}
    assert task.describe(ask(plain)) == {}
