"""The baseline's own generation: the stream of a checkpoint that no task was written for.

Sampled at temperature 1 (a small model loops when greedy) by the runner that answers items: the noise is a function of
seed, stream and index alone, so a stream depends on neither batch nor device beyond the logits themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from driftgate.accuracy.answers import BASELINE_NAME, AnswerRunner
from driftgate.accuracy.prompts import Prompt
from driftgate.kernels.contract import Backend

__all__ = ["continue_streams"]


def continue_streams(
    model: torch.nn.Module,
    starts: Sequence[Sequence[int]],
    *,
    length: int,
    seed: int,
    batch: int,
    backend: Backend,
    vocab_size: int,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Go on with streams that are shorter than ``length``, with the FP32 baseline's samples.

    Args:
        model: a loaded causal language model of a covered family.
        starts: token ids of each stream, at least one; what is behind ``length`` is left out. The number of a stream
            keys its noise, so that equal starts go on differently.
        length: tokens of each stream when it is done.
        seed: of the noise, 0 or more.
        batch: sequences that decode together.
        backend: which code takes the decode steps.
        vocab_size: columns of the logits that may be sampled.
        progress: called with the number of decode steps just done: ``length - 2`` a batch, where a start is one token.

    Returns:
        Token ids [len(starts), length] int64.
    """
    prompts = [
        Prompt(item_id=f"stream {i}", token_ids=tuple(start), max_new_tokens=length - len(start))
        for i, start in enumerate(starts)
        if len(start) < length
    ]
    grown: dict[str, tuple[int, ...]] = {}
    if prompts:
        runner = AnswerRunner(model, {}, batch=batch, backend=backend, vocab_size=vocab_size, seed=seed)
        found = runner.run(prompts, step_progress=progress)[BASELINE_NAME]
        grown = {answer.item_id: answer.token_ids for answer in found}
    return np.asarray([(*start[:length], *grown.get(f"stream {i}", ())) for i, start in enumerate(starts)])
