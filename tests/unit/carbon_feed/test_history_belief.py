"""Belief is kept up interval by interval: it is always what painting everything again would show."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from carbon_feed.core.history import History
from tests.unit.carbon_feed.test_history import SERIES, T0_S, said, versions
from trefoil.core.units import HOUR_S


def painted(history):
    return [(p.starts_at_s, p.ends_at_s, p.reading.intensity_g_per_kwh) for p in history.between(-np.inf, np.inf)]


def rows(history):
    return [tuple(row) for row in np.stack(history.arrays(), axis=1).tolist()]


@settings(max_examples=150, deadline=None)
@given(readings=versions, bound=st.integers(1, 12), kept=st.integers(2, 5))
def test_after_every_reading_in_any_order_with_overlaps_gaps_and_bounds(readings, bound, kept):
    history = History(SERIES, intervals_max=bound, revisions_max=kept)
    for reading in readings:
        before = history.version
        history.add(reading)
        assert rows(history) == painted(history)
        assert history.version >= before


def test_a_gap_in_the_middle_of_a_long_past_is_filled_row_by_row():
    history = History(SERIES)
    for half in range(0, 4000):
        if not 1000 <= half < 1100:
            history.add(said(half / 2, 100.0 + half % 7, hours=0.5))
    for half in range(1099, 999, -1):
        history.add(said(half / 2, 300.0, hours=0.5))
    assert rows(history) == painted(history)
    assert history.means(T0_S + 500 * HOUR_S, 1800.0, 100).tolist() == [300.0] * 100


def test_an_integral_is_of_its_own_time():
    history = History(SERIES)
    for hour in range(48):
        history.add(said(hour, 100.0))
    whole, late = history.integral(), history.integral(begin_s=T0_S + 24 * HOUR_S)
    history.add(said(30, 900.0, 50 * HOUR_S))
    begins = T0_S + np.arange(24, 48) * HOUR_S
    assert whole.means(begins, begins + HOUR_S).tolist() == late.means(begins, begins + HOUR_S).tolist() == [100.0] * 24
    assert np.isnan(late.means(np.array([T0_S]), np.array([T0_S + HOUR_S]))).all()
