"""Two times: what an interval was said to be, and when that became known. Any order, any clock change, any month."""

import datetime
import itertools
import math
import zoneinfo
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carbon_feed.core.history import AddResult, History
from trefoil.core import errors
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Series
from trefoil.core.units import HOUR_S

SERIES = Series("GB", Method.AVERAGE, Factors.DIRECT)
T0_S = 1_795_000_000.0 // HOUR_S * HOUR_S


def said(hour, value, known_s=None, *, hours=1.0, quality=Quality.MEASURED, rung=0, as_of=1, series=SERIES):
    """`value` for the interval that starts `hour` hours after T0."""
    start = T0_S + hour * HOUR_S
    return CarbonReading(
        series=series,
        starts_at_s=start,
        ends_at_s=start + hours * HOUR_S,
        intensity_g_per_kwh=value,
        quality=quality,
        provider="neso",
        observed_at_s=start,
        fetched_at_s=start if known_s is None else T0_S + known_s,
        rung=rung,
        as_of=as_of,
    )


def kept(*readings, **bounds):
    history = History(SERIES, **bounds)
    for reading in readings:
        history.add(reading)
    return history


# Whole hours and half hours that may overlap, known at any time, no two alike.
versions = st.lists(
    st.builds(
        said,
        hour=st.integers(0, 12).map(lambda n: n / 2),
        value=st.floats(0, 1500).map(lambda v: round(v, 3)),
        known_s=st.integers(0, 50_000),
        hours=st.sampled_from([0.5, 1.0, 2.0]),
        quality=st.sampled_from([Quality.MEASURED, Quality.ESTIMATED]),
    ),
    max_size=25,
    unique_by=(lambda r: r.intensity_g_per_kwh, lambda r: r.fetched_at_s),
)
as_ofs = st.just(math.inf) | st.integers(-1, 50_000).map(lambda n: T0_S + n)


def believed(history, valid_s, as_of_s=math.inf):
    """Reading that is believed of an instant; None: nobody has said anything."""
    return next((p.reading for p in history.between(valid_s, math.nextafter(valid_s, math.inf), as_of_s)), None)


def oracle(readings, valid_s, as_of_s):
    """The definition, word by word."""
    told = [r for r in readings if r.fetched_at_s <= as_of_s and r.starts_at_s <= valid_s < r.ends_at_s]
    return max(told, key=lambda r: (-r.quality, r.fetched_at_s), default=None)


@settings(max_examples=80, deadline=None)
@given(readings=versions, order=st.randoms(use_true_random=False), as_of_s=as_ofs)
def test_belief_is_what_its_definition_says_at_every_instant_in_whatever_order_it_is_told(readings, order, as_of_s):
    shuffled = readings.copy()
    order.shuffle(shuffled)
    pieces = kept(*readings).between(T0_S, T0_S + 10 * HOUR_S, as_of_s)
    assert pieces == kept(*shuffled).between(T0_S, T0_S + 10 * HOUR_S, as_of_s)
    for one, other in itertools.pairwise(pieces):
        assert one.ends_at_s <= other.starts_at_s
    for quarter in range(40):
        instant = T0_S + quarter * HOUR_S / 4
        shown = [p.reading for p in pieces if p.starts_at_s <= instant < p.ends_at_s]
        assert shown == [r for r in [oracle(readings, instant, as_of_s)] if r is not None]


def test_a_revision_is_known_only_from_when_it_was_said():
    history = kept(said(0, 200, 3600, quality=Quality.ESTIMATED), said(0, 210, 7200), said(0, 215, 90_000))
    found = [believed(history, T0_S, T0_S + known) for known in (0, 3600, 7199, 7200, 90_000)]
    assert [r and r.intensity_g_per_kwh for r in found] == [None, 200, 200, 210, 215]
    assert [r.intensity_g_per_kwh for r in history.revisions(T0_S)] == [200, 210, 215]


def test_a_look_back_sees_what_was_added_since():
    history = kept(said(0, 200, 3600))
    then_s = T0_S + 9000
    assert history.means(T0_S, HOUR_S, 1, then_s) == pytest.approx([200])
    history.add(said(0, 240, 7200))
    assert history.means(T0_S, HOUR_S, 1, then_s) == pytest.approx([240])
    assert history.means(T0_S, HOUR_S, 1, T0_S + 5000) == pytest.approx([200])


def test_an_estimate_does_not_replace_a_measurement():
    history = kept(said(0, 210, 7200), said(0, 999, 90_000, quality=Quality.ESTIMATED))
    assert believed(history, T0_S).intensity_g_per_kwh == 210


