"""Queueing laws: pooled capacity under a latency objective, and the request-level kernel that checks it.

Source: M/D/c: Franx, "A simple solution for the M/D/c waiting time distribution" (OR Letters 2001) on the embedded
chain of Crommelin (1932); M/M/c: Erlang C; between them the two-moment interpolation of waiting-time percentiles of
Tijms ("A First Course in Stochastic Models", 9.6); arrivals that are not Poisson: Allen-Cunneen scaling of the
conditional wait, and Kraemer-Langenbach-Belz for the probability of waiting. Where arrivals come in bursts, also what a
burst alone delays (servers that take turns: a request waits for k services less the last k rounds of gaps).
Data: service time (mean, CV: a gamma law, as the simulated slices draw it), servers c, SLO (ms, quantile), SCV of gaps.
Result: the largest rate at which P(wait + service > SLO) <= 1 - quantile for FIFO service by c equal servers.
Deviations: none from the two exact ends. In between it is an approximation, within 2 % of the kernel
(tests/unit/test_queueing.py). So the planner lets the kernel check its plans.

The kernel serves requests one by one. `split_weighted` sends each to a class by weight, and every class is one FIFO.
`serve_shared` is one FIFO over unequal servers, where the mix follows speed (CLOVER).
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.random import Generator
from threadpoolctl import ThreadpoolController

from trefoil.core.common import ProfileRow
from trefoil.core.device_types import slice_servers
from trefoil.core.objective import TokenSlo
from trefoil.core.units import MS_PER_S

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

Z_95: Final = 1.6448536269514722  # standard normal quantiles
Z_99: Final = 2.3263478740408408
UTILISATIONS: Final[tuple[float, ...]] = (
    *np.linspace(0.01, 0.89, 45).tolist(),
    *(1 - np.geomspace(0.1, 0.004, 24)).tolist(),
)
PER_UNIT: Final = 24  # points of a waiting-time table per service time
TABLE_UNITS: Final = 3  # beyond it the exact exponential decay of M/D/c continues
ROUNDS_MAX: Final = 4  # of gaps that may be short together, where arrivals come in bursts
ROUND_GAPS_MAX: Final = 64  # beyond them one round says enough
SERIES_END: Final = 1e-9  # terms of a series are added until they are smaller; its sum is above 1
SERIES_STEP: Final = 8
RATE_LEAST: Final = 1e-3  # of a slice's saturation: streams that are all alone
STREAMS_MAX: Final = 4096  # of one slice
HALVINGS: Final = 24
LENGTHS: Final = 1000  # points of a law of lengths
LENGTH_BORDERS: Final = (0.25, 0.5, 0.75, 0.99)  # of classes of lengths, in shares of requests
NEGLIGIBLE: Final = 1e-9
BOTH: Final = 1.5  # exponent by which two causes of a wait add up
_LOG_TAILS: Final = -np.linspace(0.0, 12.0, 97)  # conditional tail probabilities at which two laws are interpolated
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
_BLAS: Final = ThreadpoolController()


@dataclass(frozen=True, slots=True)
class ServiceTime:
    """Service time of one executed batch, gamma-distributed."""

    mean_ms: float
    cv: float


@dataclass(frozen=True, slots=True)
class ServerClass:
    """Class of equal servers that share one queue; `weight` is the share of the traffic that is sent to them."""

    servers: int
    service: ServiceTime
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class KernelResult:
    """Result of the kernel, per request after warm-up: latency and the index of the class that served it."""

    latency_ms: Floats
    chosen: Ints

    def attainment(self, slo_ms: float, index: int | None = None) -> float:
        """Share of requests (of one class) within the SLO; 1.0 where there were none."""
        latency = self.latency_ms if index is None else self.latency_ms[self.chosen == index]
        return float(np.mean(latency <= slo_ms)) if latency.size else 1.0

    def quantile_ms(self, q: float) -> float:
        """Quantile of latency over all classes [ms]."""
        return float(np.quantile(self.latency_ms, q)) if self.latency_ms.size else 0.0


def service_time(row: ProfileRow) -> ServiceTime:
    """Fit mean and CV to p50, p95, p99 (Wilson-Hilferty: cube roots of a gamma law are nearly normal)."""
    assert row.latency_ms_p50 > 0
    return _fit(row.latency_ms_p50, row.latency_ms_p95, row.latency_ms_p99)


@lru_cache(maxsize=4096)
def _fit(p50_ms: float, p95_ms: float, p99_ms: float) -> ServiceTime:
    estimates = []
    for z, tail_ms in ((Z_95, p95_ms), (Z_99, p99_ms)):
        root = max(0.0, (tail_ms / p50_ms) ** (1 / 3) - 1.0)
        # (1 - k^2/9) * root = z * k / 3, solved for the CV k
        estimates.append((-z / 3 + math.sqrt(z * z / 9 + 4 * root * root / 9)) / (2 * root / 9) if root > 1e-9 else 0.0)
    cv = sum(estimates) / len(estimates)
    return ServiceTime(p50_ms / (1 - cv * cv / 9) ** 3, cv)


def quantiles_ms(service: ServiceTime) -> tuple[float, float, float]:
    """Median, p95 and p99 [ms] from which `service_time` fits this mean and CV."""
    middle = 1 - service.cv * service.cv / 9
    p50, p95, p99 = (service.mean_ms * (middle + z * service.cv / 3) ** 3 for z in (0.0, Z_95, Z_99))
    return p50, p95, p99


def rate_max(row: ProfileRow, slo_ms: float, quantile: float, gap_scv: float, slices: int) -> float:
    """Largest rate of executed batches [1/s] that a pool of `slices` equal slices answers within the SLO."""
    servers = slices * slice_servers(row.slice_type)
    return pool_rate_max(service_time(row), slo_ms, quantile, gap_scv, servers)


def pool_rate_max(service: ServiceTime, slo_ms: float, quantile: float, gap_scv: float, servers: int) -> float:
    """The same of a service time and of servers: a slice of n cores serves n requests at once, any other one."""
    return servers / service.mean_ms * MS_PER_S * utilisation_max(service, slo_ms, quantile, gap_scv, servers)


@lru_cache(maxsize=65536)
def utilisation_max(service: ServiceTime, slo_ms: float, quantile: float, gap_scv: float, servers: int) -> float:
    """Largest utilisation at which `quantile` of the requests take at most slo_ms; 0 if none."""
    assert 0 < quantile < 1
    assert gap_scv >= 0
    limit = 1 - quantile
    slack = slo_ms / service.mean_ms
    if servers < 1 or _missed(UTILISATIONS[0], service.cv, slack, gap_scv, servers) > limit:
        return 0.0
    low, high = 0, len(UTILISATIONS)
    while high - low > 1:
        middle = (low + high) // 2
        if _missed(UTILISATIONS[middle], service.cv, slack, gap_scv, servers) > limit:
            high = middle
        else:
            low = middle
    if high == len(UTILISATIONS):
        return UTILISATIONS[low]
    below = math.log(max(1e-12, _missed(UTILISATIONS[low], service.cv, slack, gap_scv, servers)))
    above = math.log(_missed(UTILISATIONS[high], service.cv, slack, gap_scv, servers))
    part = (math.log(limit) - below) / (above - below) if above > below else 0.0
    return UTILISATIONS[low] + part * (UTILISATIONS[high] - UTILISATIONS[low])


def within(service: ServiceTime, limit_ms: float, utilisation: float, gap_scv: float, servers: int) -> float:
    """Probability of wait + service <= limit_ms in a pool of equal servers at a utilisation below 1."""
    return 1 - _missed(utilisation, service.cv, limit_ms / service.mean_ms, gap_scv, servers)


def within_all(service: ServiceTime, limits_ms: Floats, utilisation: float, gap_scv: float, servers: int) -> Floats:
    """Probabilities as `within`, of many limits, shape (n,): a whole law costs little more than one point of it."""
    scv, slacks = service.cv * service.cv, limits_ms / service.mean_ms
    within = np.array([_gamma_cdf(slack, scv) for slack in slacks.tolist()])
    waits, delayed = _waits(utilisation, scv, gap_scv, servers)
    shares = within[:, None] * ((_NODES + 1) / 2)
    margins = slacks[:, None] - _gamma_quantiles(shares, scv)
    tails = delayed * np.exp(np.interp(margins, waits, _LOG_TAILS, right=-np.inf))
    if gap_scv > 1:
        tails = _either(tails, _clustered(margins, utilisation, gap_scv, servers))
    return np.asarray(np.where(within > 0, within * (1 - tails @ _WEIGHTS / 2), 0.0))


@lru_cache(maxsize=65536)
def _missed(utilisation: float, cv: float, slack: float, gap_scv: float, servers: int) -> float:
    """P(wait + service > slack), in units of the mean service time."""
    scv = cv * cv
    within = _gamma_cdf(slack, scv)
    if within <= 0:
        return 1.0
    waits, delayed = _waits(utilisation, scv, gap_scv, servers)
    shares = (_NODES + 1) / 2 * within  # service times that alone would be in time, by their quantile
    margins = slack - _gamma_quantiles(shares, scv)
    tails = delayed * np.exp(np.interp(margins, waits, _LOG_TAILS, right=-np.inf))
    if gap_scv > 1:
        tails = _either(tails, _clustered(margins, utilisation, gap_scv, servers))
    return float(1 - within + within * np.dot(_WEIGHTS, tails) / 2)


@lru_cache(maxsize=1024)  # asked for at every point of a law
def _waits(utilisation: float, scv: float, gap_scv: float, servers: int) -> tuple[Floats, float]:
    """Waiting times of the delayed at the conditional tails `_LOG_TAILS`, and the probability of a delay."""
    waits_m = -_LOG_TAILS / (servers * (1 - utilisation))
    delayed_m = erlang_c(servers, utilisation)
    if scv >= 1:
        return waits_m * (gap_scv + scv) / 2, min(1.0, delayed_m * _burst_ratio(utilisation, scv, gap_scv))
    waits_d, delayed_d = _deterministic(utilisation, servers)
    waits = ((1 - scv) * waits_d + scv * waits_m) * (gap_scv + scv) / (1 + scv)
    delayed = (1 - scv) * delayed_d + scv * delayed_m
    return waits, min(1.0, delayed * _burst_ratio(utilisation, scv, gap_scv))


def shortest_first(cv: float, utilisation: float) -> float:
    """Mean wait where shorter classes of length go first, as a share of that of first come, first served.

    Source: Cobham, "Priority assignment in waiting line problems" (Operations Research 1954): class i waits as one over
    (1 - load of those before it) (1 - load with it).
    Data: a gamma law of service times, cut at the percentiles of LENGTH_BORDERS, each length predicted right.
    Deviations: one server; of several alike, of which all are busy while requests wait, the ratio is taken as the same.
    """
    lengths = _gamma_quantiles((np.arange(LENGTHS) + 0.5) / LENGTHS, cv * cv)
    cuts = [round(share * LENGTHS) for share in (0.0, *LENGTH_BORDERS, 1.0)]
    loads = utilisation * np.concatenate(([0.0], np.cumsum(lengths)[np.array(cuts[1:]) - 1])) / lengths.sum()
    shares = np.diff(cuts) / LENGTHS
    return float((shares * (1 - utilisation) / ((1 - loads[:-1]) * (1 - loads[1:]))).sum())


def _burst_ratio(utilisation: float, scv: float, gap_scv: float) -> float:
    """How much likelier a wait is than under Poisson arrivals (Kraemer and Langenbach-Belz 1976; 1 for gap_scv = 1)."""
    if gap_scv <= 1:
        below = 1 + utilisation * (scv - 1) + utilisation**2 * (4 * gap_scv + scv)
        factor = (1 + gap_scv + utilisation * scv) / below
    else:
        factor = 4 * utilisation / (gap_scv + utilisation**2 * (4 * gap_scv + scv))
    return max(0.0, 1 + (gap_scv - 1) * (1 - utilisation) * factor)


def _clustered(margins: Floats, utilisation: float, gap_scv: float, servers: int) -> Floats:
    """P(wait > margin) at least: of servers that take turns, the last k rounds of gaps are shorter than k services
    less the margin. The sum of gamma gaps by the series of the incomplete gamma function.
    """
    number = max(1, min(ROUNDS_MAX, ROUND_GAPS_MAX // servers))
    rounds = np.arange(1.0, number + 1).reshape(-1, *(1,) * margins.ndim)
    shape = rounds * servers / gap_scv
    x = np.maximum(0.0, rounds - margins) * utilisation * servers / gap_scv  # < shape
    with np.errstate(divide="ignore"):
        start = shape * np.log(x) - x - np.vectorize(math.lgamma)(shape + 1)
    total, term = np.ones_like(x), np.ones_like(x)
    for added in count(1):
        term = term * x / (shape + added)
        total = total + term
        if added % SERIES_STEP == 0 and term.max() < SERIES_END:
            break
    return np.asarray(np.minimum(1.0, np.exp(start) * total).max(axis=0))


def _either(tails: Floats, clustered: Floats) -> Floats:
    """Tail of two causes of a wait, of which each alone says too little where the other is as likely."""
    return np.minimum(1.0, (tails**BOTH + clustered**BOTH) ** (1 / BOTH))


def erlang_c(servers: int, utilisation: float) -> float:
    """Probability of waiting in M/M/c."""
    offered, blocking = servers * utilisation, 1.0
    for k in range(1, servers + 1):
        blocking = offered * blocking / (k + offered * blocking)
    return blocking / (1 - utilisation * (1 - blocking))


@lru_cache(maxsize=4096)
def _deterministic(utilisation: float, servers: int) -> tuple[Floats, float]:
    """M/D/c: waits of the delayed at `_LOG_TAILS`, and the probability of a delay. Unit: the service time."""
    offered = servers * utilisation
    decay = _decay(offered, servers)
    waiting_at_most = np.cumsum(_in_system(offered, servers, decay))[servers:]
    steps = np.arange(TABLE_UNITS * PER_UNIT) / PER_UNIT
    unit = np.floor(steps).astype(np.int64) + 1  # Franx's k: (k - 1) <= wait < k
    means = offered * (unit - steps)
    count = TABLE_UNITS * servers
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, count)))))
    j = np.arange(count)
    poisson = np.exp(j * np.log(means)[:, None] - means[:, None] - log_factorial)
    left = unit[:, None] * servers - 1 - j
    tails = 1 - np.sum(np.where(left >= 0, poisson * waiting_at_most[np.maximum(left, 0)], 0.0), axis=1)
    delayed = float(tails[0])
    if delayed < 1e-9:
        return np.zeros_like(_LOG_TAILS), 0.0
    logs = np.log(np.maximum(tails / delayed, 1e-9))
    falling = np.minimum.accumulate(logs)
    keep = np.concatenate(([True], np.diff(falling) < -1e-12)) & (falling > -11)
    x, y = -falling[keep], steps[keep]
    exact = np.interp(-_LOG_TAILS, x, y)
    beyond = y[-1] + (-_LOG_TAILS - x[-1]) / (offered * (decay - 1))
    return np.where(x[-1] >= -_LOG_TAILS, exact, beyond), delayed


def _decay(offered: float, servers: int) -> float:
    """The root > 1 of z^c = exp(offered (z - 1)): queue lengths fall off as z^-n."""
    low = servers / offered  # between the roots 1 and z, where c log z - offered (z - 1) is largest
    high = 2 * low
    while servers * math.log(high) > offered * (high - 1):
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if servers * math.log(middle) > offered * (middle - 1) else (low, middle)
    return (low + high) / 2


def _in_system(offered: float, servers: int, decay: float) -> Floats:
    """Stationary number in an M/D/c system, long enough for every index that `_deterministic` reads.

    One service time later all who were in service have left: N' = max(N - c, 0) + Poisson(offered).
    """
    size = servers + max(48, int(3 * math.sqrt(servers)))
    j = np.arange(size + 1)
    arrivals = np.exp(j * math.log(offered) - offered - np.concatenate(([0.0], np.cumsum(np.log(j[1:])))))
    moves = np.zeros((size + 1, size + 1))
    moves[:, : servers + 1] = arrivals[:, None]
    for k in range(servers + 1, size + 1):
        moves[k - servers :, k] = arrivals[: size + 1 - (k - servers)]
    for k in range(size + 1, size + servers + 1):  # beyond the table the probabilities are geometric
        moves[k - servers :, size] += arrivals[: size + 1 - (k - servers)] * decay ** (size - k)
    system = moves - np.eye(size + 1)
    system[-1, :] = 1.0
    system[-1, size] = decay / (decay - 1)
    right = np.zeros(size + 1)
    right[-1] = 1.0
    with _BLAS.limit(limits=1, user_api="blas"):  # each more would spin for 0.1 s, and the sums round otherwise
        probabilities = np.linalg.solve(system, right)
    more = max(0, servers * (TABLE_UNITS + 1) - size)
    return np.concatenate((probabilities, probabilities[-1] * decay ** -np.arange(1.0, more + 1)))


def _gamma_cdf(x: float, scv: float) -> float:
    """P(S <= x) for a gamma law of mean 1 (Wilson-Hilferty)."""
    if scv < 1e-8:
        return 1.0 if x >= 1 else 0.0
    if x <= 0:
        return 0.0
    z = (x ** (1 / 3) - 1 + scv / 9) * 3 / math.sqrt(scv)
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _gamma_quantiles(shares: Floats, scv: float) -> Floats:
    """Inverse of `_gamma_cdf`."""
    if scv < 1e-8:
        return np.ones_like(shares)
    z = _normal_quantiles(shares)
    return np.asarray(np.maximum(0.0, 1 - scv / 9 + z * math.sqrt(scv) / 3) ** 3)


_Z_GRID: Final = np.linspace(-6, 6, 2401)
_PHI_GRID: Final = np.array([0.5 * math.erfc(-z / math.sqrt(2)) for z in _Z_GRID])


def _normal_quantiles(shares: Floats) -> Floats:
    return np.interp(shares, _PHI_GRID, _Z_GRID)


# ---------------------------------------------------------------------------------------------- continuous batching


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits of a family that streams tokens: latency of the whole answer with its quantile, and those of its tokens;
    a limit of 0 is none."""

    latency_ms: float
    quantile: float
    tokens: TokenSlo


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """Load of one slice that runs streams together: shares of streams within each limit, and the mean of streams that
    run."""

    latency: float
    ttft: float
    tpot: float
    running: float

    def meets(self, limits: StreamLimits) -> bool:
        """Whether enough streams are within each limit."""
        tokens = limits.tokens
        return (
            self.latency >= limits.quantile
            and (not tokens.ttft_ms or self.ttft >= tokens.ttft_quantile)
            and (not tokens.tpot_ms or self.tpot >= tokens.tpot_quantile)
        )


