"""One row of the table of troubles: a steady load on the whole system, one trouble for a while, and its outcome.

A trouble is a name and an async context manager that makes it (entering) and ends it (leaving). While it lasts, and
until the system has recovered, clients send `rate_per_s` checked requests. A row says how many of them failed, which
processes ended, what memory the services held before and after, and how long after the trouble's end the system
served, published and decided again.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from rich.table import Table

from benchmarks.chaos_faults import Fault
from benchmarks.chaos_verdict import SLOW_S, recoveries
from benchmarks.echo_load import OK, WRONG, EchoLoad
from benchmarks.echo_system import Arrangement, EchoSystem, running
from protos.controller.v1 import controller_pb2
from trefoil.core.energy import EnergySample
from trefoil.core.errors import TrefoilError
from trefoil.runtime.state import entry_order

LASTS_S: Final = 20.0
QUIET_S: Final = 2.0  # of load before the trouble
RECOVERY_MAX_S: Final = 60.0
DEADLINE_S: Final = 15.0
POLL_S: Final = 0.1
RATE_PER_S: Final = 100.0
WORKERS: Final = 2
SEED: Final = 20261121
SERVICES: Final = ("dispatcher", "controller", "power_agent", "carbon_feed")
MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is done to the running system. `ended`: services that are meant to end by it, e.g. where it kills them.
    `may_fail`: requests that can be in flight on what it kills."""

    what: str
    make: Callable[[EchoSystem], AbstractAsyncContextManager[None]]
    lasts_s: float = LASTS_S
    ended: frozenset[str] = frozenset()
    may_fail: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a trouble. `recovered_s`: after its end, until all was as before; None: not in RECOVERY_MAX_S."""

    what: str
    requests: int
    failed: int
    wrong: int
    codes: Mapping[str, int]
    ended: tuple[str, ...]
    memory_before_mib: float
    memory_after_mib: float
    recovered_s: float | None
    details: tuple[str, ...] = field(default=())
    broken: str = ""  # what the trouble itself found wrong, e.g. with what an attacker was answered
    may_fail: int = 0

    @property
    def clean(self) -> bool:
        """Nothing failed but what died, nothing else ended, all is as before."""
        good = self.failed <= self.may_fail and not self.wrong
        return good and not self.ended and not self.broken and self.recovered_s is not None


async def measure(system: EchoSystem, trouble: Trouble, rate_per_s: float, seed: int) -> Row:
    """Run the load, make the trouble, end it, wait for the recovery."""
    load = EchoLoad(system.target, rate_per_s, 10_000_000, seed, DEADLINE_S)
    before_mib, pids = memory_mib(system), running_pids(system)
    exits_before = len(system.launcher.exits)
    loading = asyncio.create_task(load.run(), name="load")
    try:
        await system.clock.sleep(QUIET_S)
        broken = await _suffer(system, trouble)
        over_s = system.clock.monotonic_s()
        recovered_s = await _recovered(system, over_s)
        await system.clock.sleep(QUIET_S)
    finally:
        load.stop.set()
        await loading
    records = load.records
    bad = [record for record in records if record.code != OK]
    ended = {name for name, pid in pids.items() if running_pids(system).get(name) != pid}
    ended |= {gone.service for gone in system.launcher.exits[exits_before:]}
    if recovered_s is not None:
        over = Fault("over", "the trouble is over", over_s, over_s)
        after = [record for record in records if record.sent_s >= over_s]
        recovered_s = max(recovered_s, *recoveries(after, [over], SLOW_S))
    return Row(
        trouble.what,
        len(records),
        len(bad),
        sum(record.code == WRONG for record in records),
        dict(Counter(record.code for record in bad)),
        tuple(sorted(ended - trouble.ended)),
        before_mib,
        memory_mib(system),
        recovered_s,
        tuple(f"{record.code}: {record.details[:120]}" for record in bad[:3]),
        broken,
        trouble.may_fail,
    )


async def _suffer(system: EchoSystem, trouble: Trouble) -> str:
    """Make the trouble and end it; what it found wrong itself."""
    try:
        async with trouble.make(system):
            await system.clock.sleep(trouble.lasts_s)
    except AssertionError as error:
        return str(error) or "an assertion of the trouble"
    return ""


async def run_rows(
    troubles: Sequence[Trouble],
    folder: Path,
    wanted: Callable[[str], bool],
    say: Callable[[str], None],
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[list[Row], float]:
    """Rows of the troubles whose names are wanted, one after the other on one system, and by how much the joules booked
    stray from those counted meanwhile (ratio)."""
    rows: list[Row] = []
    async with running(folder, Arrangement(), workers=WORKERS, say=say, overrides=overrides) as system:
        began = await joules(system)
        for trouble in troubles:
            if wanted(trouble.what):
                rows.append(row := await measure(system, trouble, RATE_PER_S, SEED + len(rows)))
                back = "never back" if row.recovered_s is None else f"back in {row.recovered_s:.1f} s"
                say(f"{row.what}: {row.failed} of {row.requests} failed, {row.ended} ended, {back} {row.broken}")
        ended = await joules(system)
    return rows, (ended[0] - began[0]) / (ended[1] - began[1]) - 1


async def _recovered(system: EchoSystem, over_s: float) -> float | None:
    """Time until every service runs, the controller decides and the agent publishes [s]."""
    while (waited_s := system.clock.monotonic_s() - over_s) < RECOVERY_MAX_S:
        with suppress(TrefoilError):
            await system.client.call("Replan", controller_pb2.ReplanRequest())
            since_s = system.clock.now_s() - 2.0
            nodes = await system.client.nodes()
            up = set(SERVICES) <= running_pids(system).keys()
            if up and nodes and all(node.observed_at_s >= since_s for node in nodes):
                return waited_s
        await system.clock.sleep(POLL_S)
    return None


async def joules(system: EchoSystem) -> tuple[float, float]:
    """Joules that the controller has booked in Redis, and those on the driver's own counters when the last sample that
    is booked ended [J].

    Raises:
        TimeoutError: no sample was booked in RECOVERY_MAX_S.
    """
    state, counted = system.client.state, list[tuple[float, float]]()
    async with asyncio.timeout(RECOVERY_MAX_S):
        while True:
            on_counters_j = float(sum(device["counter_j"] for device in system.node.truth()["devices"]))
            counted.append((system.clock.now_s(), on_counters_j))
            ids = await state.fields(state.keys.accounted())
            totals = [await state.totals(key) for key in await state.names(state.keys.totals_prefix())]
            until_s = [await _ends_at_s(system, node, entry) for node, entry in ids.items()]
            if until_s and min(until_s) >= counted[0][0] and ids == await state.fields(state.keys.accounted()):
                booked_j = sum(each.get("joules", 0.0) for each in totals)
                return booked_j, float(np.interp(max(until_s), *np.transpose(counted)))
            await system.clock.sleep(POLL_S)


async def _ends_at_s(system: EchoSystem, node: str, entry: str) -> float:
    """End of the last sample of a node up to an entry of its stream [UTC s]; 0: there is none. A stray one that ends in
    the future is none."""
    samples = await system.client.state.tail(system.client.state.keys.energy(node), EnergySample, 100)
    ends = (s.ends_at_s for at, s in samples if entry_order(at) <= entry_order(entry))
    return max((end_s for end_s in ends if end_s <= system.clock.now_s()), default=0.0)


def running_pids(system: EchoSystem) -> dict[str, int]:
    """Pids of the services, and of the dispatcher's workers by place."""
    found = {}
    for name in SERVICES:
        with suppress(KeyError):
            found[name] = system.launcher.pid(name)
    with suppress(psutil.NoSuchProcess, KeyError):
        found |= {f"dispatcher worker {i}": worker.pid for i, worker in enumerate(system.workers())}
    return found


def memory_mib(system: EchoSystem) -> float:
    """Resident memory of the services and the dispatcher's workers together [MiB]."""
    total = 0
    for pid in running_pids(system).values():
        with suppress(psutil.NoSuchProcess):
            total += psutil.Process(pid).memory_info().rss
    return total / MIB


def table(title: str, rows: Sequence[Row]) -> Table:
    """Table of rows, for people."""
    made = Table(title=title)
    for name in ("what", "failed", "of", "ended", "MiB before", "MiB after", "recovered s"):
        made.add_column(name, justify="left" if name in ("what", "ended") else "right")
    for row in rows:
        recovered = "never" if row.recovered_s is None else f"{row.recovered_s:.1f}"
        cells = (row.failed, row.requests, ", ".join(row.ended), f"{row.memory_before_mib:.0f}")
        made.add_row(row.what, *map(str, cells), f"{row.memory_after_mib:.0f}", recovered)
    return made
