"""One contract for every live provider, over real HTTP: documented shapes verbatim, and every failure that was seen.

The clock is injected: providers are told what time it is, so that documents of 2018 hold now.
"""

import asyncio
import datetime
import json
import math
import os
import ssl
from pathlib import Path

import pytest

from carbon_feed.core.fallback import FallbackLadder, FallbackView, ProviderAnswer, forecast_of
from carbon_feed.core.observation import Observation
from carbon_feed.core.validation import Cause, Refusal, check_forecast
from carbon_feed.providers import PROVIDERS, LiveProvider, PolledProvider, ProviderFailure, make_providers
from carbon_feed.settings import CarbonFeedSettings
from tests.support.carbon_answers import (
    CASES,
    CAUSES,
    EM_DOC,
    EM_DOC_S,
    EM_FORECAST_DOC,
    EVERYWHERE,
    NESO_DOC,
    NESO_DOC_S,
    NESO_ERROR,
    WT_DOC,
    WT_DOC_S,
    WT_LOGIN,
    Case,
    em_series,
    http_date,
    iso,
    neso,
    replaced,
    settings_of,
    watttime,
)
from tests.support.carbon_server import CarbonServer, Reply
from trefoil.core import errors
from trefoil.core.carbon import Factors, Method, Quality
from trefoil.core.units import HOUR_S
from trefoil.runtime import config

SECRET = "s3cret-value"


every_provider = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture
async def server():
    made = CarbonServer()
    await made.start()
    made.reply("/login", Reply(WT_LOGIN))
    yield made
    await made.stop()


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("CARBON_TEST_SECRET", SECRET)


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr("carbon_feed.providers.web.ANSWER_BYTES_MAX", 65_536)


@pytest.fixture
async def make(server):
    """Makes providers against the server, and closes them."""
    made = []

    def one(case: Case | str, **more) -> LiveProvider:
        case = CASES[case] if isinstance(case, str) else case
        provider = PROVIDERS[case.name](settings_of(case, server.url, **more), case.now_s)
        assert isinstance(provider, LiveProvider)
        made.append(provider)
        return provider

    yield one
    for provider in made:
        await provider.close()


async def failure_of(awaited) -> Refusal:
    with pytest.raises(ProviderFailure) as caught:
        await awaited
    assert SECRET not in str(caught.value)
    return caught.value.refusal


def said_by(case: Case, said: Observation | Refusal) -> ProviderAnswer:
    return ProviderAnswer(case.name, said) if isinstance(said, Observation) else ProviderAnswer(case.name, refusal=said)


async def ask(provider: LiveProvider, now_s: float) -> Observation | Refusal:
    try:
        return await provider.read(now_s)
    except ProviderFailure as failure:
        return failure.refusal


# What each one says, verbatim


@every_provider
async def test_the_documented_answer_is_read_as_it_stands(case, make, server):
    server.reply(case.path, Reply(case.document))
    said = await make(case).read(case.now_s)
    decision = FallbackLadder().decide(
        FallbackView(case.now_s, settings_of(case, "").series, (ProviderAnswer(case.name, said),))
    )
    assert decision.refusals == ()
    reading = decision.reading
    assert reading.intensity_g_per_kwh == pytest.approx(case.value_g)
    assert reading.starts_at_s <= case.now_s < reading.ends_at_s
    assert (reading.rung, reading.simulated, reading.provider) == (0, False, case.name)
    assert reading.api_version
    assert reading.observed_at_s <= case.now_s
    assert reading.series == settings_of(case, "").series
    assert SECRET not in " ".join(f"{asked.path} {asked.params}" for asked in server.asked), "no secret in a URL"


@every_provider
async def test_what_was_said_is_remembered_without_asking_again(case, make, server):
    server.reply(case.path, Reply(case.document))
    provider = make(case)
    said = await provider.read(case.now_s)
    asked = len(server.asked)
    assert provider.history(case.now_s, 10) == (said,)
    assert len(server.asked) == asked


