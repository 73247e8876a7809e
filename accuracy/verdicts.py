"""How a check becomes a verdict: one-sided bounds beside a limit, three ways, and which verdict outweighs which.

Notable: a bound equal to the limit passes, nothing is rounded, and what the bounds leave open is INCONCLUSIVE.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Literal

from driftgate.accuracy.policy_file import Check
from driftgate.accuracy.records import Verdict, VerdictRecord

__all__ = ["compare_bounds", "gravest", "matches", "record_verdict", "summarize_verdicts"]

_GRAVITY: tuple[Verdict, ...] = ("fail", "invalid", "inconclusive", "pass")


def record_verdict(
    plan: str, check: str, verdict: Verdict, reason: str, *, value: float | None = None, limit: float | None = None
) -> VerdictRecord:
    """One line of ``verdicts``."""
    return VerdictRecord(plan=plan, check=check, value=value, limit=limit, verdict=verdict, reason=reason)


def compare_bounds(
    plan: str,
    check: Check,
    low: float | None,
    high: float | None,
    blocked: str | None = None,
    *,
    at_least: bool = False,
    named: str | None = None,
    more: str = "run more sequences",
) -> VerdictRecord:
    """Three-way comparison of the one-sided bounds [low, high] with the limit of a check.

    Args:
        plan: whose bounds.
        check: with a limit.
        low, high: one-sided 95 % bounds; None where there is none.
        blocked: why no bound may pass, None where one may.
        at_least: the limit is the least value that passes.
        named: name of the verdict where it is not the check's.
        more: what would decide.
    """
    limit = check.limit
    assert limit is not None
    name = named or check.check
    inner, outer = (low, high) if at_least else (high, low)
    sense = "at least" if at_least else "at most"
    if outer is not None and (outer < limit if at_least else outer > limit):
        reason = f"one-sided 95 % bound {outer:.4g} is outside {sense} {limit:g}: {check.reason}"
        return record_verdict(plan, name, "fail", reason, value=outer, limit=limit)
    if inner is None or outer is None:
        return record_verdict(plan, name, "inconclusive", blocked or "too few steps for a bound", limit=limit)
    if blocked is None and (inner >= limit if at_least else inner <= limit):
        reason = f"one-sided 95 % bound {inner:.4g} is inside {sense} {limit:g}: {check.reason}"
        return record_verdict(plan, name, "pass", reason, value=inner, limit=limit)
    reason = blocked or f"one-sided 95 % bounds {low:.4g} to {high:.4g} hold the limit; {more}"
    return record_verdict(plan, name, "inconclusive", reason, value=inner, limit=limit)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the patterns fits."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def gravest(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict that outweighs the others; no verdict at all is inconclusive."""
    return min(verdicts, key=_GRAVITY.index, default="inconclusive")


def summarize_verdicts(verdicts: Iterable[Verdict]) -> Literal["pass", "fail", "inconclusive"]:
    """Of many checks one: any fail fails, else anything but a pass is inconclusive, and so is nothing at all."""
    found = gravest(verdicts)
    return "inconclusive" if found == "invalid" else found
