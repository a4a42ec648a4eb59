"""The request-level kernel on a planned mix: does every class meet the SLO at the demand's high quantile?

Every class is served on its own: the split by weight makes classes independent, and a class with a small share would
see too few of a common stream of requests to judge its percentile.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from numpy.random import default_rng

from controller.planners.columns import ClassKey, Column, gap_scv
from controller.planners.exact.model import Solution
from controller.planners.world import Task, setting
from trefoil.core.queueing import ServerClass, ServiceTime, arrivals_s, serve_weighted

TOLERANCE: Final = 0.25  # of the allowed misses: what a sample of this size can say
BACK_OFF: Final = 0.95
ROUNDS_MAX: Final = 4
SEED: Final = 20231112  # any: the kernel's sample has to be one sample
SHARE_STEP: Final = 0.01  # of a family's traffic
RATE_STEP: Final = 1.02


def failing(
    solution: Solution,
    columns: Sequence[Column],
    tasks: Sequence[Task],
    constants: Mapping[str, float],
    scale: Mapping[ClassKey, float] = MappingProxyType({}),
) -> dict[ClassKey, float]:
    """Classes that miss the SLO too often, with their attainment.

    A pool is tried at its capacity first: what it keeps there it keeps at any rate below, and the answer is known from
    the last decision with a pool of that size.
    """
    found = {}
    requests = int(constants["kernel_requests"])
    for task in tasks:
        limit_ms = task.objective.slo_ms - setting(task.objective, constants, "overhead_ms")
        allowed = (1 - task.objective.slo_quantile) * (1 + TOLERANCE)
        for column in columns:
            rate = solution.traffic.get(column.key, 0.0)
            if column.family != task.family or rate <= 0:
                continue
            number = solution.slices[column.key]
            full = column.rate_per_slice(number) * number * scale.get(column.key, 1.0)
            trial = (number, column.service, gap_scv(task), requests, limit_ms)
            if full >= rate and 1 - _attained(full, *trial) <= allowed:
                continue
            attained = _attained(rate, *trial)
            if 1 - attained > allowed:
                found[column.key] = attained
    return found


@lru_cache(maxsize=8192)
def _attained(rate: float, number: int, service: ServiceTime, scv: float, requests: int, limit_ms: float) -> float:
    """Attainment of one pool: the same draws for the same question, so that it has one answer."""
    rng = default_rng(SEED)
    return serve_weighted((ServerClass(number, service),), arrivals_s(rate, scv, requests, rng), rng).attainment(
        limit_ms
    )


def latency_ms_p95(solution: Solution, columns: Sequence[Column], task: Task, constants: Mapping[str, float]) -> float:
    """What clients will see at the mean rate, transport included. Shares and rates in steps that no sample resolves."""
    mine = [c for c in columns if c.family == task.family and solution.traffic.get(c.key, 0.0) > 0]
    if not mine:
        return 0.0
    total = sum(solution.traffic[c.key] for c in mine)
    pools = tuple(
        ServerClass(solution.slices[c.key], c.service, max(SHARE_STEP, _step(solution.traffic[c.key] / total)))
        for c in mine
    )
    rate = RATE_STEP ** round(math.log(task.mean_per_s, RATE_STEP))
    seen_ms = _seen_ms(pools, rate, gap_scv(task), int(constants["kernel_requests"]))
    return seen_ms + setting(task.objective, constants, "overhead_ms")


def _step(share: float) -> float:
    return round(share / SHARE_STEP) * SHARE_STEP


@lru_cache(maxsize=8192)
def _seen_ms(pools: tuple[ServerClass, ...], rate: float, scv: float, requests: int) -> float:
    rng = default_rng(SEED)
    return serve_weighted(pools, arrivals_s(rate, scv, requests, rng), rng).quantile_ms(0.95)
