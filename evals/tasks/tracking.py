"""Tally tracking: which of four signs followed this group letter most often in the stream?

Each event adds a little to a large entry of the state. A state that is rounded to few bits at every flush loses such
additions, or remembers the early ones best; a recurrence kept in higher precision does not. So this is the task that
tells shared low precision from a low-precision copy.
"""

from __future__ import annotations

from driftgate.evals.tasks.base import Task
from driftgate.evals.tasks.streams import SIGNS

__all__ = ["TASK", "other_answers"]

TASK = Task(name="tracking", version=1, description="most frequent sign of a tallied group over the whole stream")


def other_answers(answer: int) -> tuple[int, ...]:
    """Wrong answers that are offered beside this one: the other three signs."""
    return tuple(int(token) for token in SIGNS if token != answer)
