"""Arrivals per second over up to a day: none lost, none invented, holes are holes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.observe.core.arrival_history import ArrivalHistory
from controller.observe.core.load_windows import LoadWindows
from controller.thresholds import WindowSettings
from tests.support.plans import CATALOG
from tests.unit.controller.test_windows import window

BEGAN_S = 1_795_000_000


def played(counts, history_s, bin_s=0.5, forget_every=1):
    """Load windows after half a second each, and how late it is then."""
    found = LoadWindows(WindowSettings(bin_s=bin_s), history_s=history_s)
    for i, count in enumerate(counts):
        ends_s = BEGAN_S + 0.5 * (i + 1)
        found.add(window(i + 1, ends_s - 0.5, ends_s, count), CATALOG)
        if i % forget_every == 0:
            found.forget(ends_s)
    return found, BEGAN_S + 0.5 * len(counts)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=2, max_size=900), st.sampled_from([30, 120, 400]), st.integers(1, 60))
def test_every_second_of_the_history_is_what_arrived_in_it(counts, history_s, forget_every):
    found, now_s = played(counts, history_s, forget_every=forget_every)
    expected = [float(sum(counts[i : i + 2])) for i in range(0, len(counts) - 1, 2)]
    first, seen = found.steps("toy", now_s)
    assert first == BEGAN_S + len(expected) - len(seen)
    assert len(seen) >= min(len(expected), history_s)
    assert list(seen) == expected[len(expected) - len(seen) :]
    quiet = found.steps("nobody", now_s)
    assert quiet[0] >= BEGAN_S
    assert set(quiet[1]) <= {0.0}


def test_without_a_history_there_is_the_last_minute_and_nothing_is_allocated():
    found, now_s = played([3] * 600, history_s=0.0)
    first, seen = found.steps("toy", now_s)
    assert (first, set(seen), len(seen)) == (int(now_s) - 60, {6.0}, 60)
    assert not found.restorable


def test_bins_longer_than_a_second_are_the_steps():
    found, now_s = played([3] * 600, history_s=3600.0, bin_s=5.0)
    first, seen = found.steps("toy", now_s)
    assert found.step_s == 5.0
    assert first * 5.0 == BEGAN_S
    assert set(seen) == {30.0}


def test_what_was_written_down_before_joins_what_is_seen_and_the_larger_of_both_is_right():
    found, now_s = played([3] * 300, history_s=600.0)  # 150 s, of which the last minute is not over yet
    found.restore("toy", dict.fromkeys(range(BEGAN_S - 300, BEGAN_S + 10), 7.0))
    first, seen = found.steps("toy", now_s)
    assert first == BEGAN_S - 300
    assert list(seen) == [7.0] * 310 + [6.0] * 140


def test_a_second_that_nobody_counted_is_a_hole_and_only_what_came_after_it_is_history():
    found, now_s = played([3] * 300, history_s=600.0)
    found.restore("toy", dict.fromkeys(range(BEGAN_S - 300, BEGAN_S - 20), 7.0))
    assert found.steps("toy", now_s)[0] == found.steps("toy", now_s, bridged_s=19.0)[0] == BEGAN_S
    first, seen = found.steps("toy", now_s, bridged_s=20.0)
    assert first == BEGAN_S - 300
    assert list(seen) == [7.0] * 300 + [6.0] * 150
    found.restore("toy", dict.fromkeys(range(BEGAN_S - 20, BEGAN_S), 7.0))
    assert found.steps("toy", now_s)[0] == BEGAN_S - 300


def test_a_day_of_seconds_takes_345600_bytes_a_family():
    history = ArrivalHistory(86_400)
    history.advance(BEGAN_S, BEGAN_S + 1)
    history.add("toy", BEGAN_S, 3.0)
    assert sum(ring.nbytes for ring in history._rings.values()) == 345_600
    assert history.since_hole("toy") == pytest.approx([3.0])
