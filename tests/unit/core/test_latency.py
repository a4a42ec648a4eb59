"""The histogram is within 2.2 % of the exact quantile, merges like a sum, and refuses another scheme."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trefoil.core import latency

VALUES = st.lists(st.floats(0.02, 1e6), min_size=1, max_size=200)


@given(VALUES, st.floats(0.01, 1.0))
def test_quantile_error_is_bounded(values, q):
    exact = sorted(values)[max(0, math.ceil(q * len(values)) - 1)]
    assert latency.quantile_ms(latency.build_histogram(values), q) == pytest.approx(exact, rel=0.0225)


@given(VALUES, VALUES)
def test_merging_equals_counting_together(a, b):
    merged, together = (
        latency.merge([latency.build_histogram(a), latency.build_histogram(b)]),
        latency.build_histogram(a + b),
    )
    assert (merged.index, merged.count, merged.max_ms) == (together.index, together.count, together.max_ms)
    assert merged.sum_ms == pytest.approx(together.sum_ms)


@given(st.lists(st.floats(1.0, 1e4), min_size=1, max_size=50), st.floats(0.1, 10.0), st.floats(0.01, 1.0))
def test_scaled_latencies_keep_their_mean_and_miss_a_quantile_by_a_bucket(values, factor, q):
    moved = latency.scaled(latency.build_histogram(values), factor)
    exact = latency.build_histogram([factor * value for value in values])
    assert (moved.total, moved.sum_ms, moved.max_ms) == pytest.approx((exact.total, exact.sum_ms, exact.max_ms))
    assert latency.quantile_ms(moved, q) == pytest.approx(latency.quantile_ms(exact, q), rel=0.07)


def test_extremes_and_empty():
    assert latency.bucket(0.0) == 0
    assert latency.bucket(1e12) == latency.BUCKETS - 1
    assert latency.quantile_ms(latency.build_histogram([]), 0.95) == 0.0
    assert latency.merge([latency.Histogram(), latency.build_histogram([5.0])]).total == 1


def test_another_scheme_is_refused():
    with pytest.raises(ValueError, match="scheme 2"):
        latency.merge([dataclasses.replace(latency.build_histogram([1.0]), scheme=2)])
