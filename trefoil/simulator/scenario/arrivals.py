"""Arrivals of requests: drawn from a rate over time, or recorded.

Serves the simulator, block by block, and the live load generator (trefoil/cli/load/arrivals.py), all at once.
Formulation: a renewal stream of gamma gaps (mean 1, SCV `gap_scv`) in operational time, mapped to seconds by the
    inverse of the cumulative rate: SCV 1 is a Poisson process whose rate follows the points exactly, SCV 0 a metronome.
Data: (time, rate) points joined by straight lines, or steps; traces as request_trace.py reads them.
Deterministic in its generator: gaps are drawn in separate blocks, and each arrival's time is a function of its
    place in operational time alone. So in whatever steps a stream is read, the same bytes come out.
"""

import math
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from trefoil.core.errors import SettingError, TraceError
from trefoil.core.units import MS_PER_S
from trefoil.simulator.scenario.request_trace import RequestTrace

Floats = npt.NDArray[np.float64]

MEANS_MAX: Final = 4096  # means of spans that are kept
GAPS: Final = 8192  # gaps drawn at once


@dataclass(frozen=True, slots=True, eq=False)
class Rate:
    """Points of a rate [1/s]; cyclic with `period_s` > 0, else constant beyond the ends. `steps`: no lines between.

    Raises:
        SettingError: points do not ascend, a rate is negative, or all of them are 0.
    """

    times_s: Floats
    rates: Floats
    period_s: float = 0.0
    steps: bool = False
    _mass: Floats = field(init=False, repr=False)  # expected arrivals from the first point to each
    _means: dict[tuple[float, float], float] = field(init=False, repr=False, compare=False, default_factory=dict)
    _last: Floats = field(init=False, repr=False)  # rate at the end of the piece that each point begins

    def __post_init__(self) -> None:
        times, rates, period_s = self.times_s, self.rates, self.period_s
        if not rates.size or times.size != rates.size:
            raise SettingError("a rate without points", field="points", remedy="give at least one (second, rate)")
        if np.any(np.diff(times) <= 0) or (period_s and (times[0] != 0 or times[-1] >= period_s)):
            raise SettingError("points do not ascend in time", field="points", remedy="sort them, each time once")
        if not np.all(np.isfinite(rates)) or rates.min() < 0 or not rates.max() > 0:
            raise SettingError(
                "rates must be >= 0, and one of them above 0",
                field="points",
                value=rates[:8].tolist(),
                remedy="fix it",
            )
        last = rates if self.steps else np.append(rates[1:], rates[-1])
        widths = np.diff(np.append(times, period_s)) if period_s else np.append(np.diff(times), 0.0)
        object.__setattr__(self, "_last", last)
        object.__setattr__(self, "_mass", np.concatenate(([0.0], np.cumsum(widths * (rates + last) / 2))))

    def at(self, at_s: float) -> float:
        """Rate at a time [1/s]."""
        inside = np.array(at_s % self.period_s if self.period_s else at_s)
        first, last, width, offset = self._piece(self._find(inside), inside)
        return float(first + (last - first) * np.clip(offset / width, 0.0, 1.0))

    def mean_per_s(self, from_s: float, until_s: float) -> float:
        """Mean rate over a span [1/s]."""
        if self.period_s:  # a cycle's spans are asked for again in every cycle
            starts_s = from_s % self.period_s
            return self._mean_per_s(starts_s, starts_s + (until_s - from_s))
        return self._mean_per_s(from_s, until_s)

    def _mean_per_s(self, from_s: float, until_s: float) -> float:
        known = self._means.get((from_s, until_s))
        if known is None:
            low, high = self.mass(np.array([from_s, until_s]))
            known = float((high - low) / (until_s - from_s))
            if len(self._means) < MEANS_MAX:
                self._means[from_s, until_s] = known
        return known

    def mass(self, at_s: Floats) -> Floats:
        """Expected arrivals from time 0 (cyclic) or the first point (else; negative before it)."""
        cycles = np.floor(at_s / self.period_s) if self.period_s else 0.0
        inside = at_s - cycles * self.period_s
        piece = self._find(inside)
        first, last, width, offset = self._piece(piece, inside)
        part = first * offset + (last - first) / width * np.clip(offset, 0.0, None) ** 2 / 2
        return np.asarray(cycles * self._mass[-1] + self._mass[piece] + part)

    def inverse(self, mass: Floats) -> Floats:
        """Time at which so many arrivals are expected [s]; inf for more than will ever come."""
        cycles = np.floor(mass / self._mass[-1]) if self.period_s else np.zeros(1)
        inside = mass - cycles * self._mass[-1] if self.period_s else mass
        piece = np.clip(np.searchsorted(self._mass[: self.rates.size], inside, side="right") - 1, 0, None)
        left = inside - self._mass[piece]
        first, last, width, _ = self._piece(piece, self.times_s[piece])
        slope = (last - first) / width
        root = first + np.sqrt(np.maximum(0.0, first * first + 2 * slope * np.maximum(left, 0.0)))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            offset = np.where(left == 0, 0.0, 2 * left / root)
        return np.asarray(cycles * self.period_s + self.times_s[piece] + offset)

    def _find(self, inside: Floats) -> npt.NDArray[np.int64]:
        return np.clip(np.searchsorted(self.times_s, inside, side="right") - 1, 0, None)

    def _piece(self, piece: npt.NDArray[np.int64], inside: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """Rates at both ends, width, and how far into it a time is; the last piece may have no end."""
        ends = np.append(self.times_s[1:], self.period_s if self.period_s else math.inf)
        return self.rates[piece], self._last[piece], ends[piece] - self.times_s[piece], inside - self.times_s[piece]


class ArrivalSource(Protocol):
    """Arrivals of one family, taken in order."""

    def mean_per_s(self, from_s: float, until_s: float) -> float:
        """Mean rate between two times."""
        ...

    def until(self, until_s: float) -> Floats:
        """Arrivals since the last call [s], ascending."""
        ...


class ArrivalStream:
    """Arrivals drawn from a rate, taken in order. Memory: one block of gaps."""

    def __init__(self, rate: Rate, gap_scv: float, rng: Generator, now_s: float = 0.0) -> None:
        """Begin at `now_s`.

        Raises:
            SettingError: `gap_scv` is negative.
        """
        if not gap_scv >= 0:
            raise SettingError("negative", field="gap_scv", value=gap_scv, remedy="1 is Poisson, 0 a metronome")
        self.rate, self.gap_scv, self.now_s = rate, gap_scv, now_s
        self._rng = rng
        self._mass = float(rate.mass(np.array([now_s]))[0])
        self._ahead = np.empty(0)
        self._latest_s = now_s

    def mean_per_s(self, from_s: float, until_s: float) -> float:
        """Mean rate of the points over a span [1/s]."""
        return self.rate.mean_per_s(from_s, until_s)

    def until(self, until_s: float) -> Floats:
        """Take all arrivals in [last until, until_s), ascending [s]."""
        blocks = []
        while not self._ahead.size or self._ahead[-1] < until_s:
            blocks.append(self._ahead)
            self._ahead = self._block()
        end = int(np.searchsorted(self._ahead, until_s))
        blocks.append(self._ahead[:end])
        self._ahead = self._ahead[end:]
        self.now_s = max(self.now_s, until_s)
        return np.concatenate(blocks)

    def _block(self) -> Floats:
        mass = np.cumsum(np.concatenate(([self._mass], self._gaps())))
        self._mass = float(mass[-1])
        # Rounding must not turn two arrivals round.
        times = np.maximum.accumulate(np.maximum(self._latest_s, self.rate.inverse(mass[1:])))
        self._latest_s = float(times[-1])
        return np.asarray(times)

    def _gaps(self) -> Floats:
        if self.gap_scv < 1e-9:
            return np.ones(GAPS)
        if self.gap_scv == 1.0:
            return self._rng.standard_exponential(GAPS)
        return self._rng.gamma(1 / self.gap_scv, self.gap_scv, GAPS)


class DeepRecSysArrivals(ArrivalStream):
    """Arrivals as DeepRecSys's load generator makes them: gaps of whole milliseconds, Poisson about their mean.

    No Poisson process: gaps vary by 1 / mean [ms], so that requests half a second apart come almost as a metronome.
    """

    def __init__(self, rate_per_s: float, rng: Generator, now_s: float = 0.0) -> None:
        """Begin at `now_s`, at a rate above 0 that never changes."""
        self._mean_ms = MS_PER_S / rate_per_s
        super().__init__(Rate(np.zeros(1), np.full(1, rate_per_s)), 1 / self._mean_ms, rng, now_s)

    def _gaps(self) -> Floats:
        return self._rng.poisson(self._mean_ms, GAPS) / self._mean_ms


@dataclass(slots=True)
class RecordedArrivals:
    """Arrival times, recorded or generated [s]; a warm-up is below zero.

    Raises:
        TraceError: they do not ascend, or one is not a number.
    """

    times_s: Floats
    _taken: int = 0

    def __post_init__(self) -> None:
        if not np.all(np.isfinite(self.times_s)) or np.any(np.diff(self.times_s) < 0):
            raise TraceError("arrival times must be numbers that ascend", field="arrivals", remedy="sort them")

    def mean_per_s(self, from_s: float, until_s: float) -> float:
        """Arrivals per second of a span."""
        low, high = np.searchsorted(self.times_s, [from_s, until_s])
        return float(high - low) / (until_s - from_s)

    def until(self, until_s: float) -> Floats:
        """Take all arrivals in [last until, until_s), ascending [s]."""
        end = int(self.times_s.searchsorted(until_s))
        found = self.times_s[self._taken : end]
        self._taken = max(end, self._taken)
        return found


class ReplayedArrivals:
    """Requests of a trace one by one, each at its time and with its tokens; from the beginning again when they end.

    Times are stretched to a mean of `rate_per_s` (0: as recorded). A request alone on a slice takes a step for each
    token of its answer, and one that finds the end. Of its prompt a step reads `prompt_tokens_per_step` tokens (0: the
    prompt takes no steps). A request of more than `context_tokens` (0: no bound) is refused.

    Attributes, by request: prompt_steps, steps; share: of requests with fewer steps; refused.
    """

    def __init__(
        self, trace: RequestTrace, rate_per_s: float, now_s: float, prompt_tokens_per_step: float, context_tokens: int
    ) -> None:
        """Begin at `now_s`."""
        assert trace.tokens is not None, "read without tokens"
        stretch = trace.mean_per_s / rate_per_s if rate_per_s else 1.0
        self._times_s, self._period_s = trace.numbers * stretch, trace.span_s * stretch
        self._first = self._taken = self._before(now_s)
        self._until_s = now_s
        prompts, answers = trace.tokens.T
        self.tokens_mean = float(answers.mean())
        self.prompt_steps = prompts / prompt_tokens_per_step if prompt_tokens_per_step else np.zeros(prompts.size)
        self.steps = answers + 1 + self.prompt_steps
        self.share = np.searchsorted(np.sort(self.steps), self.steps) / self.steps.size
        self.refused = (prompts + answers > context_tokens) & (context_tokens > 0)

    def row(self, number: int) -> int:
        """Row of the trace that an arrival is, by its number from the first one on."""
        return (self._first + number) % self._times_s.size

    def mean_per_s(self, from_s: float, until_s: float) -> float:
        """Arrivals per second of a span."""
        return (self._before(until_s) - self._before(from_s)) / (until_s - from_s)

    def until(self, until_s: float) -> Floats:
        """Take all arrivals in [last until, until_s), ascending [s]."""
        numbers = np.arange(self._taken, max(self._taken, self._before(until_s)))
        self._taken += numbers.size
        cycles, rows = np.divmod(numbers, self._times_s.size)
        found = self._times_s[rows] + cycles * self._period_s
        found = np.clip(found, self._until_s, math.nextafter(until_s, -math.inf))  # a cycle's start is rounded
        self._until_s = max(self._until_s, until_s)
        return np.asarray(found)

    def _before(self, at_s: float) -> int:
        """Arrivals from time 0 to a time; negative before it."""
        cycles, inside_s = divmod(at_s, self._period_s)
        return int(cycles) * self._times_s.size + int(np.searchsorted(self._times_s, inside_s))


def counts_as_rate(counts: Floats, bin_s: float, mean_per_s: float = 0.0) -> Rate:
    """Numbers of requests per bin as a rate that repeats when they end; scaled to a mean where one is given.

    Raises:
        SettingError: a bin without length, or a negative mean.
    """
    if not bin_s > 0:
        raise SettingError("no length", field="bin_s", value=bin_s, remedy="seconds per line, above 0")
    if mean_per_s < 0:
        raise SettingError("negative", field="rate_per_s", value=mean_per_s, remedy="0 (as recorded) or a mean rate")
    rates = np.asarray(counts / bin_s, dtype=np.float64)
    if mean_per_s:
        rates *= mean_per_s / rates.mean()
    return Rate(np.arange(rates.size, dtype=np.float64) * bin_s, rates, rates.size * bin_s, steps=True)


def draw_counted(counts: Floats, bin_s: float, rng: Generator) -> Floats:
    """Arrival times with exactly as many in each bin as it counts, uniform inside it; ascending [s], from time 0."""
    bins = np.repeat(np.arange(len(counts)), counts.astype(np.int64))
    return np.sort((bins + rng.random(len(bins))) * bin_s)
