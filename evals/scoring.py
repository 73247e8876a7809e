"""From logits at the questions to items, and to the paired record of each plan and task.

Notable: an answer is the choice with the greatest logit after the question token, read through the plan's decode step;
ties go to the lower token id. Questions of one stream share its state, so the stream is the unit of every interval.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from driftgate.accuracy.items import paired_record
from driftgate.accuracy.lockstep import BASELINE_NAME, LockstepResult
from driftgate.accuracy.records import TaskRecord
from driftgate.evals.tasks import Streams

__all__ = ["score_items"]

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
