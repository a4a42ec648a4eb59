"""When requests come: a rate over time, turned into arrivals block by block.

Formulation: a renewal stream of gamma gaps (mean 1, SCV `gap_scv`) in operational time, which the integral of the rate
    maps to simulated time: SCV 1 is a Poisson process whose rate follows the points exactly.
Data: straight lines between (time, rate) points; or given arrival times. Deterministic in its generator.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from trefoil.core.errors import TraceError
from trefoil.simulator.scenario import Arrivals

Floats = npt.NDArray[np.float64]
SPREAD: Final = 6.0  # standard deviations of the number of arrivals that are drawn beyond its mean


class Source(Protocol):
    """Arrivals of one family, taken in order."""

    def rate_per_s(self, at_s: float) -> float: ...
    def mean_per_s(self, from_s: float, until_s: float) -> float: ...
    def until(self, until_s: float) -> Floats: ...  # all arrivals since the last call, ascending


@dataclass(slots=True)
class Rate:
    """Points of a rate; cyclic with `period_s` > 0, else constant beyond the ends. `steps`: no lines between them."""

    times_s: Floats
    rates: Floats
    period_s: float = 0.0
    steps: bool = False

    def at(self, at_s: float) -> float:
        """Rate at a time [1/s]."""
        at = at_s % self.period_s if self.period_s else at_s
        if self.steps:
            return float(self.rates[max(0, int(np.searchsorted(self.times_s, at, side="right")) - 1)])
        return float(np.interp(at, self.times_s, self.rates))

    def pieces(self, from_s: float, until_s: float) -> Iterator[tuple[float, float, float, float]]:
        """(from, until, rate at first, rate at last) of each straight piece."""
        at = from_s
        while at < until_s - 1e-9:
            end = min(until_s, self._next(at))
            first, last = self.at(at), self.at(end - 1e-9)
            yield at, end, first, first if self.steps else last
            at = end

    def _next(self, at_s: float) -> float:
        cycle_s = math.floor(at_s / self.period_s + 1e-12) * self.period_s if self.period_s else 0.0
        inside = at_s - cycle_s
        i = int(np.searchsorted(self.times_s, inside + 1e-9, side="right"))
        if i < len(self.times_s):
            return cycle_s + float(self.times_s[i])
        return cycle_s + self.period_s if self.period_s else math.inf


@dataclass(slots=True)
class Stream:
    """Arrivals drawn from a rate."""

    rate: Rate
    gap_scv: float
    rng: Generator
    now_s: float
    _operational: float = 0.0
    _next: float = field(default=-1.0)

    def rate_per_s(self, at_s: float) -> float:
        return self.rate.at(at_s)

    def mean_per_s(self, from_s: float, until_s: float) -> float:
        total = sum((end - at) * (a + b) / 2 for at, end, a, b in self.rate.pieces(from_s, until_s))
        return total / (until_s - from_s)

    def until(self, until_s: float) -> Floats:
        """Arrivals in [last until, until_s)."""
        found = [self._piece(*piece) for piece in self.rate.pieces(self.now_s, until_s)]
        self.now_s = max(self.now_s, until_s)
        return np.concatenate(found) if found else np.empty(0)

    def _piece(self, from_s: float, until_s: float, first: float, last: float) -> Floats:
        length = until_s - from_s
        mass = length * (first + last) / 2
        if self._next < 0:
            self._next = self._gaps(1)[0]
        end = self._operational + mass
        found = []
        at = self._next
        while at < end:
            want = int(end - at + SPREAD * math.sqrt(max(1.0, (end - at) * max(self.gap_scv, 0.05)))) + 1
            times = at + np.concatenate(([0.0], np.cumsum(self._gaps(want))))
            inside = times[times < end]
            found.append(inside)
            if inside.size < times.size:
                self._next = at = float(times[inside.size])
                break
            at = float(times[-1]) + float(self._gaps(1)[0])
            self._next = at
        done = np.concatenate(found) - self._operational if found else np.empty(0)
        self._operational = end
        if not done.size:
            return done
        if abs(last - first) < 1e-12 * max(first, last, 1e-300):
            offsets = done / max(first, 1e-300)
        else:  # the mass is first * x + slope x^2 / 2
            slope = (last - first) / length
            offsets = (np.sqrt(np.maximum(0.0, first * first + 2 * slope * done)) - first) / slope
        return np.asarray(from_s + np.minimum(offsets, np.nextafter(length, 0)), dtype=np.float64).clip(
            from_s, np.nextafter(until_s, from_s)
        )

    def _gaps(self, count: int) -> Floats:
        if self.gap_scv < 1e-9:
            return np.ones(count)
        if self.gap_scv == 1.0:
            return self.rng.standard_exponential(count)
        return self.rng.gamma(1 / self.gap_scv, self.gap_scv, count)


@dataclass(slots=True)
class Given:
    """Arrival times that somebody has recorded or made up [s], ascending."""

    times_s: Floats
    _taken: int = 0

    def rate_per_s(self, at_s: float) -> float:
        return self.mean_per_s(at_s - 30.0, at_s + 30.0)

    def mean_per_s(self, from_s: float, until_s: float) -> float:
        low, high = np.searchsorted(self.times_s, [from_s, until_s])
        return float(high - low) / (until_s - from_s)

    def until(self, until_s: float) -> Floats:
        end = int(np.searchsorted(self.times_s, until_s))
        found = self.times_s[self._taken : end]
        self._taken = max(end, self._taken)
        return found


def stream(settings: Arrivals, rng: Generator, now_s: float) -> Stream:
    """The stream of a scenario's family.

    Raises:
        TraceError: names file, line, value and remedy.
    """
    if settings.trace is not None:
        counts = _read(settings.trace, settings.column)
        rates = counts / settings.bin_s
        if settings.rate_per_s:
            rates = rates * (settings.rate_per_s / rates.mean())
        times = np.arange(rates.size, dtype=np.float64) * settings.bin_s
        return Stream(Rate(times, rates, rates.size * settings.bin_s, steps=True), settings.gap_scv, rng, now_s)
    points = settings.points or ((0.0, settings.rate_per_s),)
    times, rates = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    return Stream(Rate(times, rates), settings.gap_scv, rng, now_s)


def _read(path: Path, column: str) -> Floats:
    try:
        rows = [row for row in csv.reader(path.read_text(encoding="utf-8").splitlines()) if row]
    except FileNotFoundError as error:
        raise TraceError(f"no trace {path}", field="arrivals.trace", remedy="name an existing CSV file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read ({error})", remedy="make it a readable CSV file") from error
    rows = [row for row in rows if not row[0].startswith("#")]
    if len(rows) < 2:
        raise TraceError(
            f"{path} is empty: no numbers of requests in it",
            field="arrivals.trace",
            value=str(path),
            remedy="give a line of column names and one line per bin",
        )
    names = [name.strip() for name in rows[0]]
    if column and column not in names:
        raise TraceError(f"{path}: no such column", field="arrivals.column", value=column, remedy=f"one of {names}")
    position = names.index(column) if column else len(names) - 1
    counts = []
    for number, row in enumerate(rows[1:], 2):
        try:
            counts.append(float(row[position]))
        except (ValueError, IndexError) as error:
            raise TraceError(
                f"{path} row {number}: not a number of requests", field=names[position], value=row, remedy="mend it"
            ) from error
    found = np.array(counts)
    if found.min() < 0 or not found.sum() > 0:
        raise TraceError(f"{path}: needs numbers >= 0, not all of them 0", field="arrivals.trace", remedy="correct it")
    return found
