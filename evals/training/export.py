"""Write a trained candidate of ``train_tiny_gdn.py`` as a checkpoint folder in Hugging Face format.

python -P -m driftgate.evals.training.export CANDIDATE.safetensors FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from driftgate.evals.training.model import build_model
from driftgate.evals.training.weights import load_weights, write_folder

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and write the folder; weights that are missing, unknown or not finite are refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    model = build_model(seed=0, initializer_range=0.06)
    load_weights(model, options.weights)
    write_folder(model, options.folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
