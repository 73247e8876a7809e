"""Scratchpad items are what their prompts say, at every length."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from driftgate.evals.tasks.scratchpad_text import LETTERS, LONGEST, SHORTEST, make_item


@pytest.mark.parametrize("length", [SHORTEST, 60, 200, 1000, LONGEST])
def test_the_completion_follows_from_the_prompt(length: int) -> None:
    for index in range(40):
        item = make_item(11, index, length=length)
        assert abs(len(item.completion) - length) <= 20
        assert len(item.completion.encode()) == len(item.completion)
        registers, rounds, asked, choices = (
            item.prompt.removeprefix("Q: ").split(";")[0],
            *re.findall(r"; (\d\d) rounds; ([a-h])\? (.*)\n", item.prompt)[0],
        )
        values = {r[0]: (int(r[1]), int(r[3:])) for r in registers.split()}
        lines = item.scratchpad.splitlines()
        for done, line in enumerate(lines[:-1], start=1):
            number, state = line.split(":")
            assert int(number) == int(rounds) - done + 1
            assert state == "".join(f"{n}{(start + done * step) % 10}" for n, (start, step) in values.items())
        assert len(lines) - 1 == int(rounds) == item.n_rounds
        offered = dict(choice.split(")") for choice in choices.split())
        assert list(offered) == list(LETTERS) and len(set(offered.values())) == 4
        start, step = values[asked]
        right = (start + int(rounds) * step) % 10
        assert offered[item.gold] == str(right) == str(item.value)
        assert lines[-1] == f"={asked}{right}{item.gold}"
        assert item.completion.endswith(f"\nAnswer: {item.gold}\n")


def test_items_depend_on_seed_and_index_and_use_all_letters() -> None:
    assert make_item(1, 5, length=90) == make_item(1, 5, length=90)
    assert len({make_item(seed, index, length=90).prompt for seed in (1, 2) for index in range(20)}) == 40
    counts = Counter(make_item(1, index, length=90).gold for index in range(400))
    assert set(counts) == set(LETTERS) and min(counts.values()) > 70


@pytest.mark.parametrize("length", [SHORTEST - 1, LONGEST + 1])
def test_a_length_out_of_range_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="length: expected 25 to 2000"):
        make_item(1, 1, length=length)
