"""Queries of what the feed holds: pages of a history, slices of a forecast."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from carbon_feed.core.history import History, Piece
from carbon_feed.forecast.resample import resample
from trefoil.core import errors
from trefoil.core.carbon import CarbonForecast, CarbonReading
from trefoil.core.common import IdentityKey

PAGE_MAX: Final = 10_000
PAGE: Final = 1_000
PIECE: Final = 50  # intervals that are looked up at once: others are answered in between
TICK_S: Final = 2e-6  # times on the wire are cut to microseconds, and a float of today adds a quarter of one
STEPS_S: Final = (300, 900, 1800, 3600)


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Range of valid time as it was known at a time; infinite = without that limit."""

    from_s: float = -math.inf
    to_s: float = math.inf
    as_of_s: float = math.inf

    @classmethod
    def from_times(cls, from_s: float | None, to_s: float | None, as_of_s: float | None) -> "TimeRange":
        """Range from optional limits; None = without that limit.

        Raises:
            errors.InvalidInput: it ends before it begins.
        """
        made = cls(
            -math.inf if from_s is None else from_s,
            math.inf if to_s is None else to_s,
            math.inf if as_of_s is None else as_of_s,
        )
        if made.from_s >= made.to_s:
            raise errors.InvalidInput(
                "not before to_at", field="from_at", value=made.from_s, remedy="give from_at < to_at, or leave one out"
            )
        return made


def page_limit(limit: int) -> int:
    """Intervals of a page: the limit that was asked for, or the default for 0.

    Raises:
        errors.InvalidInput: more than PAGE_MAX.
    """
    if limit > PAGE_MAX:
        raise errors.InvalidInput(
            f"more than {PAGE_MAX}", field="limit", value=limit, remedy="ask for pages: next_from_at of one is the next"
        )
    return limit or PAGE


def page(history: History, wanted: TimeRange, limit: int) -> tuple[TimeRange, float | None]:
    """Range of a page of so many intervals, and where the next page begins (None = nowhere)."""
    for start in history.starts(wanted.from_s - TICK_S, wanted.from_s + TICK_S, 1):
        wanted = dataclasses.replace(wanted, from_s=start)
    starts = history.starts(wanted.from_s, wanted.to_s, limit + 1)
    if len(starts) <= limit:
        return wanted, None
    return dataclasses.replace(wanted, to_s=starts[limit]), starts[limit]


def pieces(history: History, wanted: TimeRange, revisions: bool = False) -> Iterator[list[Piece]]:
    """Pieces of a page, a few intervals at a time; what is added meanwhile may be seen or not."""
    begin_s, more = wanted.from_s, True
    last: Piece | None = None
    while more:
        starts = history.starts(begin_s, wanted.to_s, PIECE + 1)
        more = len(starts) > PIECE
        end_s = starts[PIECE] if more else wanted.to_s
        if revisions:
            found = [version for start in starts[:PIECE] for version in history.revisions(start)]
            yield [Piece(v.starts_at_s, v.ends_at_s, v) for v in found if v.fetched_at_s <= wanted.as_of_s]
        else:
            fresh = [*([last] if last else []), *history.between(begin_s, end_s, wanted.as_of_s)]
            if last is not None and len(fresh) > 1 and fresh[1].reading is last.reading:  # it was cut only by us
                fresh[:2] = [dataclasses.replace(last, ends_at_s=fresh[1].ends_at_s)]
            last = fresh.pop() if fresh and more else None
            yield fresh
        begin_s = end_s


def piece_reading(piece: Piece) -> CarbonReading:
    """Reading that is believed of a piece, with the piece's ends."""
    return dataclasses.replace(piece.reading, starts_at_s=piece.starts_at_s, ends_at_s=piece.ends_at_s)


def check_forecast_request(horizon_s: float, step_s: float) -> None:
    """Check horizon and step of a forecast request.

    Raises:
        errors.InvalidInput: a horizon that is not a time ahead, or a step that is not offered.
    """
    if not 0.0 <= horizon_s < math.inf:
        raise errors.InvalidInput(
            "not a time ahead", field="horizon_s", value=horizon_s, remedy="give seconds, e.g. 86400; 0 = all of it"
        )
    if step_s not in (0.0, *STEPS_S):
        offered = ", ".join(str(step) for step in STEPS_S)
        raise errors.InvalidInput(
            "no such step", field="step_s", value=step_s, remedy=f"give one of {offered}; 0 = as it was issued"
        )


def forecast_slice(
    forecast: CarbonForecast, now_s: float, horizon_s: float, step_s: float, speedup: float
) -> CarbonForecast:
    """Slice of a forecast: the bands to come, up to a horizon (0 = all), in other steps (0 = as they are).

    Both are of the source's time, which runs `speedup` times as fast as ours.
    """
    whole = _in_steps(IdentityKey(forecast), step_s / speedup)
    first = bisect.bisect_right(whole.bands, now_s, key=lambda band: band.ends_at_s)
    end = len(whole.bands)
    if horizon_s:
        end = bisect.bisect_left(whole.bands, now_s + horizon_s / speedup, key=lambda band: band.starts_at_s)
    return _between(IdentityKey(whole), first, max(first, end))


@functools.lru_cache(maxsize=64)
def _in_steps(forecast: IdentityKey[CarbonForecast], step_s: float) -> CarbonForecast:
    return resample(forecast.value, step_s) if step_s else forecast.value


@functools.lru_cache(maxsize=64)
def _between(forecast: IdentityKey[CarbonForecast], first: int, end: int) -> CarbonForecast:
    return dataclasses.replace(forecast.value, bands=forecast.value.bands[first:end])
