"""From logits of the four choices to answers, items and paired records."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from driftgate.accuracy.records import ITEM_COLUMNS
from driftgate.evals.scoring import score_items
from driftgate.evals.tasks import Question, Streams

PLAN = "nvfp4/fp32@16"
CHOICES = (45, 42, 47, 43)


def make_streams(n: int, *, tasks: tuple[str, ...] = ("recall",), choices=CHOICES, gold: int = 2) -> Streams:
    questions = tuple(
        Question(f"{tasks[i % len(tasks)]}-0-{i // 4}-{i}", i // 4, 60 + i % 4, choices, gold, tasks[i % len(tasks)])
        for i in range(n)
    )
    return Streams(
        token_ids=np.zeros((max(1, -(-n // 4)), 64), dtype=np.int64), questions=questions, stream_positions=59
    )


def score(baseline: list[list[float]], plan: list[list[float]], **layout):
    result = SimpleNamespace(probes={"baseline": np.array(baseline), PLAN: np.array(plan)})
    return score_items(make_streams(len(baseline), **layout), result, [PLAN])


def answers(items, plan: str = PLAN) -> list:
    return items[items["plan"] == plan]["answer"].tolist()


RIGHT, WRONG = [0.0, 0.0, 1.0, 0.5], [0.0, 1.0, 0.0, 0.5]


@pytest.mark.parametrize(("place", "letter"), list(enumerate("ABCD")))
def test_the_answer_is_the_choice_with_the_greatest_logit(place, letter):
    scores = [-3.0, -3.0, -3.0, -3.0]
    scores[place] = -1.0
    items, _ = score([RIGHT], [scores])
    assert answers(items) == [letter]
    assert items[items["plan"] == PLAN]["correct"].tolist() == [letter == "C"]


@pytest.mark.parametrize(
    ("scores", "letter"),
    [
        ([1.0, 1.0, 1.0, 1.0], "B"),  # tokens 45 42 47 43: 42 is the lowest
        ([1.0, 0.0, 1.0, 1.0], "D"),
        ([1.0, 0.0, 1.0, 0.0], "A"),
        ([0.0, -0.0, -1.0, -1.0], "B"),
    ],
)
def test_ties_go_to_the_lower_token_id_and_not_to_the_first_letter(scores, letter):
    items, _ = score([RIGHT], [scores])
    assert answers(items) == [letter]


def test_the_smallest_difference_of_float32_logits_decides():
    above = float(np.nextafter(np.float32(20.0), np.float32(21.0)))
    items, _ = score([RIGHT], [[above, 20.0, 0.0, 0.0]])
    assert answers(items) == ["A"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_is_no_answer(bad):
    items, records = score([RIGHT, RIGHT], [[bad, 0.0, 9.0, 0.0], RIGHT])
    row = items[(items["plan"] == PLAN) & (items["item_id"] == "recall-0-0-0")].iloc[0]
    assert pd.isna(row["answer"])
    assert (row["parse_reason"], bool(row["correct"])) == ("nonfinite", False)
    record = records[PLAN]["recall"]
    assert (record.n, record.lost, record.unparsed, record.accuracy) == (2, 1, 1, 0.5)


def test_the_baseline_comes_first_and_every_question_is_in_it_once():
    items, _ = score([RIGHT, WRONG, RIGHT], [WRONG, RIGHT, RIGHT])
    assert items["plan"].tolist() == ["baseline"] * 3 + [PLAN] * 3
    assert items[items["plan"] == "baseline"]["correct"].tolist() == [True, False, True]
    for _, rows in items.groupby("plan"):
        assert rows["item_id"].tolist() == ["recall-0-0-0", "recall-0-0-1", "recall-0-0-2"]


def test_columns_are_those_of_the_stored_frame_and_the_stream():
    items, _ = score([RIGHT], [RIGHT])
    assert tuple(items.columns) == (*ITEM_COLUMNS, "stream")
    row = items.iloc[0].to_dict()
    assert row == {
        "plan": "baseline", "task": "recall", "item_id": "recall-0-0-0", "repeat": 0, "answer": "C", "gold": "C",
        "correct": True, "n_tokens": 1, "capped": False, "parse_reason": "ok", "stream": 0,
    }  # fmt: skip


def test_records_count_flips_of_each_task_apart():
    """Questions alternate between the tasks; the plan loses the first recall and gains the second tracking."""
    baseline, plan = [RIGHT, RIGHT, RIGHT, WRONG, RIGHT, RIGHT], [WRONG, RIGHT, RIGHT, RIGHT, RIGHT, RIGHT]
    _, records = score(baseline, plan, tasks=("recall", "tracking"))
    recall, tracking = records[PLAN]["recall"], records[PLAN]["tracking"]
    assert (recall.n, recall.lost, recall.gained) == (3, 1, 0)
    assert (tracking.n, tracking.lost, tracking.gained) == (3, 0, 1)
    assert recall.delta == pytest.approx(-1 / 3)


def test_questions_of_one_stream_share_its_number():
    items, _ = score([RIGHT] * 6, [RIGHT] * 6)
    assert items[items["plan"] == PLAN]["stream"].tolist() == [0, 0, 0, 0, 1, 1]


def test_no_questions_leave_an_empty_frame_with_its_columns_and_no_records():
    result = SimpleNamespace(probes={"baseline": np.empty((0, 4)), PLAN: np.empty((0, 4))})
    items, records = score_items(make_streams(0), result, [PLAN])
    assert len(items) == 0 and tuple(items.columns) == (*ITEM_COLUMNS, "stream")
    assert records == {PLAN: {}}
