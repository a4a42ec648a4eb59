"""Whatever happens to leases, plans, agents and drivers: never two changes within a second, and nothing stays set."""

import asyncio
import itertools
import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from power_agent.devices.errors import DeviceError
from tests.support.clock_bench import GPU, Bench, clock_plan
from trefoil.core.errors import Fenced
from trefoil.core.fleet import ClockLease, DeviceState

MHZ = st.sampled_from((0, 210, 600, 900, 1200, 1410))
EVENT = st.one_of(
    st.tuples(st.just("pass"), st.floats(0.05, 3.0)),
    st.tuples(st.just("lease"), MHZ.filter(bool), st.floats(0.5, 8.0), st.integers(0, 3), st.sampled_from("ab")),
    st.tuples(st.just("release"), st.integers(0, 3), st.sampled_from("ab")),
    st.tuples(st.just("plan"), MHZ),
    st.tuples(st.just("state"), st.sampled_from((DeviceState.AWAKE, DeviceState.ASLEEP, DeviceState.WAKING))),
    st.tuples(st.just("refuse"), st.integers(1, 4)),
    st.tuples(st.just("crash"), st.sampled_from(("before", "after"))),
    st.tuples(st.just("kill")),
    st.tuples(st.just("end")),
    st.tuples(st.just("lose")),
    st.tuples(st.just("reload")),
)


class History:
    """What happens, one event after another; an agent is always there."""

    def __init__(self, folder: Path) -> None:
        self.bench = Bench(folder)
        self.plan = None
        self.state = DeviceState.AWAKE

    async def restart(self) -> None:
        await self.bench.clock.advance(1.0)  # a process needs that long to start
        await self.bench.start(self.plan, self.state)

    async def happen(self, kind, *what) -> None:
        bench = self.bench
        if kind == "pass":
            await bench.pass_s(*what)
        elif kind == "lease":
            max_mhz, ttl_s, epoch, holder = what
            try:
                bench.keeper.set_clocks(ClockLease(GPU, 0, max_mhz, holder, epoch), ttl_s)
            except Fenced:
                pass
        elif kind == "release":
            try:
                bench.keeper.release_clocks(GPU, what[1], what[0])
            except Fenced:
                pass
        elif kind == "plan":
            self.plan = clock_plan(0, *what)
            bench.take(self.plan, self.state)
        elif kind == "state":
            (self.state,) = what
            bench.take(self.plan, self.state)
        elif kind == "refuse":
            bench.gpus.refusals = [DeviceError("Unknown Error", code=999) for _ in range(what[0])]
        elif kind == "crash":
            (bench.crash,) = what
        elif kind == "lose":
            bench.gpus.lost = True
            bench.take(self.plan, DeviceState.LOST)
            await bench.pass_s(1.0)
            bench.gpus.lost = False
            bench.gpus.locked = None  # it came back by a reset
            bench.take(self.plan, self.state)
        elif kind == "reload":
            bench.gpus.locked = None
            bench.driver_load_id += "'"
            bench.node.driver_load_id = bench.driver_load_id
            bench.node.changed()
        if kind in ("kill", "end"):
            await getattr(bench, kind)()
            await self.restart()
        await bench.pass_s(0.0)
        if bench.crashed:
            await bench.kill()
            await self.restart()

    def wanted(self) -> tuple[int, int] | None:
        """What the plan alone asks for."""
        planned = self.plan.devices[0] if self.plan is not None else None
        mhz = planned.clock_max_mhz if planned and self.state != DeviceState.ASLEEP else 0
        return (210, mhz) if mhz not in (0, 1410) else None


async def live(events, folder: Path) -> None:
    history = History(folder)
    bench = history.bench
    await bench.start()
    for event in events:
        await history.happen(*event)
    bench.gpus.refusals, bench.crash = [], ""
    await bench.pass_s(70.0)  # longer than any lease, and than the slow retry of what was refused before
    assert bench.gpus.locked == history.wanted(), bench.gpus.calls
    assert bench.keeper.settled()
    history.plan = None
    await bench.end()
    assert bench.gpus.locked is None
    assert bench.node.journal.state.overrides == {}
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(bench.gpus.calls)]
    assert min(gaps, default=1.0) >= 1.0 - 1e-9, bench.gpus.calls


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENT, max_size=14))
def test_nothing_outlives_its_reason_and_nothing_changes_twice_a_second(events):
    folder = Path(tempfile.mkdtemp(prefix="trefoil-clocks-"))
    try:
        asyncio.run(live(events, folder))
    finally:
        shutil.rmtree(folder)
