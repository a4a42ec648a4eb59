"""Lengths of a generative family's answers, one by one, and what a predictor says of them before they begin.

Model: the law of a service time is that of its answer's length (trefoil/core/queueing.py: gamma, with the profile's
    CV). A request comes with its share of that law, 0 to 1, whichever slice answers it: the share is its class of
    length, and its service time the quantile there. Its predicted class is drawn from the row of its class in the
    confusion matrix that the family's predictor was measured with. Without a matrix there are no predictions.
Used where the queue goes by lengths; everywhere else each slice draws from the same law. Where a trace is replayed
    (`ReplayedLengths`), each request has its own, whatever the queue.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.random import Generator

from trefoil.core.queueing import LENGTH_BORDERS, ServiceTime, draw_s
from trefoil.core.units import MS_PER_S
from trefoil.simulator.scenario.arrivals import ReplayedArrivals

DRAWS: Final = 8192
WAITING_MAX: Final = 65_536
SEED: Final = 3


class AnswerLengths:
    """Shares of the requests of one family that have no slice yet."""

    def __init__(self, confusion: Sequence[Sequence[float]], rng: Generator) -> None:
        self._rng, self._shares = rng, dict[int, float]()
        self._sums = [list(np.cumsum(row) / np.sum(row)) if np.sum(row) else [] for row in np.asarray(confusion, float)]
        self._laws: dict[float, list[float]] = {}  # by CV, of mean 1, ascending

    def come(self, id_: int) -> float | None:
        """Draw a request; its score."""
        if len(self._shares) >= WAITING_MAX:  # the oldest were refused
            del self._shares[next(iter(self._shares))]
        share, chance = self._rng.random(2).tolist()
        self._shares[id_] = share
        return self._score(share, chance)

    def _score(self, share: float, chance: float) -> float | None:
        """Class of length that the predictor gives a request, drawn at random; None: the family has no predictor."""
        sums = self._sums[int(np.searchsorted(LENGTH_BORDERS, share, side="right"))] if self._sums else []
        return float(np.searchsorted(sums, chance, side="right")) if sums else None

    def service_s(self, id_: int, service: ServiceTime) -> float | None:
        """Service time of a request that a slice begins; None: it came before lengths were drawn."""
        share = self._shares.pop(id_, None)
        if share is None:
            return None
        law = self._laws.get(service.cv)
        if law is None:
            unit = ServiceTime(MS_PER_S, service.cv)
            law = self._laws[service.cv] = sorted(draw_s(unit, DRAWS, np.random.default_rng(SEED)).tolist())
        return law[int(share * DRAWS)] * service.mean_ms / MS_PER_S


class ReplayedLengths(AnswerLengths):
    """Lengths of the requests of a trace that have a place in the engine or wait for one, each its own."""

    def __init__(self, confusion: Sequence[Sequence[float]], rng: Generator, source: ReplayedArrivals) -> None:
        super().__init__(confusion, rng)
        self._source, self._number, self._rows = source, -1, dict[int, int]()
        self._parts = source.steps / source.steps.mean()

    def arrive(self) -> bool:
        """Go on to the next arrival; False: it is beyond the context."""
        self._number += 1
        return not self._source.refused[self._source.row(self._number)]

    def keep(self, id_: int) -> None:
        """Keep the arrival under the number of its ticket, until it has left."""
        self._rows[id_] = self._source.row(self._number)

    def leave(self, id_: int) -> None:
        """Forget a request that is answered or refused."""
        self._rows.pop(id_, None)

    def come(self, id_: int) -> float | None:
        """Score of a request."""
        return self._score(float(self._source.share[self._rows[id_]]), self._rng.random())

    def service_s(self, id_: int, service: ServiceTime) -> float:
        """Service time of a request that a slice begins."""
        return float(self._parts[self._rows[id_]]) * service.mean_ms / MS_PER_S

    def prompt_steps(self, id_: int) -> float:
        """Steps that a request's prompt takes before the one of its first token."""
        return float(self._source.prompt_steps[self._rows[id_]])
