"""The CI examples do what they say: their own commands run here, on a stored run or on a reduced suite."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
import yaml
from ci_cases import CODES, CONTROL, EXAMPLES, PLAN, SUITE, enter_checkout, run_script, store_run

from driftgate import cli
from driftgate.accuracy.policy import load_policy

WORKFLOWS = ("github-cpu.yml", "github-gpu.yml")


def read(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


def find_step(name: str, job: str, step: str) -> tuple[str, dict[str, str]]:
    """The script of a step and the variables of its job."""
    described = read(name)["jobs"][job]
    (script,) = [entry["run"] for entry in described["steps"] if entry.get("name") == step]
    return script, described.get("env", {})


def list_scripts() -> list[str]:
    """All shell of the examples."""
    jobs = [job for name in WORKFLOWS for job in read(name)["jobs"].values()]
    scripts = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    return [*scripts, *read("gitlab-ci.yml")["precision"]["script"]]


def test_every_driftgate_command_of_the_examples_exists_with_its_flags():
    program = typer.main.get_command(cli.app)
    found = 0
    for line in "\n".join(list_scripts()).replace("\\\n", " ").splitlines():
        for command in re.findall(r"\bdriftgate (\w+)([^|]*)", line):
            known = {option for p in program.commands[command[0]].params for option in p.opts}
            assert set(re.findall(r"(?<!\S)--[a-z-]+", command[1])) <= known, line
            found += 1
    assert found >= 6


@pytest.mark.parametrize(("name", "job"), [("github-cpu.yml", "precision"), ("github-gpu.yml", "gate")])
@pytest.mark.parametrize(("mean", "code"), [(1e-3, 0), (1e-1, 1)])
def test_the_gate_step_gates_a_stored_run(tmp_path, name, job, mean, code):
    script, variables = find_step(name, job, "gate")
    folder = enter_checkout(tmp_path / "checkout")
    store_run(folder / "precision", mean=mean)
    done = run_script(script, folder, variables)
    assert done.returncode == code, done.stderr
    assert f"verdict: {'pass' if code == 0 else 'fail'} " in done.stdout
    assert (f"::error title=driftgate fail%3A {PLAN} kl_mean" in done.stderr) == (code == 1)
    assert CONTROL not in done.stderr
    assert (folder / "summary.md").read_text().startswith("## driftgate: ")
    (junit,) = folder.rglob("gate.xml")
    assert ElementTree.parse(junit).getroot().get("failures") == str(code)


def test_the_second_push_is_held_against_the_accepted_run(tmp_path):
    script, variables = find_step("github-cpu.yml", "precision", "gate")
    folder = enter_checkout(tmp_path / "checkout")
    store_run(folder / "precision", mean=1e-3)
    assert run_script(script, folder, variables).returncode == 0
    (folder / "precision" / "accepted.json").rename(folder / "accepted.json")
    assert list(json.loads((folder / "accepted.json").read_text())["plans"]) == [PLAN]
    assert run_script(script, folder, variables).returncode == 0
    (folder / "precision").rename(folder / "old")
    store_run(folder / "precision", mean=3e-3)
    done = run_script(script, folder, variables)
    assert done.returncode == 1
    assert "accepted:kl_mean" in done.stdout
    assert not (folder / "precision" / "accepted.json").exists(), "a run that fails is not accepted"


def test_gitlab_finds_the_junit_file_that_its_script_writes(tmp_path):
    job = read("gitlab-ci.yml")["precision"]
    folder = enter_checkout(tmp_path / "checkout")
    store_run(folder / "precision")
    done = run_script(job["script"][-1], folder, job["variables"])
    assert done.returncode == 0, done.stderr
    assert (folder / job["artifacts"]["reports"]["junit"]).is_file()


def test_the_policy_of_the_examples_is_one():
    assert {check.check for check in load_policy(EXAMPLES / "policy.yaml").checks} >= {
        "bitwise",
        "kl_mean",
        "task_loss",
    }


@pytest.mark.long
@pytest.mark.parametrize("name", ["github-cpu.yml", "gitlab-ci.yml"])
def test_a_job_measures_and_gates_a_reduced_suite(tmp_path, name):
    folder = enter_checkout(tmp_path / "checkout")
    (folder / "reduced.yaml").write_text(SUITE)
    if name == "gitlab-ci.yml":
        scripts, variables = read(name)["precision"]["script"], read(name)["precision"]["variables"]
    else:
        steps = [find_step(name, "precision", step) for step in ("measure", "gate")]
        scripts, variables = [script for script, _ in steps], steps[0][1]
    variables = {**variables, "SUITE": "reduced.yaml", "PLAN": "nvfp4/fp32@4", "CONTROL": "nvfp4@4"}
    first = run_script(scripts[0], folder, variables)
    assert first.returncode == 0, first.stderr
    results = json.loads((folder / "precision" / "results.json").read_text())
    assert {plan: record["role"] for plan, record in results["plans"].items()} == {
        "nvfp4/fp32@4": "candidate", "nvfp4@4": "control",
    }  # fmt: skip
    second = run_script(scripts[1], folder, variables)
    assert second.returncode == CODES[results["verdict"]], second.stderr
    assert (folder / "precision" / "gate.xml").is_file()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yml")), ids=lambda path: Path(path).name)
def test_no_example_has_a_tab_or_a_trailing_blank(path: Path):
    text = path.read_text(encoding="utf-8")
    assert "\t" not in text and not re.search(r"[ ]+$", text, re.MULTILINE)
