"""What a client, a model, one stray value or one lost file can do to serving: `make redteam`.

Each part below names attacks of one kind, in two forms:
- `troubles()`: attacks on the running system of `benchmarks.echo_system`, under RATE_PER_S checked requests of other
  clients. Limits: no request fails (but those in flight on what a trouble ends on purpose), no process ends, all is as
  before within HEALED_MAX_S.
- `checks()`: attacks that need a separate system, or none. A check counts its tries and names what broke.

Prints a table (failed of how many, what ended, healed after), writes out/bench/redteam.json, exits with 1 when an
attack breaks something. `--part hosts` plays one part, `--only TEXT` the rows whose name has TEXT in it.
"""

import argparse
import asyncio
import importlib
import shutil
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.chaos_rows import RATE_PER_S, Row, Trouble, run_rows
from trefoil.cli.demo.results import git_commit, machine, write_json
from trefoil.installation import CHECKOUT

OUT: Final = CHECKOUT / "out" / "bench"
HEALED_MAX_S: Final = 10.0
JOULES_ERROR_MAX: Final = 0.01
PARTS: Final[tuple[str, ...]] = ("evidence", "fair", "fences", "hosts", "http")
"""Modules benchmarks.redteam_PART."""


@dataclass(frozen=True, slots=True)
class Check:
    """An attack outside of the shared system. `play` gets an empty folder for its files."""

    what: str
    play: Callable[[Path], Awaitable["Outcome"]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a check. `broken` names each limit that did not hold, with its figures; `healed_s`: None = never."""

    tries: int
    failed: int = 0
    ended: tuple[str, ...] = ()
    healed_s: float | None = 0.0
    broken: tuple[str, ...] = ()
    figures: tuple[str, ...] = field(default=())


def of_row(row: Row) -> Outcome:
    """Outcome of a trouble on the shared system."""
    broken = [row.broken] if row.broken else []
    broken += [f"{row.failed} failed: {dict(row.codes)} {row.details}"] if row.failed > row.may_fail else []
    broken += [f"{', '.join(row.ended)} ended"] if row.ended else []
    if row.recovered_s is None or row.recovered_s > HEALED_MAX_S:
        broken.append("never healed" if row.recovered_s is None else f"healed after {row.recovered_s:.1f} s")
    return Outcome(row.requests, row.failed, row.ended, row.recovered_s, tuple(broken))


async def play(parts: tuple[str, ...], wanted: Callable[[str], bool], say: Callable[[str], None]) -> dict[str, Outcome]:
    """Outcomes of the rows wanted, by name."""
    modules = [importlib.import_module(f"benchmarks.redteam_{part}") for part in parts]
    found: dict[str, Outcome] = {}
    for check in [check for module in modules for check in getattr(module, "checks", tuple)()]:
        if wanted(check.what):
            folder = OUT / "redteam" / "-".join(check.what.split())[:60].replace("/", "-")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            found[check.what] = outcome = await check.play(folder)
            say(f"{check.what}: {'; '.join(outcome.broken) or 'held'} {'; '.join(outcome.figures)}")
    troubles: list[Trouble] = [t for m in modules for t in getattr(m, "troubles", tuple)() if wanted(t.what)]
    if troubles:
        rows, error_ratio = await run_rows(troubles, OUT / "redteam" / "system", wanted, say)
        found |= {row.what: of_row(row) for row in rows}
        broken = () if abs(error_ratio) <= JOULES_ERROR_MAX else (f"{error_ratio:+.2%}",)
        found["joules booked against the driver's counters"] = Outcome(
            1, figures=(f"{error_ratio:+.2%}",), broken=broken
        )
    return found


def table(found: dict[str, Outcome]) -> Table:
    """Table of outcomes, for people."""
    made = Table(title=f"Red team, under {RATE_PER_S:g} requests/s where a system serves")
    for name in ("what", "failed", "of", "ended", "healed s", "verdict"):
        made.add_column(name, justify="right" if name in ("failed", "of", "healed s") else "left")
    for what, outcome in found.items():
        healed = "never" if outcome.healed_s is None else f"{outcome.healed_s:.1f}"
        verdict = "; ".join(outcome.broken or outcome.figures) or "held"
        made.add_row(what, str(outcome.failed), str(outcome.tries), ", ".join(outcome.ended), healed, verdict)
    return made


def main(argv: list[str] | None = None) -> int:
    """`make redteam`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, default=[], help="only this part; may be repeated")
    parser.add_argument("--only", default="", help="only rows whose name has this in it")
    given = parser.parse_args(argv)
    parts = tuple(given.part) or PARTS
    found = asyncio.run(play(parts, lambda what: given.only in what, lambda line: print(line, flush=True)))
    out = Console(width=160)
    out.print(table(found))
    broken = {what: outcome.broken for what, outcome in found.items() if outcome.broken}
    for what, why in broken.items():
        out.print(f"BROKEN: {what}: {'; '.join(why)}", highlight=False)
    values = {"commit": git_commit(), "machine": machine()}
    write_json(OUT / "redteam.json", values | {"rows": {what: asdict(outcome) for what, outcome in found.items()}})
    return 1 if broken or not found else 0


if __name__ == "__main__":
    sys.exit(main())
