"""What the carbon feed bears: `make bench-carbon`.

    load    1,000 GetMany a second by h2load for 30 s (--short: 8) while 200 Watch streams are open, a new reading
            every five seconds: latencies, errors, announcements (benchmarks/carbon_feed_load.py; needs h2load)
    memory  1,000,000 readings (--short: 100,000) through the real loop and history without Redis: resident
            memory at every tenth of them (benchmarks/carbon_feed_memory.py)
    year    17,520 half hours through the real process and Redis, as fast as 45 s for all of them (--short: four weeks):
            none is missing (benchmarks/carbon_feed_year.py)

`--only load` runs one part. Prints a table, writes out/bench/carbon_feed.json and .md, and exits with 1 when a limit is
missed.
"""

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks import carbon_feed_load, carbon_feed_memory, carbon_feed_year
from trefoil.cli.demo.results import git_commit, machine, write_json
from trefoil.core.errors import TrefoilError
from trefoil.installation import CHECKOUT

OUT: Final = CHECKOUT / "out" / "bench"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Part:
    """What one part came to: rows of (what, figure, limit), whether its limits are kept, all figures."""

    rows: list[tuple[str, str, str]]
    passed: bool
    figures: dict[str, Any]


def load(short: bool, say: Say) -> Part:
    """Clients that ask and clients that watch."""
    found = asyncio.run(carbon_feed_load.measure(8 if short else 30, say))
    return Part(carbon_feed_load.rows(found), found.passed, asdict(found))


def memory(short: bool, say: Say) -> Part:
    """Nothing grows with time."""
    found = carbon_feed_memory.measure(100_000 if short else 1_000_000, say)
    return Part(carbon_feed_memory.rows(found), found.passed, asdict(found))


def year(short: bool, say: Say) -> Part:
    """Nothing is left out, however fast it comes."""
    days, play_s = (28, 5.0) if short else (365, carbon_feed_year.PLAY_S)
    found = asyncio.run(carbon_feed_year.measure(days, play_s, say))
    return Part(carbon_feed_year.rows(found), found.passed, asdict(found))


PARTS: Final[Mapping[str, Callable[[bool, Say], Part]]] = {"load": load, "memory": memory, "year": year}


def table(parts: Mapping[str, Part]) -> Table:
    """For a terminal."""
    shown = Table()
    for name in ("part", "what", "figure", "limit"):
        shown.add_column(name)
    for name, part in parts.items():
        for row in part.rows:
            shown.add_row(name, *row)
    return shown


def markdown(parts: Mapping[str, Part]) -> str:
    """For benchmarks/RESULTS.md."""
    lines = ["| what | figure | limit |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for part in parts.values() for row in part.rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    """From the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="shorter runs, the same limits")
    parser.add_argument("--only", choices=tuple(PARTS), help="one part")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    console = Console()
    parts: dict[str, Part] = {}
    for name in [arguments.only] if arguments.only else PARTS:
        console.print(f"{name} ...")
        try:
            parts[name] = PARTS[name](arguments.short, console.print)
        except TrefoilError as error:
            console.print(f"bench-carbon: {error}")
            return 2
    console.print(table(parts))
    missed = [name for name, part in parts.items() if not part.passed]
    document = {
        "command": shlex.join(["python", "-m", "benchmarks.carbon_feed", *sys.argv[1:]]),
        "commit": git_commit(),
        "machine": machine(),
        "load_average": os.getloadavg(),
        "parts": {name: {**part.figures, "passed": part.passed} for name, part in parts.items()},
    }
    write_json(arguments.out / "carbon_feed.json", document)
    (arguments.out / "carbon_feed.md").write_text(markdown(parts))
    console.print(f"limits missed: {', '.join(missed)}" if missed else "every limit is kept")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
