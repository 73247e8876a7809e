"""Two stored runs side by side: the difference of every figure, of every verdict, and of what the manifests say.

Notable: figures are the leaves of results.json, so that a new field is compared without a line here; points of curves
and layers are named by what they stand for, not by their place in a list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from driftgate.accuracy.records import RunData
from driftgate.reports.numbers import format_kl, format_number, format_percent

__all__ = ["Comparison", "FigureChange", "compare_lines", "compare_runs", "compare_tables", "comparison_document"]

_POINTS = {"by_window_offset": "offset", "by_position": "low", "layers": "layer"}
"""Lists of records, and the field that names an entry."""
_CURVES = ("drift.by_window_offset", "drift.by_position")
_INTERVALS = {
    "kl.mean": ("kl.ci_low", "kl.ci_high"),
    "kl.geo_mean": ("kl.geo_ci_low", "kl.geo_ci_high"),
    "same_top_p.value": ("same_top_p.ci_low", "same_top_p.ci_high"),
    "ppl.ratio": ("ppl.ratio_ci_low", "ppl.ratio_ci_high"),
    "drift.slope": ("drift.slope_ci_low", "drift.slope_ci_high"),
}
MANY = 6
"""Plans whose every figure a terminal can show; of more it shows the gist."""
_NEVER_EQUAL = ("created", "timing.", "hashes.run/", "command")
"""Manifest entries that differ between any two runs."""


@dataclass(frozen=True, kw_only=True)
class FigureChange:
    """One figure of both runs.

    Attributes:
        name: dotted path in results.json.
        a, b: values; None where undefined or not in that run.
        beyond: whether B lies outside A's 95 % interval; None where A has none.
    """

    name: str
    a: Any
    b: Any
    beyond: bool | None = None

    @property
    def equal(self) -> bool:
        """Whether both runs say the same."""
        return bool(self.a == self.b)

    @property
    def difference(self) -> float | None:
        """B - A; None where one is no number."""
        numbers = [v for v in (self.a, self.b) if isinstance(v, int | float) and not isinstance(v, bool)]
        return float(numbers[1] - numbers[0]) if len(numbers) == 2 else None

    @property
    def is_point(self) -> bool:
        """Whether this is a point of a curve, of which there are many."""
        return self.name.startswith(_CURVES)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two runs have and have not in common.

    Attributes:
        run: figures of the run as a whole.
        plans: plan to its figures; plans that both have.
        only_a, only_b: plans that one run has alone.
        verdicts: plan and check to the two verdicts, where they differ or one run did not make the check.
        manifest: entries that differ.
    """

    run: list[FigureChange]
    plans: dict[str, list[FigureChange]]
    only_a: list[str]
    only_b: list[str]
    verdicts: list[FigureChange]
    manifest: list[FigureChange]


def compare_runs(a: RunData, b: RunData) -> Comparison:
    """Compare two runs; whether that makes sense is for the caller to ask first."""
    shared = [name for name in a.results.plans if name in b.results.plans]
    return Comparison(
        run=_changes(_run_figures(a), _run_figures(b)),
        plans={name: _plan_changes(a, b, name) for name in shared},
        only_a=[name for name in a.results.plans if name not in b.results.plans],
        only_b=[name for name in b.results.plans if name not in a.results.plans],
        verdicts=[change for change in _changes(_verdicts(a), _verdicts(b)) if not change.equal],
        manifest=[
            change
            for change in _changes(flatten(a.manifest.model_dump()), flatten(b.manifest.model_dump()))
            if not change.equal and not change.name.startswith(_NEVER_EQUAL)
        ],
    )


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """Leaves of nested dicts and lists by dotted path."""
    if isinstance(tree, dict):
        parts = ((str(key), value) for key, value in tree.items())
    elif isinstance(tree, list) and any(isinstance(entry, dict) for entry in tree):
        field = _POINTS.get(path.rpartition(".")[2])
        parts = ((str(entry.get(field, i)) if field else str(i), entry) for i, entry in enumerate(tree))
    else:
        return {path: tree}
    leaves: dict[str, Any] = {}
    for key, value in parts:
        leaves |= flatten(value, f"{path}.{key}" if path else key)
    return leaves


def _changes(a: dict[str, Any], b: dict[str, Any]) -> list[FigureChange]:
    return [FigureChange(name=name, a=a.get(name), b=b.get(name)) for name in dict.fromkeys([*a, *b])]


def _plan_changes(a: RunData, b: RunData, name: str) -> list[FigureChange]:
    left, right = (flatten(run.results.plans[name].model_dump(mode="json")) for run in (a, b))
    intervals = _INTERVALS | {
        f"tasks.{task}.delta": (f"tasks.{task}.ci_low", f"tasks.{task}.ci_high") for task in a.results.plans[name].tasks
    }
    return [
        FigureChange(name=c.name, a=c.a, b=c.b, beyond=_is_beyond(c, left, intervals.get(c.name)))
        for c in _changes(left, right)
    ]


