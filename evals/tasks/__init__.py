"""Tasks that ship. Two kinds: questions at the end of a stream, and items with prompts of their own.

| file | what |
| --- | --- |
| base.py | Task, Question, Streams, the order of choices |
| streams.py | the generator of token streams |
| recall.py, tracking.py | one stream task each |
| build.py | make_streams: the streams that ship, with their questions |
| item_task.py | ItemTask: what a task with prompts of its own has to do |
| gpqa.py, scratchpad.py, longgen.py, ppl.py, harness.py | one such task each |
"""

from importlib import import_module

from driftgate.errors import unknown_name
from driftgate.evals.tasks import recall, tracking
from driftgate.evals.tasks.base import Question, Streams, Task
from driftgate.evals.tasks.build import make_streams
from driftgate.evals.tasks.item_task import ItemTask

__all__ = ["ITEM_TASKS", "TASKS", "Question", "Streams", "Task", "list_tasks", "load_task", "make_streams"]

TASKS: dict[str, Task] = {module.TASK.name: module.TASK for module in (recall, tracking)}
"""Stream tasks by name."""

ITEM_TASKS = {
    "gpqa": "gpqa:GpqaTask",
    "scratchpad": "scratchpad:ScratchpadTask",
    "longgen": "longgen:LonggenTask",
    "ppl": "ppl:PplTask",
}
"""Tasks with prompts of their own by name: module and class, imported when they are asked for."""

HARNESS = "lm_eval:"
"""What the name of a task of lm-evaluation-harness begins with."""


def load_task(name: str) -> Task | ItemTask:
    """The task with this name; ``lm_eval:NAME`` is a task of lm-evaluation-harness.

    Raises:
        UsageError: there is none; names the nearest.
    """
    if name in TASKS:
        return TASKS[name]
    if name.startswith(HARNESS):
        from driftgate.evals.tasks.harness import HarnessTask

        return HarnessTask(name.removeprefix(HARNESS))
    if name not in ITEM_TASKS:
        raise unknown_name("task", name, list_tasks())
    module, kind = ITEM_TASKS[name].split(":")
    task: ItemTask = getattr(import_module(f"driftgate.evals.tasks.{module}"), kind)()
    return task


def list_tasks() -> list[str]:
    """Names of all tasks that ship."""
    return [*TASKS, *ITEM_TASKS]