def stream_answers(rows: Sequence[ProfileRow]) -> tuple[ServiceTime, ...]:
    """Time of an answer while 1, 2, ... streams run, from a model's rows, by `batch`: the streams that run.

    At most STREAMS_MAX: the law's time grows with them.
    """
    times = [service_time(row) for row in rows]
    numbers = np.arange(1, min(rows[-1].batch, STREAMS_MAX) + 1)
    means_ms = np.interp(numbers, [row.batch for row in rows], [one.mean_ms for one in times])
    return tuple(ServiceTime(mean_ms, times[0].cv) for mean_ms in means_ms.tolist())


@lru_cache(maxsize=4096)
def streams_rate_max(answers: tuple[ServiceTime, ...], steps: float, limits: StreamLimits) -> tuple[float, float]:
    """Largest rate [1/s] at which one slice keeps its streams within their limits, and the streams that run then in the
    mean; (0, 0): not even one stream alone is within them.

    Args:
        answers: time of an answer while 1, 2, ... streams run; as many as have a place.
        steps: steps of such an answer: one a token, and one more.
    """
    law = StreamLaw(answers, steps)
    if not law.load(RATE_LEAST * law.saturation_per_s, limits).meets(limits):
        return 0.0, 0.0
    low, high = RATE_LEAST, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if law.load(middle * law.saturation_per_s, limits).meets(limits) else (low, middle)
    rate = low * law.saturation_per_s
    return rate, law.load(rate, limits).running


