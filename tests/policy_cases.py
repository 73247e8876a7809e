"""Checks, runs and the verdicts between them, for tests of policies."""

from __future__ import annotations

from run_cases import Measured, flipped, lognormal, make_items, make_run

from driftgate.accuracy.policy import Check, Policy, decide
from driftgate.accuracy.records import RunData, VerdictRecord

PLAN, OTHER, CONTROL = "nvfp4/fp32@4", "fp8/fp32@4", "nvfp4@4"
DRIFT = ("kl_mean", "kl_p99_9", "same_top_p", "ppl_ratio", "drift_slope")
LIMITED = (*DRIFT, "checkpoint_error")


def rule(check: str, limit: float | None = None, **fields: object) -> Check:
    """A check with a limit."""
    return Check(check=check, limit=limit, reason="because", **fields)


def loss(margin: float, **fields: object) -> Check:
    """A check with a margin."""
    return Check(check="task_loss", margin=margin, reason="because", **fields)


def decided(run: RunData, *checks: Check) -> list[VerdictRecord]:
    """All verdicts of a run under these checks."""
    decide(run, Policy(name="test", checks=checks))
    return run.results.verdicts


def one(run: RunData, check: Check) -> VerdictRecord:
    """The only verdict of a candidate."""
    (found,) = [v for v in decided(run, check) if v.plan == PLAN]
    return found


def with_answers(
    lost: int, gained: int, n: int = 198, *, right: int = 150, plans: tuple[str, ...] = (PLAN,), **columns: object
) -> RunData:
    """A run whose plans lose and gain so many of n answers; ``columns`` of the items frame are set for all rows."""
    baseline, answers = flipped(lost, gained, n, right=right)
    items = make_items(baseline, dict.fromkeys(plans, answers)).assign(**columns)
    return make_run({name: Measured(kl=lognormal(1e-6)) for name in plans}, items=items)
