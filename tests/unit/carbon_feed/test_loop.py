"""The shell around the brain, with a provider that fails when told to."""

import asyncio

import pytest
import structlog

from carbon_feed.core.observation import Observation
from carbon_feed.reading.leader_election import load_epoch, save_epoch
from carbon_feed.reading.loop import ZoneLoop
from carbon_feed.service import CarbonFeedServicer
from carbon_feed.settings import CarbonFeedSettings
from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from tests.support.failing_disk import ERRORS, FailingDisk
from trefoil.core import errors
from trefoil.core.carbon import CarbonBand, CarbonForecast, CarbonReading, Quality, Rung
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.telemetry import Metrics

NOW_S = 1_795_000_020.0  # a full minute


class Scripted:
    """Says what it is told, in minutes."""

    name = "scripted"
    speedup = 1.0

    def __init__(self):
        self.value: float | None = 200.0

    async def read(self, now_s):
        if self.value is None:
            raise errors.Unavailable("told to fail")
        return self._at(now_s // 60 * 60)

    def history(self, now_s, count_max):
        return (self._at(now_s // 60 * 60),) if self.value is not None else ()

    def _at(self, starts_at_s):
        return Observation(
            starts_at_s, starts_at_s + 60.0, self.value, Quality.MEASURED, "scripted", "", "", starts_at_s, True
        )


@pytest.fixture
def provider():
    return Scripted()


@pytest.fixture
def clock():
    return ManualClock(NOW_S)


@pytest.fixture
def metrics():
    return Metrics("carbon_feed")


@pytest.fixture
def loop(state, provider, clock, metrics, tmp_path):
    state._clock = clock
    return ZoneLoop(CarbonFeedSettings(state_dir=tmp_path), provider, state, clock, metrics)


async def tick(loop):
    loop._clock.move(0.5)
    await loop.tick()


async def stored(state, loop):
    return await state.get(state.keys.carbon_now(loop.series), CarbonReading)


async def history(state, loop):
    entries = await state.stream(state.keys.carbon_history(loop.series), CarbonReading)
    return [reading.intensity_g_per_kwh for _, reading in entries]


async def test_a_reading_is_there_before_the_first_caller(loop, state):
    await loop.init()
    assert loop.reading.intensity_g_per_kwh == 200.0
    assert await stored(state, loop) is None, "nothing is written before all parts are ready"


async def test_what_holds_now_is_in_the_history_as_it_was_published(loop, state, provider, clock):
    await loop.init()
    for value in (200.0, 210.0, 220.0):
        provider.value = value
        for _ in range(20):  # a minute in steps that keep the lease
            await tick(loop)
            clock.move(2.5)
    assert await history(state, loop) == [200.0, 210.0, 220.0]
    entries = await state.stream(state.keys.carbon_history(loop.series), CarbonReading)
    assert [reading.as_of for _, reading in entries] == sorted(reading.as_of for _, reading in entries)


async def test_a_failing_provider_degrades_by_a_named_rung_and_is_counted(loop, state, provider, metrics):
    await loop.init()
    await tick(loop)
    provider.value = None
    await tick(loop)
    reading = await stored(state, loop)
    assert (reading.rung, reading.fallback_reason, reading.intensity_g_per_kwh) == (
        Rung.CARRIED,
        "scripted unavailable: told to fail",
        200.0,
    )
    provider.value = -1.0
    await tick(loop)
    text = metrics.text()
    for cause in ("unavailable", "negative"):
        assert f'trefoil_carbon_provider_errors_total{{cause="{cause}",provider="scripted"' in text
    assert 'rung="2",simulated="true",zone="demo"} 2.0' in text
    assert 'trefoil_carbon_rung{rung="carried",simulated="true",zone="demo"} 1.0' in text
    assert 'trefoil_carbon_rung{rung="normal",simulated="true",zone="demo"} 0.0' in text
    assert await history(state, loop) == [200.0], "a carried value is not history"


async def test_a_deleted_key_is_rewritten_in_the_next_round(loop, state):
    await loop.init()
    await tick(loop)
    await state.delete(loop._election.lease, state.keys.carbon_now(loop.series))
    await tick(loop)
    assert (await stored(state, loop)).intensity_g_per_kwh == 200.0


async def test_an_overtaken_feed_stops_writing_and_comes_back_higher(loop, state, clock, shared_redis):
    await loop.init()
    await tick(loop)
    await state._client.incr(state.keys.epoch("feed:demo"))  # somebody took the role
    await tick(loop)
    assert not loop.leading, "the lease key of the other still stands"
    await state._client.delete(state.keys.lease("feed:demo"))
    await tick(loop)
    assert (await stored(state, loop)).epoch == 3


async def test_a_feed_that_takes_its_role_again_writes_its_forecast_again(loop, state, clock):
    await loop.init()
    await tick(loop)
    bands = (CarbonBand(NOW_S, NOW_S + 3600.0, 100.0, 200.0, 300.0),)
    loop.forecasts.adopt(CarbonForecast(loop.series, "blend", NOW_S, bands))
    for _ in range(2):  # before Redis is emptied, and after
        await tick(loop)
        assert await state.get(state.keys.carbon_forecast(loop.series), CarbonForecast)
        for name in await state.names(state.keys.prefix):
            await state._client.delete(name)
        for _ in range(4):
            await tick(loop)


async def test_watchers_get_now_and_each_change(loop, provider):
    await loop.init()
    await tick(loop)
    watch = loop.watch()
    assert (await anext(watch)).intensity_g_per_kwh == 200.0
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    assert not waiting.done()
    provider.value = 300.0
    await tick(loop)
    assert (await asyncio.wait_for(waiting, 5)).intensity_g_per_kwh == 300.0
    await watch.aclose()


async def test_a_zone_without_any_reading_is_unavailable_not_zero(loop, provider):
    provider.value = None
    await loop.init()
    servicer = CarbonFeedServicer([loop])
    answer = await servicer.GetMany(pb.GetManyRequest(zones=["demo"]), None)
    assert (list(answer.readings), [one.why for one in answer.missing]) == ([], ["no reading of demo yet"])
    await tick(loop)
    with pytest.raises(errors.NotFound, match=r"zone = 'GB': no such zone. Remedy: use one of: demo"):
        await servicer.GetMany(pb.GetManyRequest(zones=["GB"]), None)


async def test_a_process_that_starts_beside_an_emptied_redis_leads_under_a_higher_epoch(loop, state, metrics, tmp_path):
    await loop.init()
    await tick(loop)
    before = (await stored(state, loop)).epoch
    for name in await state.names(state.keys.prefix):
        await state._client.delete(name)
    state._highest_epoch.clear()
    again = ZoneLoop(CarbonFeedSettings(state_dir=tmp_path), loop._provider, state, loop._clock, metrics)
    await again.init()
    await tick(again)
    assert (await stored(state, again)).epoch > before


def test_the_disk_remembers_the_epoch(tmp_path):
    path = tmp_path / "epoch"
    assert load_epoch(path) == 0
    save_epoch(path, 7)
    save_epoch(path, 8)
    assert load_epoch(path) == 8
    assert [entry.name for entry in tmp_path.iterdir()] == ["epoch"]
    path.write_text("seven")
    assert load_epoch(path) == 0  # Redis knows the highest
    assert [entry.name for entry in tmp_path.iterdir()] == ["epoch.bad"]


@pytest.mark.parametrize("code", ERRORS)
async def test_a_feed_whose_disk_refuses_leads_and_reads_on_and_keeps_its_epoch_when_there_is_room(
    state, provider, clock, metrics, tmp_path, monkeypatch, code
):
    state._clock = clock
    disk = FailingDisk(monkeypatch, code)
    disk.fail()
    loop = ZoneLoop(CarbonFeedSettings(state_dir=tmp_path / "state"), provider, state, clock, metrics)
    with structlog.testing.capture_logs() as log:
        await loop.init()
        for _ in range(3):
            await tick(loop)
        assert loop.leading
        assert (await stored(state, loop)).intensity_g_per_kwh == 200.0
        assert len([line for line in log if line["event"] == "disk"]) == 1
        assert 'trefoil_disk_trouble{file="epoch",simulated="true"} 1.0' in metrics.text()
        disk.mend()
        await tick(loop)
    assert load_epoch(tmp_path / "state" / "epoch-demo") == (await stored(state, loop)).epoch
    assert 'trefoil_disk_trouble{file="epoch",simulated="true"} 0.0' in metrics.text()
    await loop.shutdown()


async def test_an_epoch_that_cannot_be_read_does_not_end_the_feed(loop, tmp_path):
    (tmp_path / "epoch-demo").mkdir()  # an I/O error of its own kind
    await loop.init()
    await tick(loop)
    assert loop.leading
    await loop.shutdown()
