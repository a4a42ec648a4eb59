"""What every planner keeps: one suite, run over the whole table and over a user's own.

To hold yours to it: `TREFOIL_CONTRACT_OWN=planner=module:Class pytest tests/contract/test_planner_contract.py`.
"""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from controller.planners.policy_parts import planner_of
from controller.planners.table import PLANNERS
from tests.support.cpus import cpu_view
from tests.support.own_parts import own
from tests.support.planning import DUCK, applied, fleet, objective, view, with_low_end
from trefoil.core.brains import Candidate, Decision, Measurement, PlanView
from trefoil.core.demand import Measured
from trefoil.core.objective import ObjectiveMode
from trefoil.core.parts import Kind, as_live_planner, load_part
from trefoil.core.plan_check import check
from trefoil.core.policies import Policy
from trefoil.runtime import codec

NAMES = [*sorted(PLANNERS), *own("planner")]
LOW_END = ("paired", "lowenergy")  # need a low-end GPU for each family
CPUS = ("infadapter", "ms_plus", "vpa_plus", "fixed_size")  # cut CPUs, the first two GPUs as well
QUICK = {"kernel_requests": 500, "patience": 2, "gpus_per_family": 1}  # the smallest of these fleets is one GPU


def made(name):
    known = load_part(Kind.PLANNER, name, PLANNERS).settings.model_fields
    row = Policy("contract", name, settings={Kind.PLANNER: {n: v for n, v in QUICK.items() if n in known}})
    return planner_of("", row)


def views(name: str = "") -> list[PlanView]:
    made_for = _views()
    if name in CPUS:
        other = made_for[1] if name in CPUS[:2] else cpu_view(75.0, 48, 8)
        return [cpu_view(26.0), other, cpu_view(1e4), replace(cpu_view(26.0), objectives=())]
    return [with_low_end(each) for each in made_for] if name in LOW_END else made_for


def _views() -> list[PlanView]:
    one = view(history=DUCK, devices=fleet(1))
    return [
        one,
        replace(view(80.0, rate=40.0, history=DUCK, devices=fleet(2)), trigger="carbon"),
        view(devices=fleet(1), wanted=[objective(mode=ObjectiveMode.LAMBDA, lambda_weight=0.1)]),
        replace(one, objectives=()),
    ]


def told(candidate: Candidate, one: PlanView) -> Measurement:
    joules = 3.0 + len(candidate.plan.routes[0].targets)
    rows = tuple(Measured(o.family, 50.0, 60.0, 0.99, 0.95, 1e-4, 26.0, 10.0, joules) for o in one.objectives)
    return Measurement(rows, 10.0, 100.0, 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", range(len(views())))
def test_equal_views_and_seeds_give_equal_decisions_that_are_legal_and_have_a_reason(name, number):
    one, again = views(name)[number], views(name)[number]
    before, chance = codec.to_json(one), (random.getstate(), np.random.get_state()[1].tolist())
    found, other = (made(name).plan(each, np.random.default_rng(5)) for each in (one, again))
    assert found == other
    assert codec.to_json(one) == before, "a view is never changed"
    assert (random.getstate(), np.random.get_state()[1].tolist()) == chance, "chance comes from the generator only"
    assert found.why
    assert found.next_tick_at_s > one.now_s
    if found.plan is None:
        assert found.degraded or one.current is not None
    else:
        check(found.plan, one.fleet, one.catalog, one.demand)
        assert found.plan.why
        assert set(found.plan.expected) <= {o.family for o in one.objectives}


@pytest.mark.parametrize("name", NAMES)
def test_what_runs_already_is_planned_again_from_what_it_left(name):
    one = views(name)[0]
    plan = made(name).plan(one, np.random.default_rng(5)).plan
    after = replace(one, current=plan, fleet=applied(plan, one.fleet))
    again = made(name).plan(after, np.random.default_rng(5))
    assert again.plan is None or again.plan.content_digest == plan.content_digest


@pytest.mark.parametrize("name", NAMES)
def test_a_planner_that_measures_goes_on_elsewhere_from_its_memory(name):
    one, planner = views()[0], made(name)
    live = as_live_planner(planner)
    if live is None:
        assert not callable(getattr(planner, "ask", None)), "who asks can also tell, remember and recall"
        return
    assert live.asks(one)
    for seed in range(4):
        memory = json.loads(json.dumps(live.memory()))
        other = as_live_planner(made(name))
        other.recall(memory)
        step, same = (each.ask(one, np.random.default_rng(seed)) for each in (live, other))
        assert step == same
        assert json.loads(json.dumps(live.memory())) == json.loads(json.dumps(other.memory()))
        assert step.why
        if isinstance(step, Decision):
            break
        check(step.plan, one.fleet, one.catalog, (), one.objectives)
        assert step.measure_s > 0
        assert step.requests_min > 0
        live.tell(step, told(step, one))