@every_provider
async def test_a_forecast_is_whole_or_refused(case, make, server):
    provider, series = make(case), settings_of(case, "").series
    server.reply(case.path, Reply(case.whole))
    points = await provider.forecast(case.now_s, 24 * HOUR_S)
    assert all(point.quality is Quality.FORECAST for point in points)
    assert check_forecast(points, series, case.now_s, 24 * HOUR_S) is None
    assert forecast_of(case.name, points, series, case.now_s, 24 * HOUR_S).bands[0].p50_g_per_kwh > 0
    key = next(key for key in ("data", "forecast") if key in case.whole)
    server.reply(case.path, Reply({**case.whole, key: case.whole[key][:20]}))
    short = await provider.forecast(case.now_s, 48 * HOUR_S)
    assert check_forecast(short, series, case.now_s, 48 * HOUR_S).cause is Cause.TRUNCATED


# Every failure


@every_provider
@pytest.mark.parametrize("name", EVERYWHERE)
async def test_each_failure_has_its_name(case, name, make, server):
    server.reply(case.path, EVERYWHERE[name])
    web = {"timeout_s": 0.3} if EVERYWHERE[name].hang else {}
    refusal = await failure_of(make(case, web=web).read(case.now_s))
    if case.name == "electricity_maps" and name == '200 {"data": []}':
        assert refusal.cause is Cause.WRONG_SHAPE, "`latest` is one object"
        return
    assert refusal.cause == CAUSES[name]
    assert refusal.retry_after_s == {"503 with Retry-After": 120.0, "429 with Retry-After": 90.0}.get(name, 0.0)
    assert case.name in refusal.message


@every_provider
async def test_a_provider_recovers(case, make, server):
    server.reply(case.path, Reply("", 500), Reply(case.document))
    provider = make(case)
    assert (await ask(provider, case.now_s)).cause is Cause.SERVER_ERROR
    assert (await ask(provider, case.now_s)).intensity_g_per_kwh == pytest.approx(case.value_g)


@every_provider
async def test_nobody_listens(case, make, server):
    await server.stop()
    provider = make(case, **{case.name: {"base_url": "http://127.0.0.1:9"}})
    assert (await failure_of(provider.read(case.now_s))).cause is Cause.CONNECTION


@every_provider
async def test_a_retry_after_may_be_a_date(case, make, server):
    server.reply(case.path, Reply("", 429, {"retry-after": http_date(case.now_s + 300)}))
    assert (await failure_of(make(case).read(case.now_s))).retry_after_s == pytest.approx(300, abs=1)


@pytest.mark.parametrize("case", [CASES["electricity_maps"], CASES["watttime"]], ids=lambda case: case.name)
async def test_a_provider_that_repeats_our_secret_does_not_get_it_into_the_log(case, make, server):
    server.reply(case.path, Reply({"message": f"bad key {SECRET} first-token"}, 400))
    refusal = await failure_of(make(case).read(case.now_s))
    assert refusal.message.startswith(f"{case.name} answered 400 'bad key ***")
    assert case.name != "watttime" or "first-token" not in refusal.message


VALUE = {"neso": ("forecast", "actual"), "electricity_maps": ("carbonIntensity",), "watttime": ("value",)}
NONSENSE = {
    "null": (None, "null"),
    "0.0": (0.0, "all_zero"),
    "negative": (-5000, "negative"),  # marginal ones may be, a little
    "above 1500": (4000, "too_high"),
    "text": ("67", "wrong_shape"),
    "true": (True, "wrong_shape"),
    "NaN": (float("nan"), "not_a_number"),
    "jump": (20, "jump"),
}


async def refusal_of(case: Case, provider: LiveProvider, now_s: float, before_g: float | None = None) -> Refusal:
    """What the ladder says of a read, after one of another value."""
    series = settings_of(case, "").series
    decision = FallbackLadder().decide(FallbackView(now_s, series, (said_by(case, await ask(provider, now_s)),)))
    if before_g is not None:
        first = before(case, before_g)
        view = FallbackView(now_s, series, (said_by(case, await ask(provider, now_s)),), first, first)
        decision = FallbackLadder().decide(view)
        assert decision.reading.intensity_g_per_kwh == before_g
    return decision.refusals[0][1]


