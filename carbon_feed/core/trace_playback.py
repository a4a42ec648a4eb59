"""Playback of a trace of carbon intensity: a step function of trace time, mapped to wall time by anchor and speed-up.

Data: values v_i [g/kWh], each valid for [i, i + 1) * step_s of trace time; time zero lies `lead_in_s` after the first.
Resampling: a bin of `bin_s` holds the mean of the step function over it (energy drawn evenly emits by that mean).
Mapping: trace time = (now - starts_at_s) * speedup; only this clock is scaled, everything else runs in wall time.
Before `starts_at_s` the first bin holds; what lies before time zero is history. At the end the trace starts again at
time zero, or stops.
"""

import math
from dataclasses import dataclass
from typing import Final

from trefoil.core.outside.ranges import range_of

INTENSITY_MAX_G_PER_KWH: Final = range_of("_g_per_kwh").high
BOUNDARY_S: Final = 1e-6  # a clock that reads this much too early is already in the next bin


@dataclass(frozen=True, slots=True)
class Trace:
    """Validated trace. `lead_in_s` is a multiple of nothing: any part of the file may be history."""

    source: str
    digest: str
    starts: str
    step_s: float
    values_g_per_kwh: tuple[float, ...]
    lead_in_s: float = 0.0
    synthetic: bool = False
    licence: str = ""
    linear: bool = False
    """Values are points joined by lines, and not steps; the last one holds."""
    filled: int = 0
    """Rows that the file does not have."""
    estimated: frozenset[int] = frozenset()
    """Places of values that their file marks as estimates."""
    read_as: str = ""
    """Column, unit and source of the values."""

    @property
    def body_s(self) -> float:
        """Trace seconds from time zero to the end."""
        return self.step_s * len(self.values_g_per_kwh) - self.lead_in_s

    def mean_g_per_kwh(self, begin_s: float, end_s: float) -> float:
        """Mean over [begin, end) of trace time, counted from the first row."""
        assert 0 <= begin_s < end_s <= self.step_s * len(self.values_g_per_kwh) + BOUNDARY_S
        total = 0.0
        for i in range(int(begin_s / self.step_s), min(len(self.values_g_per_kwh), math.ceil(end_s / self.step_s))):
            overlap_s = min(end_s, (i + 1) * self.step_s) - max(begin_s, i * self.step_s)
            total += max(0.0, overlap_s) * self._value(i, begin_s, end_s)
        return total / (end_s - begin_s)

    def _value(self, index: int, begin_s: float, end_s: float) -> float:
        """Of a row inside [begin, end): its value, or the middle of what it covers of the line to the next."""
        value = self.values_g_per_kwh[index]
        if not self.linear or index + 1 == len(self.values_g_per_kwh):
            return value
        middle_s = (max(begin_s, index * self.step_s) + min(end_s, (index + 1) * self.step_s)) / 2
        return value + (self.values_g_per_kwh[index + 1] - value) * (middle_s / self.step_s - index)


@dataclass(frozen=True, slots=True)
class Bin:
    """Interval of wall time and its value. `record` = it belongs to the history; a held value does not."""

    starts_at_s: float
    ends_at_s: float
    intensity_g_per_kwh: float
    record: bool
    estimated: bool = False
    """A part of it is an estimate by the file's own word."""


@dataclass(frozen=True, slots=True)
class Playback:
    """Playback of a trace in bins on the wall clock. `starts_at_s` may be infinite: the first bin holds forever."""

    lead_g_per_kwh: tuple[float, ...]
    body_g_per_kwh: tuple[float, ...]
    bin_s: float
    starts_at_s: float
    created_at_s: float
    speedup: float = 1.0
    loop: bool = True
    estimated: frozenset[int] = frozenset()
    """Bins with estimates in them, by place from time zero."""

    @property
    def wall_s(self) -> float:
        """Wall seconds that a bin lasts."""
        return self.bin_s / self.speedup

    def at(self, now_s: float) -> Bin | None:
        """Bin that holds now; None: the trace has ended."""
        if math.isinf(self.starts_at_s):
            return self._bin(math.floor((now_s - self.created_at_s) / self.wall_s), self.created_at_s, held=True)
        index = math.floor((now_s - self.starts_at_s + BOUNDARY_S) / self.wall_s)
        if index >= len(self.body_g_per_kwh) and not self.loop:
            return None
        return self._bin(index, self.starts_at_s, held=index < 0)

    def history(self, now_s: float, count_max: int) -> tuple[Bin, ...]:
        """Lead-in and all bins that have begun, oldest first, at most the newest `count_max`."""
        if math.isinf(self.starts_at_s):
            return ()
        begun = math.floor((now_s - self.starts_at_s + BOUNDARY_S) / self.wall_s)
        last = max(-1, begun if self.loop else min(begun, len(self.body_g_per_kwh) - 1))
        first = max(-len(self.lead_g_per_kwh), last + 1 - count_max)
        return tuple(self._bin(index, self.starts_at_s, held=False) for index in range(first, last + 1))

    def _bin(self, index: int, origin_s: float, held: bool) -> Bin:
        place = 0 if held else index if index < 0 else index % len(self.body_g_per_kwh)
        value = self.lead_g_per_kwh[place] if place < 0 else self.body_g_per_kwh[place]
        starts_at_s, ends_at_s = origin_s + index * self.wall_s, origin_s + (index + 1) * self.wall_s
        return Bin(starts_at_s, ends_at_s, value, record=not held, estimated=place in self.estimated)


def playback(
    trace: Trace, *, bin_s: float, speedup: float, starts_at_s: float, created_at_s: float, loop: bool
) -> Playback:
    """Playback of a trace in bins of `bin_s` (0 = as it is), aligned to time zero; incomplete end bins are left out.

    The trace must be long enough for one bin; `bin_fits` tells.
    """
    width_s = bin_s or trace.step_s
    assert bin_fits(trace, width_s)
    zero_s = trace.lead_in_s
    body = math.floor(trace.body_s / width_s + BOUNDARY_S)
    lead = math.floor(zero_s / width_s + BOUNDARY_S)

    def mean(index: int) -> float:
        return trace.mean_g_per_kwh(max(0.0, zero_s + index * width_s), zero_s + (index + 1) * width_s)

    estimated = set[int]()
    for row in trace.estimated:
        first = math.floor((row * trace.step_s - zero_s) / width_s + BOUNDARY_S)
        last = math.ceil(((row + 1) * trace.step_s - zero_s) / width_s - BOUNDARY_S)
        estimated.update(range(first, last))

    return Playback(
        lead_g_per_kwh=tuple(mean(index) for index in range(-lead, 0)),
        body_g_per_kwh=tuple(mean(index) for index in range(body)),
        bin_s=width_s,
        starts_at_s=starts_at_s,
        created_at_s=created_at_s,
        speedup=speedup,
        loop=loop,
        estimated=frozenset(estimated),
    )


def bin_fits(trace: Trace, bin_s: float) -> bool:
    """Whether at least one whole bin is between time zero and the end."""
    return trace.body_s / bin_s + BOUNDARY_S >= 1
