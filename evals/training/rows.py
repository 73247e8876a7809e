"""What all embedded checkpoints are trained on: rows of streams, scratchpad items and text, short lengths first.

A batch has a fixed shape for its length, so that a training step can be captured once for each length. Every token has
a kind, and every kind a fixed share of the loss, whatever number of its tokens is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from driftgate.evals.tasks import scratchpad_text
from driftgate.evals.tasks.streams import BOS, EOS, StreamLayout, generate_streams

__all__ = ["LENGTHS", "Kind", "RowBatch", "RowOptions", "draw_batch", "draw_length", "draw_rows", "mark_item"]

LENGTHS: tuple[tuple[float, tuple[int, ...]], ...] = (
    (0.15, (256,)),
    (0.35, (256, 512)),
    (0.55, (512, 1024)),
    (0.80, (512, 1024, 1024, 2048)),
    (1.01, (1024, 1024, 2048, 2048, 4096)),
)
"""Progress up to which the lengths are drawn, then the lengths (multiples of the chunk size)."""


class Kind(IntEnum):
    """What a token is, when it is predicted."""

    UNSCORED = 0
    STREAM = 1
    RECALL = 2
    TRACKING = 3
    STATE = 4
    VALUE = 5
    ANSWER = 6
    TEXT = 7


SHARES = {
    Kind.STREAM: 0.25,
    Kind.RECALL: 0.15,
    Kind.TRACKING: 0.3,
    Kind.STATE: 0.1,
    Kind.VALUE: 0.3,
    Kind.ANSWER: 0.2,
    Kind.TEXT: 0.15,
}
"""Weight of the mean loss of each kind."""


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Tokens a batch, the shares of its rows, and the text.

    Args:
        batch_tokens: rows times length.
        stream_share, scratchpad_share: of the rows; the rest is text. A batch has at least one row of each.
        streams_alone: progress up to which there are streams alone, so that heads that tally learn it without the
            need of the other rows to forget.
        text: file with the training text, or None for no text.
        longest: greatest length that is drawn.
    """

    batch_tokens: int = 16_384
    stream_share: float = 0.5
    scratchpad_share: float = 0.35
    streams_alone: float = 0.0
    text: Path | None = None
    longest: int = 4096


@dataclass(frozen=True)
class RowBatch:
    """token_ids int16 [B, T]; kinds uint8 [B, T]; weights float32 [B, T] of each token's loss, which is their sum."""

    token_ids: npt.NDArray[np.int16]
    kinds: npt.NDArray[np.uint8]
    weights: npt.NDArray[np.float32]


def draw_length(rng: np.random.Generator, progress: float, longest: int) -> int:
    """A length for this part (0 to 1) of the training."""
    lengths = next(lengths for limit, lengths in LENGTHS if progress < limit)
    return min(int(rng.choice(lengths)), longest)


