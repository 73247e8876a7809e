"""``driftgate run --recommend --budget RATIO``: one plan, why, and the next best; and the table of an ablation.

Notable: only a plan that was measured and passes every check of the policy is recommended. What an ablation suggests
beyond that is named as what it is, a sum of single layers that was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from driftgate.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from driftgate.accuracy.records import AblationRecord, RunData

__all__ = ["Advice", "Untested", "ablation_table", "check_budget", "recommend_plan"]

_ENDS = 16
"""Rows at either end of a long table."""


@dataclass(frozen=True, kw_only=True)
class Untested:
    """Layers of a plan that an ablation finds cheapest, all others in FP32 replay.

    Attributes:
        plan: key of the plan that these layers have.
        layers: decoder-layer indices.
        kl: sum of the mean KL of these layers alone, in nats.
        state_ratio: of the whole.
    """

    plan: str
    layers: tuple[int, ...]
    kl: float
    state_ratio: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What a run recommends.

    Attributes:
        budget: greatest state ratio.
        plan: key of a plan, None where none passes within the budget.
        reason: why.
        next_best: key of another plan, None where there is none.
        next_reason: why it comes second, or what it lacks.
        untested: what to measure next, None without an ablation that has something within the budget.
    """

    budget: float
    plan: str | None
    reason: str
    next_best: str | None
    next_reason: str | None
    untested: Untested | None

    def lines(self) -> list[str]:
        """As a terminal says it."""
        lines = [f"recommended: {self.plan or 'no plan'}: {self.reason}"]
        if self.next_best is not None:
            lines.append(f"  next best: {self.next_best}: {self.next_reason}")
        if self.untested is not None:
            found = self.untested
            layers = ",".join(map(str, found.layers))
            lines.append(
                f"  not measured: {found.plan} in layers {layers} alone: state ratio {found.state_ratio:.3f}, about "
                f"{found.kl:.2e} nats if layers add up; measure it as a plan with layers in a suite file"
            )
        return lines


def check_budget(recommend: bool, budget: float | None) -> None:
    """Refuse one flag without the other, and a budget that is none.

    Raises:
        UsageError: they do not fit.
    """
    if recommend != (budget is not None):
        given, missing = ("--recommend", "--budget RATIO") if recommend else ("--budget", "--recommend")
        raise UsageError(f"{given} goes with {missing}; give both or neither")
    if budget is not None and not (math.isfinite(budget) and budget > 0):
        raise UsageError(f"--budget {budget}: expected a state ratio above 0, e.g. 0.25 of the baseline's bytes")


def recommend_plan(run: RunData, *, budget: float) -> Advice:
    """The candidate with the least mean KL that passes and whose state ratio is within the budget.

    Args:
        run: decided.
        budget: greatest state ratio.
    """
    from driftgate.reports.tables import list_open_checks, plan_verdict

    plans = run.results.plans
    candidates = [name for name, record in plans.items() if record.role == "candidate"]
    of_run = [check for check in list_open_checks(run) if check.plan not in plans]
    fit = [name for name in candidates if plans[name].bytes.state_ratio <= budget]
    passing = [name for name in fit if plan_verdict(run, name) == "pass" and not of_run]
    passing.sort(key=lambda name: _order(run, name))
    if passing:
        chosen: str | None = passing[0]
        reason = f"{_tell(run, passing[0])}; the least KL of {len(passing)} that pass within state ratio {budget:g}"
    elif of_run:
        chosen, reason = None, f"the run itself did not pass: {of_run[0].check}: {of_run[0].reason}"
    elif not fit:
        chosen, reason = None, f"no candidate has a state ratio within {budget:g}"
    else:
        chosen, reason = None, f"none of {len(fit)} within state ratio {budget:g} passes every check"
    second, why = _find_next(run, [name for name in candidates if name != chosen], passing, budget)
    return Advice(
        budget=budget, plan=chosen, reason=reason, next_best=second, next_reason=why,
        untested=_add_layers(run, budget),
    )  # fmt: skip


def _order(run: RunData, name: str) -> tuple[float, float]:
    """Least KL first, then least bytes."""
    record = run.results.plans[name]
    return (math.inf if record.kl.mean is None else record.kl.mean, record.bytes.state_ratio)


