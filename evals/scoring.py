"""From logits at the questions, and from answers to prompts, to items and the paired record of each plan and task.

Notable: an answer is the choice with the greatest logit after the question token, read through the plan's decode step;
ties go to the lower token id. Questions of one stream share its state, so the stream is the unit of every interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from driftgate.accuracy.items import paired_record
from driftgate.accuracy.lockstep import BASELINE_NAME, LockstepResult
from driftgate.accuracy.records import TaskRecord
from driftgate.evals.tasks import Streams

if TYPE_CHECKING:
    from driftgate.evals.answering import Answers, BuiltTask

__all__ = ["join_items", "measure_generation", "score_answers", "score_items"]

LETTERS = "ABCD"


def score_items(
    streams: Streams, result: LockstepResult, plans: list[str]
) -> tuple[pd.DataFrame, dict[str, dict[str, TaskRecord]]]:
    """Items of the baseline and of every plan, and the paired record of each plan and task.

    Args:
        streams: questions in the order of the result's probes.
        result: with the logits of the choices.
        plans: in the order of the report.

    Returns:
        The items frame (one row per plan and question; ``stream`` is the unit of intervals), records by plan and task.
    """
    frames = [_answer(streams, result.probes[name], name) for name in (BASELINE_NAME, *plans)]
    items = pd.concat(frames, ignore_index=True)
    tasks = dict.fromkeys(q.task for q in streams.questions)
    return items, {plan: {task: paired_record(items, plan, task) for task in tasks} for plan in plans}


def join_items(items: pd.DataFrame, answers: Mapping[str, Answers]) -> pd.DataFrame:
    """Items of the streams with those of tasks that have prompts of their own."""
    frames = [frame for frame in (items, *(found.items for found in answers.values())) if len(frame)]
    return pd.concat(frames, ignore_index=True) if frames else items


def score_answers(built: Sequence[BuiltTask], answers: Mapping[str, Answers], plan: str) -> dict[str, TaskRecord]:
    """Paired record of one plan on each task with prompts of its own."""
    records = {}
    for each in built:
        name, found = each.task.name, answers[each.task.name]
        record = paired_record(found.items, plan, name, chance=each.task.chance)
        record.ppl = each.task.measure_perplexity(found.prompts, found.answers, plan)
        records[name] = record
    return records


def measure_generation(built: Sequence[BuiltTask], answers: Mapping[str, Answers]) -> dict[str, dict[str, Any]]:
    """Figures of free generation by plan, of the first task that has some."""
    for each in built:
        found = answers[each.task.name]
        figures = each.task.measure_generation(found.prompts, found.answers)
        if figures:
            return figures
    return {}


def _answer(streams: Streams, logits: np.ndarray, plan: str) -> pd.DataFrame:
    """Items of one plan; logits [n_questions, 4] float64."""
    rows = []
    for question, scores in zip(streams.questions, logits, strict=True):
        finite = bool(np.isfinite(scores).all())
        by_id = sorted(range(len(question.choices)), key=lambda i: (-scores[i], question.choices[i]))
        answer = LETTERS[by_id[0]] if finite else None
        rows.append(
            {
                "plan": plan,
                "task": question.task,
                "item_id": question.item_id,
                "repeat": 0,
                "answer": answer,
                "gold": LETTERS[question.gold],
                "correct": answer == LETTERS[question.gold],
                "n_tokens": 1,
                "capped": False,
                "parse_reason": "ok" if finite else "nonfinite",
                "stream": question.sequence,
            }
        )
    columns = (
        "plan", "task", "item_id", "repeat", "answer", "gold", "correct", "n_tokens", "capped", "parse_reason",
        "stream",
    )  # fmt: skip
    return pd.DataFrame(rows, columns=columns)
