"""However a history is asked for page by page, the pages say together what is believed, and nothing twice."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from carbon_feed.core.history import History
from carbon_feed.serving import servicer
from carbon_feed.serving.core import queries
from carbon_feed.serving.core.queries import TimeRange, page, pieces
from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Series

SERIES = Series("GB", Method.AVERAGE, Factors.DIRECT)
READINGS = st.lists(
    st.builds(
        lambda start, length, value, known, quality: CarbonReading(
            SERIES, float(start), float(start + length), float(value), quality, fetched_at_s=float(known)
        ),
        st.integers(0, 400),
        st.integers(1, 60),
        st.integers(1, 5),
        st.integers(0, 5),
        st.sampled_from([Quality.MEASURED, Quality.ESTIMATED]),
    ),
    max_size=120,
)
EDGES = st.none() | st.integers(0, 460)


def told(history, wanted, limit, revisions=False):
    """All pages, one after another; what only a page's end has cut is whole again."""
    found, pages = [], 0
    while True:
        part, next_s = page(history, wanted, limit)
        assert len(history.starts(part.from_s, part.to_s, 10_000)) <= limit
        for some in pieces(history, part, revisions):
            for piece in some:
                last = found[-1] if found else None
                if last is not None and not revisions and last[2] is piece.reading and last[1] == piece.starts_at_s:
                    found[-1] = (last[0], piece.ends_at_s, piece.reading)
                else:
                    found.append((piece.starts_at_s, piece.ends_at_s, piece.reading))
        pages += 1
        if next_s is None:
            return found, pages
        assert next_s > wanted.from_s
        wanted = TimeRange(next_s, wanted.to_s, wanted.as_of_s)


@settings(deadline=None)
@given(READINGS, EDGES, EDGES, st.none() | st.integers(0, 5), st.integers(1, 40))
def test_pages_say_together_what_is_believed(readings, begin, end, as_of, limit):
    history = History(SERIES)
    for reading in readings:
        history.add(reading)
    if begin is not None and end is not None and begin >= end:
        begin, end = end, begin + 1
    wanted = TimeRange.from_times(begin, end, as_of)
    whole = history.between(wanted.from_s, wanted.to_s, wanted.as_of_s)
    found, pages = told(history, wanted, limit)
    assert found == [(piece.starts_at_s, piece.ends_at_s, piece.reading) for piece in whole]
    assert pages == max(1, math.ceil(len(history.starts(wanted.from_s, wanted.to_s, 10_000)) / limit))


@settings(deadline=None)
@given(READINGS, st.integers(1, 40))
def test_pages_of_revisions_hold_each_version_once(readings, limit):
    history = History(SERIES)
    for reading in readings:
        history.add(reading)
    starts = history.starts(-math.inf, math.inf, 10_000)
    every = [version for start in starts for version in history.revisions(start)]
    assert [reading for _, _, reading in told(history, TimeRange(), limit, revisions=True)[0]] == every


def test_the_pieces_that_are_looked_up_at_once_do_not_show(monkeypatch):
    monkeypatch.setattr(queries, "PIECE", 1)
    test_pages_say_together_what_is_believed()


@given(st.floats(1.7e9, 2.1e9), st.floats(0.001, 1e5))
def test_a_page_begins_where_the_last_one_ended_though_times_are_cut_on_the_wire(start_s, length_s):
    history = History(SERIES)
    for at_s in (start_s, start_s + length_s):
        history.add(CarbonReading(SERIES, at_s, at_s + length_s, 100.0, Quality.MEASURED))
    _, next_s = page(history, TimeRange(), 1)
    response = pb.GetHistoryResponse()
    servicer._set_time(response.next_from_at, next_s, math.floor)
    again = pb.GetHistoryRequest(zone="GB")
    again.from_at.CopyFrom(response.next_from_at)
    wanted, more = page(history, TimeRange.from_times(servicer._time(again, "from_at"), None, None), 1)
    assert (wanted.from_s, more) == (start_s + length_s, None)
    assert [len(some) for some in pieces(history, wanted)] == [1]
