"""Which candidate of a family ships: points for what a checkpoint is for, then how far the plans lie apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CONDITIONS", "judge", "rank"]

CONDITIONS = {
    "tracks": (3, "FP32 tracking at least 0.60"),
    "recalls": (1, "FP32 recall at least 0.60"),
    "answers": (2, "FP32 scratchpad answers (greedy, all lengths) at least 0.60"),
    "room": (1, "FP32 scratchpad answers sampled at temperature 1 within 0.60 and 0.95"),
    "sharp": (2, "tracking under shared nvfp4 at least 0.10 below FP32"),
    "split": (1, "tracking under nvfp4/fp32 at most 0.05 below FP32"),
    "control": (3, "with the state cleared, tracking at most 0.40 and scratchpad answers at most 0.45"),
    "long": (1, "FP32 tracking at 4,096 tokens at least 0.60"),
    "same": (3, "nvfp4/fp32 keeps the top token at 0.85 of the steps at least"),
    "apart": (3, "KL of shared nvfp4 at least 20 times that of nvfp4/fp32"),
    "text": (1, "held-out text at most 1.60 nats per byte"),
}
"""Points and words of each condition."""
APART = 20.0


def judge(record: Mapping[str, Any]) -> dict[str, bool]:
    """Which conditions a candidate's record meets; what was not measured is not met."""
    plans = record.get("decode", {}).get("plans", {})

    def score(plan: str, name: str) -> float | None:
        found = plans.get(plan, {}).get(name)
        return None if found is None else float(found)

    def at_most(value: float | None, limit: float) -> bool:
        return value is not None and value <= limit

    tracking = score("baseline", "tracking") or 0.0
    answers = score("baseline", "scratchpad_mean") or 0.0
    by_length = record.get("scores", {}).get("streams", {})
    return {
        "tracks": tracking >= 0.6,
        "recalls": (score("baseline", "recall") or 0.0) >= 0.6,
        "answers": answers >= 0.6,
        "room": 0.6 <= (score("baseline", "sampled_mean") or 0.0) <= 0.95,
        "sharp": at_most(score("nvfp4@16", "tracking"), tracking - 0.1),
        "split": (score("nvfp4/fp32@16", "tracking") or 0.0) >= max(tracking - 0.05, 0.3),
        "control": at_most(score("zero state", "tracking"), 0.4)
        and at_most(score("zero state", "scratchpad_mean"), 0.45),
        "long": by_length.get("4096", {}).get("tracking", 0.0) >= 0.6,
        "same": (score("nvfp4/fp32@16", "same_top") or 0.0) >= 0.85,
        "apart": _ratio(record) >= APART,
        "text": at_most(record.get("scores", {}).get("text_nats_per_byte"), 1.6),
    }


def _ratio(record: Mapping[str, Any]) -> float:
    """KL of shared nvfp4 over that of nvfp4/fp32; 0 where one was not measured."""
    plans = record.get("decode", {}).get("plans", {})
    shared, split = (plans.get(plan, {}).get("kl") for plan in ("nvfp4@16", "nvfp4/fp32@16"))
    return float(shared / split) if shared and split else 0.0


def _sort_key(record: Mapping[str, Any]) -> tuple[float, ...]:
    points = sum(CONDITIONS[name][0] for name, met in judge(record).items() if met)
    plans = record.get("decode", {}).get("plans", {})
    streams = record.get("scores", {}).get("streams", {})
    loss = plans.get("baseline", {}).get("tracking", 0.0) - plans.get("nvfp4@16", {}).get("tracking", 0.0)
    reached = sum(scores["tracking"] + scores["recall"] for scores in streams.values())
    return (points, min(_ratio(record), APART), round(loss, 2), reached)


def rank(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Records from the best down.

    By points, by the ratio of KL as far as it is asked for, by the loss of tracking under shared nvfp4, and by accuracy
    on whole sequences.
    """
    return sorted(records, key=_sort_key, reverse=True)
