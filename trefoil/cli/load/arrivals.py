"""Load of a live run, decided completely before the first request is sent, from a seed: when, and which images.

Arrivals come from a rate profile (a Poisson process whose rate is piecewise linear) or from a trace file. The generator
is that of trefoil/simulator/scenario/arrivals.py, the reader that of request_trace.py next to it.

Images are drawn in shuffled full passes over the held-out set, so that after every pass each image was sent equally
often. So the measured accuracy is that of the set, not of a lucky sample.
"""

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
from trefoil.simulator.scenario.arrivals import ArrivalStream, Rate, draw_counted
from trefoil.simulator.scenario.request_columns import TraceOptions
from trefoil.simulator.scenario.request_trace import RequestTrace, read_trace

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
        """Profile of the same rate all the time."""
        return cls(((0.0, rate_per_s), (duration_s, rate_per_s)))

    @property
    def duration_s(self) -> float:
        """Time at which the load ends [s]."""
        return self.points[-1][0]

    @property
    def expected(self) -> float:
        """Mean number of arrivals: the integral of the rate."""
        times, rates = self._arrays()
        return float(np.trapezoid(rates, times))

    def rate_per_s(self, at_s: float) -> float:
        """Rate at a time [1/s]; 0 outside the profile."""
        return Rate(*self._arrays()).at(at_s) if 0 <= at_s <= self.duration_s else 0.0

    def times_s(self, seed: int) -> Floats:
        """Arrival times of one sample of the Poisson process [s], ascending."""
        stream = ArrivalStream(Rate(*self._arrays()), 1.0, np.random.default_rng([seed, TIMES_STREAM]))
        return stream.until(self.duration_s)

    def _arrays(self) -> tuple[Floats, Floats]:
        times, rates = np.array(self.points, dtype=np.float64).T
        return times, rates


@dataclass(frozen=True, slots=True)
class ArrivalTrace:
    """Trace file to play. `rate_scale` multiplies the load; `limit_s` ends it."""

    path: Path
    rate_scale: float = 1.0
    limit_s: float = math.inf
    options: TraceOptions = TraceOptions()

    def __post_init__(self) -> None:
        for field in ("rate_scale", "limit_s"):
            if not getattr(self, field) > 0:
                raise InvalidInput("must be above 0", field=field, value=getattr(self, field))

    def read(self) -> RequestTrace:
        """Read the file.

        Raises:
            TraceError: naming file, line and value of what is wrong with it.
        """
        return read_trace(self.path, self.options, whole=True)

    def times_s(self, seed: int) -> Floats:
        """Arrival times as they are played [s], ascending; counts are met exactly, bin by bin.

        Raises:
            TraceError: naming file, line and value of what is wrong with it.
        """
        trace = self.read()
        rng = np.random.default_rng([seed, TIMES_STREAM])
        if not trace.bin_s:
            self._refuse_too_many(int(len(trace.numbers) * self.rate_scale))
            copies = np.floor(self.rate_scale + rng.random(len(trace.numbers))).astype(np.int64)
            times = trace.numbers if self.rate_scale == 1.0 else np.repeat(trace.numbers, copies)
        else:
            # A scaled count is rounded up or down by chance, so that its mean is right.
            counts = np.floor(trace.numbers * self.rate_scale + rng.random(len(trace.numbers)))
            self._refuse_too_many(int(counts.sum()))
            times = draw_counted(counts, trace.bin_s, rng)
        return times[times < self.limit_s]

    def _refuse_too_many(self, arrivals: int) -> None:
        if arrivals > ARRIVALS_MAX:
            raise TraceError(f"{self.path}: {arrivals:,} arrivals, at most {ARRIVALS_MAX:,}", remedy="lower rate_scale")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Schedule of all that will be sent: request i leaves at times_s[i] with images[starts[i] : starts[i + 1]]."""

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


@dataclass(frozen=True, slots=True)
class NormalSizes:
    """Items of requests by a normal law, rounded and clipped to 1 and `items_max`."""

    items_mean: float = 1.0
    items_sd: float = 0.0
    items_max: int = 1

    def draw(self, requests: int, rng: np.random.Generator) -> Ints:
        """Items of so many requests."""
        drawn = np.rint(rng.normal(self.items_mean, self.items_sd, requests))
        return np.clip(drawn, 1, self.items_max).astype(np.int64)


def schedule(
    arrivals: RateProfile | ArrivalTrace, held_out: int, batch_sizes: Sequence[int] | NormalSizes, seed: int
) -> Schedule:
    """Decide all requests. `batch_sizes`: a law, or sizes of which each request draws one, equally likely."""
    times_s, rng = arrivals.times_s(seed), np.random.default_rng([seed, SIZES_STREAM])
    if isinstance(batch_sizes, NormalSizes):
        sizes = batch_sizes.draw(len(times_s), rng)
    elif not batch_sizes or min(batch_sizes) < 1:
        raise InvalidInput("at least one size, each at least 1", field="batch_sizes", value=tuple(batch_sizes))
    else:
        sizes = rng.choice(np.asarray(batch_sizes, np.int64), len(times_s))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    ends_s = arrivals.duration_s if isinstance(arrivals, RateProfile) else float(times_s[-1]) if len(times_s) else 0.0
    return Schedule(times_s, starts, shuffled_passes(int(starts[-1]), held_out, seed), ends_s)


def shuffled_passes(count: int, held_out: int, seed: int) -> Ints:
    """Indices of `count` images: every pass holds each image once, in a separate order."""
    chance = np.random.default_rng([seed, IMAGES_STREAM])
    passes = [chance.permutation(held_out) for _ in range(-(-count // held_out))]
    return np.concatenate(passes)[:count].astype(np.int64) if passes else np.empty(0, np.int64)
