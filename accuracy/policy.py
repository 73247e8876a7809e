"""The verdicts that a policy gives on a run.

Notable: verdicts compare one-sided 95 % bounds with limits; a bound equal to the limit passes; what cannot be decided
is INCONCLUSIVE, what was not measured the way the plan says is INVALID, and neither is a pass. Controls are not gated:
one that cannot be told from the baseline makes the checks of its kind inconclusive. Everything is computed from the
stored frames, so that a run gates the same way later. ``policy_file`` holds the schema, ``drift_checks`` and
``task_checks`` the checks of a plan; here are those of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import pandas as pd

from driftgate.accuracy.drift_checks import SENSITIVITY, check_drift, equals_baseline, find_invalid, find_nonfinite
from driftgate.accuracy.items import BASELINE, count_reads
from driftgate.accuracy.mixed import find_plan
from driftgate.accuracy.policy_file import Check, Inconclusive, Policy, load_policy
from driftgate.accuracy.records import PlanRecord, RunData, VerdictRecord
from driftgate.accuracy.task_checks import check_tasks, judge_task
from driftgate.accuracy.verdicts import matches, record_verdict, summarize_verdicts

__all__ = [
    "COUNTS_AS", "Check", "Policy", "count_inconclusive", "decide", "find_unmatched", "list_blind", "load_policy",
]  # fmt: skip

COUNTS_AS = "counts_as"
"""Name of the verdict that says what a policy makes of an inconclusive run."""
_BLIND = ("at_chance", "copy_not_read", "equals_baseline", "not_requantized")
"""Codes of reasons that say that a check could have seen nothing, though it has a bound."""

CROSS_CHECK_LIMIT = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Greatest difference of logits between twins and kernels for plans with an FP32 state, by type of the activations.

FP32 rounding gives about 1e-5 on the embedded checkpoint, a wrong readout 0.1 and more; with 16-bit activations one
rounding of a hidden state can fall either way. Plans below FP32 have no limit: a value between two codes can, too."""


def decide(data: RunData, policy: Policy) -> None:
    """Set the verdicts of a run in place: ``verdicts``, each task's verdict, and the run's.

    A run: any fail gives ``fail``, else any invalid or inconclusive gives ``inconclusive``, else ``pass``; where it is
    inconclusive the policy may have more to say, see `count_inconclusive`.
    """
    results = data.results
    for stale in (t for record in results.plans.values() for t in record.tasks.values()):
        stale.verdict = "inconclusive"  # what another policy said does not count
    candidates = {n: p for n, p in results.plans.items() if p.role == "candidate"}
    tasks = {name: record.tasks for name, record in candidates.items()}
    blind = _blind_controls(data)
    verdicts = _check_bitwise(data, policy) + _check_backends(data) + _check_tolerance(data)
    if not candidates:
        verdicts.append(record_verdict(BASELINE, "plans", "inconclusive", "no_candidates: the run has controls only"))
    verdicts += find_unmatched(policy, candidates, {task for by in tasks.values() for task in by})
    for name in candidates:
        verdicts += check_drift(data, name, policy.checks, blind)
    verdicts += check_tasks(data.items, tasks, policy.checks, why_untested=partial(_why_untested, data))
    for name, by_task in tasks.items():
        for task, answers in by_task.items():
            answers.verdict = judge_task(verdicts, name, task)
    for name, record in candidates.items():
        nonfinite = find_nonfinite(record) or _find_nonfinite_answers(data.items, name)
        if nonfinite is not None and not any(v.plan == name and v.verdict == "fail" for v in verdicts):
            verdicts.append(record_verdict(name, "finite", "fail", nonfinite))  # whatever the policy asks for
    for control in blind:
        reason = (
            f"no_sensitivity: its mean KL is not above {SENSITIVITY:g} x the noise floor; this run cannot see drift"
        )
        verdicts.append(record_verdict(control, "sensitivity", "inconclusive", reason))
    results.verdicts = count_inconclusive(verdicts, policy.inconclusive)
    results.verdict = summarize_verdicts(v.verdict for v in results.verdicts)


