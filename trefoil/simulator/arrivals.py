"""When the requests of a scenario's families come: the streams of simulator/workload by the scenario's words."""

from typing import Protocol

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from trefoil.simulator.scenario import Arrivals
from trefoil.simulator.workload import Given, Rate, Stream, counts_as_rate, read_counts

__all__ = ["Given", "Rate", "Source", "Stream", "stream"]

Floats = npt.NDArray[np.float64]


class Source(Protocol):
    """Arrivals of one family, taken in order."""

    def rate_per_s(self, at_s: float) -> float: ...
    def mean_per_s(self, from_s: float, until_s: float) -> float: ...
    def until(self, until_s: float) -> Floats: ...  # all arrivals since the last call, ascending


def stream(settings: Arrivals, rng: Generator, now_s: float) -> Stream:
    """The stream of a scenario's family.

    Raises:
        TraceError: names file, row, value and remedy.
    """
    if settings.trace is not None:
        counts, bin_s = read_counts(settings.trace, settings.column, settings.bin_s)
        return Stream(counts_as_rate(counts, bin_s, settings.rate_per_s), settings.gap_scv, rng, now_s)
    points = settings.points or ((0.0, settings.rate_per_s),)
    times, rates = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    return Stream(Rate(times, rates), settings.gap_scv, rng, now_s)
