"""Budgets over short windows end on their floor: the last point of accuracy costs grams, and nobody asked for more."""

import pytest

from tests.support.planning import digits
from trefoil.core.objective import FLOOR_TOLERANCE
from trefoil.installation import MODELS
from trefoil.simulator import Provided, Scenario
from trefoil.simulator.run import simulate
from trefoil.simulator.scenario.schema import Arrivals, FamilyObjective, Node, Served

WINDOW_S = 600.0
STEP = ((0.0, 1.0), (210.0, 1.0), (240.0, 1.6), (420.0, 1.6), (450.0, 1.0))
RAMP = ((0.0, 0.6), (WINDOW_S, 1.4))
FLAT = ((0.0, 1.0),)


def played(gpus, rate, below_best_pct, slo_ms, shape, seed):
    """Summary of the family after one window, in which the synthetic duck curve plays 48 h."""
    points = tuple((at_s, rate * times) for at_s, times in shape)
    objective = FamilyObjective(
        type="budget",
        slo={"latency_ms": slo_ms},
        accuracy={"below_best_pct": below_best_pct, "hard_below_best_pct": 12.0},
        window_s=WINDOW_S,
    )
    arrivals = Arrivals(points=points)
    served = Served(name="digits", repository=MODELS, allow_missing=True, arrivals=arrivals, objective=objective)
    asked = Scenario(
        seed=seed,
        duration_s=WINDOW_S,
        nodes=(Node(devices=("A100-SXM4-40GB",) * gpus),),
        families=(served,),
        carbon={"speedup": 288.0, "step_h": 4.0},
        control={"move_horizon_s": 200.0},
    )
    return simulate(asked, Provided(catalog=digits())).summary.families["digits"]


@pytest.mark.parametrize(("gpus", "rate", "below_best_pct", "slo_ms", "shape"), [
    (3, 42.0, 2.0, 90.0, STEP), (3, 59.0, 2.0, 150.0, RAMP), (3, 48.0, 5.0, 90.0, STEP), (2, 38.0, 3.0, 150.0, STEP),
    (1, 16.0, 3.0, 150.0, RAMP), (3, 39.0, 3.0, 65.0, FLAT),
])  # fmt: skip
def test_a_window_ends_within_the_tolerance_of_its_floor(gpus, rate, below_best_pct, slo_ms, shape):
    found = played(gpus, rate, below_best_pct, slo_ms, shape, seed=1)
    print(f"accuracy less the floor {found.accuracy - found.floor:+.5f}, {1e3 * found.grams_per_request:.4f} mg")
    assert abs(found.accuracy - found.floor) <= FLOOR_TOLERANCE
    assert found.slo_attainment >= 0.95
