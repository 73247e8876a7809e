"""Scratchpads: prompts and stops, what is read out of a generation, chance, and the embedded checkpoint itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from task_cases import STREAM_COLUMNS, answer_with, decode, embedded_text, within, zero_state

from driftgate.errors import EmptyRunError, InputError, UsageError
from driftgate.evals.tasks import load_task
from driftgate.evals.tasks.item_task import ModelText, TaskOptions
from driftgate.evals.tasks.scratchpad import ScratchpadTask

STREAM = TaskOptions(prompt="stream", repeats=1)
TEXT = TaskOptions(prompt="text", repeats=1)
SIGNS = "+-*/"


def score(prompts, answers, task=None):
    return (task or ScratchpadTask()).score(prompts, {"baseline": answers}, embedded_text())


def sign_of(question, letter):
    return SIGNS[question.letters.index(letter)]


@pytest.fixture(scope="module")
def prompts():
    return ScratchpadTask(n_items=400).build(STREAM, embedded_text())


def test_the_catalogue_builds_it():
    task = load_task("scratchpad")
    assert isinstance(task, ScratchpadTask)
    assert len(task.build(TaskOptions(), embedded_text())) == 2 * task.n_items


def test_prompts_are_streams_up_to_their_first_question_mark(prompts):
    for prompt in prompts[:20]:
        text = bytes(prompt.token_ids[1:]).decode()
        assert prompt.token_ids[0] == embedded_text().bos_id
        assert text.count("?") == 1 and text.endswith("?")
        assert prompt.prefill == len(prompt.token_ids)
        counts = [text.count(prompt.detail.key + sign) for sign in SIGNS]
        assert counts.index(max(counts)) == SIGNS.index(sign_of(prompt.detail, prompt.detail.gold))
        assert sorted(prompt.detail.letters) == list("ABCD")


def test_a_block_of_questions_stops_at_the_first_token_that_it_cannot_hold(prompts):
    stops = set(prompts[0].stop_ids)
    assert stops.isdisjoint(b"?abz+-*/Q7")
    assert {ord("."), 7, 200, 257, 258} <= stops


def test_gold_letters_are_uniform(prompts):
    for letter in "ABCD":
        assert within(np.mean([p.detail.gold == letter for p in prompts]), 0.25, len(prompts))


def test_repeats_ask_the_same_in_another_order():
    prompts = ScratchpadTask(n_items=2).build(replace(STREAM, repeats=24), embedded_text())
    of_first = [p for p in prompts if p.item_id == prompts[0].item_id]
    assert [p.repeat for p in of_first] == list(range(24))
    assert len({p.detail.letters for p in of_first}) == 24
    assert len({(p.token_ids, p.detail.key, sign_of(p.detail, p.detail.gold)) for p in of_first}) == 1


def test_the_last_statement_counts(prompts):
    def write(prompt):
        right = sign_of(prompt.detail, prompt.detail.gold)
        wrong = SIGNS[SIGNS.index(right) - 1]
        return f"{prompt.detail.key}{wrong}?Q7?{prompt.detail.key}{right}.{prompt.detail.key}{wrong}"

    items = score(prompts, answer_with(prompts, write))
    assert items["correct"].all() and set(items["parse_reason"]) == {"ok"}
    assert set(items.columns) >= STREAM_COLUMNS and items["stream"].dtype == np.int64


def test_an_event_behind_the_block_is_no_statement(prompts):
    items = score(prompts, answer_with(prompts, lambda p: f"Q7{p.detail.key}+."))
    assert set(items["parse_reason"]) == {"none"} and not items["correct"].any() and items["answer"].isna().all()


def test_a_key_that_never_came_is_truncated_at_the_cap(prompts):
    silent = answer_with(prompts, lambda p: "Q7?Q7?", capped=True)
    assert set(score(prompts, silent)["parse_reason"]) == {"truncated"}
    said = answer_with(prompts, lambda p: f"{p.detail.key}{sign_of(p.detail, p.detail.gold)}?", capped=True)
    items = score(prompts, said)
    assert set(items["parse_reason"]) == {"ok"} and items["capped"].all() and items["correct"].all()


def test_a_logit_that_is_not_finite_is_no_answer(prompts):
    right = answer_with(prompts, lambda p: p.detail.key + sign_of(p.detail, p.detail.gold), finite=False)
    items = score(prompts, right)
    assert set(items["parse_reason"]) == {"nonfinite"} and not items["correct"].any()


def test_random_statements_score_chance(prompts):
    rng = np.random.default_rng(3)
    items = score(prompts, answer_with(prompts, lambda p: p.detail.key + SIGNS[rng.integers(4)]))
    assert within(items["correct"].mean(), ScratchpadTask.chance, len(items))


def test_text_items_are_read_by_their_answer_statement():
    from driftgate.evals.tasks.scratchpad_text import make_item

    prompts = ScratchpadTask(n_items=300).build(TEXT, embedded_text())
    items = {p.item_id: make_item(0, i, length=240) for i, p in enumerate(prompts)}
    assert bytes(prompts[7].token_ids[1:]).decode() == items[prompts[7].item_id].prompt
    assert prompts[0].stop_ids == embedded_text().eos_ids == (258,)
    assert all(len(item.completion) < prompts[0].max_new_tokens for item in items.values())
    perfect = score(prompts, answer_with(prompts, lambda p: items[p.item_id].completion))
    assert perfect["correct"].all()
    cut = score(prompts, answer_with(prompts, lambda p: items[p.item_id].scratchpad, capped=True))
    assert set(cut["parse_reason"]) == {"truncated"}
    rng = np.random.default_rng(3)
    random = score(prompts, answer_with(prompts, lambda p: f"Answer: {'ABCD'[rng.integers(4)]}\n"))
    assert within(random["correct"].mean(), ScratchpadTask.chance, len(prompts))


class Tokenizer:
    """Bytes as tokens; its settings name a layout."""

    def __init__(self, **settings):
        self.init_kwargs = settings

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return list(text.encode())


def text_with(tokenizer):
    return ModelText(name="some", tokenizer=tokenizer, vocab_size=264, bos_id=257, eos_ids=(258,))


@pytest.mark.parametrize(
    ("settings", "prompt", "layout"),
    [
        ({}, None, "stream"),
        ({"scratchpad_layout": "text"}, None, "text"),
        ({"scratchpad_layout": "text"}, "stream", "stream"),
    ],
)
def test_the_checkpoint_names_its_layout_and_the_command_line_another(settings, prompt, layout):
    built = ScratchpadTask(n_items=1).build(TaskOptions(prompt=prompt), text_with(Tokenizer(**settings)))
    assert {p.detail.layout for p in built} == {layout}


def test_options_that_do_not_fit_are_named():
    with pytest.raises(UsageError, match="stream"):
        ScratchpadTask().build(TaskOptions(prompt="streams"), embedded_text())
    with pytest.raises(EmptyRunError, match="repeats"):
        ScratchpadTask().build(TaskOptions(repeats=0), embedded_text())
    with pytest.raises(UsageError, match="max-new-tokens 0"):
        ScratchpadTask().build(TaskOptions(max_new_tokens=0), embedded_text())
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        ScratchpadTask().build(TEXT, text_with(None))
    pairs = Tokenizer()
    pairs.encode = lambda text, *, add_special_tokens: [1, *text.encode()]
    with pytest.raises(InputError, match="no token of its own"):
        ScratchpadTask().build(STREAM, text_with(pairs))


def test_the_embedded_checkpoint_is_above_chance_and_below_certainty_and_answers_from_its_state(monkeypatch):
    """FP32, 32 answers: 0.81 (64 answers: 0.80, with seed 1 too). Without its state it leaves at once: 0.00."""
    prompts = ScratchpadTask(n_items=16).build(replace(STREAM, repeats=2), embedded_text())
    items = score(prompts, decode(prompts)["baseline"])
    assert 0.6 <= items["correct"].mean() <= 0.95
    assert 0 < items["capped"].mean() < 1
    with zero_state(monkeypatch):
        cleared = score(prompts[::2], decode(prompts[::2])["baseline"])
    assert cleared["correct"].mean() <= 0.35
