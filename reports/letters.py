"""Which letters were answered: whether a model, or a plan, prefers one whatever the question.

Notable: counts come from the records and the items of the run. Gold letters stand beside them, since the order of the
choices decides what a model without a preference would answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from driftgate.accuracy.records import RunData
from driftgate.reports.numbers import NA, format_number

__all__ = ["LETTERS_HEADER", "list_letters", "note_letters"]

LETTERS = ("A", "B", "C", "D")
LETTERS_HEADER = ("Task", "Whose", *LETTERS, "p of a uniform choice")
EXPECTED_MIN = 5.0
"""Least expected count for which the chi-square distribution holds [Cochran 1954]."""
_NOTE = (
    "How often each letter was right (gold) and was answered; answers without a letter are left out. The choices are "
    "asked in an order drawn anew for each item and repeat, so that the letters of a model that looks at the choices "
    f"are nearly uniform. p: chi-square test, n/a below {EXPECTED_MIN * len(LETTERS):.0f} letters; a small one means "
    "that a letter is preferred."
)


def list_letters(run: RunData) -> list[list[str]]:
    """Rows of the table, task by task: gold, baseline, plans; none where no task was answered with letters.

    Several plans whose counts are the baseline's share a row.
    """
    rows = []
    plans = run.results.plans
    for task in dict.fromkeys(task for plan in plans.values() for task in plan.tasks):
        found = {name: plan.tasks[task] for name, plan in plans.items() if task in plan.tasks}
        baseline = next((record.baseline_letters for record in found.values() if record.baseline_letters), None)
        if baseline is None:
            continue
        counts = {"gold": _count_gold(run, task), run.results.baseline: baseline}
        own = {name: record.letters for name, record in found.items() if record.letters is not None}
        same = [name for name, by in own.items() if by == baseline]
        if len(same) > 1:
            own = {name: by for name, by in own.items() if name not in same}
            own[f"{len(same)} plans as the baseline"] = baseline
        rows += [
            [task, whose, *(str(by.get(letter, 0)) for letter in LETTERS), _tell_p(by)]
            for whose, by in (counts | own).items()
        ]
    return rows


def note_letters(run: RunData) -> str:
    """What the table shows, and how many items have two choices that read the same, where the run says so."""
    told = [
        f" {task}: {described['equal_choices']} items have two choices that read the same, so that another letter may "
        "be as right as the gold one."
        for task, described in run.manifest.tasks.items()
        if described.get("equal_choices")
    ]
    return _NOTE + "".join(told)


def _count_gold(run: RunData, task: str) -> dict[str, int]:
    items = run.items
    gold = items[(items["plan"] == run.results.baseline) & (items["task"] == task)]["gold"]
    return {letter: int((gold == letter).sum()) for letter in LETTERS}


def _tell_p(counts: Mapping[str, int]) -> str:
    p = find_p(counts)
    return NA if p is None else format_number(p, digits=2)


def find_p(counts: Mapping[str, int]) -> float | None:
    """Chi-square p of four counts against equal ones, by the closed form for 3 degrees of freedom; None for few."""
    expected = sum(counts.values()) / len(LETTERS)
    if expected < EXPECTED_MIN:
        return None
    x = sum((counts.get(letter, 0) - expected) ** 2 for letter in LETTERS) / expected
    return math.erfc(math.sqrt(x / 2)) + math.sqrt(2 * x / math.pi) * math.exp(-x / 2)