def test_said_again_is_no_revision_and_taken_back_is_one():
    history = History(SERIES)
    told = [history.add(said(0, v, k)) for v, k in ((200, 1), (200, 2), (210, 3), (200, 4))]
    assert told == [AddResult.NEW, AddResult.KNOWN, AddResult.REVISION, AddResult.REVISION]
    assert believed(history, T0_S, T0_S + 3).intensity_g_per_kwh == 210
    assert believed(history, T0_S).intensity_g_per_kwh == 200


@pytest.mark.parametrize("quality", [Quality.FORECAST, Quality.CARRIED, Quality.CLIMATOLOGY, Quality.STATIC])
def test_stand_ins_never_become_history(quality):
    history = History(SERIES)
    assert history.add(said(0, 200, quality=quality)) is AddResult.STAND_IN
    assert history.add(said(0, 200, rung=2)) is AddResult.STAND_IN
    assert history.add(said(0, 200, rung=1)) is AddResult.NEW  # a second provider of the same kind
    assert len(history) == 1


@pytest.mark.parametrize(
    "other",
    [replace(SERIES, zone="FR"), replace(SERIES, method=Method.MARGINAL), replace(SERIES, factors=Factors.LIFECYCLE)],
)
def test_series_are_never_joined(other):
    with pytest.raises(errors.SeriesMismatch, match="Remedy"):
        History(SERIES).add(said(0, 200, series=other))


def test_it_is_bounded():
    history = History(SERIES, intervals_max=10, revisions_max=3)
    for hour in range(1000):
        history.add(said(hour, hour % 700))
    assert len(history) == 10
    assert history.add(said(5, 1)) is AddResult.TOO_OLD
    for i in range(20):
        history.add(said(999, 1 + i, 4e6 + i))
    assert [r.intensity_g_per_kwh for r in history.revisions(T0_S + 999 * HOUR_S)] == [299, 19, 20]


def test_means_weigh_by_time_and_never_invent():
    history = kept(said(0, 100), said(1, 200, hours=0.5), said(1.5, 400, hours=0.5), said(3, 50, hours=0.25))
    assert np.array_equal(history.means(T0_S, HOUR_S, 4), [100, 300, math.nan, math.nan], equal_nan=True)
    assert history.means(T0_S, 2 * HOUR_S, 1) == pytest.approx([200])
    assert np.isnan(History(SERIES).means(T0_S, HOUR_S, 2)).all()


ZONES = ("Europe/London", "America/Los_Angeles", "Australia/Sydney", "Europe/Berlin", "Australia/Lord_Howe")


@settings(max_examples=60, deadline=None)
@given(
    zone=st.sampled_from(ZONES),
    day=st.dates(datetime.date(2024, 1, 2), datetime.date(2027, 12, 28))
    | st.sampled_from([datetime.date(2026, 3, 29), datetime.date(2026, 10, 25), datetime.date(2026, 11, 1),
                       datetime.date(2026, 3, 8), datetime.date(2026, 4, 5), datetime.date(2026, 10, 4),
                       datetime.date(2024, 2, 29), datetime.date(2026, 12, 31)]),
    order=st.randoms(use_true_random=False),
)  # fmt: skip
def test_local_days_have_no_gap_and_no_overlap_across_clock_changes_and_month_ends(zone, day, order):
    """Half hours of three local days, as a provider cuts them: 46, 48 or 50 a day (or half an hour's change)."""
    local = zoneinfo.ZoneInfo(zone)

    def midnight_s(date):
        return datetime.datetime.combine(date, datetime.time(), local).timestamp()

    days = [day + datetime.timedelta(days=n) for n in range(4)]
    begin_s, end_s = midnight_s(days[0]), midnight_s(days[-1])
    starts = np.arange(begin_s, end_s, HOUR_S / 2)
    readings = [
        replace(said(0, float(i % 48)), starts_at_s=float(s), ends_at_s=float(s) + HOUR_S / 2, fetched_at_s=float(s))
        for i, s in enumerate(starts)
    ]
    order.shuffle(readings)
    history = kept(*readings)
    for one, other in itertools.pairwise(days):
        pieces = history.between(midnight_s(one), midnight_s(other))
        hours = (midnight_s(other) - midnight_s(one)) / HOUR_S
        assert len(pieces) == 2 * hours
        assert hours in (23, 23.5, 24, 24.5, 25)
        assert pieces[0].starts_at_s == midnight_s(one)
        assert pieces[-1].ends_at_s == midnight_s(other)
        assert all(a.ends_at_s == b.starts_at_s for a, b in itertools.pairwise(pieces))
    assert not np.isnan(history.means(begin_s, HOUR_S / 2, len(starts))).any()
