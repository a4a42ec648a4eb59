"""Surrogate of configurations that were never measured: a scaling law fitted to those that were.

Source: ours (preset `guided`); CLOVER draws neighbours at random. A proposal only: what counts is what is measured.
Data: outcomes of known graphs, each variant's MACs and accuracy, compute slices, idle power and rate of the pod, SLO.
Formulation: a copy of variant v on a slice with c compute slices takes t = tau MACs_v^g / c^d for a request. Its active
joules are proportional to c t. In a FIFO that every free copy pulls from, a copy's share of the requests is 1 / t over
the sum of all 1 / t. The tail latency is the t of the edge at that quantile of the shares. tau, g and d: ridge
regression of log(tail) over the known graphs towards the square root of the MACs and 3/4 of the slices. Joules: least
squares in one factor. These give accuracy, joules and f (Eq. 3), utilisation and tail of any graph. The better of two
neighbours is drawn exp(df / 1 %) times as often, the scale on which Eq. 7 begins. The logistic chances that the tail
keeps the SLO and that the copies suffice for the rate multiply this.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from controller.planners.clover.graph import Edge, Graph
from controller.planners.clover.objective import Goal, Outcome, weighted
from controller.planners.clover.space import Space
from trefoil.core.device_types import slice_type
from trefoil.core.units import MS_PER_S

Floats = npt.NDArray[np.float64]
PRIOR: Final = np.array([0.0, 0.5, 0.75])  # of log(tau), g, d
PRIOR_WEIGHT: Final = np.array([0.0, 1.0, 1.0])  # in observations
FITS: Final = 3  # which edge makes the tail depends on the law, and the law on that
SCALE_PCT: Final = 1.0
TAIL_SPREAD: Final = 0.15  # relative error of the law
BUSY_MAX: Final = 0.9
BUSY_SPREAD: Final = 0.05


@dataclass(frozen=True)
class Surrogate:
    """Surrogate of the objective: weights for neighbours; of no opinion while nothing was measured. `idle_w`: whole
    pod.
    """

    space: Space
    goal: Goal
    idle_w: float
    rate_per_s: float
    known: Mapping[Graph, Outcome]

    def __call__(self, graphs: Sequence[Graph]) -> Floats:
        """A factor in (0, 1] for each."""
        told = [(self.space.whole(graph), outcome) for graph, outcome in self.known.items() if not outcome.failed]
        if not told or not graphs:
            return np.ones(len(graphs))
        whole = [self.space.whole(graph) for graph in graphs]
        edges = sorted({edge for g in [*whole, *(g for g, _ in told)] for edge, _ in g.weights})
        macs, accuracies, compute = self._table(edges)
        seen = _rows([g for g, _ in told], edges)
        law = self._fitted(seen, np.array([self.goal.tail_ms(outcome) for _, outcome in told]), macs, compute)
        time_ms = np.exp(law[0] + law[1] * np.log(macs) - law[2] * np.log(compute))
        idle_j = self.idle_w / self.rate_per_s
        work = _shares(seen, time_ms) @ (compute * time_ms)
        active_j = np.array([outcome.joules or 0.0 for _, outcome in told]) - idle_j
        unit_j = max(0.0, float(work @ active_j) / float(work @ work))
        rows = _rows(whole, edges)
        shares = _shares(rows, time_ms)
        value = self._values(shares @ accuracies, idle_j + unit_j * (shares @ (compute * time_ms)))
        busy = self.rate_per_s / (rows @ (MS_PER_S / time_ms))
        tail_ms = time_ms[_tail_edges(shares, time_ms, self.goal.quantile)]
        chance = np.exp((value - value.max()) / SCALE_PCT)
        chance *= _chance(np.log(self.goal.slo_ms / tail_ms) / TAIL_SPREAD) * _chance((BUSY_MAX - busy) / BUSY_SPREAD)
        return np.asarray(np.maximum(chance, np.finfo(float).tiny))

    def _fitted(self, seen: Floats, tails_ms: Floats, macs: Floats, compute: Floats) -> Floats:
        """(log tau, g, d)."""
        law = PRIOR
        for _ in range(FITS):
            time = np.exp(law[1] * np.log(macs) - law[2] * np.log(compute))
            edge = _tail_edges(_shares(seen, time), time, self.goal.quantile)
            x = np.stack([np.ones(len(edge)), np.log(macs[edge]), -np.log(compute[edge])], axis=1)
            left = x.T @ x + np.diag(PRIOR_WEIGHT)
            law = np.linalg.solve(left, x.T @ np.log(tails_ms) + PRIOR_WEIGHT * PRIOR)
        return law

    def _values(self, accuracy: Floats, joules: Floats) -> Floats:
        pairs = zip(joules.tolist(), accuracy.tolist(), strict=True)
        return np.array([weighted(self.goal.weight, *self.goal.deltas(j, a)) for j, a in pairs])

    def _table(self, edges: Sequence[Edge]) -> tuple[Floats, Floats, Floats]:
        """(MACs relative to the largest, accuracy, compute slices) by edge; variants without MACs count as alike."""
        variants = {v.name: v for v in self.space.variants}
        kinds = {kind.name: kind for kind, _ in self.space.kinds}
        most = max(v.macs for v in variants.values())
        macs = [variants[v].macs / most if variants[v].macs > 0 else 1.0 for v, _, _ in edges]
        compute = [max(1, slice_type(kinds[k], s).compute_slices) for _, k, s in edges]
        return np.array(macs), np.array([variants[v].accuracy for v, _, _ in edges]), np.array(compute, dtype=float)


def _rows(graphs: Sequence[Graph], edges: Sequence[Edge]) -> Floats:
    column = {edge: i for i, edge in enumerate(edges)}
    rows = np.zeros((len(graphs), len(edges)))
    for row, graph in enumerate(graphs):
        for edge, n in graph.weights:
            rows[row, column[edge]] = n
    return rows


def _shares(rows: Floats, time: Floats) -> Floats:
    """Requests by edge, for each graph: in proportion to the speed of its copies."""
    speed = rows / time
    return np.asarray(speed / speed.sum(axis=1, keepdims=True))


def _tail_edges(shares: Floats, time: Floats, quantile: float) -> npt.NDArray[np.int64]:
    """For each graph the edge at that quantile of the requests, fastest first."""
    order = np.argsort(time, kind="stable")
    reached = shares[:, order].cumsum(axis=1) >= quantile - 1e-9
    return np.asarray(order[reached.argmax(axis=1)])


def _chance(x: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(x, -50.0, 50.0))))
