"""Policies: named checks with limits and reasons, and the verdicts they give on a run.

Notable: verdicts compare one-sided 95 % bounds with limits; a bound equal to the limit passes; what cannot be decided
is INCONCLUSIVE, what was not measured the way the plan says is INVALID, and neither is a pass. Controls are not gated:
one that cannot be told from the baseline makes the checks of its kind inconclusive. Everything is computed from the
stored frames, so that a run gates the same way later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from driftgate.accuracy.analysis import PlanStatistics, summarize_plan
from driftgate.accuracy.items import BASELINE, compare_items
from driftgate.accuracy.kl_summary import N_EFFECTIVE_MIN, SD_LN_MAX, KlSummary, summarize_kl
from driftgate.accuracy.noninferiority import PairedVerdict, above_chance, holm_over_plans
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.records import PlanRecord, RunData, Verdict, VerdictRecord
from driftgate.accuracy.resampling import Steps, form_units, t_interval
from driftgate.accuracy.statistics import quantile_interval
from driftgate.errors import InputError
from driftgate.quant.formats import get_format

__all__ = ["Check", "Policy", "decide", "load_policy"]

DEFAULT = Path(__file__).parent / "policies" / "default.yaml"
CHANCE = 0.25
ALPHA = 0.05
SENSITIVITY = 3.0
"""A control is told from the baseline when its mean KL is above this multiple of the noise floor's."""

CheckName = Literal[
    "bitwise", "kl_mean", "kl_p99_9", "same_top_p", "ppl_ratio", "drift_slope", "checkpoint_error", "task_loss"
]
_GRAVITY = ("fail", "invalid", "inconclusive", "pass")
_DRIFT_CHECKS = ("kl_mean", "kl_p99_9", "same_top_p", "ppl_ratio", "drift_slope")


class Check(BaseModel):
    """One rule.

    Attributes:
        check: what is compared.
        limit: greatest value that passes (``same_top_p``: least); unit of the figure.
        margin: greatest loss in points, for ``task_loss``.
        reason: why this limit.
        plans: patterns of the plans it applies to.
        tasks: patterns of the tasks, for ``task_loss``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    check: CheckName
    limit: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    margin: float | None = Field(default=None, gt=0, lt=100)
    reason: str = Field(min_length=1)
    plans: tuple[str, ...] = ("*",)
    tasks: tuple[str, ...] = ("*",)

    @model_validator(mode="after")
    def _one_number(self) -> Check:
        wanted = {"bitwise": None, "task_loss": "margin"}.get(self.check, "limit")
        for name in ("limit", "margin"):
            if (getattr(self, name) is not None) != (name == wanted):
                raise ValueError(f"{self.check} takes {wanted or 'neither limit nor margin'}")
        return self


class Policy(BaseModel):
    """Named checks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    checks: tuple[Check, ...] = Field(min_length=1)


def load_policy(path: str | Path | None = None) -> Policy:
    """Read a policy file, or the bundled default.

    Raises:
        InputError: missing, no YAML, or not of this schema; one line.
    """
    path = DEFAULT if path is None else Path(path)
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"policy {path} does not exist; leave --policy out for the default") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"policy {path} is no readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        raise InputError(f"policy {path}: expected a mapping with name and checks, got {type(fields).__name__}")
    try:
        return Policy.model_validate({"name": path.stem, **fields})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "policy"
        raise InputError(f"policy {path}: {where}: {first['msg']}") from error


