"""Paired comparison of one plan with the baseline on one task, from the items frame of a run."""

from __future__ import annotations

import pandas as pd

from driftgate.accuracy.noninferiority import PairedVerdict, paired_noninferiority
from driftgate.accuracy.records import TaskRecord

__all__ = ["BASELINE", "compare_items", "paired_record"]

BASELINE = "baseline"
_ANY_MARGIN = 1.0
"""A record before a policy spoke carries no verdict; its interval does not depend on the margin."""


def compare_items(items: pd.DataFrame, plan: str, task: str, *, margin: float) -> PairedVerdict:
    """Paired non-inferiority of a plan on a task.

    Args:
        items: items frame; questions of one ``stream`` are one unit, without that column items are independent.
        plan, task: which rows.
        margin: points.

    Raises:
        ValueError: the plan and the baseline did not answer the same items.
    """
    pair = _pair(items, plan, task)
    by_item = pair.groupby("item_id", sort=False)
    d = by_item["correct"].mean() - by_item["correct_baseline"].mean()
    streams = by_item["stream"].first().to_numpy() if "stream" in pair else None
    repeats = int(pair["repeat"].nunique())
    return paired_noninferiority(d.to_numpy(), margin, clusters=streams, repeats=repeats)


def paired_record(items: pd.DataFrame, plan: str, task: str) -> TaskRecord:
    """Everything of a TaskRecord but the verdict, which a policy's margin decides."""
    pair = _pair(items, plan, task)
    paired = compare_items(items, plan, task, margin=_ANY_MARGIN)
    own = items[(items["plan"] == plan) & (items["task"] == task)]
    return TaskRecord(
        n=paired.n,
        repeats=int(pair["repeat"].nunique()),
        accuracy=float(pair["correct"].mean()),
        baseline_accuracy=float(pair["correct_baseline"].mean()),
        delta=paired.delta,
        ci_low=paired.ci_low,
        ci_high=paired.ci_high,
        lost=paired.lost,
        gained=paired.gained,
        p_value=paired.p_value,
        cap_hits=int(own["capped"].sum()),
        unparsed=int((own["parse_reason"] != "ok").sum()),
        verdict="inconclusive",
    )


def _pair(items: pd.DataFrame, plan: str, task: str) -> pd.DataFrame:
    """The plan's rows with the baseline's answer to the same item and repeat beside them."""
    of_task = items[items["task"] == task]
    own, base = of_task[of_task["plan"] == plan], of_task[of_task["plan"] == BASELINE]
    pair = own.merge(
        base[["item_id", "repeat", "correct"]], on=["item_id", "repeat"], suffixes=("", "_baseline"), validate="1:1"
    )
    if not len(own) == len(base) == len(pair):
        raise ValueError(
            f"items of {plan} and the baseline on {task} differ: {len(own)}, {len(base)}, {len(pair)} shared"
        )
    return pair
