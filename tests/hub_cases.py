"""A cache of the Hugging Face hub as ``hf download`` leaves it, for tests without a network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

NAME, COMMIT = "owner/tiny-model", "0123456789abcdef" * 2 + "01234567"


def use_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, offline, and an empty folder to stand in."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


def fill_cache(cache: Path, checkpoint: Path) -> Path:
    """Put a checkpoint into the cache under ``NAME``; returns its snapshot."""
    folder = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = Path(shutil.copytree(checkpoint, folder / "snapshots" / COMMIT))
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(COMMIT)
    return snapshot
