"""Replay of a CSV trace of any resolution. The replay says that it is one: every reading is `simulated`."""

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from carbon_feed.core.observation import Observation
from carbon_feed.core.trace_playback import (
    INTENSITY_MAX_G_PER_KWH,
    Bin,
    Playback,
    Trace,
    bin_fits,
    playback,
)
from carbon_feed.providers.base import Provider
from carbon_feed.providers.trace_columns import TraceColumns, choose_columns
from carbon_feed.settings import CarbonFeedSettings, TraceSettings
from trefoil.core import errors
from trefoil.core.carbon import Factors, Method, Quality
from trefoil.core.units import HOUR_S
from trefoil.runtime.given.table import DATE, UNIT_S, date_of, number_of, number_remedy, read_rows, time_unit, zone_of

TOLERANCE_S: Final = 1e-3
TRACE_BYTES_MAX: Final = 256 * 2**20
NO_VALUE: Final = ("", "null", "none", "na", "n/a", "nan")
MARKED: Final = ("true", "yes", "t", "y", "estimated")  # of a row that is an estimate
UNMARKED: Final = (*NO_VALUE, "false", "no", "f", "n", "measured", "actual")


class TraceProvider:
    """Provider that replays a trace in bins on the wall clock."""

    name = "trace"

    def __init__(self, trace: Trace, played: Playback) -> None:
        self.speedup = played.speedup
        self._playback = played
        self._trace = trace

    async def read(self, now_s: float) -> Observation:
        held = self._playback.at(now_s)
        if held is None:
            raise errors.Unavailable(
                f"trace {self._trace.source} has ended", remedy='set trace.at_end = "loop" or give a longer trace'
            )
        return self._observation(held)

    def history(self, now_s: float, count_max: int) -> tuple[Observation, ...]:
        return tuple(self._observation(held) for held in self._playback.history(now_s, count_max))

    def _observation(self, held: Bin) -> Observation:
        made_up = self._trace.synthetic or self._trace.filled > 0
        method = f"mean of {self._playback.bin_s / HOUR_S:g} h, replayed {self.speedup:g} times as fast"
        if self._trace.filled:
            method += f"; {self._trace.filled} of its rows are filled in"
        if held.estimated:
            method += "; an estimate by the file's own word"
        if not held.record:
            method += "; the first value, held until the trace starts"
        return Observation(
            starts_at_s=held.starts_at_s,
            ends_at_s=held.ends_at_s,
            intensity_g_per_kwh=held.intensity_g_per_kwh,
            quality=Quality.ESTIMATED if made_up or held.estimated else Quality.MEASURED,
            provider=self.name,
            api_version=f"{self._trace.source}@sha256:{self._trace.digest[:12]}",
            estimation_method=f"synthetic; {method}" if self._trace.synthetic else method,
            observed_at_s=held.starts_at_s,
            simulated=True,
            record=held.record,
        )


def make_trace(settings: CarbonFeedSettings, now_s: float) -> Provider:
    """Make the provider of `[trace]`.

    Raises:
        errors.TraceError: names file, line, value and remedy.
    """
    wanted = settings.trace
    trace = load_trace(wanted.path, wanted, settings.series.factors, settings.series.method)
    step_s = wanted.step_s or trace.step_s
    if not bin_fits(trace, step_s):
        raise errors.TraceError(
            f"{wanted.path}: only {trace.body_s / HOUR_S:g} h follow the lead-in",
            field="trace.step_s, trace.lead_in_h",
            value=(step_s, trace.lead_in_s / HOUR_S),
            remedy="use a smaller step or lead-in, or a longer trace",
        )
    return TraceProvider(
        trace,
        playback(
            trace,
            bin_s=step_s,
            speedup=wanted.speedup,
            starts_at_s=wanted.starts_at_s or now_s,
            created_at_s=now_s,
            loop=wanted.at_end == "loop",
        ),
    )


