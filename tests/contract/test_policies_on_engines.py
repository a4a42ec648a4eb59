"""Every policy of the table on GPUs whose engines already run: it plans, or its decision says in one line why not."""

from dataclasses import replace

import numpy as np
import pytest

from controller.planners.policy_parts import planner_of, with_preset
from tests.unit.test_engine_api import engine_view
from trefoil.core.brains import Candidate, Decision, Measurement, PlanView
from trefoil.core.demand import Measured
from trefoil.core.device_types import engine_of
from trefoil.core.parts import as_live_planner
from trefoil.core.plan_check import check
from trefoil.core.policies import POLICIES
from trefoil.simulator.run import simulate
from trefoil.simulator.scenario.inputs import Provided
from trefoil.simulator.scenario.schema import Arrivals, FamilyObjective, Node, Scenario, Served

ITS_OWN = "serves small of chat alone, and this policy puts large there. Remedy: use a policy that leaves engines"
NO_HIGH_END = "high-end GPUs = 0: 1 jobs need 1 high-end GPUs"
NO_CPUS = "fleet: no CPUs to cut"
REFUSALS = {
    **dict.fromkeys(("wattwiser", "sharing_aware", "packed_uniform", "uniform", "lowenergy"), ITS_OWN),
    **dict.fromkeys(("carbondis", "dybatch", "random", "least_grams", "highperf"), NO_HIGH_END),
    **dict.fromkeys(("vpa_plus", "fixed_size"), NO_CPUS),
}


def engines(*variants: str) -> PlanView:
    """View of L4s with an engine each, for one family."""
    one = engine_view()
    [node] = one.fleet.nodes
    types = {"small": node.devices[0].type, "large": node.devices[1].type}
    devices = tuple(replace(node.devices[0], device=f"node0/gpu{n}", type=types[v]) for n, v in enumerate(variants))
    fleet = replace(one.fleet, nodes=(replace(node, devices=devices),))
    return replace(one, fleet=fleet, objectives=one.objectives[:1], demand=one.demand[:1])


def planned(found: Decision, one: PlanView) -> dict[str, str]:
    """Variant on each device of a legal plan."""
    assert found.plan is not None, found.why
    check(found.plan, one.fleet, one.catalog, one.demand)
    slices = [part for node in found.plan.nodes for device in node.devices for part in device.slices]
    for part in slices:
        kind = next(d.type for d in one.fleet.nodes[0].devices if d.device == part.key.device)
        assert engine_of(kind) == ("chat", part.hosted[0].variant)
    return {part.key.device.partition("/")[2]: part.hosted[0].variant for part in slices}


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_plans_or_says_why_not(name):
    one = engines("small", "large")
    found = planner_of("", POLICIES[name]).plan(one, np.random.default_rng(5))
    if name not in REFUSALS:
        assert planned(found, one)
        return
    assert found.plan is None
    assert REFUSALS[name] in found.why
    assert found.degraded.startswith("no_plan: ")
    assert "\n" not in found.why
    assert "Remedy: " in found.why


@pytest.mark.parametrize("name", [name for name, why in REFUSALS.items() if why == ITS_OWN])
def test_who_puts_the_best_variant_everywhere_plans_engines_that_have_it(name):
    one = engines("large", "large")
    assert planned(planner_of("", POLICIES[name]).plan(one, np.random.default_rng(5)), one)


@pytest.mark.parametrize("preset", ["", "literal", "artifact", "guided"])
@pytest.mark.parametrize("name", ["clover", "blover", "oracle"])
def test_clover_keeps_every_engine_awake_with_its_variant(name, preset):
    one = engines("small", "large", "small")
    found = planner_of("", with_preset(POLICIES[name], preset)).plan(one, np.random.default_rng(5))
    assert planned(found, one) == {"gpu0": "small", "gpu1": "large", "gpu2": "small"}


def test_clover_measures_engines_once_and_is_done():
    one = replace(engines("small", "large"), trigger="start")
    live = as_live_planner(planner_of("", replace(POLICIES["clover"], settings={"planner": {"measure_on": "system"}})))
    step = live.ask(one, np.random.default_rng(1))
    assert isinstance(step, Candidate)
    check(step.plan, one.fleet, one.catalog, (), one.objectives)
    row = Measured("chat", 400.0, 600.0, 0.99, 0.63, 1e-4, 5.0, 10.0, 20.0)
    live.tell(step, Measurement((row,), 10.0, 100.0, 0))
    assert planned(live.ask(one, np.random.default_rng(1)), one) == {"gpu0": "small", "gpu1": "large"}


def test_clover_deals_the_other_gpus_to_families_without_engines():
    one = engine_view()
    found = planner_of("", POLICIES["clover"]).plan(one, np.random.default_rng(5))
    check(found.plan, one.fleet, one.catalog, one.demand)
    families = {p.key.device: {h.family for h in p.hosted} for d in found.plan.nodes[0].devices for p in d.slices}
    assert families == {"node0/gpu0": {"chat"}, "node0/gpu1": {"chat"}, "node0/gpu2": {"digits"}}


def test_a_simulation_says_why_no_request_was_answered():
    devices = tuple(d.type.name for d in engines("small", "large").fleet.nodes[0].devices)
    wanted = FamilyObjective(slo={"latency_ms": 2000.0})
    chat = Served(name="chat", arrivals=Arrivals(rate_per_s=2.0), objective=wanted)
    played = Scenario(policy="wattwiser", duration_s=5.0, nodes=(Node(devices=devices),), families=(chat,))
    found = simulate(played, Provided(catalog=engine_view().catalog))
    assert found.summary.answered == 0
    assert ITS_OWN in found.caption
