"""Perplexity of a text: its own tokens fed one by one through the decode step, in windows that start afresh.

The text is the user's file (UTF-8), else held_out.txt of this package (evals/data/held_out.md says what it is).
A window counts as ``correct`` where the text is more likely than a guess over the vocabulary, so a model that knows
nothing of the text is at chance, 0.5, and no task check can pass on it; the figure to gate on is the perplexity ratio.
``tiny-gdn`` before it was trained on text is such a model: its perplexity says nothing of English.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from driftgate.accuracy.prompts import Decoded, Prompt
from driftgate.accuracy.records import PerplexityRecord
from driftgate.errors import EmptyRunError, InputError, UsageError
from driftgate.evals.tasks.extraction import ParseReason
from driftgate.evals.tasks.item_task import ItemTask, ModelText, TaskOptions

if TYPE_CHECKING:
    import pandas as pd

    from driftgate.accuracy.statistics import PerplexitySummary

__all__ = ["TEXT", "PplTask", "summarize_perplexity"]

TEXT = Path(__file__).parents[1] / "data" / "held_out.txt"
COLUMNS = (
    "plan", "task", "item_id", "repeat", "answer", "gold", "correct", "n_tokens", "capped", "parse_reason", "stream",
    "low_precision_reads", "nll",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PplTask(ItemTask):
    """See the module. Of the options only ``data``, ``seed`` and ``prefill`` mean something here.

    Attributes:
        n_windows: at the most; they lie evenly over the text and do not overlap.
        window: tokens of each, the context included.
    """

    name = "ppl"
    version = 1
    description = "perplexity of a text, teacher-forced through the decode step; give the text with --data"
    chance = 0.5
    takes_data = True

    n_windows: int = 32
    window: int = 128

    def build(self, options: TaskOptions, text: ModelText) -> list[Prompt]:
        """One prompt per window.

        ``<bos>``, or without one the window's first token, is the context; with a number as ``prefill`` that many
        tokens of the window are, and are not scored.

        Raises:
            InputError: the file is missing, no text, or shorter than two windows; or there is no tokenizer.
            UsageError: the prefill leaves nothing to score.
        """
        if text.tokenizer is None:
            raise InputError(f"{text.name} has no tokenizer, and ppl needs text; add tokenizer.json to its folder")
        if min(self.n_windows, self.window - 1) < 1:
            raise EmptyRunError(f"task {self.name}: {self.n_windows} windows of {self.window} tokens score nothing")
        path = TEXT if options.data is None else Path(options.data)
        token_ids = text.tokenizer.encode(_read(path), add_special_tokens=False)
        n = min(self.n_windows, len(token_ids) // self.window)
        if n < 2:
            raise InputError(
                f"{path}: {len(token_ids)} tokens are not two windows of {self.window}; give a longer text"
            )
        front = () if text.bos_id is None else (text.bos_id,)
        prompts = []
        for number in range(n):
            first = number * len(token_ids) // n
            window = (*front, *token_ids[first : first + self.window])
            context = options.prefilled(len(window), mode="loglikelihood")
            if context == len(window):
                raise UsageError(f"task {self.name}: prefill {options.prefill} leaves nothing of {self.window} tokens")
            prompts.append(
                Prompt(
                    item_id=f"{self.name}-{number}",
                    token_ids=window[:context],
                    prefill=context,
                    continuation=window[context:],
                )
            )
        return prompts

    def score(
        self, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Decoded]], text: ModelText
    ) -> pd.DataFrame:
        """One row per window: ``nll`` is its mean negative log-likelihood in nats a token, ``answer`` the same rounded.

        ``gold`` names the bound: the logarithm of the vocabulary, which is what a guess has.
        """
        import pandas as pd

        bound = math.log(text.vocab_size)
        rows = []
        for plan, decoded in answers.items():
            for prompt, own in zip(prompts, decoded, strict=True):
                nll = -math.fsum(own.logprobs) / len(own.logprobs) if own.finite else math.nan
                answer = f"{nll:.3f}" if own.finite else None
                reason = ParseReason.OK if own.finite else ParseReason.NONFINITE
                row = (
                    plan, self.name, prompt.item_id, prompt.repeat, answer, f"below {bound:.3f}", nll < bound,
                    len(own.logprobs), False, str(reason), -1, own.low_precision_reads, nll,
                )  # fmt: skip
                rows.append(dict(zip(COLUMNS, row, strict=True)))
        return pd.DataFrame(rows, columns=COLUMNS).astype({"stream": "int64"})

    def measure_perplexity(
        self, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Decoded]], plan: str
    ) -> PerplexityRecord:
        """Perplexities, their ratio and its two-sided 95 % interval, for results.json."""
        return PerplexityRecord(**summarize_perplexity(answers, plan).as_dict())


def summarize_perplexity(
    answers: Mapping[str, Sequence[Decoded]], plan: str, *, baseline: str = "baseline"
) -> PerplexitySummary:
    """Perplexities of plan and baseline over all scored tokens, and their ratio; the window is the unit of intervals.

    ``ratio_lower_95`` and ``ratio_upper_95`` are what a check of the ratio compares with its limit. Where a logit was
    not finite, all figures of that plan are None.

    Args:
        answers: by plan, in the order of the prompts.
        plan, baseline: names.
    """
    from driftgate.accuracy.statistics import perplexity_ratio

    own, base = (_nll(answers[name]) for name in (plan, baseline))
    return perplexity_ratio(own, base, mask=_nll(answers[baseline], mark=True))


def _nll(decoded: Sequence[Decoded], *, mark: bool = False) -> np.ndarray:
    """Negative log-likelihoods [n_windows, longest], NaN where a window had a logit that is not finite; or the mask."""
    width = max((len(d.logprobs) for d in decoded), default=0)
    values = np.zeros((len(decoded), width), dtype=bool if mark else np.float64)
    for row, one in zip(values, decoded, strict=True):
        row[: len(one.logprobs)] = True if mark else -np.asarray(one.logprobs) if one.finite else np.nan
    return values


def _read(path: Path) -> str:
    if path.suffix.lower() in (".csv", ".json", ".jsonl", ".parquet"):
        raise InputError(f"task ppl reads plain text, and {path} is a table; give a text file with --data")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"text {path} does not exist; give --data a UTF-8 text file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"text {path} is no readable UTF-8 text: {' '.join(str(error).split())}") from error
