"""Long generation: gold from a plan's own text, accuracy by position, divergence and repetition."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from task_cases import STREAM_COLUMNS, decode, embedded_text, within, zero_state

from driftgate.accuracy.prompts import Decoded, Prompt
from driftgate.errors import EmptyRunError, UsageError
from driftgate.evals.suite import load_suite
from driftgate.evals.tasks import load_task
from driftgate.evals.tasks.free_running import free_running, share_repeated
from driftgate.evals.tasks.item_task import TaskOptions
from driftgate.evals.tasks.longgen import LonggenTask, accuracy_by_position, place_questions
from driftgate.evals.tasks.stream_text import count_events, last_statement, leading_signs

SIGNS = "+-*/"
TASK = LonggenTask(n_items=6)


def build(task=TASK, **options):
    return task.build(TaskOptions(**options), embedded_text())


def score(prompts, answers, plan="baseline"):
    return TASK.score(prompts, {plan: answers}, embedded_text())


def simulate(prompts, events, answer):
    """Generations with the forced tokens in place, ``events(rng)`` around them, and ``answer(rng, counts)``."""
    decoded = []
    for number, prompt in enumerate(prompts):
        rng = np.random.default_rng(number)
        free = list("".join(events(rng) for _ in range(prompt.max_new_tokens)))
        written, forced = [], dict(prompt.forced)
        answers = {question.index: question for question in prompt.detail}
        for index in range(prompt.max_new_tokens):
            if index in forced:
                written.append(chr(forced[index]))
            elif index in answers:
                before = bytes(prompt.token_ids[1:]).decode() + "".join(written)
                written.append(answer(rng, tally(before, answers[index].key)))
            else:
                written.append(free[index])
        tokens = tuple("".join(written).encode())
        decoded.append(Decoded(item_id=prompt.item_id, repeat=prompt.repeat, token_ids=tokens, capped=True))
    return decoded


def tally(text, key):
    """An independent count: walk the text by hand."""
    counts, i = Counter(), 0
    while i < len(text) - 1:
        if text[i] == "?" and text[i + 1].isalpha():
            i += 3 if i + 2 < len(text) and text[i + 2] != "?" else 2
        elif text[i] == key and text[i + 1] in SIGNS:
            counts[text[i + 1]] += 1
            i += 2
        else:
            i += 1
    return counts


def random_event(rng):
    return "abcdefghijklmnopqrstuvwxyz"[rng.integers(26)] + SIGNS[rng.integers(4)] + "?Q7."[: rng.integers(5)]


def leader(rng, counts):
    return max(SIGNS, key=lambda sign: counts[sign])


def test_the_catalogue_builds_it():
    task = load_task("longgen")
    prompts = build(task)
    assert len(prompts) == task.n_items == 16
    assert (prompts[0].max_new_tokens, len(prompts[0].detail), prompts[0].prefill) == (512, 8, 512)


def test_the_suite_asks_for_it():
    suite = load_suite("longgen")
    assert suite.item_tasks == ("longgen",)
    assert suite.task_options().max_new_tokens == 4096


@pytest.mark.parametrize("length", [16, 63, 64, 512, 5000, 131_072])
def test_questions_lie_evenly_up_to_the_end(length):
    places = place_questions(length)
    assert len(places) == min(max(length // 64, 1), 64)
    assert len(set(np.diff(places))) <= 1 and places[0] >= 15
    assert length - (places[1] - places[0] if len(places) > 1 else 1) < places[-1] + 1 <= length


def test_each_question_is_fed_and_leads_back():
    for prompt in build(max_new_tokens=256):
        text = ["."] * 256
        for index, token in prompt.forced:
            text[index] = chr(token)
        for question in prompt.detail:
            assert "".join(text[question.index - 2 : question.index]) == "?" + question.key
            assert "".join(text[question.index + 1 : question.index + 5]) in (".:;<", "")
            assert question.index not in dict(prompt.forced)
        groups = {question.key for question in prompt.detail}
        assert len(groups) == 4
        assert all(len(re.findall(rf"{key}[-+*/]", bytes(prompt.token_ids[1:]).decode())) >= 6 for key in groups)


def test_the_leading_sign_of_the_own_text_is_right():
    prompts = build(max_new_tokens=640)
    answers = simulate(prompts, random_event, leader)
    items = score(prompts, answers)
    assert items["correct"].all()
    assert set(items.columns) >= STREAM_COLUMNS | {"position", "margin"}
    assert len(items) == 6 * 10 and items["stream"].nunique() == 6 and items["item_id"].is_unique
    assert (items["position"] == 512 + items["n_tokens"] - 1).all()
    for row in items.to_dict("records"):
        number, question = map(int, row["item_id"].split("-")[-2:])
        prompt, asked = prompts[number], prompts[number].detail[question]
        written = bytes(answers[number].token_ids).decode()[: asked.index - 2]
        counts = tally(bytes(prompt.token_ids[1:]).decode() + written, asked.key)
        ranked = [*sorted(counts.values(), reverse=True), 0, 0]
        assert row["margin"] == ranked[0] - ranked[1]
        letters = {asked.letters[SIGNS.index(sign)] for sign in SIGNS if counts[sign] == ranked[0]}
        assert set(row["gold"]) == letters and row["answer"] in letters


def test_a_sign_that_does_not_lead_is_wrong_and_other_tokens_are_no_answer():
    prompts = build(max_new_tokens=256)
    worst = score(prompts, simulate(prompts, random_event, lambda rng, counts: min(SIGNS, key=counts.__getitem__)))
    assert not worst["correct"].any() and set(worst["parse_reason"]) == {"ok"}
    other = score(prompts, simulate(prompts, random_event, lambda rng, counts: "x"))
    assert not other["correct"].any() and set(other["parse_reason"]) == {"none"}
    hidden = [replace(d, finite=False) for d in simulate(prompts, random_event, leader)]
    assert set(score(prompts, hidden)["parse_reason"]) == {"nonfinite"}


def test_what_a_plan_writes_moves_its_gold():
    """A plan that wrote one sign forty times is asked about its own text, not about the baseline's."""
    prompts = build(max_new_tokens=512)
    late = prompts[0].detail[-1]
    prompt_sign = leader(None, tally(bytes(prompts[0].token_ids[1:]).decode(), late.key))
    other = SIGNS[SIGNS.index(prompt_sign) - 1]
    answers = simulate(prompts[:1], lambda rng: late.key + other, lambda rng, counts: other)
    last = score(prompts[:1], answers).iloc[-1]
    assert last["gold"] == late.letters[SIGNS.index(other)] and last["correct"] and last["margin"] > 20


