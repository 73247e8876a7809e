"""Tasks that ship: seeded token streams, four-choice questions at their end, exact scoring; numpy only.

| file | what |
| --- | --- |
| base.py | Task, Question, Streams, the order of choices |
| streams.py | the generator of token streams |
| recall.py, tracking.py | one task each |
| build.py | make_streams: the streams that ship, with their questions |
"""

from driftgate.errors import unknown_name
from driftgate.evals.tasks import recall, tracking
from driftgate.evals.tasks.base import Question, Streams, Task
from driftgate.evals.tasks.build import make_streams

__all__ = ["TASKS", "Question", "Streams", "Task", "load_task", "make_streams"]

TASKS: dict[str, Task] = {module.TASK.name: module.TASK for module in (recall, tracking)}


def load_task(name: str) -> Task:
    """The task with this name; an unknown one raises UsageError with the nearest names."""
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    return TASKS[name]
