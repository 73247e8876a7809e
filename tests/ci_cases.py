"""What the tests of the CI examples share: a stored run, a reduced suite, and how steps of a job are run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

import run_cases as cases

from driftgate.accuracy.policy import decide, load_policy
from driftgate.accuracy.records import save_run

EXAMPLES = Path(__file__).parents[1] / "examples" / "ci"
PLAN, CONTROL = "nvfp4/fp32@16", "nvfp4@16"
SUITE = """
title: as short as a suite can be
model: tiny-gdn
plans: [{plan: fp32@4}]
tasks: []
sequences: 2
steps: 64
batch: 2
"""
CODES = {"pass": 0, "fail": 1, "inconclusive": 3}


def store_run(folder: Path, *, mean: float = 1e-3) -> Path:
    """A run of the examples' plans, with tasks, that passes the examples' policy where the mean KL is small."""
    baseline, answers = cases.flipped(1, 0, 192, right=150)
    plans = {
        PLAN: cases.Measured(kl=cases.lognormal(mean)),
        CONTROL: cases.Measured(kl=cases.lognormal(1.0), role="control"),
    }
    items = cases.make_items(baseline, {PLAN: answers, CONTROL: answers}, per_stream=12)
    run = cases.make_run(plans, items=items)
    decide(run, load_policy(EXAMPLES / "policy.yaml"))
    folder.mkdir()
    save_run(folder, run)
    return folder


def enter_checkout(folder: Path) -> Path:
    """A folder as a checkout has it: the policy at its root."""
    folder.mkdir()
    shutil.copy(EXAMPLES / "policy.yaml", folder)
    return folder


def make_environment(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job: driftgate on PATH, GitHub's files, the variables of the job."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "PYTEST_"))}
    return kept | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "GITHUB_ACTIONS": "true",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        **variables,
    }


def run_script(script: str, folder: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """A step as GitHub's runner takes it: bash that ends at the first command that fails."""
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder, env=make_environment(folder, variables), capture_output=True, text=True, check=False,
    )  # fmt: skip


def run_pytest(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, with the plugin, registered or not."""
    registered = entry_points(group="pytest11", name="driftgate")
    plugin = [] if registered else ["-p", "driftgate.pytest_plugin"]
    command = [sys.executable, "-P", "-m", "pytest", *plugin, "-p", "no:cacheprovider", "-rs", *arguments]
    environment = make_environment(folder, variables)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