def test_random_answers_score_chance():
    task = LonggenTask(n_items=40)
    prompts = build(task, max_new_tokens=640)
    items = score(prompts, simulate(prompts, random_event, lambda rng, counts: SIGNS[rng.integers(4)]))
    expected = (items["gold"].str.len() / 4).mean()
    assert 0.25 <= expected < 0.28  # ties, where several signs are right
    assert within(items["correct"].mean(), expected, len(items))
    for letter in "ABCD":
        assert within((items["answer"] == letter).mean(), 0.25, len(items))


def test_accuracy_is_told_by_position():
    prompts = build(max_new_tokens=1024)
    right = score(prompts, simulate(prompts, random_event, leader))
    wrong = right.assign(plan="other", correct=right["correct"] & (right["position"] < 1024))
    frame = accuracy_by_position(pd.concat([right, wrong], ignore_index=True), n_bins=4)
    assert frame["plan"].tolist() == ["baseline"] * 4 + ["other"] * 4
    assert frame["accuracy"].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert (frame["n"] == 6 * 4).all() and (frame["excluded"] == 0).all()
    assert frame["low"].tolist()[:4] == sorted(frame["low"][:4]) and frame["high"].max() == right["position"].max()
    few = accuracy_by_position(right, n_bins=4, least_margin=3)
    assert (few["n"] + few["excluded"] == 24).all() and few["excluded"].sum() == (right["margin"] < 3).sum() > 0


