"""What CLOVER expects of graphs that it has not measured: proposals that find the good ones in few measurements."""

from dataclasses import replace

import numpy as np
import pytest

from controller.planners.clover.graph import Graph
from controller.planners.clover.objective import Goal, Outcome
from controller.planners.clover.planner import outcome_from
from controller.planners.clover.space import Space, unit_setups
from controller.planners.clover.surrogate import Surrogate
from tests.support.planning import digits
from trefoil.core.catalog import Variant
from trefoil.core.demand import Measured
from trefoil.core.device_types import A100_40GB

MACS = (10**8, 10**9, 5 * 10**9, 4 * 10**10)
VARIANTS = tuple(replace(v, macs=n) for v, n in zip(digits().families[0].by_accuracy(), MACS, strict=True))
SPACE = Space(((A100_40GB, 2),), VARIANTS)
COMPUTE = {s.name: s.compute_slices for s in A100_40GB.slice_types}
IDLE_W, RATE_PER_S = 100.0, 20.0
GOAL = Goal(0.1, 200.0, 60.0, 250.0, VARIANTS[-1].accuracy, 300.0, 0.95)


def truth(graph: Graph) -> Outcome:
    """A world that obeys another law than the prior: time MACs^0.4 / slices^0.6; the largest on seven takes 150 ms."""
    edges = SPACE.whole(graph).weights
    largest = max(v.macs for v in VARIANTS)
    by_name: dict[str, Variant] = {v.name: v for v in VARIANTS}
    ms = np.array([150.0 * (by_name[v].macs / largest) ** 0.4 * (7 / COMPUTE[s]) ** 0.6 for (v, _, s), _ in edges])
    speed = np.array([n for _, n in edges]) / ms
    share = speed / speed.sum()
    order = np.argsort(ms)
    tail_ms = float(ms[order][share[order].cumsum().searchsorted(0.95 - 1e-9)])
    if RATE_PER_S / (speed.sum() * 1e3) > 0.95:
        return Outcome(None, 0.0, float("inf"), float("inf"), 0.0, RATE_PER_S)
    joules = IDLE_W / RATE_PER_S + float(share @ (0.3 * ms * [COMPUTE[s] for (_, _, s), _ in edges]))
    accuracy = float(share @ [by_name[v].accuracy for (v, _, _), _ in edges])
    return Outcome(joules, accuracy, tail_ms, tail_ms, 1.0, RATE_PER_S)


def test_nothing_measured_no_opinion():
    graphs = [unit.graph for unit in SPACE.units(A100_40GB)[:5]]
    assert list(Surrogate(SPACE, GOAL, IDLE_W, RATE_PER_S, {})(graphs)) == [1.0] * 5
    failed = {graphs[0]: Outcome(None, 0.0, float("inf"), float("inf"), 0.0, RATE_PER_S)}
    assert list(Surrogate(SPACE, GOAL, IDLE_W, RATE_PER_S, failed)(graphs)) == [1.0] * 5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_few_measurements_tell_which_neighbours_are_good(seed):
    rng = np.random.default_rng(seed)
    some = [unit_setups(A100_40GB, VARIANTS)[int(i)].graph for i in rng.integers(0, 1282, 8)]
    surrogate = Surrogate(SPACE, GOAL, IDLE_W, RATE_PER_S, {graph: truth(graph) for graph in some})
    near = SPACE.neighbourhood(unit_setups(A100_40GB, VARIANTS)[int(rng.integers(0, 1282))])
    chance = surrogate([s.graph for s in near])
    assert ((chance > 0) & (chance <= 1)).all()
    worth = np.array([GOAL.value(o) if GOAL.feasible(o := truth(s.graph)) else -100.0 for s in near])
    drawn = worth[rng.choice(len(near), 500, p=chance / chance.sum())]
    alike = worth[rng.integers(0, len(near), 500)]
    assert drawn.mean() > alike.mean() + 5  # percent of f, those that break the SLO counted as -100


def test_variants_without_macs_are_told_apart_by_nothing_but_slices():
    space = Space(((A100_40GB, 1),), tuple(replace(v, macs=0) for v in VARIANTS))
    graphs = [unit.graph for unit in space.units(A100_40GB)[:50]]
    chance = Surrogate(space, GOAL, IDLE_W, RATE_PER_S, {graphs[0]: Outcome(50.0, 0.9, 200.0, 250.0, 1.0, 20.0)})(
        graphs
    )
    assert ((chance > 0) & (chance <= 1)).all()


def test_joules_are_told_at_the_load_of_the_round():
    measured = Measured("digits", 90.0, 120.0, 0.97, 0.9, None, rate_per_s=18.0, window_s=10.0, joules_per_request=12.0)
    assert outcome_from(measured, 20.0, 0.0, idle_w=90.0).joules == pytest.approx(12.0 + 90 / 20 - 90 / 18)
    assert outcome_from(measured, 20.0, 0.0).joules == 12.0
    assert outcome_from(replace(measured, joules_per_request=None), 20.0, 0.0, 90.0).joules is None
