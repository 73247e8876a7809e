"""What the tests of the command line share: how it is called, a stored run, damaged checkpoints, wrong arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import run_cases as cases
import torch
from safetensors.torch import load_file, save_file

from driftgate import cli
from driftgate.accuracy.policy import decide, load_policy
from driftgate.accuracy.records import load_run, save_run
from driftgate.reports import render_all

PROGRAM = Path(sys.executable).parent / "driftgate"
PLAN = "nvfp4/fp32@4"


def call_program(capfd, monkeypatch, *arguments: object) -> tuple[int, str, str]:
    """Run the command line in this process: exit code, output, errors."""
    monkeypatch.setattr(sys, "argv", ["driftgate", *map(str, arguments)])
    capfd.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capfd.readouterr()
    return caught.value.code, out, err


def enter_empty_folder(monkeypatch, tmp_path: Path) -> None:
    """Work in an empty folder, outside any job on GitHub."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)


def store_run(folder: Path) -> Path:
    """A run of one candidate with a mean KL of 0.01, gated by the default policy, with its reports."""
    baseline, answers = cases.flipped(1, 0, 192, right=150)
    items = cases.make_items(baseline, {PLAN: answers}, per_stream=12)
    run = cases.make_run({PLAN: cases.Measured(kl=cases.lognormal(0.01))}, items=items)
    decide(run, load_policy())
    save_run(folder, run)
    render_all(folder)
    return folder


def is_one_line(err: str) -> bool:
    return err.startswith("driftgate: ") and err.endswith("\n") and err.count("\n") == 1


USAGE = {
    "unknown plan option": (("run", "--plan", "fp32@4+sr2"), "+sr2"),
    "unknown format": (("run", "--plan", "nvfp5@16"), "nvfp5"),
    "no plan at all": (("run", "--plan", ""), "READ"),
    "L of 0": (("run", "--plan", "fp32@0"), "L must be 1"),
    "negative L": (("run", "--plan", "fp32@-1"), "L must be 1"),
    "L without end": (("run", "--plan", "fp32@99999999999999999999"), "fp32@9"),
    "wide read": (("run", "--plan", "fp32/fp8@4"), "wider"),
    "unknown control": (("run", "--control", "fp9@4"), "fp9"),
    "plan twice": (("run", "--plan", "fp8@4", "--plan", "fp8_e4m3@4"), "twice"),
    "the baseline": (("run", "--plan", "baseline"), "baseline"),
    "unknown model": (("run", "--model", "tiny-gnd"), "did you mean tiny-gdn"),
    "unknown suite": (("run", "quikc"), "did you mean quick"),
    "unknown task": (("run", "--task", "recal"), "did you mean recall"),
    "task twice": (("run", "--task", "recall", "--task", "recall"), "twice"),
    "unknown backend": (("run", "--backend", "trition"), "did you mean triton"),
    "backend without GPU": (("run", "--backend", "triton", "--device", "cpu"), "needs a GPU"),
    "interpreter not set": (("run", "--backend", "triton-interpret", "--device", "cpu"), "TRITON_INTERPRET=1"),
    "unknown dtype": (("run", "--dtype", "fp8"), "fp8"),
    "unknown device": (("run", "--device", "warp"), "unknown device"),
    "too short": (("run", "--steps", 20), "64"),
    "steps that are no number": (("run", "--steps", "many"), "valid integer"),
    "no sequences": (("run", "--sequences", 0), "sequences"),
    "no batch": (("run", "--batch", 0), "batch"),
    "negative seed": (("run", "--seed", -1), "seed"),
    "unknown flag": (("run", "--stesp", 3), "--stesp"),
    "two suites": (("run", "quick", "slow"), "slow"),
    "unknown command": (("rnu",), "rnu"),
    "unknown catalogue": (("ls", "modles"), "did you mean models"),
    "no catalogue": (("ls",), "CATALOGUE"),
    "no run": (("gate",), "RUN"),
}


INPUT = {
    "model folder": (("run", "--model", "./nothing"), "./nothing"),
    "suite file": (("run", "nothing.yaml"), "nothing.yaml"),
    "policy file": (("run", "--policy", "nothing.yaml"), "nothing.yaml"),
    "policy file of gate": (("gate", ".", "--policy", "nothing.yaml"), "nothing.yaml"),
    "run folder": (("gate", "nothing"), "nothing"),
    "run folder of report": (("report", "nothing"), "nothing"),
    "empty run folder": (("gate", "."), "results.json"),
    "run folder that is a file": (("gate", __file__), "cli_cases.py"),
}


def damage(folder: Path, name: str) -> None:
    """Change a copy of the tiny checkpoint."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    if name == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif name == "NaN weights":
        tensors = load_file(weights)
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
        save_file(tensors, weights, metadata={"format": "pt"})
    elif name == "no recurrent layer":
        fields = json.loads(config.read_text())
        config.write_text(json.dumps(fields | {"layer_types": ["full_attention"] * 3}))
    elif name == "no weights":
        weights.unlink()
    elif name == "small vocabulary":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": 96}))
    elif name == "no config":
        config.unlink()
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "nothing"}))


DAMAGES = {
    "cut short": "cut short", "NaN weights": "NaN", "no recurrent layer": "no recurrent layer",
    "no weights": "model.safetensors is missing", "no config": "no config.json", "unknown family": "nothing",
    "small vocabulary": "pad_token_id 96 is outside the vocabulary of 96",
}  # fmt: skip


def write_policy(folder: Path, limit: float) -> Path:
    path = folder / "policy.yaml"
    path.write_text(f"checks: [{{check: kl_mean, limit: {limit}, reason: because}}]")
    return path


def limits(stored: Path) -> dict[str, float]:
    """Limits on either side of the one-sided bounds of the stored run's mean, and one between them."""
    mean = load_run(stored).results.plans[PLAN].kl.mean
    return {"pass": 2 * mean, "fail": mean / 2, "inconclusive": mean}
