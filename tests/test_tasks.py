"""The task streams: determinism, exact lengths, and gold answers recomputed from the text by an independent parse."""

import re
from collections import Counter

import numpy as np
import pytest

from driftgate.errors import UsageError
from driftgate.evals.tasks import TASKS, Question, load_task, make_streams
from driftgate.evals.tasks.base import order_choices
from driftgate.evals.tasks.streams import BOS, StreamLayout, generate_streams

BOTH = ("recall", "tracking")
PINNED = 'q+h-q+h-k/<=k+p*p*{|p+p/p+k*()k+k/<=k+p*p-k*_{p*_{|}!}!"k+k/k/k+p+k-p+p/k+p-p+k-p+[?p+?h-?q+?k+'
EVENT = re.compile(r"([a-z])([-+*/])")


def text_of(row: np.ndarray) -> str:
    assert row[0] == BOS
    return bytes(int(token) for token in row[1:]).decode("ascii")


def test_streams_repeat() -> None:
    one = make_streams(tasks=BOTH, n_sequences=3, length=768, seed=5)
    two = make_streams(tasks=BOTH, n_sequences=3, length=768, seed=5)
    assert np.array_equal(one.token_ids, two.token_ids)
    assert one.questions == two.questions


def test_other_seed_gives_other_streams() -> None:
    one = make_streams(tasks=BOTH, n_sequences=2, length=256, seed=5)
    two = make_streams(tasks=BOTH, n_sequences=2, length=256, seed=6)
    assert not np.array_equal(one.token_ids, two.token_ids)


def test_a_stream_does_not_depend_on_how_many_are_made() -> None:
    few = make_streams(tasks=BOTH, n_sequences=2, length=640, seed=9)
    many = make_streams(tasks=BOTH, n_sequences=7, length=640, seed=9)
    assert np.array_equal(few.token_ids, many.token_ids[:2])
    assert few.questions == many.questions[: len(few.questions)]


def test_tasks_share_their_streams() -> None:
    both = make_streams(tasks=BOTH, n_sequences=3, length=640, seed=1)
    only = make_streams(tasks=["tracking"], n_sequences=3, length=640, seed=1)
    assert np.array_equal(both.token_ids, only.token_ids)
    assert only.questions == tuple(q for q in both.questions if q.task == "tracking")


def test_the_bits_of_a_stream_are_pinned() -> None:
    """A change of these characters is a new version of the tasks: bump ``Task.version``."""
    streams = make_streams(tasks=BOTH, n_sequences=1, length=96, seed=0)
    assert text_of(streams.token_ids[0]) == PINNED


@pytest.mark.parametrize("length", [64, 65, 96, 127, 333, 640, 1536])
def test_length_is_exact_and_questions_come_last(length: int) -> None:
    streams = make_streams(tasks=BOTH, n_sequences=2, length=length, seed=3)
    assert streams.token_ids.shape == (2, length)
    assert streams.token_ids.dtype == np.int64
    assert streams.token_ids.max() == BOS
    for row in streams.token_ids:
        text = text_of(row)
        assert text.index("?") + 1 == streams.stream_positions
        assert re.fullmatch(r"(\?[a-z][-+*/])+", text[streams.stream_positions - 1 :])
    assert min(q.position for q in streams.questions) == streams.stream_positions + 1


@pytest.mark.parametrize("length", [96, 768, 1536])
def test_gold_follows_from_the_text(length: int) -> None:
    streams = make_streams(tasks=BOTH, n_sequences=4, length=length, seed=21)
    for question in streams.questions:
        text = text_of(streams.token_ids[question.sequence])
        body = text[: streams.stream_positions - 1]
        letter, answer = text[question.position - 1], text[question.position]
        assert text[question.position - 2] == "?"
        counts = Counter(sign for key, sign in EVENT.findall(body) if key == letter)
        ranked = counts.most_common()
        assert ranked[0][0] == answer == chr(question.choices[question.gold])
        if question.task == "recall":
            assert sum(counts.values()) == 2
            assert body.rindex(letter) < 2 * 2 * 12
        else:
            assert sum(counts.values()) >= 6
            assert len(ranked) == 1 or ranked[0][1] > ranked[1][1]


