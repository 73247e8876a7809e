"""The streams that ship: a layout for every length, and the questions of the tasks that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from driftgate.errors import UsageError, unknown_name
from driftgate.evals.tasks import recall, tracking
from driftgate.evals.tasks.base import Question, Streams, order_choices
from driftgate.evals.tasks.streams import GROUPS, StreamBatch, StreamLayout, generate_streams

__all__ = ["SHORTEST", "Difficulty", "make_layout", "make_streams"]

SHORTEST = 64
_MODULES = {module.TASK.name: module for module in (recall, tracking)}


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """How hard recall and tracking are; None leaves a size to the length of the stream.

    Args:
        pairs: to be recalled, all of them asked.
        pair_repeats: how often the block of pairs is given; 1 is harder than 2.
        groups: to be tracked, all of them asked; more groups, fewer events for each.
        margin: least and greatest lead of a group's gold sign, as a share of the group's events; smaller is harder,
            one event is the least.

    Raises:
        UsageError: a value out of range; names it.
    """

    pairs: int | None = None
    pair_repeats: int = 2
    groups: int | None = None
    margin: tuple[float, float] = (0.02, 0.14)

    def __post_init__(self) -> None:
        for name in ("pairs", "pair_repeats", "groups"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= len(GROUPS):
                raise UsageError(f"difficulty {name}: expected 1 to {len(GROUPS)}, got {value}")
        if (self.pairs or 1) + (self.groups or 1) > len(GROUPS):
            raise UsageError(
                f"difficulty: {self.pairs} pairs and {self.groups} groups need more than the {len(GROUPS)} letters "
                "there are; give fewer"
            )
        low, high = self.margin
        if not 0.0 <= low <= high <= 1.0:
            raise UsageError(f"difficulty margin: expected two shares, 0 <= low <= high <= 1, got {low} and {high}")


STANDARD = Difficulty()


def make_layout(length: int, difficulty: Difficulty = STANDARD) -> StreamLayout:
    """The layout for streams of this many tokens: 12 pairs, given twice, and 14 groups, all asked, from 616 tokens on.

    Shorter streams have one group for every 44 tokens, and six pairs for seven groups.

    Args:
        length: tokens, answers included.
        difficulty: sizes that are to be others.

    Raises:
        UsageError: the stream is too short for these sizes.
    """
    if length < SHORTEST:
        raise UsageError(f"a task stream needs at least {SHORTEST} tokens, got {length}; ask for more steps")
    n_groups = int(np.clip(length // 44, 2, 14))
    n_pairs = max(2, n_groups * 6 // 7) if difficulty.pairs is None else difficulty.pairs
    n_groups = n_groups if difficulty.groups is None else difficulty.groups
    try:
        return StreamLayout(
            length=length,
            n_pairs=n_pairs,
            n_groups=n_groups,
            n_recall=n_pairs,
            n_tracking=n_groups,
            event_share=0.8,
            sign_pairs=True,
            pair_repeats=difficulty.pair_repeats,
            margin=difficulty.margin,
            late_share=0.4,
            early_share=0.2,
            order_bias=0.35,
        )
    except ValueError as error:
        raise UsageError(f"{n_pairs} pairs and {n_groups} groups in {length} tokens: {error}") from error


def make_streams(
    *, tasks: Sequence[str], n_sequences: int, length: int, seed: int, difficulty: Difficulty = STANDARD
) -> Streams:
    """Streams and the questions of these tasks in them.

    The tokens depend on (seed, sequence index, length, difficulty) alone, not on ``tasks`` or ``n_sequences``.

    Args:
        tasks: names of tasks whose questions are wanted; the others are in the stream but not listed.
        n_sequences: number of streams.
        length: tokens in each, answers included.
        seed: non-negative.
        difficulty: of the questions.
    """
    for name in tasks:
        if name not in _MODULES:
            raise unknown_name("task", name, _MODULES)
    if n_sequences < 1 or seed < 0:
        raise UsageError(f"need at least one sequence and a seed >= 0, got {n_sequences} and {seed}")
    batch = generate_streams(make_layout(length, difficulty), seed=seed, indices=range(n_sequences))
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
