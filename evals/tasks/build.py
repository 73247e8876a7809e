"""The streams that ship: a layout for every length, and the questions of the tasks that were asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from driftgate.errors import UsageError, unknown_name
from driftgate.evals.tasks import recall, tracking
from driftgate.evals.tasks.base import Question, Streams, order_choices
from driftgate.evals.tasks.streams import StreamBatch, StreamLayout, generate_streams

__all__ = ["SHORTEST", "make_layout", "make_streams"]

SHORTEST = 64
_MODULES = {module.TASK.name: module for module in (recall, tracking)}


def make_layout(length: int) -> StreamLayout:
    """The layout for streams of this many tokens: 12 pairs, given twice, and 14 groups, all asked, from 616 tokens on.

    Shorter streams have one group for every 44 tokens, and six pairs for seven groups.
    """
    if length < SHORTEST:
        raise UsageError(f"a task stream needs at least {SHORTEST} tokens, got {length}; ask for more steps")
    n_groups = int(np.clip(length // 44, 2, 14))
    n_pairs = max(2, n_groups * 6 // 7)
    return StreamLayout(
        length=length,
        n_pairs=n_pairs,
        n_groups=n_groups,
        n_recall=n_pairs,
        n_tracking=n_groups,
        event_share=0.8,
        sign_pairs=True,
        pair_repeats=2,
        margin=(0.02, 0.14),
        late_share=0.4,
        early_share=0.2,
        order_bias=0.35,
    )


def make_streams(*, tasks: Sequence[str], n_sequences: int, length: int, seed: int) -> Streams:
    """Streams and the questions of these tasks in them.

    The tokens depend on (seed, sequence index, length) alone, not on ``tasks`` or ``n_sequences``.

    Args:
        tasks: names of tasks whose questions are wanted; the others are in the stream but not listed.
        n_sequences: number of streams.
        length: tokens in each, answers included.
        seed: non-negative.
    """
    for name in tasks:
        if name not in _MODULES:
            raise unknown_name("task", name, _MODULES)
    if n_sequences < 1 or seed < 0:
        raise UsageError(f"need at least one sequence and a seed >= 0, got {n_sequences} and {seed}")
    batch = generate_streams(make_layout(length), seed=seed, indices=range(n_sequences))
    questions = [question for row in range(n_sequences) for question in _ask(batch, row, tasks, seed)]
    return Streams(
        token_ids=batch.token_ids,
        questions=tuple(questions),
        stream_positions=batch.layout.question_start,
    )


def _ask(batch: StreamBatch, row: int, tasks: Sequence[str], seed: int) -> list[Question]:
    questions = []
    for number, position in enumerate(batch.answer_positions):
        name = tracking.TASK.name if batch.is_tracking[row, number] else recall.TASK.name
        if name not in tasks:
            continue
        item_id = f"{name}-{seed}-{row}-{number}"
        answer = int(batch.answers[row, number])
        choices, gold = order_choices(seed, item_id, answer, _MODULES[name].other_answers(answer))
        questions.append(Question(item_id, row, int(position) - 1, choices, gold, name))
    return questions
