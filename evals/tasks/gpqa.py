"""Four-choice questions in GPQA's format, from the user's file or the small set that comes with the package.

Two modes: ``loglikelihood`` compares the four letters after the prompt, ``generate`` lets each plan reason and reads
the letter out of what it wrote (extraction.py). The order of the choices is a function of seed, item id and repeat,
another one in each of the first 24 repeats.

| left out | loglikelihood | generate | generate, embedded checkpoint |
| --- | --- | --- | --- |
| repeats | 1 | 16 | 16 |
| temperature | | 0.6 | 0.6 |
| max_new_tokens | | 2048, or what the context leaves beside the longest prompt | 64, they write no answer |
| prompt | simple-evals with a chat template, else lm-eval | simple-evals | short |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from driftgate.accuracy.prompts import Decoded, Prompt, check_lengths
from driftgate.errors import EmptyRunError, InputError, UsageError
from driftgate.evals.checkpoints import list_checkpoints
from driftgate.evals.tasks.base import N_CHOICES, keyed_words
from driftgate.evals.tasks.extraction import ParseReason, Reading, read_letter
from driftgate.evals.tasks.item_task import ItemTask, Mode, ModelText, TaskOptions
from driftgate.evals.tasks.question_file import EQUAL_CHOICES, LETTERS, Item, load_questions
from driftgate.evals.tasks.wordings import Rendered, Wording, encode, find_letters, find_wording, own_bos, render

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["AnswerKey", "GpqaTask", "order_of"]

REPEATS: dict[Mode, int] = {"loglikelihood": 1, "generate": 16}
TEMPERATURE = 0.6
MAX_NEW_TOKENS = 2048
MAX_NEW_TOKENS_EMBEDDED = 64
ORDERS = tuple(permutations(range(N_CHOICES)))
COLUMNS = (
    "plan", "task", "item_id", "repeat", "answer", "gold", "correct", "n_tokens", "capped", "parse_reason", "stream",
    "mass",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AnswerKey:
    """What scoring needs to know of a prompt.

    Attributes:
        gold: right letter in the order that was asked.
        order: index in the file of the choice at A, B, C, D.
        wording: its name.
        thinking: the prompt ends within ``<think>``.
        flags: of the item.
    """

    gold: str
    order: tuple[int, ...]
    wording: str
    thinking: bool
    flags: tuple[str, ...]


def order_of(seed: int, item_id: str, repeat: int) -> tuple[int, ...]:
    """Index in the file of the choice that is asked as A, B, C, D; differs between the first 24 repeats."""
    keys = {order: keyed_words(seed, f"{item_id}/{order}")[0] for order in ORDERS}
    return sorted(ORDERS, key=lambda order: (keys[order], order))[repeat % len(ORDERS)]


class GpqaTask(ItemTask):
    """See the module."""

    name = "gpqa"
    version = 1
    description = "four-choice science questions from a file in GPQA's format, or a small set of this project"
    chance = 1 / N_CHOICES
    takes_data = True

    def build(self, options: TaskOptions, text: ModelText) -> list[Prompt]:
        """Prompts of all repeats, item by item in the order of the file.

        Args:
            options: of the run; what is None is as the table of the module says.
            text: the model's tokenizer and limits.

        Raises:
            UsageError: an option outside its range, or an unknown wording.
            InputError: the file, the tokenizer or the model's context does not fit.
            EmptyRunError: no question, or no repeat.
        """
        mode: Mode = options.mode or "loglikelihood"
        repeats = REPEATS[mode] if options.repeats is None else options.repeats
        _check(options, repeats)
        if text.tokenizer is None:
            raise InputError(f"{text.name} has no tokenizer, and gpqa asks in words; add tokenizer.json to its folder")
        items = load_questions(options.data)
        wording = find_wording(options.prompt or _default_wording(text, mode))
        asked = [_ask(item, wording, mode, options.seed, r, text) for item in items for r in range(repeats)]
        make = self._scored if mode == "loglikelihood" else self._generated
        prompts = make(asked, options, text)
        check_lengths(prompts, context=text.context, task=self.name)
        return prompts

    def _scored(self, asked: list[_Asked], options: TaskOptions, text: ModelText) -> list[Prompt]:
        """Prompts whose next token is the letter."""
        prompts = []
        for one in asked:
            found = find_letters(text.tokenizer, one.text, bos=_bos(text), vocab_size=text.vocab_size)
            prompts.append(
                Prompt(
                    item_id=one.item.item_id,
                    repeat=one.repeat,
                    token_ids=found.prompt,
                    prefill=options.prefilled(len(found.prompt), mode="loglikelihood"),
                    choices=found.letters,
                    detail=one.key,
                )
            )
        return prompts

    def _generated(self, asked: list[_Asked], options: TaskOptions, text: ModelText) -> list[Prompt]:
        """Prompts that each plan answers in its own words."""
        ids = [encode(text.tokenizer, one.text, bos=_bos(text)) for one in asked]
        allowed = options.max_new_tokens
        if allowed is None:
            allowed = MAX_NEW_TOKENS_EMBEDDED if _embedded(text) else MAX_NEW_TOKENS
            if text.context is not None:
                allowed = max(1, min(allowed, text.context - max(map(len, ids))))
        return [
            Prompt(
                item_id=one.item.item_id,
                repeat=one.repeat,
                token_ids=tokens,
                prefill=options.prefilled(len(tokens), mode="generate"),
                max_new_tokens=allowed,
                temperature=TEMPERATURE if options.temperature is None else options.temperature,
                stop_ids=text.eos_ids,
                detail=one.key,
            )
            for one, tokens in zip(asked, ids, strict=True)
        ]

    def describe(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """How many items have two choices that read the same, where any has."""
        equal = {prompt.item_id for prompt in prompts if EQUAL_CHOICES in prompt.detail.flags}
        return {EQUAL_CHOICES: len(equal)} if equal else {}

    def score(
        self, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Decoded]], text: ModelText
    ) -> pd.DataFrame:
        """Items of every plan, with the column ``mass``: probability on the four letters, NaN where text was generated.

        Args:
            prompts: as ``build`` made them.
            answers: by plan, in the order of the prompts.
            text: decodes what was generated.
        """
        import pandas as pd

        rows = []
        for plan, decoded in answers.items():
            for prompt, came in zip(prompts, decoded, strict=True):
                key: AnswerKey = prompt.detail
                if (came.item_id, came.repeat) != (prompt.item_id, prompt.repeat):
                    raise ValueError(f"{plan}: {came.item_id}/{came.repeat} answers {prompt.item_id}/{prompt.repeat}")
                reading, mass = _read(prompt, came, text)
                n_tokens = 1 if prompt.choices else len(came.token_ids)
                row = (
                    plan, self.name, prompt.item_id, prompt.repeat, reading.letter, key.gold,
                    reading.letter == key.gold, n_tokens, came.capped, str(reading.reason), -1, mass,
                )  # fmt: skip
                rows.append(dict(zip(COLUMNS, row, strict=True)))
        return pd.DataFrame(rows, columns=COLUMNS).astype({"stream": "int64"})


@dataclass(frozen=True)
class _Asked:
    """One question in one order; ``text`` ends where the answer or the letter begins."""

    item: Item
    repeat: int
    text: str
    key: AnswerKey


def _ask(item: Item, wording: Wording, mode: Mode, seed: int, repeat: int, text: ModelText) -> _Asked:
    order = order_of(seed, item.item_id, repeat)
    choices = [item.choices[i] for i in order]
    rendered = render(text.tokenizer, wording.fill(item.question, choices, mode=mode))
    key = AnswerKey(
        gold=LETTERS[order.index(item.gold)],
        order=order,
        wording=wording.name,
        thinking=rendered.thinking,
        flags=item.flags,
    )
    lead = _lead(wording, rendered) if mode == "loglikelihood" else ""
    return _Asked(item, repeat, rendered.text + lead, key)


def _lead(wording: Wording, rendered: Rendered) -> str:
    """What stands between prompt and letter; thinking that the template opened is closed, empty."""
    closed = "\n</think>\n\n" if rendered.thinking else ""
    return closed + (wording.chat_lead if rendered.chat else wording.lead)


def _read(prompt: Prompt, came: Decoded, text: ModelText) -> tuple[Reading, float]:
    """Letter or reason, and the probability on the four letters."""
    if prompt.choices:
        scores = np.asarray(came.choice_logprobs, dtype=np.float64)
        if not came.finite or np.isnan(scores).any():
            return Reading(None, ParseReason.NONFINITE), float("nan")
        best = min(range(N_CHOICES), key=lambda i: (-scores[i], prompt.choices[i]))
        return Reading(LETTERS[best], ParseReason.OK), float(np.exp(scores).sum())
    if not came.finite:
        return Reading(None, ParseReason.NONFINITE), float("nan")
    written = [token for token in came.token_ids if token not in prompt.stop_ids]
    words = text.tokenizer.decode(written, skip_special_tokens=False)  # <think> may be a special token
    return read_letter(words, capped=came.capped, thinking=prompt.detail.thinking), float("nan")


def _default_wording(text: ModelText, mode: Mode) -> str:
    if _embedded(text):
        return "short"
    return "simple-evals" if mode == "generate" or text.tokenizer.chat_template else "lm-eval"


def _embedded(text: ModelText) -> bool:
    return text.name in list_checkpoints()


def _bos(text: ModelText) -> int | None:
    """First token of a prompt: where the tokenizer adds one, and for embedded checkpoints, whose streams begin so."""
    return text.bos_id if _embedded(text) else own_bos(text.tokenizer)


def _check(options: TaskOptions, repeats: int) -> None:
    if repeats < 1:
        raise EmptyRunError(f"repeats {repeats}: nothing would be answered; give 1 or more")
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise UsageError(f"max-new-tokens {options.max_new_tokens}: an answer needs at least one; give 1 or more")
    if options.temperature is not None and not 0 <= options.temperature < float("inf"):
        raise UsageError(f"temperature {options.temperature}: expected a number, 0 or more")
