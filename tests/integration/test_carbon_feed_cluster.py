"""Two feed processes, one Redis, one provider that counts: one asks, the other follows and takes over."""

import asyncio
import datetime
import signal
from collections.abc import AsyncIterator

import pytest

from tests.support.carbon_server import CarbonServer, Reply
from tests.support.feed_process import FeedProcess
from tests.support.redis_server import RedisServer
from trefoil.core import errors
from trefoil.core.carbon import CarbonReading, Factors, Method, Rung, Series
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import LEASE_TTL_S, State

pytestmark = pytest.mark.integration

SERIES = Series("GB", Method.AVERAGE, Factors.DIRECT)
WINDOW_S = 1
WINDOWS = 600
PATIENCE_S = 60.0


class Zone:
    """A provider whose half hours last a second, and what two feeds make of it."""

    def __init__(self, server: CarbonServer, state: State) -> None:
        self.server, self.state = server, state
        self.begin_s = int(WallClock().now_s()) - 2
        rows = [
            {"from": iso(self.begin_s + i), "to": iso(self.begin_s + i + WINDOW_S), "intensity": intensity(i)}
            for i in range(WINDOWS)
        ]
        server.reply("/intensity/", Reply({"data": rows}))

    def asked_by(self, name: str) -> int:
        return sum(asked.headers["user-agent"] == name for asked in self.server.asked)

    async def now(self, series: Series = SERIES) -> CarbonReading | None:
        return await self.state.get(self.state.keys.carbon_now(series), CarbonReading)

    async def history(self) -> list[CarbonReading]:
        key = self.state.keys.carbon_history(SERIES)
        return [reading for _, reading in await self.state.stream(key, CarbonReading)]

    async def until(self, accept, series: Series = SERIES) -> CarbonReading:
        """Poll Redis until a reading is accepted."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                reading = await self.now(series)
                if reading is not None and accept(reading):
                    return reading
                await asyncio.sleep(0.05)


def iso(at_s: float) -> str:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def intensity(index: int) -> dict[str, object]:
    return {"forecast": 200 + index % 50, "actual": None, "index": "moderate"}


@pytest.fixture
async def zone(redis_server: RedisServer) -> AsyncIterator[Zone]:
    server, state = CarbonServer(), State.connect(redis_server.url, "c", timeout_s=30.0)
    await server.start()
    yield Zone(server, state)
    await state.close()
    await server.stop()


@pytest.fixture
async def feeds(tmp_path, redis_server: RedisServer, zone, unused_tcp_port_factory) -> AsyncIterator[list[FeedProcess]]:
    made = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        settings = {
            "zone": "GB",
            "factors": "direct",
            "provider": "neso",
            "neso__base_url": zone.server.url,
            "web__user_agent": name,
        }
        made.append(FeedProcess(folder, redis_server.url, unused_tcp_port_factory(), settings))
    yield made
    for feed in made:
        if feed.process is not None:
            await feed.end(signal.SIGKILL)


@pytest.mark.gate
async def test_one_asks_the_other_follows_and_takes_over(feeds, zone):
    first, second = feeds
    await first.start()
    published = await zone.until(lambda reading: reading.rung == Rung.NORMAL)
    assert (published.provider, published.epoch) == ("neso", 1)
    await second.start()
    followed = await second.ask("GB")
    assert (followed.rung, followed.provider, followed.epoch) == (Rung.NORMAL, "neso", 1)
    assert followed.starts_at_s >= published.starts_at_s
    await zone.until(lambda reading: reading.starts_at_s > followed.starts_at_s + 2 * WINDOW_S)
    again = await second.ask("GB")
    assert again.starts_at_s > followed.starts_at_s, "it follows, reading by reading"
    assert zone.asked_by("first") >= 1
    assert zone.asked_by("second") == 0, "one asks"

    await first.end(signal.SIGKILL)
    killed_s = WallClock().monotonic_s()
    taken = await zone.until(lambda reading: reading.epoch > 1)
    took_s = WallClock().monotonic_s() - killed_s
    print(f"taken over {took_s:.1f} s after the kill")
    assert took_s < LEASE_TTL_S + PATIENCE_S, "half a second more than the lease on an idle machine"
    assert taken.epoch == 2
    assert taken.rung == Rung.NORMAL, "nobody was told a stand-in"
    async with asyncio.timeout(PATIENCE_S):
        while not zone.asked_by("second"):
            await asyncio.sleep(0.05)
    asked = zone.asked_by("first")
    await first.start()
    await zone.until(lambda reading: reading.starts_at_s > taken.starts_at_s + 3 * WINDOW_S and reading.epoch == 2)
    assert (await first.ask("GB")).epoch == 2
    assert zone.asked_by("first") == asked, "it follows now"

    history = await zone.history()
    starts = [reading.starts_at_s for reading in history]
    assert len(set(starts)) == len(starts), "nothing twice"
    assert starts == [starts[0] + i * WINDOW_S for i in range(len(starts))], "nothing left out"
    assert [r.intensity_g_per_kwh for r in history] == [200 + (s - zone.begin_s) % 50 for s in starts]
    assert {reading.epoch for reading in history} == {1, 2}
    for feed in feeds:
        code, log = await feed.end()
        assert (code, "Traceback" in log) == (0, False)


async def test_two_zones_of_one_process(feeds, zone):
    (feed, _) = feeds
    more = '[{zone = "own", provider = "constant", factors = "direct", constant = {intensity_g_per_kwh = 41}}]'
    await feed.start(zones=more)
    assert (await feed.ask("own")).intensity_g_per_kwh == 41.0
    await zone.until(lambda reading: reading.rung == Rung.NORMAL)
    own = Series("own", Method.AVERAGE, Factors.DIRECT)
    assert (await zone.until(lambda _: True, own)).intensity_g_per_kwh == 41.0
    with pytest.raises(errors.NotFound):
        await feed.ask("FR")
    assert (await feed.end())[0] == 0
