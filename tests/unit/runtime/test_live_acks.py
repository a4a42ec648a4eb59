"""Who stops a slice must know who may send to it, whatever Redis has lost."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from trefoil.core.common import Revision
from trefoil.core.demand import TableAck
from trefoil.core.errors import StateUnavailable
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.keys import Keys
from trefoil.runtime.sightings import FIRST_S, LiveAcks

ONE = TableAck("d", 0, Revision(1, 1), observed_at_s=1.0)
OTHER = replace(ONE, worker=1)


class Redis:
    """What it holds; None: it does not answer."""

    def __init__(self) -> None:
        self.keys = Keys("test")
        self.holds: tuple[TableAck, ...] | None = ()
        self.unreadable: dict[str, str] = {}

    async def scan(self, prefix: str, cls: type[Any]) -> Mapping[str, Any]:
        assert prefix == self.keys.ack_prefix()
        if self.holds is None:
            raise StateUnavailable("away")
        return {f"{ack.worker}": ack for ack in self.holds}


@pytest.fixture
def seen() -> tuple[Redis, ManualClock, LiveAcks]:
    redis, clock = Redis(), ManualClock()
    return redis, clock, LiveAcks(redis, clock)  # type: ignore[arg-type]


async def watch(clock: ManualClock, acks: LiveAcks, seconds: float) -> tuple[TableAck, ...]:
    found: tuple[TableAck, ...] = ()
    for _ in range(round(2 * seconds)):
        await clock.advance(0.5)
        found = await acks.read()
    return found


async def test_nobody_means_nobody_only_after_a_while_of_sight(seen: tuple[Redis, ManualClock, LiveAcks]):
    _, clock, acks = seen
    assert await acks.read() == ()
    assert "0.0 s only" in acks.blind
    await watch(clock, acks, FIRST_S - 0.5)
    assert acks.blind
    await watch(clock, acks, 0.5)
    assert acks.blind == ""


async def test_an_emptied_redis_ends_nobody_and_a_dead_worker_ends_when_its_key_would_have(
    seen: tuple[Redis, ManualClock, LiveAcks],
):
    redis, clock, acks = seen
    redis.holds = (ONE, OTHER)
    assert await acks.read() == (ONE, OTHER)
    redis.holds = ()
    assert await watch(clock, acks, 2.0) == (ONE, OTHER)
    redis.holds = (newer := replace(ONE, table=Revision(1, 2)),)
    assert await watch(clock, acks, 0.5) == (newer, OTHER)
    assert await watch(clock, acks, 2.5) == (newer,), "the other is 5 s old"


async def test_an_acknowledgement_that_nobody_renews_is_of_a_dead_worker_though_its_key_stays(
    seen: tuple[Redis, ManualClock, LiveAcks],
):
    redis, clock, acks = seen
    redis.holds = (ONE, OTHER)
    await acks.read()
    for second in range(12):
        redis.holds = (replace(ONE, observed_at_s=2.0 + second), OTHER)
        await watch(clock, acks, 1.0)
    assert [ack.worker for ack in await acks.read()] == [0]
    redis.holds = (ONE, replace(OTHER, observed_at_s=20.0))
    assert [ack.worker for ack in await watch(clock, acks, 0.5)] == [0, 1], "it lives after all"


async def test_nothing_ages_while_redis_is_away(seen: tuple[Redis, ManualClock, LiveAcks]):
    redis, clock, acks = seen
    redis.holds = (ONE,)
    await acks.read()
    redis.holds = None
    for _ in range(60):
        await clock.advance(1.0)
        with pytest.raises(StateUnavailable):
            await acks.read()
    redis.holds = ()
    assert await acks.read() == (ONE,)
    assert await watch(clock, acks, 6.0) == ()


async def test_a_worker_that_said_that_it_leaves_is_not_waited_for(seen: tuple[Redis, ManualClock, LiveAcks]):
    redis, _, acks = seen
    redis.holds = (ONE, replace(OTHER, leaving=True))
    assert len(await acks.read()) == 2, "it still has what is in flight"
    redis.holds = (ONE,)
    assert await acks.read() == (ONE,)


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
async def test_a_worker_on_another_clock_said_it_before_we_saw_it(
    seen: tuple[Redis, ManualClock, LiveAcks], ahead_s: float
):
    redis, clock, acks = seen
    clock.jump(10_000.0)
    for _ in range(6):
        said_s = clock.now_s() + 0.2
        redis.holds = (replace(ONE, observed_at_s=said_s + ahead_s),)
        looked_s = clock.now_s()
        await clock.advance(0.5)
        [ack] = await acks.read()
        assert ack.observed_at_s <= said_s, "who drains a slice waits for what was said after it"
        assert ack.observed_at_s >= looked_s - 5.0, "it is alive"
    assert ack.observed_at_s == looked_s
    offset_s = acks.offset_s("d", 0)
    assert offset_s is not None
    assert abs(offset_s + ahead_s) <= 0.5


async def test_a_worker_whose_acknowledgement_cannot_be_read_is_not_taken_for_dead(
    seen: tuple[Redis, ManualClock, LiveAcks],
):
    redis, clock, acks = seen
    redis.holds = (ONE,)
    await acks.read()
    redis.holds, redis.unreadable = (), {redis.keys.ack(ONE.dispatcher, ONE.worker): "bytes of somebody else"}
    assert await watch(clock, acks, 20.0) == (ONE,)
    redis.unreadable = {}
    assert await watch(clock, acks, 6.0) == ()
