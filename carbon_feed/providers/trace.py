"""Replay of a CSV trace of any resolution. The replay says that it is one: every reading is `simulated`."""

import csv
import datetime
import hashlib
import itertools
import math
import re
import zoneinfo
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from carbon_feed.providers.base import Provider
from carbon_feed.reading.core.observation import Observation
from carbon_feed.reading.core.trace_playback import (
    INTENSITY_MAX_G_PER_KWH,
    Bin,
    Playback,
    Trace,
    bin_fits,
    playback,
)
from carbon_feed.settings import CarbonFeedSettings, TraceSettings
from trefoil.core import errors
from trefoil.core.carbon import Factors, Quality
from trefoil.core.units import HOUR_S

VALUE_NAME: Final = re.compile(r"carbon.?intensity|^intensity", re.IGNORECASE)
TIME_NAMES: Final = (re.compile(r"date", re.IGNORECASE), re.compile(r"time|hour", re.IGNORECASE))
FACTOR_NAMES: Final = {
    Factors.DIRECT: re.compile(r"direct", re.IGNORECASE),
    Factors.LIFECYCLE: re.compile(r"lca|life.?cycle", re.IGNORECASE),
}
TOLERANCE_S: Final = 1e-3
NO_VALUE: Final = ("", "null", "none", "na", "n/a", "nan")


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
        method = f"mean of {self._playback.bin_s / HOUR_S:g} h, played {self.speedup:g} times as fast"
        if self._trace.filled:
            method += f"; {self._trace.filled} of its rows are filled in"
        if not held.record:
            method += "; the first value, held until the trace starts"
        return Observation(
            starts_at_s=held.starts_at_s,
            ends_at_s=held.ends_at_s,
            intensity_g_per_kwh=held.intensity_g_per_kwh,
            quality=Quality.ESTIMATED if self._trace.synthetic or self._trace.filled else Quality.MEASURED,
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
    trace = load_trace(wanted.path, wanted, settings.series.factors)
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


def load_trace(path: Path, wanted: TraceSettings | None = None, factors: Factors = Factors.LIFECYCLE) -> Trace:
    """Load and validate a CSV: equal steps, no gap, every value a number in 0..1500.

    Raises:
        errors.TraceError: names file, line, value and remedy.
    """
    options = wanted or TraceSettings(path=path)
    try:
        raw = path.read_bytes()
        lines = raw.decode("utf-8-sig").splitlines()
    except FileNotFoundError as error:
        raise errors.TraceError(f"no trace {path}", remedy="name an existing CSV file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise errors.TraceError(f"{path} cannot be read ({error})", remedy="make it a readable CSV file") from error
    header = _header(lines)
    rows = _rows(path, lines)
    names_at, names = next(rows, (0, []))
    if not names:
        raise errors.TraceError(f"{path} is empty", remedy="begin with a line of column names, e.g. time,intensity")
    time_at = _column(path, names_at, names, options.time_column, "trace.time_column", _time_names(names))
    value_at = _column(path, names_at, names, options.value_column, "trace.value_column", _value_names(names, factors))
    times, values, starts = _series(path, rows, names, time_at, value_at, options)
    had = len(values)
    times, values = fill_gaps(path, names[time_at], times, values, options)
    lead_in_h = options.lead_in_h if options.lead_in_h is not None else _number(path, header, "lead_in_h")
    return Trace(
        source=path.name,
        digest=hashlib.sha256(raw).hexdigest(),
        starts=starts,
        step_s=times[1] - times[0],
        values_g_per_kwh=tuple(values),
        lead_in_s=lead_in_h * HOUR_S,
        synthetic=header.get("basis") == "synthetic",
        licence=header.get("licence", ""),
        linear=options.interpolation == "linear",
        filled=len(values) - had,
    )


def _series(
    path: Path,
    rows: Iterator[tuple[int, list[str]]],
    names: list[str],
    time_at: int,
    value_at: int,
    options: TraceSettings,
) -> tuple[list[float], list[float], str]:
    times: list[float] = []
    values: list[float] = []
    starts = ""
    for number, cells in rows:
        where = f"{path} line {number}"
        if len(cells) != len(names):
            raise errors.TraceError(f"{where}: {len(cells)} cells for {len(names)} columns", remedy="mend that line")
        if options.gaps != "refuse" and cells[value_at].strip().lower() in NO_VALUE:
            continue
        at_s = _time(where, names[time_at], cells[time_at], options.timezone, times[-1] if times else -math.inf)
        _check_step(where, names[time_at], cells[time_at], times, at_s, options)
        times.append(at_s)
        values.append(_value(where, names[value_at], cells[value_at]))
        starts = starts or cells[time_at].strip()
    if len(times) < 2:
        raise errors.TraceError(f"{path} has {len(times)} rows", remedy="give at least two: they tell the resolution")
    if not any(values):
        raise errors.TraceError(f"{path}: every value is 0, the mark of an outage", remedy="fetch the data again")
    return times, values, starts


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
            f"{where}: not after the line before", field=name, value=cell, remedy="sort the rows and drop repeated ones"
        )
    if len(times) < 2 or options.gaps != "refuse":
        return
    step_s = times[1] - times[0]
    if difference_s > step_s + TOLERANCE_S:
        raise errors.TraceError(
            f"{where}: a gap of {difference_s / HOUR_S:g} h, the step is {step_s / HOUR_S:g} h",
            field=name,
            value=cell,
            remedy="fill in the missing rows, or set trace.gaps; they are never invented in silence",
        )
    if difference_s < step_s - TOLERANCE_S:
        raise errors.TraceError(
            f"{where}: {difference_s / HOUR_S:g} h after the line before, the step is {step_s / HOUR_S:g} h",
            field=name,
            value=cell,
            remedy="resample the file to equal steps",
        )


def _value(where: str, name: str, cell: str) -> float:
    text = cell.strip()
    try:
        value = float(text)
    except ValueError as error:
        what = "no value" if text.lower() in NO_VALUE else "not a number"
        raise errors.TraceError(
            f"{where}: {what}", field=name, value=cell, remedy="fill it in; values are never invented here"
        ) from error
    if not math.isfinite(value):
        raise errors.TraceError(f"{where}: no value", field=name, value=cell, remedy="fill it in")
    if value < 0:
        raise errors.TraceError(f"{where}: negative", field=name, value=cell, remedy="correct it; a grid emits >= 0")
    if value > INTENSITY_MAX_G_PER_KWH:
        raise errors.TraceError(
            f"{where}: above {INTENSITY_MAX_G_PER_KWH:.0f} g/kWh",
            field=name,
            value=cell,
            remedy="check the unit: it must be gCO2/kWh, not lb/MWh or kg",
        )
    return value


def _time(where: str, name: str, cell: str, timezone: str, last_s: float) -> float:
    """Seconds: of an ISO 8601 time (in `timezone` unless it says otherwise), or of a plain number of hours or seconds.

    An hour that the clocks go through twice is the second one when the row before is the first.
    """
    text = cell.strip()
    try:
        number = float(text)
    except ValueError:
        try:
            parsed = datetime.datetime.fromisoformat(text)
        except ValueError as error:
            raise errors.TraceError(
                f"{where}: not a time", field=name, value=cell, remedy="write ISO 8601, e.g. 2021-03-26T21:00Z"
            ) from error
        if parsed.tzinfo is not None:
            return parsed.timestamp()
        local = parsed.replace(tzinfo=datetime.UTC if timezone == "UTC" else zoneinfo.ZoneInfo(timezone))
        first_s = local.timestamp()
        return first_s if first_s > last_s else local.replace(fold=1).timestamp()
    if not math.isfinite(number):
        raise errors.TraceError(f"{where}: not a time", field=name, value=cell, remedy="write hours, or ISO 8601")
    in_hours = re.search(r"hour|_h$", name, re.IGNORECASE)
    return number * HOUR_S if in_hours else number


def _rows(path: Path, lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    for (number, line), cells in zip(numbered, csv.reader(line for _, line in numbered), strict=False):
        if line.count('"') % 2:
            raise errors.TraceError(f"{path} line {number}: a quotation mark is not closed", remedy="mend that line")
        yield number, cells


def _header(lines: list[str]) -> dict[str, str]:
    """`# key: value` lines."""
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


def _time_names(names: list[str]) -> list[str]:
    return next((found[:1] for p in TIME_NAMES if (found := [name for name in names if p.search(name)])), [])


def _value_names(names: list[str], factors: Factors) -> list[str]:
    found = [name for name in names if VALUE_NAME.search(name)]
    preferred = [name for name in found if factors in FACTOR_NAMES and FACTOR_NAMES[factors].search(name)]
    return preferred if len(found) > 1 and len(preferred) == 1 else found


def _column(path: Path, number: int, names: list[str], wanted: str, setting: str, found: list[str]) -> int:
    if wanted:
        if wanted not in names:
            raise errors.TraceError(
                f"{path} line {number}: no such column", field=setting, value=wanted, remedy=f"use one of {names}"
            )
        return names.index(wanted)
    if len(found) != 1:
        what = "several columns could be meant" if found else "no column has a name that tells"
        raise errors.TraceError(
            f"{path} line {number}: {what}", field=setting, value=found or names, remedy=f"set {setting}"
        )
    return names.index(found[0])
