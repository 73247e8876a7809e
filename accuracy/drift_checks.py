"""Checks of drift: one function for each, from the stored steps of a plan to a verdict.

Notable: what outweighs a check is here too: a plan that was not measured the way its text says is INVALID, one that
met NaN or infinity fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from driftgate.accuracy.analysis import PlanStatistics, summarize_plan
from driftgate.accuracy.kl_summary import N_EFFECTIVE_MIN, SD_LN_MAX, KlSummary, summarize_kl
from driftgate.accuracy.mixed import find_plan
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.policy_file import Check
from driftgate.accuracy.records import PlanRecord, RunData, VerdictRecord
from driftgate.accuracy.resampling import Steps, form_units, t_interval
from driftgate.accuracy.statistics import quantile_interval
from driftgate.accuracy.verdicts import compare_bounds, matches, record_verdict

__all__ = ["SENSITIVITY", "bound_mean_kl", "check_drift", "equals_baseline", "find_invalid", "find_nonfinite"]

SENSITIVITY = 3.0
"""A plan is told from the baseline when its mean KL is above this multiple of the noise floor's."""

HEAVY_SEQUENCES, HEAVY_SD, HEAVY_EFFECTIVE = 8, 2.0, 50.0
"""Where the wider bounds of a heavy-tailed KL hold: at least so many sequences, sd(ln KL) at most so great, so many
effective steps a sequence. One-sided 99.5 % bounds cover 94.5 to 99.5 % there (200 runs each of 8 and 16 sequences of
64 to 1,500 AR(1) steps of 0, 0.8 and 0.95, sd 1.5 and 1.8; tests/test_drift_checks.py repeats some); with 20 effective
steps a sequence they cover 83 to 94 %."""


@dataclass(frozen=True)
class _Subject:
    """What a check looks at."""

    name: str
    plan: PrecisionPlan
    record: PlanRecord
    statistics: PlanStatistics
    data: RunData

    def kl_steps(self) -> np.ndarray:
        """KL of the plan, sequence after sequence."""
        return self.data.steps[self.data.steps["plan"] == self.name]["kl"].to_numpy()

    def kl_matrix(self) -> np.ndarray:
        """KL of the plan, [n_sequences, n_steps]."""
        return self.kl_steps().reshape(self.statistics.kl.n_sequences, -1)


def check_drift(data: RunData, name: str, checks: tuple[Check, ...], blind: list[str]) -> list[VerdictRecord]:
    """Verdicts of a plan's drift checks, in the order of the policy.

    Args:
        data: the run.
        name: of a candidate.
        checks: of the policy; those of other kinds and for other plans are passed over.
        blind: controls that cannot be told from the baseline: no figure of the plan may pass then.
    """
    record = data.results.plans[name]
    plan = find_plan(data, name)
    subject = _Subject(name, plan, record, summarize_plan(data.steps, name, plan), data)
    invalid = find_invalid(plan, record, floor=data.results.noise_floor.kl_mean)
    verdicts = []
    for check in checks:
        if check.check not in _CHECKS or not matches(name, check.plans):
            continue
        verdict = _CHECKS[check.check](subject, check)
        measured = check.check != "checkpoint_error"  # that one needs neither a read copy nor a noise floor
        verdicts.append(_overrule(verdict, record, invalid, blind) if measured else verdict)
    return verdicts


def find_invalid(plan: PrecisionPlan, record: PlanRecord, *, floor: float | None = None) -> str | None:
    """Why a plan's figures do not measure the plan, None if they do; ``floor``: mean KL of the noise floor."""
    found = equals_baseline(plan, record, floor=floor)
    if found is not None or not plan.low_precision:
        return found
    if record.counters.low_precision_reads == 0:
        return "copy_not_read: no step read a low-precision state; run more steps than L, or choose L >= 2"
    if record.counters.requantizations == 0:
        return "not_requantized: no flush wrote a low-precision state; run more steps than L"
    return None


def equals_baseline(plan: PrecisionPlan, record: PlanRecord, *, floor: float | None = None) -> str | None:
    """Why a plan below FP32 seems to have run in FP32, None if it does not."""
    mean = record.kl.mean
    if plan.low_precision and (
        record.kl.max == 0.0 or (mean is not None and floor is not None and mean <= SENSITIVITY * floor)
    ):
        return "equals_baseline: its KL is that of FP32, so no low-precision state reached the outputs"
    return None


def find_nonfinite(record: PlanRecord) -> str | None:
    """Where NaN or infinity was met, None if nowhere."""
    if record.counters.nonfinite_states:
        return f"{record.counters.nonfinite_states} sequences had NaN or infinity in a state that was stored"
    if record.kl.n_nonfinite:
        return f"{record.kl.n_nonfinite} steps are not finite, the first is step {record.kl.first_nonfinite_step}"
    return None


