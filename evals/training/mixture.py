"""What tiny-gdn is trained on: stream layouts drawn at random, short ones first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from driftgate.evals.tasks.streams import StreamBatch, StreamLayout, generate_streams
from driftgate.evals.training.rows import Kind, RowBatch

__all__ = ["MixtureOptions", "draw_layout", "draw_streams", "weigh_answers"]

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

    Tokens a batch, shares of late and early groups, the chance that a stream has rewrites, and the weight of the answer
    tokens in the loss; the rest of it is spread over all other tokens.
    """

    batch_tokens: int = 24_576
    late_share: float = 0.4
    early_share: float = 0.2
    rewrite_chance: float = 0.4
    answer_share: float = 0.4


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


def weigh_answers(streams: StreamBatch, answer_share: float) -> RowBatch:
    """The streams as rows, in which the answers have this share of the loss together."""
    n_rows, length = streams.token_ids.shape
    kinds = np.full((n_rows, length), Kind.STREAM, dtype=np.uint8)
    kinds[:, 0] = Kind.UNSCORED
    kinds[:, streams.answer_positions] = np.where(streams.is_tracking, Kind.TRACKING, Kind.RECALL)
    asked, other = (kinds == Kind.TRACKING) | (kinds == Kind.RECALL), kinds == Kind.STREAM
    weights = asked * (answer_share / asked.sum()) + other * ((1.0 - answer_share) / other.sum())
    return RowBatch(streams.token_ids.astype(np.int16), kinds, weights.astype(np.float32))


def draw_streams(worker: int, progress: Any, *, seed: int, options: MixtureOptions) -> Iterator[RowBatch]:
    """Endless batches of this worker; layouts follow ``progress``, a shared double from 0 to 1."""
    rng = np.random.default_rng([seed, worker])
    index = worker << 40
    while True:
        layout = draw_layout(rng, min(float(progress.value), 1.0), options)
        size = int(np.clip(options.batch_tokens // layout.length, 1, 192))
        streams = generate_streams(layout, seed=seed, indices=range(index, index + size))
        index += size
        yield weigh_answers(streams, options.answer_share)
