"""When requests arrive and what they carry: decided completely before the first is sent, from a seed.

Arrivals come from a rate profile (a Poisson process whose rate is piecewise linear) or from a trace file:

    second,requests      so many arrivals in each second, at uniform times inside it
    minute,requests      the same per minute (any name for the second column)
    arrival_s,...        the times themselves

Images are drawn in shuffled full passes over the held-out set, so that after every pass each image was sent equally
often and the measured accuracy is that of the set, not of a lucky sample.
"""

import csv
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trefoil.core.errors import InvalidInput, TraceError

UNITS_S: Final = {"second": 1.0, "minute": 60.0}
TIMES: Final = "arrival_s"
ARRIVALS_MAX: Final = 10_000_000
TIMES_STREAM, IMAGES_STREAM, SIZES_STREAM, LABELS_STREAM = range(4)  # one random stream each: none disturbs another

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RateProfile:
    """Offered load over time: (at_s, rate_per_s) points, linear between them; the last point ends the load."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        times = [at_s for at_s, _ in self.points]
        if len(times) < 2 or times[0] != 0 or any(b <= a for a, b in itertools.pairwise(times)):
            raise InvalidInput(
                "times must begin at 0 and rise", field="rate profile", value=self.points, remedy="e.g. 0:26,30:26"
            )
        if any(not math.isfinite(r) or r < 0 for _, r in self.points) or not math.isfinite(times[-1]):
            raise InvalidInput(
                "rates and times must be finite, rates at least 0", field="rate profile", value=self.points
            )
        if self.expected == 0 or self.expected > ARRIVALS_MAX:
            raise InvalidInput(f"{self.expected:g} arrivals, allowed 1 to {ARRIVALS_MAX:,}", field="rate profile")

    @classmethod
    def constant(cls, rate_per_s: float, duration_s: float) -> "RateProfile":
        """The same rate all the time."""
        return cls(((0.0, rate_per_s), (duration_s, rate_per_s)))

    @classmethod
    def surge(
        cls, base_per_s: float, peak_per_s: float, *, starts_s: float, ramp_s: float, hold_s: float, duration_s: float
    ) -> "RateProfile":
        """A base rate that climbs once to a peak, stays there and returns."""
        top_s = starts_s + ramp_s
        back_s = top_s + hold_s
        return cls(
            (
                (0.0, base_per_s),
                (starts_s, base_per_s),
                (top_s, peak_per_s),
                (back_s, peak_per_s),
                (back_s + ramp_s, base_per_s),
                (duration_s, base_per_s),
            )
        )

    @property
    def duration_s(self) -> float:
        """When the load ends."""
        return self.points[-1][0]

    @property
    def expected(self) -> float:
        """Mean number of arrivals: the integral of the rate."""
        return float(sum((t1 - t0) * (r0 + r1) / 2 for (t0, r0), (t1, r1) in self._segments()))

    def rate_per_s(self, at_s: float) -> float:
        """The rate at a time; 0 outside the profile."""
        times, rates = zip(*self.points, strict=True)
        return float(np.interp(at_s, times, rates)) if 0 <= at_s <= self.duration_s else 0.0

    def _segments(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        return list(itertools.pairwise(self.points))

    def times_s(self, seed: int) -> Floats:
        """One sample of the Poisson process: unit arrivals sent through the inverse of the integrated rate."""
        chance = np.random.default_rng([seed, TIMES_STREAM])
        total, unit = self.expected, np.empty(0)
        while len(unit) == 0 or unit[-1] < total:
            gaps = chance.exponential(size=int(total + 6 * math.sqrt(total)) + 64)
            unit = np.concatenate([unit, np.cumsum(gaps) + (unit[-1] if len(unit) else 0.0)])
        unit, done, pieces = unit[unit < total], 0.0, []
        for (t0, r0), (t1, r1) in self._segments():
            area = (t1 - t0) * (r0 + r1) / 2
            inside = unit[(unit >= done) & (unit < done + area)] - done
            slope = (r1 - r0) / (t1 - t0)
            # The root of r0 x + slope x^2 / 2 = y in the form that is exact for slope = 0.
            pieces.append(t0 + 2 * inside / (r0 + np.sqrt(np.maximum(r0 * r0 + 2 * slope * inside, 0.0))))
            done += area
        return np.concatenate(pieces)


@dataclass(frozen=True, slots=True)
class ArrivalTrace:
    """A trace file. `rate_scale` multiplies the load, `speedup` divides its times; the first `limit_s` are played."""

    path: Path
    rate_scale: float = 1.0
    speedup: float = 1.0
    limit_s: float = math.inf

    def __post_init__(self) -> None:
        for field in ("rate_scale", "speedup", "limit_s"):
            if not getattr(self, field) > 0:
                raise InvalidInput("must be above 0", field=field, value=getattr(self, field))

    def times_s(self, seed: int) -> Floats:
        """The arrivals in played time.

        Raises:
            TraceError: naming file, line and value of what is wrong with it.
        """
        unit, numbers = read_trace(self.path)
        chance = np.random.default_rng([seed, TIMES_STREAM])
        if unit == TIMES:
            times = self._thinned(np.asarray(numbers), chance)
        else:
            # A scaled count is rounded up or down by chance, so that its mean is right.
            counts = np.floor(np.asarray(numbers) * self.rate_scale + chance.random(len(numbers))).astype(np.int64)
            self._refuse_too_many(int(counts.sum()))
            starts = np.repeat(np.arange(len(counts)), counts)
            times = (starts + chance.random(len(starts))) * UNITS_S[unit]
        times = np.sort(times) / self.speedup
        return times[times < self.limit_s]

    def _thinned(self, times: Floats, chance: np.random.Generator) -> Floats:
        self._refuse_too_many(int(len(times) * self.rate_scale))
        copies = np.floor(self.rate_scale + chance.random(len(times))).astype(np.int64)
        return times if self.rate_scale == 1.0 else np.repeat(times, copies)

    def _refuse_too_many(self, arrivals: int) -> None:
        if arrivals > ARRIVALS_MAX:
            raise TraceError(f"{self.path}: {arrivals:,} arrivals, at most {ARRIVALS_MAX:,}", remedy="lower rate_scale")


def read_trace(path: Path) -> tuple[str, list[float]]:
    """The unit (`second`, `minute` or `arrival_s`) and the counts, or the times.

    Raises:
        TraceError: an unknown header, a gap, a repeated or unordered row, a value that is no count; with its line.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}", field="trace", value=str(path)) from error
    unit = rows[0][0].strip() if rows and rows[0] else ""
    if unit != TIMES and (unit not in UNITS_S or len(rows[0]) < 2):
        raise TraceError(
            f"{path} line 1: unknown header {','.join(rows[0]) if rows else ''!r}",
            remedy="begin with `second,requests`, `minute,requests` or `arrival_s`",
        )
    if len(rows) < 2:
        raise TraceError(f"{path}: no rows after the header", field="trace", value=str(path))
    body = [(number, row) for number, row in enumerate(rows[1:], 2) if row]
    return unit, _read_times(path, body) if unit == TIMES else _read_counts(path, unit, body)


