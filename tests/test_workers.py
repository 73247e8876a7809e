"""Work in processes: order of the results, errors by name, workers that die, Ctrl-C, a parent that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from math import factorial
from operator import truediv
from pathlib import Path

import pytest

from driftgate.accuracy.workers import Task, run_tasks
from driftgate.errors import DriftgateError, InputError

SLEEPERS = (
    "import time\nfrom functools import partial\nfrom driftgate.accuracy.workers import Task, run_tasks\n"
    "if __name__ == '__main__':\n"
    "    print('started', flush=True)\n"
    "    tasks = [Task(name=str(n), size=1, call=partial(time.sleep, 120 * (n > 1))) for n in range(4)]\n"
    "    run_tasks(tasks, jobs=2, progress=lambda n: print('moved', flush=True))\n"
)


def make_tasks(*calls) -> list[Task]:
    return [Task(name=f"task {n}", size=n + 1, call=call) for n, call in enumerate(calls)]


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_order_and_progress_counts_all(jobs):
    moved: list[int] = []
    tasks = make_tasks(partial(time.sleep, 0.3), *(partial(factorial, n) for n in range(4)))
    assert run_tasks(tasks, jobs=jobs, progress=moved.append) == [None, 1, 1, 2, 6]
    assert sorted(moved) == [1, 2, 3, 4, 5]


def test_workers_have_the_environment_of_the_parent(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_tasks(make_tasks(*[partial(os.getenv, "TRITON_INTERPRET")] * 2), jobs=2) == ["1", "1"]


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    ("call", "kind", "code", "says"),
    [
        (partial(truediv, 1, 0), DriftgateError, 70, "task 1: internal error: ZeroDivisionError: division by zero"),
        (partial(exec, "raise MemoryError('8 GiB')"), InputError, 4, "task 1: memory ran out: 8 GiB; give fewer"),
        (
            partial(exec, "from driftgate.errors import EmptyRunError\nraise EmptyRunError('no step')"),
            DriftgateError, 5, "task 1: no step",
        ),
        (
            partial(exec, "class Odd(Exception):\n def __init__(self, a, b): pass\nraise Odd(1, 2)"),
            DriftgateError, 70, "task 1: internal error: Odd",
        ),
    ],
    ids=["error", "memory", "own error", "error that cannot be pickled"],
)  # fmt: skip
def test_a_task_that_fails_is_named(jobs, call, kind, code, says):
    with pytest.raises(kind, match=says) as caught:
        run_tasks(make_tasks(partial(factorial, 3), call), jobs=jobs)
    assert caught.value.exit_code == code


def test_a_worker_that_dies_is_an_error():
    with pytest.raises(DriftgateError, match="a worker process died"):
        run_tasks(make_tasks(partial(os._exit, 3), partial(time.sleep, 0.1)), jobs=2)


def find_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    """Whether a process is there and not only waits for its parent to take notice of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent(tmp_path, sent):
    script = tmp_path / "sleepers.py"
    script.write_text(SLEEPERS)
    with subprocess.Popen(
        [sys.executable, "-P", str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as parent:  # fmt: skip
        for wanted in ("started", "moved", "moved"):
            assert parent.stdout.readline().strip() == wanted
        workers = find_children(parent.pid)
        assert len(workers) >= 2
        if sent is signal.SIGINT:
            os.killpg(parent.pid, sent)  # as a terminal does: to all of them
        else:
            parent.kill()
        errors = parent.communicate(timeout=30)[1]
    assert errors.count("Traceback") == (
        sent is signal.SIGINT
    )  # the parent's own, which the command line makes one line
    until = time.monotonic() + 20
    while any(map(runs, workers)) and time.monotonic() < until:
        time.sleep(0.1)
    assert [worker for worker in workers if runs(worker)] == []
