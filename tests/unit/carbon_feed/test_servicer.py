"""The feed's RPCs over a real server, with feeds that hold what the test says."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from carbon_feed.core.history import History
from carbon_feed.forecast.archive import ForecastArchive
from carbon_feed.service import FULL_NAME
from carbon_feed.serving.core.queries import PAGE_MAX
from carbon_feed.serving.servicer import CarbonFeedServicer
from carbon_feed.zones import load_zones
from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from protos.carbon_feed.v1 import carbon_feed_pb2_grpc as pb_grpc
from protos.types.v1 import carbon_pb2
from trefoil.core import errors
from trefoil.core.carbon import (
    CarbonBand,
    CarbonForecast,
    CarbonRatio,
    CarbonReading,
    CarbonScore,
    CarbonScores,
    Factors,
    Method,
    Quality,
    Series,
    ZoneHealth,
)
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.config import ServiceSettings

NOW_S = 1_795_000_200.0  # a half hour after a full hour
HALF_HOUR_S = 1800.0
TIMEOUT_S = 20


def reading(series: Series, starts_at_s: float, value: float, **changes) -> CarbonReading:
    made = CarbonReading(
        series=series,
        starts_at_s=starts_at_s,
        ends_at_s=starts_at_s + HALF_HOUR_S,
        intensity_g_per_kwh=value,
        quality=Quality.MEASURED,
        provider="p",
        observed_at_s=starts_at_s + HALF_HOUR_S,
        fetched_at_s=starts_at_s + HALF_HOUR_S,
    )
    return replace(made, **changes)


def forecast(series: Series, model: str, count: int = 4, step_s: float = 3600.0) -> CarbonForecast:
    begin_s = NOW_S - HALF_HOUR_S
    bands = (
        CarbonBand(begin_s + i * step_s, begin_s + (i + 1) * step_s, 90.0 + i, 100.0 + i, 110.0 + i)
        for i in range(count)
    )
    return CarbonForecast(series, model, NOW_S - 600, tuple(bands))


class Feed:
    """In the place of a `ZoneLoop`."""

    speedup = 1.0

    def __init__(self, zone: str, method=Method.AVERAGE, factors=Factors.DIRECT):
        self.series = Series(zone, method, factors)
        self.reading: CarbonReading | None = reading(self.series, NOW_S - HALF_HOUR_S, 200.0)
        self.history = History(self.series)
        self.told: list[CarbonReading] = []
        self.stays = False
        self.forecasts = SimpleNamespace(
            archive=ForecastArchive(self.series),
            forecast=None,
            forecast_reason="6 h of the last 7 days are known, a forecast needs 24 h",
            ratio=lambda *_: None,
            scores=lambda: (),
        )

    def health(self, now_s: float) -> ZoneHealth:
        return ZoneHealth(self.series, "p", leading=True, rung=2, age_s=now_s - NOW_S, history_newest_s=5.0)

    async def watch(self):
        for one in self.told:
            yield one
        if self.stays:
            await asyncio.Event().wait()


@pytest.fixture
def gb():
    return Feed("GB")


@pytest.fixture
def feeds(gb):
    return [gb, Feed("FR"), Feed("CAISO", Method.MARGINAL)]


@pytest.fixture
async def stub(feeds):
    servicer = CarbonFeedServicer(feeds, clock=ManualClock(NOW_S), watchers_max=2)
    entries = [(pb_grpc.add_CarbonFeedServicer_to_server, servicer, FULL_NAME)]
    server = rpc.make_server(ServiceSettings(admin_address="127.0.0.1:0"), entries)
    await server.start()
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        yield pb_grpc.CarbonFeedStub(channel)
    await server.stop(0.0)


async def ask(method, request):
    return await rpc.call(method, request, TIMEOUT_S)


def values(readings):
    return [one.intensity_g_per_kwh for one in readings]


def at(message, field, at_s):
    getattr(message, field).FromMicroseconds(round(at_s * 1e6))
    return message


# --- zones ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GB", "gb", "UK", "gcp/europe-west2"])
async def test_a_zone_is_found_by_each_of_its_names(stub, gb, name):
    [reading] = (await ask(stub.GetMany, pb.GetManyRequest(zones=[name]))).readings
    assert codec.from_proto(reading) == gb.reading


async def test_so_is_one_that_the_feed_itself_calls_by_another_name(stub, feeds):
    assert load_zones().find("CAISO").id == load_zones().find("aws/us-west-1").id == "US-CAL-CISO"
    for name in ("CAISO", "US-CAL-CISO", "aws/us-west-1"):
        [reading] = (await ask(stub.GetMany, pb.GetManyRequest(zones=[name]))).readings
        assert codec.from_proto(reading) == feeds[2].reading


async def test_a_reading_is_served_as_it_is_now(stub, gb):
    await ask(stub.GetMany, pb.GetManyRequest(zones=["GB"]))
    gb.reading = replace(gb.reading, intensity_g_per_kwh=7.0)
    assert values((await ask(stub.GetMany, pb.GetManyRequest(zones=["GB"]))).readings) == [7.0]


@pytest.mark.parametrize(
    ("method", "request_of"),
    [
        ("GetMany", lambda zone: pb.GetManyRequest(zones=[zone])),
        ("GetHistory", lambda zone: pb.GetHistoryRequest(zone=zone)),
        ("GetForecast", lambda zone: pb.GetForecastRequest(zone=zone)),
        ("GetRatio", lambda zone: pb.GetRatioRequest(zone=zone)),
        ("GetScores", lambda zone: pb.GetScoresRequest(zone=zone)),
    ],
)
async def test_zones_that_are_not_read_are_told_apart_from_none(stub, method, request_of):
    with pytest.raises(errors.NotFound, match=r"zone = 'DE': no such zone. Remedy: use one of: CAISO, FR, GB"):
        await ask(getattr(stub, method), request_of("DE"))
    with pytest.raises(errors.InvalidInput, match=r"zone: not given. Remedy: use one of: CAISO, FR, GB"):
        await ask(getattr(stub, method), request_of(""))


async def test_many_zones_of_one_kind(stub, feeds):
    answer = await ask(stub.GetMany, pb.GetManyRequest(zones=["FR", "UK"]))
    assert [one.series.zone for one in answer.readings] == ["FR", "GB"]
    feeds[1].reading = None
    answer = await ask(stub.GetMany, pb.GetManyRequest(zones=["FR", "GB"]))
    assert [one.series.zone for one in answer.readings] == ["GB"]
    assert [(one.series.zone, one.why) for one in answer.missing] == [("FR", "no reading of FR yet")]


@pytest.mark.parametrize("zones", [[], ["GB", "CAISO"]])
async def test_readings_that_must_not_be_compared_do_not_come_together(stub, zones):
    match = r"zones: GB:average:direct and CAISO:marginal:direct must not be compared. Remedy: .*series"
    with pytest.raises(errors.SeriesMismatch, match=match):
        await ask(stub.GetMany, pb.GetManyRequest(zones=zones))


async def test_series_that_are_spelled_out_come_together(stub, feeds):
    wanted = [codec.to_proto(feed.series) for feed in feeds]
    answer = await ask(stub.GetMany, pb.GetManyRequest(series=wanted))
    assert [codec.from_proto(one.series) for one in answer.readings] == [feed.series for feed in feeds]


@pytest.mark.parametrize(
    ("request_of", "raised", "match"),
    [
        (lambda: pb.GetManyRequest(zones=["GB", "UK"]), errors.InvalidInput, "zones = 'GB': asked for twice"),
        (
            lambda: pb.GetManyRequest(zones=["GB"], series=[carbon_pb2.Series(zone="GB")]),
            errors.InvalidInput,
            "series = 1: given beside zones",
        ),
        (
            lambda: pb.GetManyRequest(series=[carbon_pb2.Series(zone="GB", method=1)]),
            errors.InvalidInput,
            "series.factors: not given for GB. Remedy: spell out",
        ),
        (
            lambda: pb.GetManyRequest(series=[carbon_pb2.Series(zone="GB", method=1, factors=2)]),
            errors.NotFound,
            "series.factors = 'lifecycle': GB is not read so. Remedy: use direct",
        ),
        (
            lambda: pb.GetManyRequest(series=[carbon_pb2.Series(zone="GB", method=9, factors=2)]),
            errors.InvalidInput,
            "method = 9: unknown Method",
        ),
    ],
)
async def test_what_cannot_be_asked_of_many(stub, request_of, raised, match):
    with pytest.raises(raised, match=match):
        await ask(stub.GetMany, request_of())


async def test_the_registry_says_which_zones_are_read(stub):
    everything = {zone.id: zone for zone in (await ask(stub.ListZones, pb.ListZonesRequest())).zones}
    assert everything["GB"].polled
    assert (everything["GB"].neso, everything["GB"].timezone) == ("national", "Europe/London")
    assert not everything["DE"].polled
    assert not everything["DE"].HasField("series")
    assert everything["CAISO"].series.method == Method.MARGINAL, "a name of one's own"
    polled = (await ask(stub.ListZones, pb.ListZonesRequest(polled_only=True))).zones
    assert {zone.id for zone in polled} == {"GB", "FR", "CAISO"}
    for name, found in (("gcp/europe-west3", "DE"), ("UK", "GB"), ("CAISO", "CAISO")):
        assert [zone.id for zone in (await ask(stub.ListZones, pb.ListZonesRequest(name=name))).zones] == [found]
    with pytest.raises(errors.NotFound, match="zone = 'nowhere': no such zone"):
        await ask(stub.ListZones, pb.ListZonesRequest(name="nowhere"))


async def test_health_of_one_zone_or_of_all(stub, feeds):
    everything = (await ask(stub.GetZoneHealth, pb.GetZoneHealthRequest())).zones
    assert [codec.from_proto(one) for one in everything] == [feed.health(NOW_S) for feed in feeds]
    one = (await ask(stub.GetZoneHealth, pb.GetZoneHealthRequest(zone="FR"))).zones
    assert [zone.series.zone for zone in one] == ["FR"]


# --- history ----------------------------------------------------------------------------------------------------------


def filled(feed: Feed, count: int) -> list[CarbonReading]:
    """Half hours that end with now."""
    made = [reading(feed.series, NOW_S - (count - i) * HALF_HOUR_S, 100.0 + i) for i in range(count)]
    for one in made:
        feed.history.add(one)
    return made


async def test_all_of_a_history(stub, gb):
    made = filled(gb, 130)
    answer = await ask(stub.GetHistory, pb.GetHistoryRequest(zone="GB"))
    assert [codec.from_proto(one) for one in answer.readings] == made
    assert not answer.HasField("next_from_at")
    assert answer.as_of_at.ToMicroseconds() == round(NOW_S * 1e6)


async def test_pages_of_a_history_leave_nothing_out(stub, gb):
    made = filled(gb, 130)
    request, pages, found = pb.GetHistoryRequest(zone="GB", limit=30), 0, []
    while True:
        answer = await ask(stub.GetHistory, request)
        found += [codec.from_proto(one) for one in answer.readings]
        pages += 1
        if not answer.HasField("next_from_at"):
            break
        request.from_at.CopyFrom(answer.next_from_at)
        request.as_of_at.CopyFrom(answer.as_of_at)
        gb.history.add(replace(made[-1], intensity_g_per_kwh=9.0 + pages, fetched_at_s=NOW_S + pages))
    assert (found, pages) == (made, 5), "as it was known at the first page"


async def test_a_range_cuts_at_its_ends_and_gaps_stay_gaps(stub, gb):
    made = filled(gb, 4)
    gb.history.add(reading(gb.series, NOW_S + 10 * HALF_HOUR_S, 50.0))
    request = at(pb.GetHistoryRequest(zone="GB"), "from_at", made[1].starts_at_s + 600)
    at(request, "to_at", NOW_S + 10.5 * HALF_HOUR_S)
    readings = (await ask(stub.GetHistory, request)).readings
    assert values(readings) == [101.0, 102.0, 103.0, 50.0]
    assert codec.from_proto(readings[0]).starts_at_s == made[1].starts_at_s + 600
    assert codec.from_proto(readings[-1]).ends_at_s == NOW_S + 10.5 * HALF_HOUR_S


async def test_long_intervals_are_not_cut_where_they_are_looked_up_piecewise(stub, gb):
    begin_s = NOW_S - 200 * HALF_HOUR_S
    estimated = {"quality": Quality.ESTIMATED}
    gb.history.add(reading(gb.series, begin_s, 77.0, ends_at_s=begin_s + 120 * HALF_HOUR_S))
    for i in range(120):  # worse than what covers them: not believed, but they are intervals
        gb.history.add(reading(gb.series, begin_s + i * HALF_HOUR_S + 60, 10.0 + i, **estimated))
    readings = (await ask(stub.GetHistory, pb.GetHistoryRequest(zone="GB"))).readings
    assert values(readings) == [77.0, 129.0]
    assert codec.from_proto(readings[0]).ends_at_s == begin_s + 120 * HALF_HOUR_S


async def test_what_was_known_then_and_every_version(stub, gb):
    made = filled(gb, 3)
    revised = replace(made[1], intensity_g_per_kwh=55.0, fetched_at_s=NOW_S - 60)
    gb.history.add(revised)
    assert values((await ask(stub.GetHistory, pb.GetHistoryRequest(zone="GB"))).readings) == [100.0, 55.0, 102.0]
    then = at(pb.GetHistoryRequest(zone="GB"), "as_of_at", NOW_S - 61)
    answer = await ask(stub.GetHistory, then)
    assert values(answer.readings) == [100.0, 101.0]
    assert answer.as_of_at == then.as_of_at
    versions = (await ask(stub.GetHistory, pb.GetHistoryRequest(zone="GB", revisions=True))).readings
    assert values(versions) == [100.0, 101.0, 55.0, 102.0]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: pb.GetHistoryRequest(zone="GB", limit=PAGE_MAX + 1), "limit = 10001: more than 10000. Remedy: ask"),
        (
            lambda: at(at(pb.GetHistoryRequest(zone="GB"), "from_at", NOW_S), "to_at", NOW_S),
            r"from_at = 17950\d+.0: not before to_at. Remedy: give from_at < to_at",
        ),
    ],
)
async def test_what_cannot_be_asked_of_a_history(stub, make, match):
    with pytest.raises(errors.InvalidInput, match=match):
        await ask(stub.GetHistory, make())


async def test_nothing_known_is_an_empty_page(stub):
    assert not (await ask(stub.GetHistory, pb.GetHistoryRequest(zone="GB"))).readings


# --- forecasts, ratios, scores ----------------------------------------------------------------------------------------


async def test_a_forecast_from_now_on_to_a_horizon_in_other_steps(stub, gb):
    gb.forecasts.forecast = forecast(gb.series, "blend")
    whole = (await ask(stub.GetForecast, pb.GetForecastRequest(zone="GB"))).forecast
    assert codec.from_proto(whole) == gb.forecasts.forecast
    near = (await ask(stub.GetForecast, pb.GetForecastRequest(zone="GB", horizon_s=3600, step_s=1800))).forecast
    assert [band.p50_g_per_kwh for band in near.bands] == [100.0, 101.0], "the half hour that has ended is left out"
    assert codec.from_proto(near).bands[0].starts_at_s == NOW_S
    assert codec.from_proto(near).issued_at_s == gb.forecasts.forecast.issued_at_s


async def test_the_time_of_a_replay_is_its_own(stub, gb):
    gb.speedup = 60.0
    begin_s = NOW_S
    bands = tuple(CarbonBand(begin_s + 60 * i, begin_s + 60 * (i + 1), 1, 2 + i, 30) for i in range(4))
    gb.forecasts.forecast = replace(forecast(gb.series, "blend"), bands=bands)
    answer = await ask(stub.GetForecast, pb.GetForecastRequest(zone="GB", horizon_s=2 * 3600, step_s=1800))
    starts = [band.starts_at_s - begin_s for band in codec.from_proto(answer.forecast).bands]
    assert starts == pytest.approx([0, 30, 60, 90]), "two hours of the trace are two minutes"


async def test_a_forecast_of_another_model(stub, gb):
    gb.forecasts.forecast = forecast(gb.series, "neso")
    gb.forecasts.archive.add(forecast(gb.series, "blend", 3))
    answer = await ask(stub.GetForecast, pb.GetForecastRequest(zone="GB", model="blend"))
    assert (answer.forecast.model, len(answer.forecast.bands)) == ("blend", 3)
    with pytest.raises(errors.NotFound, match=r"model = 'oracle': no such model. Remedy: use one of: blend"):
        await ask(stub.GetForecast, pb.GetForecastRequest(zone="GB", model="oracle"))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"horizon_s": -1}, r"horizon_s = -1.0: not a time ahead"),
        ({"horizon_s": float("nan")}, "horizon_s = nan: is not a number"),
        ({"horizon_s": float("inf")}, "horizon_s = inf: is not a number"),
        ({"step_s": 60}, r"step_s = 60.0: no such step. Remedy: give one of 300, 900, 1800, 3600"),
    ],
)
async def test_what_cannot_be_asked_of_a_forecast(stub, gb, fields, match):
    gb.forecasts.forecast = forecast(gb.series, "blend")
    with pytest.raises(errors.InvalidInput, match=match):
        await ask(stub.GetForecast, pb.GetForecastRequest(zone="GB", **fields))


async def test_why_there_is_no_forecast(stub, gb):
    with pytest.raises(errors.Unavailable, match="no forecast of GB: 6 h of the last 7 days are known"):
        await ask(stub.GetForecast, pb.GetForecastRequest(zone="GB"))
    gb.forecasts.forecast = forecast(gb.series, "blend", 1, HALF_HOUR_S)
    with pytest.raises(errors.Unavailable, match="the newest forecast of GB ended before now"):
        await ask(stub.GetForecast, pb.GetForecastRequest(zone="GB"))


async def test_ratios(stub, gb):
    with pytest.raises(errors.Unavailable, match="no ratio of GB: less than 24 h of the window 'expanding' are known"):
        await ask(stub.GetRatio, pb.GetRatioRequest(zone="GB"))
    gb.forecasts.ratio = lambda window, now_s: CarbonRatio(gb.series, 200.0, 0.9, window, 48, now_s)
    assert (await ask(stub.GetRatio, pb.GetRatioRequest(zone="GB"))).ratio.window == "expanding"
    assert (await ask(stub.GetRatio, pb.GetRatioRequest(zone="GB", window="same_hour"))).ratio.samples == 48
    with pytest.raises(errors.InvalidInput, match=r"window = '7d': no such window. Remedy: use one of: expanding, 30d"):
        await ask(stub.GetRatio, pb.GetRatioRequest(zone="GB", window="7d"))


async def test_scores(stub, gb):
    kept = tuple(
        CarbonScores(gb.series, model, (CarbonScore(3600.0, 5, 12.0),), 7, 1.0, 2.0, NOW_S) for model in ("a", "b")
    )
    gb.forecasts.scores = lambda: kept
    answer = await ask(stub.GetScores, pb.GetScoresRequest(zone="GB"))
    assert tuple(codec.from_proto(one) for one in answer.scores) == kept
    assert [one.model for one in (await ask(stub.GetScores, pb.GetScoresRequest(zone="GB", model="b"))).scores] == ["b"]
    with pytest.raises(errors.NotFound, match=r"model = 'c': no such model. Remedy: use one of: a, b"):
        await ask(stub.GetScores, pb.GetScoresRequest(zone="GB", model="c"))


# --- watching ---------------------------------------------------------------------------------------------------------


async def watched(stub, **fields):
    call = stub.WatchIntensity(pb.WatchIntensityRequest(zone="GB", **fields), timeout=TIMEOUT_S)
    try:
        return [(one.reading.intensity_g_per_kwh, one.why) async for one in call]
    except rpc.grpc.aio.AioRpcError as error:
        raise rpc.error_of(error) from error


async def test_a_watcher_hears_what_changes_something(stub, gb):
    steps = [(200.0, {}), (209.0, {}), (211.0, {}), (201.0, {}), (201.0, {"rung": 2, "quality": Quality.CARRIED})]
    gb.told = [reading(gb.series, NOW_S + i, value, **changes) for i, (value, changes) in enumerate(steps)]
    assert [value for value, _ in await watched(stub)] == [200.0, 209.0, 211.0, 201.0, 201.0]
    assert await watched(stub, change_ratio=0.05) == [
        (200.0, "first"),
        (211.0, "+5.5% since the last announcement"),
        (201.0, "quality measured -> carried"),
    ]
    assert [value for value, _ in await watched(stub, change_ratio=0.04, hysteresis_ratio=0)] == [200, 209, 201]


@pytest.mark.parametrize("field", ["change_ratio", "hysteresis_ratio"])
async def test_what_cannot_be_watched(stub, field):
    with pytest.raises(errors.InvalidInput, match=f"{field} = 5.0: not a ratio. Remedy: give 0..1"):
        await watched(stub, **{"change_ratio": 0.05, field: 5})


async def test_watchers_are_bounded_and_leave(stub, gb):
    gb.told, gb.stays = [reading(gb.series, NOW_S, 1.0)], True
    request = pb.WatchIntensityRequest(zone="GB")
    calls = [stub.WatchIntensity(request, timeout=TIMEOUT_S) for _ in range(2)]
    for call in calls:
        assert (await call.read()).why == "first"
    with pytest.raises(errors.Unavailable, match=r"2 watchers are open. Remedy: close some"):
        await watched(stub)
    calls[0].cancel()
    gb.stays = False
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                assert await watched(stub)
                break
            except errors.Unavailable:
                await asyncio.sleep(0.01)
    calls[1].cancel()