def test_events_are_read_as_pairs_and_questions_hold_none():
    assert count_events("a+b-") == [(2, "a", "+"), (4, "b", "-")]
    assert count_events("?a+b-") == [(5, "b", "-")]
    assert count_events("?a?b+c/") == [(7, "c", "/")]
    assert count_events("?:u+aa*") == [(4, "u", "+"), (7, "a", "*")]
    assert count_events("+a Q+?") == []


def test_statements_and_leaders():
    assert last_statement("?a+?b-?a*a/?a.", "a") == "*"
    assert last_statement("a+b-", "a") is None
    assert leading_signs([3, 1, 3, 0]) == ("+*", 0)
    assert leading_signs([0, 5, 3, 0]) == ("-", 2)


def generation(tokens, **fields):
    return Decoded(item_id="i", repeat=0, token_ids=tuple(tokens), **fields)


def test_repetition_is_the_share_of_repeated_n_grams():
    assert share_repeated(range(40), n=4) == 0.0
    assert share_repeated([1, 2] * 20, n=4) == pytest.approx(1 - 2 / 37)
    assert share_repeated([1, 2, 3], n=4) is None
    # a token that was fed splits the text: no n-gram spans it
    assert share_repeated([1, 2, 3, 4, 9, 1, 2, 3, 4], apart=[4], n=4) == 0.5
    assert share_repeated([1, 2, 3, 9, 1, 2, 3], apart=[3], n=4) is None


def test_free_running_figures():
    prompts = [Prompt(item_id="i", token_ids=(1,), max_new_tokens=40)] * 3
    same = [generation(range(40))] * 3
    apart = [
        generation([*range(20), *([7] * 20)], first_divergence=20, tie_margin=0.5),
        generation(range(40)),
        generation(range(30), first_divergence=4, tie_margin=0.1),
    ]
    found = free_running(prompts, {"baseline": same, "p": apart})
    assert found["baseline"] == {
        "first_divergence": {"median": None, "min": None, "share": 0.0, "tie_margin_median": None},
        "repetition_rate": 0.0, "mean_length": 40.0,
    }  # fmt: skip
    divergence = found["p"]["first_divergence"]
    assert divergence == {
        "median": 20.0, "min": 4, "share": pytest.approx(2 / 3), "tie_margin_median": pytest.approx(0.3),
    }  # fmt: skip
    assert found["p"]["repetition_rate"] == pytest.approx((1 - 21 / 25) / 3)
    assert found["p"]["mean_length"] == pytest.approx(110 / 3)


def test_the_median_of_divergences_counts_those_that_never_came():
    prompts = [Prompt(item_id="i", token_ids=(1,), max_new_tokens=40)] * 5
    answers = [generation(range(40), first_divergence=i, tie_margin=0.0) for i in (3, 9)] + [generation(range(40))] * 3
    assert free_running(prompts, {"p": answers})["p"]["first_divergence"]["median"] is None
    assert free_running(prompts[:3], {"p": answers[:3]})["p"]["first_divergence"]["median"] == 9.0


def test_options_that_do_not_fit_are_named():
    with pytest.raises(UsageError, match="max-new-tokens 15"):
        build(max_new_tokens=15)
    with pytest.raises(EmptyRunError, match="repeats"):
        build(repeats=0)
    with pytest.raises(UsageError, match=r"longgen.*longer stream"):
        build(LonggenTask(prompt_tokens=64, groups=20))


def test_the_embedded_checkpoint_answers_from_its_state_and_writes_on(monkeypatch):
    """FP32, 16 generations of 512 tokens: 0.95 right. Without its state it guesses and writes something else."""
    prompts = build(LonggenTask(n_items=16), max_new_tokens=128)
    answers = decode(prompts)["baseline"]
    items = score(prompts, answers)
    assert items["correct"].mean() >= 0.75 and set(items["parse_reason"]) == {"ok"}
    again = [bytes(t for t in d.token_ids[68:] if t < 128).decode() for d in answers]
    assert np.mean([len(count_events(text)) for text in again]) > 15  # of the 28 units after the first question
    with zero_state(monkeypatch):
        cleared = score(prompts, decode(prompts)["baseline"])
    assert cleared["correct"].mean() < 0.5
