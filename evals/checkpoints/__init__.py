"""Checkpoints inside the package: small trained models in Hugging Face format, each with a card (CARD.md)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["find_checkpoint", "list_checkpoints"]


def list_checkpoints() -> dict[str, Path]:
    """Name and folder of every embedded checkpoint, in order of name."""
    folders = (path.parent for path in Path(__file__).parent.glob("*/config.json"))
    return {folder.name: folder for folder in sorted(folders)}


def find_checkpoint(name: str) -> Path | None:
    """Folder of the embedded checkpoint with this name, or None."""
    return list_checkpoints().get(name)