class StreamLaw:
    """Law of continuous batching: streams join and leave between two steps; a step's time grows with those that run.

    Source: state-dependent processor sharing (Cohen 1979), whose number of streams depends on the mean length alone.
    Beyond the places there is a FIFO queue that empties at the rate of a full slice.
    Data: time of an answer next to b - 1 others, A(b), for b = 1 .. places; Poisson arrivals. Step: A(b) / steps.
    Formulation: b streams run: b / A(b) leave per second; P(k streams) is a product of rates. A stream sees on arrival
    what the time average is. TTFT: the rest of the step under way and one step; where it waits, an exponential time and
    then one step. TPOT: the step of the streams that it meets, itself included. Each number of streams is spread
    half-way to the next ones, as a stream meets several. Latency: the wait and an answer next to those that it met.
    Deviations: none of the number of streams; quantiles of the three times are approximations, within 8 % of streams
    that are played step by step (tests/unit/test_streams_law.py).
    """

    def __init__(self, answers: Sequence[ServiceTime], steps: float) -> None:
        self._answers_s = np.array([one.mean_ms for one in answers]) / MS_PER_S
        self._cv = answers[0].cv
        self._steps_ms = self._answers_s * MS_PER_S / steps
        self._leave_per_s = np.arange(1, len(answers) + 1) / self._answers_s

    @property
    def saturation_per_s(self) -> float:
        """Rate at which all places are always taken [1/s]."""
        return float(self._leave_per_s[-1])

    def load(self, rate_per_s: float, limits: StreamLimits) -> StreamLoad:
        """Shares of streams within limits at a rate; at saturation and above nothing is within any."""
        if rate_per_s >= self.saturation_per_s:
            return StreamLoad(0.0, 0.0, 0.0, float(len(self._answers_s)))
        logs = np.concatenate(([0.0], np.cumsum(np.log(rate_per_s / self._leave_per_s))))
        states = np.exp(logs - logs.max())
        full = states[-1] / (1 - rate_per_s / self.saturation_per_s)  # all places taken
        whole = states[:-1].sum() + full
        joins, waits = states[:-1] / whole, float(full / whole)  # by how many run already
        empties_per_s = self.saturation_per_s - rate_per_s
        return StreamLoad(
            self._latency(limits.latency_ms, joins, waits, empties_per_s),
            self._ttft(limits.tokens.ttft_ms, joins, waits, empties_per_s),
            self._tpot(limits.tokens.tpot_ms, joins, waits),
            float(joins @ np.arange(len(joins)) + waits * len(joins)),
        )

    def _ttft(self, limit_ms: float, joins: Floats, waits: float, empties_per_s: float) -> float:
        rest = limit_ms / self._steps_ms - 1  # of the step under way, in steps
        inside = np.where(np.arange(len(joins)) > 0, np.clip(rest, 0.0, 1.0), rest >= 0)
        left_s = max(0.0, limit_ms - self._steps_ms[-1]) / MS_PER_S
        return float(joins @ inside + waits * (1 - math.exp(-empties_per_s * left_s)))

    def _tpot(self, limit_ms: float, joins: Floats, waits: float) -> float:
        shares = joins.copy()
        shares[-1] += waits
        between = (self._steps_ms[1:] + self._steps_ms[:-1]) / 2
        edges = np.concatenate((self._steps_ms[:1], between, self._steps_ms[-1:]))
        if limit_ms < edges[0]:
            return 0.0
        return float(np.interp(limit_ms, edges, np.concatenate(([0.0], np.cumsum(shares)))))

    def _latency(self, limit_ms: float, joins: Floats, waits: float, empties_per_s: float) -> float:
        scv, limit_s = self._cv * self._cv, limit_ms / MS_PER_S
        found = sum(
            share * _gamma_cdf(limit_s / answer_s, scv)
            for share, answer_s in zip(joins.tolist(), self._answers_s.tolist(), strict=True)
        )
        if waits > NEGLIGIBLE:
            waits_s = -np.log((1 - _NODES) / 2) / empties_per_s
            margins = ((limit_s - waits_s) / self._answers_s[-1]).tolist()
            found += waits * sum(w * _gamma_cdf(m, scv) for w, m in zip(_WEIGHTS.tolist(), margins, strict=True)) / 2
        return float(found)


