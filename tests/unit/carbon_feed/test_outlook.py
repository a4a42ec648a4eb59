"""A zone's forecasts on a made-up clock: what is issued, kept, scored, served and written, and why there is none."""

import asyncio
import itertools
import math
import re
import time
from dataclasses import replace

import pytest

from carbon_feed.core.history import History
from carbon_feed.core.observation import Observation
from carbon_feed.core.validation import Cause
from carbon_feed.history.core.ratio import WINDOWS
from carbon_feed.providers.base import ProviderFailure
from carbon_feed.reading.forecasts import ISSUE_MIN_S, ZoneForecasts
from carbon_feed.reading.zone_metrics import ZoneMetrics
from carbon_feed.settings import CarbonFeedSettings, ForecastSettings
from tests.unit.carbon_feed.test_forecast import duck
from trefoil.core import errors
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Series
from trefoil.core.common import Basis
from trefoil.runtime.fenced import Delete, Put
from trefoil.runtime.keys import Keys
from trefoil.runtime.telemetry import Metrics

SERIES = Series("GB", Method.AVERAGE, Factors.DIRECT)
HOUR_S, DAY_S, WINDOW_S = 3600.0, 86_400.0, 1800.0
T0_S = 1_795_000_000.0 // DAY_S * DAY_S
TRUTH = duck(70)  # from 30 days before T0
KEYS = Keys("c")


