"""The candidates as processes beside each other, and what is written of them while they run and at the end."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from driftgate.accuracy.adapters.hooks import quiet_transformers
from driftgate.evals.training.candidate import Job, run_job
from driftgate.evals.training.choose import judge, rank
from driftgate.evals.training.families import FAMILIES
from driftgate.evals.training.publish import publish
from driftgate.evals.training.rows import RowOptions
from driftgate.evals.training.scores import ScoreOptions

__all__ = ["collect", "run"]

SCORING, WRITING = 85.0, 25.0
"""Seconds before the end at which training and scoring stop."""


def collect(work: Path, out: Path, families: Sequence[str]) -> dict[str, Any]:
    """Rank what the candidates have written so far and write OUT's files; returns the summary."""
    records = [json.loads(path.read_text()) for path in sorted(work.glob("*-*.json")) if ".part" not in path.name]
    errors = {path.name: path.read_text()[-2000:] for path in sorted(work.glob("*.error.txt"))}
    summary: dict[str, Any] = {"chosen": {}, "errors": errors, "records": records}
    for family in families:
        ranked = rank([record for record in records if record["family"] == family])
        summary["chosen"][family] = [{"name": record["name"], "conditions": judge(record)} for record in ranked]
        for place, record in zip(("", "-second"), ranked, strict=False):
            name = f"{FAMILIES[family].checkpoint}{place}"
            try:
                _write_tar(record, work / f"{record['name']}.safetensors", out / f"{name}.tar")
            except Exception:
                errors[name] = traceback.format_exc()[-2000:]
    _write_text(out / "summary.json", json.dumps(summary))
    return summary


def _write_tar(record: dict[str, Any], weights: Path, path: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / path.stem
        publish(record, weights, folder)
        part = path.with_suffix(".part")
        with tarfile.open(part, "w") as tar:
            tar.add(folder, arcname=FAMILIES[record["family"]].checkpoint)
        part.replace(path)


def _write_text(path: Path, text: str) -> None:
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").replace(path)


def _run_all(jobs: list[Job], out: Path, families: Sequence[str], ends: float) -> None:
    """Run the jobs beside each other until they end or time is up; one whose graphs fail starts again without."""
    context = multiprocessing.get_context("spawn")
    running: dict[str, tuple[Job, Any]] = {}

    def start(job: Job) -> None:
        process = context.Process(target=run_job, args=(job,))
        process.start()
        running[job.name] = (job, process)

    for job in jobs:
        start(job)
    collected = time.time()
    while running and time.time() < ends:
        time.sleep(1)
        for job, process in list(running.values()):
            if process.is_alive():
                continue
            del running[job.name]
            if process.exitcode and job.graphs and (job.steps is not None or time.time() < job.train_until - 60):
                print(job.name, f"failed (exit {process.exitcode}); again without graphs", flush=True)
                error = job.folder / f"{job.name}.error.txt"
                if error.exists():
                    error.replace(error.with_name(f"{job.name}.graphs.error.txt"))
                start(replace(job, graphs=False))
        if time.time() - collected > 90 and time.time() < ends - 60:
            collect(jobs[0].folder, out, families)
            collected = time.time()
    for _, process in running.values():
        process.terminate()


def _make_jobs(options: argparse.Namespace, work: Path, started: float) -> list[Job]:
    ends = started + 60 * options.minutes if options.steps is None else float("inf")
    held_out = options.held_out if options.held_out.is_file() else None
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows = RowOptions(batch_tokens=options.batch_tokens, text=options.text)
    scores = ScoreOptions(text=held_out)
    if options.smoke:
        rows = replace(rows, longest=256)
        scores = ScoreOptions(
            stream_lengths=((256, 2),), scratchpad_lengths=(40,), n_items=2, n_streams=2, stream_length=128,
            text=held_out, text_tokens=2046,
        )  # fmt: skip
    numbers = options.only or range(options.candidates)
    return [
        Job(
            family=family,
            number=number,
            folder=work,
            device=device,
            graphs=device == "cuda" and not options.no_graphs,
            train_until=ends - SCORING - WRITING,
            score_until=ends - WRITING,
            steps=options.steps,
            rows=rows,
            scores=scores,
        )
        for number in numbers
        for family in options.families
    ]


def run(options: argparse.Namespace, started: float) -> int:
    """Train, choose, write, as the options of train.py say; returns 0 if every family has a checkpoint."""
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="candidates-"))
    jobs = _make_jobs(options, work, started)
    with quiet_transformers(), warnings.catch_warnings(action="ignore"):
        _run_all(jobs, options.out, options.families, jobs[0].score_until + 3)
        summary = collect(work, options.out, options.families)
    print(json.dumps(summary["chosen"]), flush=True)
    print(json.dumps(summary["errors"]), flush=True)
    shutil.rmtree(work, ignore_errors=True)
    return 0 if all(summary["chosen"][family] for family in options.families) else 1
