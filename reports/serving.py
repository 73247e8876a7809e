"""How to serve a plan: the flags of public engines for it, what they demand, and when not to.

Notable: facts about engines are data (templates/serving.yaml) with the commit that they were read at; what is not
there cannot be served, and the report says so instead of naming the nearest thing as if it were the plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from driftgate.accuracy.records import RunData
from driftgate.reports.open_checks import plan_verdict

__all__ = ["Serving", "describe_serving"]

_FACTS = Path(__file__).parent / "templates" / "serving.yaml"
_PLAN = re.compile(r"(?P<read>[a-z0-9_]+)(?:/(?P<recurrence>[a-z0-9_]+))?@(?P<length>[0-9]+)(?P<options>\+.*)?")
_OFFERED = ("cached", "output_only", "buf=bf16", "buf=fp32", "state_output")
"""Options that change nothing about what an engine is asked for."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The closing section of a report.

    Attributes:
        lead: which plan this run speaks for.
        rows: plan, engine, and the command or why there is none.
        demands: engine to what it demands, its source last.
        notes: what holds for every engine.
        when_not: when replay does not pay.
    """

    lead: str
    rows: list[tuple[str, str, str]]
    demands: dict[str, list[str]]
    notes: list[str]
    when_not: list[str]


def describe_serving(run: RunData) -> Serving:
    """Commands for every candidate of a run, and which of them passed with the least traffic."""
    facts = yaml.safe_load(_FACTS.read_text(encoding="utf-8"))
    recurrences = {record.recurrence for record in run.results.bitwise}
    candidates = [name for name, plan in run.results.plans.items() if plan.role == "candidate"]
    engines = facts["engines"]
    rows = [(name, e["engine"], _tell_command(name, e, recurrences)) for name in candidates for e in engines]
    return Serving(
        lead=_choose(run, candidates),
        rows=rows,
        demands={e["engine"]: [*e["constraints"], f"read in {e['source']}"] for e in engines},
        notes=[facts["read_copy"], facts["fold"], f"Engines were read on {facts['read_on']}; flags change."],
        when_not=list(facts["when_not"]),
    )


def _choose(run: RunData, candidates: list[str]) -> str:
    passed = [name for name in candidates if plan_verdict(run, name) == "pass"]
    if not passed:
        return "No candidate of this run passed every check: none is fit to be served on its word."
    best = min(passed, key=lambda name: run.results.plans[name].bytes.traffic_ratio)
    ratio = run.results.plans[best].bytes.traffic_ratio
    return f"Of the candidates that passed, {best} moves the fewest bytes: {ratio:.3f} of the baseline's state traffic."


def _tell_command(plan: str, engine: dict[str, Any], recurrences: set[str]) -> str:
    """The command line of an engine for a plan, or the reason why it has none."""
    found = _PLAN.fullmatch(plan)
    if found is None:
        return "not servable: no engine has formats by layer"
    read, recurrence = found["read"], found["recurrence"] or found["read"]
    if read != recurrence:
        return f"not servable: no flag for a read copy ({read} beside {recurrence})"
    if recurrence not in engine["dtypes"]:
        return f"not servable: no state type {recurrence}"
    other = [option for option in (found["options"] or "").split("+")[1:] if option.partition("=")[0] not in _NAMES]
    if other:
        return f"not servable as measured: no flag for +{' +'.join(other)}"
    state = engine["state"].format(dtype=engine["dtypes"][recurrence])
    if int(found["length"]) == 1:
        return f"{engine['start']} {state}"
    if recurrences and not recurrences & set(engine["recurrences"]):
        return f"not servable: replay is for {' and '.join(engine['recurrences'])} alone"
    return f"{engine['start']} {state} {engine['replay'].format(length=found['length'])}"


_NAMES = {option.partition("=")[0] for option in _OFFERED} | {"track"}
