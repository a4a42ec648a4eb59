"""Nothing is published that was not said, and what stands in for it says so."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carbon_feed.core.fallback import FallbackLadder, FallbackView, ProviderAnswer, forecast_of
from carbon_feed.core.hour_of_week import FADE_S, HourOfWeekProfile, hour_of_week
from carbon_feed.core.observation import Observation, reading_of
from carbon_feed.core.validation import Cause, Refusal
from trefoil.core.carbon import CarbonForecast, Factors, Method, Quality, Rung, Series

SERIES = Series("GB", Method.AVERAGE, Factors.LIFECYCLE)
NOW_S = 1_795_000_000.0
GOOD = Observation(
    starts_at_s=NOW_S - 100,
    ends_at_s=NOW_S + 200,
    intensity_g_per_kwh=250.0,
    quality=Quality.MEASURED,
    provider="grid",
    api_version="v1",
    estimation_method="",
    observed_at_s=NOW_S - 100,
    simulated=False,
)
DOWN = Refusal(Cause.TIMEOUT, "timed out")
HOUR_S, WEEK_S = 3600.0, 7 * 24 * 3600.0


def view(said=GOOD, decision=None, now_s=NOW_S, second=None, **more):
    """A view after a decision; `said` is an observation or a refusal, `second` what a second provider says."""
    every = [ProviderAnswer("grid", *_said(said))] + (
        [ProviderAnswer("other", *_said(second))] if second is not None else []
    )
    if decision is not None:
        more = {"last": decision.reading, "accepted": decision.accepted, "suspect": decision.suspect, **more}
    return FallbackView(now_s, SERIES, tuple(every), **more)


def _said(said):
    return (None, said) if isinstance(said, Refusal) else (said, None)


def week(now_s=NOW_S, value=lambda hour: 100.0 + hour % 24):
    made = HourOfWeekProfile()
    for hours in range(168, 0, -1):
        at_s = now_s - hours * HOUR_S
        made.observe(at_s, value(hour_of_week(at_s)))
    return made


def test_a_good_observation_becomes_a_reading_with_its_provenance():
    decision = FallbackLadder().decide(view())
    reading = decision.reading
    assert reading.intensity_g_per_kwh == 250.0
    assert (reading.provider, reading.api_version, reading.quality) == ("grid", "v1", Quality.MEASURED)
    assert (reading.observed_at_s, reading.fetched_at_s) == (NOW_S - 100, NOW_S)
    assert (reading.rung, reading.fallback_reason, reading.simulated, reading.as_of) == (0, "", False, 1)
    assert decision.next_tick_at_s == GOOD.ends_at_s
    assert decision.accepted == reading
    assert decision.refusals == ()


def test_the_same_said_twice_is_one_reading():
    first = FallbackLadder().decide(view())
    again = FallbackLadder().decide(view(decision=first, now_s=NOW_S + 50))
    assert again.reading == first.reading
    assert again.why == "unchanged"


def test_each_change_counts_up():
    first = FallbackLadder().decide(view())
    second = FallbackLadder().decide(view(replace(GOOD, intensity_g_per_kwh=300.0), first))
    assert second.reading.as_of == 2
    assert second.why == "250 -> 300 g/kWh by grid"


@given(
    value=st.floats(allow_nan=True).filter(lambda v: not 0 <= v <= 1500),
    last=st.none() | st.just(reading_of(GOOD, SERIES, NOW_S, 7)),
)
def test_values_outside_the_range_are_never_published(value, last):
    decision = FallbackLadder().decide(view(replace(GOOD, intensity_g_per_kwh=value), last=last, accepted=last))
    assert decision.refusals[0][1].cause in (Cause.NOT_A_NUMBER, Cause.NEGATIVE, Cause.TOO_HIGH)
    assert (decision.reading is None) == (last is None)
    assert decision.reading is None or decision.reading.intensity_g_per_kwh == 250.0


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"starts_at_s": NOW_S + 60, "ends_at_s": NOW_S + 90}, Cause.FUTURE),
        ({"starts_at_s": NOW_S - 90, "ends_at_s": NOW_S - 60}, Cause.ENDED),
        ({"ends_at_s": GOOD.starts_at_s}, Cause.BAD_INTERVAL),
        ({"ends_at_s": GOOD.starts_at_s + 43 * HOUR_S}, Cause.BAD_INTERVAL),
        ({"zone_asked": "GB", "zone_echoed": "FR"}, Cause.WRONG_ZONE),
        ({"method": Method.MARGINAL}, Cause.WRONG_SERIES),
        ({"factors": Factors.DIRECT}, Cause.WRONG_SERIES),
        ({"intensity_g_per_kwh": 0.0}, Cause.ALL_ZERO),
        ({"intensity_g_per_kwh": 0.0, "beside_g_per_kwh": (0.0, 0.0)}, Cause.ALL_ZERO),
    ],
)
def test_what_does_not_fit_is_refused_under_its_name(changes, cause):
    decision = FallbackLadder().decide(view(replace(GOOD, **changes)))
    assert decision.refusals[0][1].cause is cause
    assert decision.reading is None or decision.reading.rung == Rung.CARRIED


def test_a_recording_may_say_one_value_for_a_day():
    day = replace(GOOD, ends_at_s=GOOD.starts_at_s + 24 * HOUR_S, simulated=True)
    assert FallbackLadder().decide(view(day)).reading.rung == Rung.NORMAL


def test_a_clean_quarter_of_an_hour_is_no_outage():
    clean = replace(GOOD, intensity_g_per_kwh=0.0, beside_g_per_kwh=(0.0, 120.0))
    assert FallbackLadder().decide(view(clean)).reading.intensity_g_per_kwh == 0.0


def test_a_failing_provider_leaves_the_last_value_and_its_age():
    last = FallbackLadder().decide(view())
    decision = FallbackLadder().decide(view(DOWN, last, NOW_S + 30))
    carried = decision.reading
    assert (carried.rung, carried.quality) == (Rung.CARRIED, Quality.CARRIED)
    assert carried.fallback_reason == "grid timeout: timed out"
    assert carried.intensity_g_per_kwh == 250.0
    assert carried.observed_at_s == last.reading.observed_at_s, "carrying does not make it younger"
    assert carried.as_of == 2
    again = FallbackLadder().decide(view(replace(DOWN, message="timed out once more"), decision, NOW_S + 60))
    assert again.reading == carried, "said once"
    other = FallbackLadder().decide(view(Refusal(Cause.GONE, "shut down"), decision, NOW_S + 60))
    assert (other.reading.fallback_reason, other.reading.as_of) == ("grid gone: shut down", 3)


def test_recovery_is_a_new_reading():
    down = FallbackLadder().decide(view(DOWN, FallbackLadder().decide(view())))
    back = FallbackLadder().decide(view(decision=down))
    assert (back.reading.rung, back.reading.fallback_reason, back.reading.as_of) == (0, "", 3)


def test_a_second_provider_of_the_same_kind_stands_in_by_name():
    other = replace(GOOD, provider="other", intensity_g_per_kwh=240.0)
    decision = FallbackLadder().decide(view(DOWN, second=other))
    assert (decision.reading.rung, decision.reading.provider) == (Rung.SECONDARY, "other")
    assert decision.reading.fallback_reason == "grid timeout: timed out"
    mixed = FallbackLadder().decide(view(DOWN, second=replace(other, factors=Factors.DIRECT)))
    assert mixed.reading is None, "another kind of intensity is not a substitute"
    assert [refusal.cause for _, refusal in mixed.refusals] == [Cause.TIMEOUT, Cause.WRONG_SERIES]


def test_an_aged_value_gives_way_to_the_profile_and_that_to_the_setting():
    ladder = FallbackLadder(carry_max_s=600.0, static_g_per_kwh=420.0)
    last = ladder.decide(view())
    assert ladder.decide(view(DOWN, last, NOW_S + 400)).reading.rung == Rung.CARRIED
    profile = ladder.decide(view(DOWN, last, NOW_S + 601, profile=week())).reading
    assert (profile.rung, profile.quality) == (Rung.PROFILE, Quality.CLIMATOLOGY)
    assert 100 <= profile.intensity_g_per_kwh <= 124
    static = ladder.decide(view(DOWN, last, NOW_S + 601, profile=HourOfWeekProfile()))
    assert (static.reading.rung, static.reading.quality) == (Rung.STATIC, Quality.STATIC)
    assert static.reading.intensity_g_per_kwh == 420.0
    assert static.reading.fallback_reason == "grid timeout: timed out"
    assert ladder.decide(view(DOWN, static, NOW_S + 700)).reading == static.reading
    assert ladder.decide(view(DOWN)).reading.intensity_g_per_kwh == 420.0


def test_without_anything_else_nothing_is_invented():
    assert FallbackLadder().decide(view(DOWN)).reading is None
    ladder = FallbackLadder(carry_max_s=1.0)
    old = ladder.decide(view(DOWN, ladder.decide(view()), NOW_S + 1e6)).reading
    assert (old.rung, old.intensity_g_per_kwh, old.observed_at_s) == (Rung.EXPIRED, 250.0, NOW_S - 100)


def test_a_jump_is_believed_when_the_next_interval_says_it_again():
    ladder = FallbackLadder()
    calm = ladder.decide(view())
    high = replace(GOOD, intensity_g_per_kwh=20.0, starts_at_s=NOW_S, ends_at_s=NOW_S + 300)
    doubted = ladder.decide(view(high, calm))
    assert doubted.refusals[0][1].cause is Cause.JUMP
    assert doubted.reading.intensity_g_per_kwh == 250.0
    repeated = ladder.decide(view(high, doubted, NOW_S + 10))
    assert repeated.reading.rung == Rung.CARRIED, "the same interval twice is one witness"
    later = replace(high, intensity_g_per_kwh=22.0, starts_at_s=NOW_S + 300, ends_at_s=NOW_S + 600)
    believed = ladder.decide(view(later, repeated, NOW_S + 310))
    assert (believed.reading.rung, believed.reading.intensity_g_per_kwh) == (0, 22.0)
    played = ladder.decide(view(replace(high, simulated=True), calm))
    assert played.reading.rung == 0, "a recording is taken at its word"


def test_a_zone_that_publishes_late_is_carried_or_allowed_by_name():
    late = replace(GOOD, starts_at_s=NOW_S - 7200, ends_at_s=NOW_S - 3600, observed_at_s=NOW_S - 3000)
    carried = FallbackLadder(carry_max_s=4000.0).decide(view(late)).reading
    assert (carried.rung, carried.intensity_g_per_kwh) == (Rung.CARRIED, 250.0)
    assert carried.fallback_reason == "grid ended: its newest interval ended 3600 s ago"
    assert FallbackLadder(late_max_s=3600.0).decide(view(late)).reading.rung == 0


def test_retry_after_is_passed_on():
    wait = FallbackLadder().decide(view(Refusal(Cause.RATE_LIMITED, "too many", retry_after_s=90.0)))
    assert wait.next_tick_at_s == NOW_S + 90.0


def test_the_profile_follows_the_hour_and_forgets_what_was_unusual():
    made = week(value=lambda _: 200.0)
    made.observe(NOW_S, 300.0)
    told = made.at(NOW_S) - 200
    assert made.at(NOW_S + FADE_S) - 200 == pytest.approx(50.0 * math.exp(-1), abs=1.0), "half of it became the mean"
    assert told > made.at(NOW_S + FADE_S) - 200 > made.at(NOW_S + WEEK_S / 2) - 200
    assert made.at(NOW_S + WEEK_S / 2) == pytest.approx(200.0, abs=1.0)


def points(count, step_s=1800.0, value=200.0):
    starts = [NOW_S + k * step_s for k in range(count)]
    return [replace(GOOD, starts_at_s=at, ends_at_s=at + step_s, intensity_g_per_kwh=value) for at in starts]


def test_a_whole_forecast_is_taken_and_says_where_it_is_from():
    forecast = forecast_of("grid", points(96), SERIES, NOW_S, 48 * HOUR_S)
    assert isinstance(forecast, CarbonForecast)
    assert (len(forecast.bands), forecast.model, forecast.provenance.source) == (96, "grid", "grid")


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (points(30), Cause.TRUNCATED),
        ([], Cause.EMPTY),
        (points(96, value=0.0), Cause.ALL_ZERO),
        (points(48) + points(48), Cause.BAD_INTERVAL),
        (points(40) + points(96)[41:], Cause.BAD_INTERVAL),
        (points(1, step_s=48 * HOUR_S), Cause.BAD_INTERVAL),
        (points(96)[3:], Cause.FUTURE),
        ([replace(point, zone_asked="a", zone_echoed="b") for point in points(96)], Cause.WRONG_ZONE),
    ],
)
def test_a_bad_forecast_is_refused_under_its_name(said, cause):
    refusal = forecast_of("grid", said, SERIES, NOW_S, 48 * HOUR_S)
    assert isinstance(refusal, Refusal)
    assert refusal.cause is cause


@given(st.lists(st.one_of(st.floats(0, 2000), st.just(DOWN)), min_size=1, max_size=30))
def test_whatever_is_said_every_value_was_said_and_revisions_rise(said):
    """No reading ever shows a value that the provider did not give; as_of never falls, and grows with each change."""
    ladder, decision, heard = FallbackLadder(), None, set()
    for k, one in enumerate(said):
        at_s = NOW_S + 300.0 * k
        value = (
            one
            if isinstance(one, Refusal)
            else replace(GOOD, intensity_g_per_kwh=one, starts_at_s=at_s, ends_at_s=at_s + 300, observed_at_s=at_s)
        )
        heard.add(getattr(value, "intensity_g_per_kwh", None))
        before = decision.reading if decision else None
        decision = ladder.decide(view(value, decision, at_s))
        after = decision.reading
        assert after is None or after.intensity_g_per_kwh in heard
        if before is not None and after != before:
            assert after.as_of == before.as_of + 1
        assert after is None or (after.rung == 0) == (after.fallback_reason == "")
