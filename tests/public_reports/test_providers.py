"""A row without a value costs that row; each use is judged by what it needs; no address is asked in bursts."""

import asyncio
import copy

import pytest

from carbon_feed.core.fallback import forecast_of
from carbon_feed.core.history import History
from carbon_feed.core.validation import Refusal, check_observation
from carbon_feed.providers import PROVIDERS
from carbon_feed.providers.base import ProviderFailure
from carbon_feed.reading.background_fetch import BackgroundFetcher
from carbon_feed.settings import CarbonFeedSettings
from controller.observe.core.carbon_inputs import plannable_reading
from tests.public_reports.providers import ROWS
from tests.support.carbon_answers import EM_DOC_S, NESO_DOC_S, WT_DOC_S, WT_LOGIN, em_series, neso, watttime
from tests.support.carbon_server import CarbonServer, Reply
from trefoil.cli.carbon.feed_commands import _health_rows
from trefoil.core.carbon import CarbonReading, Rung, ZoneHealth
from trefoil.core.units import DAY_S, HOUR_S

ANSWERS = {
    "neso": (NESO_DOC_S, "/intensity", neso(), {"zone": "GB", "factors": "direct"}),
    "electricity_maps": (EM_DOC_S, "/v4/carbon-intensity/", em_series(), {"zone": "FR"}),
    "watttime": (WT_DOC_S, "/v3/", watttime(), {"zone": "US-CAL-CISO", "method": "marginal", "factors": "direct"}),
}
SECRETS = {"neso": (), "electricity_maps": ("token",), "watttime": ("username", "password")}


@pytest.fixture
async def server(monkeypatch):
    monkeypatch.setenv("REPORT_SECRET", "secret")
    made = CarbonServer()
    await made.start()
    made.reply("/login", Reply(WT_LOGIN))
    yield made
    await made.stop()


def settings(name, server, **web):
    own = {"base_url": server.url, **dict.fromkeys(SECRETS[name], "env:REPORT_SECRET")}
    return CarbonFeedSettings.model_validate(
        {**ANSWERS[name][3], "provider": name, name: own, "web": {"gap_s": 0, **web}}
    )


def with_rows(name, places, value):
    answer = copy.deepcopy(ANSWERS[name][2])
    rows = next(one for one in answer.values() if isinstance(one, list))
    for place in places:
        if name == "neso":
            rows[place]["intensity"] |= {"forecast": value, "actual": value}
        else:
            rows[place]["value" if name == "watttime" else "carbonIntensity"] = value
    return answer


async def used(name, use, provider, series, now_s):
    """What one use makes of the answer: a value, a number of points, or a refusal."""
    try:
        if use == "past":
            return len(await provider.past(now_s // 1800 * 1800, now_s + 4 * DAY_S))
        if use == "reading":
            point = await provider.read(now_s)
            return check_observation(point, series, now_s) or point.intensity_g_per_kwh
        points = await provider.forecast(now_s, 24 * HOUR_S)
    except ProviderFailure as failure:
        return failure.refusal
    found = forecast_of(name, points, series, now_s, 24 * HOUR_S)
    return found if isinstance(found, Refusal) else len(found.bands)


@pytest.mark.parametrize("report", [one for one in ROWS if one.input[:2] != ("electricity_maps", "reading")], ids=str)
async def test_a_row_without_a_value_costs_that_row(report, server):
    name, use, places, value = report.input
    now_s, path, _, _ = ANSWERS[name]
    server.reply(path, Reply(with_rows(name, places, value)))
    wanted = settings(name, server)
    provider = PROVIDERS[name](wanted, now_s)
    found = await used(name, use, provider, wanted.series, now_s)
    await provider.close()
    if isinstance(report.expected, str):
        assert isinstance(found, Refusal)
        assert found.cause == report.expected
    else:
        assert found == pytest.approx(report.expected)
    nulls = 0 if isinstance(value, int) else len(places)
    assert provider.left_out == nulls


TIMES = {"neso": ("from", "to"), "electricity_maps": ("datetime",), "watttime": ("point_time",)}


@pytest.mark.parametrize(("name", "time"), [(name, time) for name, times in TIMES.items() for time in times])
@pytest.mark.parametrize("broken", ["row", "null", "absent", "", "n/a", 0, 5])
async def test_a_null_row_or_one_without_a_time_costs_that_row(name, time, broken, server):
    now_s, path, _, _ = ANSWERS[name]
    answer = copy.deepcopy(ANSWERS[name][2])
    rows = next(one for one in answer.values() if isinstance(one, list))
    if broken == "row":
        rows[3] = None
    elif broken == "absent":
        del rows[3][time]
    else:
        rows[3][time] = None if broken == "null" else broken
    server.reply(path, Reply(answer))
    wanted = settings(name, server)
    provider = PROVIDERS[name](wanted, now_s)
    assert await used(name, "forecast", provider, wanted.series, now_s) == len(rows) - 1
    assert provider.left_out == 1
    await provider.close()


async def test_later_pieces_of_the_past_are_read_behind_an_empty_one(server):
    now_s = NESO_DOC_S
    whole, empty = neso(count=96, start_s=now_s - 8 * DAY_S, actual=250), with_rows("neso", range(97), None)
    newer = neso(count=96, start_s=now_s - 3 * DAY_S, actual=240)
    server.reply("/intensity", Reply(whole), Reply(empty), Reply(newer), Reply(newer))
    wanted = settings("neso", server)
    provider = PROVIDERS["neso"](wanted, now_s)
    found = await BackgroundFetcher(wanted, provider).past(now_s, History(wanted.series), 0)
    await provider.close()
    assert len(server.asked) == 4, "fourteen days in pieces of four"
    assert {reading.intensity_g_per_kwh for reading in found} == {240.0}


async def test_no_address_is_asked_four_times_in_a_second(server):
    """A start asks for the reading, the forecast and the past in pieces; zones of one process share an address."""
    server.reply("/", Reply(neso()))
    asked_s = []
    loop = asyncio.get_running_loop()
    providers = [PROVIDERS["neso"](settings("neso", server, gap_s=0.5), NESO_DOC_S) for _ in range(2)]

    async def start(provider):
        for _ in range(3):
            await provider.read(NESO_DOC_S)
            asked_s.append(loop.time())

    await asyncio.gather(*map(start, providers))
    for provider in providers:
        await provider.close()
    assert len(server.asked) == 6
    assert max(sum(1 for at in asked_s if begin <= at < begin + 0.95) for begin in asked_s) < 4
    assert asked_s[-1] - asked_s[0] > 1.9


def test_health_without_a_reading_is_not_normal():
    rows = _health_rows(ZoneHealth(rung=int(Rung.EXPIRED), fallback_reason="no reading yet (null)", hard_stale=True))
    assert rows["rung"] == "NO READING YET"
    assert (rows["why"], rows["age"], rows["holds until"]) == ("no reading yet (null)", "-", "-")
    assert "normal" in _health_rows(ZoneHealth(ends_at_s=1e9))["rung"]


def test_plans_take_a_negative_intensity_for_zero():
    reading = CarbonReading(intensity_g_per_kwh=-120.0)
    assert plannable_reading(reading, None, frozenset(), 400.0, 0.0).reading.intensity_g_per_kwh == 0.0
    assert plannable_reading(reading, reading, {"normal"}, 400.0, 0.0).reading.intensity_g_per_kwh == 0.0
