"""The pytest plugin: a plan as a test, by a policy; loading it costs nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from ci_cases import EXAMPLES, SUITE, enter_checkout, run_pytest, store_run

GATED = """
def test_stored(driftgate_run):
    run = driftgate_run("precision")
    assert run.results.verdict == "pass"
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    folder = enter_checkout(tmp_path / "checkout")
    (folder / "test_gated.py").write_text(GATED)
    return folder


def write_limit(folder: Path, limit: float) -> None:
    (folder / "policy.yaml").write_text(f"checks: [{{check: kl_mean, limit: {limit}, reason: because}}]")


@pytest.mark.parametrize(("limit", "outcome"), [(2e-3, "1 passed"), (5e-4, "1 failed"), (1e-3, "1 failed")])
def test_the_policy_of_the_command_line_decides(checkout, limit, outcome):
    store_run(checkout / "precision", mean=1e-3)
    write_limit(checkout, limit)
    done = run_pytest(checkout, "--driftgate-policy", "policy.yaml")
    assert outcome in done.stdout, done.stdout + done.stderr
    assert ("kl_mean: one-sided 95 % bound" in done.stdout) == (outcome == "1 failed")


def test_an_inconclusive_run_is_no_pass_and_may_be_a_skip(checkout):
    store_run(checkout / "precision", mean=1e-3)
    write_limit(checkout, 1e-3)
    skipped = run_pytest(checkout, "--driftgate-policy", "policy.yaml", "--driftgate-inconclusive", "skip")
    assert "1 skipped" in skipped.stdout and "INCONCLUSIVE" in skipped.stdout
    write_limit(checkout, 5e-4)
    failed = run_pytest(checkout, "--driftgate-policy", "policy.yaml", "--driftgate-inconclusive", "skip")
    assert "1 failed" in failed.stdout, "only what is inconclusive is skipped"


@pytest.mark.parametrize("fault", ["no run", "no policy"])
def test_an_error_is_one_line_of_a_failed_test(checkout, fault):
    if fault == "no policy":
        store_run(checkout / "precision")
    done = run_pytest(checkout, "--driftgate-policy", "nothing.yaml" if fault == "no policy" else "policy.yaml")
    assert "1 failed" in done.stdout
    assert "driftgate: policy nothing.yaml" in done.stdout or "driftgate: unknown suite 'precision'" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.long
def test_the_example_measures_a_reduced_suite_and_gates_a_stored_run(tmp_path):
    folder = enter_checkout(tmp_path / "checkout")
    (folder / "reduced.yaml").write_text(SUITE)
    store_run(folder / "precision")
    example = (EXAMPLES / "test_precision.py").read_text(encoding="utf-8")
    (folder / "test_precision.py").write_text(example.replace("@16", "@4"))
    flags = ("--driftgate-policy", "policy.yaml", "--driftgate-inconclusive", "skip")
    done = run_pytest(folder, *flags, SUITE="reduced.yaml")
    assert "1 passed, 1 skipped" in done.stdout, done.stdout
    assert "nvfp4/fp32@4 kl_mean" in done.stdout, "two short streams decide nothing, and say so"


def test_loading_the_plugin_imports_nothing_heavy():
    heavy = "{'torch', 'triton', 'transformers', 'pandas', 'matplotlib', 'scipy'}"
    code = f"import sys, driftgate.pytest_plugin; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_entry_point_leads_to_the_plugin():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    (name,) = project["entry-points"]["pytest11"].values()
    assert callable(import_module(name).pytest_addoption)