def find_unmatched(policy: Policy, plans: Iterable[str], tasks: Iterable[str]) -> list[VerdictRecord]:
    """Checks whose patterns name no plan or task of the run: a misspelt one must not look like a pass."""
    plans, tasks, verdicts = set(plans), set(tasks), []
    for check in policy.checks:
        for patterns, names in ((check.plans, plans), (check.tasks, tasks)):
            if patterns != ("*",) and not any(matches(name, patterns) for name in names):
                reason = f"matched_nothing: {', '.join(patterns)} is in no candidate of this run"
                verdicts.append(record_verdict(BASELINE, check.check, "inconclusive", reason))
    return verdicts


def list_blind(verdicts: Iterable[VerdictRecord]) -> list[VerdictRecord]:
    """Checks that more data of the same kind would not decide: without a bound, or of what was never read.

    Every other check that is open has bounds with its limit between them.
    """
    return [
        record
        for record in verdicts
        if record.verdict == "invalid"
        or (record.verdict == "inconclusive" and (record.value is None or record.reason.startswith(_BLIND)))
    ]


def count_inconclusive(verdicts: Sequence[VerdictRecord], rule: Inconclusive | None) -> list[VerdictRecord]:
    """The verdicts with one more where they are inconclusive together and a policy says what that counts as.

    The one more is a fail, which fails the run; or a pass, which leaves it inconclusive and says that its exit code is
    0. Where a check is blind (`list_blind`) there is no pass: the one more is inconclusive, and says which.

    Args:
        verdicts: of a run; one that an earlier call added is dropped.
        rule: of the policy; None adds nothing.
    """
    own = [record for record in verdicts if record.check != COUNTS_AS]
    if rule is None or summarize_verdicts(record.verdict for record in own) != "inconclusive":
        return own
    n_open = sum(record.verdict != "pass" for record in own)
    told = f"{n_open} {'check is' if n_open == 1 else 'checks are'} inconclusive, which this policy"
    blind = list_blind(own)
    if rule.counts_as == "fail":
        found = record_verdict(BASELINE, COUNTS_AS, "fail", f"{told} counts as a fail: {rule.reason}")
    elif blind:
        first = f"{blind[0].plan} {blind[0].check}: {blind[0].reason}"
        reason = f"{told} would let pass, but not where a check could have seen nothing: {first}"
        found = record_verdict(BASELINE, COUNTS_AS, "inconclusive", reason)
    else:
        found = record_verdict(BASELINE, COUNTS_AS, "pass", f"{told} counts as a pass: {rule.reason}")
    return [*own, found]


def _why_untested(data: RunData, plan: str, task: str) -> str | None:
    """Why answers say nothing about a plan's precision: no low-precision state was read while they were produced.

    Items count their own reads (an answer on flush steps alone has none), and at least half of the answers must have
    some: the others are those of the baseline whatever the format. For questions in streams the plan's counters stand.
    """
    parsed = find_plan(data, plan)
    if not parsed.low_precision:
        return None
    record: PlanRecord = data.results.plans[plan]
    floor = data.results.noise_floor.kl_mean
    reads = count_reads(data.items, plan, task)
    if reads is None:
        return find_invalid(parsed, record, floor=floor)
    if 2 * (reads > 0).sum() < len(reads):
        found = f"{int((reads > 0).sum())} of {len(reads)} answers"
        return f"copy_not_read: a low-precision state was read for {found}; prefill less or ask for longer answers"
    return equals_baseline(parsed, record, floor=floor)


def _find_nonfinite_answers(items: pd.DataFrame, plan: str) -> str | None:
    """Where logits that an answer was read from were NaN or infinite, None if nowhere."""
    broken = items[(items["plan"] == plan) & (items["parse_reason"] == "nonfinite")]
    if broken.empty:
        return None
    return f"{len(broken)} answers have logits that are not finite, the first to {broken['item_id'].iloc[0]}"


