"""Row of a table of reports."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Report:
    """One report. `kind`: which table; `source`: whose format or report; `expected`: a value, or words of an error."""

    kind: str
    source: str
    input: Any
    expected: Any

    def __str__(self) -> str:
        return f"{self.kind}: {self.source}"