def decide(data: RunData, policy: Policy) -> None:
    """Set the verdicts of a run in place: ``verdicts``, each task's verdict, and the run's.

    A run: any fail gives ``fail``, else any invalid or inconclusive gives ``inconclusive``, else ``pass``.
    """
    results = data.results
    for task in (t for record in results.plans.values() for t in record.tasks.values()):
        task.verdict = "inconclusive"  # what another policy said does not count
    verdicts = [v for check in policy.checks if check.check == "bitwise" for v in _check_bitwise(data, check)]
    again = [b for b in results.bitwise if b.invariant == "A/A" and not b.equal]
    if again and not any(v.verdict == "fail" for v in verdicts):
        verdicts.append(
            _verdict(BASELINE, "bitwise", "fail", f"the baseline differs from itself: {again[0].first_different}")
        )
    verdicts += _check_backends(data)
    blind = _blind_controls(data)
    candidates = {n: p for n, p in results.plans.items() if p.role == "candidate"}
    if not candidates:
        verdicts.append(_verdict(BASELINE, "plans", "inconclusive", "no_candidates: the run has controls only"))
    verdicts += _find_unmatched(policy, candidates)
    for name, record in candidates.items():
        invalid = find_invalid(name, record, floor=results.noise_floor.kl_mean)
        statistics = summarize_plan(data.steps, name, PrecisionPlan.parse(name))
        for check in policy.checks:
            if check.check in ("bitwise", "task_loss") or not _matches(name, check.plans):
                continue
            verdict = _CHECKS[check.check](_Subject(name, record, statistics, data), check)
            if check.check in _DRIFT_CHECKS:
                verdict = _overrule(verdict, record, invalid, blind)
            verdicts.append(verdict)
    for check in policy.checks:
        if check.check == "task_loss":
            verdicts += _check_tasks(data, candidates, check)
    for name, record in candidates.items():
        for task, answers in record.tasks.items():
            found = [v.verdict for v in verdicts if (v.plan, v.check) == (name, f"task_loss:{task}")]
            answers.verdict = min(found, key=_GRAVITY.index, default="inconclusive")
    for name, record in candidates.items():
        nonfinite = _find_nonfinite(record)
        if nonfinite is not None and not any(v.plan == name and v.verdict == "fail" for v in verdicts):
            verdicts.append(_verdict(name, "finite", "fail", nonfinite))  # whatever the policy asks for
    for control in blind:
        reason = (
            f"no_sensitivity: its mean KL is not above {SENSITIVITY:g} x the noise floor; this run cannot see drift"
        )
        verdicts.append(_verdict(control, "sensitivity", "inconclusive", reason))
    results.verdicts = verdicts
    kinds = {v.verdict for v in verdicts}
    if "fail" in kinds:
        results.verdict = "fail"
    else:
        results.verdict = "inconclusive" if kinds - {"pass"} or not verdicts else "pass"


CROSS_CHECK_LIMIT = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Greatest difference of logits between twins and kernels for plans with an FP32 state, by type of the activations.

FP32 rounding gives about 1e-5 on the embedded checkpoint, a wrong readout 0.1 and more; with 16-bit activations one
rounding of a hidden state can fall either way. Plans below FP32 have no limit: a value between two codes can, too."""


def _check_backends(data: RunData) -> list[VerdictRecord]:
    """Where the torch twins took the long part, the real kernels must have run beside them and agree."""
    backend = data.results.backend
    if backend.drift != "torch":
        return []
    if backend.cross_check is None or backend.cross_check.steps < 1:
        return [_verdict(BASELINE, "cross_check", "inconclusive", "no Triton kernel ran beside the torch twins")]
    limit = CROSS_CHECK_LIMIT.get(str(data.results.model.get("dtype")), CROSS_CHECK_LIMIT["float32"])
    by_plan = backend.cross_check.by_plan
    exact = [BASELINE, *(n for n in data.results.plans if not PrecisionPlan.parse(n).low_precision)]
    differences = {name: by_plan.get(name) for name in exact}
    if any(d is None or d > limit for d in differences.values()):
        reason = f"twins and Triton kernels differ on the same tokens: {differences}"
        return [_verdict(BASELINE, "cross_check", "fail", reason, limit=limit)]
    worst = max(d for d in differences.values() if d is not None)
    reason = "twins and interpreted Triton kernels agree on the same tokens where the state is FP32"
    return [_verdict(BASELINE, "cross_check", "pass", reason, value=worst, limit=limit)]


def _find_unmatched(policy: Policy, candidates: dict[str, PlanRecord]) -> list[VerdictRecord]:
    """Checks whose patterns name no plan or task of the run: a misspelt one must not look like a pass."""
    verdicts = []
    tasks = {task for record in candidates.values() for task in record.tasks}
    for check in policy.checks:
        for patterns, names in ((check.plans, candidates), (check.tasks, tasks)):
            if patterns != ("*",) and not any(_matches(name, patterns) for name in names):
                reason = f"matched_nothing: {', '.join(patterns)} is in no candidate of this run"
                verdicts.append(_verdict(BASELINE, check.check, "inconclusive", reason))
    return verdicts


def find_invalid(name: str, record: PlanRecord, *, floor: float | None = None) -> str | None:
    """Why a plan's figures do not measure the plan, None if they do; ``floor``: mean KL of the noise floor."""
    options = PrecisionPlan.parse(name).options
    counters = record.counters
    mean = record.kl.mean
    if any(get_format(f).low_precision for f in (options.read, options.recurrence)) and (
        record.kl.max == 0.0 or (mean is not None and floor is not None and mean <= SENSITIVITY * floor)
    ):
        return "equals_baseline: its KL is that of FP32, so no low-precision state reached the outputs"
    low = [get_format(f).low_precision for f in (options.read, options.recurrence)]
    if any(low) and counters.low_precision_reads == 0:
        return "copy_not_read: no step read a low-precision state; run more steps than L, or choose L >= 2"
    if any(low) and counters.requantizations == 0:
        return "not_requantized: no flush wrote a low-precision state; run more steps than L"
    return None


