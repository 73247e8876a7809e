"""Train candidates for the embedded checkpoints beside each other on one GPU, choose one a family, write it out.

One command, about as long as ``--minutes`` says (``jargon.py`` makes the text)::

    python -P -m driftgate.evals.training.train --families gdn,mamba2,kda --minutes 9 --candidates 3 \
        --text build/training/jargon-training.txt --out OUT

OUT receives ``summary.json`` (all records) and, for the best and the second candidate of each family, a tar file with
a checkpoint folder. They are rewritten while the candidates train, so a run that is cut off leaves what it had.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["HELD_OUT", "main"]

NAMES = ("gdn", "mamba2", "kda")
HELD_OUT = Path(__file__).parents[1] / "data" / "held_out.txt"


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="gdn,mamba2,kda", help="comma-separated: gdn, mamba2, kda")
    parser.add_argument("--candidates", type=int, default=3, help="of each family")
    parser.add_argument("--only", type=_numbers, default=None, help="these candidates alone of each family: 4,5,6")
    parser.add_argument("--minutes", type=float, default=9.0, help="wall-clock time in all")
    parser.add_argument("--steps", type=int, default=None, help="optimiser steps of each candidate, not the clock")
    parser.add_argument("--text", type=Path, default=None, help="training text; without it no text is learned")
    parser.add_argument("--held-out", type=Path, default=HELD_OUT, help="text that is scored and never learned")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    parser.add_argument("--no-graphs", action="store_true", help="launch the kernels of a step one by one")
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--smoke", action="store_true", help="short rows and few items, to see that it runs")
    options = parser.parse_args(arguments)
    options.families = options.families.split(",")
    unknown = set(options.families) - set(NAMES)
    if unknown:
        parser.error(f"--families: no {', '.join(sorted(unknown))}; choose among {', '.join(NAMES)}")
    if options.text is not None and not options.text.is_file():
        parser.error(f"--text: {options.text} is missing; driftgate.evals.training.jargon makes it")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and train; what is heavy is imported after that, since workers import this module too."""
    started = time.time()
    options = _parse(arguments)
    from driftgate.evals.training.orchestrate import run

    code: int = run(options, started)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
