"""junit.xml agrees with the verdicts of a run."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from report_cases import (
    CHECKS,
    CONTROL,
    store_run,
    with_results,
)

from driftgate.accuracy import records as rec
from driftgate.reports import junit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def run(folder: Path) -> rec.RunData:
    return rec.load_run(folder)


def test_junit_counts_agree_with_results(folder: Path, run: rec.RunData) -> None:
    suite = ElementTree.parse(folder / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    kinds = {}
    for case in suite.findall("testcase"):
        outcome = [child.tag for child in case if child.tag != "system-out"]
        kinds[case.get("classname", "").removeprefix("driftgate.")] = outcome[0] if outcome else "pass"
    wanted = {"pass": "pass", "fail": "failure", "invalid": "error", "inconclusive": "skipped"}
    expected = {plan: "skipped" if plan == CONTROL else wanted[verdict] for plan, verdict in CHECKS.items()}
    assert kinds == expected
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["6", "1", "1", "2"]


def test_junit_fails_when_only_the_run_fails(run: rec.RunData, tmp_path: Path) -> None:
    passed = [record.model_copy(update={"verdict": "pass"}) for record in run.results.verdicts]
    suite = ElementTree.parse(junit.render(with_results(run, verdicts=passed), tmp_path)).getroot().find("testsuite")
    assert suite is not None and suite.get("failures") == "1"
    assert "1 bit-exact cases differ" in (suite[-2][0].get("message") or "")


def test_junit_survives_characters_that_xml_has_not(run: rec.RunData, tmp_path: Path) -> None:
    odd = [run.results.verdicts[3].model_copy(update={"reason": "bell \x07 ends ]]> here"})]
    root = ElementTree.parse(junit.render(with_results(run, verdicts=odd), tmp_path)).getroot()
    assert "bell \ufffd ends ]]> here" in root.findall(".//failure")[0].get("message", "")
