"""Routers of one's own, with the live controller in simulated time."""

import pytest

from tests.simulation.test_shell import REPOSITORY, scenario
from tests.support.own_group import Together
from trefoil.core.errors import SettingError
from trefoil.simulator import simulate
from trefoil.simulator.scenario.schema import Arrivals, FamilyObjective, Served

SHORT = {"duration_s": 90.0, "warmup_s": 30.0}


@pytest.mark.parametrize("router", ["least_loaded", "tests.support.own_router:LongestIdle"])
def test_any_router_serves_a_simulated_fleet(router):
    found = simulate(scenario(**SHORT, router=router))
    served = found.summary.families["digits"]
    assert served.answered > 3000
    assert served.slo_attainment > 0.9


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"router": "nosuch"}, "no such router"),
        ({"router": "least_loaded", "fidelity": "fluid"}, "least_loaded.: a flow has no requests"),
    ],
)
def test_a_router_that_cannot_be_used_is_refused(changes, says):
    with pytest.raises(SettingError, match=says):
        scenario(**changes)


def test_one_router_serves_a_simulated_group_of_families():
    wanted = FamilyObjective(accuracy={"below_best_pct": 5.0, "hard_below_best_pct": 20.0})
    families = tuple(
        Served(name=name, repository=REPOSITORY, arrivals=Arrivals(rate_per_s=10.0), objective=wanted)
        for name in ("digits", "efficientnet")
    )
    Together.made = 0
    router = "tests.support.own_group:Together"
    found = simulate(scenario(duration_s=60.0, warmup_s=20.0, families=families, policy="base", router=router))
    assert Together.made == 1
    assert all(one.answered > 500 and one.slo_attainment > 0.9 for one in found.summary.families.values())
