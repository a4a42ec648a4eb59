"""The request-level kernel on a planned mix: does every class meet the SLO at the demand's high quantile?

Every class is served on its own: the split by weight makes classes independent, and a class with a small share would
see too few of a common stream of requests to judge its percentile.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from numpy.random import Generator

from controller.planners.columns import ClassKey, Column, gap_scv
from controller.planners.exact.model import Solution
from controller.planners.world import Task, setting
from trefoil.core.queueing import ServerClass, arrivals_s, serve_weighted

TOLERANCE: Final = 0.25  # of the allowed misses: what a sample of this size can say
BACK_OFF: Final = 0.95
ROUNDS_MAX: Final = 4


def failing(
    solution: Solution,
    columns: Sequence[Column],
    tasks: Sequence[Task],
    constants: Mapping[str, float],
    rng: Generator,
) -> dict[ClassKey, float]:
    """Classes that miss the SLO too often, with their attainment."""
    found = {}
    requests = int(constants["kernel_requests"])
    for task in tasks:
        limit_ms = task.objective.slo_ms - setting(task.objective, constants, "overhead_ms")
        allowed = (1 - task.objective.slo_quantile) * (1 + TOLERANCE)
        for column in columns:
            rate = solution.traffic.get(column.key, 0.0)
            if column.family != task.family or rate <= 0:
                continue
            at = arrivals_s(rate, gap_scv(task), requests, rng)
            pool = ServerClass(solution.slices[column.key], column.service)
            attained = serve_weighted((pool,), at, rng).attainment(limit_ms)
            if 1 - attained > allowed:
                found[column.key] = attained
    return found


def latency_ms_p95(
    solution: Solution, columns: Sequence[Column], task: Task, constants: Mapping[str, float], rng: Generator
) -> float:
    """What clients will see at the mean rate, transport included."""
    mine = [c for c in columns if c.family == task.family and solution.traffic.get(c.key, 0.0) > 0]
    if not mine:
        return 0.0
    pools = [ServerClass(solution.slices[c.key], c.service, solution.traffic[c.key]) for c in mine]
    at = arrivals_s(task.mean_per_s, gap_scv(task), int(constants["kernel_requests"]), rng)
    return serve_weighted(pools, at, rng).quantile_ms(0.95) + setting(task.objective, constants, "overhead_ms")
