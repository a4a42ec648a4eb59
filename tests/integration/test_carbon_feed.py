"""The carbon feed as a separate process, with a real Redis that dies, is emptied and comes back."""

import asyncio
import os
import signal
import sys

import pytest

from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from protos.carbon_feed.v1 import carbon_feed_pb2_grpc as pb_grpc
from tests.support.feed_process import TIMEOUT_S
from trefoil.core import errors
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Series
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

pytestmark = pytest.mark.integration

SERIES = Series("demo", Method.AVERAGE, Factors.LIFECYCLE)


async def until(state: State, accept) -> CarbonReading:
    """Poll Redis until a reading is accepted."""
    deadline_s = WallClock().monotonic_s() + TIMEOUT_S
    while WallClock().monotonic_s() < deadline_s:
        try:
            reading = await state.get(state.keys.carbon_now(SERIES), CarbonReading)
        except errors.StateUnavailable:
            reading = None
        if reading is not None and accept(reading):
            return reading
        await asyncio.sleep(0.02)
    raise AssertionError("no such reading appeared")


@pytest.mark.gate
async def test_publishes_serves_watches_and_ends(feed, own_state):
    await feed.start(trace__speedup=14_400, trace__step_s=3_600)  # an hour of trace every quarter of a second
    first = await until(own_state, lambda _: True)
    assert (first.series, first.simulated, first.quality, first.rung) == (SERIES, True, Quality.ESTIMATED, 0)
    assert first.epoch == 1
    assert first.ends_at_s - first.starts_at_s == pytest.approx(0.25, abs=1e-3)
    async with rpc.channel(f"127.0.0.1:{feed.port}") as channel:
        stub = pb_grpc.CarbonFeedStub(channel)
        seen: list[CarbonReading] = []
        watching = stub.WatchIntensity(pb.WatchIntensityRequest(zone="demo"), timeout=TIMEOUT_S, wait_for_ready=True)
        async for response in watching:
            seen.append(codec.from_proto(response.reading))
            if len(seen) == 4:
                break
    assert len({reading.as_of for reading in seen}) >= 3
    assert [reading.as_of for reading in seen] == sorted(reading.as_of for reading in seen)
    with pytest.raises(errors.NotFound, match="use one of: demo"):
        await feed.ask("GB")
    code, log = await feed.end()
    assert (code, "Traceback" in log) == (0, False)
    history = [reading for _, reading in await own_state.stream(own_state.keys.carbon_history(SERIES), CarbonReading)]
    assert len(history) >= 24 + 2, "a day of lead-in, and what was played"
    ends = [reading.ends_at_s for reading in history[:-1]]
    assert [reading.starts_at_s for reading in history[1:]] == pytest.approx(ends, abs=1e-3), "without a gap"
    assert await own_state.holder("feed:demo") is None, "the role is given back"


async def test_a_restart_goes_on_with_the_same_history_and_a_higher_epoch(feed, redis_server, own_state):
    starts_at_s = round(WallClock().now_s() - 1.0, 3)
    played = {"trace__speedup": 7_200, "trace__step_s": 3_600, "trace__starts_at_s": starts_at_s}
    await feed.start(**played)
    first = await until(own_state, lambda reading: reading.starts_at_s > starts_at_s + 1.0)
    await feed.end(signal.SIGKILL)
    await feed.start(**played)
    second = await until(own_state, lambda reading: reading.epoch > first.epoch)
    assert second.as_of > first.as_of
    assert (await feed.ask()).starts_at_s >= first.starts_at_s, "the trace did not start again"
    await feed.end()
    await feed.start(**{**played, "trace__starts_at_s": "inf"})
    third = await until(own_state, lambda reading: reading.epoch > second.epoch)
    assert "held" in third.estimation_method
    assert (feed.folder / "feed" / "epoch-demo").read_text() == f"{third.epoch}\n"
    history = [r.starts_at_s for _, r in await own_state.stream(own_state.keys.carbon_history(SERIES), CarbonReading)]
    assert len({round(at_s, 2) for at_s in history}) == len(history), "nothing occurs twice"
    assert max(history) >= second.starts_at_s - 1e-3, "a feed that holds leaves the history as it was"


async def test_another_replay_replaces_the_history(feed, own_state):
    key = own_state.keys.carbon_history(SERIES)
    now_s = round(WallClock().now_s(), 3)
    await feed.start(trace__starts_at_s=now_s + 500)
    await until(own_state, lambda _: True)
    assert len(await own_state.stream(key, CarbonReading)) == 24
    await feed.end()
    await feed.start(trace__starts_at_s=now_s - 1, trace__step_s=7_200)
    await until(own_state, lambda reading: reading.starts_at_s == pytest.approx(now_s - 1, abs=1e-3))
    history = [reading for _, reading in await own_state.stream(key, CarbonReading)]
    assert len(history) == 12 + 1
    assert history[-1].starts_at_s == pytest.approx(now_s - 1, abs=1e-3)


async def test_a_port_in_use_starts_nothing(feed, own_state):
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", feed.port)
    await feed.start()
    code, log = await feed.ended()
    assert code == 2
    assert f"error: address = '127.0.0.1:{feed.port}': cannot listen (Address already in use)" in log
    assert await own_state.names(own_state.keys.prefix) == [], "nothing half-started"
    server.close()


async def test_an_insecure_listener_is_warned_about(feed):
    await feed.start(admin_address=f"0.0.0.0:{feed.port}", insecure="true")
    await feed.ask()
    _, log = await feed.end()
    assert "insecure listener" in log


def test_help_is_helpful():
    pid = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-m", "carbon_feed", "--help"])
    assert pid == 0