def _read_counts(path: Path, unit: str, body: Sequence[tuple[int, list[str]]]) -> list[float]:
    counts: list[float] = []
    first = _number(path, body[0][0], unit, body[0][1][0])
    for number, row in body:
        at, count = _number(path, number, unit, row[0]), _number(path, number, "count", row[1] if len(row) > 1 else "")
        if at != first + len(counts):
            raise TraceError(
                f"{path} line {number}: {unit} {at:g} follows {first + len(counts) - 1:g}: a gap or a repetition",
                field=unit,
                value=row[0],
                remedy="write every interval once, with 0 where nothing arrived",
            )
        if count < 0 or count != int(count):
            raise TraceError(f"{path} line {number}: no count", field="requests", value=row[1], remedy="0, 1, 2, ...")
        counts.append(count)
    return counts


def _read_times(path: Path, body: Sequence[tuple[int, list[str]]]) -> list[float]:
    times: list[float] = []
    for number, row in body:
        at_s = _number(path, number, TIMES, row[0])
        if at_s < 0 or (times and at_s < times[-1]):
            raise TraceError(
                f"{path} line {number}: negative or earlier than the row before", field=TIMES, value=row[0],
                remedy="sort the trace; times count from 0",
            )  # fmt: skip
        times.append(at_s)
    return times


def _number(path: Path, line: int, field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TraceError(f"{path} line {line}: no number", field=field, value=text, remedy="mend that line")
    return value


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that will be sent: request i leaves at times_s[i] with images[starts[i] : starts[i + 1]]."""

    times_s: Floats
    starts: Ints
    images: Ints
    duration_s: float  # the load may end after its last arrival

    @property
    def digest(self) -> str:
        """Same digest, same arrivals with the same images: what makes two runs comparable."""
        parts = (self.times_s, self.starts, self.images)
        return hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in parts)).hexdigest()[:16]

    def items(self, request: int) -> Ints:
        """Indices of the images of one request."""
        return self.images[self.starts[request] : self.starts[request + 1]]


def schedule(arrivals: RateProfile | ArrivalTrace, held_out: int, batch_sizes: Sequence[int], seed: int) -> Schedule:
    """Decide all requests. `batch_sizes`: each request draws one of them, equally likely."""
    if not batch_sizes or min(batch_sizes) < 1:
        raise InvalidInput("at least one size, each at least 1", field="batch_sizes", value=tuple(batch_sizes))
    times_s = arrivals.times_s(seed)
    sizes = np.random.default_rng([seed, SIZES_STREAM]).choice(np.asarray(batch_sizes, np.int64), len(times_s))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    ends_s = arrivals.duration_s if isinstance(arrivals, RateProfile) else float(times_s[-1]) if len(times_s) else 0.0
    return Schedule(times_s, starts, shuffled_passes(int(starts[-1]), held_out, seed), ends_s)


def shuffled_passes(count: int, held_out: int, seed: int) -> Ints:
    """Indices of `count` images: every pass holds each image once, in an order of its own."""
    chance = np.random.default_rng([seed, IMAGES_STREAM])
    passes = [chance.permutation(held_out) for _ in range(-(-count // held_out))]
    return np.concatenate(passes)[:count].astype(np.int64) if passes else np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Labelled images that training never saw."""

    images: NDArray[np.uint8]
    labels: Ints

    def permuted(self, seed: int) -> "HeldOut":
        """The same images with each other's labels: a control; the accuracy must fall to chance."""
        return HeldOut(self.images, np.random.default_rng([seed, LABELS_STREAM]).permutation(self.labels))


def load_held_out(path: Path) -> HeldOut:
    """Read heldout.npz of a family.

    Raises:
        InvalidInput: the file is missing or holds no labelled images.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            images, labels = data["images"], data["labels"]
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput(
            f"{path} holds no labelled images: {error}", field="images", value=str(path),
            remedy="name an npz file with arrays `images` and `labels`",
        ) from error  # fmt: skip
    if len(images) == 0 or len(images) != len(labels):
        raise InvalidInput(f"{path}: {len(images)} images, {len(labels)} labels", field="images", value=str(path))
    return HeldOut(images, labels.astype(np.int64))
