"""Tables of the terminal, and how numbers are written."""

from __future__ import annotations

import io

import pytest
from report_cases import (
    CHECKS,
    CONTROL,
    EXACT,
    LEVELS,
    SPLIT,
    make_run,
    only,
    with_results,
)
from rich.console import Console

from driftgate.accuracy import records as rec
from driftgate.reports import tables


@pytest.fixture(scope="module")
def run() -> rec.RunData:
    return make_run()


def test_summary_table_fits_eighty_columns_with_whole_plan_names(run: rec.RunData) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(tables.summary_table(run))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for plan in LEVELS:
        row = next(line for line in text.splitlines() if line.startswith(plan))
        assert row.split()[-1] == tables.plan_verdict(run, plan)


def test_tables_of_tasks_fit_eighty_columns_with_whole_plan_names(run: rec.RunData) -> None:
    """Six tasks: a terminal drops columns that it has no room for, the plan's name first."""
    plans = {name: plan.model_copy(deep=True) for name, plan in run.results.plans.items()}
    for plan in plans.values():
        record = next(iter(plan.tasks.values()))
        names = ("recall", "tracking", "scratchpad", "gpqa", "lm_eval:arc_challenge", "ppl")
        plan.tasks = dict.fromkeys(names, record)
    found = tables.tasks_tables(with_results(run, plans=plans))
    assert len(found) == 3
    for table in found:
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(table)
        lines = console.export_text().splitlines()
        assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
        assert all(any(line.startswith(f"{name} ") for line in lines) for name in plans)


def test_the_terminal_explains_its_marks_and_the_cross_check(run: rec.RunData) -> None:
    def shown(data: rec.RunData) -> str:
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(tables.summary_table(data))
        return " ".join(console.export_text().split())

    assert shown(run).count("†") == 3 and tables.MARK_LEGEND in shown(run), "two plans and the legend"
    assert "†" not in shown(only(run, EXACT, SPLIT))
    assert any(tables.CROSS_CHECK_NOTE in line for line in tables.run_lines(run))
    bare = with_results(run, backend=run.results.backend.model_copy(update={"cross_check": None}))
    assert not any(tables.CROSS_CHECK_NOTE in line for line in tables.run_lines(bare))


def test_a_control_is_not_judged_on_its_tasks(run: rec.RunData) -> None:
    control = run.results.plans[CONTROL].model_copy(deep=True)
    for task in control.tasks.values():
        task.verdict = "inconclusive"
    shown = {
        row.name: [cell.lines[-1] for heading, cell in row.cells.items() if heading.startswith("Task ")]
        for row in tables.plan_rows(with_results(run, plans={SPLIT: run.results.plans[SPLIT], CONTROL: control}))
    }
    assert shown == {SPLIT: ["pass", "pass"], CONTROL: ["control, not judged"] * 2}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (float("nan"), "n/a"),
        (float("inf"), "n/a"),
        (0.0, "0"),
        (1.234e-9, "1.23e-09"),
        (0.5, "5.00e-01"),
    ],
)
def test_format_kl(value: float | None, text: str) -> None:
    assert tables.format_kl(value) == text


def test_a_plan_has_the_gravest_verdict_of_its_checks_and_a_control_has_none(run: rec.RunData) -> None:
    first = run.results.verdicts[0]
    more = [*run.results.verdicts, first.model_copy(update={"verdict": "inconclusive"})]
    found = {plan: tables.plan_verdict(with_results(run, verdicts=more), plan) for plan in LEVELS}
    assert found == CHECKS | {EXACT: "inconclusive", CONTROL: "control"}
