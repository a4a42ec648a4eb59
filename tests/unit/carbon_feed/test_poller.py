"""The poller's shell: who asks, what outlives a failure, a restart and a silent Redis."""

import json
from dataclasses import replace

import pytest

from carbon_feed.core.observation import Observation
from carbon_feed.core.polling import DAY_S, Breaker, PollLimits
from carbon_feed.core.validation import Cause
from carbon_feed.providers import LiveProvider, PolledProvider, ProviderFailure
from carbon_feed.providers.polled import load_usage
from carbon_feed.providers.web import AnswerCache
from carbon_feed.reading.loop import ZoneLoop
from carbon_feed.settings import CarbonFeedSettings
from trefoil.core import errors
from trefoil.core.carbon import CarbonBand, CarbonForecast, CarbonReading, Quality, Rung
from trefoil.core.common import Lease
from trefoil.runtime import codec, config
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.telemetry import Metrics

DAY_BEGIN_S = 1_795_046_400.0
NOW_S = DAY_BEGIN_S + 600.0
STEP_S = 300.0


class Told:
    """What all adapters are told to say, and how often they were asked."""

    def __init__(self):
        self.value: float | None = 200.0
        self.retry_after_s = 0.0
        self.quality = Quality.ESTIMATED
        self.sent = 0
        self.behind_s = 0.0  # the feed's wall clock