def _tell(run: RunData, name: str) -> str:
    from driftgate.reports.tables import format_kl

    record = run.results.plans[name]
    return f"mean KL {format_kl(record.kl.mean)}, state ratio {record.bytes.state_ratio:.3f}"


def _find_next(
    run: RunData, others: Sequence[str], passing: Sequence[str], budget: float
) -> tuple[str | None, str | None]:
    """Another plan: one that passes within the budget, else one that passes above it, else one within it."""
    from driftgate.reports.tables import plan_verdict

    if not others:
        return None, None
    verdicts = {name: plan_verdict(run, name) for name in others}
    above = {name: run.results.plans[name].bytes.state_ratio > budget for name in others}
    rank = {name: (name not in passing, verdicts[name] != "pass", above[name]) for name in others}
    best = min(others, key=lambda name: (rank[name], run.results.plans[name].bytes.state_ratio * above[name],
                                         _order(run, name)))  # fmt: skip
    faults = ["above the budget"] * above[best] + [f"its checks: {verdicts[best]}"] * (verdicts[best] != "pass")
    return best, "; ".join([_tell(run, best), *faults])


def _add_layers(run: RunData, budget: float) -> Untested | None:
    """The cheapest layers of the plan whose sum has the least KL within the budget; whole plans were measured."""
    by_plan: dict[str, list[AblationRecord]] = {}
    for record in run.results.ablation:
        if record.kl_per_byte is not None and record.head is None:
            by_plan.setdefault(record.plan, []).append(record)
    found = []
    for name, records in by_plan.items():
        low = [r for r in run.results.ablation if r.plan == name]  # layers that the plan has below FP32
        left = run.results.plans[name].bytes.state_ratio + sum(r.state_ratio_saved for r in low)
        chosen: list[AblationRecord] = []
        for record in records:  # the cheapest in KL per byte first
            if left <= budget:
                break
            chosen.append(record)
            left -= record.state_ratio_saved
        if chosen and len(chosen) < len(low) and left <= budget:
            layers = tuple(sorted(record.layer for record in chosen))
            kl = sum(record.kl_mean or 0.0 for record in chosen)
            found.append(Untested(plan=name, layers=layers, kl=kl, state_ratio=left))
    return min(found, key=lambda untested: untested.kl, default=None)


def ablation_table(run: RunData) -> Table:
    """Layers or heads alone, by plan, the cheapest in KL per byte saved first; fits 80 columns.

    Of more than 32 the cheapest and the dearest 16 are shown; results.json has all.
    """
    from rich.markup import escape
    from rich.table import Table

    heads = any(record.head is not None for record in run.results.ablation)
    title = "Heads alone" if heads else "Layers alone"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("Plan", overflow="fold")
    for heading in ("Layer", "Mean KL", "Bytes saved", "KL per byte", "Checkpoint error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for plan in dict.fromkeys(record.plan for record in run.results.ablation):
        own = [record for record in run.results.ablation if record.plan == plan]
        left_out = len(own) - 2 * _ENDS
        for record in own if left_out <= 0 else own[:_ENDS]:
            table.add_row(*_cells(record))
        if left_out > 0:
            table.add_row(escape(plan), f"{left_out} more", *[""] * 4)
            for record in own[-_ENDS:]:
                table.add_row(*_cells(record))
    table.caption = "KL in nats; FP32 replay everywhere else; bytes of a step's traffic of one sequence"
    table.caption_justify = "left"
    invalid = {f"{r.plan}: {r.invalid}" for r in run.results.ablation if r.invalid is not None}
    if invalid:
        table.caption += "\n" + escape("\n".join(sorted(invalid)))
    return table


def _cells(record: AblationRecord) -> list[str]:
    from rich.markup import escape

    from driftgate.reports.tables import format_kl, format_number

    return [
        escape(record.plan),
        f"{record.layer}" if record.head is None else f"{record.layer} head {record.head}",
        format_kl(record.kl_mean),
        f"{record.bytes_saved:.0f}",
        format_kl(record.kl_per_byte),
        format_number(record.checkpoint_error, digits=3),
    ]
