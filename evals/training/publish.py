"""Write a trained candidate as a checkpoint folder in Hugging Face format, with a card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from driftgate.accuracy.models import hash_file
from driftgate.evals.training.candidate import find_recipe
from driftgate.evals.training.card import write_card
from driftgate.evals.training.families import FAMILIES
from driftgate.evals.training.weights import load_weights, write_folder

__all__ = ["LARGEST", "publish"]

LARGEST = 8_000_000
"""Bytes of a checkpoint's weights at the most."""


def publish(record: Mapping[str, Any], weights: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors, the tokenizer files, CARD.md and training.json.

    Raises:
        ValueError: a weight is missing, unknown or not finite; the file is too large; or the folder, loaded as a
            user would, gives other logits.
    """
    family = FAMILIES[record["family"]]
    number = int(str(record["name"]).rsplit("-", 1)[1])
    model = family.build(find_recipe(record["family"], number).start)
    load_weights(model, weights)
    write_folder(model, folder)
    _name_scratchpad(folder / "tokenizer_config.json")
    _check(model.eval(), folder)
    size = (folder / "model.safetensors").stat().st_size
    if size > LARGEST:
        raise ValueError(f"{folder}: model.safetensors has {size} bytes, at most {LARGEST} ship")
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    n_parameters = sum(p.numel() for p in model.parameters())
    (folder / "CARD.md").write_text(write_card(record, n_parameters, hash_file(folder / "model.safetensors")))


def _name_scratchpad(path: Path) -> None:
    """Say which layout of scratchpad items the model writes; the task reads it from here."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scratchpad_layout": "text"}, indent=2) + "\n")


@torch.no_grad()
def _check(model: Any, folder: Path) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    loaded.eval()
    token_ids = torch.arange(96).remainder(90).add(33)[None]
    gap = float((model(token_ids).logits - loaded(token_ids).logits).abs().max())
    if not gap < 1e-4:
        raise ValueError(f"{folder}: the loaded model's logits differ by {gap}")