@dataclass(frozen=True)
class _Subject:
    """What a check looks at."""

    name: str
    record: PlanRecord
    statistics: PlanStatistics
    data: RunData


def _verdict(
    plan: str, check: str, verdict: Verdict, reason: str, *, value: float | None = None, limit: float | None = None
) -> VerdictRecord:
    return VerdictRecord(plan=plan, check=check, value=value, limit=limit, verdict=verdict, reason=reason)


def _compare(
    subject: _Subject,
    check: Check,
    low: float | None,
    high: float | None,
    blocked: str | None = None,
    *,
    at_least: bool = False,
) -> VerdictRecord:
    """Three-way comparison of the one-sided bounds [low, high] with the limit; ``blocked`` says why none may pass."""
    limit = check.limit
    assert limit is not None
    inner, outer = (low, high) if at_least else (high, low)
    sense = "at least" if at_least else "at most"
    if outer is not None and (outer < limit if at_least else outer > limit):
        reason = f"one-sided 95 % bound {outer:.4g} is outside {sense} {limit:g}: {check.reason}"
        return _verdict(subject.name, check.check, "fail", reason, value=outer, limit=limit)
    if inner is None or outer is None:
        reason = blocked or "too few steps for a bound"
        return _verdict(subject.name, check.check, "inconclusive", reason, limit=limit)
    passes = inner >= limit if at_least else inner <= limit
    if passes and blocked is None:
        reason = f"one-sided 95 % bound {inner:.4g} is inside {sense} {limit:g}: {check.reason}"
        return _verdict(subject.name, check.check, "pass", reason, value=inner, limit=limit)
    reason = blocked or f"one-sided 95 % bounds {low:.4g} to {high:.4g} hold the limit; run more sequences"
    return _verdict(subject.name, check.check, "inconclusive", reason, value=inner, limit=limit)


