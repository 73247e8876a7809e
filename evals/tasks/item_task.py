"""Tasks whose items are prompts of their own, decoded by ``driftgate.accuracy.answers`` for every plan.

A task makes prompts from what the user chose (``build``, with the tokenizer alone: what does not fit is refused before
a model loads) and items from what came back (``score``, a pure function, so that stored answers can be scored again).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import pandas as pd

    from driftgate.accuracy.prompts import Decoded, Prompt
    from driftgate.accuracy.records import PerplexityRecord

__all__ = ["ItemTask", "ModelText", "TaskOptions"]

Mode = Literal["loglikelihood", "generate"]


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """What the suite and the command line say about items; None leaves it to the task.

    Attributes:
        seed: of option order, items that are drawn, and sampling noise.
        data: file or hub id with the user's items.
        mode: score the choices, or let the model generate and read its answer.
        prompt: name of the wording.
        repeats: answers to each item.
        temperature: of sampling; 0 is greedy.
        max_new_tokens: tokens that a plan may generate for an answer.
        prefill: tokens of each prompt that the model prefills itself: ``none`` (only the first, which has to be),
            ``prompt`` (all), or a number; None for ``none`` where choices are scored and ``prompt`` where text is
            generated.
    """

    seed: int = 0
    data: str | None = None
    mode: Mode | None = None
    prompt: str | None = None
    repeats: int | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    prefill: str | int | None = None

    def prefilled(self, length: int, *, mode: Mode) -> int:
        """Tokens of a prompt of this length that are prefilled: 1 … length."""
        chosen = self.prefill if self.prefill is not None else ("none" if mode == "loglikelihood" else "prompt")
        wanted = {"none": 1, "prompt": length}.get(str(chosen))
        return min(length, max(1, int(chosen) if wanted is None else wanted))


@dataclass(frozen=True, kw_only=True)
class ModelText:
    """What a task may know of a model before it is loaded.

    Attributes:
        name: of the model.
        tokenizer: its transformers tokenizer, None where the checkpoint has none.
        vocab_size: real columns of the logits.
        context: positions, None where there is no limit.
        bos_id: token that a text begins with, None where its tokenizer adds none.
        eos_ids: tokens that end a text, as config and tokenizer say.
    """

    name: str
    tokenizer: Any
    vocab_size: int
    context: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()


class ItemTask(ABC):
    """One task. A subclass sets the class attributes and implements ``build`` and ``score``.

    Attributes:
        name: as on the command line.
        version: changes whenever the same options would give other prompts or other scores.
        description: one line.
        chance: fraction that guessing gets right; 0 for free answers.
        takes_data: ``TaskOptions.data`` holds its items; else the file is the stream of the run.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    description: ClassVar[str]
    chance: ClassVar[float]
    takes_data: ClassVar[bool] = False

    @abstractmethod
    def build(self, options: TaskOptions, text: ModelText) -> list[Prompt]:
        """Prompts of all items and repeats, in the order of the user's file or of their numbers.

        Raises:
            DriftgateError: what the user gave does not fit; one line that names the thing and the mend.
        """

    @abstractmethod
    def score(
        self, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Decoded]], text: ModelText
    ) -> pd.DataFrame:
        """Items of every plan, the baseline's included.

        Args:
            prompts: as ``build`` made them.
            answers: by plan, in the order of the prompts.
            text: decodes token ids.

        Returns:
            Frame with plan, task, item_id, repeat, answer (a letter or a short string, never text of a question),
            gold, correct (bool), n_tokens (produced for the answer), capped (bool), parse_reason (``ok``, ``none``,
            ``truncated``, ``ambiguous``, ``nonfinite``), stream (int64 unit of intervals where items share a state,
            -1 where each item stands for itself).
        """

    def count(self, prompts: Sequence[Prompt]) -> tuple[int, int, int]:
        """Independent units, questions in each, answers to each question: what the power of a task stands on."""
        items = len({prompt.item_id for prompt in prompts})
        return items, 1, max(1, len(prompts) // max(1, items))

    def describe(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """What the manifest says of these prompts beside their number and hash; no text of a question."""
        return {}

    def measure_generation(
        self, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Decoded]]
    ) -> dict[str, dict[str, Any]]:
        """Figures of free generation by plan, for ``free_running`` of results.json; empty where there are none."""
        return {}

    def measure_perplexity(
        self, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Decoded]], plan: str
    ) -> PerplexityRecord | None:
        """Perplexity of the task's text under a plan and the baseline; None where the task has no text."""
        return None
