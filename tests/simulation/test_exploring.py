"""Ask and tell in simulated time: every candidate is deployed, measured over enough requests, and charged."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from numpy.random import Generator

from controller.planners.policy_parts import planner_of
from tests.simulation.test_shell import family, scenario
from trefoil.core.brains import Candidate, Decision, Measurement, PlanView
from trefoil.core.plan import Plan
from trefoil.core.policies import policy
from trefoil.simulator import Provided, simulate


@dataclass
class TwoPlans:
    """Measures BASE's plan and CO2OPT's once, and keeps the one of fewer joules that met the SLO."""

    requests: int = 200
    told: list[tuple[str, Measurement]] = field(default_factory=list)
    views: list[PlanView] = field(default_factory=list)
    done: bool = False

    def asks(self, view: PlanView) -> bool:
        return not self.done

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        return Decision(None, "nothing more to find", math.inf)

    def ask(self, view: PlanView, rng: Generator) -> Candidate | Decision:
        self.views.append(view)
        plans: dict[str, Plan] = {}
        for name in ("base", "co2opt"):
            made = planner_of("", policy(name)).plan(view, rng).plan
            assert made is not None
            plans[name] = replace(made, degraded="")
        names = [name for name in plans if name not in {told for told, _ in self.told}]
        if names:
            return Candidate(plans[names[0]], names[0], 120.0, self.requests)
        self.done = True
        within = [(t.measured[0].joules_per_request, n) for n, t in self.told if t.measured[0].slo_attainment > 0.9]
        return Decision(plans[min(within)[1]], f"best is {min(within)[1]}", math.inf)

    def tell(self, candidate: Candidate, measurement: Measurement) -> None:
        self.told.append((candidate.why, measurement))

    def memory(self) -> Mapping[str, Any]:
        return {"done": self.done}

    def recall(self, memory: Mapping[str, Any]) -> None:
        self.done = bool(memory["done"])


@pytest.fixture(scope="module")
def explored():
    planner = TwoPlans()
    found = simulate(scenario(policy="base", families=(family(20.0),)), Provided(planner=planner))
    return planner, found


def test_both_candidates_are_measured_over_enough_requests(explored):
    planner, found = explored
    assert [name for name, _ in planner.told] == ["base", "co2opt"]
    for _, told in planner.told:
        assert told.measured[0].rate_per_s * told.measured[0].window_s >= 200
        assert told.measured[0].joules_per_request > 0
        assert told.spent_s >= 200 / 20.0
        assert told.spent_j > 0
    assert found.summary.evaluations == 2
    assert found.summary.exploration_s == pytest.approx(sum(t.spent_s for _, t in planner.told), abs=1.0)
    assert found.summary.exploration_j >= sum(t.spent_j for _, t in planner.told) - 1e-6


def test_what_is_measured_is_the_truth_and_not_the_profile(explored):
    planner, _ = explored
    base = planner.told[0][1].measured[0]
    assert base.accuracy == pytest.approx(0.993311)
    told = planner.told[1][1].measured[0]
    assert told.joules_per_request < base.joules_per_request  # CO2OPT: the smallest variants


def test_the_best_becomes_the_plan(explored):
    _, found = explored
    last = found.decisions[-1]
    assert "best is" in last["why"]
    assert last["exploration"]["evaluations"] == 2
    assert [e["outcome"] for e in found.evaluations] == ["measured", "measured"]


def test_candidate_that_cannot_carry_the_load_is_told_as_a_violation():
    planner = TwoPlans()
    busy = scenario(policy="base", families=(family(100.0),))
    found = simulate(busy, Provided(planner=planner))
    outcomes = {e["why"].split(" ")[0]: e["outcome"] for e in found.evaluations}
    assert "refused" in outcomes.values() or "broken_off" in outcomes.values()
    first = planner.told[0][1].measured[0]
    assert first.latency_ms_p95 == math.inf
    assert first.slo_attainment == 0.0