def _is_beyond(change: FigureChange, left: dict[str, Any], interval: tuple[str, str] | None) -> bool | None:
    low, high = (left.get(name) for name in interval) if interval else (None, None)
    if low is None or high is None or change.b is None:
        return None
    return not low <= change.b <= high


def _run_figures(run: RunData) -> dict[str, Any]:
    results = run.results
    check = results.backend.cross_check
    return {
        "verdict": results.verdict,
        "noise_floor.kl_mean": results.noise_floor.kl_mean,
        "noise_floor.kl_max": results.noise_floor.kl_max,
        "bitwise.cases": len(results.bitwise),
        "bitwise.different": sum(not record.equal for record in results.bitwise),
        "tolerance.cases": len(results.tolerance),
        "tolerance.outside": sum(not record.within for record in results.tolerance),
        "cross_check.max_abs_difference": None if check is None else check.max_abs_difference,
    }


def _verdicts(run: RunData) -> dict[str, Any]:
    return {f"{record.plan} {record.check}": record.verdict for record in run.results.verdicts}


def compare_tables(found: Comparison) -> list[Table | str]:
    """For a terminal of 80 columns: the figures that differ, plan by plan, then verdicts and manifests.

    Of more than `MANY` plans there is a line each, and what lies outside an interval.
    """
    parts: list[Table | str] = [*_block("run", found.run)]
    if len(found.plans) > MANY:
        parts += ["", *_list_plans(found.plans)]
    else:
        for name, changes in found.plans.items():
            parts += ["", *_block(name, changes)]
    for told, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            parts += ["", f"only in {told}: {', '.join(names)}"]
    if found.verdicts:
        parts += ["", _table("Verdict", found.verdicts, numbers=False)]
    parts += [""]
    parts.append(_table("Manifest", found.manifest, numbers=False) if found.manifest else "the manifests say the same")
    return parts


def _list_plans(plans: dict[str, list[FigureChange]]) -> list[Table | str]:
    """A line a plan; where B lies outside an interval of A, the line says of which figures."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("Plan", overflow="fold")
    for heading in ("KL A", "KL B", "Top A", "Top B"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("Outside A's interval", overflow="fold")
    for name, changes in plans.items():
        by_name = {change.name: change for change in changes}
        kl, top = by_name["kl.mean"], by_name["same_top_p.value"]
        cells = [*(format_kl(value) for value in (kl.a, kl.b)), *(format_percent(value) for value in (top.a, top.b))]
        outside = ", ".join(change.name for change in changes if change.beyond) or "none"
        table.add_row(escape(name), *cells, escape(outside))
    told = ["  KL: mean, in nats; top: steps with the same top token", "  every figure of these plans is in --json"]
    return [table, *told]


def _block(name: str, changes: list[FigureChange]) -> list[Table | str]:
    shown = [change for change in changes if not change.equal and not change.is_point]
    points = [change for change in changes if change.is_point and not change.equal]
    equal = sum(change.equal for change in changes)
    parts: list[Table | str] = [_table(name, shown, numbers=True)] if shown else [name]
    parts.append(f"  {equal} figures are equal" + (f"; {len(points)} points of curves differ" if points else ""))
    return parts


def _table(title: str, changes: list[FigureChange], *, numbers: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(escape(title), overflow="fold")
    for heading in ("A", "B", "B - A") if numbers else ("A", "B"):
        table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for change in changes:
        cells = [format_number(change.a), format_number(change.b)]
        if numbers:
            sign = "" if change.difference is None else f"{change.difference:+.3g}"
            cells.append(f"{sign} *" if change.beyond else f"{sign}  ")
        table.add_row(escape(change.name), *(escape(cell) for cell in cells))
    return table


def compare_lines(found: Comparison) -> list[str]:
    """One line at the end: how far the runs agree."""
    beyond = [f"{name} {c.name}" for name, changes in found.plans.items() for c in changes if c.beyond]
    told = f"{len(beyond)} figures of B lie outside the 95 % interval of A"
    return [f"{told} (*)" if beyond else "no figure of B lies outside the 95 % interval of A"]


def comparison_document(found: Comparison) -> dict[str, Any]:
    """The same for ``--json``: every figure, equal ones and points of curves too."""

    def told(changes: list[FigureChange]) -> dict[str, Any]:
        return {c.name: {"a": c.a, "b": c.b, "difference": c.difference, "beyond": c.beyond} for c in changes}

    return {
        "schema_version": 1,
        "run": told(found.run),
        "plans": {name: told(changes) for name, changes in found.plans.items()},
        "only_a": found.only_a,
        "only_b": found.only_b,
        "verdicts": {change.name: {"a": change.a, "b": change.b} for change in found.verdicts},
        "manifest": {change.name: {"a": change.a, "b": change.b} for change in found.manifest},
    }
