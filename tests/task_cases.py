"""What tests of item tasks share: the embedded checkpoint, made-up answers, and a model whose state is cleared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from driftgate.accuracy.adapters.wrapping import WrappedModel
from driftgate.accuracy.answers import AnswerRunner
from driftgate.accuracy.models import LoadedModel, check_model, load_model
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.prompts import Decoded, Prompt
from driftgate.evals.checkpoints import list_checkpoints
from driftgate.evals.model_text import read_text
from driftgate.evals.tasks.item_task import ModelText
from driftgate.kernels.contract import Backend

NAME = "tiny-gdn"
STREAM_COLUMNS = {
    "plan", "task", "item_id", "repeat", "answer", "gold", "correct", "n_tokens", "capped", "parse_reason", "stream",
}  # fmt: skip


@cache
def load_embedded() -> LoadedModel:
    return load_model(list_checkpoints()[NAME], name=NAME, device="cpu")


@cache
def embedded_text() -> ModelText:
    folder = list_checkpoints()[NAME]
    return read_text(folder, check_model(folder), name=NAME)


def decode(prompts: Sequence[Prompt], *plans: str, seed: int = 0) -> dict[str, list[Decoded]]:
    """Real answers of the embedded checkpoint."""
    loaded = load_embedded()
    parsed = {name: PrecisionPlan.parse(name) for name in plans}
    runner = AnswerRunner(
        loaded.model, parsed, batch=16, backend=Backend.TORCH, vocab_size=loaded.vocab_size, seed=seed
    )
    return runner.run(prompts)


@contextmanager
def zero_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every decode step begins with states of zeros: only attention and convolutions remember anything."""
    step = WrappedModel.step

    def cleared(self: WrappedModel, token_ids: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            for tensor in block.pool.checkpoint.tensors():
                tensor.zero_()
        return step(self, token_ids)

    with monkeypatch.context() as patch:
        patch.setattr(WrappedModel, "step", cleared)
        yield


def answer_with(prompts: Sequence[Prompt], write: Callable[[Prompt], str], **fields: Any) -> list[Decoded]:
    """Made-up answers: what ``write`` says of each prompt, in bytes as token ids."""
    return [Decoded(item_id=p.item_id, repeat=p.repeat, token_ids=tuple(write(p).encode()), **fields) for p in prompts]


def within(share: float, expected: float, n: int) -> bool:
    """Within 4.5 standard errors of a binomial share: 7e-6 by chance."""
    return abs(share - expected) < 4.5 * (expected * (1 - expected) / n) ** 0.5
