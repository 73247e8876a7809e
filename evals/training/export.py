"""Write a trained candidate as a checkpoint folder in Hugging Face format.

python -P -m driftgate.evals.training.export CANDIDATE.safetensors FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file

from driftgate.evals.training.model import build_model, save_tokenizer

__all__ = ["export_checkpoint"]


def export_checkpoint(weights: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer files to ``folder``.

    Raises ValueError when a weight is missing, unknown or not finite.
    """
    model = build_model(seed=0, initializer_range=0.06)
    state = load_file(weights)
    missing, unknown = model.load_state_dict(state, strict=False)
    if unknown or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{weights}: missing {missing}, unknown {unknown}")
    broken = [name for name, value in state.items() if not torch.isfinite(value).all()]
    if broken:
        raise ValueError(f"{weights}: not finite: {broken}")
    model.tie_weights()
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    save_tokenizer(folder)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    export_checkpoint(options.weights, options.folder)


if __name__ == "__main__":
    main()
