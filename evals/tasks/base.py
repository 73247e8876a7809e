"""What a task is, what a question is, and how the choices of a question are ordered.

Everything here is data: a task names a kind of question that is asked at the end of a stream (streams.py), and scoring
compares the logits of the four choices at one position.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["N_CHOICES", "Question", "Streams", "Task", "keyed_words", "order_choices"]

N_CHOICES = 4


@dataclass(frozen=True)
class Task:
    """A kind of four-choice question.

    ``version`` changes whenever the same seed would give other questions.
    """

    name: str
    version: int
    description: str
    n_choices: int = N_CHOICES
    chance: float = 1 / N_CHOICES

    def __post_init__(self) -> None:
        if self.n_choices < 2 or not 0 < self.chance < 1 or self.version < 1:
            raise ValueError(f"task {self.name!r}: bad n_choices, chance or version")


@dataclass(frozen=True)
class Question:
    """One item.

    Args:
        item_id: stable function of the seed, the sequence index and the question.
        sequence: row of ``Streams.token_ids``.
        position: index of the token whose next-token logits answer the question.
        choices: four distinct token ids.
        gold: index of the right one, 0 to 3.
        task: name of the task.
    """

    item_id: str
    sequence: int
    position: int
    choices: tuple[int, int, int, int]
    gold: int
    task: str

    def __post_init__(self) -> None:
        if len(set(self.choices)) != N_CHOICES or not 0 <= self.gold < N_CHOICES:
            raise ValueError(f"{self.item_id}: choices must be four distinct tokens and gold 0..3")


@dataclass(frozen=True)
class Streams:
    """Token streams with the questions asked in them.

    Args:
        token_ids: int64 [n_sequences, length].
        questions: by sequence, then by position.
        stream_positions: number of positions before the first question; drift statistics use only these.
    """

    token_ids: npt.NDArray[np.int64]
    questions: tuple[Question, ...]
    stream_positions: int


def keyed_words(seed: int, item_id: str) -> list[int]:
    """Sixteen 32-bit words that depend on the seed and the item alone."""
    digest = hashlib.blake2b(f"{seed}/{item_id}".encode(), digest_size=64).digest()
    return [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 64, 4)]


def order_choices(
    seed: int, item_id: str, answer: int, others: tuple[int, ...]
) -> tuple[tuple[int, int, int, int], int]:
    """Four choices in an order keyed by (seed, item_id), and the index of the answer.

    Args:
        seed: seed of the streams.
        item_id: id of the item.
        answer: the right token id.
        others: at least three and at most eleven other token ids; three of them are taken by the same key.
    """
    words = keyed_words(seed, item_id)
    taken = [token for _, token in sorted(zip(words[4:], others, strict=False))][: N_CHOICES - 1]
    four = [token for _, token in sorted(zip(words[:4], [answer, *taken], strict=True))]
    return (four[0], four[1], four[2], four[3]), four.index(answer)
