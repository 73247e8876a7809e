"""A scratchpad that the model writes itself, then the answer in it: generate mode with four choices.

Two layouts; the checkpoint's tokenizer_config.json names its own (``"scratchpad_layout": "text"``), ``--prompt`` names
another, and ``stream`` is what is left:

| layout | prompt | what the model writes | answer |
| --- | --- | --- | --- |
| stream | a stream of tallies up to its questions | questions and answers: ``?a+?k/…`` | its last word on one key |
| text | registers, their steps, a question, four choices | the registers round by round | ``Answer: C`` |

In ``stream`` the choices are the four signs, as letters in an order keyed by seed, item and repeat. The model does not
know which key will be read, so it has to write them all, and the first token that no such block holds ends it.
An item fails as ``none`` where the block ended without the key, as ``truncated`` where the cap came first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from driftgate.accuracy.prompts import Decoded, Prompt
from driftgate.errors import EmptyRunError, InputError, UsageError, unknown_name
from driftgate.evals.tasks import scratchpad_text
from driftgate.evals.tasks.base import N_CHOICES
from driftgate.evals.tasks.build import make_layout
from driftgate.evals.tasks.extraction import ParseReason, Reading, read_letter
from driftgate.evals.tasks.gpqa import order_of
from driftgate.evals.tasks.item_task import ItemTask, ModelText, TaskOptions
from driftgate.evals.tasks.stream_text import NOTES, StreamText, last_statement
from driftgate.evals.tasks.streams import SIGNS, generate_streams

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LAYOUTS", "Layout", "ScratchpadTask"]

LETTERS = "ABCD"
LAYOUT_FIELD = "scratchpad_layout"
COLUMNS = (
    "plan", "task", "item_id", "repeat", "answer", "gold", "correct", "n_tokens", "capped", "parse_reason", "stream",
    "low_precision_reads",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Question:
    """One item in one order of its choices.

    Attributes:
        layout: its name.
        token_ids: prompt.
        gold: the letter.
        key: group letter that is read (``stream``), else empty.
        letters: letter of each sign (``stream``), else empty.
    """

    layout: str
    token_ids: tuple[int, ...]
    gold: str
    key: str = ""
    letters: str = ""


class Layout(ABC):
    """One format of scratchpad items, for one model.

    Attributes:
        name: as ``--prompt`` says it.
        temperature, max_new_tokens: where nothing else is asked for.

    Raises:
        InputError: the model's tokenizer cannot write this format.
    """

    name: ClassVar[str]
    temperature: ClassVar[float]
    max_new_tokens: ClassVar[int]

    def __init__(self, text: ModelText) -> None:
        self.text = text

    @abstractmethod
    def ask(self, *, seed: int, n_items: int, repeats: int) -> list[list[Question]]:
        """Questions by item and repeat."""

    @abstractmethod
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation."""

    @abstractmethod
    def read(self, question: Question, decoded: Decoded) -> Reading:
        """The letter that a generation gives, or why there is none."""


class StreamLayout(Layout):
    """Tally streams of 640 tokens; the model writes the block of questions.

    ``tiny-gdn`` in FP32, every key of 32 streams, 96 tokens: greedy 1.00, which leaves nothing to lose; 0.88, 0.86,
    0.83, 0.80 and 0.61 at temperatures 0.5, 0.6, 0.7, 0.8 and 1. Nearly all that it misses are keys that it leaves out.
    """

    name = "stream"
    temperature = 0.7
    max_new_tokens = 96
    length = 640

    def __init__(self, text: ModelText) -> None:
        super().__init__(text)
        self.stream_text = StreamText.of(text, task=ScratchpadTask.name)

    def ask(self, *, seed: int, n_items: int, repeats: int) -> list[list[Question]]:
        """Questions by item and repeat: one key of each stream, its choices in another order at each repeat."""
        layout = make_layout(self.length)
        streams = generate_streams(layout, seed=seed, indices=range(n_items))
        questions: list[list[Question]] = []
        for row, token_ids in enumerate(streams.token_ids):
            asked = np.flatnonzero(streams.is_tracking[row])[0]  # questions stand in a random order
            key = chr(token_ids[streams.answer_positions[asked] - 1])
            sign = int(np.flatnonzero(streams.answers[row, asked] == SIGNS)[0])
            prompt = self.stream_text.encode(token_ids[: layout.question_start + 1])
            questions.append([])
            for repeat in range(repeats):
                order = order_of(seed, f"{ScratchpadTask.name}-{row}", repeat)
                letters = "".join(LETTERS[order.index(i)] for i in range(N_CHOICES))
                questions[-1].append(
                    Question(layout=self.name, token_ids=prompt, gold=letters[sign], key=key, letters=letters)
                )
        return questions

    def stop_ids(self) -> tuple[int, ...]:
        """Every token that a block of questions does not hold."""
        within = {self.stream_text.to_model[c] for c in NOTES}
        return tuple(token for token in range(self.text.vocab_size) if token not in within)

    def read(self, question: Question, decoded: Decoded) -> Reading:
        """The last statement about the key; the prompt ends with the first question mark."""
        sign = last_statement("?" + self.stream_text.decode(decoded.token_ids), question.key)
        if sign is None:
            return Reading(None, ParseReason.TRUNCATED if decoded.capped else ParseReason.NONE)
        return Reading(question.letters[SIGNS.tolist().index(ord(sign))], ParseReason.OK)


