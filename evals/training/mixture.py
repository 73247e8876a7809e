"""What tiny-gdn is trained on: stream layouts drawn at random, short ones first, and the workers that make them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from driftgate.evals.tasks.streams import StreamLayout, generate_streams

__all__ = ["Batch", "MixtureOptions", "draw_layout", "stream_batches"]

# Progress up to which the lengths are drawn, then the lengths themselves (multiples of the chunk size).
CURRICULUM: tuple[tuple[float, tuple[int, ...]], ...] = (
    (0.10, (128, 192, 256)),
    (0.35, (192, 256, 384, 512)),
    (0.55, (384, 512, 768, 1024)),
    (0.80, (512, 768, 1024, 1536, 2048)),
    (1.01, (768, 1024, 1536, 1536, 2048, 2048, 4096)),
)


@dataclass(frozen=True, kw_only=True)
class MixtureOptions:
    """Knobs of the mixture.

    Tokens a batch, shares of late and early groups, and the chance that a stream has
    rewrites.
    """

    batch_tokens: int = 24_576
    late_share: float = 0.4
    early_share: float = 0.2
    rewrite_chance: float = 0.4


@dataclass(frozen=True)
class Batch:
    """token_ids [B, T], positions of answer tokens [Q] and whether each question [B, Q] is a tracking one."""

    token_ids: Any
    answer_positions: Any
    is_tracking: Any


def draw_layout(rng: np.random.Generator, progress: float, options: MixtureOptions) -> StreamLayout:
    """A random layout for this part (0 to 1) of the training."""
    lengths = next(lengths for limit, lengths in CURRICULUM if progress < limit)
    length = int(rng.choice(lengths))
    most_groups = int(np.clip(length // 32, 3, 24))
    most_pairs = int(np.clip(length // 28, 4, 20))
    rewritten = progress > 0.2 and rng.random() < options.rewrite_chance
    while True:
        n_groups = int(rng.integers(min(4, most_groups), most_groups + 1))
        n_pairs = int(rng.integers(4, most_pairs + 1))
        try:
            return StreamLayout(
                length=length,
                n_pairs=n_pairs,
                n_groups=n_groups,
                n_recall=min(n_pairs, 16),
                n_tracking=n_groups,
                event_share=float(rng.uniform(0.4, 0.88)),
                rewrite_share=float(rng.uniform(0.02, 0.12)) if rewritten else 0.0,
                margin=(0.05, float(rng.uniform(0.15, 0.5))),
                late_share=options.late_share,
                early_share=options.early_share,
                order_bias=float(rng.uniform(0.0, 0.6)),
            )
        except ValueError:
            continue


def _fill(queue: Any, seed: int, worker: int, progress: Any, options: MixtureOptions) -> None:
    rng = np.random.default_rng([seed, worker])
    index = worker << 40
    while True:
        layout = draw_layout(rng, min(float(progress.value), 1.0), options)
        size = int(np.clip(options.batch_tokens // layout.length, 1, 192))
        streams = generate_streams(layout, seed=seed, indices=range(index, index + size))
        index += size
        queue.put((streams.token_ids.astype(np.int16), streams.answer_positions, streams.is_tracking))


def stream_batches(
    *, seed: int, options: MixtureOptions, progress: Any, n_workers: int = 2
) -> Generator[Batch, None, None]:
    """Endless batches from worker processes; ``progress`` is a shared double that the trainer moves from 0 to 1."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(maxsize=3)
    arguments = [(queue, seed, worker, progress, options) for worker in range(n_workers)]
    workers = [context.Process(target=_fill, args=args, daemon=True) for args in arguments]
    for worker in workers:
        worker.start()
    try:
        while True:
            yield Batch(*queue.get(timeout=120))
    finally:
        for worker in workers:
            worker.terminate()
