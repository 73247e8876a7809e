"""Training and scoring of one candidate in a process of its own; what it has reached is written down every minute."""

from __future__ import annotations

import json
import platform
import time
import traceback
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from driftgate.accuracy.adapters.hooks import quiet_transformers
from driftgate.evals.checkpoints import list_checkpoints
from driftgate.evals.training.families import FAMILIES
from driftgate.evals.training.loop import Budget, train
from driftgate.evals.training.recipes import RECIPES, Recipe, noise_at, rate_at
from driftgate.evals.training.rows import RowOptions, draw_rows
from driftgate.evals.training.scores import ScoreOptions, score_decode, score_sequences
from driftgate.evals.training.steps import Stepper
from driftgate.evals.training.weights import load_weights, save_weights

__all__ = ["Job", "find_recipe", "read_versions", "run_job"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One candidate and its limits.

    Attributes:
        family, number: which candidate.
        folder: where NAME.json and NAME.safetensors go.
        device: ``cpu`` or ``cuda``.
        graphs: capture the steps.
        train_until, score_until: ends of training and of scoring, as ``time.time()`` gives it.
        steps: number of steps instead of ``train_until``; None to follow the clock.
        rows, scores: what it is trained and scored on.
        score_every: seconds between two reports.
    """

    family: str
    number: int
    folder: Path
    device: str
    graphs: bool
    train_until: float
    score_until: float
    steps: int | None
    rows: RowOptions
    scores: ScoreOptions
    score_every: float = 60.0

    @property
    def name(self) -> str:
        """Name of the candidate."""
        return f"{self.family}-{self.number}"


def find_recipe(family: str, number: int) -> Recipe:
    """The recipe of this candidate; past the last one they are taken again with other seeds."""
    recipes = RECIPES[family]
    recipe, lap = recipes[number % len(recipes)], number // len(recipes)
    return replace(recipe, start=replace(recipe.start, seed=recipe.start.seed + 100 * lap))


def _write(record: dict[str, Any], path: Path) -> None:
    path.with_suffix(".part.json").write_text(json.dumps(record))
    path.with_suffix(".part.json").replace(path)


def read_versions(device: str) -> dict[str, str]:
    """What a training ran on, and the date."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "date": time.strftime("%Y-%m-%d"),
    }


def _train(job: Job, recipe: Recipe, stepper: Stepper, record: dict[str, Any]) -> None:
    """Steps until the end; ``record`` is written with every report, and once more after the last step."""

    def report() -> None:
        _report(job, stepper, record)

    rows = replace(job.rows, streams_alone=recipe.streams_alone)
    train(
        stepper,
        partial(draw_rows, seed=1000 + recipe.start.seed, options=rows),
        record,
        budget=Budget(steps=job.steps) if job.steps is not None else Budget(until=job.train_until),
        rates=lambda done: (recipe.learning_rate * rate_at(done), recipe.read_noise * noise_at(done)),
        report=report,
        report_every=job.score_every,
    )
    report()


def _report(job: Job, stepper: Stepper, record: dict[str, Any]) -> None:
    """Score on whole sequences, then write weights and record."""
    with stepper.on_stream():
        stepper.model.eval()
        record["scores"] = score_sequences(stepper.model, job.scores, job.device) | {"step": record["steps"]}
        stepper.model.train()
        record["skipped_steps"] = stepper.skipped
        save_weights(stepper.model, job.folder / f"{job.name}.safetensors")
    _write(record, job.folder / f"{job.name}.json")
    print(job.name, "scores", json.dumps(record["scores"]), flush=True)


def run_job(job: Job) -> None:
    """Train, then decode under emulated plans; a failure is written to NAME.error.txt."""
    try:
        with quiet_transformers():
            _run(job)
    except Exception:
        (job.folder / f"{job.name}.error.txt").write_text(traceback.format_exc())
        raise


def _run(job: Job) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    recipe, family = find_recipe(job.family, job.number), FAMILIES[job.family]
    model = family.build(recipe.start)
    if recipe.continues is not None:
        load_weights(model, list_checkpoints()[recipe.continues] / "model.safetensors")
    model.to(job.device).train()
    record: dict[str, Any] = {
        "family": job.family,
        "name": job.name,
        "recipe": asdict(recipe),
        "batch_tokens": job.rows.batch_tokens,
        "graphs": job.graphs,
        "versions": read_versions(job.device),
    }
    noise = torch.zeros((), device=job.device) if recipe.read_noise else None
    with family.training_functions(noise):
        stepper = Stepper(
            model, device=job.device, graphs=job.graphs, weight_decay=recipe.weight_decay, read_noise=noise
        )
        _train(job, recipe, stepper, record)
    if job.device == "cuda":
        record["gpu_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        torch.cuda.synchronize()
        del stepper
        torch.cuda.empty_cache()
    torch.set_float32_matmul_precision("highest")
    left = job.score_until - time.time()
    record["decode"] = score_decode(model.eval(), job.scores, job.device, deadline=time.monotonic() + left)
    _write(record, job.folder / f"{job.name}.json")
    print(job.name, "decode", json.dumps(record["decode"]), flush=True)