def load_trace(
    path: Path,
    wanted: TraceSettings | None = None,
    factors: Factors = Factors.LIFECYCLE,
    method: Method = Method.AVERAGE,
) -> Trace:
    """Load and validate a table: equal steps, no gap, every value a number in range once it is in g/kWh.

    Raises:
        errors.TraceError: names file, line, value and remedy.
    """
    options = wanted or TraceSettings(path=path)
    rows = read_rows(path, bytes_max=TRACE_BYTES_MAX)
    names_at, names = next(rows, (0, []))
    if not names:
        raise errors.TraceError(f"{path} is empty", remedy="begin with a line of column names, e.g. time,g_per_kwh")
    raw = path.read_bytes()
    comments = _comments(raw)
    columns = choose_columns(
        f"{path} line {names_at}",
        names,
        options,
        factors,
        method,
        comments.get("unit", ""),
    )
    found = _Series(path, names, columns, options, method)
    found.take(rows)
    times, values = fill_gaps(path, names[columns.time], found.times, found.values, options)
    lead_in_h = options.lead_in_h if options.lead_in_h is not None else _number(path, comments, "lead_in_h")
    step_s = times[1] - times[0]
    filled = len(values) - len(found.values)
    trace = Trace(
        source=path.name,
        digest=hashlib.sha256(raw).hexdigest(),
        starts=found.starts,
        step_s=step_s,
        values_g_per_kwh=tuple(values),
        lead_in_s=lead_in_h * HOUR_S,
        synthetic=comments.get("basis") == "synthetic",
        licence=comments.get("licence", ""),
        linear=options.interpolation == "linear",
        filled=filled,
        estimated=frozenset(round((at_s - times[0]) / step_s) for at_s in found.estimated_s),
    )
    return replace(trace, read_as=_read_as(trace, names[columns.value], columns.unit))


def _read_as(trace: Trace, column: str, unit: str) -> str:
    """What was read, in one line."""
    count = len(trace.values_g_per_kwh)
    mean = math.fsum(trace.values_g_per_kwh) / count
    notes = [(len(trace.estimated), "estimates"), (trace.filled, "filled in")]
    return (
        f"trace {trace.source}: {count:,} rows of {column!r} in {unit} from {trace.starts}, every "
        f"{trace.step_s / HOUR_S:g} h for {trace.step_s * count / HOUR_S:g} h, mean {mean:.4g} g/kWh"
        + "".join(f", {number} of them {what}" for number, what in notes if number)
    )


class _Series:
    """Times [s] and values [g/kWh] of a table while its rows are read."""

    def __init__(
        self, path: Path, names: list[str], columns: TraceColumns, options: TraceSettings, method: Method
    ) -> None:
        self._path, self._names, self._columns, self._options = path, names, columns, options
        self._low = -INTENSITY_MAX_G_PER_KWH if method is Method.MARGINAL else 0.0
        self._unit, self._zone = "", columns.zone or zone_of(options.timezone or "UTC")
        self.times: list[float] = []
        self.values: list[float] = []
        self.estimated_s: list[float] = []
        self.starts = ""

    def take(self, rows: Iterator[tuple[int, list[str]]]) -> None:
        """Take all rows."""
        columns, options = self._columns, self._options
        for number, cells in rows:
            where = f"{self._path} line {number}"
            if len(cells) != len(self._names):
                raise errors.TraceError(
                    f"{where}: {len(cells)} cells for {len(self._names)} columns", remedy="fix that line"
                )
            estimated = columns.estimated >= 0 and self._is_estimate(where, cells[columns.estimated])
            missing = cells[columns.value].lower() in NO_VALUE or (estimated and not options.estimates)
            if missing and options.gaps != "refuse":
                continue
            if estimated and not options.estimates:
                raise errors.TraceError(
                    f"{where}: an estimate", field=self._names[columns.estimated], value=cells[columns.estimated],
                    remedy="set trace.gaps to fill it, or trace.estimates to true",
                )  # fmt: skip
            at_s = self._time(where, cells[columns.time])
            _check_step(where, self._names[columns.time], cells[columns.time], self.times, at_s, options)
            self.times.append(at_s)
            self.values.append(self._value(where, cells[columns.value]))
            self.starts = self.starts or " ".join(filter(None, (cells[columns.time], str(columns.zone or ""))))
            if estimated:
                self.estimated_s.append(at_s)
        if len(self.times) < 2:
            raise errors.TraceError(
                f"{self._path} has {len(self.times)} rows", remedy="give at least two: they define the resolution"
            )
        if not any(self.values):
            raise errors.TraceError(
                f"{self._path}: every value is 0, the mark of an outage", remedy="fetch the data again"
            )

    def _is_estimate(self, where: str, cell: str) -> bool:
        """Whether a mark says so: a word, or 1 as tables of numbers write true."""
        number, word = number_of(cell), cell.lower()
        if number not in (0, 1) and word not in (*MARKED, *UNMARKED):
            raise errors.TraceError(
                f"{where}: no mark of an estimate", field=self._names[self._columns.estimated], value=cell,
                remedy="write true or false, or 1 or 0",
            )  # fmt: skip
        return word in MARKED or number == 1

    def _time(self, where: str, cell: str) -> float:
        """Seconds of a number, or since 1970 of a date.

        An hour that the clocks go through twice is the second one when the row before is the first.
        """
        name = self._names[self._columns.time]
        self._unit = self._unit or time_unit(where, name, cell, self._options.time_unit)
        number = number_of(cell)
        if self._unit != DATE and number is not None:
            return number * UNIT_S[self._unit]
        date = date_of(cell, self._zone) if self._unit == DATE else None
        if date is None:
            raise errors.TraceError(
                f"{where}: not a time", field=name, value=cell, remedy="write ISO 8601, e.g. 2021-03-26T21:00Z"
            )
        first_s = date.timestamp()
        return first_s if not self.times or first_s > self.times[-1] else date.replace(fold=1).timestamp()

    def _value(self, where: str, cell: str) -> float:
        name, unit = self._names[self._columns.value], self._columns.unit
        number = number_of(cell)
        if number is None:
            what = "no value" if cell.lower() in NO_VALUE else "not a number"
            raise errors.TraceError(
                f"{where}: {what}", field=name, value=cell,
                remedy=number_remedy(cell, "fill it in; values are never invented here"),
            )  # fmt: skip
        value = number * self._columns.g_per_kwh
        if value < self._low:
            raise errors.TraceError(
                f"{where}: negative", field=name, value=cell, remedy="correct it; only marginal intensities can be"
            )
        if value > INTENSITY_MAX_G_PER_KWH:
            raise errors.TraceError(
                f"{where}: above {INTENSITY_MAX_G_PER_KWH:.0f} g/kWh",
                field=name,
                value=cell,
                remedy=f"check the unit: it was read in {unit}; set trace.unit",
            )
        return value