def before(case: Case, value_g: float):
    """A reading of a little while ago."""
    said = Observation(
        case.now_s - 600, case.now_s, value_g, Quality.MEASURED, case.name, "", "", case.now_s - 600, False
    )
    view = FallbackView(case.now_s - 100, settings_of(case, "").series, (ProviderAnswer(case.name, said),))
    return FallbackLadder().decide(view).reading


@every_provider
@pytest.mark.parametrize("name", NONSENSE)
async def test_each_nonsense_has_its_name(case, name, make, server):
    value, cause = NONSENSE[name]
    server.reply(case.path, Reply(replaced(case, **dict.fromkeys(VALUE[case.name], value))))
    refusal = await refusal_of(case, make(case), case.now_s, 450.0 if name == "jump" else None)
    assert refusal.cause == cause


@every_provider
async def test_an_interval_of_another_time_has_its_name(case, make, server):
    server.reply(case.path, Reply(case.document))
    assert (await refusal_of(case, make(case), case.now_s + 5 * HOUR_S)).cause is Cause.ENDED
    assert (await refusal_of(case, make(case), case.now_s - 5 * HOUR_S)).cause is Cause.FUTURE


# What is particular to each


async def test_neso_before_the_actual_is_there_says_forecast(make, server):
    server.reply("/intensity", Reply(neso()))
    said = await make("neso").read(NESO_DOC_S)
    assert (said.intensity_g_per_kwh, said.quality) == (266.0, Quality.FORECAST)
    assert server.asked[-1].path == "/intensity/2018-01-20T12:00Z/fw24h"
    assert server.asked[-1].headers["accept"] == "application/json"


async def test_neso_of_a_region_comes_as_an_object_or_in_a_list(make, server):
    whole = neso(regionid=13, shortname="London")
    server.reply("/regional", Reply(whole), Reply({"data": [whole["data"]]}), Reply(neso(regionid=12)))
    provider = make("neso", neso={"region_id": 13})
    for _ in range(2):
        said = await provider.read(NESO_DOC_S)
        assert (said.intensity_g_per_kwh, said.quality) == (266.0, Quality.FORECAST)
    assert server.asked[-1].path.endswith("/fw24h/regionid/13")
    assert (await refusal_of(CASES["neso"], provider, NESO_DOC_S)).cause is Cause.WRONG_ZONE


async def test_neso_of_a_postcode_may_be_refused_or_answer_nothing(make, server):
    provider = make("neso", neso={"postcode": "rg10"})
    server.reply("/regional", Reply(NESO_ERROR, 400), Reply(b""), Reply(neso(postcode="RG10")))
    assert (await failure_of(provider.read(NESO_DOC_S))).cause is Cause.BAD_REQUEST
    assert (await failure_of(provider.read(NESO_DOC_S))).cause is Cause.EMPTY
    assert (await provider.read(NESO_DOC_S)).intensity_g_per_kwh == 266.0
    assert server.asked[-1].path.endswith("/postcode/RG10")


async def test_neso_fw48h_that_ends_today_is_truncated(make, server):
    provider, series = make("neso"), settings_of(CASES["neso"], "").series
    server.reply("/intensity", Reply(neso(30)))
    points = await provider.forecast(NESO_DOC_S, 48 * HOUR_S)
    assert server.asked[-1].path.endswith("/fw48h")
    refusal = forecast_of("neso", points, series, NESO_DOC_S, 48 * HOUR_S)
    assert refusal.cause is Cause.TRUNCATED
    assert "30 points reach 14.8 h of 48 h" in refusal.message


