"""junit.xml: a test case for each check of each plan or each case of a certificate, for CI systems that show tests.

Notable: fail is a failure, invalid an error, inconclusive skipped with its reason. What a control did is
never a failure: anything but a pass of a control is skipped with what it was. Where the checks alone do not
give the verdict of the run (A/A differs, nothing was checked), one more case holds the verdict itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from driftgate.accuracy.records import RunData, write_text
from driftgate.reports.certificate import describe_case, tell_failure
from driftgate.reports.numbers import format_number
from driftgate.reports.open_checks import disagreement, gates, headline

if TYPE_CHECKING:
    from driftgate.accuracy.records import BitwiseRecord, ToleranceRecord

__all__ = ["render", "render_certificate", "write"]

_OUTCOMES = {"fail": "failure", "invalid": "error", "inconclusive": "skipped"}
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, not even escaped."""


def render(run: RunData, out: Path) -> Path:
    """Write ``junit.xml`` into the run folder ``out`` and return its path."""
    return write(run, Path(out) / "junit.xml")


def write(run: RunData, path: Path) -> Path:
    """Write the checks of a run as a JUnit file: a test case for each plan and check, and return its path."""
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", name="driftgate", timestamp=_clean(run.manifest.created))
    for record in run.results.verdicts:
        value, limit = format_number(record.value), format_number(record.limit)
        told = f"{record.verdict}: {record.check} {value}, limit {limit}: {record.reason}"
        verdict = record.verdict
        if not gates(run, record.plan) and verdict != "pass":
            verdict, told = "inconclusive", f"control, does not gate: {told}"
        _add_case(suite, record.plan, record.check, verdict, told)
    extra = disagreement(run)
    if extra is not None:
        _add_case(suite, "run", "verdict", run.results.verdict, extra)
    ElementTree.SubElement(suite, "system-out").text = _clean(headline(run))
    _write(root, suite, path)
    return path


def render_certificate(
    bitwise: Sequence[BitwiseRecord],
    tolerance: Sequence[ToleranceRecord],
    path: Path,
    *,
    summary: str,
    reported: Collection[str] = (),
) -> None:
    """Write a certificate: a test case for each case, with what differs as its failure.

    Args:
        bitwise, tolerance: records of all cases.
        path: file to write.
        summary: one line about all of them.
        reported: invariants whose differences are told and fail nothing; such cases count as skipped.
    """
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", name="driftgate certify")
    for record in bitwise:
        verdict = "pass" if record.equal else "inconclusive" if record.invariant in reported else "fail"
        told = "equal" if record.equal else tell_failure(record)
        _add_case(suite, f"certify.{record.recurrence}.{record.invariant}", describe_case(record), verdict, told)
    for measured in tolerance:
        verdict = "pass" if measured.within else "fail"
        told = f"error {measured.error}, bound {measured.bound}" if measured.within else tell_failure(measured)
        _add_case(suite, f"certify.{measured.recurrence}.tolerance", describe_case(measured), verdict, told)
    ElementTree.SubElement(suite, "system-out").text = _clean(summary)
    _write(root, suite, path)


def _write(root: ElementTree.Element, suite: ElementTree.Element, path: Path) -> None:
    """Count the cases of the one suite, and write the file."""
    for element in (root, suite):
        element.set("tests", str(len(suite.findall("testcase"))))
        for name, outcome in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            element.set(name, str(len(suite.findall(f"testcase/{outcome}"))))
    ElementTree.indent(root)
    write_text(
        path,
        '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n",
    )


def _add_case(suite: ElementTree.Element, plan: str, check: str, verdict: str, told: str) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=_clean(f"driftgate.{plan}"), name=_clean(check))
    told = _clean(told)
    if verdict in _OUTCOMES:
        outcome = ElementTree.SubElement(case, _OUTCOMES[verdict], message=told.partition("\n")[0])
        outcome.text = told
        if verdict != "inconclusive":
            outcome.set("type", verdict)
    else:
        ElementTree.SubElement(case, "system-out").text = told


def _clean(text: str) -> str:
    return _NOT_XML.sub("�", text)