def _check_bitwise(data: RunData, policy: Policy) -> list[VerdictRecord]:
    """All invariants at once: one failure fails the run; the baseline equals itself whatever the policy asks for."""
    records = data.results.bitwise
    broken = [r for r in records if not r.equal]
    verdicts = []
    for check in policy.checks:
        if check.check != "bitwise":
            continue
        if not records:
            verdicts.append(record_verdict(BASELINE, "bitwise", "inconclusive", "no invariant was checked"))
        elif broken:
            names = ", ".join(sorted({r.invariant for r in broken}))
            reason = f"{len(broken)} of {len(records)} cases differ ({names}): {check.reason}"
            verdicts.append(
                record_verdict(BASELINE, "bitwise", "fail", reason, value=float(len(broken)), limit=0.0)
            )  # fmt: skip
        else:
            reason = f"all {len(records)} cases are equal"
            verdicts.append(record_verdict(BASELINE, "bitwise", "pass", reason, value=0.0, limit=0.0))
    again = [r for r in broken if r.invariant == "A/A"]
    if again and not any(v.verdict == "fail" for v in verdicts):
        reason = f"the baseline differs from itself: {again[0].first_different}"
        verdicts.append(record_verdict(BASELINE, "bitwise", "fail", reason))
    return verdicts


def _check_backends(data: RunData) -> list[VerdictRecord]:
    """Where the torch twins took the long part, the real kernels must have run beside them and agree."""
    backend = data.results.backend
    if backend.drift != "torch":
        return []
    if backend.cross_check is None or backend.cross_check.steps < 1:
        reason = "no Triton kernel ran beside the torch twins"
        return [record_verdict(BASELINE, "cross_check", "inconclusive", reason)]
    limit = CROSS_CHECK_LIMIT.get(str(data.results.model.get("dtype")), CROSS_CHECK_LIMIT["float32"])
    by_plan = backend.cross_check.by_plan
    exact = [BASELINE, *(n for n in data.results.plans if not find_plan(data, n).low_precision)]
    differences = {name: by_plan.get(name) for name in exact}
    if any(d is None or d > limit for d in differences.values()):
        reason = f"twins and Triton kernels differ on the same tokens: {differences}"
        return [record_verdict(BASELINE, "cross_check", "fail", reason, limit=limit)]
    worst = max(d for d in differences.values() if d is not None)
    reason = "twins and interpreted Triton kernels agree on the same tokens where the state is FP32"
    return [record_verdict(BASELINE, "cross_check", "pass", reason, value=worst, limit=limit)]


def _check_tolerance(data: RunData) -> list[VerdictRecord]:
    """The second rung: where bits cannot be compared, every element keeps its derived bound; no policy can waive it."""
    records = data.results.tolerance
    if not records:
        return []
    outside = [r for r in records if not r.within or r.error is None]
    shares = [r.error / r.bound for r in records if r.error is not None and r.bound > 0]
    worst = max(shares, default=0.0)
    if outside:
        where = f"{outside[0].recurrence} {outside[0].case.get('plan')}: {outside[0].what}"
        reason = f"{len(outside)} of {len(records)} cases are outside their bound against FP64, the first is {where}"
        return [record_verdict(BASELINE, "tolerance", "fail", reason, value=worst, limit=1.0)]
    reason = f"all {len(records)} cases are inside their derived bound against FP64"
    return [record_verdict(BASELINE, "tolerance", "pass", reason, value=worst, limit=1.0)]


def _blind_controls(data: RunData) -> list[str]:
    """Controls whose drift is not above the noise floor."""
    floor = data.results.noise_floor.kl_mean or 0.0
    blind = []
    for name, record in data.results.plans.items():
        mean = record.kl.mean
        if record.role == "control" and not record.kl.n_nonfinite and (mean is None or mean <= SENSITIVITY * floor):
            blind.append(name)
    return blind