# ------------------------------------------------------------------------------------------------ request by request


def arrivals_s(rate_per_s: float, gap_scv: float, requests: int, rng: Generator) -> Floats:
    """Arrival times of a renewal process with gamma gaps (SCV 1: Poisson, 0: a metronome)."""
    assert rate_per_s > 0
    if gap_scv < 1e-9:
        return np.arange(1, requests + 1) / rate_per_s
    return np.cumsum(rng.gamma(1 / gap_scv, gap_scv / rate_per_s, requests))


def split_weighted(weights: Sequence[float], requests: int, rng: Generator) -> Ints:
    """Class of each request, drawn independently: no router that keeps the weights is less regular."""
    shares = np.cumsum(np.asarray(weights, dtype=np.float64))
    assert shares[-1] > 0
    return np.searchsorted(shares / shares[-1], rng.random(requests), side="right").astype(np.int64)


def serve_weighted(classes: Sequence[ServerClass], at_s: Floats, rng: Generator, warm_up: float = 0.1) -> KernelResult:
    """Serve with a FIFO per class; the first `warm_up` share of the requests is served but not reported."""
    chosen = split_weighted([c.weight for c in classes], at_s.size, rng)
    latency_ms = np.zeros(at_s.size)
    for index, one in enumerate(classes):
        mine = chosen == index
        latency_ms[mine] = _fifo(at_s[mine], one.servers, draw_s(one.service, int(mine.sum()), rng)) * MS_PER_S
    skip = int(at_s.size * warm_up)
    return KernelResult(latency_ms[skip:], chosen[skip:])


