"""Whatever a zone does, its watchers hear of each change that counts, and of nothing else."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carbon_feed.serving.core.change_filter import FLOOR_G_PER_KWH, HYSTERESIS_SHARE, ChangeFilter
from trefoil.core import errors
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Rung, Series

SERIES = Series("GB", Method.AVERAGE, Factors.DIRECT)
VALUES = st.floats(0, 1500)
READINGS = st.builds(
    CarbonReading,
    series=st.just(SERIES),
    intensity_g_per_kwh=VALUES,
    quality=st.sampled_from([Quality.MEASURED, Quality.ESTIMATED, Quality.CARRIED]),
    rung=st.sampled_from([int(rung) for rung in Rung]),
    as_of=st.integers(0, 5),
)
SAME_KIND = st.lists(VALUES, min_size=1, max_size=60).map(lambda values: [of(value) for value in values])
LIMITS = st.builds(ChangeFilter, st.floats(0.001, 1), st.floats(0, 1))


def of(value: float, **changes) -> CarbonReading:
    return replace(CarbonReading(SERIES, intensity_g_per_kwh=value, quality=Quality.MEASURED), **changes)


def heard(watching: ChangeFilter, readings) -> list[tuple[CarbonReading, str, bool]]:
    """Each reading with the reason for which it was announced (empty = it was not) and what was announced before."""
    told, last = [], None
    for reading in readings:
        decision = watching.decide(last, reading)
        told.append((reading, decision.why, last.reading if last else None))
        last = decision.announced
    return told


def announced(watching: ChangeFilter, values) -> list[float]:
    return [reading.intensity_g_per_kwh for reading, why, _ in heard(watching, map(of, values)) if why]


@given(LIMITS, st.lists(READINGS, min_size=1, max_size=60))
def test_every_change_of_quality_or_rung_is_announced(watching, readings):
    for reading, why, before in heard(watching, readings):
        if before is None or (reading.quality, reading.rung) != (before.quality, before.rung):
            assert why


@given(LIMITS, SAME_KIND)
def test_inside_the_band_around_what_was_announced_nothing_is(watching, readings):
    for reading, why, before in heard(watching, readings):
        if before is not None and why:
            at = before.intensity_g_per_kwh
            off = abs(reading.intensity_g_per_kwh - at)
            assert off > watching.change_ratio * max(at, FLOOR_G_PER_KWH) * (1 - 1e-9)


@given(LIMITS, SAME_KIND)
def test_nobody_is_left_with_a_value_that_is_too_far_off(watching, readings):
    last = None
    limit = watching.change_ratio + watching.hysteresis_ratio
    for reading in readings:
        last = watching.decide(last, reading).announced
        at = last.reading.intensity_g_per_kwh
        off = abs(reading.intensity_g_per_kwh - at)
        assert off <= limit * max(at, FLOOR_G_PER_KWH) * (1 + 1e-9)


@given(st.floats(50, 1500), st.floats(0.01, 0.5), st.integers(2, 40), st.data())
def test_swings_inside_a_band_do_not_flap(level, change, count, data):
    """Swings of less than change + hysteresis about what was announced are heard of once at most, and not at each."""
    watching = ChangeFilter.from_ratios(change)
    swing = change * (1 + HYSTERESIS_SHARE) / (1 + change) * 0.99  # as seen from the upper end, too
    values = [level * (1 + data.draw(st.sampled_from([0.0, swing]))) for _ in range(count)]
    assert len(announced(watching, [level, *values])) <= 2


@given(SAME_KIND)
def test_without_a_ratio_every_reading_that_differs_is_announced(readings):
    told = [reading for reading, why, _ in heard(ChangeFilter(), readings) if why]
    assert told == [reading for reading, _ in itertools.groupby(readings)]


@given(LIMITS, SAME_KIND)
def test_the_same_again_says_nothing(watching, readings):
    once = [reading for reading, why, _ in heard(watching, readings) if why]
    twice = [reading for reading, why, _ in heard(watching, [r for r in readings for _ in range(2)]) if why]
    assert twice == once


def test_worked_example():
    told = announced(ChangeFilter.from_ratios(0.05), [200, 209, 211, 200.5, 203, 195, 185, 210])
    assert told == [200, 211, 195, 185, 210], "211: +5.5 %; 200.5: -5.0 %; 195: a turn of -7.6 %; 185: -5.1 %"


def test_near_zero_a_share_of_the_value_says_nothing():
    assert announced(ChangeFilter.from_ratios(0.05), [0.0, 0.04, 0.01, 0.03, 0.0]) == [0.0]
    assert announced(ChangeFilter.from_ratios(0.05), [0.0, 0.1]) == [0.0, 0.1]


def test_the_reason_is_told():
    readings = [of(100), of(104), of(110), of(110, quality=Quality.CARRIED, rung=2), of(110, quality=Quality.CARRIED)]
    assert [why for _, why, _ in heard(ChangeFilter.from_ratios(0.05), readings)] == [
        "first",
        "",
        "+10.0% since the last announcement",
        "quality measured -> carried",
        "rung carried -> normal",
    ]


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_what_is_no_ratio_is_refused_by_name(value):
    with pytest.raises(errors.InvalidInput, match=r"change_ratio = .*: not a ratio. Remedy: give 0..1"):
        ChangeFilter.from_ratios(value)
    with pytest.raises(errors.InvalidInput, match="hysteresis_ratio = "):
        ChangeFilter.from_ratios(0.05, value)
    assert ChangeFilter.from_ratios(0.04) == ChangeFilter(0.04, 0.02)
