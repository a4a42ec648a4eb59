"""Execute the notebooks of docs/notebooks afresh: `make notebooks`. An error in a cell is an error here.

They are kept without outputs, which would be figures that nobody has printed lately; executed copies go to the folder
that is named.
"""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
CELL_S = 600


def main(out: Path) -> None:
    """Execute every notebook, as Jupyter does in its own folder."""
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(FOLDER.glob("*.ipynb")):
        began = time.monotonic()
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=CELL_S, resources={"metadata": {"path": str(FOLDER)}}).execute()
        nbformat.write(notebook, out / path.name)
        print(f"{path.name}: {len(notebook.cells)} cells in {time.monotonic() - began:.0f} s, {out / path.name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
