"""The text that the embedded checkpoints learn from: lexicon and appendices of the Jargon File 4.4.7, public domain.

The file is ``/usr/share/doc/jargon-text/jargon.txt.gz`` of Debian's package jargon-text 4.4.7-4.1. The chapters before
the lexicon are left out: ``evals/data/held_out.txt`` is taken from them::

    python -P -m driftgate.evals.training.jargon jargon.txt.gz build/training/jargon-training.txt
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path

__all__ = ["SHA256", "main", "take_lexicon"]

SHA256 = "40dfb4b98191a670a09a183d5798d50f243d23fdbd1495dcc0aca2ce5895ba97"
"""Of the unpacked file."""
HEADING = b"\n  0\n"
"""The first of the lexicon."""


def take_lexicon(text: bytes) -> bytes:
    """The unpacked file from the lexicon's first heading on.

    Raises:
        ValueError: the heading is not there exactly once.
    """
    if text.count(HEADING) != 1:
        raise ValueError(f"heading {HEADING!r}: expected once, found {text.count(HEADING)} times")
    return text[text.index(HEADING) + 1 :]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and write the text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="jargon.txt.gz, or jargon.txt")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    data = options.file.read_bytes()
    text = gzip.decompress(data) if options.file.suffix == ".gz" else data
    found = hashlib.sha256(text).hexdigest()
    if found != SHA256:
        parser.error(f"{options.file}: sha256 {found} is not that of the Jargon File 4.4.7 as Debian ships it")
    lexicon = take_lexicon(text)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(lexicon)
    print(f"{options.out}: {len(lexicon)} bytes, sha256 {hashlib.sha256(lexicon).hexdigest()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