class TextLayout(Layout):
    """Registers in plain text (scratchpad_text.py), 240 tokens of running state."""

    name = "text"
    temperature = 0.7
    max_new_tokens = 320
    length = 240

    def __init__(self, text: ModelText) -> None:
        super().__init__(text)
        if text.tokenizer is None:
            raise InputError(f"{text.name} has no tokenizer, and this scratchpad is text; add tokenizer.json")

    def ask(self, *, seed: int, n_items: int, repeats: int) -> list[list[Question]]:
        """Questions by item; the repeats of an item differ by their noise alone, its choices stand in its text."""
        front = () if self.text.bos_id is None else (self.text.bos_id,)
        questions = []
        for index in range(n_items):
            item = scratchpad_text.make_item(seed, index, length=self.length)
            prompt = (*front, *self.text.tokenizer.encode(item.prompt, add_special_tokens=False))
            questions.append([Question(layout=self.name, token_ids=prompt, gold=item.gold)] * repeats)
        return questions

    def stop_ids(self) -> tuple[int, ...]:
        """What ends a text."""
        return self.text.eos_ids

    def read(self, question: Question, decoded: Decoded) -> Reading:
        """The last answer statement, as in ``gpqa``."""
        written = [token for token in decoded.token_ids if token not in self.text.eos_ids]
        return read_letter(self.text.tokenizer.decode(written), capped=decoded.capped)


LAYOUTS: dict[str, type[Layout]] = {kind.name: kind for kind in (StreamLayout, TextLayout)}


@dataclass(frozen=True, kw_only=True)
class ScratchpadTask(ItemTask):
    """See the module. Options ``data`` and ``mode`` mean nothing here: items are drawn, answers are generated.

    Attributes:
        n_items: items; each is answered ``repeats`` times, twice where nothing is said.
    """

    name = "scratchpad"
    version = 1
    description = "the model writes its running state, then the answer: four choices, generated"
    chance = 1 / N_CHOICES

    n_items: int = 32

    def build(self, options: TaskOptions, text: ModelText) -> list[Prompt]:
        """Prompts of all items and repeats.

        Raises:
            UsageError: an unknown layout, or an option out of range.
            EmptyRunError: no item or no repeat.
            InputError: the tokenizer does not fit the layout.
        """
        layout = find_layout(options, text)
        repeats = 2 if options.repeats is None else options.repeats
        allowed = layout.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
        if min(repeats, self.n_items) < 1:
            raise EmptyRunError(f"task {self.name}: {self.n_items} items, {repeats} repeats; give 1 or more of each")
        if allowed < 1:
            raise UsageError(f"max-new-tokens {allowed}: an answer needs at least one; give 1 or more")
        asked = layout.ask(seed=options.seed, n_items=self.n_items, repeats=repeats)
        stop_ids = layout.stop_ids()
        return [
            Prompt(
                item_id=f"{self.name}-{options.seed}-{number}",
                repeat=repeat,
                token_ids=question.token_ids,
                prefill=options.prefilled(len(question.token_ids), mode="generate"),
                max_new_tokens=allowed,
                temperature=layout.temperature if options.temperature is None else options.temperature,
                stop_ids=stop_ids,
                detail=question,
            )
            for number, questions in enumerate(asked)
            for repeat, question in enumerate(questions)
        ]

    def score(
        self, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Decoded]], text: ModelText
    ) -> pd.DataFrame:
        """Items of every plan; see ``ItemTask.score``. ``low_precision_reads`` is of the whole generation."""
        import pandas as pd

        layouts = {name: LAYOUTS[name](text) for name in {prompt.detail.layout for prompt in prompts}}
        rows = []
        for plan, decoded in answers.items():
            for prompt, own in zip(prompts, decoded, strict=True):
                question: Question = prompt.detail
                reading = (
                    layouts[question.layout].read(question, own) if own.finite else Reading(None, ParseReason.NONFINITE)
                )
                row = (
                    plan, self.name, prompt.item_id, prompt.repeat, reading.letter, question.gold,
                    reading.letter == question.gold, len(own.token_ids), own.capped, str(reading.reason), -1,
                    own.low_precision_reads,
                )  # fmt: skip
                rows.append(dict(zip(COLUMNS, row, strict=True)))
        return pd.DataFrame(rows, columns=COLUMNS).astype({"stream": "int64"})


def find_layout(options: TaskOptions, text: ModelText) -> Layout:
    """The layout that is asked for, else the one that the checkpoint names, else ``stream``."""
    named = getattr(text.tokenizer, "init_kwargs", {}).get(LAYOUT_FIELD, "stream")
    name = named if options.prompt is None else options.prompt
    if name not in LAYOUTS:
        raise unknown_name("scratchpad layout", name, LAYOUTS)
    return LAYOUTS[name](text)
