"""Estimate of a configuration by its profile: one FIFO that every free slice pulls from, request by request.

Source: CLOVER section 4.3 (a consumer hands the head of the queue to a free instance). So the mix of variants follows
speed and load; `trefoil.core.queueing.serve_fifo` is the same rule for one mix.
Data: service time, active joules and accuracy of every class (variant on slice type of device type), rate, SCV of gaps.
Result: `Outcome`: joules per request with the idle power of every device of the pod, accuracy of the variants that
answered, tail latency. Configurations are compared on the same arrivals and the same service times (common random
numbers). So an estimate is a pure function of profile and load.
Deviations: a standardised pod of more than `DEVICES_MAX` devices is served at that size and at its share of the rate.
The gain of larger pools in waiting is left out, so that latency errs on the safe side.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from controller.planners.clover.graph import Edge
from controller.planners.clover.objective import Outcome
from controller.planners.clover.settings import CloverSettings
from controller.planners.clover.space import Setup, Space, fitting_variants
from controller.planners.columns import class_column, gap_scv
from controller.planners.planning_input import Task
from trefoil.core.catalog import Catalog
from trefoil.core.errors import ProfileMissing
from trefoil.core.queueing import ServiceTime, serve_fifo
from trefoil.core.units import MS_PER_S

DEVICES_MAX: Final = 10
CHUNK: Final = 256  # mixes served together: their state stays in the cache of one core
WARM_UP: Final = 0.1
SEED: Final = 20_231_112  # of the common random numbers: SC 23's first day

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ClassPoint:
    """Operating point of a class: its service time with the way to it, active joules per request, accuracy."""

    service: ServiceTime
    energy_j: float
    accuracy: float


@dataclass(frozen=True)
class ProfileEstimator:
    """Estimator of outcomes by profile, for one family on one pod. `points` by edge."""

    space: Space
    points: Mapping[Edge, ClassPoint]
    rate_per_s: float
    mean_per_s: float
    scv: float
    overhead_ms: float
    requests: int

    def __call__(self, setup: Setup) -> Outcome:
        """The outcome of one setup."""
        return self.many([setup])[0]

    def many(self, setups: Sequence[Setup]) -> list[Outcome]:
        """Outcomes of many setups on the same requests."""
        shrink = max(1.0, self.space.devices / DEVICES_MAX) if self.space.standardised else 1.0
        names = sorted({edge for setup in setups for edge, _ in setup.graph.weights})
        mixes = []
        for setup in setups:
            whole = self.space.deployed(setup).graph.counter
            mixes.append(tuple(max(1, round(whole[e] / shrink)) if whole[e] else 0 for e in names))
        rate = self.rate_per_s / shrink
        drawn = np.array([_service_s(_salt(e), self.points[e].service, self.requests) for e in names])
        at_s = _gaps(self.scv, self.requests).cumsum() / rate
        found: list[Outcome] = []
        for start in range(0, len(setups), CHUNK):
            part = mixes[start : start + CHUNK]
            latency_s, chosen = _serve_one(part[0], drawn, at_s) if len(part) == 1 else _serve_many(part, drawn, at_s)
            skip = int(self.requests * WARM_UP)
            tails = np.quantile(latency_s[:, skip:], (0.95, 0.99), axis=1) * MS_PER_S + self.overhead_ms
            for row, setup in enumerate(setups[start : start + CHUNK]):
                shares = np.bincount(chosen[row, skip:], minlength=len(names)) / (self.requests - skip)
                found.append(self._outcome(setup, names, shares, float(tails[0, row]), float(tails[1, row])))
        return found

    def _outcome(self, setup: Setup, names: Sequence[Edge], shares: Floats, p95_ms: float, p99_ms: float) -> Outcome:
        points = [self.points[e] for e in names]
        whole = self.space.deployed(setup).graph.counter
        full = sum(whole[e] / p.service.mean_ms * MS_PER_S for e, p in zip(names, points, strict=True))
        idle_w = sum(kind.idle_w * n for kind, n in self.space.kinds)
        joules = idle_w / min(self.mean_per_s, full) + sum(
            float(share) * p.energy_j for share, p in zip(shares, points, strict=True)
        )
        accuracy = sum(float(share) * p.accuracy for share, p in zip(shares, points, strict=True))
        return Outcome(joules, accuracy, p95_ms, p99_ms, 1.0, self.rate_per_s)


def profile_estimator(catalog: Catalog, task: Task, space: Space, settings: CloverSettings) -> ProfileEstimator:
    """Estimator of outcomes by profile, for one family on one pod.

    Raises:
        ProfileMissing: naming the class that has memory enough and no profile.
    """
    points = {}
    for kind, _ in space.kinds:
        for shape, names in fitting_variants(kind, space.variants).items():
            for name in names:
                column = class_column(catalog, task, kind, shape, name, 1, settings)
                if column is None:
                    raise ProfileMissing(
                        f"no profile of {name} on {shape} of {kind.name}",
                        field=f"family {task.family}",
                        remedy="profile this class, or let the policy measure on the system (measure_on = 'system')",
                    )
                points[(name, kind.name, shape)] = ClassPoint(column.alone, column.alone_j, column.accuracy)
    return ProfileEstimator(
        space,
        points,
        task.demand.rate_per_s,
        task.mean_per_s,
        gap_scv(task),
        settings.of(task.objective).overhead_ms,
        settings.kernel_requests,
    )


def _salt(edge: Edge) -> int:
    return zlib.crc32("/".join(edge).encode())


@lru_cache(maxsize=16)
def _gaps(scv: float, requests: int) -> Floats:
    """Gaps of a renewal process of mean 1."""
    rng = np.random.default_rng(SEED)
    return np.ones(requests) if scv < 1e-9 else rng.gamma(1 / scv, scv, requests)


@lru_cache(maxsize=512)
def _service_s(salt: int, service: ServiceTime, requests: int) -> Floats:
    mean_s, scv = service.mean_ms / MS_PER_S, service.cv**2
    if service.cv < 1e-6:
        return np.full(requests, mean_s)
    return np.random.default_rng([SEED, salt]).gamma(1 / scv, scv * mean_s, requests)


def _serve_one(mix: Sequence[int], drawn: Floats, at_s: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """One mix, by the kernel."""
    ends_s, chosen = serve_fifo(mix, at_s.tolist(), [row.tolist() for row in drawn])
    return (ends_s - at_s)[None], chosen[None]


def _serve_many(mixes: Sequence[Sequence[int]], drawn: Floats, at_s: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """The same rule for many mixes side by side."""
    servers = max(sum(mix) for mix in mixes)
    free = np.full((len(mixes), servers), np.inf)
    kind = np.zeros((len(mixes), servers), dtype=np.int64)
    for row, mix in enumerate(mixes):
        free[row, : sum(mix)] = 0.0
        kind[row, : sum(mix)] = np.repeat(np.arange(len(mix)), mix)
    rows = np.arange(len(mixes))
    latency = np.empty((at_s.size, len(mixes)))
    chosen = np.empty((at_s.size, len(mixes)), dtype=np.int64)
    columns = np.ascontiguousarray(drawn.T)
    for n, at in enumerate(at_s.tolist()):
        server = free.argmin(axis=1)
        index = kind[rows, server]
        done = np.maximum(free[rows, server], at) + columns[n][index]
        free[rows, server] = done
        latency[n] = done - at
        chosen[n] = index
    return latency.T, chosen.T
