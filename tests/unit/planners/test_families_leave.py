"""A family that is out of service is not planned, though it runs; the others are planned as ever."""

from dataclasses import replace

import numpy as np

from controller.planners.exact.planner import ExactPlanner
from controller.planners.planning_input import read_view
from tests.support.planning import applied, fleet
from tests.support.planning import view as planning_view
from tests.unit.controller.views import DIGITS_OBJECTIVE, SHIPPED


def test_slices_of_a_family_that_is_stopped_are_not_kept():
    begun = planning_view(rate=20.0, catalog=SHIPPED, devices=fleet(2), wanted=(DIGITS_OBJECTIVE,))
    plan = ExactPlanner().plan(begun, np.random.default_rng(1)).plan
    assert plan is not None
    other = replace(DIGITS_OBJECTIVE, family="resnets", slo_ms=500.0, min_accuracy=0.0, hard_min_accuracy=0.0)
    runs = replace(begun, fleet=applied(plan, begun.fleet), current=plan)
    assert any(d.running for d in read_view(runs, 1.0).devices)
    left = replace(runs, objectives=(other,))
    assert not any(d.running for d in read_view(left, 1.0).devices)
    after = ExactPlanner().plan(left, np.random.default_rng(1)).plan
    hosted = {h.family for n in (after.nodes if after else ()) for d in n.devices for s in d.slices for h in s.hosted}
    assert "digits" not in hosted