async def test_neso_gives_the_past_in_pieces_of_14_days(make, server):
    server.reply("/intensity", Reply(neso(actual=250)))
    points = await make("neso").past(NESO_DOC_S // 1800 * 1800, NESO_DOC_S + 30 * 24 * HOUR_S)
    assert len(server.asked) == 3
    assert len(points) == 97
    assert {point.quality for point in points} == {Quality.ESTIMATED}


@pytest.mark.parametrize(("version", "switch"), [("v4", ("disableCallerLookup", "true")),
                                                 ("v3", ("shouldUseFallbackCallerLookup", "false"))])  # fmt: skip
async def test_electricity_maps_never_takes_our_own_zone(version, switch, make, server):
    server.reply(f"/{version}/carbon-intensity/latest", Reply({**EM_DOC, "zone": "NL"}))
    provider = make("electricity_maps", electricity_maps={"api_version": version})
    assert (await refusal_of(CASES["electricity_maps"], provider, EM_DOC_S)).cause is Cause.WRONG_ZONE
    asked = server.asked[-1]
    assert asked.params[switch[0]] == switch[1]
    assert asked.params["zone"] == "FR"
    assert asked.params["emissionFactorType"] == "lifecycle"
    assert asked.headers["auth-token"] == SECRET


async def test_electricity_maps_estimates_and_factors_are_told(make, server):
    estimated = {**EM_DOC, "isEstimated": True, "estimationMethod": "TIME_SLICER_AVERAGE"}
    server.reply("/v4/", Reply(estimated), Reply({**EM_DOC, "emissionFactorType": "direct"}))
    provider = make("electricity_maps")
    said = await provider.read(EM_DOC_S)
    assert (said.quality, said.estimation_method) == (Quality.ESTIMATED, "TIME_SLICER_AVERAGE")
    assert (await refusal_of(CASES["electricity_maps"], provider, EM_DOC_S)).cause is Cause.WRONG_SERIES


@pytest.mark.parametrize("key", ["data", "history", "forecast"])
async def test_electricity_maps_lists_have_three_names(key, make, server):
    server.reply("/v4/", Reply(em_series(key)))
    points = await make("electricity_maps").past(EM_DOC_S // 3600 * 3600, EM_DOC_S + 24 * HOUR_S)
    assert len(points) == 25


async def test_electricity_maps_gives_a_free_account_the_last_day_of_the_past(make, server):
    server.reply("/v4/carbon-intensity/past-range", Reply({"error": "not in your plan"}, 403))
    server.reply("/v4/carbon-intensity/history", Reply(em_series("history", 24, EM_DOC_S - 23 * HOUR_S)))
    provider = make("electricity_maps")
    for _ in range(2):
        assert len(await provider.past(EM_DOC_S - 14 * 24 * HOUR_S, EM_DOC_S)) == 24
    paths = [asked.path.rpartition("/")[2] for asked in server.asked]
    assert paths == ["past-range", "history", "history"], "what is not in the plan is asked for once"


async def test_electricity_maps_documented_forecast_is_read(make, server):
    server.reply("/v4/carbon-intensity/forecast", Reply(EM_FORECAST_DOC))
    at_s = datetime.datetime(2022, 5, 20, 8, 10, tzinfo=datetime.UTC).timestamp()
    (point,) = await make("electricity_maps").forecast(at_s, 24 * HOUR_S)
    assert (point.intensity_g_per_kwh, point.ends_at_s - point.starts_at_s) == (326.0, 3600.0)
    assert server.asked[-1].params["horizonHours"] == "24"


def logins(server):
    return sum(asked.path == "/login" for asked in server.asked)


async def test_watttime_logs_in_once_and_again_before_the_token_dies(make, server):
    server.reply("/v3/forecast", Reply(watttime(500)))
    provider = make("watttime")
    for minutes in (0, 5, 20):
        await provider.read(WT_DOC_S + 60 * minutes)
    assert logins(server) == 1
    assert server.asked[0].headers["authorization"].startswith("Basic ")
    assert server.asked[1].headers["authorization"] == "Bearer first-token"
    await provider.read(WT_DOC_S + 60 * 26)
    assert logins(server) == 2


async def test_watttime_a_401_is_answered_by_one_new_login(make, server):
    server.reply("/v3/forecast", Reply(WT_DOC), Reply("", 401), Reply(WT_DOC), Reply("", 401))
    provider = make("watttime")
    await provider.read(WT_DOC_S)
    await provider.read(WT_DOC_S)
    assert logins(server) == 2
    assert (await failure_of(provider.read(WT_DOC_S))).cause is Cause.UNAUTHORISED
    assert logins(server) == 3, "once, and then it is a failure"


async def test_watttime_a_refused_login_is_not_repeated(make, server):
    server.reply("/login", Reply({"error": "wrong password"}, 401))
    assert (await failure_of(make("watttime").read(WT_DOC_S))).cause is Cause.UNAUTHORISED
    assert logins(server) == len(server.asked) == 1


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (watttime(value=0.0), Cause.ALL_ZERO),
        (watttime(region="PJM_DC"), Cause.WRONG_ZONE),
        (watttime(units="g_co2_per_kwh"), Cause.WRONG_UNIT),
        (watttime(signal_type="co2_aoer"), Cause.WRONG_SERIES),
        ({"data": watttime()["data"]}, Cause.WRONG_SHAPE),
    ],
    ids=["0.0 for ten hours", "wrong region", "wrong unit", "wrong signal", "no meta"],
)
async def test_watttime_particular_failures(answer, cause, make, server):
    server.reply("/v3/", Reply(answer))
    assert (await refusal_of(CASES["watttime"], make("watttime"), WT_DOC_S)).cause is cause


