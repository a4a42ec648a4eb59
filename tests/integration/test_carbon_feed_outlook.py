"""Forecasts, ratios and scores of the feed as a process: a replay with an emptied Redis, a live zone over a restart."""

import asyncio
import datetime
from collections.abc import AsyncIterator

import pytest

from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from protos.carbon_feed.v1 import carbon_feed_pb2_grpc as pb_grpc
from tests.support.carbon_answers import minute
from tests.support.carbon_server import CarbonServer, Reply
from tests.unit.carbon_feed.test_forecast import duck
from trefoil.core import errors
from trefoil.core.carbon import CarbonForecast, CarbonRatio, CarbonReading, CarbonScores, Factors, Method, Series
from trefoil.core.common import Basis
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import WallClock

pytestmark = pytest.mark.integration

GB = Series("GB", Method.AVERAGE, Factors.DIRECT)
DEMO = Series("demo", Method.AVERAGE, Factors.LIFECYCLE)
TIMEOUT_S = 60
HOUR_S, WINDOW_S = 3600.0, 1800.0
DAYS = 12
TRUTH = duck(DAYS + 3)


@pytest.fixture
async def server() -> AsyncIterator[CarbonServer]:
    made = CarbonServer()
    await made.start()
    yield made
    await made.stop()


async def stored(state, key, cls, accept=lambda _: True):
    """What a key holds as soon as it is accepted."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                found = await state.get(key, cls)
            except errors.StateUnavailable:
                found = None
            if found is not None and accept(found):
                return found
            await asyncio.sleep(0.05)


async def test_a_replay_is_forecast_and_everything_is_written_again_when_redis_was_emptied(
    feed, own_state, redis_server, tmp_path
):
    path = tmp_path / "duck.csv"
    begins = datetime.datetime(2026, 4, 6, tzinfo=datetime.UTC)
    rows = (f"{(begins + datetime.timedelta(hours=i)).isoformat()},{value:.1f}" for i, value in enumerate(TRUTH))
    path.write_text("time,carbon_intensity_g_per_kwh\n" + "\n".join(rows) + "\n")
    wall_s = 2.0  # of an hour
    await feed.start(trace__path=path, trace__lead_in_h=24 * DAYS, trace__speedup=HOUR_S / wall_s)
    keys = own_state.keys
    forecast = await stored(own_state, keys.carbon_forecast(DEMO), CarbonForecast)
    assert (forecast.model, len(forecast.bands), forecast.provenance.basis) == ("blend", 96, Basis.SIMULATED)
    assert forecast.bands[0].ends_at_s - forecast.bands[0].starts_at_s == pytest.approx(wall_s, abs=1e-3)
    newer = await stored(
        own_state, keys.carbon_forecast(DEMO), CarbonForecast, lambda f: f.issued_at_s > forecast.issued_at_s
    )
    now = await own_state.get(keys.carbon_now(DEMO), CarbonReading)
    for window in ("", "30d", "same_hour"):
        found = await stored(own_state, keys.carbon_ratio(DEMO, window), CarbonRatio)
        assert (found.window, found.samples >= 12) == (window or "expanding", True)
    assert now.simulated
    scores = await stored(own_state, keys.carbon_scores(DEMO), CarbonScores)
    assert scores.model == "blend"

    redis_server.flush()
    again = await stored(own_state, keys.carbon_forecast(DEMO), CarbonForecast)
    assert again.issued_at_s >= newer.issued_at_s
    await stored(own_state, keys.carbon_scores(DEMO, "persistence"), CarbonScores)
    code, log = await feed.end()
    assert (code, "Traceback" in log) == (0, False)
    assert not list((tmp_path / "feed").glob("forecasts-*")), "a replay leaves no forecast behind"


def british(now_s):
    """Half hours from long ago to in two days, as NESO says them: what is over has an actual."""
    first_s = now_s // WINDOW_S * WINDOW_S - DAYS * 24 * HOUR_S
    rows = []
    for k in range(DAYS * 48 + 97):
        at_s = first_s + k * WINDOW_S
        value = round(float(TRUTH[k // 2]))
        actual = value + 3 if at_s + WINDOW_S <= now_s else None
        intensity = {"forecast": value, "actual": actual, "index": "moderate"}
        rows.append({"from": minute(at_s), "to": minute(at_s + WINDOW_S), "intensity": intensity})
    return {"data": rows}


async def test_a_live_zone_has_its_providers_forecast_and_goes_on_after_a_restart(feed, own_state, server, tmp_path):
    server.reply("/intensity", Reply(british(WallClock().now_s())))
    live = {"zone": "GB", "factors": "direct", "provider": "neso", "neso__base_url": server.url}
    await feed.start(**live)
    keys = own_state.keys
    theirs = await stored(own_state, keys.carbon_forecast(GB), CarbonForecast, lambda f: f.model == "neso")
    assert theirs.provenance.licence.startswith("CC BY 4.0")
    assert len(theirs.bands) >= 96
    async with rpc.channel(f"127.0.0.1:{feed.port}") as channel:
        stub = pb_grpc.CarbonFeedStub(channel)
        asked = pb.GetForecastRequest(zone="GB", model="blend", step_s=900, horizon_s=24 * HOUR_S)
        answer = await stub.GetForecast(asked, timeout=TIMEOUT_S, wait_for_ready=True)  # Redis knew it first
        own = codec.from_proto(answer.forecast)
        assert len(own.bands) >= 95
        assert own.bands[0].p10_g_per_kwh < own.bands[0].p90_g_per_kwh
        ratio = await stub.GetRatio(pb.GetRatioRequest(zone="GB", window="same_hour"), timeout=TIMEOUT_S)
        assert 0.2 < ratio.ratio.cir < 5.0
    async with asyncio.timeout(TIMEOUT_S):  # the past is in Redis as well
        while len(await own_state.tail(keys.carbon_history(GB), CarbonReading, 2_000)) < DAYS * 48 - 1:
            await asyncio.sleep(0.05)
    assert (await feed.end())[0] == 0

    server.reply("/intensity", Reply("", 500))
    await own_state.close()
    await feed.start(**live, static_g_per_kwh=210)
    async with rpc.channel(f"127.0.0.1:{feed.port}") as channel:
        stub = pb_grpc.CarbonFeedStub(channel)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    answer = await stub.GetForecast(
                        pb.GetForecastRequest(zone="GB"), timeout=TIMEOUT_S, wait_for_ready=True
                    )
                    break
                except rpc.grpc.aio.AioRpcError:  # it has not read its files yet
                    await asyncio.sleep(0.1)
    served = codec.from_proto(answer.forecast)
    assert (served.model, served.issued_at_s) == ("neso", pytest.approx(theirs.issued_at_s, abs=1e-3))
    code, log = await feed.end()
    assert (code, "Traceback" in log) == (0, False)
    assert list((tmp_path / "feed").glob("forecasts-GB-*/*.jsonl"))
