"""Bitemporal history: what was said of each interval, and when it became known, so that a replay knows no more.

Valid time: [starts_at_s, ends_at_s) of a reading. Known time: its fetched_at_s. Nothing is overwritten: a revision is a
further version. What is believed of an instant, as known at `as_of_s`, is the version that covers it with the best
quality. An estimate never replaces a measurement. Of several such versions it is the one known last, of these the one
with the highest `as_of`.
Where intervals overlap, for instance after a change of resolution, the same rule decides instant by instant.
Only what a source said of the grid is kept: stand-ins (rungs below a second provider) and forecasts are refused, or a
carried value would come back as history. All times are UTC seconds: a change of clocks is neither a gap nor an overlap.
Intervals may come in any order. The same said again is dropped when it comes after what it repeats.
Bounded: `intervals_max` intervals, the oldest go first; `revisions_max` versions of one, the second oldest goes first.
"""

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trefoil.core import errors
from trefoil.core.carbon import CarbonReading, Quality, Rung, Series

INTERVALS_MAX: Final = 115_200  # 400 days of five minutes
REVISIONS_MAX: Final = 64  # half-hourly revisions of more than a day
COVERED_MIN: Final = 0.5  # a mean of less than half a step is not that step's mean

Values = NDArray[np.float64]


class AddResult(StrEnum):
    """What became of a reading that was added."""

    NEW = "new"
    REVISION = "revision"
    KNOWN = "known"
    """Said again; only the first time counts."""
    STAND_IN = "stand-in"
    """Not said of the grid by anyone; not kept."""
    TOO_OLD = "too old"
    """Older than all of a full history; not kept."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of valid time and the reading that is believed of it."""

    starts_at_s: float
    ends_at_s: float
    reading: CarbonReading


class Integral:
    """Integral of a step function of intensities: time-weighted means over any intervals."""

    def __init__(self, starts: Values, ends: Values, values: Values) -> None:
        lengths = ends - starts
        self._knots = np.stack([starts, ends], axis=1).ravel()
        self._grams = _cumulated(values * lengths)
        self._covered = _cumulated(lengths)

    def means(self, begins: Values, ends: Values, covered_min: float = COVERED_MIN) -> Values:
        """Means over each [begin, end) [g/kWh]; NaN where less than that share of it is known."""
        if not len(self._knots):
            return np.full(len(begins), np.nan)
        grams = np.interp(ends, self._knots, self._grams) - np.interp(begins, self._knots, self._grams)
        covered = np.interp(ends, self._knots, self._covered) - np.interp(begins, self._knots, self._covered)
        enough = covered >= covered_min * (ends - begins)
        means: Values = np.divide(grams, covered, out=np.full(len(begins), np.nan), where=enough & (covered > 0))
        return means


