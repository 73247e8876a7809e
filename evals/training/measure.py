"""Scores of a candidate under emulated plans: KL by position, accuracy by kind of question, the zero-state control."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from driftgate.evals.tasks.streams import DIGITS, SIGNS, StreamBatch, StreamLayout, generate_streams
from driftgate.evals.training.emulation import PLANS, EmulatedPlan, decode_logits

__all__ = ["measure_plans"]


def _choices(streams: StreamBatch, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Four token ids for each question [B, Q, 4]: the signs, or the right digit and three others; gold is first."""
    count, n_questions = streams.answers.shape
    choices = np.zeros((count, n_questions, 4), dtype=np.int64)
    for b in range(count):
        for q in range(n_questions):
            gold = streams.answers[b, q]
            pool = rng.permutation(DIGITS if gold in DIGITS else SIGNS)
            choices[b, q] = [gold, *[x for x in pool if x != gold][:3]]
    return choices


def measure_plans(
    model: Any,
    layouts: Sequence[StreamLayout],
    *,
    seed: int,
    n_sequences: int,
    device: str,
    plans: Sequence[EmulatedPlan] = PLANS,
) -> list[dict[str, Any]]:
    """One record for each layout (all of the same length): per plan KL, same-top and accuracies.

    ``plans[0]`` must be the baseline. KL and same-top are over the stream positions before the first question mark.
    """
    batches = [generate_streams(layout, seed=seed, indices=range(n_sequences)) for layout in layouts]
    rng = np.random.default_rng(seed)
    choices = [torch.from_numpy(_choices(batch, rng)).to(device) for batch in batches]
    token_ids = torch.from_numpy(np.concatenate([batch.token_ids for batch in batches])).to(device)
    n_plans, length = len(plans), layouts[0].length
    kl = torch.zeros(length, n_plans, len(layouts), device=device, dtype=torch.float64)
    top = torch.zeros_like(kl)
    moved = torch.zeros(n_plans, device=device)
    correct: list[list[Any]] = [[] for _ in layouts]
    for position, logits in decode_logits(model, token_ids, plans):
        logp = torch.log_softmax(logits.double(), -1)
        gap = (logp[:1].exp() * (logp[:1] - logp)).sum(-1)
        same = logits.argmax(-1) == logits[:1].argmax(-1)
        kl[position] = gap.reshape(n_plans, len(layouts), n_sequences).mean(-1)
        top[position] = same.double().reshape(n_plans, len(layouts), n_sequences).mean(-1)
        moved = torch.maximum(moved, (logits - logits[:1]).abs().amax((1, 2)))
        for i, batch in enumerate(batches):
            asked = np.flatnonzero(batch.answer_positions == position + 1)
            if len(asked):
                part = logits[:, i * n_sequences : (i + 1) * n_sequences]
                four = part.gather(-1, choices[i][:, asked[0]].expand(n_plans, -1, -1))
                correct[i].append((four.argmax(-1) == 0).cpu().numpy())
    records = []
    for i, batch in enumerate(batches):
        right = np.stack(correct[i], axis=-1)
        stream = slice(1, batch.layout.question_start)
        records.append(
            {
                "layout": vars(batch.layout),
                "events_per_group": batch.layout.events_per_group,
                "n_sequences": n_sequences,
                "plans": {
                    plan.name: _summarise(right[p], batch, kl[stream, p, i], top[stream, p, i])
                    | {"max_logit_moved": float(moved[p])}
                    for p, plan in enumerate(plans)
                },
            }
        )
    return records


def _summarise(right: Any, batch: StreamBatch, kl: torch.Tensor, top: torch.Tensor) -> dict[str, Any]:
    tracking = batch.is_tracking
    share = batch.margins / batch.layout.events_per_group
    cuts = (0.0, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3, 1.0)

    def accuracy(mask: Any) -> float | None:
        return round(float(right[mask].mean()), 4) if mask.any() else None

    return {
        "kl": float(kl.mean()),
        "kl_quarters": [float(part.mean()) for part in kl.chunk(4)],
        "same_top": round(float(top.mean()), 4),
        "recall": accuracy(~tracking),
        "tracking": accuracy(tracking),
        "tracking_late": accuracy(tracking & batch.late),
        "tracking_not_late": accuracy(tracking & ~batch.late),
        "tracking_by_margin": {
            f"{low:.2f}-{high:.2f}": [
                accuracy(tracking & (share >= low) & (share < high)),
                accuracy(tracking & batch.late & (share >= low) & (share < high)),
            ]
            for low, high in itertools.pairwise(cuts)
        },
    }
