"""Notebooks run from a clean kernel, read well as they are stored, and their figures hold data."""

from __future__ import annotations

import base64
import io
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from PIL import Image

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
SECONDS = 60
LEAST = 5e-4
"""Share of coloured pixels in the sparsest figure, a scatter of thirty marks, is twice this."""
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def list_pictures(notebook: Any) -> list[np.ndarray]:
    """Pictures of a notebook's outputs, [height, width, 3]."""
    data = [output["data"] for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    found = [base64.b64decode(entry["image/png"]) for entry in data if "image/png" in entry]
    return [np.asarray(Image.open(io.BytesIO(content)).convert("RGB")) for content in found]


def count_drawn(notebook: Any) -> int:
    """Code cells that end in a figure."""
    return sum("figures." in cell.source and cell.cell_type == "code" for cell in notebook.cells)


def share_of_colour(picture: np.ndarray) -> float:
    """Share of pixels that are neither grey nor paper: curves and marks, not axes and text."""
    wide = picture.astype(int)
    return float((wide.max(axis=2) - wide.min(axis=2) > 60).mean())


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@each_notebook
def test_runs_from_a_clean_kernel(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    started = time.monotonic()
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert time.monotonic() - started < SECONDS
    pictures = list_pictures(notebook)
    assert len(pictures) == count_drawn(notebook) > 0
    assert min(map(share_of_colour, pictures)) > LEAST


@each_notebook
def test_stored_outputs_are_whole_and_small(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run from top to bottom"
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"execute_result"}, "no error and no stray print"
    pictures = list_pictures(notebook)
    assert len(pictures) == count_drawn(notebook) > 0
    assert min(map(share_of_colour, pictures)) > LEAST
    assert path.stat().st_size < 800_000


@each_notebook
def test_reads_as_prose_with_short_cells(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    kinds = [cell.cell_type for cell in cells]
    assert kinds[0] == "markdown"
    assert ("code", "code") not in set(pairwise(kinds)), "a word between two cells of code"
    assert max(len(cell.source.splitlines()) for cell in cells if cell.cell_type == "code") <= 30


def test_an_empty_figure_would_be_seen() -> None:
    paper = np.full((400, 600, 3), 254)
    paper[:, 50] = 0
    assert share_of_colour(paper) == 0.0


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["choose_a_plan", "error_drift", "format_explorer"]
