"""One long free generation per item, with questions in it: every plan writes its own text and is asked about it.

The prompt is a stream of tallies; each plan writes on with common noise. At set positions ``?`` and a group letter are
fed, the plan's own next token is its answer, and four filler tokens lead back to the stream. The right answer is
computed from the plan's own text up to there: the sign that followed this letter most often. Where several signs lead,
each of them is right (``margin`` 0), so no item depends on another plan's text and none is left out.

``tiny-gdn`` in FP32, 16 generations of 512 tokens at temperature 1: 0.95 right, 0.94 … 0.97 by quarters, 4 % ties, and
it writes on as before. Greedy it is always right and loops (repetition 0.93), so the task samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from driftgate.accuracy.prompts import Decoded, Prompt
from driftgate.errors import EmptyRunError, UsageError
from driftgate.evals.tasks.base import N_CHOICES
from driftgate.evals.tasks.extraction import ParseReason
from driftgate.evals.tasks.free_running import free_running
from driftgate.evals.tasks.gpqa import order_of
from driftgate.evals.tasks.item_task import ItemTask, ModelText, TaskOptions
from driftgate.evals.tasks.stream_text import StreamText, count_events, leading_signs
from driftgate.evals.tasks.streams import FILLER, QUESTION, SIGNS, StreamLayout, generate_streams

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LonggenTask", "accuracy_by_position", "place_questions"]

LETTERS = "ABCD"
WAY_BACK = tuple(int(token) for token in FILLER[10:14])
"""Four steps along the ring of filler: without them the model goes on asking and answering."""
GAP, MOST_QUESTIONS, SHORTEST = 64, 64, 16
COLUMNS = (
    "plan", "task", "item_id", "repeat", "answer", "gold", "correct", "n_tokens", "capped", "parse_reason", "stream",
    "low_precision_reads", "position", "margin",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One question within a generation.

    Attributes:
        index: of the generated token that is the answer.
        key: group letter.
        letters: letter of each sign, in the order of SIGNS.
    """

    index: int
    key: str
    letters: str


def place_questions(max_new_tokens: int) -> list[int]:
    """Indices of the answers: evenly over the generation, one for every GAP tokens, at most MOST_QUESTIONS.

    Raises:
        UsageError: the generation is too short for a question.
    """
    if max_new_tokens < SHORTEST:
        raise UsageError(f"max-new-tokens {max_new_tokens}: longgen needs at least {SHORTEST} for a question")
    n = min(max(max_new_tokens // GAP, 1), MOST_QUESTIONS)
    gap = max_new_tokens // n
    return [gap * (number + 1) - 1 for number in range(n)]


@dataclass(frozen=True, kw_only=True)
class LonggenTask(ItemTask):
    """See the module. Options ``data``, ``mode`` and ``prompt`` mean nothing here.

    Attributes:
        n_items: generations.
        prompt_tokens: of the stream that each begins with.
        groups: tallied letters in it, all of them asked in turn.
        margin: as in ``StreamLayout``; the leads that the prompt leaves.
    """

    name = "longgen"
    version = 1
    description = "questions within one long free generation, answered from the plan's own text"
    chance = 1 / N_CHOICES

    n_items: int = 16
    prompt_tokens: int = 512
    groups: int = 8
    margin: tuple[float, float] = (0.1, 0.2)

    def build(self, options: TaskOptions, text: ModelText) -> list[Prompt]:
        """Prompts: 512 generated tokens at temperature 1, answered once, where nothing else is asked for.

        Raises:
            UsageError: an option out of range.
            EmptyRunError: no item or no repeat.
            InputError: the tokenizer cannot write streams.
        """
        repeats = 1 if options.repeats is None else options.repeats
        length = 512 if options.max_new_tokens is None else options.max_new_tokens
        if min(repeats, self.n_items) < 1:
            raise EmptyRunError(f"task {self.name}: {self.n_items} items, {repeats} repeats; give 1 or more of each")
        places = place_questions(length)
        translate = StreamText.of(text, task=self.name)
        prompts = []
        for number, (stream, keys) in enumerate(self._streams(options.seed)):
            token_ids = translate.encode(stream)
            item_id = f"{self.name}-{options.seed}-{number}"
            for repeat in range(repeats):
                asked = _ask(places, keys, options.seed, item_id, repeat)
                prompts.append(
                    Prompt(
                        item_id=item_id,
                        repeat=repeat,
                        token_ids=token_ids,
                        prefill=options.prefilled(len(token_ids), mode="generate"),
                        max_new_tokens=length,
                        temperature=1.0 if options.temperature is None else options.temperature,
                        forced=_force(asked, length, translate),
                        detail=asked,
                    )
                )
        return prompts

    def count(self, prompts: Sequence[Prompt]) -> tuple[int, int, int]:
        """Generations, questions in each, repeats: a generation is the unit, since its answers share a state."""
        items, _, repeats = super().count(prompts)
        return items, len(prompts[0].detail), repeats

    def _streams(self, seed: int) -> list[tuple[np.ndarray, str]]:
        """Streams up to their questions, [prompt_tokens] each, and the groups of each in the order of asking."""
        try:
            layout = StreamLayout(
                length=self.prompt_tokens + 3 * self.groups,
                n_pairs=1,
                n_groups=self.groups,
                n_recall=0,
                n_tracking=self.groups,
                event_share=0.8,
                sign_pairs=True,
                margin=self.margin,
            )
        except ValueError as error:
            raise UsageError(f"task {self.name}: {error}") from error
        batch = generate_streams(layout, seed=seed, indices=range(self.n_items))
        keys = batch.token_ids[:, batch.answer_positions - 1]
        return [
            (stream[: self.prompt_tokens], "".join(map(chr, own)))
            for stream, own in zip(batch.token_ids, keys, strict=True)
        ]

    def score(
        self, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Decoded]], text: ModelText
    ) -> pd.DataFrame:
        """Items of every plan, one for each question of each generation.

        Beyond the columns of ``ItemTask.score``: ``position`` of the answer in prompt and generation together,
        ``margin`` of the plan's own tally; ``gold`` holds every right letter; ``low_precision_reads`` is of the whole
        generation. ``capped`` is False: the length of a generation is set, not a limit. ``stream`` is the item.
        """
        import pandas as pd

        translate = StreamText.of(text, task=self.name)
        numbers = {item: number for number, item in enumerate(dict.fromkeys(p.item_id for p in prompts))}
        rows = []
        for plan, decoded in answers.items():
            for prompt, own in zip(prompts, decoded, strict=True):
                fixed = {
                    "plan": plan, "task": self.name, "repeat": prompt.repeat, "capped": False,
                    "stream": numbers[prompt.item_id], "low_precision_reads": own.low_precision_reads,
                }  # fmt: skip
                rows += [fixed | row for row in _score_one(prompt, own, translate)]
        return pd.DataFrame(rows, columns=COLUMNS).astype({"stream": "int64"})

    def measure_generation(
        self, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Decoded]]
    ) -> dict[str, dict[str, Any]]:
        """First divergence, repetition and length by plan (free_running.py)."""
        return free_running(prompts, answers)


