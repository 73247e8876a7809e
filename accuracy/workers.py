"""Independent pieces of work in processes of their own: results in the order of the work, one line where one fails.

Workers are spawned, so that each has its own CUDA context and reads TRITON_INTERPRET from the environment as its parent
did. They do not see Ctrl-C, which a terminal sends to all of them: the parent ends them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from driftgate.errors import DriftgateError, InputError

__all__ = ["Task", "run_tasks"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One piece of work.

    Attributes:
        name: how an error names it.
        size: by how much a progress bar moves when it is done.
        call: what to do; picklable, as is what it returns.
    """

    name: str
    size: int
    call: Callable[[], Any]


def run_tasks(tasks: Sequence[Task], *, jobs: int, progress: Callable[[int], None] | None = None) -> list[Any]:
    """Do all tasks, each on one torch thread.

    Args:
        tasks: in the order of the results.
        jobs: processes; with 1 everything happens in this one.
        progress: called with the size of a task when it is done.

    Raises:
        DriftgateError: the first task to fail, by name; its kind and exit code are those of the error where it has one.
    """
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        import torch

        torch.set_num_threads(1)
        results = []
        for task in tasks:
            results.append(_take(task))
            if progress is not None:
                progress(task.size)
        return results
    return _run_in_pool(tasks, jobs, progress)


def _run_in_pool(tasks: Sequence[Task], jobs: int, progress: Callable[[int], None] | None) -> list[Any]:
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)
    try:
        with _interrupts_held():  # all workers are spawned here, and inherit what is held
            futures = {executor.submit(_take, task): n for n, task in enumerate(tasks)}
        for future in as_completed(futures):
            _raise_failure(future, tasks[futures[future]])
            if progress is not None:
                progress(tasks[futures[future]].size)
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    executor.shutdown()
    return [future.result() for future in futures]


def _raise_failure(future: Future[Any], task: Task) -> None:
    try:
        future.result()
    except BrokenProcessPool as error:
        raise DriftgateError(
            f"{task.name}: a worker process died, killed or by a crash; give fewer --jobs, or --jobs 1 to see where"
        ) from error


def _take(task: Task) -> Any:
    """Do a task. What it raises is named after it here, where it can be pickled whatever it was."""
    try:
        return task.call()
    except DriftgateError as error:
        raise type(error)(f"{task.name}: {error}") from error
    except Exception as error:
        told = (str(error).strip().splitlines() or ["no message"])[0]
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter is torch's
            raise InputError(f"{task.name}: memory ran out: {told}; give fewer --jobs") from error
        raise DriftgateError(
            f"{task.name}: internal error: {type(error).__name__}: {told}; please report it with the output of --debug"
        ) from error


def _start_worker() -> None:
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed ends nobody, and its workers would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back in this thread and for good in the processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
