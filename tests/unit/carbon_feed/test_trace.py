"""A replay conserves means, never lies about now, and counts time on one clock only."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carbon_feed.core.trace_playback import Playback, Trace, bin_fits, playback

HOURS = st.lists(st.floats(0, 1500), min_size=1, max_size=60).map(tuple)


def trace(values, lead_h=0.0, step_s=3600.0) -> Trace:
    return Trace("t.csv", "0" * 64, "2026-01-01T00:00Z", step_s, tuple(values), lead_h * 3600.0)


def play(values, *, lead_h=0.0, bin_s=0.0, speedup=1.0, starts_at_s=1000.0, loop=True) -> Playback:
    return playback(
        trace(values, lead_h), bin_s=bin_s, speedup=speedup, starts_at_s=starts_at_s, created_at_s=0.0, loop=loop
    )


@given(values=HOURS, factor=st.integers(1, 8))
def test_whole_bins_keep_the_mean(values, factor):
    values = values[: len(values) // factor * factor]
    if values:
        played = play(values, bin_s=3600.0 * factor)
        assert len(played.body_g_per_kwh) == len(values) // factor
        assert math.fsum(played.body_g_per_kwh) * factor == pytest.approx(math.fsum(values), abs=1e-6)


@given(values=HOURS, bin_s=st.floats(60, 20_000))
def test_a_bin_lies_between_the_extremes(values, bin_s):
    if bin_fits(trace(values), bin_s):
        played = play(values, bin_s=bin_s)
        assert all(min(values) - 1e-6 <= value <= max(values) + 1e-6 for value in played.body_g_per_kwh)


@given(
    values=HOURS,
    speedup=st.floats(0.1, 20_000),
    now_s=st.floats(-1e6, 1e7),
    starts_at_s=st.floats(1, 2e9) | st.just(math.inf),
)
def test_now_is_always_inside_the_bin_that_holds(values, speedup, now_s, starts_at_s):
    now_s += 0.0 if math.isinf(starts_at_s) else starts_at_s
    held = play(values, speedup=speedup, starts_at_s=starts_at_s).at(now_s)
    assert held.starts_at_s - 1e-5 <= now_s <= held.ends_at_s + 1e-5
    assert held.ends_at_s - held.starts_at_s == pytest.approx(3600.0 / speedup, abs=1e-5)


def test_steps_follow_the_scaled_clock():
    played = play([10, 20, 30], speedup=3600.0, starts_at_s=1000.0)
    assert [played.at(1000.0 + s).intensity_g_per_kwh for s in (0, 0.99, 1, 2.5)] == [10, 10, 20, 30]
    assert (played.at(1001.5).starts_at_s, played.at(1001.5).ends_at_s) == (1001.0, 1002.0)


def test_a_clock_that_wakes_a_hair_early_is_in_the_next_bin():
    played = play([10, 20], speedup=2057.142857, starts_at_s=1_795_000_000.123)
    boundary_s = played.at(1_795_000_000.2).ends_at_s
    assert played.at(boundary_s).intensity_g_per_kwh == 20
    assert played.at(boundary_s - 1e-3).intensity_g_per_kwh == 10


def test_before_the_start_the_first_value_holds_and_is_not_recorded():
    played = play([10, 20], lead_h=0, speedup=3600.0, starts_at_s=1000.0)
    held = played.at(500.0)
    assert (held.intensity_g_per_kwh, held.record) == (10, False)
    assert played.history(500.0, 100) == ()
    assert played.at(999.5).ends_at_s == 1000.0


def test_an_infinite_start_holds_for_ever():
    played = play([10, 20], lead_h=1, starts_at_s=math.inf)
    assert played.at(1e9).intensity_g_per_kwh == 20
    assert not played.at(1e9).record
    assert played.history(1e9, 100) == ()


def test_the_end_loops_to_time_zero_or_stops():
    values, lead_h = [1, 10, 20], 1
    looping = play(values, lead_h=lead_h, speedup=3600.0)
    assert [looping.at(1000.0 + s).intensity_g_per_kwh for s in range(5)] == [10, 20, 10, 20, 10]
    stopping = play(values, lead_h=lead_h, speedup=3600.0, loop=False)
    assert stopping.at(1001.5).intensity_g_per_kwh == 20
    assert stopping.at(1002.0) is None
    assert [b.intensity_g_per_kwh for b in stopping.history(2000.0, 100)] == [1, 10, 20]


def test_the_lead_in_is_history_before_time_zero():
    played = play([1, 2, 3, 10, 20], lead_h=3, speedup=3600.0)
    history = played.history(1000.0, 100)
    assert [(b.starts_at_s, b.intensity_g_per_kwh) for b in history] == [(997, 1), (998, 2), (999, 3), (1000, 10)]
    assert all(b.record for b in history)
    assert [b.intensity_g_per_kwh for b in played.history(990.0, 100)] == [1, 2, 3], "already before it starts"
    assert [b.intensity_g_per_kwh for b in played.history(1002.0, 2)] == [20, 10]


def test_bins_are_aligned_to_time_zero_and_incomplete_ones_left_out():
    played = play([99, 1, 3, 10, 20, 30], lead_h=3, bin_s=7200.0)
    assert played.lead_g_per_kwh == (2.0,)
    assert played.body_g_per_kwh == (15.0,)


def test_finer_bins_repeat_values():
    assert play([10, 20], bin_s=1800.0).body_g_per_kwh == (10, 10, 20, 20)


def test_a_trace_shorter_than_a_bin_does_not_fit():
    assert not bin_fits(trace([1, 2]), 7201.0)
    assert bin_fits(trace([1, 2]), 7200.0)
    assert not bin_fits(trace([1, 2], lead_h=2), 1.0)
