"""Key-value recall: which sign was paired with this letter, once, at the start of the stream?

A pair is a single small write that must stay in the state while the whole stream of tallies passes over it.
"""

from __future__ import annotations

from driftgate.evals.tasks.base import Task
from driftgate.evals.tasks.streams import SIGNS

__all__ = ["TASK", "other_answers"]

TASK = Task(name="recall", version=1, description="sign of a letter that was paired once, at the start of the stream")


def other_answers(answer: int) -> tuple[int, ...]:
    """Wrong answers that are offered beside this one: the other three signs."""
    return tuple(int(token) for token in SIGNS if token != answer)
