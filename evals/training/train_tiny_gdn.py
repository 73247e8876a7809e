"""Train the embedded checkpoint ``tiny-gdn`` and score it under emulated plans.

One candidate, as a stranger would rerun it (one GPU; the number of steps that the shipped one took is in its card)::

    python -P -m driftgate.evals.training.train_tiny_gdn --candidate NAME --steps N --out FOLDER

Several candidates beside each other on one GPU, each for the same wall-clock time::

    python -P -m driftgate.evals.training.train_tiny_gdn --candidate A --candidate B --seconds 345 --out FOLDER

Learning rate and curriculum follow the progress, which is steps/N or the elapsed share of the time. Each candidate
writes FOLDER/NAME.safetensors regularly and FOLDER/NAME.json at the end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from driftgate.evals.tasks.build import make_layout
from driftgate.evals.tasks.streams import StreamLayout, generate_streams
from driftgate.evals.training.candidate import read_versions
from driftgate.evals.training.emulation import PLANS, decode_logits
from driftgate.evals.training.families import FAMILIES, Start
from driftgate.evals.training.loop import Budget, train
from driftgate.evals.training.mixture import MixtureOptions, draw_streams
from driftgate.evals.training.recipes import rate_at
from driftgate.evals.training.steps import Stepper
from driftgate.evals.training.stream_scores import StreamScores
from driftgate.evals.training.weights import save_weights

__all__ = ["CANDIDATES", "Candidate", "main"]

WIDE = Start(decay=(1e-4, 5e-2), beta=(0.02, 0.5))
NARROW = replace(WIDE, deviation=0.02)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One recipe: where it starts, how fast it learns, what it is trained on."""

    start: Start
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    mixture: MixtureOptions = field(default_factory=MixtureOptions)


CANDIDATES = {
    "base": Candidate(start=replace(NARROW, beta=None)),
    "spread": Candidate(start=NARROW),
    "slow": Candidate(start=replace(NARROW, decay=(1e-5, 1e-2))),
    "late": Candidate(start=NARROW, mixture=MixtureOptions(late_share=0.6)),
    "seed1": Candidate(start=replace(NARROW, seed=1), learning_rate=3e-3),
    "widebase": Candidate(start=replace(WIDE, beta=None)),
    "wide": Candidate(start=WIDE),
    "wide1": Candidate(start=replace(WIDE, seed=1)),
    "wideslow": Candidate(start=replace(WIDE, decay=(1e-5, 1e-2))),
    "widehot": Candidate(start=replace(WIDE, seed=2), learning_rate=3e-3, mixture=MixtureOptions(answer_share=0.6)),
    "widemix": Candidate(start=Start(seed=3, decay=(1e-5, 5e-2), beta=(0.01, 0.5))),
}

# Changes of the training layout that a trained candidate is scored on, beside the layout that ships.
SCORED: dict[str, dict[str, Any]] = {
    "mixed": {},
    "late": {"late_share": 1.0, "early_share": 0.0},
    "sparse": {"n_groups": 24, "n_tracking": 16, "event_share": 0.55},
    "dense": {"n_groups": 8, "n_tracking": 8, "event_share": 0.85},
}


def _train(name: str, options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Train one candidate; returns the model and its record. The weights are in ``out/name.safetensors``."""
    candidate, family, path = CANDIDATES[name], FAMILIES["gdn"], options.out / f"{name}.safetensors"
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    model: Any = family.build(candidate.start).to(options.device).train()
    mixture = replace(candidate.mixture, batch_tokens=options.batch_tokens)
    versions = read_versions(options.device) | {"command": " ".join(sys.argv[1:])}
    record: dict[str, Any] = {"name": name, "candidate": asdict(candidate), "versions": versions}
    with family.training_functions():
        stepper = Stepper(model, device=options.device, graphs=False, weight_decay=candidate.weight_decay)

        def save() -> None:
            with stepper.on_stream():
                save_weights(model, path)

        train(
            stepper,
            partial(draw_streams, seed=candidate.start.seed, options=mixture),
            record,
            budget=Budget(
                steps=options.steps, until=None if options.seconds is None else time.time() + options.seconds
            ),
            rates=lambda done: (candidate.learning_rate * rate_at(done, flat_until=0.5), 0.0),
            report=save,
            n_workers=options.workers,
        )
        save()
    return model, record


def _score(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Scores of each layout under every plan, all decoded together."""
    torch.set_float32_matmul_precision("highest")
    count, device = options.score_sequences, options.device
    layouts = {name: StreamLayout(length=options.score_length, **changes) for name, changes in SCORED.items()}
    layouts["shipped"] = make_layout(options.score_length)
    streams = {name: generate_streams(layout, seed=1_000_003, indices=range(count)) for name, layout in layouts.items()}
    scores = {name: StreamScores(batch, PLANS, device) for name, batch in streams.items()}
    token_ids = torch.cat([torch.from_numpy(batch.token_ids) for batch in streams.values()]).to(device)
    for position, logits in decode_logits(model.eval(), token_ids, PLANS):
        for part, score in zip(logits.split(count, dim=1), scores.values(), strict=True):
            score.add(position, part)
    return {name: {"layout": asdict(layouts[name]), "plans": score.read()} for name, score in scores.items()}


def _run(name: str, options: argparse.Namespace) -> None:
    """Train and score one candidate; a failure is written down and leaves the others alone."""
    path = options.out / f"{name}.json"
    try:
        model, record = _train(name, options)
        path.write_text(json.dumps(record))
        if options.score_sequences:
            record["scores"] = _score(model, options)
            path.write_text(json.dumps(record))
            _print_scores(name, record)
    except Exception:
        (options.out / f"{name}.error.txt").write_text(traceback.format_exc())
        raise


def _print_scores(name: str, record: dict[str, Any]) -> None:
    print(f"== {name}: {record['steps']} steps, {record['tokens']} tokens, {record['seconds']} s")
    for layout, scores in record["scores"].items():
        for plan, row in scores["plans"].items():
            print(
                f"{name:8s} {layout:8s} {plan:14s} kl {row['kl']:.2e} top {row['same_top']:.3f} "
                f"recall {row['recall']} tracking {row['tracking']} late {row['tracking_late']}",
                flush=True,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the candidates, one process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidate", action="append", required=True, choices=sorted(CANDIDATES))
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--seconds", type=float, help="wall-clock time of each candidate's training")
    length.add_argument("--steps", type=int, help="optimiser steps of each candidate")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=2, help="processes that make streams, per candidate")
    parser.add_argument("--batch-tokens", type=int, default=24_576)
    parser.add_argument("--score-length", type=int, default=1536)
    parser.add_argument("--score-sequences", type=int, default=64, help="0: do not score")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_run, args=(name, options)) for name in options.candidate]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    raise SystemExit(main())
