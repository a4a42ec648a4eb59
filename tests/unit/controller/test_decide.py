"""What comes of a planner's decision in each mode."""

from dataclasses import replace

import numpy as np
import pytest

from controller.loop.core.decision import (
    ADVISED,
    DEGRADED,
    FAILED,
    NEW,
    UNCHANGED,
    ControlState,
    judge,
    predicted_saving,
    run_planner,
)
from controller.loop.core.slo_margin import SloMargin
from controller.loop.decision_records import replay
from controller.observe.core.triggers import Trigger
from tests.support.plans import plan_of, planned
from tests.unit.controller.views import PLAN, view
from trefoil.core.brains import Decision
from trefoil.core.errors import Infeasible
from trefoil.core.objective import ActMode
from trefoil.core.plan import DecisionRecord, Expected
from trefoil.runtime import codec

TRIGGER = Trigger("carbon", "300 -> 400")
OTHER = replace(
    plan_of(planned("7g.40gb")), expected={"toy": Expected(0.0005, 2.5, 50.0, 0.96, 60.0)}, why="one large slice"
)
ACT = ControlState()


def decision(plan=OTHER, degraded=""):
    return Decision(plan, plan.why if plan else "nothing better", 1060.0, degraded)


def test_act_rolls_a_new_plan_out_with_trigger_and_reason():
    verdict = judge(view(), TRIGGER, decision(), ACT)
    assert verdict.outcome == NEW
    assert verdict.plan.why == "carbon: 300 -> 400; one large slice"


def test_the_same_plan_is_left_alone():
    verdict = judge(view(), TRIGGER, decision(PLAN), ACT)
    assert (verdict.outcome, verdict.plan) == (UNCHANGED, None)


@pytest.mark.parametrize(
    "control",
    [ControlState(ActMode.ADVISE), ControlState(frozen=True), ControlState(pinned=True), ControlState(ActMode.OBSERVE)],
)
def test_a_held_controller_touches_nothing_and_predicts_the_saving(control):
    verdict = judge(view(grams=0.001), TRIGGER, decision(), control)
    assert (verdict.outcome, verdict.plan) == (ADVISED, None)
    assert verdict.advised.content_digest == OTHER.content_digest
    assert control.hold_reason in verdict.why
    assert "saves 50.0%" in verdict.why


def test_the_saving_compares_with_what_is_measured_else_with_what_was_predicted():
    assert "(measured)" in predicted_saving(view(grams=0.002), OTHER)
    assert "(predicted), saves" in predicted_saving(view(), OTHER)
    assert "costs 25.0%" in predicted_saving(view(grams=0.0004), OTHER)
    assert "nothing runs" in predicted_saving(view(current=None), OTHER)


def test_an_infeasible_objective_keeps_the_last_good_plan_and_says_by_which_rung():
    verdict = judge(view(), TRIGGER, decision(None, "accuracy 0.99 > 0.98, the best there is"), ACT)
    assert (verdict.outcome, verdict.plan, verdict.rung) == (DEGRADED, None, 2)
    assert "the last good plan stays, because accuracy 0.99" in verdict.why


def test_a_degraded_plan_is_rolled_out_on_rung_one():
    verdict = judge(view(), TRIGGER, decision(replace(OTHER, degraded="demand above capacity")), ACT)
    assert (verdict.outcome, verdict.rung) == (NEW, 1)
    assert "rung 1: demand above capacity" in verdict.why


def test_a_plan_that_breaks_a_rule_is_refused_whoever_made_it():
    broken = replace(OTHER, routes=())
    overlapping = plan_of(planned("7g.40gb"), planned("3g.20gb", 4))
    assert judge(view(), TRIGGER, decision(overlapping), ACT).outcome == FAILED
    weak = replace(OTHER, expected={"toy": Expected(capacity_per_s=1.0)})
    assert "below the demand" in judge(view(), TRIGGER, decision(weak), ACT).why
    assert judge(view(), TRIGGER, decision(broken), ACT).outcome == NEW  # routes nothing: legal, if pointless


class Dicing:
    """Draws from its generator: equal seeds, equal plans."""

    def plan(self, view, rng):
        return decision(plan_of(planned("7g.40gb"), number=1) if rng.random() < 0.5 else plan_of(planned("4g.20gb")))


class Hopeless:
    def plan(self, view, rng):
        raise Infeasible("nothing fits", remedy="add a GPU")


def test_a_planner_that_raises_an_operating_error_degrades():
    verdict = judge(view(), TRIGGER, run_planner(view(), Hopeless(), 1), ACT)
    assert (verdict.outcome, verdict.rung) == (DEGRADED, 2)
    assert "add a GPU" in verdict.degraded


@pytest.mark.parametrize("seed", range(8))
def test_a_recorded_decision_replays_to_the_same_plan(seed):
    seen = view()
    made = run_planner(seen, Dicing(), seed)
    versions = {"plan": made.plan.content_digest}
    record = DecisionRecord("1.000001", trigger="load", view_json=codec.to_json(seen), seed=seed, versions=versions)
    assert replay(record, Dicing(), made.plan).equal
    expected = np.random.default_rng(seed).random() < 0.5
    assert (made.plan.nodes[0].devices[0].slices[0].key.slice_type == "7g.40gb") == expected


def test_a_replay_that_differs_shows_where():
    record = DecisionRecord("1", view_json=codec.to_json(view()), seed=1, versions={"plan": PLAN.content_digest})
    replayed = replay(record, Dicing(), PLAN)
    assert not replayed.equal
    assert any("slice_type" in line for line in replayed.diff)


def test_a_breach_raises_the_demand_planned_for_and_it_wears_off():
    boosts = SloMargin(0.15, 0.6)
    boosts.wear_off(view())
    for _ in range(10):
        boosts.raise_on_breach(view(attainment=0.5))
    assert boosts.by_family == {"toy": 0.6}
    boosts.wear_off(view(now_s=1030.0))
    assert boosts.by_family["toy"] == pytest.approx(0.3)
    boosts.wear_off(view(now_s=1090.0))
    assert boosts.by_family["toy"] == 0
