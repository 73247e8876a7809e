"""What is decoded to answer an item, and what came back: plain data, no torch.

Notable: a prompt says how many of its tokens the model prefills itself. All others, the scored continuation and the
generated tokens included, go one by one through the decode step of each plan: what is scored on a prefill is equal for
every plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from driftgate.errors import InputError

__all__ = ["Decoded", "Prompt", "check_lengths"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One thing to decode, the same for every plan.

    Attributes:
        item_id: of the item, unique in its task.
        repeat: 0, 1, …; keys the sampling noise together with ``item_id`` and the seed.
        token_ids: the prompt, at least one token.
        prefill: leading tokens of ``token_ids`` that the model prefills itself, 1 … len(token_ids).
        continuation: tokens that are fed after the prompt whatever the model says; their log-probabilities are wanted.
        choices: token ids whose log-probabilities after prompt and continuation are wanted.
        max_new_tokens: tokens that each plan then generates by itself; 0 for none.
        temperature: of sampling (Gumbel-max with noise keyed by seed, item, repeat and index); 0 is greedy.
        stop_ids: a generated token among them ends the generation and is kept as its last token.
        forced: (index, token id) pairs of generated tokens that are fed whatever the model says, so that a question
            can be asked within a long generation; they appear in ``Decoded.token_ids`` as they were fed.
        detail: whatever the task needs to score the item (gold answer, option order); never shown to the model.
    """

    item_id: str
    token_ids: tuple[int, ...]
    prefill: int = 1
    repeat: int = 0
    continuation: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()
    max_new_tokens: int = 0
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    forced: tuple[tuple[int, int], ...] = ()
    detail: Any = None

    def __post_init__(self) -> None:
        if not 1 <= self.prefill <= len(self.token_ids):
            raise ValueError(
                f"{self.item_id}: prefill: expected 1 to {len(self.token_ids)} tokens of the prompt, got {self.prefill}"
            )
        if not (self.continuation or self.choices or self.max_new_tokens > 0):
            raise ValueError(f"{self.item_id}: nothing is asked: no continuation, no choices, no new tokens")

    @property
    def n_tokens(self) -> int:
        """Tokens at the most, generated ones included."""
        return len(self.token_ids) + len(self.continuation) + self.max_new_tokens


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What one plan made of one prompt. Log-probabilities are natural, over the true vocabulary, summed in FP64.

    Attributes:
        item_id, repeat: of the prompt.
        logprobs: of each token of the continuation.
        greedy: every token of the continuation was the most likely one (ties: the lower id).
        choice_logprobs: of each choice; their exponentials sum to the mass on the choices.
        token_ids: generated tokens, the stop token included.
        capped: the generation ended at ``max_new_tokens`` without a stop token (never where nothing was generated).
        first_divergence: index of the first generated token that differs from the baseline's, None if none does.
        tie_margin: baseline's best score minus its second best at that token, in nats, noise included.
        low_precision_reads: (layer, step) pairs in which a low-precision state was read while the continuation, the
            choices and the generated tokens were produced.
        finite: all logits that were looked at are finite.
    """

    item_id: str
    repeat: int
    logprobs: tuple[float, ...] = ()
    greedy: bool = False
    choice_logprobs: tuple[float, ...] = ()
    token_ids: tuple[int, ...] = ()
    capped: bool = False
    first_divergence: int | None = None
    tie_margin: float | None = None
    low_precision_reads: int = 0
    finite: bool = True


def check_lengths(prompts: Sequence[Prompt], *, context: int | None, task: str) -> None:
    """Refuse prompts that do not fit the model's positions; nothing is ever cut off.

    Args:
        prompts: of one task.
        context: positions of the model, None where it has no limit.
        task: its name.

    Raises:
        InputError: the longest prompt with what is asked after it is longer than the context; names both numbers.
    """
    longest = max(prompts, key=lambda p: p.n_tokens, default=None)
    if context is None or longest is None or longest.n_tokens <= context:
        return
    asked = longest.n_tokens - len(longest.token_ids)
    raise InputError(
        f"task {task}, item {longest.item_id}: {len(longest.token_ids)} tokens of prompt and {asked} after it exceed "
        f"the model's {context} positions; give fewer --max-new-tokens or shorter items"
    )
