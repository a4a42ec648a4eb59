"""Attacks on what the planner knows: profiles and floors at which a plan with clocks has little room.

Each check plays the demo simulated, under `exact` and `exact_miad` and three seeds: as many answers in the SLO as
promised, and a mean accuracy that is not below the floor.
"""

import asyncio
import re
import sys
from pathlib import Path
from typing import Final

from benchmarks.redteam import Check, Outcome
from trefoil.installation import CHECKOUT

QUANTILE: Final = 0.95
BEST: Final = 0.993311  # accuracy of digits-l
FIGURES: Final = re.compile(r"(exact\w*)=[\d.]+ mg, [\d.]+ J, ([\d.]+), ([\d.]+) in SLO")
POLICIES: Final = 'policies=["exact","exact_miad"]'


async def _run(*argv: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, cwd=CHECKOUT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    return said.decode(errors="replace")


async def _demo(folder: Path, below_best_pct: float, *settings: str) -> Outcome:
    """Outcome of the simulated demo with these settings."""
    given = (POLICIES, "simulated_seeds=3", f"accuracy.below_best_pct={below_best_pct}", *settings)
    words = [word for setting in given for word in ("--set", setting)]
    said = await _run("-m", "trefoil.cli.main", "demo", "--simulated", "--out", str(folder), *words)
    found = [(name, float(accuracy), float(attained)) for name, accuracy, attained in FIGURES.findall(said)]
    floor = BEST * (1 - below_best_pct / 100)
    missed = [one for one in found if one[1] < floor - 5e-5 or one[2] < QUANTILE]
    broken = [f"{name}: accuracy {a:.4f} for {floor:.4f}, {s:.1%} in the SLO" for name, a, s in missed]
    figures = tuple(f"{name} {a:.4f}, {s:.1%}" for name, a, s in found)
    broken += [] if found else [said[-300:]]
    return Outcome(len(found), len(missed), broken=tuple(broken), figures=figures)


async def _equal_joules(folder: Path) -> Outcome:
    profile = folder / "equal_joules.csv"
    await _run("model_repository/digits/make_profile.py", "--equal-joules", "--output", str(profile))
    return await _demo(folder / "demo", 2.0, f"family.profile_override={profile}")


async def _high_floor(folder: Path) -> Outcome:
    return await _demo(folder / "demo", 0.2, "params.accuracy_margin=0.0")


def checks() -> tuple[Check, ...]:
    """All of them."""
    return (
        Check("plans with clocks: every variant costs the same joules", _equal_joules),
        Check("plans with clocks: a floor 0.2 % below the best", _high_floor),
    )
