"""Letters of the answers in the reports: counts as recorded, the p of accuracy/items.py, no table without letters."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_cases import make_run as make_reported
from run_cases import Measured, lognormal, make_items, make_run

from driftgate.accuracy import records as rec
from driftgate.accuracy.items import letter_bias
from driftgate.reports import markdown, page
from driftgate.reports.letters import LETTERS_HEADER, list_letters, note_letters
from driftgate.reports.sections import list_sections

SPLIT, OTHER, SAME, ALSO = "nvfp4/fp32@4", "fp8/fp32@4", "fp32@4", "fp32@8"
BASELINE = "ABCD" * 10
ANSWERS = {SPLIT: "A" * 25 + "BCD" * 5, OTHER: "AABBCD", SAME: BASELINE, ALSO: BASELINE}


@pytest.fixture
def run() -> rec.RunData:
    answers = {name: text[:40].ljust(40, "D") for name, text in ANSWERS.items()}
    items = make_items(BASELINE, answers, task="gpqa")
    return make_run({name: Measured(kl=lognormal(1e-3, shape=(16, 64))) for name in ANSWERS}, items=items)


def test_counts_and_p_are_those_of_the_items(run: rec.RunData) -> None:
    rows = {row[1]: row for row in list_letters(run)}
    assert list(rows) == ["gold", "baseline", SPLIT, OTHER, "2 plans as the baseline"]
    for name in (SPLIT, OTHER, "baseline"):
        found = letter_bias(run.items, name, "gpqa")
        assert [int(cell) for cell in rows[name][2:6]] == list(found.answers.values())
        assert float(rows[name][6]) == pytest.approx(found.answers_p, rel=0.05)
    assert rows["gold"][2:6] == ["40", "0", "0", "0"]
    assert rows["2 plans as the baseline"][2:] == rows["baseline"][2:]


def test_few_letters_have_no_p(run: rec.RunData) -> None:
    record = run.results.plans[SPLIT].tasks["gpqa"]
    for letters, known in (({"A": 19, "B": 0, "C": 0, "D": 0}, False), ({"A": 20, "B": 0, "C": 0, "D": 0}, True)):
        record.letters = letters
        (row,) = [row for row in list_letters(run) if row[1] == SPLIT]
        assert (row[6] != "n/a") == known


def test_both_reports_show_the_table(run: rec.RunData, tmp_path: Path) -> None:
    text, html = (module.render(run, tmp_path).read_text("utf-8") for module in (markdown, page))
    for row in list_letters(run):
        assert f"| {' | '.join(row)} |" in text
    assert "## Letters of the answers" in text and 'id="section-letters"' in html
    assert all(heading in html for heading in LETTERS_HEADER)


def test_equal_choices_are_told_where_the_run_says_so(run: rec.RunData) -> None:
    assert "read the same" not in note_letters(run)
    run.manifest.tasks["gpqa"] = {"equal_choices": 3}
    assert "gpqa: 3 items have two choices that read the same" in note_letters(run)


def test_answers_without_letters_have_no_table() -> None:
    assert "letters" not in [section.key for section in list_sections(make_reported())]