def truth(at_s):
    return float(TRUTH[int((at_s - T0_S) // HOUR_S) + 30 * 24])


class Grid:
    """A provider with half hours, a forecast of 48 h that is 6 g/kWh too high or too low, and a past."""

    name, speedup, licence, poll_s = "neso", 1.0, "CC BY 4.0", 300.0

    def __init__(self):
        self.reach_s = 48 * HOUR_S
        self.fails: ProviderFailure | None = None
        self.forecasts_asked = self.pasts_asked = 0
        self.spike_s = None
        self.fails_from_s = math.inf

    def window(self, at_s, value, quality, now_s):
        return Observation(
            at_s, at_s + WINDOW_S, value, quality, "neso", "", "", at_s, False, True, Method.AVERAGE, Factors.DIRECT
        )

    def reading(self, at_s):
        return CarbonReading(SERIES, at_s, at_s + WINDOW_S, truth(at_s), Quality.ESTIMATED, "neso", observed_at_s=at_s)

    async def read(self, now_s):
        raise AssertionError("an outlook does not ask for what holds now")

    def history(self, now_s, count_max):
        return ()

    def held(self, now_s):
        return None

    async def forecast(self, now_s, horizon_s):
        self.forecasts_asked += 1
        if self.fails is not None:
            raise self.fails
        begin_s, off = now_s // WINDOW_S * WINDOW_S, 6.0 * (-1) ** self.forecasts_asked
        count = int(min(self.reach_s, horizon_s) / WINDOW_S)
        starts = [begin_s + i * WINDOW_S for i in range(count)]
        return tuple(self.window(s, max(1.0, truth(s) + off), Quality.FORECAST, now_s) for s in starts)

    async def past(self, begin_s, end_s):
        self.pasts_asked += 1
        if self.fails is not None:
            raise self.fails
        if end_s > self.fails_from_s:
            raise ProviderFailure(Cause.SERVER_ERROR, "500")
        starts = [begin_s // WINDOW_S * WINDOW_S + i * WINDOW_S for i in range(int((end_s - begin_s) / WINDOW_S) + 1)]
        return tuple(
            self.window(
                s,
                2.0 if s == self.spike_s else truth(s),
                Quality.ESTIMATED if s + WINDOW_S <= end_s else Quality.FORECAST,
                end_s,
            )
            for s in starts
        )

    left_out = 0

    def metered(self, spend):
        return

    async def close(self):
        return


class World:
    """A zone's forecasts with what the feed would bring."""

    def __init__(self, folder, grid=None, **outlook):
        self.grid = grid or Grid()
        settings = CarbonFeedSettings(
            state_dir=folder,
            zone="GB",
            factors="direct",
            provider="neso",
            outlook=ForecastSettings(**{"provider_every_s": HOUR_S, **outlook}),
        )
        self.history = History(SERIES)
        self.metrics = Metrics("carbon_feed")
        self.reading: CarbonReading | None = None
        self.forecasts = ZoneForecasts(
            settings, self.grid, self.history, lambda: self.reading, ZoneMetrics(self.metrics, settings)
        )

    async def at(self, hour, change=True):
        now_s = T0_S + hour * HOUR_S + 60.0
        start_s = now_s // WINDOW_S * WINDOW_S
        self.reading = CarbonReading(
            SERIES, start_s, start_s + WINDOW_S, truth(start_s), Quality.FORECAST, "neso", observed_at_s=start_s
        )
        changed = await self.forecasts.refresh(now_s)
        assert changed is change or change is None
        return now_s


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


async def test_at_the_start_the_past_is_asked_for_and_everything_follows_from_it(world):
    now_s = await world.at(0)
    outlook = world.forecasts
    assert len(world.history) == 14 * 48
    assert world.history.newest().quality == Quality.ESTIMATED, "a forecast of the past is not past"
    forecast = outlook.forecast
    assert (forecast.model, forecast.issued_at_s, outlook.forecast_reason) == ("neso", now_s, "")
    assert forecast.provenance.licence == "CC BY 4.0"
    own = outlook.archive.latest("blend")
    assert len(own.bands) == 96
    assert own.provenance.basis == Basis.MODELLED
    assert set(outlook.archive.models) == {"blend", "climatology", "persistence", "neso"}
    for window in WINDOWS:
        found = outlook.ratio(window, now_s)
        assert found.window == window
        assert found.cir == pytest.approx(world.reading.intensity_g_per_kwh / found.aci_g_per_kwh)
    with pytest.raises(errors.SettingError, match="same_hour"):
        outlook.ratio("forever", now_s)


async def test_once_a_step_and_when_a_step_more_is_known_and_not_at_every_look(world):
    issued = []
    for minute in range(0, 181, 5):
        await world.at(minute / 60, change=None)
        newest = world.forecasts.archive.latest("blend").issued_at_s
        if not issued or issued[-1] != newest:
            issued.append(newest)
    minutes = [round((at - T0_S) / 60) for at in issued]
    assert [minute for minute in minutes if minute % 60 == 1] == [1, 61, 121, 181]
    assert len(minutes) == 6, "and twice when the past was looked at, which is stretched by up to a tenth"
    assert world.grid.forecasts_asked <= 3
    assert world.grid.pasts_asked <= 4 + 2, "four pieces at the start"
    assert not await world.forecasts.refresh(T0_S + 181 * 60.0), "not twice in a quarter of a second"


async def test_a_truncated_forecast_is_replaced_by_ours_and_says_why_until_it_is_whole_again(world):
    world.grid.reach_s = 15 * HOUR_S
    await world.at(0)
    ours = world.forecasts.forecast
    assert ours.model == "blend"
    assert ours.fallback_reason.startswith("neso truncated: 30 points reach ")
    text = world.metrics.text()
    assert 'trefoil_carbon_provider_errors_total{cause="truncated",provider="neso"' in text
    world.grid.reach_s = 48 * HOUR_S
    await world.at(1)
    assert (world.forecasts.forecast.model, world.forecasts.forecast.fallback_reason) == ("neso", "")


async def test_a_forecast_that_gets_old_gives_way_to_ours(world):
    await world.at(0)
    world.grid.fails = ProviderFailure(Cause.SERVER_ERROR, "500")
    await world.at(2)
    assert world.forecasts.forecast.model == "neso"
    await world.at(4)
    assert world.forecasts.forecast.model == "blend"
    assert world.forecasts.forecast.fallback_reason.startswith("neso server_error: 500")


@pytest.mark.parametrize(
    ("failure", "next_h"),
    [
        (ProviderFailure(Cause.FORBIDDEN, "not in your plan"), 6.0),
        (ProviderFailure(Cause.RATE_LIMITED, "slow", retry_after_s=7 * HOUR_S), 7.0),
        (ProviderFailure(Cause.TIMEOUT, "late"), 0.1),
    ],
)
async def test_after_a_failure_it_is_asked_again_when_that_makes_sense(world, failure, next_h):
    world.grid.fails = failure
    await world.at(0, change=None)
    assert (world.grid.forecasts_asked, world.grid.pasts_asked) == (1, 1)
    assert world.forecasts.forecast is None
    assert "nothing is known of the past" in world.forecasts.forecast_reason
    await world.at(next_h * 0.95, change=None)
    assert world.grid.forecasts_asked == 1
    await world.at(next_h * 1.11 + 0.01, change=None)
    assert world.grid.forecasts_asked == 2


async def test_what_was_issued_is_scored_shown_and_gives_providers_their_bands(world):
    for hour in range(0, 72):
        await world.at(hour)
    scores = {one.model: one for one in world.forecasts.scores()}
    assert set(scores) == {"blend", "climatology", "persistence", "neso"}
    theirs = scores["neso"]
    assert theirs.scores[5].mae_g_per_kwh == pytest.approx(6.0)
    assert theirs.scores[5].samples >= 60
    assert scores["blend"].scores[95].samples == 0, "nobody knows yet"
    band = world.forecasts.forecast.bands[10]
    assert band.p10_g_per_kwh == pytest.approx(band.p50_g_per_kwh - 6.0, abs=0.5)
    assert band.p90_g_per_kwh == pytest.approx(band.p50_g_per_kwh + 6.0, abs=0.5)
    text = world.metrics.text()
    shown = re.search(r'trefoil_carbon_forecast_mae_grams_per_kwh{day="1",model="neso",.*} (\S+)', text)
    assert float(shown.group(1)) == pytest.approx(6.0)
    assert 'trefoil_carbon_forecasts_issued_total{model="blend"' in text
    assert 'trefoil_carbon_ratio{simulated="false",window="same_hour"' in text


async def test_a_restart_goes_on_where_the_last_process_was(world, tmp_path):
    for hour in range(30):
        await world.at(hour)
    before = {one.model: one for one in world.forecasts.scores()}
    page = sorted(world.forecasts._files.folder.glob("*.jsonl"))[-1]
    with page.open("ab") as file:
        file.write(b'{"format":1,"model":"ble')  # killed while it wrote

    again = World(tmp_path)
    again.grid.fails = ProviderFailure(Cause.CONNECTION, "nobody there")
    await again.at(30)
    assert again.forecasts.forecast.model == "neso", "the last process's, which is an hour old"
    again.grid.fails = None
    await again.at(31)
    after = {one.model: one for one in again.forecasts.scores()}
    assert after["blend"].issued_from_at_s == before["blend"].issued_from_at_s
    assert after["neso"].forecasts == before["neso"].forecasts + 1
    assert after["neso"].scores[3].mae_g_per_kwh == pytest.approx(6.0, abs=0.1), "kept to a tenth of a gram"
    row = next(iter(again.forecasts.archive.rows(again.history)))
    assert row["actual_g_per_kwh"] == pytest.approx(truth(row["starts_at_s"]))


async def test_a_disk_that_refuses_stops_nothing(tmp_path):
    (tmp_path / "forecasts-GB-average-direct").write_text("a file where a folder should be")
    world = World(tmp_path)
    await world.at(0)
    assert world.forecasts.forecast is not None


async def test_only_what_has_changed_is_written_and_all_of_it_after_redis_was_emptied(world):
    assert world.forecasts.writes(KEYS) == []
    await world.at(0)
    first = world.forecasts.writes(KEYS)
    keys = {write.key: write.obj for write in first}
    assert keys[KEYS.carbon_forecast(SERIES)] == world.forecasts.forecast
    assert keys[KEYS.carbon_ratio(SERIES)].window == "expanding"
    assert keys[KEYS.carbon_ratio(SERIES, "30d")].window == "30d"
    assert keys[KEYS.carbon_scores(SERIES)].model == "neso"
    assert keys[KEYS.carbon_scores(SERIES, "blend")].model == "blend"
    assert world.forecasts.writes(KEYS) == []
    await world.at(1.2)
    assert Put(KEYS.carbon_forecast(SERIES), world.forecasts.forecast) in world.forecasts.writes(KEYS)
    world.forecasts.forget_written()
    assert {write.key for write in world.forecasts.writes(KEYS)} == set(keys)
    world.forecasts.forecast = None
    assert Delete(KEYS.carbon_forecast(SERIES)) in world.forecasts.writes(KEYS)


async def test_a_follower_serves_what_the_leader_wrote(world, tmp_path, state):
    await world.at(0)
    lease = await state.acquire("feed:GB", "leader")
    await state.write(lease, world.forecasts.writes(state.keys))
    follower = World(tmp_path / "other")
    await follower.forecasts.follow(state, T0_S)
    mine = follower.forecasts.forecast
    assert replace(mine, bands=()) == replace(world.forecasts.forecast, bands=())
    assert {one.model for one in follower.forecasts.scores()} >= {"neso", "blend"}
    await follower.forecasts.follow(state, T0_S + 1)
    assert follower.forecasts.forecast is mine, "an equal one is not a new one"
    assert follower.grid.forecasts_asked == 0
    follower.reading = replace(world.reading, intensity_g_per_kwh=1.0)
    assert follower.forecasts.ratio("expanding", T0_S).cir == world.forecasts.ratio("expanding", T0_S).cir
    assert follower.forecasts.archive.latest("neso") is not None, "who leads next begins where this leader was"
    await state.write(lease, [Delete(state.keys.carbon_forecast(SERIES))])
    await follower.forecasts.follow(state, T0_S + 2)
    assert follower.forecasts.forecast is None
    assert "leader" in follower.forecasts.forecast_reason


async def test_what_is_missing_is_asked_for_though_the_newest_value_is_there(world):
    """Providers that measure the hour that holds now have told it before anybody looks back."""
    world.history.add(world.grid.reading(T0_S))
    await world.at(0)
    assert len(world.history) == 14 * 48 + 1
    asked = world.grid.pasts_asked
    assert asked == 4, "in pieces of four days"
    await world.at(2)
    assert world.grid.pasts_asked == asked + 1


async def test_what_was_told_before_a_failure_counts_and_the_next_look_goes_on_behind_it(world):
    world.grid.fails_from_s = T0_S - 5 * DAY_S
    await world.at(0)
    known = len(world.history)
    assert 8 * 48 <= known <= 9 * 48
    world.grid.fails_from_s = math.inf
    await world.at(0.5)
    assert len(world.history) == 14 * 48 + 1


async def test_a_spike_that_is_alone_in_the_past_is_left_out(world):
    world.grid.spike_s = T0_S - 30 * HOUR_S
    await world.at(0)
    assert len(world.history) == 14 * 48 - 1
    assert not world.history.between(world.grid.spike_s, world.grid.spike_s + 1)


class Played(Grid):
    """A recording, hour by hour, so many times as fast."""

    name = "trace"

    def __init__(self, speedup):
        super().__init__()
        self.speedup = speedup


async def played(folder, speedup, hours):
    settings = CarbonFeedSettings(state_dir=folder, zone="GB", factors="direct", provider="trace")
    history, wall_s = History(SERIES), HOUR_S / speedup
    reading = None
    for i in range(hours):
        reading = CarbonReading(
            SERIES,
            T0_S + i * wall_s,
            T0_S + (i + 1) * wall_s,
            float(TRUTH[i]),
            Quality.MEASURED,
            "trace",
            observed_at_s=T0_S + i * wall_s,
            simulated=True,
        )
        history.add(reading)
    outlook = ZoneForecasts(
        settings, Played(speedup), history, lambda: reading, ZoneMetrics(Metrics("carbon_feed"), settings)
    )
    await outlook.refresh(T0_S + hours * wall_s + wall_s / 10)
    return outlook


async def test_a_replay_is_forecast_in_wall_time_and_leaves_nothing_on_disk(tmp_path):
    outlook = await played(tmp_path, 2_000.0, 20 * 24)
    wall_s = HOUR_S / 2_000
    bands = outlook.forecast.bands
    assert len(bands) == 96
    assert bands[0].starts_at_s == pytest.approx(T0_S + 20 * 24 * wall_s)
    assert bands[-1].ends_at_s - bands[0].starts_at_s == pytest.approx(96 * wall_s)
    assert outlook.forecast.provenance.basis == Basis.SIMULATED
    plain = await played(tmp_path, 1.0, 20 * 24)
    assert [b.p50_g_per_kwh for b in bands] == pytest.approx([b.p50_g_per_kwh for b in plain.forecast.bands])
    assert outlook.scores()[0].scores[0].horizon_s == pytest.approx(wall_s)
    assert outlook.ratio("expanding", 0.0).cir == pytest.approx(plain.ratio("expanding", 0.0).cir)
    assert list(tmp_path.iterdir()) == []


async def test_a_replay_that_is_too_fast_to_be_of_use_says_so(tmp_path):
    outlook = await played(tmp_path, 500_000.0, 10 * 24)
    assert outlook.forecast is None
    assert "500000 times as fast" in outlook.forecast_reason
    assert ISSUE_MIN_S > 0


async def test_none_is_a_choice(tmp_path):
    world = World(tmp_path, model="none")
    world.grid.fails = ProviderFailure(Cause.FORBIDDEN, "not in your plan")
    await world.at(0, change=None)
    assert world.forecasts.forecast is None
    assert "outlook.model is none" in world.forecasts.forecast_reason


async def test_others_have_their_turn_all_the_time(world):
    """Two months of half hours: what takes the longest, from nothing. Printed; asserted as turns, not as time."""
    for i in range(60 * 48):
        at_s = T0_S - 60 * DAY_S + i * WINDOW_S
        value = float(TRUTH[(i // 2) % 1000])
        world.history.add(
            CarbonReading(SERIES, at_s, at_s + WINDOW_S, value, Quality.ESTIMATED, "neso", observed_at_s=at_s)
        )
    turns: list[float] = []

    async def count():
        while True:
            turns.append(time.thread_time())
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    begun = time.thread_time()
    await world.at(0)
    counting.cancel()
    gaps = sorted(b - a for a, b in itertools.pairwise(turns))
    print(f"refresh of 60 days {1e3 * (time.thread_time() - begun):.0f} ms CPU in {len(turns)} turns,", end=" ")
    print(f"99 % of them within {1e3 * gaps[int(0.99 * len(gaps))]:.1f} ms, the longest {1e3 * gaps[-1]:.1f} ms")
    assert len(turns) > 400
    assert gaps[-1] <= 0.1, "20 ms, five times slower"
    assert not math.isnan(world.forecasts.forecast.bands[0].p50_g_per_kwh)