def bound_mean_kl(kl: KlSummary, values: np.ndarray) -> tuple[float | None, float | None, str | None]:
    """One-sided bounds of the mean, and what blocks a pass: 95 %, or 99.5 % where KL is heavy-tailed."""
    heavy = kl.sd_ln is not None and SD_LN_MAX < kl.sd_ln <= HEAVY_SD and kl.n_sequences >= HEAVY_SEQUENCES
    enough = kl.n_effective is not None and kl.n_effective >= max(N_EFFECTIVE_MIN, HEAVY_EFFECTIVE * kl.n_sequences)
    if not (heavy and enough):
        return kl.lower_95, kl.upper_95, kl.pass_blocked
    interval = t_interval(form_units(Steps.of(values, None, name="kl")).values, confidence=0.99)
    return (None, None, kl.pass_blocked) if interval is None else (max(0.0, interval.low), interval.high, None)


def _overrule(verdict: VerdictRecord, record: PlanRecord, invalid: str | None, blind: list[str]) -> VerdictRecord:
    """What outweighs a drift check: another plan was measured, steps are not finite, the run cannot see drift."""
    nonfinite = find_nonfinite(record)
    if nonfinite is not None:
        return verdict.model_copy(update={"verdict": "fail", "reason": nonfinite})
    if invalid is not None:
        return verdict.model_copy(update={"verdict": "invalid", "reason": invalid})
    if blind and verdict.verdict == "pass":
        reason = f"no_sensitivity: control {blind[0]} cannot be told from the baseline, a pass would mean nothing"
        return verdict.model_copy(update={"verdict": "inconclusive", "reason": reason})
    return verdict


def _check_kl_mean(subject: _Subject, check: Check) -> VerdictRecord:
    """Bounds of the token mean; where the drift law is ``growing``, of its last quarter, never of the whole."""
    kl, law = subject.statistics.kl, subject.statistics.law
    if kl.n_nonfinite:
        reason = f"{kl.n_nonfinite} steps are not finite, the first is step {kl.first_nonfinite_step}"
        return record_verdict(subject.name, check.check, "fail", reason, limit=check.limit)
    if kl.max == 0.0:
        return compare_bounds(subject.name, check, 0.0, 0.0)
    values = subject.kl_matrix()
    if law.law is None and subject.plan.low_recurrence:
        reason = f"too_few_cycles: {law.reason}; error that feeds back was not seen long enough"
        return compare_bounds(subject.name, check, *bound_mean_kl(kl, values)[:2], reason)
    if law.law != "growing":
        return compare_bounds(subject.name, check, *bound_mean_kl(kl, values))
    late = values[:, -(-3 * kl.n_steps // (4 * kl.n_sequences)) :]
    verdict = compare_bounds(subject.name, check, *bound_mean_kl(summarize_kl(late), late))
    note = "drift law is growing, so the last quarter of the positions decides and nothing is said beyond them; "
    return verdict.model_copy(update={"reason": note + verdict.reason})


def _check_p99_9(subject: _Subject, check: Check) -> VerdictRecord:
    low, high = quantile_interval(subject.kl_steps(), 0.999, confidence=0.90)
    blocked = None if high is not None else "too few steps for p99.9"
    return compare_bounds(subject.name, check, low, high, blocked)


def _check_same_top(subject: _Subject, check: Check) -> VerdictRecord:
    same = subject.statistics.same_top
    return compare_bounds(subject.name, check, same.lower_95, same.upper_95, at_least=True)


def _check_ppl(subject: _Subject, check: Check) -> VerdictRecord:
    ppl = subject.statistics.ppl
    return compare_bounds(subject.name, check, ppl.ratio_lower_95, ppl.ratio_upper_95)


def _check_slope(subject: _Subject, check: Check) -> VerdictRecord:
    kl, law = subject.statistics.kl, subject.statistics.law
    if kl.max == 0.0 and not kl.n_nonfinite:
        return compare_bounds(subject.name, check, 0.0, 0.0)
    blocked = None if law.slope is not None else law.reason
    return compare_bounds(subject.name, check, law.slope_lower_95, law.slope_upper_95, blocked)


def _check_checkpoint(subject: _Subject, check: Check) -> VerdictRecord:
    """Greatest layer mean: measured on one sequence without an interval, so it passes or fails."""
    errors = [layer.checkpoint_error for layer in subject.record.state.layers]
    if not errors or any(e is None for e in errors):
        reason = "no flush was observed; run more steps than L"
        return record_verdict(subject.name, check.check, "inconclusive", reason, limit=check.limit)
    worst = max(e for e in errors if e is not None)
    return compare_bounds(subject.name, check, worst, worst)


_CHECKS: dict[str, Callable[[_Subject, Check], VerdictRecord]] = {
    "kl_mean": _check_kl_mean,
    "kl_p99_9": _check_p99_9,
    "same_top_p": _check_same_top,
    "ppl_ratio": _check_ppl,
    "drift_slope": _check_slope,
    "checkpoint_error": _check_checkpoint,
}
