"""What emulated plans do on one batch of streams: KL and same top token by position, answers by kind of question."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from driftgate.evals.tasks.streams import DIGITS, SIGNS, StreamBatch
from driftgate.evals.training.emulation import EmulatedPlan

__all__ = ["StreamScores"]

MARGINS = (0.0, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3, 1.0)
"""Edges of the bins of a question's margin, as a share of the group's events."""


class StreamScores:
    """Takes the logits position by position; KL and same top are over what stands before the first question mark.

    Args:
        streams: what is decoded.
        plans: ``plans[0]`` is the baseline.
        device: of the logits.
    """

    def __init__(self, streams: StreamBatch, plans: Sequence[EmulatedPlan], device: str) -> None:
        self._streams, self._plans = streams, plans
        letters = SIGNS if np.isin(streams.answers, SIGNS).all() else np.concatenate([SIGNS, DIGITS])
        self._letters = torch.from_numpy(letters).to(device)
        self._kl: list[Tensor] = []
        self._top: list[Tensor] = []
        self._answered: list[Tensor] = []

    def add(self, position: int, logits: Tensor) -> None:
        """Take logits [plans, streams, vocabulary] at this position, which predict the next token."""
        if position < self._streams.layout.question_start:
            logp = torch.log_softmax(logits.double(), -1)
            self._kl.append((logp[:1].exp() * (logp[:1] - logp)).sum(-1).mean(-1))
            self._top.append((logits.argmax(-1) == logits[:1].argmax(-1)).double().mean(-1))
        elif position + 1 in self._streams.answer_positions:
            self._answered.append(self._letters[logits[..., self._letters].argmax(-1)])

    def read(self) -> dict[str, dict[str, Any]]:
        """By plan: KL in nats, its quarters, share of the same top token and, once all is asked, accuracies."""
        kl, top = torch.stack(self._kl), torch.stack(self._top)
        found = {
            plan.name: {
                "kl": float(kl[:, p].mean()),
                "kl_quarters": [float(part.mean()) for part in kl[:, p].chunk(4)],
                "same_top": round(float(top[:, p].mean()), 4),
            }
            for p, plan in enumerate(self._plans)
        }
        if len(self._answered) == self._streams.layout.n_questions:
            answers = torch.stack(self._answered, -1).cpu().numpy()
            for p, plan in enumerate(self._plans):
                found[plan.name] |= self._count(answers[p] == self._streams.answers)
        return found

    def _count(self, right: Any) -> dict[str, Any]:
        streams = self._streams
        tracking, late = streams.is_tracking, streams.late
        share = streams.margins / streams.layout.events_per_group

        def accuracy(mask: Any) -> float | None:
            return round(float(right[mask].mean()), 4) if mask.any() else None

        return {
            "recall": accuracy(~tracking),
            "tracking": accuracy(tracking),
            "tracking_late": accuracy(tracking & late),
            "tracking_not_late": accuracy(tracking & ~late),
            "tracking_by_margin": {
                f"{low:.2f}-{high:.2f}": accuracy(tracking & (share >= low) & (share < high))
                for low, high in pairwise(MARGINS)
            },
        }
