"""The tables below the plan table, as plain rows: report.md and report.html print the same ones.

Notable: numbers become text here, once, so that the two reports cannot differ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from driftgate.accuracy.records import RunData
from driftgate.reports.ladder import LADDER_HEADER, LADDER_NOTE, list_rungs
from driftgate.reports.letters import LETTERS_HEADER, list_letters, note_letters
from driftgate.reports.numbers import NA, format_kl, format_number
from driftgate.reports.tables import CROSS_CHECK_NOTE, check_rows

__all__ = ["Section", "list_sections"]

_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( %)?")


@dataclass(frozen=True, kw_only=True)
class Section:
    """One titled table.

    Attributes:
        key: a name that is safe as an anchor.
        title: heading.
        header: column headings, with units.
        rows: one text for each heading.
        note: one or two sentences that say what the table shows.
        folded: long tables that the page opens on demand.
    """

    key: str
    title: str
    header: tuple[str, ...]
    rows: list[list[str]]
    note: str
    folded: bool = False

    @property
    def numeric(self) -> list[bool]:
        """For each column whether it holds numbers, which are set flush right."""
        columns = zip(*self.rows, strict=True)
        return [all(cell == NA or _NUMBER.fullmatch(cell) for cell in column) for column in columns]


def list_sections(run: RunData) -> list[Section]:
    """All tables after the figures; one without rows is left out, except where its absence is a finding."""
    sections = [_ladder(run), _checks(run), _bitwise(run), _backends(run), _noise_floor(run), _drift(run)]
    return [*sections, *_letters(run), _counters(run), *_free_running(run), _manifest(run)]


def _ladder(run: RunData) -> Section:
    return Section(
        key="ladder", title="Ladder of evidence", header=LADDER_HEADER, rows=list_rungs(run), note=LADDER_NOTE
    )


def _checks(run: RunData) -> Section:
    return Section(
        key="checks",
        title="Checks",
        header=("Plan", "Check", "Value", "Limit", "Verdict", "Reason"),
        rows=check_rows(run),
        note="Value is the one-sided 95 % bound that was compared with the limit; a value equal to its limit "
        "passes. Checks of controls do not gate.",
    )


def _bitwise(run: RunData) -> Section:
    groups: dict[tuple[str, str], list[Any]] = {}
    for record in run.results.bitwise:
        groups.setdefault((record.invariant, record.recurrence), []).append(record)
    rows = []
    for (invariant, recurrence), records in groups.items():
        unequal = [record for record in records if not record.equal]
        told = "; ".join(
            f"case {format_number(record.case)}: {record.n_different} elements, up to {record.max_ulp} ulp, "
            f"first at {format_number(record.first_different)}"
            for record in unequal
        )
        equal = f"{len(records) - len(unequal)} of {len(records)}"
        rows.append([invariant, recurrence, equal, "differs" if unequal else "equal", told or "none"])
    note = "Cases that must agree bit for bit; a single different bit is a difference."
    return Section(
        key="bitwise",
        title="Bit-exact cases",
        header=("Invariant", "Recurrence", "Equal cases", "Result", "Differences"),
        rows=rows,
        note=note if rows else "No bit-exact case was run.",
    )


def _backends(run: RunData) -> Section:
    backend = run.results.backend
    rows = [["drift, state errors", backend.drift, NA, NA], ["tasks", backend.tasks, NA, NA]]
    if backend.cross_check is not None:
        check = backend.cross_check
        rows[0][2:] = [format_number(check.steps), format_number(check.max_abs_difference)]
        for plan, difference in check.by_plan.items():
            rows.append([f"plan {plan}", backend.drift, format_number(check.steps), format_number(difference)])
        note = (
            "The same tokens went through the drift backend and through the interpreted Triton kernels; "
            f"the difference is the greatest between their logits. {CROSS_CHECK_NOTE}"
        )
    else:
        note = "No cross-check with the interpreted Triton kernels was made."
    header = ("Figures", "Backend", "Cross-checked steps", "Greatest difference of logits")
    return Section(key="backends", title="Backends and cross-check", header=header, rows=rows, note=note)


def _noise_floor(run: RunData) -> Section:
    floor = run.results.noise_floor
    rows = [["baseline, another legal launch", format_kl(floor.kl_mean), format_kl(floor.kl_max), "1"]]
    for name, plan in run.results.plans.items():
        over = (
            format_number(plan.kl.mean / floor.kl_mean, digits=3) if floor.kl_mean and plan.kl.mean is not None else NA
        )
        rows.append([name, format_kl(plan.kl.mean), format_kl(plan.kl.max), over])
    return Section(
        key="noise-floor",
        title="Noise floor",
        header=("What", "Mean KL (nats)", "Maximum KL (nats)", "Mean / floor"),
        rows=rows,
        note="The floor is the KL of FP32 against itself under another launch (batch or tile); a plan near "
        "it cannot be told from the baseline. Mean / floor is n/a where the floor is exactly 0.",
    )


def _drift(run: RunData) -> Section:
    rows = []
    for name, plan in run.results.plans.items():
        drift = plan.drift
        bounds = [format_number(x, digits=3) for x in (drift.slope, drift.slope_ci_low, drift.slope_ci_high)]
        rows.append([name, *bounds, format_number(drift.excess_slope, digits=3), format_number(drift.law)])
    return Section(
        key="drift",
        title="Drift law",
        header=("Plan", "Slope", "95 % low", "95 % high", "Excess slope", "Law"),
        rows=rows,
        note="Slope of ln KL on ln position: 0 is flat, 1 doubles the KL when the position doubles. The "
        "excess slope is what a recurrence below FP32 adds to that of the same read copy with an FP32 "
        "recurrence, and decides where there is one. Growing: the 95 % interval of the slope over the last half of the "
        "positions lies above 0.25, so that the KL doubles when the length grows 16-fold or sooner; saturating: only "
        "that over all positions (shown) does; flat: neither.",
    )


def _letters(run: RunData) -> list[Section]:
    rows = list_letters(run)
    title = "Letters of the answers"
    return (
        [Section(key="letters", title=title, header=LETTERS_HEADER, rows=rows, note=note_letters(run))] if rows else []
    )


def _counters(run: RunData) -> Section:
    rows = []
    for name, plan in run.results.plans.items():
        count, size = plan.counters, plan.bytes
        numbers = [count.low_precision_reads, count.flushes, count.requantizations]
        sizes = [size.checkpoint, size.read_copy, size.buffer, round(size.traffic_per_step)]
        rows.append([name, *(f"{number:,}" for number in (*numbers, *sizes))])
    return Section(
        key="counters",
        title="Counters and bytes",
        header=(
            "Plan",
            "Low-precision reads",
            "Flushes",
            "Requantizations",
            "Checkpoint (bytes)",
            "Read copy (bytes)",
            "Buffer (bytes)",
            "Traffic per step (bytes)",
        ),
        rows=rows,
        note="Counters count events by row, layer and step and leave prefill out: they show that the "
        "format under test was really read. Bytes are per sequence over all recurrent layers, traffic "
        "by formula.",
    )


def _free_running(run: RunData) -> list[Section]:
    rows = [
        [name, key, value]
        for name, plan in run.results.plans.items()
        for key, value in _flatten(plan.free_running or {})
    ]
    if not rows:
        return []
    note = "Plans generate on their own with the same sampling noise as the baseline."
    return [Section(key="free-running", title="Free running", header=("Plan", "Figure", "Value"), rows=rows, note=note)]


def _manifest(run: RunData) -> Section:
    return Section(
        key="manifest",
        title="Manifest",
        header=("Entry", "Value"),
        rows=[list(pair) for pair in _flatten({"model": run.results.model, **run.manifest.model_dump(mode="json")})],
        note="What is needed to repeat the run, and to see in what two runs differ.",
        folded=True,
    )


def _flatten(tree: Any, path: str = "") -> list[tuple[str, str]]:
    """Leaves of nested dicts as (dotted path, text)."""
    if path == "command":
        return [(path, " ".join(tree))]
    if isinstance(tree, dict) and tree:
        return [leaf for key, value in tree.items() for leaf in _flatten(value, f"{path}.{key}" if path else str(key))]
    return [(path, "none" if tree in ({}, []) else format_number(tree, digits=6))] if path else []
