"""What the default planner does and says where a family, a less accurate plan or room is missing."""

import numpy as np
import pytest

from controller.planners.exact import ExactPlanner
from tests.support.planning import ACCURACY, digits, objective, view
from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.demand import Demand
from trefoil.core.objective import ObjectiveMode

INSTANT = ObjectiveMode.INSTANT
LAST_POINT = "the last point of accuracy costs"


def decide(one):
    return ExactPlanner().plan(one, np.random.default_rng(0))


@pytest.mark.parametrize("mode", [ObjectiveMode.BUDGET, INSTANT, ObjectiveMode.LAMBDA])
def test_a_family_without_a_profile_leaves_the_others_their_plan(mode):
    known = digits()
    variant = Variant("only", 1, 0.9, "made up", 32, 2.0, 10, "CC0-1.0")
    catalog = Catalog((*known.families, Family("letters", "top1", (variant,), {"": (80.0, 0.95)})), known.rows)
    wanted = [objective(mode=mode, lambda_weight=0.5), objective(family="letters", mode=mode, min_accuracy=0.9)]
    demand = [Demand("digits", "", 20.0, 24.0), Demand("letters", "", 30.0, 36.0)]
    found = decide(view(catalog=catalog, wanted=wanted, demand=demand))
    assert found.degraded.startswith("no_profile: nothing in the fleet has a profile of letters")
    assert {route.family for route in found.plan.routes if route.targets} == {"digits"}
    assert found.plan.why.count(LAST_POINT) <= 1


def test_the_least_accurate_plan_says_nothing_of_a_point_below_it():
    """Nothing is less accurate, so that the last point is none that could be given up."""
    least, more = (
        decide(view(rate=20.0, wanted=[objective(mode=INSTANT, min_accuracy=floor, slo_ms=75.0)])).plan
        for floor in (0.5, 0.97)
    )
    assert least.expected["digits"].accuracy == pytest.approx(min(ACCURACY.values()))
    assert LAST_POINT not in least.why
    assert f"{LAST_POINT} some" in more.why


def test_no_accuracy_is_given_away_at_a_demand_whose_rounding_is_too_much():
    """At 500/s both GPUs are nearly full: the demand rounded up has no plan, the demand itself has."""
    whole_ms = (20.0, 13.0, 11.0, 10.0, 9.0)
    catalog = digits({"small": tuple(0.998 * ms for ms in whole_ms), "big": whole_ms}, {"small": 0.59, "big": 0.831})
    wanted = [objective(mode=INSTANT, slo_ms=75.0, min_accuracy=0.5)]
    found = decide(view(rate=500.0, catalog=catalog, wanted=wanted))
    assert found.degraded == ""
    assert found.plan.expected["digits"].accuracy > 0.8
