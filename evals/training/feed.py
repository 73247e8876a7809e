"""Batches from processes of their own, so that a trainer does not wait for them."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable, Generator, Iterator
from typing import Any

from driftgate.evals.training.rows import RowBatch

__all__ = ["Draw", "feed_batches"]

Draw = Callable[[int, Any], Iterator[RowBatch]]
"""(number of the worker, shared double of the progress from 0 to 1) -> endless batches; can be pickled."""


def _work(channel: Any, draw: Draw, worker: int, progress: Any) -> None:
    """Draw batches until the process that asked for them is gone."""
    parent = multiprocessing.parent_process()
    for batch in draw(worker, progress):
        while True:
            if parent is not None and not parent.is_alive():
                return
            try:
                channel.put((batch.token_ids, batch.kinds, batch.weights), timeout=5)
                break
            except queue.Full:
                continue


def feed_batches(draw: Draw, *, progress: Any, n_workers: int) -> Generator[RowBatch, None, None]:
    """Endless batches of all workers; ``progress`` is a shared double that the trainer moves from 0 to 1."""
    context = multiprocessing.get_context("spawn")
    channel = context.Queue(maxsize=4)
    workers = [
        context.Process(target=_work, args=(channel, draw, worker, progress), daemon=True)
        for worker in range(n_workers)
    ]
    for worker in workers:
        worker.start()
    try:
        while True:
            yield RowBatch(*channel.get(timeout=120))
    finally:
        for worker in workers:
            worker.terminate()