def fill_gaps(
    path: Path, name: str, times: list[float], values: list[float], options: TraceSettings
) -> tuple[list[float], list[float]]:
    """Fill each gap by `options.gaps` to equal steps. Of a file without gaps the lists themselves.

    Raises:
        errors.TraceError: a gap is too long, or no whole number of steps.
    """
    step_s = times[1] - times[0]
    if options.gaps == "refuse" or all(abs(b - a - step_s) <= TOLERANCE_S for a, b in itertools.pairwise(times)):
        return times, values
    step_s = min(b - a for a, b in itertools.pairwise(times))
    every_s, every = [times[0]], [values[0]]
    for (before_s, after_s), (before, after) in zip(itertools.pairwise(times), itertools.pairwise(values), strict=True):
        steps = round((after_s - before_s) / step_s)
        if after_s - before_s > options.gap_max_h * HOUR_S or abs(before_s + steps * step_s - after_s) > TOLERANCE_S:
            raise errors.TraceError(
                f"{path}: a gap of {(after_s - before_s) / HOUR_S:g} h before second {after_s:.0f}",
                field=name,
                value=f"longer than {options.gap_max_h:g} h or no whole number of steps of {step_s / HOUR_S:g} h",
                remedy="fetch the missing rows, or raise trace.gap_max_h",
            )
        for k in range(1, steps + 1):
            share = (k == steps) if options.gaps == "hold" else k / steps
            every_s.append(before_s + k * step_s)
            every.append(before + (after - before) * share)
    return every_s, every


def _check_step(where: str, name: str, cell: str, times: list[float], at_s: float, options: TraceSettings) -> None:
    if not times:
        return
    difference_s = at_s - times[-1]
    if difference_s <= 0:
        raise errors.TraceError(
            f"{where}: not after the line before", field=name, value=cell,
            remedy="sort the rows, one row a time: of one zone, with date and hour in one column",
        )  # fmt: skip
    if len(times) < 2 or options.gaps != "refuse":
        return
    step_s = times[1] - times[0]
    if difference_s > step_s + TOLERANCE_S:
        raise errors.TraceError(
            f"{where}: a gap of {difference_s / HOUR_S:g} h, the step is {step_s / HOUR_S:g} h",
            field=name,
            value=cell,
            remedy="fill in the missing rows, or set trace.gaps",
        )
    if difference_s < step_s - TOLERANCE_S:
        raise errors.TraceError(
            f"{where}: {difference_s / HOUR_S:g} h after the line before, the step is {step_s / HOUR_S:g} h",
            field=name,
            value=cell,
            remedy="resample the file to equal steps",
        )


def _comments(raw: bytes) -> dict[str, str]:
    """`# key: value` lines."""
    lines = raw.decode("utf-8-sig", "replace").splitlines()
    pairs = (line[1:].partition(":") for line in lines if line.startswith("#"))
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _number(path: Path, header: dict[str, str], key: str) -> float:
    text = header.get(key, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise errors.TraceError(f"{path}: not a number of hours", field=key, value=text, remedy="write e.g. 24")
    return value
