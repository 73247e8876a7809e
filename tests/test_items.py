"""Pairs of answers: the plan's beside the baseline's, item by item."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from scipy import stats

from driftgate.accuracy.items import compare_items, letter_bias, paired_record
from driftgate.accuracy.records import ITEM_COLUMNS
from driftgate.errors import EmptyRunError

PLAN, TASK = "nvfp4@16", "recall"


def rows(plan: str, answers: str, *, task: str = TASK, repeat: int = 0, gold: str = "A") -> pd.DataFrame:
    """Items in order, one answer letter each; ``-`` is an answer that could not be read."""
    return pd.DataFrame(
        {
            "plan": plan,
            "task": task,
            "item_id": [f"item-{i}" for i in range(len(answers))],
            "repeat": repeat,
            "answer": [None if a == "-" else a for a in answers],
            "gold": gold,
            "correct": [a == gold for a in answers],
            "n_tokens": 1,
            "capped": False,
            "parse_reason": ["none" if a == "-" else "ok" for a in answers],
        }
    )[list(ITEM_COLUMNS)]


def both(baseline: str, plan: str, **options) -> pd.DataFrame:
    return pd.concat([rows("baseline", baseline, **options), rows(PLAN, plan, **options)], ignore_index=True)


def test_lost_and_gained_are_counted():
    record = paired_record(both("AAAAAABBBB", "AAABBBABBB"), PLAN, TASK)
    assert (record.n, record.repeats) == (10, 1)
    assert (record.accuracy, record.baseline_accuracy) == (0.4, 0.6)
    assert record.delta == pytest.approx(-0.2)
    assert (record.lost, record.gained) == (3, 1)
    assert record.p_value == pytest.approx(2 * (1 + 4) / 2**4)  # exact McNemar of 1 in 4
    assert record.ci_low < record.delta < record.ci_high


def test_equal_answers_have_no_difference():
    record = paired_record(both("AABA" * 10, "AABA" * 10), PLAN, TASK)
    assert (record.delta, record.lost, record.gained, record.p_value) == (0.0, 0, 0, 1.0)


def test_a_record_has_no_verdict_before_a_policy_spoke():
    assert paired_record(both("AAAAA", "AAAAB"), PLAN, TASK).verdict == "inconclusive"


def test_answers_are_paired_by_item_not_by_place():
    items = both("AAABBB", "AAABBB")
    shuffled = items.sample(frac=1, random_state=2)
    assert not shuffled.index.equals(items.index)
    record = paired_record(shuffled, PLAN, TASK)
    assert (record.lost, record.gained, record.accuracy) == (0, 0, 0.5)


def test_caps_and_unparsed_answers_are_those_of_the_plan():
    items = both("AAA-", "A--B")
    items.loc[(items["plan"] == PLAN) & (items["item_id"] == "item-3"), "capped"] = True
    items.loc[items["plan"] == "baseline", "capped"] = True
    record = paired_record(items, PLAN, TASK)
    assert (record.cap_hits, record.unparsed) == (1, 2)


def test_other_plans_and_tasks_do_not_enter():
    items = pd.concat(
        [both("AAAAA", "AAAAB"), rows("fp32@16", "BBBBB"), both("BBB", "AAA", task="tracking")], ignore_index=True
    )
    assert paired_record(items, PLAN, TASK) == paired_record(both("AAAAA", "AAAAB"), PLAN, TASK)
    assert paired_record(items, PLAN, "tracking").gained == 3


def test_repeats_are_averaged_within_an_item():
    items = pd.concat([both("AAAA", "AAAB"), both("AAAA", "AABA", repeat=1)], ignore_index=True)
    record = paired_record(items, PLAN, TASK)
    assert (record.n, record.repeats) == (4, 2)
    assert (record.accuracy, record.baseline_accuracy) == (0.75, 1.0)
    assert record.delta == pytest.approx(-0.25)
    assert record.lost == 2


def test_questions_of_one_stream_are_one_unit():
    """Ten streams of ten questions lose all or nothing: as independent items the interval would be far shorter."""
    items = both("A" * 100, "B" * 20 + "A" * 80)
    independent = compare_items(items, PLAN, TASK, margin=5.0)
    items["stream"] = items["item_id"].str.removeprefix("item-").astype(int) // 10
    clustered = compare_items(items, PLAN, TASK, margin=5.0)
    assert clustered.delta == independent.delta == pytest.approx(-0.2)
    assert clustered.ci_high - clustered.ci_low > 2 * (independent.ci_high - independent.ci_low)


def test_the_margin_decides_the_verdict_and_not_the_interval():
    items = both("A" * 200, "B" + "A" * 199)
    wide, narrow = (compare_items(items, PLAN, TASK, margin=m) for m in (5.0, 0.1))
    assert (wide.verdict, narrow.verdict != "pass") == ("pass", True)
    assert (wide.ci_low, wide.ci_high, wide.lost) == (narrow.ci_low, narrow.ci_high, narrow.lost)


def test_items_that_only_one_side_answered_are_refused():
    items = both("AAAAA", "AAAAB")
    with pytest.raises(ValueError, match=r"items of nvfp4@16 and the baseline on recall differ: 4, 5, 4 shared"):
        paired_record(items[:-1], PLAN, TASK)


def test_other_items_of_the_same_number_are_refused():
    items = both("AAAAA", "AAAAB")
    items.loc[(items["plan"] == PLAN) & (items["item_id"] == "item-0"), "item_id"] = "item-9"
    with pytest.raises(ValueError, match="differ: 5, 5, 4 shared"):
        paired_record(items, PLAN, TASK)


def test_an_item_answered_twice_is_refused():
    items = both("AAAAA", "AAAAB")
    with pytest.raises(ValueError, match="one-to-one"):
        paired_record(pd.concat([items, items[-1:]]), PLAN, TASK)


def test_a_figure_that_is_not_defined_is_null():
    record = paired_record(both("A", "A"), PLAN, TASK)
    for value in (record.ci_low, record.ci_high, record.p_value):
        assert value is None or math.isfinite(value)


def test_a_task_without_items_is_an_empty_run():
    with pytest.raises(EmptyRunError, match="zero items"):
        paired_record(both("AA", "AB"), PLAN, "gpqa")


def test_items_without_a_stream_are_units_of_their_own():
    items = both("A" * 60 + "B" * 40, "B" * 10 + "A" * 50 + "B" * 40)
    alone = compare_items(items, PLAN, TASK, margin=5.0)
    assert compare_items(items.assign(stream=-1), PLAN, TASK, margin=5.0) == alone
    assert compare_items(items.assign(stream=float("nan")), PLAN, TASK, margin=5.0) == alone
    assert alone.n_units == 100


def test_items_with_and_without_a_stream_may_stand_together():
    items = both("A" * 40, "A" * 38 + "BB")
    number = items["item_id"].str.removeprefix("item-").astype(int)
    items["stream"] = (number // 10).where(number < 30, -1)
    assert compare_items(items, PLAN, TASK, margin=5.0).n_units == 3 + 10


def test_both_sides_are_counted():
    items = both("AAA-", "A--B")
    items.loc[items["item_id"] == "item-0", "capped"] = True
    record = paired_record(items, PLAN, TASK, chance=0.5)
    assert (record.cap_hits, record.baseline_cap_hits, record.chance) == (1, 1, 0.5)
    assert (record.unparsed, record.baseline_unparsed) == (2, 1)
    assert record.accuracy_completed == 0.0  # item-3, the only one that was neither cut nor unread
    assert record.baseline_accuracy_completed == 1.0


def test_accuracy_of_no_completed_answer_is_null():
    record = paired_record(both("AA", "--"), PLAN, TASK)
    assert (record.accuracy, record.accuracy_completed, record.baseline_accuracy_completed) == (0.0, None, 1.0)


def test_letters_are_counted_where_answers_are_letters():
    record = paired_record(both("AABC-", "ABBD-"), PLAN, TASK)
    assert record.letters == {"A": 1, "B": 2, "C": 0, "D": 1}
    assert record.baseline_letters == {"A": 2, "B": 1, "C": 1, "D": 0}


@pytest.mark.parametrize(("answers", "gold"), [("ABE", "A"), ("AB7", "A"), ("---", "A"), ("AAA", "7")])
def test_other_answers_have_no_letters(answers, gold):
    items = both(answers, answers, gold=gold)
    record = paired_record(items, PLAN, TASK)
    assert (record.letters, record.baseline_letters, letter_bias(items, PLAN, TASK)) == (None, None, None)


def test_the_mass_on_the_choices_is_its_mean_over_the_plans_answers():
    items = both("AAAA", "AAAB")
    assert paired_record(items, PLAN, TASK).mass is None
    items["mass"] = [0.5] * 4 + [0.9, 0.8, 0.7, float("nan")]
    assert paired_record(items, PLAN, TASK).mass == pytest.approx(0.8)
    assert paired_record(items.assign(mass=float("nan")), PLAN, TASK).mass is None


def test_a_plan_that_prefers_a_letter_is_seen_and_gold_that_is_uniform_is_not():
    """Of 200 answers 120 are A; gold is 50 of each. chi-square by hand: (70² + 3 · 23.33²) / 50."""
    items = both("A" * 200, "A" * 120 + "BCD" * 26 + "BC")
    items["gold"] = list("ABCD" * 50) * 2
    found = letter_bias(items, PLAN, TASK)
    assert found.gold == dict.fromkeys("ABCD", 50)
    assert found.answers == {"A": 120, "B": 27, "C": 27, "D": 26}
    assert found.gold_p == 1.0
    by_hand = sum((count - 50) ** 2 for count in found.answers.values()) / 50
    assert found.answers_p == pytest.approx(stats.chi2.sf(by_hand, 3), rel=1e-9)
    assert found.answers_p < 1e-20


@pytest.mark.parametrize(("n", "known"), [(19, False), (20, True)])
def test_few_letters_have_no_test(n, known):
    found = letter_bias(both("A" * n, "A" * n), PLAN, TASK)
    assert (found.answers_p is not None, found.gold_p is not None) == (known, known)