def test_letters_alone_tell_nothing() -> None:
    """Every group has the same number of events, so only letter and sign together are informative."""
    streams = make_streams(tasks=["tracking"], n_sequences=2, length=1536, seed=2)
    for row in range(2):
        body = text_of(streams.token_ids[row])[: streams.stream_positions - 1]
        asked = [chr(streams.token_ids[row, q.position]) for q in streams.questions if q.sequence == row]
        assert len({body.count(letter) for letter in asked}) == 1


def test_questions_are_well_formed() -> None:
    streams = make_streams(tasks=BOTH, n_sequences=8, length=1536, seed=4)
    ids = [question.item_id for question in streams.questions]
    assert len(set(ids)) == len(ids) == 8 * (12 + 14)
    assert all(len(set(question.choices)) == 4 for question in streams.questions)
    assert Counter(q.task for q in streams.questions) == {"recall": 96, "tracking": 112}


def test_gold_is_near_uniform() -> None:
    """Counts of 4 places among n items: sd = sqrt(n 3/16); the bound is 4.5 sd, 3e-5 for all four by chance."""
    streams = make_streams(tasks=BOTH, n_sequences=60, length=640, seed=8)
    n = len(streams.questions)
    counts = np.bincount([question.gold for question in streams.questions], minlength=4)
    assert np.abs(counts - n / 4).max() < 4.5 * np.sqrt(n * 3 / 16)


def test_answers_are_near_uniform() -> None:
    streams = make_streams(tasks=["tracking"], n_sequences=60, length=640, seed=8)
    answers = [question.choices[question.gold] for question in streams.questions]
    counts = np.unique(answers, return_counts=True)[1]
    assert np.abs(counts - len(answers) / 4).max() < 4.5 * np.sqrt(len(answers) * 3 / 16)


def test_order_of_choices_depends_on_seed_and_item_only() -> None:
    assert order_choices(1, "a", 43, (45, 42, 47)) == order_choices(1, "a", 43, (45, 42, 47))
    orders = {order_choices(seed, "a", 43, (45, 42, 47)) for seed in range(40)}
    assert len(orders) > 10


def test_late_groups_have_an_early_runner_up() -> None:
    layout = StreamLayout(length=1536, n_pairs=8, sign_pairs=True, n_recall=8, late_share=1.0, early_share=0.0)
    streams = generate_streams(layout, seed=3, indices=range(4))
    assert streams.late[streams.is_tracking].all()
    leads = 0
    for row, q in zip(*np.nonzero(streams.is_tracking), strict=True):
        body = text_of(streams.token_ids[row])[: layout.question_start - 1]
        letter = chr(streams.token_ids[row, streams.answer_positions[q] - 1])
        events = [sign for key, sign in EVENT.findall(body) if key == letter]
        early = Counter(events[: len(events) // 3]).most_common(1)[0][0]
        leads += early != chr(streams.answers[row, q])
    assert leads > 0.8 * streams.is_tracking.sum()


def test_digit_pairs_and_rewrites_give_the_latest_digit() -> None:
    layout = StreamLayout(length=1024, rewrite_share=0.1)
    streams = generate_streams(layout, seed=6, indices=range(3))
    for row, q in zip(*np.nonzero(~streams.is_tracking), strict=True):
        body = text_of(streams.token_ids[row])[: layout.question_start - 1]
        letter = chr(streams.token_ids[row, streams.answer_positions[q] - 1])
        assert re.findall(rf"{letter}(\d)", body)[-1] == chr(streams.answers[row, q])


def test_unknown_task_names_the_near_one() -> None:
    with pytest.raises(UsageError, match="tracking"):
        load_task("trackin")
    with pytest.raises(UsageError, match="unknown task"):
        make_streams(tasks=["nothing"], n_sequences=1, length=640, seed=0)


def test_too_short_a_stream_is_refused() -> None:
    with pytest.raises(UsageError, match="64"):
        make_streams(tasks=BOTH, n_sequences=1, length=63, seed=0)


def test_a_layout_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="longer stream or fewer groups"):
        StreamLayout(length=200, n_groups=16)


def test_a_question_needs_four_distinct_choices() -> None:
    with pytest.raises(ValueError, match="four distinct"):
        Question("x", 0, 3, (43, 43, 45, 47), 0, "tracking")


def test_catalogue_holds_both_tasks() -> None:
    assert set(TASKS) == set(BOTH)
    assert all(load_task(name).chance == 0.25 for name in BOTH)