async def test_watttime_converts_and_notes(make, server):
    server.reply("/v3/", Reply(WT_DOC))
    said = await make("watttime").read(WT_DOC_S)
    assert said.intensity_g_per_kwh == pytest.approx(394.6, abs=0.05)
    assert said.estimation_method == "binned_regression 2023-03-01, imputed, warning EXAMPLE_WARNING"
    assert (said.method, said.factors) == (Method.MARGINAL, Factors.DIRECT)
    curtailed = watttime()
    curtailed["data"][0]["value"] = 0.0
    server.reply("/v3/", Reply(curtailed))
    assert (await make("watttime").read(WT_DOC_S)).intensity_g_per_kwh == 0.0


def metered(at_s, own_w, site_w):
    return json.dumps({"at": iso(at_s), "own_w": own_w, "site_w": site_w})


async def test_on_site_power_dilutes_the_grid(server, tmp_path):
    server.reply("/intensity", Reply(neso()))
    case, meter = CASES["neso"], tmp_path / "meter.json"
    settings = settings_of(case, server.url).model_dump()
    settings |= {"provider": "override", "override": {"base": "neso", "meter_file": str(meter)}}
    provider = PROVIDERS["override"](CarbonFeedSettings.model_validate(settings), case.now_s)
    assert (await failure_of(provider.read(case.now_s))).cause is Cause.UNAVAILABLE
    for text, cause in (
        ("{", Cause.NOT_JSON),
        ("[" * 4000, Cause.NOT_JSON),
        (metered(case.now_s, math.nan, 1), Cause.NOT_JSON),
        (metered(case.now_s, 1, 10**400), Cause.TOO_HIGH),
        (metered(case.now_s, -1, 1), Cause.NEGATIVE),
        (metered(case.now_s, None, 1), Cause.NULL),
        (metered(case.now_s - 3600, 1, 1), Cause.ENDED),
    ):
        meter.write_text(text)
        assert (await failure_of(provider.read(case.now_s))).cause is cause
    meter.unlink()
    os.mkfifo(meter)
    assert (await failure_of(provider.read(case.now_s))).cause is Cause.UNAVAILABLE
    meter.unlink()
    meter.write_text(metered(case.now_s, 750, 3000))
    said = await provider.read(case.now_s)
    assert said.intensity_g_per_kwh == pytest.approx(0.75 * 266)
    assert said.estimation_method.startswith("0.250 own power at 0 g/kWh, the rest neso: 266.00 g/kWh")
    assert said.provider == "override+neso"
    await provider.close()


# Settings, secrets, the network


