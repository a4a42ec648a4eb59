"""Wall clocks that are stepped by an hour under the running system: of one service, of Redis, of all at once.

`stepped_clocks` has to be open when the system starts: it loads wall_steps.c into every process of it, which takes a C
compiler. What a step must not do and no request shows is looked for at its end, and raised: an epoch that has changed,
a dispatcher on a rung, energy samples that are missing, twice there or absurd.
"""

import os
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.chaos_rows import Trouble, running_pids
from benchmarks.echo_system import EchoSystem
from trefoil.core.energy import EnergySample

HOUR_S: Final = 3600
EVERYBODY: Final = 0  # in place of a process id
PAIRS: Final = 64  # as in wall_steps.c
SOURCE: Final = Path(__file__).with_name("wall_steps.c")
FILE: Final = "WALL_STEPS"
LASTS_S: Final = 10.0
RESTARTED_S: Final = 25.0  # for services that start again meanwhile, on a calendar that the others do not have
DRAWS_MAX_W: Final = 2 * 400.0  # of one GPU
ROLES: Final = ("controller", "agent:node0", "feed:demo")


@contextmanager
def stepped_clocks(folder: Path) -> Iterator[bool]:
    """Give every process that is started from now on a wall clock that can be stepped; False: this machine cannot."""
    compiler = shutil.which("cc")
    if compiler is None:
        print("clock rows are skipped: no C compiler (cc) to build benchmarks/wall_steps.c")
        yield False
        return
    folder.mkdir(parents=True, exist_ok=True)
    library, steps = folder / "wall_steps.so", folder / "wall_steps"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    steps.write_bytes(bytes(16 * PAIRS))
    before = {name: os.environ.get(name) for name in (FILE, "LD_PRELOAD")}
    os.environ |= {FILE: str(steps), "LD_PRELOAD": str(library)}
    try:
        yield True
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def step(pids: Mapping[int, int]) -> None:
    """Step the clocks of these processes by so many seconds from what the machine says; all others are right."""
    assert len(pids) <= PAIRS
    data = b"".join(struct.pack("<qq", *pair) for pair in pids.items())
    with open(os.environ[FILE], "r+b") as file:  # in place: the processes have mapped it
        file.write(data.ljust(16 * PAIRS, b"\0"))


def troubles() -> tuple[Trouble, ...]:
    """Troubles with the wall clock; none where `stepped_clocks` is not open."""
    if FILE not in os.environ:
        print("clock rows are skipped: the system was not started inside chaos_clock.stepped_clocks")
        return ()
    whose = ("controller", "dispatcher", "power_agent", "carbon_feed", "redis", "everybody")
    made = [
        Trouble(f"wall clock of {who} {step_s / HOUR_S:+.0f} h", partial(stepped, who=who, step_s=step_s), LASTS_S)
        for who in whose
        for step_s in (HOUR_S, -HOUR_S)
    ]
    restarted = frozenset({"controller", "power_agent"})
    what = "wall clock of everybody +1 h, then controller and agent are killed"
    return (*made, Trouble(what, partial(restarted_later, step_s=HOUR_S), RESTARTED_S, restarted))


@asynccontextmanager
async def stepped(system: EchoSystem, who: str, step_s: int) -> AsyncIterator[None]:
    """Step, and step back."""
    pids = {**running_pids(system), "redis": system.launcher.pid("redis")}
    chosen = [EVERYBODY] if who == "everybody" else [pid for name, pid in pids.items() if name.startswith(who)]
    epochs, seen = await _epochs(system), len(system.log("dispatcher"))
    assert chosen, who
    step(dict.fromkeys(chosen, step_s))
    try:
        yield
    finally:
        step({})
    found = [f"epochs were {epochs}, are {now}" for now in [await _epochs(system)] if now != epochs]
    rungs = [line for line in system.log("dispatcher")[seen:].splitlines() if "rung" in line and "cause" in line]
    found += [line for line in rungs if "feed" not in line]  # carbon is calendar time
    found += await _strange_samples(system)
    if found:
        raise AssertionError(f"a step of {who} by {step_s} s: {found[:5]}")


@asynccontextmanager
async def restarted_later(system: EchoSystem, step_s: int) -> AsyncIterator[None]:
    """Step everybody, then have two services started again."""
    step({EVERYBODY: step_s})
    await system.clock.sleep(1.0)
    for name in ("controller", "power_agent"):
        os.kill(system.launcher.pid(name), 9)
    try:
        yield
    finally:
        step({})
    if found := await _strange_samples(system):
        raise AssertionError(str(found[:5]))


async def _epochs(system: EchoSystem) -> dict[str, str]:
    state = system.client.state
    return {role: str(await state.raw(state.keys.epoch(role), 1)) for role in ROLES}


async def _strange_samples(system: EchoSystem) -> list[str]:
    """What is wrong with the last minute of energy samples."""
    state, found = system.client.state, []
    last: dict[str, EnergySample] = {}
    for _, sample in await state.tail(state.keys.energy("node0"), EnergySample, 120):
        before, last[sample.device] = last.get(sample.device), sample
        length_s = sample.ends_at_s - sample.starts_at_s
        if not 0 <= sample.counter_j <= DRAWS_MAX_W * (length_s + 1.0) or not 0 <= length_s <= HOUR_S / 60:
            found.append(f"{sample.device} {sample.seq}: {sample.counter_j:.0f} J in {length_s:.1f} s")
        if before is not None and sample.seq != before.seq + 1:
            found.append(f"{sample.device}: {sample.seq} follows {before.seq}")
    return found
