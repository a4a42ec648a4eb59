"""Fit the constants of `cost_law` to measurements: numpy only, deterministic.

`fit_latency` is a damped Gauss-Newton on logarithms with a soft-L1 loss (scale SOFT), so that the few broken rows of a
measurement do not bend the law. `replay` serves a recorded load sweep again: same arrivals, FIFO to the slice that has
been free longest. Service times follow a gamma law through fixed normal draws, so that percentiles move smoothly.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from trefoil.core.queueing import serve_fifo
from trefoil.core.units import MS_PER_S
from trefoil.profiler.cost_law import Features, LatencyLaw, SliceShare, bare_ms, gamma_factor

Floats = npt.NDArray[np.float64]

SOFT: Final = 0.15  # residuals of the logarithm beyond this count linearly
STEP: Final = 1e-5
ROUNDS: Final = 200
START: Final = LatencyLaw(0.027, 40.0, 140.0, 220.0, 0.9, 0.4, 0.4, 3.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured time of one pass [ms]."""

    model: str
    on: SliceShare
    batch: int
    time_ms: float


def predicted(law: LatencyLaw, features: dict[str, Features], timings: Sequence[Timing]) -> Floats:
    """Times of passes by the law [ms]."""
    return np.array([bare_ms(law, features[t.model], t.on, t.batch) for t in timings])


def log_errors(law: LatencyLaw, features: dict[str, Features], timings: Sequence[Timing]) -> Floats:
    """Logarithms of predicted over measured time, one a pass."""
    return np.log(predicted(law, features, timings)) - np.log([t.time_ms for t in timings])


def fit_latency(features: dict[str, Features], timings: Sequence[Timing]) -> LatencyLaw:
    """Fit the law's constants: the least soft-L1 loss of `log_errors`."""

    def residuals(log_constants: Floats) -> Floats:
        return log_errors(LatencyLaw(*np.exp(log_constants).tolist()), features, timings)

    return LatencyLaw(*np.exp(_least(residuals, np.log(astuple(START)))).tolist())


def _least(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Damped Gauss-Newton on the soft-L1 loss."""
    at, now, damping = start.astype(np.float64), residuals(start), 1e-2
    for _ in range(ROUNDS):
        weights = 1.0 / np.sqrt(1.0 + (now / SOFT) ** 2)
        columns = [(residuals(at + STEP * unit) - now) / STEP for unit in np.eye(at.size)]
        jacobian = np.stack(columns, axis=1)
        square = (jacobian * weights[:, None]).T @ jacobian
        gradient = (jacobian * weights[:, None]).T @ now
        move = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-12), -gradient)
        tried = residuals(at + move)
        if _loss(tried) < _loss(now):
            at, now, damping = at + move, tried, damping / 3.0
            if float(np.abs(move).max()) < 1e-7:
                break
        else:
            damping *= 4.0
            if damping > 1e9:
                break
    return at


def _loss(residuals: Floats) -> float:
    return float(np.sum(np.sqrt(1.0 + (residuals / SOFT) ** 2)))


@dataclass(frozen=True, slots=True)
class Replayed:
    """Outcome of a replay: p95 of latency [ms], seconds from the first arrival to the last answer, requests."""

    p95_ms: float
    duration_s: float
    requests: int


def replay(arrivals_s: Floats, normals: Floats, means_ms: Sequence[float], cv: float) -> Replayed:
    """Replay these arrivals on one slice per entry of `means_ms` [ms], first come first served."""
    lengths = [gamma_factor(cv, z) / MS_PER_S for z in normals.tolist()]
    service_s = [[length * mean_ms for length in lengths] for mean_ms in means_ms]
    ends_s, _ = serve_fifo([1] * len(means_ms), arrivals_s.tolist(), service_s)
    p95_ms = float(np.percentile(ends_s - arrivals_s, 95)) * MS_PER_S
    return Replayed(p95_ms, float(ends_s.max()), ends_s.size)


def simplex(loss: Callable[[Floats], float], start: Floats, step: float = 0.2, rounds: int = 160) -> Floats:
    """Minimise a loss by Nelder and Mead's simplex search, for losses with kinks (percentiles of a replay)."""
    points = [start, *(start + step * unit for unit in np.eye(start.size))]
    ranked = sorted(((loss(p), i, p) for i, p in enumerate(points)), key=lambda t: t[:2])
    for number in range(rounds):
        worst = ranked[-1]
        centre = np.mean([p for _, _, p in ranked[:-1]], axis=0)
        tried = [(loss(p), len(points) + number, p) for p in (centre + (centre - worst[2]),)]
        if tried[0][0] < ranked[0][0]:
            p = centre + 2.0 * (centre - worst[2])
            tried.append((loss(p), len(points) + number, p))
        elif tried[0][0] >= ranked[-2][0]:
            p = centre - 0.5 * (centre - worst[2])
            tried.append((loss(p), len(points) + number, p))
        best = min(tried, key=lambda t: t[0])
        if best[0] < worst[0]:
            ranked[-1] = best
        else:
            ranked = [(loss(q), i, q) for _, i, q in ((0.0, i, (p + ranked[0][2]) / 2) for _, i, p in ranked)]
        ranked.sort(key=lambda t: t[:2])
    return ranked[0][2]


def bisect(rising: Callable[[float], float], low: float, high: float, rounds: int = 60) -> float:
    """Root of a function that rises from below to above zero between these ends."""
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
