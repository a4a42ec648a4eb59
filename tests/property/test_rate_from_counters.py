"""Increases of counters by bin: nothing is lost or made up by restarts, gaps and where bins begin."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trefoil.assess.series import increases

STEP_S = 15.0


@st.composite
def counters(draw):
    """Rises of a counter between samples, and places at which it began again."""
    rises = draw(st.lists(st.floats(0, 1e6), min_size=2, max_size=60))
    restarts = draw(st.sets(st.integers(1, len(rises)), max_size=4))
    return np.array(rises), restarts


def samples(rises: np.ndarray, restarts: set[int]) -> tuple[np.ndarray, np.ndarray]:
    """Times and values. What begins again and is at once above half its old value cannot be told from noise."""
    values, at = [1e7], 1e7
    for number, rise in enumerate(rises, 1):
        at = float(rise) if number in restarts and rise < at / 2 else at + float(rise)
        values.append(at)
    return STEP_S * np.arange(len(values)), np.array(values)


@given(counters(), st.integers(1, 30), st.floats(0, 100))
def test_all_that_came_is_counted_once_whatever_the_bins(counter, bins, before_s):
    times, values = samples(*counter)
    edges = np.linspace(-before_s, times[-1] + 1.0, bins + 1)
    rise, covered, _ = increases(times, values, edges)
    np.testing.assert_allclose(rise.sum(), counter[0].sum(), rtol=1e-9, atol=1e-3)
    np.testing.assert_allclose(covered.sum(), times[-1], rtol=1e-9)
    assert (rise >= -1e-6).all()
    assert (covered <= np.diff(edges) + 1e-6).all()


@given(counters(), st.data())
def test_a_gap_adds_neither_time_nor_counts(counter, data):
    times, values = samples(*counter)
    cut = data.draw(st.integers(1, times.size - 1))
    later = np.concatenate((times[:cut], times[cut:] + 3600.0))
    edges = np.linspace(0.0, later[-1], 20)
    rise, covered, _ = increases(later, values, edges)
    np.testing.assert_allclose(rise.sum(), counter[0].sum() - counter[0][cut - 1], rtol=1e-9, atol=1e-3)
    np.testing.assert_allclose(covered.sum(), times[-1] - STEP_S, atol=1e-6)


@given(st.floats(0.01, 1e4), st.integers(3, 200), st.integers(1, 20))
def test_a_steady_rate_is_that_rate_in_each_bin(rate, count, bins):
    times = STEP_S * np.arange(count)
    edges = np.linspace(0.0, times[-1], bins + 1)
    rise, covered, _ = increases(times, rate * times, edges)
    np.testing.assert_allclose(rise / covered, rate, rtol=1e-6)
