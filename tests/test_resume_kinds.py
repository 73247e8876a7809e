"""A run is resumed on the text and the reference model that it began with, or not at all."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from conftest import make_tiny_model

from driftgate.errors import InputError
from driftgate.evals.checkpoints import find_checkpoint
from driftgate.main_job import prepare, resume
from driftgate.run_folder import CLAIM

SMALL = {
    "plans": ["nvfp4/fp32@4"], "controls": ["nvfp4@4"], "tasks": [], "batch": 2, "steps": 16, "sequences": 2,
    "device": "cpu",
}  # fmt: skip
COMMAND = ["driftgate", "run"]


def begin(tmp_path: Path, **choices: object) -> Path:
    """The folder of a run that was killed before its first step."""
    prepared = prepare("quick", out=tmp_path / "run", command=COMMAND, **{**SMALL, **choices})
    folder = Path(shutil.copytree(prepared.out, tmp_path / "killed"))
    prepared.folder.release()
    (folder / CLAIM).write_text(f"999999999 {socket.gethostname()}\n")
    return folder


def test_a_text_that_has_changed_is_refused(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("the quick brown fox " * 5)
    folder = begin(tmp_path, data=str(text))
    text.write_text("the quick green fox " * 5)
    with pytest.raises(InputError, match="data streams is not what the run began with"):
        resume(folder)
    text.write_text("the quick brown fox " * 5)
    resume(folder).folder.release()


def test_another_reference_model_is_refused(tmp_path):
    reference = tmp_path / "reference"
    make_tiny_model(vocab_size=259).save_pretrained(reference)
    for file in find_checkpoint("tiny-gdn").glob("tokenizer*"):
        shutil.copy(file, reference)
    folder = begin(tmp_path, reference_model=str(reference), model=str(shutil.copytree(reference, tmp_path / "model")))
    make_tiny_model(vocab_size=259, intermediate_size=64).save_pretrained(reference)
    with pytest.raises(InputError, match=r"reference model \S+ is not what the run began with"):
        resume(folder)