class History:
    """Bitemporal history of one series."""

    def __init__(self, series: Series, intervals_max: int = INTERVALS_MAX, revisions_max: int = REVISIONS_MAX) -> None:
        assert intervals_max >= 1
        assert revisions_max >= 2, "the first and the newest version of an interval are always kept"
        self.series = series
        self._intervals_max = intervals_max
        self._revisions_max = revisions_max
        self._starts: list[float] = []
        self._versions: dict[float, list[CarbonReading]] = {}
        self._longest_s = 0.0
        self.version = 0
        """Another number whenever something was added."""
        self._current_arrays = _PieceArrays()
        self._past_arrays: tuple[float, _PieceArrays] | None = None  # the last look back, until something is added

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, reading: CarbonReading) -> AddResult:
        """Add a version of an interval.

        Raises:
            errors.SeriesMismatch: another zone, method or factors.
        """
        check_series(self.series, reading.series)
        assert math.isfinite(reading.intensity_g_per_kwh), "readings are validated before they are kept"
        assert reading.starts_at_s < reading.ends_at_s
        if reading.rung > Rung.SECONDARY or reading.quality not in (Quality.MEASURED, Quality.ESTIMATED):
            return AddResult.STAND_IN
        self._past_arrays = None
        self.version += 1
        versions = self._versions.get(reading.starts_at_s)
        if versions is None:
            return self._add_interval(reading)
        at = bisect.bisect_right(versions, _known_order(reading), key=_known_order)
        if at and _content(versions[at - 1]) == _content(reading):
            return AddResult.KNOWN
        versions.insert(at, reading)
        ends_s = max(version.ends_at_s for version in versions)
        if len(versions) > self._revisions_max:
            del versions[1]
        self._longest_s = max(self._longest_s, reading.ends_at_s - reading.starts_at_s)
        row = bisect.bisect_left(self._starts, reading.starts_at_s)
        if not self._current_arrays.replace(row, versions):
            self._update_pieces(reading.starts_at_s, ends_s)
        return AddResult.REVISION

    def revisions(self, starts_at_s: float) -> tuple[CarbonReading, ...]:
        """Versions of the interval that starts then, in the order in which they became known."""
        return tuple(self._versions.get(starts_at_s, ()))

    def starts(self, begin_s: float, end_s: float, count_max: int) -> tuple[float, ...]:
        """Starts of the first `count_max` intervals in [begin, end): for pages."""
        first, last = (bisect.bisect_left(self._starts, at_s) for at_s in (begin_s, end_s))
        return tuple(self._starts[first : min(last, first + count_max)])

    def between(self, begin_s: float, end_s: float, as_of_s: float = math.inf) -> tuple[Piece, ...]:
        """Believed pieces of [begin, end), in time order, without overlap, cut at its ends; gaps stay gaps."""
        found = [
            r for r in self._versions_near(begin_s, end_s, as_of_s) if r.ends_at_s > begin_s and r.starts_at_s < end_s
        ]
        return tuple(_visible_pieces(found, begin_s, end_s))

    def newest(self, as_of_s: float = math.inf) -> CarbonReading | None:
        """Reading of the interval that starts last."""
        for start in reversed(self._starts):
            versions = [r for r in self._versions[start] if r.fetched_at_s <= as_of_s]
            if versions:
                return max(versions, key=_precedence)
        return None

    def arrays(self, as_of_s: float = math.inf) -> tuple[Values, Values, Values]:
        """Starts, ends [s] and values [g/kWh] of all that is believed, in time order, without overlap."""
        if math.isinf(as_of_s) and as_of_s > 0:
            return self._current_arrays.views()
        if self._past_arrays is None or self._past_arrays[0] != as_of_s:
            self._past_arrays = as_of_s, _PieceArrays(self.between(-math.inf, math.inf, as_of_s))
        return self._past_arrays[1].views()

    def integral(self, as_of_s: float = math.inf, begin_s: float = -math.inf) -> Integral:
        """Integral for many means, none of which begins before `begin_s`. A copy: what is added later is not in it."""
        starts, ends, values = self.arrays(as_of_s)
        first = int(np.searchsorted(ends, begin_s, side="right"))
        return Integral(starts[first:], ends[first:], values[first:])

    def means(self, begin_s: float, step_s: float, count: int, as_of_s: float = math.inf) -> Values:
        """Means of `count` equal steps from `begin_s` [g/kWh]; NaN where less than half of a step is known."""
        begins: Values = begin_s + step_s * np.arange(count, dtype=np.float64)
        starts, ends, values = self.arrays(as_of_s)
        near = slice(np.searchsorted(ends, begin_s, side="right"), np.searchsorted(starts, begin_s + count * step_s))
        return Integral(starts[near], ends[near], values[near]).means(begins, begins + step_s)

    def _add_interval(self, reading: CarbonReading) -> AddResult:
        start = reading.starts_at_s
        if len(self._starts) >= self._intervals_max:
            if start < self._starts[0]:
                return AddResult.TOO_OLD
            gone = self._starts.pop(0)
            ends_s = max(version.ends_at_s for version in self._versions.pop(gone))
            if not self._current_arrays.forget_first():
                self._update_pieces(gone, ends_s)
        bisect.insort(self._starts, start)
        self._versions[start] = [reading]
        self._longest_s = max(self._longest_s, reading.ends_at_s - start)
        if not self._current_arrays.append(reading):
            self._update_pieces(start, reading.ends_at_s)
        return AddResult.NEW

    def _update_pieces(self, begin_s: float, end_s: float) -> None:
        """What is believed of [begin, end) may have changed; the rest costs nothing, however long the history is."""
        begin_s, end_s, rows = self._current_arrays.around(begin_s, end_s)
        self._current_arrays.put(rows, self.between(begin_s, end_s), len(self._starts))

    def _versions_near(self, begin_s: float, end_s: float, as_of_s: float) -> Iterator[CarbonReading]:
        """All versions known by then whose interval may touch [begin, end]."""
        first = bisect.bisect_left(self._starts, begin_s - self._longest_s)
        for start in self._starts[first : bisect.bisect_right(self._starts, end_s)]:
            for reading in self._versions[start]:
                if reading.fetched_at_s <= as_of_s:
                    yield reading


