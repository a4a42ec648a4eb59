"""Attacks on what the planner knows: profiles and floors with little room for a plan with clocks, GPUs of others.

The checks of profiles and floors play the demo simulated, under `exact` and `exact_miad` and three seeds: as many
answers in the SLO as promised, and a mean accuracy that is not below the floor. The check of foreign instances runs two
systems in turn on simulated GPUs and real Tritons: with instances of others on both GPUs, at most one rollout is
HALTED, and as many answers are in the SLO as without them.
"""

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.redteam import Check, Outcome
from power_agent.devices.errors import NodeRefused
from power_agent.devices.node_client import NodeClient
from tests.support.ports import free_offset
from trefoil.cli.load.process import LoadPlan, LoadProcess
from trefoil.cli.run.launcher import Launcher, first_answer
from trefoil.cli.run.scenario import CarbonTrace, FixedSlo, System
from trefoil.core.plan import RolloutState
from trefoil.installation import CHECKOUT
from trefoil.runtime.clock import WallClock
from trefoil.runtime.repository import family_folder

QUANTILE: Final = 0.95
BEST: Final = 0.993311  # accuracy of digits-l
POLICIES: Final = 'policies=["exact","exact_miad"]'
CLOCK: Final = WallClock()
SLO: Final = FixedSlo(percentile=95.0, latency_ms=150.0)  # twice that of the simulations: this machine serves as well
LOAD: Final = ((0.0, 15.0), (10.0, 15.0), (35.0, 40.0), (50.0, 40.0), (60.0, 15.0), (70.0, 15.0))  # (second, rate)
WARMUP_S: Final = 5.0
PLACE_S: Final = 20.0
HALTED_MAX: Final = 1
ATTAINED_LESS_MAX: Final = 0.05


async def _run(*argv: str) -> str:
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, cwd=CHECKOUT, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    return said.decode(errors="replace")


async def _demo(folder: Path, below_best_pct: float, *settings: str) -> Outcome:
    """Outcome of the simulated demo with these settings."""
    given = (POLICIES, "simulated_seeds=3", f"accuracy.below_best_pct={below_best_pct}", *settings)
    words = [word for setting in given for word in ("--set", setting)]
    said = await _run("-m", "trefoil.cli.main", "demo", "--simulated", "--json", "--out", str(folder), *words)
    rows = json.loads(said)["cases"][0]["rows"] if said else ()
    found = [(row["policy"], run["accuracy"], run["slo_attainment"]) for row in rows for run in row["runs"]]
    floor = BEST * (1 - below_best_pct / 100)
    missed = [one for one in found if one[1] < floor - 5e-5 or one[2] < QUANTILE]
    broken = [f"{name}: accuracy {a:.4f} for {floor:.4f}, {s:.1%} in the SLO" for name, a, s in missed]
    figures = tuple(f"{name} {a:.4f}, {s:.1%}" for name, a, s in found)
    broken += [] if found else ["no figures"]
    return Outcome(len(found), len(missed), broken=tuple(broken), figures=figures)


async def _equal_joules(folder: Path) -> Outcome:
    profile = folder / "equal_joules.csv"
    await _run("model_repository/digits/make_profile.py", "--equal-joules", "--output", str(profile))
    return await _demo(folder / "demo", 2.0, f"family.profile_override={profile}")


async def _high_floor(folder: Path) -> Outcome:
    return await _demo(folder / "demo", 0.2, "params.accuracy_margin=0.0")


async def _foreign(folder: Path) -> Outcome:
    halted, before = await _serve(folder / "free", held=False)
    figures = [f"without: {before:.1%} in the SLO, HALTED {len(halted)}"]
    halted, attained = await _serve(folder / "held", held=True)
    figures += [f"with: {attained:.1%} in the SLO, HALTED {len(halted)}", *halted]
    missed = len(halted) > HALTED_MAX or attained < before - ATTAINED_LESS_MAX
    return Outcome(1, int(missed), broken=tuple(figures) if missed else (), figures=tuple(figures))


async def _serve(folder: Path, *, held: bool) -> tuple[list[str], float]:
    """Reasons of HALTED rollouts, and the share in the SLO of a system under a load that grows, then falls."""
    system = System(policy="exact_miad", slo=SLO, carbon=CarbonTrace(step_s=20.0), port_offset=free_offset())
    async with Launcher(system, folder / "cluster", clock=CLOCK) as launcher:
        await first_answer(launcher, CLOCK)
        assert launcher.launch is not None
        if held:
            await _take_places(launcher.launch.node_socket)
        images = family_folder(system.family.repository, system.family.name) / "heldout.npz"
        plan = LoadPlan(LOAD, WARMUP_S, str(images), system.family.name, system.seed)
        load = LoadProcess([plan], launcher.launch.addresses["inference"], folder, launcher.launch.launch_id, CLOCK)
        try:
            answered = (await load.results())[system.family.name]
        finally:
            await load.stop()
        lines = launcher.paths.log("controller").read_text(errors="replace").splitlines()
    ended = [json.loads(line) for line in lines if '"rollout ended"' in line]
    halted = [one["why"] for one in ended if one["state"] == RolloutState.HALTED.name]
    return halted, answered.summary(SLO.latency_ms, QUANTILE).slo_attainment


async def _take_places(socket: str) -> None:
    """Create an instance of another tool on each GPU, as soon as a place is free there."""
    node = NodeClient(socket)
    try:
        async with asyncio.timeout(PLACE_S):
            for gpu in range(2):
                while not await asyncio.to_thread(_taken, node, gpu):
                    await CLOCK.sleep(0.5)
    finally:
        node.close()


def _taken(node: NodeClient, gpu: int) -> bool:
    for start in reversed(range(7)):
        with suppress(NodeRefused):
            node.admin("create_gi", index=gpu, slice_type="1g.5gb", start=start)
            return True
    return False


def checks() -> tuple[Check, ...]:
    """All of them."""
    return (
        Check("plans with clocks: every variant costs the same joules", _equal_joules),
        Check("plans with clocks: a floor 0.2 % below the best", _high_floor),
        Check("a foreign MIG instance on each of two GPUs, under exact_miad", _foreign),
    )
