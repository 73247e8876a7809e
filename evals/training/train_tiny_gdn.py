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
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

from driftgate.evals.tasks.build import make_layout
from driftgate.evals.tasks.streams import StreamLayout
from driftgate.evals.training.chunk import causal_convolve, chunk_gated_delta_rule
from driftgate.evals.training.measure import measure_plans
from driftgate.evals.training.mixture import Batch, MixtureOptions, stream_batches
from driftgate.evals.training.model import build_model

__all__ = ["CANDIDATES", "Budget", "Candidate", "train_candidate"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One recipe: where it starts, what it is trained on, how the loss is weighted.

    ``answer_share`` is the weight of the answer tokens in the loss; the rest is spread over all other tokens.
    """

    seed: int = 0
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    answer_share: float = 0.4
    dt_range: tuple[float, float] = (1e-4, 5e-2)
    beta_range: tuple[float, float] | None = None
    initializer_range: float = 0.02
    mixture: MixtureOptions = field(default_factory=MixtureOptions)


CANDIDATES = {
    "base": Candidate(),
    "spread": Candidate(beta_range=(0.02, 0.5)),
    "slow": Candidate(beta_range=(0.02, 0.5), dt_range=(1e-5, 1e-2)),
    "late": Candidate(beta_range=(0.02, 0.5), mixture=MixtureOptions(late_share=0.6, early_share=0.2)),
    "seed1": Candidate(seed=1, beta_range=(0.02, 0.5), learning_rate=3e-3),
    "widebase": Candidate(initializer_range=0.06),
    "wide": Candidate(beta_range=(0.02, 0.5), initializer_range=0.06),
    "wide1": Candidate(seed=1, beta_range=(0.02, 0.5), initializer_range=0.06),
    "wideslow": Candidate(beta_range=(0.02, 0.5), initializer_range=0.06, dt_range=(1e-5, 1e-2)),
    "widehot": Candidate(seed=2, beta_range=(0.02, 0.5), initializer_range=0.06, answer_share=0.6, learning_rate=3e-3),
    "widemix": Candidate(seed=3, beta_range=(0.01, 0.5), initializer_range=0.06, dt_range=(1e-5, 5e-2)),
}

# Changes of the training layout that a trained candidate is scored on, beside the layout that ships.
SCORED: dict[str, dict[str, Any]] = {
    "mixed": {},
    "late": {"late_share": 1.0, "early_share": 0.0},
    "sparse": {"n_groups": 24, "n_tracking": 16, "event_share": 0.55},
    "dense": {"n_groups": 8, "n_tracking": 8, "event_share": 0.85},
}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to train: a number of steps, or wall-clock seconds (then progress follows the clock)."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError("give steps or seconds, and not both")

    def progress(self, step: int, elapsed: float) -> float:
        """Share of the training that is done, 0 to 1 and beyond."""
        return step / self.steps if self.steps is not None else elapsed / (self.seconds or 1.0)


@contextmanager
def training_kernels() -> Iterator[None]:
    """Swap two functions of transformers' model for those with a cheap backward pass, and back."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    originals = modeling.torch_chunk_gated_delta_rule, modeling.causal_conv1d_fn
    modeling.torch_chunk_gated_delta_rule = chunk_gated_delta_rule
    modeling.causal_conv1d_fn = causal_convolve
    try:
        yield
    finally:
        modeling.torch_chunk_gated_delta_rule, modeling.causal_conv1d_fn = originals


def _rate(progress: float) -> float:
    """Share of the top learning rate: warm-up over 3 %, flat to 50 %, then linear down to 2 %."""
    if progress < 0.03:
        return max(progress, 1e-3) / 0.03
    return 1.0 if progress < 0.5 else max(0.02, 1.0 - 0.98 * (progress - 0.5) / 0.5)


def _loss(model: Any, batch: Batch, share: float, device: str) -> tuple[Tensor, Tensor]:
    """Weighted loss, and [loss, recall, tracking]: shares of right answers by argmax over the vocabulary."""
    token_ids = torch.from_numpy(batch.token_ids).to(device, non_blocking=True).long()
    places = torch.from_numpy(batch.answer_positions).to(device) - 1
    tracking = torch.from_numpy(batch.is_tracking).to(device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu"):
        logits = model(token_ids, use_cache=False).logits
    logits = logits[:, :-1].float()
    labels = token_ids[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    answers = losses[:, places]
    rest = (losses.sum() - answers.sum()) / (losses.numel() - answers.numel())
    loss = (1 - share) * rest + share * answers.mean()
    right = (logits[:, places].argmax(-1) == labels[:, places]).float()
    kinds = [(right * mask).sum() / mask.sum().clamp_min(1) for mask in (~tracking, tracking)]
    return loss, torch.stack([loss.detach(), *kinds])


def _save(model: Any, path: Path) -> None:
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    state.pop("lm_head.weight", None)
    save_file(state, path, metadata={"format": "pt"})


def _update(model: Any, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    """One step of gradient descent; a gradient that is not finite is skipped."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    if torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
        optimizer.step()


def train_candidate(
    name: str, *, out: Path, device: str, budget: Budget, workers: int = 2, batch_tokens: int = 24_576
) -> tuple[Any, dict[str, Any]]:
    """Train one candidate; returns the model and its log. The weights are in ``out/name.safetensors``."""
    candidate = CANDIDATES[name]
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    model: Any = build_model(
        seed=candidate.seed,
        dt_range=candidate.dt_range,
        beta_range=candidate.beta_range,
        initializer_range=candidate.initializer_range,
    )
    model.to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=candidate.weight_decay, fused=device == "cuda"
    )
    shared = multiprocessing.get_context("spawn").Value("d", 0.0)
    mixture = replace(candidate.mixture, batch_tokens=batch_tokens)
    batches = stream_batches(seed=candidate.seed, options=mixture, progress=shared, n_workers=workers)
    started = saved = time.monotonic()
    curve: list[dict[str, float]] = []
    recent: list[Tensor] = []
    step = tokens = 0
    with training_kernels(), closing(batches):
        while (progress := budget.progress(step, time.monotonic() - started)) < 1:
            batch = next(batches)
            shared.value = progress
            loss, scores = _loss(model, batch, candidate.answer_share, device)
            _update(model, optimizer, loss, candidate.learning_rate * _rate(progress))
            step, tokens = step + 1, tokens + batch.token_ids.size
            recent.append(scores)
            if step % 50 == 0:
                means = torch.stack(recent).mean(0).tolist()
                recent.clear()
                curve.append(dict(zip(("loss", "recall", "tracking"), means, strict=True)) | {"step": step})
                print(name, curve[-1], flush=True)
            if time.monotonic() - saved > 60:
                saved = time.monotonic()
                _save(model, out / f"{name}.safetensors")
    _save(model, out / f"{name}.safetensors")
    log = {"name": name, "candidate": asdict(candidate), "steps": step, "tokens": tokens, "curve": curve}
    return model, log | {"seconds": round(time.monotonic() - started, 1), "versions": _versions(device)}


def _versions(device: str) -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv[1:]),
    }


def _run(name: str, options: argparse.Namespace) -> None:
    """Train and score one candidate; a failure is written down and leaves the others alone."""
    path = options.out / f"{name}.json"
    try:
        budget = Budget(steps=options.steps, seconds=options.seconds)
        model, log = train_candidate(
            name,
            out=options.out,
            device=options.device,
            budget=budget,
            workers=options.workers,
            batch_tokens=options.batch_tokens,
        )
        path.write_text(json.dumps(log))
        if options.score_sequences:
            torch.set_float32_matmul_precision("highest")
            layouts = [StreamLayout(length=options.score_length, **changes) for changes in SCORED.values()]
            layouts.append(make_layout(options.score_length))
            records = measure_plans(
                model.eval(), layouts, seed=1_000_003, n_sequences=options.score_sequences, device=options.device
            )
            log["scores"] = dict(zip((*SCORED, "shipped"), records, strict=True))
            path.write_text(json.dumps(log))
            _print_scores(name, log)
    except Exception:
        (options.out / f"{name}.error.txt").write_text(traceback.format_exc())
        raise


def _print_scores(name: str, log: dict[str, Any]) -> None:
    print(f"== {name}: {log['steps']} steps, {log['tokens']} tokens, {log['seconds']} s")
    for layout, record in log["scores"].items():
        for plan, row in record["plans"].items():
            print(
                f"{name:8s} {layout:8s} {plan:14s} kl {row['kl']:.2e} top {row['same_top']:.3f} "
                f"recall {row['recall']} tracking {row['tracking']} late {row['tracking_late']}",
                flush=True,
            )


def main() -> None:
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
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_run, args=(name, options)) for name in options.candidate]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
