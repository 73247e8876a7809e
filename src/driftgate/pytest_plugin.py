"""A pytest plugin: a precision plan as a test of a suite that already runs.

Notable: it is loaded in every pytest session of an environment that has driftgate, so it imports nothing heavy until
the fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from driftgate.accuracy.records import RunData

__all__ = ["driftgate_run", "pytest_addoption"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--driftgate-policy`` and ``--driftgate-inconclusive``."""
    group = parser.getgroup("driftgate")
    group.addoption("--driftgate-policy", metavar="FILE", help="policy of driftgate_run; default the bundled one")
    group.addoption(
        "--driftgate-inconclusive",
        choices=("fail", "skip"),
        default="fail",
        help="what a run does to its test that neither passes nor fails: fail (default) or skip",
    )


@pytest.fixture(scope="session")
def driftgate_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunData]:
    """``driftgate_run(source, **choices)``: measure a suite, or take a stored run, and hold it to the policy.

    Args (of the function that the fixture is):
        source: folder of a stored run, or a suite by name or YAML file; default ``quick``.
        **choices: what ``driftgate.run`` takes: model, plans, controls, tasks, steps, sequences, out ...

    The function returns the run, with its verdicts, where every check of every candidate passes. It fails the test
    with the checks that did not where the run fails, and fails or skips it where the run is inconclusive.
    """

    def gate(source: str | Path = "quick", **choices: Any) -> RunData:
        from driftgate import run
        from driftgate.errors import DriftgateError
        from driftgate.gate_command import decide_again

        policy = request.config.getoption("--driftgate-policy")
        try:
            folder = Path(source)
            if not folder.is_dir():
                folder = Path(choices.pop("out", None) or tmp_path_factory.mktemp("driftgate") / "run")
                run(str(source), out=folder, **choices)
            data = decide_again(folder, policy=None if policy is None else Path(policy))
        except DriftgateError as error:
            pytest.fail(f"driftgate: {error}", pytrace=False)
        _judge(data, skip=request.config.getoption("--driftgate-inconclusive") == "skip")
        return data

    return gate


def _judge(data: RunData, *, skip: bool) -> None:
    from driftgate.reports.tables import headline, open_lines

    if data.results.verdict == "pass":
        return
    told = "\n".join([f"driftgate: {headline(data)}", *open_lines(data)])
    if skip and data.results.verdict == "inconclusive":
        pytest.skip(told)
    pytest.fail(told, pytrace=False)
