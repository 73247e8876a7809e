"""The loop of a training: steps until the budget is spent, and a record of how it goes."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from driftgate.evals.training.feed import Draw, feed_batches
from driftgate.evals.training.steps import Stepper

__all__ = ["Budget", "train"]

CURVE_EVERY = 50  # steps


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to train: a number of steps, or until this moment of ``time.time()`` (progress then follows the clock).

    Raises:
        ValueError: both are given, or neither.
    """

    steps: int | None = None
    until: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.until is None):
            raise ValueError("give steps or until, and not both")

    def progress(self, step: int, started: float) -> float:
        """Share of the training that is done, 0 to 1 and beyond."""
        if self.until is None:
            return step / (self.steps or 1)
        return (time.time() - started) / max(self.until - started, 1.0)


def train(
    stepper: Stepper,
    draw: Draw,
    record: dict[str, Any],
    *,
    budget: Budget,
    rates: Callable[[float], tuple[float, float]],
    report: Callable[[], None],
    report_every: float = 60.0,
    n_workers: int = 1,
) -> None:
    """Train and keep ``record`` up to date: steps, tokens, seconds, and the curve of losses.

    Args:
        stepper: the model.
        draw: what makes its batches.
        record: has the candidate's ``name``.
        budget: when to end.
        rates: learning rate and read noise at a progress.
        report: called every ``report_every`` seconds.
        report_every: seconds.
        n_workers: processes that make batches.
    """
    record |= {"steps": 0, "tokens": 0, "seconds": 0.0, "curve": []}
    progress = multiprocessing.get_context("spawn").Value("d", 0.0)
    with closing(feed_batches(draw, progress=progress, n_workers=n_workers)) as batches:
        batch = next(batches)
        started = reported = time.time()
        while (done := budget.progress(record["steps"], started)) < 1:
            progress.value = done
            stepper.step(batch, *rates(done))
            record["steps"] += 1
            record["tokens"] += int(batch.token_ids.size)
            record["seconds"] = round(time.time() - started, 1)
            if record["steps"] % CURVE_EVERY == 0:
                record["curve"].append({"step": record["steps"], "progress": round(done, 3)} | stepper.read_totals())
                print(record["name"], json.dumps(record["curve"][-1]), flush=True)
            if time.time() - reported > report_every:
                reported = time.time()
                report()
            batch = next(batches)
