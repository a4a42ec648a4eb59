"""A service whose clock is not Redis' says so: as a metric, in its log, and to whoever wants to know."""

import asyncio
from typing import Any

import pytest
import structlog

from tests.support.stores import START_S
from trefoil.core import errors
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.service import FIRST_POLL_S, OFFSET_POLL_S, StateComponent
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics


class Redis:
    """Tells the time, as far ahead of the clock as it is told, after `way_s` there and as much back."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.ahead_s, self.way_s = clock, 0.0, 0.0

    def register_script(self, text: str) -> None:
        """There are no writes."""

    async def time(self) -> tuple[int, int]:
        self.clock.move(self.way_s)
        seconds, rest = divmod(self.clock.now_s() + self.ahead_s, 1)
        self.clock.move(self.way_s)
        return int(seconds), int(rest * 1e6)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_S)


@pytest.fixture
def redis(clock: ManualClock) -> Redis:
    return Redis(clock)


@pytest.fixture
def state(redis: Redis, clock: ManualClock) -> State:
    client: Any = redis
    return State(client, "c", clock, 1.0)


@pytest.mark.parametrize(
    ("ahead_s", "way_s", "offset_s"), [(3.0, 0.0, -3.0), (-3.0, 0.1, 2.9), (3.0, 0.1, -2.9), (0.1, 0.2, 0.0)]
)
async def test_an_offset_is_no_more_than_what_the_answers_way_leaves_sure(
    state: State, redis: Redis, ahead_s: float, way_s: float, offset_s: float
) -> None:
    redis.ahead_s, redis.way_s = ahead_s, way_s
    assert await state.clock_offset_s() == pytest.approx(offset_s, abs=1e-3)


async def test_it_is_exported_warned_about_and_named_once_each(state: State, redis: Redis, clock: ManualClock) -> None:
    metrics, told = Metrics("power_agent"), list[str]()
    part = StateComponent(state, clock, metrics, told.append)
    await part.init()
    assert "trefoil_clock_offset_seconds{simulated" in metrics.text()
    assert "} NaN" in metrics.text(), "not known yet"
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(part.run())
        for redis.ahead_s in (0.3, -0.8, -0.8, 2.5, 2.6, 0.0):
            await clock.advance(OFFSET_POLL_S)
        running.cancel()
    said = [entry for entry in logs if "clock" in entry["event"]]
    assert [entry["log_level"] for entry in said] == ["warning", "error", "info"]
    apart = told[1]
    assert told == ["", apart, ""]
    assert said[0]["error"].startswith("clock_offset_s = 0.8"), "0.3 s is worth no warning"
    assert said[1]["error"] == apart
    assert apart.startswith("clock_offset_s = -2.5: this service's clock is not that of Redis")
    assert "Remedy: synchronise the clocks of both machines" in apart


async def test_a_redis_that_is_away_tells_nothing_and_ends_nothing(
    state: State, redis: Redis, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics("controller")
    part = StateComponent(state, clock, metrics)
    tries = []

    async def away() -> float:
        tries.append(1)
        raise errors.StateUnavailable("away")

    monkeypatch.setattr(state, "clock_offset_s", away)
    running = asyncio.create_task(part.run())
    for _ in range(3):
        await clock.advance(FIRST_POLL_S)
    assert (len(tries), running.done()) == (4, False)
    assert part.not_ready() == "Redis has not answered since the start"
    monkeypatch.undo()
    await clock.advance(FIRST_POLL_S)
    assert not part.not_ready()
    monkeypatch.setattr(state, "clock_offset_s", away)
    await clock.advance(OFFSET_POLL_S)
    assert not part.not_ready(), "once it was reached, it may be away"
    assert (len(tries), running.done()) == (5, False)
    running.cancel()
