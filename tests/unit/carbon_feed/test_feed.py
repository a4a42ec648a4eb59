"""Nothing is published that was not said, and what stands in for it says so."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from carbon_feed.feed import Feed, FeedView, Observation, reading_of
from trefoil.core.carbon import Factors, Method, Quality, Series

SERIES = Series("GB", Method.AVERAGE, Factors.LIFECYCLE)
NOW_S = 1_795_000_000.0
GOOD = Observation(
    starts_at_s=NOW_S - 100,
    ends_at_s=NOW_S + 200,
    intensity_g_per_kwh=250.0,
    quality=Quality.MEASURED,
    provider="trace",
    api_version="v1",
    estimation_method="",
    observed_at_s=NOW_S - 100,
    simulated=True,
)


def view(observation=GOOD, last=None, failure="", now_s=NOW_S):
    return FeedView(now_s, SERIES, observation, failure, last)


def test_a_good_observation_becomes_a_reading_with_its_provenance():
    decision = Feed().decide(view())
    reading = decision.reading
    assert decision.accepted
    assert reading.intensity_g_per_kwh == 250.0
    assert (reading.provider, reading.api_version, reading.quality) == ("trace", "v1", Quality.MEASURED)
    assert (reading.observed_at_s, reading.fetched_at_s) == (NOW_S - 100, NOW_S)
    assert (reading.rung, reading.fallback_reason, reading.simulated, reading.as_of) == (0, "", True, 1)
    assert decision.next_tick_at_s == GOOD.ends_at_s


def test_the_same_said_twice_is_one_reading():
    first = Feed().decide(view()).reading
    again = Feed().decide(view(last=first, now_s=NOW_S + 50))
    assert again.reading == first
    assert again.why == "unchanged"


def test_each_change_counts_up():
    first = Feed().decide(view()).reading
    second = Feed().decide(view(replace(GOOD, intensity_g_per_kwh=300.0), last=first))
    assert second.reading.as_of == 2
    assert second.why == "250 -> 300 g/kWh by trace"


@given(
    value=st.floats(allow_nan=True).filter(lambda v: not 0 <= v <= 1500),
    last=st.none() | st.just(reading_of(GOOD, SERIES, NOW_S, 7)),
)
def test_values_outside_the_range_are_never_published(value, last):
    decision = Feed().decide(view(replace(GOOD, intensity_g_per_kwh=value), last=last))
    assert not decision.accepted
    assert "outside 0..1500" in decision.why
    assert (decision.reading is None) == (last is None)


def test_intervals_that_do_not_hold_now_are_refused():
    for changes, named in (
        ({"starts_at_s": NOW_S + 60, "ends_at_s": NOW_S + 90}, "starts in 60 s"),
        ({"starts_at_s": NOW_S - 90, "ends_at_s": NOW_S - 60}, "ended 60 s ago"),
        ({"ends_at_s": GOOD.starts_at_s}, "ends before it starts"),
    ):
        decision = Feed().decide(view(replace(GOOD, **changes)))
        assert decision.reading is None
        assert named in decision.why


def test_a_failing_provider_leaves_the_last_value_and_its_age():
    last = Feed().decide(view()).reading
    decision = Feed().decide(view(None, last, "timed out", NOW_S + 30))
    carried = decision.reading
    assert (carried.rung, carried.quality, carried.fallback_reason) == (1, Quality.CARRIED, "timed out")
    assert carried.intensity_g_per_kwh == 250.0
    assert carried.observed_at_s == last.observed_at_s, "carrying does not make it younger"
    assert carried.as_of == 2
    assert Feed().decide(view(None, carried, "timed out", NOW_S + 60)).reading == carried, "said once"


def test_recovery_is_a_new_reading():
    carried = Feed().decide(view(None, Feed().decide(view()).reading, "timed out")).reading
    back = Feed().decide(view(last=carried))
    assert (back.reading.rung, back.reading.fallback_reason, back.reading.as_of) == (0, "", 3)


def test_a_configured_value_is_the_last_rung():
    feed = Feed(carry_max_s=600.0, static_g_per_kwh=420.0)
    last = feed.decide(view()).reading
    assert feed.decide(view(None, last, "down", NOW_S + 400)).reading.rung == 1
    static = feed.decide(view(None, last, "down", NOW_S + 601)).reading
    assert (static.rung, static.quality, static.intensity_g_per_kwh) == (2, Quality.STATIC, 420.0)
    assert static.fallback_reason == "down"
    assert feed.decide(view(None, static, "down", NOW_S + 700)).reading == static
    assert feed.decide(view(None, None, "down")).reading.intensity_g_per_kwh == 420.0


def test_without_a_configured_value_nothing_is_invented():
    assert Feed().decide(view(None, None, "down")).reading is None
    last = Feed(carry_max_s=1.0).decide(view()).reading
    assert Feed(carry_max_s=1.0).decide(view(None, last, "down", NOW_S + 1e6)).reading.intensity_g_per_kwh == 250.0
