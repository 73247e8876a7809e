"""Runs of every kind are extended: mixed plans, ablations, a reference model, the user's text; and after a kill."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import make_tiny_model

from driftgate.accuracy.records import RunData, load_run
from driftgate.errors import InputError
from driftgate.evals.answer_store import AnswerStore
from driftgate.evals.checkpoints import find_checkpoint
from driftgate.extend import extend
from driftgate.main_job import Prepared, prepare, resume
from driftgate.run_folder import CLAIM
from driftgate.run_request import REQUEST

OLD, NEW, CONTROL = "nvfp4/fp32@4", "fp8/fp32@4", "nvfp4@4"
SMALL = {"controls": [CONTROL], "tasks": [], "batch": 2, "steps": 24, "sequences": 2, "device": "cpu"}
COMMAND = ["driftgate", "run"]


def execute(prepared: Prepared) -> RunData:
    """Without the interpreted kernels beside it, which say nothing about what is tested here."""
    return replace(prepared, experiment=replace(prepared.experiment, cross_check=False)).execute()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    """Two tiny models with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("one", 0), ("other", 1)):
        make_tiny_model(seed=seed, vocab_size=259).save_pretrained(folder / name)
        for file in find_checkpoint("tiny-gdn").glob("tokenizer*"):
            shutil.copy(file, folder / name)
    return folder / "one", folder / "other"


KINDS = ("mixed", "layers", "heads", "reference", "data", "generate")


def choose(kind: str, folder: Path, checkpoints: tuple[Path, Path]) -> tuple[str, dict[str, object]]:
    """Suite and choices of a kind of run."""
    choices: dict[str, object] = {**SMALL, "model": str(checkpoints[0]), "plans": [OLD]}
    if kind == "mixed":
        plans = [
            {"name": "first low", "plan": "fp32@4", "layers": {"0": OLD}}, {"plan": CONTROL, "role": "control"}
        ]  # fmt: skip
        (folder / "mixed.yaml").write_text(yaml.safe_dump({"plans": plans}))
        return str(folder / "mixed.yaml"), {**choices, "plans": [], "controls": []}
    if kind in ("layers", "heads"):
        choices["ablate"] = kind
    elif kind == "reference":
        choices["reference_model"] = str(checkpoints[1])
    elif kind == "data":
        (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog " * 5)
        choices["data"] = str(folder / "a.txt")
    elif kind == "generate":
        (folder / "a.jsonl").write_text('{"text": "abc"}\n{"prompt": "defghi"}\n')
        choices |= {"data": str(folder / "a.jsonl"), "generate": True}
    return "quick", choices


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_every_kind_is_extended(tmp_path, checkpoints, kind):
    suite, choices = choose(kind, tmp_path, checkpoints)
    before = execute(prepare(suite, out=tmp_path / "base", command=COMMAND, **choices))
    execute(extend(tmp_path / "base", out=tmp_path / "more", plans=[NEW], device="cpu", command=COMMAND))
    after = load_run(tmp_path / "more")
    assert list(after.results.plans) == [*before.results.plans, NEW]
    for plan in before.results.plans:
        assert after.results.plans[plan] == before.results.plans[plan]
        assert after.manifest.plans[plan] == before.manifest.plans[plan]
    assert after.results.reference == before.results.reference
    assert (after.results.reference is not None) == (kind == "reference")
    assert {r.plan for r in after.results.ablation} == ({OLD, NEW} if kind in ("layers", "heads") else set())
    assert before.results.ablation == after.results.ablation[: len(before.results.ablation)]
    assert {k for k in after.manifest.hashes if k.startswith("reference/")} == {
        k for k in before.manifest.hashes if k.startswith("reference/")
    }
    assert not (tmp_path / "more" / REQUEST).exists()


@pytest.mark.parametrize("part", ["versions", "device", "hashes"])
def test_what_has_changed_is_said_before_anything_is_decoded(tmp_path, checkpoints, part):
    _, choices = choose("plain", tmp_path, checkpoints)
    execute(prepare("quick", out=tmp_path / "base", command=COMMAND, **choices))
    path = tmp_path / "base" / "manifest.json"
    manifest = json.loads(path.read_text())
    name = {"versions": "torch", "device": "type", "hashes": "model/model.safetensors"}[part]
    manifest[part][name] = "another"
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=f"the run cannot be extended: {part} {name} differ"):
        extend(tmp_path / "base", out=tmp_path / "more", plans=[NEW], device="cpu", command=COMMAND)
    assert not (tmp_path / "more").exists()


GONE = f"999999999 {os.uname().nodename}\n"


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, Path]:
    """A run with answers, and the folder of its extension that was killed after the last of them."""
    folder = tmp_path_factory.mktemp("killed")
    choices = SMALL | {
        "steps": 63,
        "tasks": ["gpqa"],
        "mode": "loglikelihood",
        "repeats": 1,
        "limit": 2,
        "plans": [OLD],
    }
    execute(prepare("quick", out=folder / "base", command=COMMAND, **choices))

    def stop(self: object, progress: object = None) -> RunData:
        measure(self, progress)
        raise KeyboardInterrupt

    prepared = extend(folder / "base", out=folder / "more", plans=[NEW], device="cpu", command=COMMAND)
    measure = type(prepared.experiment).run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(prepared.experiment), "run", stop)
        with pytest.raises(KeyboardInterrupt):
            execute(prepared)
    (folder / "more" / CLAIM).write_text(GONE)
    return folder / "base", folder / "more"


def test_an_extension_that_was_killed_is_taken_up_by_its_command_with_its_answers(killed, tmp_path, monkeypatch):
    base, more = killed
    out = Path(shutil.copytree(more, tmp_path / "more"))
    prepared = extend(base, out=out, plans=[NEW], device="cpu", command=COMMAND)
    monkeypatch.setattr(AnswerStore, "write", lambda *_: pytest.fail("a batch was answered twice"))
    data = execute(prepared)
    assert list(data.results.plans) == [OLD, CONTROL, NEW]
    assert (out / "results.json").exists() and not (out / REQUEST).exists() and not (out / CLAIM).exists()


def test_an_extension_that_was_killed_is_no_other_and_says_how_it_goes_on(killed, tmp_path):
    base, more = killed
    out = Path(shutil.copytree(more, tmp_path / "more"))
    with pytest.raises(InputError, match="holds an interrupted run"):
        extend(base, out=out, plans=["fp8@4"], device="cpu", command=COMMAND)
    with pytest.raises(InputError, match=f"interrupted --extend of {base}; give the command that began it again"):
        resume(out)
