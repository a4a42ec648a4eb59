"""BASE, CO2OPT: fixed plans, honest expectations. STATIC_MIX: `exact` that cannot see carbon."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from controller.loop.core.decision import run_planner
from controller.planners.base import BasePlanner, MigSettings, base_reference
from controller.planners.co2opt import Co2OptPlanner
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import read_view
from controller.planners.policy_parts import planner_of, with_policy_parts
from controller.planners.static_mix import StaticMixPlanner
from tests.support.cpus import cpu_view
from tests.support.planning import DUCK, digits, fleet, objective, view, with_low_end
from trefoil.core.errors import CatalogError, InvalidInput, SettingError
from trefoil.core.fleet import DeviceState
from trefoil.core.plan_check import check
from trefoil.core.policies import POLICIES


def decide(planner, one, seed=0):
    decision = planner.plan(one, np.random.default_rng(seed))
    if decision.plan is not None:
        check(decision.plan, one.fleet, one.catalog, one.demand)
    return decision


def hosted(plan):
    return sorted(
        (s.key.device, s.key.slice_type, s.hosted[0].variant) for n in plan.nodes for d in n.devices for s in d.slices
    )


def test_base_is_the_best_variant_on_one_7g_slice_of_every_gpu():
    plan = decide(BasePlanner(), view(devices=fleet(3))).plan
    assert hosted(plan) == [(f"node0/gpu{i}", "7g.40gb", "l") for i in range(3)]
    assert all(d.target == DeviceState.AWAKE for n in plan.nodes for d in n.devices)
    assert [round(t.weight, 6) for t in plan.routes[0].targets] == [0.333333] * 3
    assert plan.expected["digits"].accuracy == pytest.approx(0.993)
    assert plan.expected["digits"].joules_per_request == pytest.approx(3 * 55 / 26 + 6.25, rel=0.01)


def test_base_says_when_it_misses_the_slo_and_serves_all_the_same():
    decision = decide(BasePlanner(), view(rate=60.0, wanted=[objective(slo_ms=50.0)]))
    assert decision.plan is not None
    assert "slo_missed" in decision.degraded
    assert "60.0/s" in decision.degraded
    assert "50 ms" in decision.degraded


def test_co2opt_is_the_leanest_variant_on_seven_slices():
    plan = decide(Co2OptPlanner(), view()).plan
    assert len(hosted(plan)) == 14
    assert {(shape, variant) for _, shape, variant in hosted(plan)} == {("1g.5gb", "xs")}


def test_co2opt_goes_by_joules_not_by_size():
    slow_but_small = {"xs": (60.0,) * 5, "l": (30.0,) * 5}
    plan = decide(Co2OptPlanner(), view(catalog=digits(slow_but_small, {"xs": 0.9, "l": 0.99}))).plan
    assert {variant for _, _, variant in hosted(plan)} == {"l"}


@pytest.mark.parametrize("planner", [BasePlanner(), Co2OptPlanner(), StaticMixPlanner()])
def test_baselines_never_follow_carbon(planner):
    digests = {decide(planner, view(ci, history=DUCK)).plan.content_digest for ci in (20.0, 250.0, 700.0)}
    assert len(digests) == 1


@dataclass(frozen=True)
class Silent:
    """A separate planner that forgets to return."""

    def plan(self, view, rng):
        """Answer nothing."""


def test_a_planner_of_ones_own_that_returns_nothing_is_named_with_the_remedy():
    row = replace(POLICIES["base"], planner="mine:Silent")
    decision = run_planner(view(), with_policy_parts(Silent(), row), 0)
    assert decision.plan is None
    assert "planner mine:Silent: returned nothing. Remedy: return a Decision" in decision.degraded


def test_static_mix_holds_the_mean_accuracy_at_every_instant_and_follows_load():
    awake = []
    for rate in (4.0, 26.0, 40.0):
        plan = decide(StaticMixPlanner(), view(rate=rate, devices=fleet(4), wanted=[objective(slo_ms=75.0)])).plan
        assert plan.expected["digits"].accuracy >= 0.973 - 1e-6
        assert plan.planner == "static_mix"
        awake.append(sum(d.target == DeviceState.AWAKE for n in plan.nodes for d in n.devices))
    assert awake == sorted(awake)
    assert awake[0] < awake[-1]


def test_static_miad_has_the_levers_of_exact_miad_and_no_carbon():
    one = view(rate=20.0, history=DUCK, wanted=[objective(slo_ms=150.0)])
    blind, aware, mix = (
        decide(planner_of("", POLICIES[n]), one).plan for n in ("static_miad", "exact_miad", "static_mix")
    )
    assert {d.governor for n in blind.nodes for d in n.devices} == {"miad"}
    assert POLICIES["static_miad"].settings == POLICIES["exact_miad"].settings
    lowest = [[d.clock_min_mhz for n in plan.nodes for d in n.devices] for plan in (blind, aware, mix)]
    assert all(any(clocks) for clocks in lowest[:2])
    assert not any(lowest[2])
    other = decide(planner_of("", POLICIES["static_miad"]), view(700.0, rate=20.0, history=DUCK, wanted=one.objectives))
    assert other.plan.content_digest == blind.content_digest


def test_reference_is_base_at_the_same_demand():
    one = view(rate=20.0)
    world = read_view(one, 1.0)
    reference = base_reference(world, world.tasks[0], ExactSettings())
    planned = decide(BasePlanner(), one).plan.expected["digits"]
    assert reference.joules_per_request == pytest.approx(planned.joules_per_request)
    assert reference.accuracy == planned.accuracy


def test_no_demand_yet_is_planned_for_the_stated_least_rate():
    plan = decide(BasePlanner(), view(demand=[])).plan
    assert plan.expected["digits"].joules_per_request == pytest.approx(110 + 6.25, rel=0.01)


def test_a_class_without_a_profile_is_named():
    catalog = digits()
    rows = tuple(r for r in catalog.rows if r.slice_type != "7g.40gb")
    with pytest.raises(CatalogError, match=r"no profile of l on 7g\.40gb"):
        decide(BasePlanner(), view(catalog=type(catalog)(catalog.families, rows)))


def test_an_objective_without_slo_takes_the_family_default_or_is_refused():
    assert decide(BasePlanner(), view(wanted=[objective(slo_ms=0.0, slo_quantile=0.0)])).plan is not None
    catalog = digits()
    bare = type(catalog)(tuple(type(f)(f.name, f.metric, f.variants) for f in catalog.families), catalog.rows)
    with pytest.raises(InvalidInput, match="slo"):
        decide(BasePlanner(), view(catalog=bare, wanted=[objective(slo_ms=0.0)]))


def test_every_policy_has_its_planner_and_unknown_names_are_refused():
    for row in POLICIES.values():
        seen = cpu_view() if row.name in ("vpa_plus", "fixed_size") else with_low_end(view(history=DUCK))
        seen = view(history=DUCK) if row.planner in ("alpaserve", "muserve") else seen  # they place on one type
        plan = decide(planner_of("", row), seen).plan
        assert {(r.router, r.queue) for r in plan.routes} == {(row.router, row.queue)}
        assert {d.governor for n in plan.nodes for d in n.devices} == {row.governor}
        assert all(node.digest == node.content_digest for node in plan.nodes)
    with pytest.raises(SettingError, match=r"planner = 'best': .*static_mix.*, or module:Class"):
        planner_of("best", POLICIES["exact"])


def test_base_and_co2opt_on_another_configuration_of_fig_1():
    """Section 5.2.1: BASE on the second configuration, a 4g and a 3g slice."""
    plan = decide(BasePlanner(MigSettings(configuration=2)), view()).plan
    assert {(shape, variant) for _, shape, variant in hosted(plan)} == {("4g.20gb", "l"), ("3g.20gb", "l")}
    finest = decide(Co2OptPlanner(), view()).plan
    assert hosted(decide(Co2OptPlanner(MigSettings(configuration=19)), view()).plan) == hosted(finest)
    with pytest.raises(SettingError, match="configuration = 20: Input should be less than or equal to 19"):
        MigSettings.made_of({"configuration": 20})
