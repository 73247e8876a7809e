"""What a checkpoint says about text, checked before anything is loaded: no tokenizer, prompts longer than positions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from driftgate.errors import DriftgateError, InputError
from driftgate.evals.checkpoints import find_checkpoint
from driftgate.main_job import check

WORDS = "a model reads words and writes words " * 60


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint with a tokenizer that a test may damage."""
    return Path(shutil.copytree(find_checkpoint("tiny-gdn-text"), tmp_path / "model"))


@pytest.fixture
def data(tmp_path) -> str:
    (tmp_path / "text.txt").write_text(WORDS)
    return str(tmp_path / "text.txt")


def refused(folder: Path, **options: object) -> str:
    with pytest.raises(DriftgateError) as caught:
        check("quick", out=folder.parent / "out", model=str(folder), sequences=1, batch=1, **options)
    message = str(caught.value)
    assert isinstance(caught.value, InputError)
    assert message.splitlines() == [message]
    return message


def set_positions(folder: Path, positions: int) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": positions}))


@pytest.mark.parametrize("task", ["gpqa", "ppl"])  # the others are made of token ids
def test_a_task_of_text_without_a_tokenizer_is_refused(folder, task):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert "tokenizer" in refused(folder, tasks=[task], steps=8)


def test_the_users_text_without_a_tokenizer_is_refused(folder, data):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert "has no tokenizer, so --data cannot be read" in refused(folder, data=data, tasks=[], steps=8)


def test_streams_without_text_need_no_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert check("quick", out=folder.parent / "out", model=str(folder), tasks=[], steps=8).folder == folder


def test_text_that_is_longer_than_the_positions_is_refused(folder, data):
    set_positions(folder, 40)
    message = refused(folder, data=data, tasks=[], steps=40)
    assert message == f"model {folder} has 40 positions, streams of 41 tokens do not fit; give --steps 39 or fewer"
    assert len(check("quick", out=folder.parent / "out", model=str(folder), data=data, tasks=[], steps=39).given) == 16


@pytest.mark.parametrize("task", ["gpqa", "ppl", "scratchpad"])
def test_prompts_that_are_longer_than_the_positions_are_refused(folder, task):
    set_positions(folder, 20)
    assert "positions" in refused(folder, tasks=[task], steps=8)