class Metered:
    """Says what it is told, one step at a time; a question costs a request."""

    name = "metered"
    speedup = 1.0
    licence = "made up"
    poll_s = 300.0

    def __init__(self, told):
        self.told = told
        self.recent = AnswerCache()
        self._spend = lambda: None

    async def read(self, now_s):
        self._send()
        return self.recent.remember(self._at((now_s - self.told.behind_s) // STEP_S * STEP_S))

    def history(self, now_s, count_max):
        return self.recent.newest(count_max)

    def held(self, now_s):
        return self.recent.held(now_s)

    async def forecast(self, now_s, horizon_s):
        self._send()
        raise ProviderFailure(Cause.FORBIDDEN, "not in the plan")

    async def past(self, begin_s, end_s):
        self._send()
        count = int((end_s - begin_s) // STEP_S)
        return tuple(self._at(begin_s // STEP_S * STEP_S + i * STEP_S) for i in range(count))

    left_out = 0

    def metered(self, spend):
        self._spend = spend

    async def close(self):
        pass

    def _send(self):
        self._spend()
        self.told.sent += 1
        if self.told.value is None:
            raise ProviderFailure(Cause.SERVER_ERROR, "told to fail", retry_after_s=self.told.retry_after_s)

    def _at(self, starts_at_s):
        return Observation(
            starts_at_s, starts_at_s + STEP_S, self.told.value, self.told.quality, "metered", "", "", starts_at_s, False
        )


@pytest.fixture
def provider():
    return Told()


@pytest.fixture
def clock():
    return ManualClock(NOW_S)


@pytest.fixture
def metrics():
    return Metrics("carbon_feed")


@pytest.fixture
def make(state, provider, clock, metrics, tmp_path):
    """Feed loops of one zone, each with a separate disk."""
    state._clock = clock

    def one(name="a", rules=None, **more):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        outlook = {"model": "none", "provider_every_s": 1e9, "past_every_s": 1e9}
        wanted = CarbonFeedSettings.model_validate({"state_dir": folder, "zone": "Z", "outlook": outlook, **more})
        asked = Metered(provider)
        assert isinstance(asked, LiveProvider)
        polled = PolledProvider(asked, rules or PollLimits(300.0), folder / "polling.json")
        loop = ZoneLoop(wanted, polled, state, clock, metrics)
        loop._election.identity = name
        return loop

    return one


async def ticks(loop, seconds=0.5):
    """Rounds, half a second apart; questions are answered in between."""
    for _ in range(max(1, round(seconds / 0.5))):
        await loop.tick()
        await loop._provider.wait_answered()
        loop._clock.move(0.5)


async def expire(state):
    """Redis has a separate clock."""
    await state._client.delete(state.keys.lease("feed:Z"))


async def stream(state, loop):
    return [reading for _, reading in await state.stream(state.keys.carbon_history(loop.series), CarbonReading)]


async def test_the_follower_asks_nobody_and_serves_what_the_holder_wrote(make, provider, state, clock):
    holder, follower = make("a"), make("b")
    for loop in (holder, follower):
        await loop.init()
    assert provider.sent == 0, "no provider is called before all parts are ready"
    await ticks(holder, 2)
    await ticks(follower, 2)
    assert provider.sent == 1
    assert (holder.leading, follower.leading) == (True, False)
    assert follower.reading == holder.reading
    assert follower.reading.intensity_g_per_kwh == 200.0
    assert len(follower.history) == len(holder.history) == 1
    health = follower.health(clock.now_s())
    assert (health.leading, health.holder, health.redis_answers, health.next_ask_at_s) == (False, "a", True, 0.0)
    assert holder.health(clock.now_s()).next_ask_at_s > clock.now_s()


async def test_a_failure_does_not_take_back_what_was_said_before_the_hard_ttl(make, provider, clock, metrics):
    loop = make(rules=PollLimits(60.0, hard_ttl_s=150.0))
    await loop.init()
    await ticks(loop, 1)
    provider.value = None
    await ticks(loop, 100)
    assert provider.sent > 2
    assert loop.reading.rung == Rung.NORMAL, "younger than the hard TTL, and its interval holds"
    assert loop.health(clock.now_s()).soft_stale
    assert loop.health(clock.now_s()).last_error_cause == "server_error"
    assert 'cause="server_error"' in metrics.text(), "counted although it is not seen in the reading"
    await ticks(loop, 60)
    assert (loop.reading.rung, loop.reading.intensity_g_per_kwh) == (Rung.CARRIED, 200.0)
    assert loop.reading.fallback_reason == "metered server_error: told to fail"
    assert loop.health(clock.now_s()).hard_stale


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_a_wall_clock_that_steps_costs_a_named_rung_until_it_is_right_again(make, provider, clock, step_s):
    loop = make()
    await loop.init()
    await ticks(loop, 10)
    assert loop.reading.rung == Rung.NORMAL
    for ahead_s, fine in ((step_s, False), (-step_s, True)):
        clock.jump(ahead_s)
        provider.behind_s += ahead_s
        sent = provider.sent
        await ticks(loop, 340)
        assert (loop.reading.intensity_g_per_kwh, loop.leading) == (200.0, True)
        assert (loop.reading.rung == Rung.NORMAL) == fine, loop.reading.fallback_reason
        assert 1 <= provider.sent - sent <= 7, "asked at its pace, at the soonest each 60 s, whatever the clock says"


async def test_the_breaker_keeps_all_questions_back(make, provider, clock):
    loop = make(rules=PollLimits(300.0, breaker_failures=2))
    await loop.init()
    provider.value = None
    await ticks(loop, 60)
    assert loop.health(clock.now_s()).breaker == Breaker.OPEN
    sent = provider.sent
    with pytest.raises(ProviderFailure, match="only a probe"):
        await loop._provider.past(NOW_S - 3600, NOW_S)
    assert provider.sent == sent
    provider.value = 210.0
    await ticks(loop, 300)
    assert loop.health(clock.now_s()).breaker == Breaker.CLOSED
    assert len(await loop._provider.past(NOW_S - 3600, NOW_S)) == 12


async def test_a_quota_outlives_the_process_but_not_midnight(make, provider, clock, metrics, state):
    rules = PollLimits(300.0, quota_per_day=10)
    loop = make(rules=rules)
    await loop.init()
    await ticks(loop, 1)
    spent = load_usage(loop._provider._usage_file)
    assert (spent.asked, spent.epoch) == (1, 1)
    assert 'trefoil_carbon_quota_left_requests{provider="metered"' in metrics.text()
    await loop.shutdown()
    again = make(rules=rules)
    await again.init()
    await ticks(again, 600)
    assert provider.sent == 1, "a restart does not bring a new question"
    clock.move(2.7 * 3600)
    await expire(state)
    await ticks(again, 1)
    assert provider.sent == 2
    again._provider._usage_file.write_text(json.dumps({"day": spent.day, "asked": 10, "epoch": 2}))
    await again.shutdown()
    third = make(rules=rules)
    await third.init()
    await ticks(third, 5)
    assert provider.sent == 2
    assert third.health(clock.now_s()).next_ask_at_s == DAY_BEGIN_S + DAY_S
    clock.move(DAY_BEGIN_S + DAY_S - clock.now_s())
    await expire(state)
    await ticks(third, 1)
    assert provider.sent == 3


async def test_retry_after_outlives_the_process(make, provider, clock, state):
    provider.value, provider.retry_after_s = None, 3600.0
    loop = make()
    await loop.init()
    await ticks(loop, 1)
    await loop.shutdown()
    again = make()
    await again.init()
    await ticks(again, 900)
    assert provider.sent == 1
    clock.move(3150)
    await expire(state)
    await ticks(again, 1)
    assert provider.sent == 2


def silence(state, monkeypatch):
    """Redis does not answer from now on."""

    async def nobody(*_, **__):
        raise errors.StateUnavailable("told to be silent")

    for name in ("get", "stream", "tail", "_epoch", "_lease", "_fenced"):
        monkeypatch.setattr(state, name, nobody)


@pytest.mark.parametrize("alone", [False, True])
async def test_without_redis_the_holder_asks_only_while_nobody_else_can(alone, make, provider, state, monkeypatch):
    loop = make(polling={"ask_without_redis": alone})
    await loop.init()
    await ticks(loop, 1)
    with monkeypatch.context() as silent:
        silence(state, silent)
        await ticks(loop, 4)
        assert loop.leading
        await ticks(loop, 700)
        assert not loop.leading
        assert loop.health(0.0).redis_answers is False
        assert provider.sent == (3 if alone else 1)
        assert loop.reading.rung == (Rung.NORMAL if alone else Rung.CARRIED)
    await expire(state)
    await ticks(loop, 2)
    assert loop.leading
    assert loop.reading.rung == Rung.NORMAL
    starts = [reading.starts_at_s for reading in await stream(state, loop)]
    wanted = [NOW_S, NOW_S + 300, NOW_S + 600] if alone else [NOW_S, NOW_S + 600]
    assert starts == wanted


async def test_a_write_that_nobody_confirmed_is_looked_up_before_it_is_repeated(make, provider, state, monkeypatch):
    loop = make()
    await loop.init()
    await ticks(loop, 1)
    done = state._fenced

    async def heard_by_nobody(lease, writes):
        await done(lease, writes)
        raise errors.StateUnavailable("the answer was lost")

    provider.value = 220.0
    loop._clock.move(300.0)
    await expire(state)
    await loop.tick()  # takes the role again, and asks
    await loop._provider.wait_answered()
    loop._clock.move(0.5)
    with monkeypatch.context() as lost:
        lost.setattr(state, "_fenced", heard_by_nobody)
        await loop.tick()
    assert len(await stream(state, loop)) == 2
    await ticks(loop, 5)
    values = [reading.intensity_g_per_kwh for reading in await stream(state, loop)]
    assert values == [200.0, 220.0]


async def test_revisions_of_the_past_enter_the_history_once(make, provider, state):
    holder, follower = make("a"), make("b")
    for loop in (holder, follower):
        await loop.init()
    await ticks(holder, 1)
    provider.quality = Quality.MEASURED
    for _ in range(2):
        for said in await holder._provider.past(NOW_S - 900, NOW_S):
            reading = CarbonReading(
                holder.series, said.starts_at_s, said.ends_at_s, 150.0, said.quality, "metered", fetched_at_s=NOW_S
            )
            holder.history.add(reading)
    await ticks(holder, 1)
    await ticks(follower, 1)
    entries = [(reading.starts_at_s, reading.intensity_g_per_kwh) for reading in await stream(state, holder)]
    assert entries == [(NOW_S, 200.0), *((NOW_S - 900 + 300 * i, 150.0) for i in range(3))]
    assert len(holder.history) == len(follower.history) == 4
    provider.quality = Quality.ESTIMATED
    await expire(state)  # the holder is gone
    await ticks(follower, 1)
    assert follower.leading
    await ticks(follower, 1)
    assert len(await stream(state, holder)) == 4


async def test_an_emptied_redis_gets_its_history_back_from_whoever_takes_the_role(make, state):
    holder, follower = make("a"), make("b")
    for loop in (holder, follower):
        await loop.init()
    for _ in range(3):
        await ticks(holder, 3)
        await ticks(follower, 0.5)
        holder._clock.move(297.0 - 0.5)
        await expire(state)
    before = [reading.starts_at_s for reading in await stream(state, holder)]
    await ticks(holder, 1)
    await ticks(follower, 0.5)
    for name in await state.names(state.keys.prefix):
        await state._client.delete(name)
    await ticks(follower, 1.5)
    assert follower.leading
    after = [reading.starts_at_s for reading in await stream(state, follower)]
    assert set(after) >= set(before)
    assert len(after) == len(set(after))


def test_zones_share_keys_and_addresses_but_not_places():
    top = {
        "zone": "GB",
        "factors": "direct",
        "provider": "neso",
        "static_g_per_kwh": 210.0,
        "neso": {"base_url": "http://one", "region_id": 13},
        "electricity_maps": {"token": "env:KEY", "zone": "GB"},
        "zones": [{"zone": "FR", "provider": "electricity_maps", "electricity_maps": {"poll_s": 600}}],
    }
    first, second = CarbonFeedSettings.model_validate(top).per_zone()
    assert (first.zone, first.neso.region_id) == ("GB", 13)
    assert (second.zone, second.provider, second.factors) == ("FR", "electricity_maps", "lifecycle")
    assert second.electricity_maps.token.get_secret_value() == "env:KEY"
    assert (second.electricity_maps.zone, second.electricity_maps.poll_s) == ("", 600.0)
    assert (second.neso.base_url, second.neso.region_id) == ("http://one", None)
    assert second.static_g_per_kwh is None, "what stands in for Britain does not stand in for France"
    assert second.state_dir == first.state_dir


@pytest.mark.parametrize(
    ("zones", "named"),
    [
        ([{"zone": "FR"}], "zones.0.provider: missing"),
        ([{"provider": "constant"}], "zones.0.zone: missing"),
        ([{"zone": "F R", "provider": "constant"}], "zones.0.zone = 'F R'"),
        ([{"zone": "FR", "provider": "constant", "stat": 1}], r"zones.0.stat: unknown setting .*static_g_per_kwh"),
        ([{"zone": "demo", "provider": "constant"}], "zones.0.zone = 'demo': is read already, by zone. Remedy: give"),
        ([{"zone": "FR", "provider": "constant"}] * 2, r"zones.1.zone = 'FR': is read already, by zones.0.zone"),
    ],
)
def test_bad_zones_are_named(zones, named):
    with pytest.raises(errors.SettingError, match=named):
        config.load(CarbonFeedSettings, overrides={"zones": zones}).per_zone()


def test_a_secret_in_a_further_zone_is_refused_and_not_shown():
    zones = [{"zone": "FR", "provider": "electricity_maps", "electricity_maps": {"token": "hunter2"}}]
    with pytest.raises(errors.SettingError) as caught:
        config.load(CarbonFeedSettings, overrides={"zones": zones})
    assert "zones.0.electricity_maps.token" in str(caught.value)
    assert "hunter2" not in str(caught.value)


async def test_a_holder_that_was_overtaken_follows_and_forgets_its_own_answer(make, provider, state, clock):
    old, new = make("a"), make("b")
    for loop in (old, new):
        await loop.init()
    await ticks(old, 1)
    await expire(state)
    provider.value = 300.0
    await ticks(new, 1.5)
    assert new.leading
    assert new.reading.intensity_g_per_kwh == 300.0
    seen = []
    for _ in range(4):
        await ticks(old, 0.5)
        seen.append(old.reading.intensity_g_per_kwh)
    assert not old.leading
    assert set(seen[1:]) == {300.0}, "what it once heard is not what the holder says"
    assert old.health(clock.now_s()).holder == "b"


async def test_what_redis_interrupts_while_the_role_is_taken_is_done_again(make, state, monkeypatch):
    first = make("a")
    await first.init()
    await ticks(first, 1)
    await first.shutdown()
    again = make("a")
    await again.init()
    with monkeypatch.context() as cut:

        async def cut_off(*_, **__):
            raise errors.StateUnavailable("told to be silent")

        cut.setattr(state, "tail", cut_off)
        await ticks(again, 1)
        assert again.leading
        assert not again.health(0.0).redis_answers
        assert len(await stream(state, again)) == 1, "nothing is written before it is known what is there"
    await ticks(again, 1.5)
    assert [reading.starts_at_s for reading in await stream(state, again)] == [NOW_S]
    assert again.reading.epoch == 2


async def test_a_feed_that_is_alone_keeps_its_quota_without_redis_too(make, provider, state, monkeypatch):
    rules = PollLimits(300.0, quota_per_day=10)
    loop = make(rules=rules)
    await loop.init()
    await ticks(loop, 1)
    with monkeypatch.context() as silent:
        silence(state, silent)
        again = make(rules=rules, polling={"ask_without_redis": True})
        await again.init()
        await ticks(again, 600)
        assert provider.sent == 1
        assert again.reading is None, "nothing is known, and nothing made up"
        assert again.health(NOW_S).asked_today == 1


async def put(state, key, value):
    await state._client.set(key, codec.encode(value))


LIES = {
    "a later revision": {"as_of": 1_000},
    "the last revision": {"as_of": 2**64 - 1},
    "a later epoch": {"epoch": 7},
    "the last epoch": {"epoch": 2**64 - 1},
    "another value": {},
    "of tomorrow": {"starts_at_s": NOW_S + DAY_S, "ends_at_s": NOW_S + DAY_S + STEP_S, "observed_at_s": NOW_S + DAY_S},
    "known tomorrow": {"fetched_at_s": NOW_S + DAY_S, "as_of": 9},
    "of a whole day": {"ends_at_s": NOW_S + DAY_S, "as_of": 9},
}


@pytest.mark.parametrize("name", LIES)
async def test_a_false_reading_in_redis_is_followed_no_longer_than_it_stands(make, state, clock, name):
    holder, follower = make("a"), make("b")
    await holder.init()
    await ticks(holder, 2)
    await ticks(follower, 1)
    lie = replace(holder.reading, intensity_g_per_kwh=1.0, **LIES[name])
    await put(state, state.keys.carbon_now(holder.series), lie)
    await ticks(follower, 0.5)
    await ticks(holder, 1)
    await ticks(follower, 1.5)
    assert (await state.get(state.keys.carbon_now(holder.series), CarbonReading)).intensity_g_per_kwh == 200.0
    assert follower.reading.intensity_g_per_kwh == 200.0
    await put(state, state.keys.carbon_now(holder.series), lie)
    await expire(state)
    after = make(
        "c"
    )  # a start on the lie, and its holder is gone: what can be true holds until it is contradicted twice
    await after.init()
    await ticks(after, 2)
    for _ in range(2 if name in ("a later revision", "another value") else 0):
        clock.move(STEP_S)
        await expire(state)
        await ticks(after, 2)
    assert (after.leading, after.reading.intensity_g_per_kwh) == (True, 200.0)
    assert (await state.get(state.keys.carbon_now(after.series), CarbonReading)).intensity_g_per_kwh == 200.0


@pytest.mark.parametrize("name", ["of tomorrow", "known tomorrow", "of a whole day"])
async def test_a_false_entry_of_the_past_is_no_history_and_is_not_carried(make, provider, state, clock, name):
    loop = make("a")
    await loop.init()
    await ticks(loop, 2)
    key = state.keys.carbon_history(loop.series)
    lie = replace(loop.reading, intensity_g_per_kwh=1.0, quality=Quality.MEASURED, **LIES[name])
    await state._client.xadd(key, {"d": codec.encode(lie)})
    await state._client.delete(state.keys.carbon_now(loop.series))
    await expire(state)
    provider.value = None
    after = make("b")
    await after.init()
    await ticks(after, 2)
    assert (after.reading.rung, after.reading.intensity_g_per_kwh) == (Rung.CARRIED, 200.0)
    assert [piece.reading.intensity_g_per_kwh for piece in after.history.between(0.0, 1e12)] == [200.0]
    assert after._recorder.set_aside == 1


@pytest.mark.parametrize("issued_s", [NOW_S + 365 * DAY_S, NOW_S, 1.0, -1e11])
async def test_a_forecast_that_no_feed_can_have_issued_is_neither_adopted_nor_kept(make, state, clock, issued_s):
    holder, follower = make("a"), make("b")
    await ticks(holder, 1)
    bands = (CarbonBand(NOW_S - 3600.0, NOW_S, 1.0, 1.0, 1.0), CarbonBand(NOW_S, 9e10, 1.0, 1.0, 1.0))
    lie = CarbonForecast(holder.series, "metered", issued_s, bands)
    await put(state, state.keys.carbon_forecast(holder.series), lie)
    await ticks(follower, 1)
    assert follower.forecasts.forecast is None
    await expire(state)
    await ticks(follower, 1)
    await follower.forecasts.refresh(clock.now_s())
    assert (follower.leading, follower.forecasts.forecast) == (True, None)
    assert len(follower.forecasts.archive) == 0


async def test_an_epoch_that_no_lease_can_have_reached_is_not_remembered(make, state):
    loop = make("a")
    await put(state, state.keys.lease("feed:Z"), Lease("feed:Z", "nobody", 10**12, 1e12))
    await state._client.pexpire(state.keys.lease("feed:Z"), 5_000)
    await ticks(loop, 1)
    await expire(state)
    await ticks(loop, 1)
    assert loop._election.lease.epoch == 1