@pytest.mark.parametrize(
    ("case", "more", "named"),
    [
        ("neso", {"factors": "lifecycle"}, "direct factors only"),
        ("neso", {"zone": "FR"}, "Great Britain only"),
        ("electricity_maps", {"method": "marginal"}, "average intensities only"),
        ("electricity_maps", {"zone": "demo"}, "no name for it in the zone registry"),
        ("electricity_maps", {"electricity_maps": {"token": None}}, "no secret"),
        ("electricity_maps", {"electricity_maps": {"token": "env:CARBON_ABSENT"}}, "is empty"),
        ("electricity_maps", {"electricity_maps": {"token": "file:/absent"}}, "cannot be read"),
        ("watttime", {"factors": "lifecycle"}, "direct emissions only"),
        ("watttime", {"zone": "FR"}, "no name for it in the zone registry"),
    ],
)
def test_what_cannot_work_stops_the_start_with_a_remedy(case, more, named):
    with pytest.raises(errors.SettingError, match=named) as caught:
        PROVIDERS[case](settings_of(CASES[case], "http://127.0.0.1:9", **more), 0.0)
    assert "Remedy: " in str(caught.value)


def test_a_secret_in_the_settings_is_refused_and_not_shown():
    with pytest.raises(errors.SettingError) as caught:
        config.load(CarbonFeedSettings, overrides={"electricity_maps.token": SECRET})
    assert "file:/path or env:NAME" in str(caught.value)
    assert SECRET not in str(caught.value)
    shown = config.masked(settings_of(CASES["watttime"], "", web={"proxy": f"http://u:{SECRET}@127.0.0.1:9"}))
    assert SECRET not in str(shown)


async def test_a_secret_of_a_file_is_read_anew(make, server, tmp_path):
    key = tmp_path / "key"
    key.write_text("one\n")
    key.chmod(0o600)
    server.reply("/v4/", Reply(EM_DOC))
    provider = make("electricity_maps", electricity_maps={"token": f"file:{key}"})
    await provider.read(EM_DOC_S)
    key.write_text("two\n")
    await provider.read(EM_DOC_S)
    assert [asked.headers["auth-token"] for asked in server.asked] == ["one", "two"]


