"""Attacks of a machine's surroundings: a second Trefoil on it, a Triton that cannot start."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.echo_family import make_repository
from benchmarks.redteam import Check, Outcome
from tests.support.ports import free_offset
from trefoil.cli.run.launcher import Launcher, first_answer
from trefoil.cli.run.scenario import CarbonTrace, ServedFamily, System
from trefoil.core.errors import StartError
from trefoil.runtime.clock import WallClock

CLOCK: Final = WallClock()
TREFOIL: Final = str(Path(sys.executable).with_name("trefoil"))
SILENCE_S: Final = 12.0
UP_S: Final = 120.0


def checks() -> tuple[Check, ...]:
    """Attacks of this part."""
    return (
        Check("a second Trefoil on this machine, on the same ports in its own network", two_systems),
        Check("a Triton cannot start: the time-out of the command says why", unreadable_models),
    )


async def two_systems(folder: Path) -> Outcome:
    """Two systems as root, each in a network namespace, with equal ports: equal first choices of Tritons' users."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return Outcome(0, figures=("not tried: needs root, ip (iproute2) and unshare",))
    offset = str(free_offset())
    started = [partial(_up, folder / name, offset) for name in ("first", "second")]
    answered = await asyncio.gather(*(asyncio.to_thread(one) for one in started))
    broken = tuple(text for ok, text in answered if not ok)
    return Outcome(len(answered), len(broken), broken=broken)


def _up(state_dir: Path, offset: str) -> tuple[bool, str]:
    """Start a system in a separate network, ask it, wait until the other one has started too, and stop it."""
    up = f"{TREFOIL} up --state-dir {state_dir} --port-offset {offset}"
    ask = f"{TREFOIL} load --state-dir {state_dir} --rate 20 --duration 5 --json"
    down = f"{TREFOIL} down --state-dir {state_dir}"
    script = f"ip link set lo up && {up} >&2 && {ask}; code=$?; {down} >&2; exit $code"
    done = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, timeout=UP_S)
    if done.returncode != 0:
        return False, f"{state_dir.name}: {done.stderr[-300:]}"
    summary = json.loads(done.stdout)
    return True, str(summary)


async def unreadable_models(folder: Path) -> Outcome:
    """Model files that the Triton's user may not read: nothing serves, and the command names the file."""
    if os.geteuid() != 0:
        return Outcome(0, figures=("not tried: Tritons have users of their own only where the agent is root",))
    repository = make_repository(folder / "models")
    for graph in repository.glob("echo/*/model.onnx"):
        graph.chmod(0o600)
    system = System(
        family=ServedFamily(name="echo", repository=repository),
        demand_initial_per_s=50.0,
        carbon=CarbonTrace(step_s=3600.0),
        port_offset=free_offset(),
    )
    async with Launcher(system, folder / "cluster", clock=CLOCK) as launcher:
        try:
            await first_answer(launcher, CLOCK, SILENCE_S)
        except StartError as error:
            named = "power_agent logged" in str(error) and "model.onnx" in str(error)
            return Outcome(1, int(not named), broken=() if named else (str(error)[:400],))
    return Outcome(1, 1, broken=("it served what its user may not read",))
