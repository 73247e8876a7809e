"""The stage that makes the streams: of the tasks, of the user's text, or the baseline's own generation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from driftgate.accuracy.generation import continue_streams
from driftgate.errors import InputError
from driftgate.evals.run_subject import Subject
from driftgate.evals.tasks import Streams, make_streams

__all__ = ["check_tokens", "make_run_streams"]


def make_run_streams(subject: Subject, given: Sequence[tuple[int, ...]] = ()) -> Streams:
    """Streams of a run, of ``prefill + steps`` tokens each.

    Args:
        subject: model and suite.
        given: token ids of the streams that the user gave; the baseline goes on where they are short.

    Raises:
        InputError: tokens that the model has not.
    """
    suite, loaded = subject.suite, subject.loaded
    length = suite.steps + suite.prefill
    if suite.stream not in ("generation", "data"):
        streams = make_streams(
            tasks=suite.stream_tasks, n_sequences=suite.sequences, length=length, seed=suite.seed,
            difficulty=suite.difficulty,
        )  # fmt: skip
    else:
        starts = given or [(loaded.first_token,)] * suite.sequences
        whole = continue_streams(
            loaded.model, starts, length=length, seed=suite.seed, batch=subject.batch, backend=subject.backend,
            vocab_size=loaded.vocab_size,
        )  # fmt: skip
        streams = Streams(token_ids=whole, questions=(), stream_positions=length)
    check_tokens(streams.token_ids, vocab_size=loaded.vocab_size, model=loaded.name)
    return streams


def check_tokens(token_ids: np.ndarray, *, vocab_size: int, model: str) -> None:
    """Refuse streams with ids that a model has not; once here, since a check at every step would stop a GPU.

    Args:
        token_ids: [n_sequences, length] integers, 0 or more.
        vocab_size: real columns of the logits.
        model: its name.

    Raises:
        InputError: an id lies outside the vocabulary.
    """
    greatest = int(token_ids.max())
    if greatest >= vocab_size:
        raise InputError(
            f"model {model} has {vocab_size} tokens, the task streams use {greatest + 1}; give --task none to measure "
            "on its own generation"
        )
