"""Tasks of lm-eval by name: finding them, loading their data, asking for their requests, all without noise."""

from __future__ import annotations

import io
import logging
import random
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driftgate.errors import InputError, UsageError, unknown_name
from driftgate.evals.lm_requests import apply_chat_template

if TYPE_CHECKING:
    from driftgate.evals.tasks.item_task import ModelText, TaskOptions

__all__ = ["as_lm_eval", "ask", "find_task", "one_line", "open_tasks"]

RANDOM_SEED, NUMPY_SEED, FEWSHOT_SEED = 0, 1234, 1234
"""Defaults of lm-eval's own command: it makes the same prompts."""


@contextmanager
def as_lm_eval() -> Iterator[None]:
    """Seeds as lm-eval's command sets them, and its log and bars off where nobody watches; all as before afterwards."""
    state, numpy_state = random.getstate(), np.random.get_state()
    loggers = {logging.getLogger(name): logging.getLogger(name).level for name in ("lm_eval", "datasets")}
    random.seed(RANDOM_SEED)
    np.random.seed(NUMPY_SEED)
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
        for logger, level in loggers.items():
            logger.setLevel(level)


def find_task(name: str) -> Any:
    """lm-eval's TaskManager that knows this task; reads no data.

    Args:
        name: as lm-eval lists it, or a YAML file.

    Raises:
        InputError: a YAML file that does not exist.
        UsageError: no such task; names the nearest.
    """
    from lm_eval.tasks import TaskManager

    if name.endswith((".yaml", ".yml")):
        if not Path(name).expanduser().is_file():
            raise InputError(f"task file {name} does not exist; give lm_eval:FILE.yaml or a name of `lm-eval ls tasks`")
        return TaskManager(include_defaults=False)
    manager = _index()
    if name not in manager.task_index:
        near = get_close_matches(name, manager.all_tasks, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists them"
        raise UsageError(f"unknown task 'lm_eval:{name}'; {hint}")
    return manager


@cache
def _index() -> Any:
    """All tasks that lm-eval ships; it reads some ten thousand files for it."""
    from lm_eval.tasks import TaskManager

    with as_lm_eval():
        return TaskManager()


def open_tasks(manager: Any, name: str) -> dict[str, Any]:
    """lm-eval's tasks of a name, with their data; several where it is a tag or a group.

    Raises:
        InputError: the data is not on this machine, the YAML is damaged, or driftgate cannot run such a task.
    """
    with as_lm_eval():
        try:
            tasks: dict[str, Any] = manager.load(name)["tasks"]
        except Exception as error:  # tasks run code of their own
            raise InputError(f"task lm_eval:{name}: {one_line(error)}; {_mend(error)}") from error
    if not tasks:
        raise InputError(f"task lm_eval:{name} holds no tasks; name one of `lm-eval ls subtasks`")
    for task in tasks.values():
        if getattr(task, "UNSAFE_CODE", False):
            raise InputError(
                f"task lm_eval:{name} runs code that the model writes; run it in a sandbox with "
                "simple_evaluate(model=DriftgateLM(...), confirm_run_unsafe_code=True)"
            )
        if getattr(task, "MULTIMODAL", False):
            raise InputError(f"task lm_eval:{name} shows images or sound, driftgate decodes text; choose another task")
    return tasks


def ask(task: Any, options: TaskOptions, text: ModelText) -> list[Any]:
    """Requests of all documents of a task, each as often as it is answered.

    ``options.repeats`` is for texts: choices that are scored again score the same.

    Raises:
        InputError: the task's templates do not fit its data, or there is no chat template.
        UsageError: no such wording.
    """
    chat = _chat(options, text)
    with as_lm_eval():
        if task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(FEWSHOT_SEED)
        try:
            task.build_all_requests(**chat)
        except Exception as error:  # templates and functions of the task
            raise InputError(f"task lm_eval:{task.task_name}: {one_line(error)}; {_mend(error)}") from error
    texts = all(i.request_type == "generate_until" for i in task.instances)
    times = (options.repeats or 1) if texts else 1
    return [same for i in task.instances for same in [i] * (i.repeats or 1) * times]


def _chat(options: TaskOptions, text: ModelText) -> dict[str, Any]:
    """Arguments of lm-eval for the wording."""
    if options.prompt in (None, "plain"):
        return {}
    if options.prompt != "chat":
        raise unknown_name("prompt", str(options.prompt), ("plain", "chat"))
    if not getattr(text.tokenizer, "chat_template", None):
        raise InputError(f"model {text.name} has no chat template; leave out --prompt chat")
    return {
        "apply_chat_template": True,
        "fewshot_as_multiturn": True,
        "chat_template": partial(apply_chat_template, text.tokenizer),
        "tokenizer_name": text.name,
    }


def _mend(error: Exception) -> str:
    if isinstance(error, ConnectionError):
        return "fetch its data once with HF_HUB_OFFLINE unset, or choose a task whose data is here"
    return "correct the task's YAML or its data, or choose another task"


def one_line(error: Exception) -> str:
    """What an error of somebody else's says, short."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