def _check_kl_mean(subject: _Subject, check: Check) -> VerdictRecord:
    """Bounds of the token mean; where the drift law is ``growing``, of its last quarter, never of the whole."""
    kl, law = subject.statistics.kl, subject.statistics.law
    if kl.n_nonfinite:
        reason = f"{kl.n_nonfinite} steps are not finite, the first is step {kl.first_nonfinite_step}"
        return _verdict(subject.name, check.check, "fail", reason, limit=check.limit)
    if kl.max == 0.0:
        return _compare(subject, check, 0.0, 0.0)
    if law.law is None and get_format(PrecisionPlan.parse(subject.name).options.recurrence).low_precision:
        reason = f"too_few_cycles: {law.reason}; error that feeds back was not seen long enough"
        return _compare(subject, check, *_kl_bounds(kl, _kl_matrix(subject))[:2], reason)
    if law.law != "growing":
        return _compare(subject, check, *_kl_bounds(kl, _kl_matrix(subject)))
    late = _kl_matrix(subject)[:, -(-3 * kl.n_steps // (4 * kl.n_sequences)) :]
    verdict = _compare(subject, check, *_kl_bounds(summarize_kl(late), late))
    note = "drift law is growing, so the last quarter of the positions decides and nothing is said beyond them; "
    return verdict.model_copy(update={"reason": note + verdict.reason})


HEAVY_SEQUENCES, HEAVY_SD, HEAVY_EFFECTIVE = 8, 2.0, 50.0
"""Where the wider bounds of a heavy-tailed KL hold: at least so many sequences, sd(ln KL) at most so great, so many
effective steps a sequence. One-sided 99.5 % bounds cover 94.5 to 99.5 % there (200 runs each of 8 and 16 sequences of
64 to 1,500 AR(1) steps of 0, 0.8 and 0.95, sd 1.5 and 1.8; tests/test_policy.py repeats some); with 20 effective steps
a sequence they cover 83 to 94 %."""


def _kl_matrix(subject: _Subject) -> np.ndarray:
    """KL of a plan, [n_sequences, n_steps]."""
    frame = subject.data.steps
    own = frame[frame["plan"] == subject.name]
    return own["kl"].to_numpy().reshape(own["sequence"].nunique(), -1)


def _kl_bounds(kl: KlSummary, values: np.ndarray) -> tuple[float | None, float | None, str | None]:
    """One-sided bounds of the mean, and what blocks a pass: 95 %, or 99.5 % where KL is heavy-tailed."""
    heavy = kl.sd_ln is not None and SD_LN_MAX < kl.sd_ln <= HEAVY_SD and kl.n_sequences >= HEAVY_SEQUENCES
    enough = kl.n_effective is not None and kl.n_effective >= max(N_EFFECTIVE_MIN, HEAVY_EFFECTIVE * kl.n_sequences)
    if not (heavy and enough):
        return kl.lower_95, kl.upper_95, kl.pass_blocked
    interval = t_interval(form_units(Steps.of(values, None, name="kl")).values, confidence=0.99)
    return (None, None, kl.pass_blocked) if interval is None else (max(0.0, interval.low), interval.high, None)


def _check_p99_9(subject: _Subject, check: Check) -> VerdictRecord:
    frame = subject.data.steps
    low, high = quantile_interval(frame[frame["plan"] == subject.name]["kl"].to_numpy(), 0.999, confidence=0.90)
    return _compare(subject, check, low, high, blocked=None if high is not None else "too few steps for p99.9")


def _check_same_top(subject: _Subject, check: Check) -> VerdictRecord:
    same = subject.statistics.same_top
    return _compare(subject, check, same.lower_95, same.upper_95, at_least=True)


def _check_ppl(subject: _Subject, check: Check) -> VerdictRecord:
    ppl = subject.statistics.ppl
    return _compare(subject, check, ppl.ratio_lower_95, ppl.ratio_upper_95)


def _check_slope(subject: _Subject, check: Check) -> VerdictRecord:
    kl, law = subject.statistics.kl, subject.statistics.law
    if kl.max == 0.0 and not kl.n_nonfinite:
        return _compare(subject, check, 0.0, 0.0)
    return _compare(
        subject, check, law.slope_lower_95, law.slope_upper_95, blocked=None if law.slope is not None else law.reason
    )


def _check_checkpoint(subject: _Subject, check: Check) -> VerdictRecord:
    """Greatest layer mean: measured on one sequence without an interval, so it passes or fails."""
    errors = [layer.checkpoint_error for layer in subject.record.state.layers]
    if not errors or any(e is None for e in errors):
        return _verdict(
            subject.name, check.check, "inconclusive", "no flush was observed; run more steps than L", limit=check.limit
        )
    worst = max(e for e in errors if e is not None)
    return _compare(subject, check, worst, worst)


_CHECKS: dict[str, Callable[[_Subject, Check], VerdictRecord]] = {
    "kl_mean": _check_kl_mean,
    "kl_p99_9": _check_p99_9,
    "same_top_p": _check_same_top,
    "ppl_ratio": _check_ppl,
    "drift_slope": _check_slope,
    "checkpoint_error": _check_checkpoint,
}


def _overrule(verdict: VerdictRecord, record: PlanRecord, invalid: str | None, blind: list[str]) -> VerdictRecord:
    """What outweighs a drift check: another plan was measured, steps are not finite, the run cannot see drift."""
    nonfinite = _find_nonfinite(record)
    if nonfinite is not None:
        return verdict.model_copy(update={"verdict": "fail", "reason": nonfinite})
    if invalid is not None:
        return verdict.model_copy(update={"verdict": "invalid", "reason": invalid})
    if blind and verdict.verdict == "pass":
        reason = f"no_sensitivity: control {blind[0]} cannot be told from the baseline, a pass would mean nothing"
        return verdict.model_copy(update={"verdict": "inconclusive", "reason": reason})
    return verdict


def _find_nonfinite(record: PlanRecord) -> str | None:
    """Where NaN or infinity was met, None if nowhere."""
    if record.counters.nonfinite_states:
        return f"{record.counters.nonfinite_states} sequences had NaN or infinity in a state that was stored"
    if record.kl.n_nonfinite:
        return f"{record.kl.n_nonfinite} steps are not finite, the first is step {record.kl.first_nonfinite_step}"
    return None


def _check_bitwise(data: RunData, check: Check) -> list[VerdictRecord]:
    """All invariants at once: one failure fails the run."""
    records = data.results.bitwise
    broken = [r for r in records if not r.equal]
    if not records:
        return [_verdict(BASELINE, "bitwise", "inconclusive", "no invariant was checked")]
    if broken:
        names = ", ".join(sorted({r.invariant for r in broken}))
        reason = f"{len(broken)} of {len(records)} cases differ ({names}): {check.reason}"
        return [_verdict(BASELINE, "bitwise", "fail", reason, value=float(len(broken)), limit=0.0)]
    return [_verdict(BASELINE, "bitwise", "pass", f"all {len(records)} cases are equal", value=0.0, limit=0.0)]


def _check_tasks(data: RunData, candidates: dict[str, PlanRecord], check: Check) -> list[VerdictRecord]:
    """Non-inferiority of each plan on each task; over plans, Holm takes back passes that several looks would give."""
    assert check.margin is not None
    paired: dict[str, dict[str, PairedVerdict]] = {}
    for name, record in candidates.items():
        if _matches(name, check.plans):
            tasks = [t for t in record.tasks if _matches(t, check.tasks)]
            if tasks:
                paired[name] = {t: compare_items(data.items, name, t, margin=check.margin) for t in tasks}
    if not paired:
        return []
    holm = holm_over_plans({n: {t: _p_pass(v) for t, v in by.items()} for n, by in paired.items()})
    verdicts = []
    for name, by_task in paired.items():
        record = candidates[name]
        for task, found in by_task.items():
            verdict, reason = _overrule_task(data, name, record, task, found, holm[name].passes, holm[name].p_adjusted)
            value = found.fail_bound if found.verdict == "fail" else found.bound
            text = f"{reason}: {check.reason}" if verdict in ("pass", "fail") else reason
            verdicts.append(_verdict(name, f"task_loss:{task}", verdict, text, value=100 * value, limit=check.margin))
    return verdicts


def _p_pass(found: PairedVerdict) -> float:
    """Error of the test behind a pass; where the bound equals the margin the search ends on either side of 5 %."""
    return min(found.p_pass, ALPHA) if found.verdict == "pass" else found.p_pass


def _overrule_task(
    data: RunData, name: str, record: PlanRecord, task: str, found: PairedVerdict, holm_passes: bool, adjusted: float
) -> tuple[Verdict, str]:
    """A task can pass only above chance, with the copy read while it was answered, and after Holm."""
    if found.verdict != "pass":
        return found.verdict, found.reason
    base = data.items[(data.items["plan"] == BASELINE) & (data.items["task"] == task)]["correct"]
    chance = above_chance(int(base.sum()), len(base), CHANCE)
    if not chance:
        return "inconclusive", f"at_chance: the baseline answers {chance.accuracy:.1%} right, guessing {CHANCE:.0%}"
    invalid = find_invalid(name, record, floor=data.results.noise_floor.kl_mean)
    if invalid is not None:
        return "inconclusive", invalid
    if not holm_passes:
        return "inconclusive", f"{found.reason}; over all plans (Holm) p = {adjusted:.2g}, more items would decide"
    return "pass", found.reason


def _blind_controls(data: RunData) -> list[str]:
    """Controls whose drift is not above the noise floor."""
    floor = data.results.noise_floor.kl_mean or 0.0
    blind = []
    for name, record in data.results.plans.items():
        mean = record.kl.mean
        if record.role == "control" and not record.kl.n_nonfinite and (mean is None or mean <= SENSITIVITY * floor):
            blind.append(name)
    return blind


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
