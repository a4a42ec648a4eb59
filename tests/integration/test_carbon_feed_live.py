"""The carbon feed as a process of its own, with live providers that fail and come back."""

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest

from tests.support.carbon_answers import neso
from tests.support.carbon_server import CarbonServer, Reply
from tests.support.feed_process import FeedProcess
from tests.support.redis_server import RedisServer
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Rung, Series
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

pytestmark = pytest.mark.integration

SERIES = Series("GB", Method.AVERAGE, Factors.DIRECT)
SECRET = "s3cret-of-the-feed"


@pytest.fixture
async def server() -> AsyncIterator[CarbonServer]:
    made = CarbonServer()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def feed(tmp_path, redis_server: RedisServer, unused_tcp_port, server) -> AsyncIterator[FeedProcess]:
    key = tmp_path / "key"
    key.write_text(SECRET)
    key.chmod(0o600)
    settings = {
        "zone": "GB",
        "factors": "direct",
        "provider": "electricity_maps",
        "electricity_maps__base_url": server.url,
        "electricity_maps__token": f"file:{key}",
        "neso__base_url": server.url,
    }
    made = FeedProcess(tmp_path, redis_server.url, unused_tcp_port, settings)
    yield made
    if made.process is not None:
        await made.end(signal.SIGKILL)


async def until(feed: FeedProcess, accept) -> CarbonReading:
    """Ask until a reading is accepted."""
    async with asyncio.timeout(60):
        while not accept(reading := await feed.ask("GB")):
            await asyncio.sleep(0.05)
    return reading


async def test_a_refused_provider_its_second_and_a_restart_without_either(feed, server, redis_server):
    now_s = WallClock().now_s()
    server.reply("/v4/", Reply({"error": f"slow down, {SECRET}"}, 429, {"retry-after": "600"}))
    server.reply("/intensity", Reply(neso(start_s=now_s // 60 * 60 - 300)))  # no half hour ends during the test
    await feed.start(secondary="neso", static_g_per_kwh=210)
    second = await until(feed, lambda reading: reading.rung == Rung.SECONDARY)
    assert (second.provider, second.intensity_g_per_kwh, second.quality) == ("neso", 266.0, Quality.FORECAST)
    assert second.fallback_reason.startswith("electricity_maps rate_limited: electricity_maps answered 429")
    assert (second.series, second.simulated) == (SERIES, False)
    await asyncio.sleep(1.5)  # three rounds
    code, log = await feed.end()
    assert code == 0
    assert SECRET not in log
    assert len([asked for asked in server.asked if asked.path.startswith("/v4/")]) == 1, "Retry-After is waited for"
    state = State.connect(redis_server.url, "c", timeout_s=30.0)
    key = state.keys.carbon_history(SERIES)
    assert [reading.provider for _, reading in await state.stream(key, CarbonReading)] == ["neso"]

    server.reply("/intensity", Reply("", 500))
    await feed.start(static_g_per_kwh=210)
    carried = await until(feed, lambda reading: reading.rung == Rung.CARRIED)
    assert (carried.intensity_g_per_kwh, carried.provider) == (266.0, "neso"), "the last process's value, by its name"
    assert carried.observed_at_s == second.observed_at_s
    assert len(await state.stream(key, CarbonReading)) == 1, "what is carried is no history, and none was lost"
    await feed.end()
    await state.close()


async def test_without_anybody_the_setting_says_that_it_is_one(feed, server):
    await feed.start(static_g_per_kwh=210)  # the server knows no path: 404
    static = await until(feed, lambda reading: "no_data" in reading.fallback_reason)
    assert (static.rung, static.quality, static.intensity_g_per_kwh) == (Rung.STATIC, Quality.STATIC, 210.0)
    assert static.provider == "setting static_g_per_kwh"
