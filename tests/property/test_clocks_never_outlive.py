"""Whatever happens to leases, plans, agents and drivers: never two changes within a second, and nothing stays set."""

import asyncio
import itertools
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_agent.devices.errors import DeviceError
from tests.support.clock_bench import GPU, HANDS, Bench, Hand
from trefoil.core.errors import Fenced
from trefoil.core.fleet import DeviceState

NUMBER = st.integers(0, 4)  # of a value of the lever; 0: the default, 4: what the board does anyway
EVENT = st.one_of(
    st.tuples(st.just("pass"), st.floats(0.05, 3.0)),
    st.tuples(st.just("lease"), NUMBER.filter(bool), st.floats(0.5, 8.0), st.integers(0, 3), st.sampled_from("ab")),
    st.tuples(st.just("release"), st.integers(0, 3), st.sampled_from("ab")),
    st.tuples(st.just("plan"), NUMBER),
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

    def __init__(self, folder: Path, hand: Hand) -> None:
        self.bench, self.hand = Bench(folder), hand
        if not hand.is_clock:
            self.bench.gpus.limit_w = self.bench.gpus.found_w = 380.0  # an operator's
        most = 1410 if hand.is_clock else 380
        self.values = (0, *hand.values, most)
        self.number, self.plan = 0, None
        self.state = DeviceState.AWAKE

    async def restart(self) -> None:
        await self.bench.clock.advance(1.0)  # a process needs that long to start
        await self.bench.start(self.plan, self.state)

    async def happen(self, kind, *what) -> None:
        bench = self.bench
        if kind == "pass":
            await bench.pass_s(*what)
        elif kind == "lease":
            number, ttl_s, epoch, holder = what
            try:
                bench.keeper.set_clocks(self.hand.lease(self.values[number], holder, epoch), ttl_s)
            except Fenced:
                pass
        elif kind == "release":
            try:
                bench.keeper.release_clocks(GPU, what[1], what[0])
            except Fenced:
                pass
        elif kind == "plan":
            (self.number,) = what
            self.plan = self.hand.plan(self.values[self.number])
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
            bench.gpus.reload()  # it came back by a reset
            bench.take(self.plan, self.state)
        elif kind == "reload":
            bench.gpus.reload()
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

    def wanted(self) -> int | None:
        """What the plan alone asks for."""
        return self.values[self.number] if 0 < self.number < 4 and self.state != DeviceState.ASLEEP else None


async def live(events, folder: Path, hand: Hand) -> None:
    history = History(folder, hand)
    bench = history.bench
    await bench.start()
    for event in events:
        await history.happen(*event)
    bench.gpus.refusals, bench.crash = [], ""
    await bench.pass_s(70.0)  # longer than any lease, and than the slow retry of what was refused before
    assert hand.in_force(bench.gpus) == history.wanted(), bench.gpus.calls
    assert bench.keeper.settled()
    history.plan = None
    await bench.end()
    assert hand.in_force(bench.gpus) is None
    assert bench.node.journal.state.overrides == {}
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(bench.gpus.calls)]
    assert min(gaps, default=1.0) >= 1.0 - 1e-9, bench.gpus.calls


@pytest.mark.parametrize("hand", HANDS, ids=lambda hand: hand.lever)
@settings(max_examples=75, deadline=None)
@given(events=st.lists(EVENT, max_size=14))
def test_nothing_outlives_its_reason_and_nothing_changes_twice_a_second(hand, events):
    folder = Path(tempfile.mkdtemp(prefix="trefoil-clocks-"))
    try:
        asyncio.run(live(events, folder, hand))
    finally:
        shutil.rmtree(folder)