async def test_a_proxy_is_used_and_the_environment_only_when_asked(make, server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    server.reply("/intensity", Reply(NESO_DOC))
    assert (await make("neso").read(NESO_DOC_S)).intensity_g_per_kwh == 263.0
    through = make("neso", web={"proxy": "environment"})
    assert (await failure_of(through.read(NESO_DOC_S))).cause is Cause.CONNECTION
    server.reply("http://elsewhere.invalid/intensity", Reply(NESO_DOC))
    proxied = make("neso", neso={"base_url": "http://elsewhere.invalid"}, web={"proxy": server.url})
    assert (await proxied.read(NESO_DOC_S)).intensity_g_per_kwh == 263.0


async def test_a_ca_bundle_is_what_is_trusted():
    here = Path(__file__).parent.parent / "support"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(here / "localhost.crt", here / "localhost.key")
    secure = CarbonServer()
    await secure.start(context)
    secure.reply("/intensity", Reply(NESO_DOC))
    url = secure.url.replace("127.0.0.1", "localhost")
    for bundle, cause in ((None, Cause.TLS), (here / "localhost.crt", None)):
        settings = settings_of(CASES["neso"], url, web={"ca_bundle": bundle, "timeout_s": 3.0})
        provider = PROVIDERS["neso"](settings, 0.0)
        said = await ask(provider, NESO_DOC_S)
        assert (said.cause if isinstance(said, Refusal) else None) is cause
        await provider.close()
    await secure.stop()


# Never waited for, never too often


async def polled_answer(polled: PolledProvider, now_s: float) -> Observation | Refusal:
    await ask(polled, now_s)
    await polled.wait_answered()
    return await ask(polled, now_s)


async def test_readers_never_wait_and_one_question_is_under_way(make, server):
    server.reply("/intensity", Reply(hang=True))
    polled = PolledProvider(make("neso", web={"timeout_s": 60.0}), "seed")
    async with asyncio.timeout(30.0):
        for second in range(50):
            assert (await ask(polled, NESO_DOC_S + second)).message == "waiting for the first answer"
        while not server.asked:
            await asyncio.sleep(0.01)
    assert polled.polling.asked == len(server.asked) == 1
    await polled.close()


async def test_the_next_half_hour_of_an_answer_needs_no_question(make, server):
    server.reply("/intensity", Reply(neso(actual=None)))
    polled = PolledProvider(make("neso"), "seed")
    first = await polled_answer(polled, NESO_DOC_S + 1100)
    assert polled.polling.next_s(NESO_DOC_S + 1100) >= NESO_DOC_S + 1400
    then = await ask(polled, NESO_DOC_S + 1205)  # 12:30:05, and the next question is at 12:33
    assert (then.starts_at_s, then.quality) == (first.ends_at_s, Quality.FORECAST)
    assert polled.polling.asked == 1
    await polled.close()


async def test_one_value_at_a_time_is_asked_for_when_its_interval_ends(make, server):
    server.reply("/v4/", Reply(EM_DOC))
    polled = PolledProvider(make("electricity_maps"), "seed")
    await polled_answer(polled, EM_DOC_S + 2000)  # 12:53:20
    assert EM_DOC_S + 2400 <= polled.polling.next_s(EM_DOC_S + 2000) <= EM_DOC_S + 2410
    await polled.close()


async def test_it_is_asked_every_poll_and_less_often_while_it_fails(make, server):
    server.reply("/intensity", Reply(neso()))
    polled = PolledProvider(make("neso"), "seed")
    await polled_answer(polled, NESO_DOC_S)
    for seconds in range(1, 300, 10):
        assert (await polled_answer(polled, NESO_DOC_S + seconds)).intensity_g_per_kwh == 266.0
    assert polled.polling.asked == 1
    assert 300 <= polled.polling.next_s(NESO_DOC_S + 291) - NESO_DOC_S <= 330
    server.reply("/intensity", Reply("", 500))
    waits, now_s = [], NESO_DOC_S + 291
    for _ in range(8):
        now_s = polled.polling.next_s(now_s)
        said = await polled_answer(polled, now_s)
        if now_s < NESO_DOC_S // 1800 * 1800 + 1800:
            assert said.intensity_g_per_kwh == 266.0, "what was said of this half hour holds on"
            assert polled.refusal.cause is Cause.SERVER_ERROR
        else:
            assert said.cause is Cause.SERVER_ERROR
        waits.append(polled.polling.next_s(now_s) - now_s)
    assert waits == sorted(waits) or max(waits) <= 1200 * 1.1
    assert 30 <= waits[0] <= 33
    assert 1200 <= waits[-1] <= 1320
    server.reply("/intensity", Reply("", 429, {"retry-after": "7200"}))
    now_s = polled.polling.next_s(now_s)
    await polled_answer(polled, now_s)
    assert polled.polling.next_s(now_s) - now_s == 7200.0, "what it asks us to wait is waited"
    await polled.close()


def test_what_is_at_hand_is_not_polled():
    share = {"own_share": 0.5, "base": "trace"}
    (replay,) = make_providers(CarbonFeedSettings.model_validate({"provider": "override", "override": share}), 0.0)
    assert not isinstance(replay, PolledProvider)
    (live,) = make_providers(settings_of(CASES["neso"], "http://127.0.0.1:9"), 0.0)
    assert isinstance(live, PolledProvider)


def test_a_second_provider_of_another_kind_stops_the_start():
    case, url = CASES["electricity_maps"], "http://127.0.0.1:9"
    with pytest.raises(errors.SettingError, match="direct factors only"):
        make_providers(settings_of(case, url, secondary="neso", zone="GB"), 0.0)
    first, second = make_providers(settings_of(case, url, secondary="neso", zone="GB", factors="direct"), 0.0)
    assert (first.name, second.name) == ("electricity_maps", "neso")