def draw_layout(rng: np.random.Generator, length: int) -> StreamLayout:
    """A random layout: most with pairs of a letter and a sign, as the shipped tasks, some with keys and digits."""
    while True:
        sign_pairs = bool(rng.random() < 0.75)
        repeats = int(rng.integers(1, 3))
        n_groups = int(rng.integers(2, int(np.clip(length // 32, 3, 16)) + 1))
        n_pairs = int(rng.integers(2, int(np.clip(length // 28, 4, 14)) + 1))
        late = float(rng.uniform(0.3, 0.5))
        try:
            return StreamLayout(
                length=length,
                n_pairs=n_pairs,
                n_groups=n_groups,
                n_recall=n_pairs,
                n_tracking=n_groups,
                event_share=float(rng.uniform(0.4, 0.88)),
                rewrite_share=0.0 if sign_pairs or rng.random() < 0.5 else float(rng.uniform(0.02, 0.12)),
                sign_pairs=sign_pairs,
                pair_repeats=repeats,
                margin=(0.02, float(rng.uniform(0.12, 0.5))),
                late_share=late,
                early_share=0.2,
                order_bias=float(rng.uniform(0.0, 0.6)),
            )
        except ValueError:
            continue


def mark_item(seed: int, index: int, *, length: int) -> tuple[list[int], list[Kind]]:
    """Token ids of a scratchpad item with ``<bos>`` and ``<eos>``, and the kind of each."""
    item = scratchpad_text.make_item(seed, index, length=length)
    ids = [BOS, *item.prompt.encode(), *item.completion.encode(), EOS]
    kinds = [Kind.UNSCORED] * (1 + len(item.prompt))
    written = pairwise(" " + item.completion)
    kinds += [Kind.VALUE if char.isdigit() and before.islower() else Kind.STATE for before, char in written]
    kinds += [Kind.ANSWER]
    chosen = 1 + len(item.prompt) + len(item.scratchpad) - 2
    for place in (chosen - 1, chosen, 1 + len(item.prompt) + len(item.completion) - 2):
        kinds[place] = Kind.ANSWER
    return ids, kinds


def _fill_streams(ids: Any, kinds: Any, rng: np.random.Generator, seed: int, index: int) -> None:
    streams = generate_streams(draw_layout(rng, ids.shape[1]), seed=seed, indices=range(index, index + len(ids)))
    ids[:] = streams.token_ids
    kinds[:] = Kind.STREAM
    kinds[:, streams.answer_positions] = np.where(streams.is_tracking, Kind.TRACKING, Kind.RECALL)


def _fill_scratchpads(ids: Any, kinds: Any, rng: np.random.Generator, seed: int, index: int) -> None:
    """Items one after the other; the last is cut off at the row's end."""
    n_rows, length = ids.shape
    longest = min(scratchpad_text.LONGEST, max(length - 90, scratchpad_text.SHORTEST + 1))
    for row in range(n_rows):
        end = 0
        while end < length:
            wanted = int(np.exp(rng.uniform(np.log(max(scratchpad_text.SHORTEST, longest // 8)), np.log(longest))))
            item_ids, item_kinds = mark_item(seed, index, length=wanted)
            index += 1
            room = min(len(item_ids), length - end)
            ids[row, end : end + room] = item_ids[:room]
            kinds[row, end : end + room] = item_kinds[:room]
            end += room


def _fill_text(ids: Any, kinds: Any, rng: np.random.Generator, text: npt.NDArray[np.uint8]) -> None:
    for row in range(len(ids)):
        start = int(rng.integers(0, len(text) - ids.shape[1]))
        ids[row, 0] = BOS
        ids[row, 1:] = text[start : start + ids.shape[1] - 1]
    kinds[:] = Kind.TEXT


def draw_batch(
    rng: np.random.Generator,
    *,
    seed: int,
    index: int,
    length: int,
    options: RowOptions,
    text: npt.NDArray[np.uint8] | None,
    alone: bool = False,
) -> RowBatch:
    """One batch of rows of this length; ``index`` is the first of a run of indices that no other batch has.

    With ``alone`` all of them are streams; their number is the same.
    """
    least_text = 0 if text is None else 1
    n_rows = max(options.batch_tokens // length, 2 + least_text)
    n_streams = min(max(1, round(n_rows * options.stream_share)), n_rows - 1 - least_text)
    n_scratchpads = max(1, round(n_rows * options.scratchpad_share))
    n_text = 0 if text is None else max(1, n_rows - n_streams - n_scratchpads)
    if alone:
        n_streams, n_text = n_rows, 0
    ids = np.zeros((n_rows, length), dtype=np.int16)
    kinds = np.zeros((n_rows, length), dtype=np.uint8)
    edge = n_rows - n_text
    _fill_streams(ids[:n_streams], kinds[:n_streams], rng, seed, index)
    _fill_scratchpads(ids[n_streams:edge], kinds[n_streams:edge], rng, seed, index)
    if n_text:
        assert text is not None
        _fill_text(ids[edge:], kinds[edge:], rng, text)
    kinds[:, 0] = Kind.UNSCORED
    counts = np.bincount(kinds.ravel(), minlength=len(Kind))
    per_token = np.array([SHARES.get(kind, 0.0) / max(counts[kind], 1) for kind in Kind], dtype=np.float32)
    return RowBatch(ids, kinds, per_token[kinds])


def draw_rows(worker: int, progress: Any, *, seed: int, options: RowOptions) -> Iterator[RowBatch]:
    """Endless batches of this worker; lengths follow ``progress``, a shared double from 0 to 1."""
    rng = np.random.default_rng([seed, worker])
    text = None if options.text is None else np.frombuffer(options.text.read_bytes(), dtype=np.uint8)
    index = worker << 40
    while True:
        done = min(float(progress.value), 1.0)
        length, alone = draw_length(rng, done, options.longest), done < options.streams_alone
        yield draw_batch(rng, seed=seed, index=index, length=length, options=options, text=text, alone=alone)
        index += options.batch_tokens