def serve_shared(classes: Sequence[ServerClass], at_s: Floats, rng: Generator, warm_up: float = 0.1) -> KernelResult:
    """Serve with one FIFO for all, `serve_fifo`."""
    draws = [draw_s(c.service, at_s.size, rng).tolist() for c in classes]
    ends_s, chosen = serve_fifo([c.servers for c in classes], at_s.tolist(), draws)
    skip = int(at_s.size * warm_up)
    return KernelResult((ends_s - at_s)[skip:] * MS_PER_S, chosen[skip:])


def serve_fifo(
    servers: Sequence[int], at_s: Sequence[float], service_s: Sequence[Sequence[float]]
) -> tuple[Floats, Ints]:
    """Serve each request, first come, first served, by the server that has been idle longest, or frees first.

    Args:
        servers: how many of each class.
        at_s: arrivals [s], ascending.
        service_s: of each class the time that it takes for each request [s].

    Returns:
        End of each request [s], and the class that served it.
    """
    free = [(0.0, n, index) for n, index in enumerate(i for i, number in enumerate(servers) for _ in range(number))]
    ends_s, chosen = [], []
    for n, at in enumerate(at_s):
        free_at, server, index = free[0]
        end_s = (free_at if free_at > at else at) + service_s[index][n]
        heapq.heapreplace(free, (end_s, server, index))
        ends_s.append(end_s)
        chosen.append(index)
    return np.array(ends_s), np.array(chosen, dtype=np.int64)


def draw_s(service: ServiceTime, count: int, rng: Generator) -> Floats:
    """Service times [s], shape (count,): the one law of kernel, simulator and simulated slices."""
    mean_s = service.mean_ms / MS_PER_S
    if service.cv < 1e-6:
        return np.full(count, mean_s)
    scv = service.cv**2
    return rng.gamma(1 / scv, scv * mean_s, count)


def _fifo(at_s: Floats, servers: int, service_s: Floats) -> Floats:
    """Latency of each request in one FIFO before equal servers."""
    free = [0.0] * servers
    latency = []
    for at, length in zip(at_s.tolist(), service_s.tolist(), strict=True):
        done = (free[0] if free[0] > at else at) + length
        heapq.heapreplace(free, done)
        latency.append(done - at)
    return np.array(latency)
