"""What each check of a policy compares and how its figure is computed: `driftgate gate --explain` and the reports.

Notable: a text here says what the code of the check does, and names the file that does it.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from driftgate.accuracy.records import RunData, VerdictRecord
from driftgate.reports.numbers import format_number
from driftgate.reports.open_checks import COUNTS_AS, gates

__all__ = ["CHECK_NOTES", "CheckNote", "explain_checks", "find_note"]


@dataclass(frozen=True, kw_only=True)
class CheckNote:
    """One check in words.

    Attributes:
        sense: how value and limit are compared, e.g. ``at most``; empty where there is no limit.
        unit: of both.
        figure: how the value is computed.
    """

    sense: str
    unit: str
    figure: str


_BOUND = "The value is a one-sided 95 % bound: the worse one has to be inside to pass, the better one outside to fail."

CHECK_NOTES: dict[str, CheckNote] = {
    "bitwise": CheckNote(
        sense="at most",
        unit="differing cases",
        figure="Number of bit-exact cases (baseline against itself, I1 to I7) with one differing bit or more.",
    ),
    "tolerance": CheckNote(
        sense="at most",
        unit="share of the bound",
        figure="Greatest error of an output or a state against FP64 over the bound derived for it, of all cases of T1.",
    ),
    "kl_mean": CheckNote(
        sense="at most",
        unit="nats per step",
        figure="Mean of KL(baseline‖plan) over the decoded steps of all streams, in FP64 over the true vocabulary; "
        "where the drift law is growing, over the last quarter of the positions. The interval is a t interval on the "
        f"means of the streams, or on ten equal batches of steps inside one stream. {_BOUND}",
    ),
    "kl_p99_9": CheckNote(
        sense="at most",
        unit="nats",
        figure="99.9 % quantile of the KL of single steps, with the order-statistic interval of a quantile (binomial); "
        "its upper end exists from about 3,700 steps on.",
    ),
    "same_top_p": CheckNote(
        sense="at least",
        unit="fraction of steps",
        figure="Share of steps at which plan and baseline have the same most likely token; ties go to the lower id. "
        f"{_BOUND}",
    ),
    "ppl_ratio": CheckNote(
        sense="at most",
        unit="ratio",
        figure="exp of the mean difference of negative log likelihoods, plan minus baseline, of the true next token. "
        f"{_BOUND}",
    ),
    "drift_slope": CheckNote(
        sense="at most",
        unit="slope",
        figure=f"Slope of ln mean KL on ln position over 24 log-spaced bins, from the second flush cycle on. {_BOUND}",
    ),
    "checkpoint_error": CheckNote(
        sense="at most",
        unit="relative error",
        figure="Stored checkpoint against an FP32 recurrence on the layer's own inputs, relative Frobenius norm, mean "
        "over heads and flushes of the first stream; the greatest over layers. It has no interval.",
    ),
    "task_loss": CheckNote(
        sense="at most",
        unit="points lost",
        figure="Accuracy of the baseline minus accuracy of the plan on the same items. A pass needs the one-sided 95 % "
        "bound of the loss inside the margin (t on item means from 5 gained items on, else exact binomial on lost "
        "items), the baseline above chance, and the low-precision copy read; over plans Holm's correction applies.",
    ),
    "cap_hit_excess": CheckNote(
        sense="at most",
        unit="fraction of answers",
        figure="Share of the plan's answers that end at the token limit minus that share of the baseline.",
    ),
    "cross_check": CheckNote(
        sense="at most",
        unit="logits",
        figure="Greatest difference of logits between torch twins and interpreted Triton kernels on the same tokens, "
        "of plans with an FP32 state; asked whenever the twins took the long part.",
    ),
    "sensitivity": CheckNote(
        sense="",
        unit="",
        figure="A control is expected to drift. One whose mean KL is not above 3 times the noise floor means that "
        "this run cannot see drift, so that no drift check may pass.",
    ),
    "finite": CheckNote(
        sense="", unit="", figure="NaN or infinity in a state or in a KL fails the plan, whatever the policy asks for."
    ),
    "plans": CheckNote(sense="", unit="", figure="A run of controls only has nothing to decide."),
    "accepted": CheckNote(
        sense="within",
        unit="unit of the figure",
        figure="The figure of this run against the one of the last accepted run: worse than the far end of the "
        "accepted figure's 95 % interval fails. A figure without an interval is compared only where it was exactly 0.",
    ),
    COUNTS_AS: CheckNote(
        sense="",
        unit="",
        figure="What the policy makes of a run that is inconclusive: fail fails it; pass leaves "
        "it inconclusive and makes the exit code 0, unless a check could have seen nothing (no bound, at_chance, "
        "copy_not_read, equals_baseline, not_requantized, no_sensitivity). Without the rule the exit code is 3.",
    ),
}


def find_note(check: str) -> CheckNote | None:
    """The note of a check as verdicts name it (``task_loss:recall``), None for a name that has none."""
    return CHECK_NOTES.get(check.partition(":")[0])


def explain_checks(run: RunData, *, width: int = 80) -> list[str]:
    """Blocks of text: each check that was made, how its figure is computed, its limits and their reasons.

    Args:
        run: with its verdicts; ``manifest.policy`` is the policy that gave them.
        width: of lines, in characters.
    """
    blocks = []
    rules, of_run = run.manifest.policy.get("checks", ()), run.manifest.policy.get("inconclusive")
    asked = [COUNTS_AS] if isinstance(of_run, dict) else []
    for name in dict.fromkeys([*(v.check.partition(":")[0] for v in run.results.verdicts), *asked]):
        note = CHECK_NOTES.get(name)
        made = [v for v in run.results.verdicts if v.check.partition(":")[0] == name]
        lines = [name, *_wrap(note.figure if note else "", width)]
        for rule in rules if isinstance(rules, list | tuple) else ():
            if rule.get("check") == name:
                lines += _wrap(_tell_rule(rule, note), width)
        if name == COUNTS_AS and isinstance(of_run, dict):
            lines += _wrap(f"an inconclusive run counts as: {of_run.get('counts_as')}: {of_run.get('reason')}", width)
        lines += _wrap(_tell_verdicts(run, made) if made else "found: the run is not inconclusive", width)
        blocks.append("\n".join(lines))
    return blocks


def _tell_rule(rule: dict[str, object], note: CheckNote | None) -> str:
    number = rule.get("margin") if rule.get("limit") is None else rule.get("limit")
    plans = ", ".join(str(p) for p in rule.get("plans") or ("*",))  # type: ignore[attr-defined]
    where = "all candidates" if plans == "*" else plans
    told = "no case may differ" if number is None else f"{note.sense if note else ''} {format_number(number)}".strip()
    unit = f" {note.unit}" if note and note.unit and number is not None else ""
    return f"limit: {told}{unit} ({where}): {rule.get('reason')}"


def _tell_verdicts(run: RunData, made: list[VerdictRecord]) -> str:
    counts: dict[str, int] = {}
    for record in made:
        verdict = record.verdict if gates(run, record.plan) else f"{record.verdict} (control)"
        counts[verdict] = counts.get(verdict, 0) + 1
    return "found: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
