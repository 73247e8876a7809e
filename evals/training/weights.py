"""Weights of a candidate: written while it trains, read again, and written as a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from driftgate.evals.training.model import save_tokenizer

__all__ = ["load_weights", "save_weights", "write_folder"]


def save_weights(model: Any, path: Path) -> None:
    """Write the weights under another name first, so that a reader never sees half a file."""
    state = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file(state, path.with_suffix(".part"), metadata={"format": "pt"})
    path.with_suffix(".part").replace(path)


def load_weights(model: Any, path: Path) -> None:
    """Fill a freshly built model.

    Raises:
        ValueError: a weight is missing, unknown or not finite.
    """
    state = load_file(path)
    missing, unknown = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if unknown or set(missing) - tied:
        raise ValueError(f"{path}: missing {missing}, unknown {unknown}")
    broken = [name for name, value in state.items() if not torch.isfinite(value).all()]
    if broken:
        raise ValueError(f"{path}: not finite: {broken}")
    model.tie_weights()


def write_folder(model: Any, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer files."""
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    save_tokenizer(folder)
