"""Paired comparison of one plan with the baseline on one task, from the items frame of a run.

Notable: beside the columns that every items frame has, three may be there. ``stream``: the unit of intervals where
items share a state; items without one, or with -1, are units of their own. ``low_precision_reads``: how often a
low-precision state was read while this answer was produced. ``mass``: probability on the choices together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from driftgate.accuracy.noninferiority import PairedVerdict, paired_noninferiority
from driftgate.accuracy.paired_tests import bound_loss
from driftgate.accuracy.records import TaskRecord

__all__ = [
    "BASELINE", "LETTERS", "LetterBias", "bound_cap_excess", "compare_items", "count_reads", "letter_bias",
    "paired_record", "score_baseline",
]  # fmt: skip

BASELINE = "baseline"
LETTERS = ("A", "B", "C", "D")
_ANY_MARGIN = 1.0
"""A record before a policy spoke carries no verdict; its interval does not depend on the margin."""
_EXPECTED_MIN = 5.0
"""Least expected count for which the chi-square distribution holds [Cochran 1954]."""


@dataclass(frozen=True)
class _Paired:
    """Differences of a plan from the baseline, one for each item.

    Attributes:
        d: [n] FP64, plan - baseline, means over repeats.
        streams: [n] int64 label of each item's stream, None where every item is a unit of its own.
        repeats: answers to each item.
    """

    d: NDArray[np.float64]
    streams: NDArray[np.int64] | None
    repeats: int


def compare_items(items: pd.DataFrame, plan: str, task: str, *, margin: float) -> PairedVerdict:
    """Paired non-inferiority of a plan on a task.

    Args:
        items: items frame.
        plan, task: which rows.
        margin: points.

    Raises:
        EmptyRunError: no items.
        ValueError: the plan and the baseline did not answer the same items.
    """
    paired = _difference(_pair(items, plan, task), "correct")
    return paired_noninferiority(paired.d, margin, clusters=paired.streams, repeats=paired.repeats)


def bound_cap_excess(items: pd.DataFrame, plan: str, task: str, *, alpha: float = 0.05) -> tuple[float, float]:
    """One-sided bounds of (share of answers that hit the cap: plan - baseline), each at error alpha, a fraction.

    A cap hit that the plan has and the baseline has not counts as a loss does, so the bounds are those of the paired
    loss (paired_tests.py).
    """
    paired = _difference(_pair(items, plan, task), "capped")
    streams = None if paired.streams is None else np.unique(paired.streams, return_inverse=True)[1].astype(np.int64)
    bounds = bound_loss(-paired.d[None], streams, alpha=alpha)
    return float(bounds.lower[0]), float(bounds.upper[0])


def has_caps(items: pd.DataFrame, task: str) -> bool:
    """Whether any answer to a task was generated, and so could be cut off: more than the one token of a choice."""
    own = items[items["task"] == task]
    return bool(own["capped"].any() or not (own["n_tokens"] <= 1).all())


def count_reads(items: pd.DataFrame, plan: str, task: str) -> NDArray[np.int64] | None:
    """Reads of a low-precision state for each answer of a plan, None where the frame does not say."""
    if "low_precision_reads" not in items:
        return None
    reads = items.loc[(items["plan"] == plan) & (items["task"] == task), "low_precision_reads"]
    return None if reads.isna().any() else reads.to_numpy(dtype=np.int64)


def score_baseline(items: pd.DataFrame, task: str) -> NDArray[np.float64]:
    """Score of the baseline on each item, means over repeats, [n] FP64."""
    return _rows(items, BASELINE, task).groupby("item_id", sort=False)["correct"].mean().to_numpy(dtype=np.float64)


def paired_record(items: pd.DataFrame, plan: str, task: str, *, chance: float = 0.25) -> TaskRecord:
    """Everything of a TaskRecord but the verdict, which a policy's margin decides, and the perplexity.

    Args:
        items: items frame.
        plan, task: which rows.
        chance: fraction that guessing gets right; 0 for free answers.
    """
    pair = _pair(items, plan, task)
    paired = compare_items(items, plan, task, margin=_ANY_MARGIN)
    own, base = (_rows(items, name, task) for name in (plan, BASELINE))
    four = _has_letters(pd.concat([own, base]))
    mass = own["mass"].mean() if "mass" in own else None
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
        unparsed=_count_unparsed(own),
        verdict="inconclusive",
        accuracy_completed=_accuracy_completed(own),
        baseline_accuracy_completed=_accuracy_completed(base),
        baseline_cap_hits=int(base["capped"].sum()),
        baseline_unparsed=_count_unparsed(base),
        letters=_count_letters(own["answer"]) if four else None,
        baseline_letters=_count_letters(base["answer"]) if four else None,
        chance=chance,
        mass=None if mass is None else float(mass),
    )


@dataclass(frozen=True)
class LetterBias:
    """Letters of a plan's answers and of the gold answers, each against a uniform choice among four.

    With the order of the options drawn anew for each item and repeat, gold letters are uniform, and so are the answers
    of a model that looks at the options and not at their letters, whatever it knows.

    Attributes:
        answers: how often each letter was given; answers without a letter are left out.
        gold: how often each letter was right.
        answers_p: chi-square p; None with fewer than 20 letters, where the test does not hold. ``gold_p`` the same.
    """

    answers: dict[str, int]
    gold: dict[str, int]
    answers_p: float | None
    gold_p: float | None


def letter_bias(items: pd.DataFrame, plan: str, task: str) -> LetterBias | None:
    """Chi-square tests (``scipy.stats.chisquare``) of a plan's letters; None where answers are no letters."""
    own = _rows(items, plan, task)
    if not _has_letters(own):
        return None
    answers, gold = _count_letters(own["answer"]), _count_letters(own["gold"])
    return LetterBias(answers, gold, _test_uniform(answers), _test_uniform(gold))


