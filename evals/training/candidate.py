"""Training and scoring of one candidate in a process of its own; what it has reached is written down every minute."""

from __future__ import annotations

import json
import multiprocessing
import platform
import time
import traceback
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from driftgate.accuracy.adapters.hooks import quiet_transformers
from driftgate.evals.training.families import FAMILIES
from driftgate.evals.training.recipes import RECIPES, Recipe, rate_at
from driftgate.evals.training.rows import RowOptions, stream_rows
from driftgate.evals.training.scores import ScoreOptions, score_decode, score_sequences
from driftgate.evals.training.steps import Stepper

__all__ = ["Job", "find_recipe", "run_job"]

REPORT_EVERY = 50  # steps


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


def _save(model: Any, path: Path) -> None:
    """Write the weights under another name first, so that a reader never sees half a file."""
    state = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file(state, path.with_suffix(".part"), metadata={"format": "pt"})
    path.with_suffix(".part").replace(path)


def _write(record: dict[str, Any], path: Path) -> None:
    path.with_suffix(".part.json").write_text(json.dumps(record))
    path.with_suffix(".part.json").replace(path)


def _versions(device: str) -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "date": time.strftime("%Y-%m-%d"),
    }


def _train(job: Job, recipe: Recipe, stepper: Stepper, record: dict[str, Any]) -> None:
    """Steps until the end; ``record`` is kept up to date and written with every report."""
    progress = multiprocessing.get_context("spawn").Value("d", 0.0)
    batches = stream_rows(seed=1000 + recipe.start.seed, options=job.rows, progress=progress)
    with closing(batches):
        batch = next(batches)
        started = reported = time.time()
        while True:
            now = time.time()
            if job.steps is not None:
                done = record["steps"] / job.steps
            else:
                done = (now - started) / max(job.train_until - started, 1.0)
            if done >= 1:
                break
            progress.value = done
            stepper.step(batch, recipe.learning_rate * rate_at(done))
            record["steps"] += 1
            record["tokens"] += int(batch.token_ids.size)
            record["seconds"] = round(time.time() - started, 1)
            if record["steps"] % REPORT_EVERY == 0:
                record["curve"].append({"step": record["steps"], "progress": round(done, 3)} | stepper.read_totals())
                print(job.name, json.dumps(record["curve"][-1]), flush=True)
            if now - reported > job.score_every:
                reported = now
                _report(job, stepper, record)
            batch = next(batches)


def _report(job: Job, stepper: Stepper, record: dict[str, Any]) -> None:
    """Score on whole sequences, then write weights and record."""
    with stepper.on_stream():
        stepper.model.eval()
        record["scores"] = score_sequences(stepper.model, job.scores, job.device) | {"step": record["steps"]}
        stepper.model.train()
        record["skipped_steps"] = stepper.skipped
        _save(stepper.model, job.folder / f"{job.name}.safetensors")
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
    model = family.build(recipe.start).to(job.device).train()
    record: dict[str, Any] = {
        "family": job.family,
        "name": job.name,
        "recipe": asdict(recipe),
        "batch_tokens": job.rows.batch_tokens,
        "graphs": job.graphs,
        "steps": 0,
        "tokens": 0,
        "seconds": 0.0,
        "curve": [],
        "versions": _versions(job.device),
    }
    with family.training_functions():
        stepper = Stepper(model, device=job.device, graphs=job.graphs, weight_decay=recipe.weight_decay)
        _train(job, recipe, stepper, record)
        _report(job, stepper, record)
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
