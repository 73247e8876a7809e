"""A small item task for tests of what surrounds tasks: four choices, then a short generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from driftgate.accuracy.prompts import Decoded, Prompt
from driftgate.evals.tasks.item_task import ItemTask, ModelText, TaskOptions

TEXT = ModelText(name="tiny", tokenizer=None, vocab_size=96, context=256)


class RandomTask(ItemTask):
    """Seven items of random tokens, twice each; the right choice is the one that the item's number names."""

    name = "random"
    version = 1
    description = "random tokens"
    chance = 0.25
    n_items = 7

    def build(self, options: TaskOptions, text: ModelText) -> list[Prompt]:
        rng = np.random.default_rng(options.seed)
        prompts = []
        for i in range(self.n_items):
            tokens = tuple(rng.integers(3, text.vocab_size, 6 + i).tolist())
            choices = tuple(rng.permutation(np.arange(3, 90))[:4].tolist())
            prompts += [
                Prompt(item_id=f"q{i}", repeat=r, token_ids=tokens, choices=choices, max_new_tokens=5, detail=i % 4)
                for r in range(options.repeats or 2)
            ]
        return prompts

    def score(
        self, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Decoded]], text: ModelText
    ) -> pd.DataFrame:
        rows = []
        for plan, own in answers.items():
            for prompt, found in zip(prompts, own, strict=True):
                answer = "ABCD"[int(np.argmax(found.choice_logprobs))]
                rows.append(
                    {
                        "plan": plan, "task": self.name, "item_id": prompt.item_id, "repeat": prompt.repeat,
                        "answer": answer, "gold": "ABCD"[prompt.detail], "correct": answer == "ABCD"[prompt.detail],
                        "n_tokens": len(found.token_ids), "capped": found.capped, "parse_reason": "ok", "stream": -1,
                    }
                )  # fmt: skip
        return pd.DataFrame(rows)
