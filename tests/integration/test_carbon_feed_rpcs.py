"""What can be asked of a feed that runs as a separate process."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from protos.carbon_feed.v1 import carbon_feed_pb2_grpc as pb_grpc
from tests.integration.test_carbon_feed import SERIES
from tests.support.feed_process import TIMEOUT_S, FeedProcess
from tests.support.redis_server import RedisServer
from trefoil.core import errors
from trefoil.core.carbon import Rung
from trefoil.core.units import HOUR_S
from trefoil.runtime import codec, rpc

pytestmark = pytest.mark.integration

LEAD_IN_H = 60


@pytest.fixture
async def feed(tmp_path, redis_server: RedisServer, unused_tcp_port) -> AsyncIterator[FeedProcess]:
    made = FeedProcess(tmp_path, redis_server.url, unused_tcp_port)
    yield made
    if made.process is not None:
        await made.end()


@pytest.fixture
async def stub(feed) -> AsyncIterator[pb_grpc.CarbonFeedStub]:
    async with rpc.channel(f"127.0.0.1:{feed.port}") as channel:
        yield pb_grpc.CarbonFeedStub(channel)


async def ask(method, request):
    return await rpc.call(method, request, TIMEOUT_S)


async def eventually(method, request):
    """The answer, as soon as there is one."""
    async with asyncio.timeout(2 * TIMEOUT_S):
        while True:
            try:
                return await ask(method, request)
            except errors.Unavailable:
                await asyncio.sleep(0.05)


async def test_everything_can_be_asked_and_nobody_waits(feed, stub):
    await feed.start(trace__lead_in_h=LEAD_IN_H, outlook__horizon_s=24 * HOUR_S)
    reading = await feed.ask()
    many = await ask(stub.GetMany, pb.GetManyRequest())
    assert [codec.from_proto(one).series for one in many.readings] == [SERIES]

    request, found = pb.GetHistoryRequest(zone="demo", limit=25), []
    for _ in range(10):
        page = await eventually(stub.GetHistory, request)
        found += [codec.from_proto(one) for one in page.readings]
        if not page.HasField("next_from_at"):
            break
        request.from_at.CopyFrom(page.next_from_at)
        request.as_of_at.CopyFrom(page.as_of_at)
    assert len(found) == LEAD_IN_H + 1
    assert [one.starts_at_s for one in found[1:]] == [one.ends_at_s for one in found[:-1]]
    assert found[-1].intensity_g_per_kwh == reading.intensity_g_per_kwh

    forecast = (await eventually(stub.GetForecast, pb.GetForecastRequest(zone="demo"))).forecast
    assert (forecast.model, len(forecast.bands)) == ("blend", 24)
    fine = await ask(stub.GetForecast, pb.GetForecastRequest(zone="demo", horizon_s=2 * HOUR_S, step_s=900))
    assert 4 <= len(fine.forecast.bands) <= 9, "it begins where what is known ends"
    assert {round(b.ends_at_s - b.starts_at_s) for b in codec.from_proto(fine.forecast).bands} == {900}
    assert all(b.p10_g_per_kwh <= b.p50_g_per_kwh <= b.p90_g_per_kwh for b in fine.forecast.bands)

    for window in ("expanding", "30d", "same_hour"):
        ratio = codec.from_proto((await ask(stub.GetRatio, pb.GetRatioRequest(zone="demo", window=window))).ratio)
        assert (ratio.window, ratio.cir) == (window, pytest.approx(reading.intensity_g_per_kwh / ratio.aci_g_per_kwh))
    await ask(stub.GetScores, pb.GetScoresRequest(zone="demo"))

    [zone] = (await ask(stub.ListZones, pb.ListZonesRequest(polled_only=True))).zones
    assert (zone.id, zone.polled, codec.from_proto(zone.series)) == ("demo", True, SERIES)
    [health] = (await ask(stub.GetZoneHealth, pb.GetZoneHealthRequest())).zones
    told = codec.from_proto(health)
    assert (told.series, told.provider, told.rung, told.forecast_model) == (SERIES, "trace", Rung.NORMAL, "blend")
    assert told.history_intervals == LEAD_IN_H + 1
    with pytest.raises(errors.NotFound, match=r"zone = 'GB': no such zone. Remedy: use one of: demo"):
        await ask(stub.GetHistory, pb.GetHistoryRequest(zone="GB"))
    code, log = await feed.end()
    assert (code, "Traceback" in log) == (0, False)