def _test_uniform(counts: dict[str, int]) -> float | None:
    observed = list(counts.values())
    if sum(observed) < _EXPECTED_MIN * len(observed):
        return None
    return float(stats.chisquare(observed).pvalue)


def _has_letters(rows: pd.DataFrame) -> bool:
    """Whether answers and gold answers are letters A to D, answers that could not be read aside."""
    given = rows["answer"].dropna()
    return bool(len(given) and given.isin(LETTERS).all() and rows["gold"].isin(LETTERS).all())


def _count_letters(column: pd.Series) -> dict[str, int]:
    return {letter: int((column == letter).sum()) for letter in LETTERS}


def _count_unparsed(rows: pd.DataFrame) -> int:
    return int((rows["parse_reason"] != "ok").sum())


def _accuracy_completed(rows: pd.DataFrame) -> float | None:
    completed = rows[(rows["parse_reason"] == "ok") & ~rows["capped"].astype(bool)]
    return float(completed["correct"].mean()) if len(completed) else None


def _difference(pair: pd.DataFrame, column: str) -> _Paired:
    by_item = pair.astype({column: float, f"{column}_baseline": float}).groupby("item_id", sort=False)
    d = by_item[column].mean() - by_item[f"{column}_baseline"].mean()
    streams = by_item["stream"].first().fillna(-1).to_numpy(dtype=np.int64) if "stream" in pair else np.full(d.size, -1)
    alone = streams < 0
    labels = None if alone.all() else np.where(alone, streams.max() + 1 + np.arange(d.size), streams)
    return _Paired(d.to_numpy(dtype=np.float64), labels, int(pair["repeat"].nunique()))


def _rows(items: pd.DataFrame, plan: str, task: str) -> pd.DataFrame:
    return items[(items["plan"] == plan) & (items["task"] == task)]


def _pair(items: pd.DataFrame, plan: str, task: str) -> pd.DataFrame:
    """The plan's rows with the baseline's answer to the same item and repeat beside them."""
    own, base = _rows(items, plan, task), _rows(items, BASELINE, task)
    pair = own.merge(
        base[["item_id", "repeat", "correct", "capped"]],
        on=["item_id", "repeat"],
        suffixes=("", "_baseline"),
        validate="1:1",
    )
    if not len(own) == len(base) == len(pair):
        raise ValueError(
            f"items of {plan} and the baseline on {task} differ: {len(own)}, {len(base)}, {len(pair)} shared"
        )
    return pair
