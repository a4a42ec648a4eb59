"""Numbers of a figure as CSV."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def table(folder: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """One file, the columns of the first row."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["empty"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
