"""Is the baseline above guessing? A plan that loses nothing of nothing has shown nothing.

Notable: the unit is the item. Answers to one item at several repeats resemble each other, so that counting them as
independent would find skill in a model that happens to favour the right letters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from driftgate.errors import EmptyRunError

__all__ = ["ChanceTest", "above_chance", "items_above_chance"]


@dataclass(frozen=True)
class ChanceTest:
    """Whether an accuracy is above guessing; its truth value is ``above``.

    Attributes:
        above: the one-sided binomial test rejects guessing at 5 %.
        p_value: of that test.
        accuracy: fraction.
        lower_95: exact one-sided 95 % lower bound of the accuracy.
    """

    above: bool
    p_value: float
    accuracy: float
    lower_95: float

    def __bool__(self) -> bool:
        return self.above


def above_chance(correct: int, n: int, chance: float) -> ChanceTest:
    """One-sided exact binomial test, 95 %, that more answers are right than guessing would give.

    Args:
        correct: right answers, 0 … n.
        n: answers.
        chance: fraction that guessing gets right, 0 … below 1; 0 for free answers: then one right answer is
            enough.

    Raises:
        EmptyRunError: n = 0.
        ValueError: correct or chance out of range.
    """
    if n == 0:
        raise EmptyRunError("above chance: zero items were answered; give a --task that asks questions")
    if not 0 <= correct <= n or not 0.0 <= chance < 1.0:
        raise ValueError(f"expected 0 <= correct <= n and 0 <= chance < 1, got {correct} of {n} at {chance}")
    test = stats.binomtest(correct, n, chance, alternative="greater")
    lower = float(test.proportion_ci(0.95, "exact").low)
    return ChanceTest(bool(test.pvalue <= 0.05), float(test.pvalue), correct / n, lower)


def items_above_chance(scores: object, chance: float) -> ChanceTest:
    """Whether items score above guessing, 95 %: the binomial test of single answers, Student's t of means.

    Args:
        scores: [n_items] score of each item, 0 … 1, a mean where it was answered several times.
        chance: fraction that guessing gets right.

    Raises:
        EmptyRunError: no items.
        ValueError: chance out of range.
    """
    means = np.asarray(scores, dtype=np.float64)
    no_spread = not means.size or np.ptp(means) == 0.0
    if no_spread or np.isin(means, (0.0, 1.0)).all():
        return above_chance(math.ceil(means.sum() - 1e-9), means.size, chance)
    test = stats.ttest_1samp(means, chance, alternative="greater")
    lower = float(test.confidence_interval(0.95).low)
    return ChanceTest(bool(test.pvalue <= 0.05), float(test.pvalue), float(means.mean()), lower)
