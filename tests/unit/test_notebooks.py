"""Notebooks are kept short and without outputs: `make notebooks` executes them afresh."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
CELLS_MAX = 16
LINES_MAX = 20


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_short_and_hold_no_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert 0 < len(cells) <= CELLS_MAX
    assert all(len(cell["source"]) <= LINES_MAX for cell in cells)
    kept = [cell for cell in cells if cell["cell_type"] == "code" and (cell["outputs"] or cell["execution_count"])]
    assert not kept