class _PieceArrays:
    """Belief as arrays. `_plain`: row i is all of interval i, so that a row can be changed alone."""

    def __init__(self, pieces: tuple[Piece, ...] = ()) -> None:
        self._rows = _row_array(pieces)
        self._first, self._end = 0, len(pieces)
        self._plain = not pieces

    def append(self, reading: CarbonReading) -> bool:
        """Whether it simply follows what is there."""
        if self._end > self._first and reading.starts_at_s < self._rows[self._end - 1, 1]:
            return False
        self._make_room(1)
        self._rows[self._end] = reading.starts_at_s, reading.ends_at_s, reading.intensity_g_per_kwh
        self._end += 1
        return True

    def replace(self, row: int, versions: list[CarbonReading]) -> bool:
        """Whether a row could take what is believed now; not where a version reaches further than the row."""
        held_end_s = self._rows[self._first + row, 1] if self._plain else math.nan
        if any(version.ends_at_s != held_end_s for version in versions):
            return False
        self._rows[self._first + row, 2] = max(versions, key=_precedence).intensity_g_per_kwh
        return True

    def forget_first(self) -> bool:
        """Whether the oldest interval could be left out."""
        self._first += self._plain
        return self._plain

    def around(self, begin_s: float, end_s: float) -> tuple[float, float, slice]:
        """The rows that a change of [begin, end) may touch, with one more at each side, and what they cover."""
        starts, ends, _ = self.views()
        first = max(0, int(np.searchsorted(ends, begin_s, side="right")) - 1)
        after = min(len(starts), int(np.searchsorted(starts, end_s, side="left")) + 1)
        if first < after:
            begin_s, end_s = min(begin_s, float(starts[first])), max(end_s, float(ends[after - 1]))
        return begin_s, end_s, slice(first, after)

    def put(self, rows: slice, pieces: tuple[Piece, ...], intervals: int) -> None:
        """Other rows in the place of some."""
        more = len(pieces) - (rows.stop - rows.start)
        self._make_room(max(0, more))
        start, stop = self._first + rows.start, self._first + rows.stop
        self._rows[stop + more : self._end + more] = self._rows[stop : self._end].copy()
        self._rows[start : stop + more] = _row_array(pieces)
        self._end += more
        self._plain = (
            self._plain
            and self._end - self._first == intervals
            and all((p.starts_at_s, p.ends_at_s) == (p.reading.starts_at_s, p.reading.ends_at_s) for p in pieces)
        )

    def views(self) -> tuple[Values, Values, Values]:
        held = self._rows[self._first : self._end]
        return held[:, 0], held[:, 1], held[:, 2]

    def _make_room(self, count: int) -> None:
        if self._end + count > len(self._rows):
            held = self._rows[self._first : self._end]
            self._rows = np.concatenate([held, np.empty((max(64, count, len(held)), 3))])
            self._first, self._end = 0, len(held)


def _row_array(pieces: tuple[Piece, ...]) -> Values:
    rows = [(p.starts_at_s, p.ends_at_s, p.reading.intensity_g_per_kwh) for p in pieces]
    return np.array(rows, dtype=float).reshape(-1, 3)


def check_series(wanted: Series, given: Series) -> None:
    """Check that two series may be joined or compared.

    Raises:
        errors.SeriesMismatch: names the field and both values.
    """
    for field in ("zone", "method", "factors"):
        ours, theirs = getattr(wanted, field), getattr(given, field)
        if ours != theirs:
            raise errors.SeriesMismatch(
                f"cannot be joined with {getattr(ours, 'name', ours)}",
                field=field,
                value=getattr(theirs, "name", theirs),
                remedy="keep a series of its own for each zone, method and factors",
            )


def _known_order(reading: CarbonReading) -> tuple[Any, ...]:
    """Order of becoming known; total, so that the order of adding does not matter."""
    return (reading.fetched_at_s, reading.as_of, reading.epoch, *_content(reading), reading.starts_at_s)


def _precedence(reading: CarbonReading) -> tuple[Any, ...]:
    """The greatest of all that cover an instant is believed."""
    return (-reading.quality, *_known_order(reading))


def _content(reading: CarbonReading) -> tuple[Any, ...]:
    """What makes a version another one."""
    return (
        reading.ends_at_s,
        reading.intensity_g_per_kwh,
        reading.quality,
        reading.provider,
        reading.api_version,
        reading.estimation_method,
    )


def _visible_pieces(readings: list[CarbonReading], begin_s: float, end_s: float) -> Iterator[Piece]:
    """Paint the least believed first; what is left to see is what is believed."""
    best: dict[tuple[float, float], CarbonReading] = {}
    for reading in sorted(readings, key=_precedence):
        best[reading.starts_at_s, reading.ends_at_s] = reading
    spans = sorted(best)
    if all(one[1] <= other[0] for one, other in itertools.pairwise(spans)):
        for start, end in spans:
            yield Piece(max(start, begin_s), min(end, end_s), best[start, end])
        return
    edges = sorted({edge for span in spans for edge in span})
    place = {edge: i for i, edge in enumerate(edges)}
    seen: list[CarbonReading | None] = [None] * (len(edges) - 1)
    for reading in sorted(best.values(), key=_precedence):
        first, last = place[reading.starts_at_s], place[reading.ends_at_s]
        seen[first:last] = [reading] * (last - first)
    i = 0
    while i < len(seen):
        j = i + 1
        while j < len(seen) and seen[j] is seen[i]:
            j += 1
        shown = seen[i]
        start, end = max(edges[i], begin_s), min(edges[j], end_s)
        if shown is not None and start < end:
            yield Piece(start, end, shown)
        i = j


def _cumulated(amounts: Values) -> Values:
    """Cumulated amounts at the two ends of each piece."""
    after = np.cumsum(amounts)
    return np.stack([after - amounts, after], axis=1).ravel()
