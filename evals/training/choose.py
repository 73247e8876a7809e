"""Which candidate of a family ships: points for what a checkpoint is for, then the larger loss under shared NVFP4."""

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
}
"""Points and words of each condition."""


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
    }


def _sort_key(record: Mapping[str, Any]) -> tuple[float, ...]:
    points = sum(CONDITIONS[name][0] for name, met in judge(record).items() if met)
    plans = record.get("decode", {}).get("plans", {})
    streams = record.get("scores", {}).get("streams", {})
    loss = plans.get("baseline", {}).get("tracking", 0.0) - plans.get("nvfp4@16", {}).get("tracking", 0.0)
    reached = sum(scores["tracking"] + scores["recall"] for scores in streams.values())
    return (points, round(loss, 2), reached)


def rank(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Records from the best down: by points, by the loss under shared nvfp4, by accuracy on whole sequences."""
    return sorted(records, key=_sort_key, reverse=True)