def _ask(places: Sequence[int], keys: str, seed: int, item_id: str, repeat: int) -> tuple[Asked, ...]:
    """The questions of one generation; the keys in turn, each question's choices in an order of its own."""
    asked = []
    for number, index in enumerate(places):
        order = order_of(seed, f"{item_id}-{number}", repeat)
        letters = "".join(LETTERS[order.index(i)] for i in range(N_CHOICES))
        asked.append(Asked(index=index, key=keys[number % len(keys)], letters=letters))
    return tuple(asked)


def _force(asked: Sequence[Asked], length: int, translate: StreamText) -> tuple[tuple[int, int], ...]:
    """Generated tokens that are fed: question mark and key before each answer, the way back after it."""
    forced = []
    for question in asked:
        characters = {question.index - 2: chr(QUESTION), question.index - 1: question.key}
        characters |= {question.index + 1 + i: chr(token) for i, token in enumerate(WAY_BACK)}
        forced += [(index, translate.to_model[c]) for index, c in characters.items() if index < length]
    return tuple(forced)


def _score_one(prompt: Prompt, own: Decoded, translate: StreamText) -> list[dict[str, Any]]:
    """What the answers of one generation come to, in the order of asking."""
    signs = "".join(map(chr, SIGNS))
    before, written = len(prompt.token_ids), translate.decode(own.token_ids)
    events = count_events(translate.decode(prompt.token_ids) + written)
    counts: dict[str, list[int]] = {}
    rows, done = [], 0
    for number, question in enumerate(prompt.detail):
        while done < len(events) and events[done][0] <= before + question.index - 2:
            _, key, sign = events[done]
            counts.setdefault(key, [0] * N_CHOICES)[signs.index(sign)] += 1
            done += 1
        leading, margin = leading_signs(counts.get(question.key, [0] * N_CHOICES))
        gold = "".join(sorted(question.letters[signs.index(sign)] for sign in leading))
        said = written[question.index : question.index + 1] if own.finite else ""
        answer = question.letters[signs.index(said)] if said and said in signs else None
        reason = ParseReason.OK if answer else ParseReason.NONE if own.finite else ParseReason.NONFINITE
        rows.append(
            {
                "item_id": f"{prompt.item_id}-{number}",
                "answer": answer,
                "gold": gold,
                "correct": answer is not None and answer in gold,
                "n_tokens": question.index + 1,
                "parse_reason": str(reason),
                "position": before + question.index,
                "margin": margin,
            }
        )
    return rows


def accuracy_by_position(items: pd.DataFrame, *, n_bins: int = 8, least_margin: int = 0) -> pd.DataFrame:
    """Accuracy of every plan against position within the generations.

    Args:
        items: items frame of a run; rows of other tasks are left out.
        n_bins: parts of equally many questions.
        least_margin: questions whose own tally has a smaller lead are left out, and counted.

    Returns:
        Frame with plan, low and high (first and last position of the part), n, excluded, accuracy, ci_low, ci_high;
        the interval's unit is the generation. Undefined figures are NaN.
    """
    import pandas as pd

    from driftgate.accuracy.statistics import proportion_ci

    own = items[items["task"] == LonggenTask.name]
    parts = np.array_split(np.sort(own["position"].unique()), n_bins)
    rows = []
    for plan in own["plan"].unique():
        for positions in parts:
            if not len(positions):
                continue
            part = own[(own["plan"] == plan) & own["position"].isin(positions)]
            by_stream = [rows for _, rows in part.groupby("stream")]
            width = max(map(len, by_stream))
            correct, counts = np.zeros((2, len(by_stream), width), dtype=bool)
            for i, stream in enumerate(by_stream):
                correct[i, : len(stream)] = stream["correct"]
                counts[i, : len(stream)] = stream["margin"] >= least_margin
            n = int(counts.sum())
            found = proportion_ci(correct, counts) if n else None
            figures = (found.value, found.ci_low, found.ci_high) if found else (np.nan,) * 3
            rows.append((plan, int(positions[0]), int(positions[-1]), n, len(part) - n, *figures))
    columns = ["plan", "low", "high", "n", "excluded", "accuracy", "ci_low", "ci_high"]
    return pd.DataFrame(rows, columns=columns)
