"""Answers of every plan to many prompts, decoded in lock step in batches of fixed shape.

Notable: a prompt's batch and its row are functions of all prompts, the seed and the batch size, and a batch is always
decoded whole; so the bits of an answer depend on no other process, no resumption and no limit. One forward per step
serves the baseline, the baseline a second time (A/A) and all plans; each follows the same script of prompt and
continuation, then its own samples under common noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from driftgate.accuracy.adapters.wrapping import Block, wrap
from driftgate.accuracy.answer_batch import AnswerLoop
from driftgate.accuracy.plans import BASELINE, PrecisionPlan
from driftgate.accuracy.prompts import Decoded, Prompt
from driftgate.errors import EmptyRunError
from driftgate.kernels.contract import Backend

__all__ = ["BASELINE_NAME", "AnswerRunner", "BatchAnswers", "order_batches"]

BASELINE_NAME, AGAIN = "baseline", "baseline (A/A)"


@dataclass(frozen=True, kw_only=True)
class BatchAnswers:
    """What came of one batch.

    Attributes:
        answers: by plan and for the baseline, in the order of the batch's prompts.
        again_equal: the baseline's second pass had the same logits, bit for bit, wherever they were looked at.
        digest: of the bits of the baseline's logits at every step; equal where a rerun was bit-equal.
        n_steps: decode steps.
    """

    answers: dict[str, list[Decoded]]
    again_equal: bool
    digest: int
    n_steps: int


def order_batches(prompts: Sequence[Prompt], *, batch: int, seed: int, limit: int | None = None) -> list[list[int]]:
    """Indices of the prompts by batch: items by a hash of (seed, item id), the repeats of an item one after the other.

    Args:
        prompts: of one task; (item_id, repeat) is unique.
        batch: prompts of a batch; the last one may be shorter and is padded when it is decoded.
        seed: of the order.
        limit: only the batches that hold one of the first so many items of that order; these batches are the same
            as without a limit.

    Raises:
        EmptyRunError: no prompts.
        ValueError: an (item_id, repeat) is there twice, or limit is below 1.
    """
    if not prompts:
        raise EmptyRunError("zero items to answer; give a file with questions or another --task")
    if len({(p.item_id, p.repeat) for p in prompts}) < len(prompts):
        raise ValueError("prompts: expected every (item_id, repeat) once")
    keys = {p.item_id: hashlib.blake2b(f"{seed}/{p.item_id}".encode(), digest_size=16).digest() for p in prompts}
    order = sorted(range(len(prompts)), key=lambda i: (keys[prompts[i].item_id], prompts[i].item_id, prompts[i].repeat))
    batches = [order[first : first + batch] for first in range(0, len(order), batch)]
    if limit is None:
        return batches
    if limit < 1:
        raise ValueError(f"limit: expected 1 or more items, got {limit}")
    wanted = set(first_items(prompts, seed=seed, limit=limit))
    return [rows for rows in batches if any(prompts[i].item_id in wanted for i in rows)]


def first_items(prompts: Sequence[Prompt], *, seed: int, limit: int) -> list[str]:
    """Ids of the first ``limit`` items in the order of the batches."""
    ids = {p.item_id for p in prompts}
    return sorted(ids, key=lambda i: (hashlib.blake2b(f"{seed}/{i}".encode(), digest_size=16).digest(), i))[:limit]


class AnswerRunner:
    """Decodes prompts for the baseline and every plan.

    Args:
        model: a loaded causal language model of a covered family, in eval mode.
        plans: by name, in the order of the report.
        batch: prompts that decode together; every batch has this shape, a short one is padded.
        backend: which code takes the decode steps.
        vocab_size: columns of the logits that are real; None for all.
        seed: of the order, of sampling noise and of stochastic rounding.
        least_plans: blocks of rows for at least so many plans: a rerun with fewer in the same shape.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plans: Mapping[str, PrecisionPlan],
        *,
        batch: int,
        backend: Backend,
        vocab_size: int | None = None,
        seed: int = 0,
        least_plans: int = 0,
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch: expected 1 or more, got {batch}")
        self.model, self.plans, self.batch, self.backend = model, dict(plans), batch, backend
        self.vocab_size, self.seed, self.least_plans = vocab_size, seed, least_plans

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        progress: Callable[[int], None] | None = None,
        step_progress: Callable[[int], None] | None = None,
    ) -> dict[str, list[Decoded]]:
        """Decode all prompts.

        Args:
            prompts: (item_id, repeat) is unique.
            progress: called with the number of prompts just done.
            step_progress: called with the number of decode steps just done.

        Returns:
            By plan and for ``baseline``, in the order of the prompts.

        Raises:
            EmptyRunError: no prompts.
        """
        found: dict[str, dict[int, Decoded]] = {name: {} for name in (BASELINE_NAME, *self.plans)}
        for rows in order_batches(prompts, batch=self.batch, seed=self.seed):
            part = self.run_batch([prompts[i] for i in rows], step_progress=step_progress)
            for name, answers in part.answers.items():
                found[name] |= dict(zip(rows, answers, strict=True))
            if progress is not None:
                progress(len(rows))
        return {name: [by_index[i] for i in range(len(prompts))] for name, by_index in found.items()}

    def run_batch(
        self, prompts: Sequence[Prompt], *, step_progress: Callable[[int], None] | None = None
    ) -> BatchAnswers:
        """Decode one batch, at most ``batch`` prompts; a short one is padded with its own first prompts."""
        if not 1 <= len(prompts) <= self.batch:
            raise ValueError(f"prompts: expected 1 to {self.batch} of one batch, got {len(prompts)}")
        padded = [prompts[i % len(prompts)] for i in range(self.batch)]
        names = [BASELINE_NAME, AGAIN, *self.plans]
        names += [f"padding {i}" for i in range(self.least_plans - len(self.plans))]
        blocks = [Block.of(name, self.plans.get(name, BASELINE)) for name in names]
        wrapped = wrap(self.model, blocks, n_sequences=self.batch, backend=self.backend, seed=self.seed)
        with wrapped as model:
            loop = AnswerLoop(model, padded, vocab_size=self.vocab_size, seed=self.seed)
            loop.run(step_progress)
            if loop.n_steps and model.kernel_calls == 0:
                raise RuntimeError("no decode step went through driftgate's kernels: the model took another path")
        wanted = [(names.index(name), name) for name in (BASELINE_NAME, *self.plans)]
        return BatchAnswers(
            answers={name: loop.decoded(block)[: len(prompts)] for block, name in wanted},
            again_equal=loop.again_equal(),
            digest=loop.digest(),
            n_steps=loop.n_steps,
        )
