"""When the controller plans again, and above all when it does not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.loop.core.slo_margin import SloMargin
from controller.observe.core.triggers import HoldTimers, evaluate_triggers, plan_basis
from controller.thresholds import CAUSES, Thresholds
from tests.support.plans import key
from tests.unit.controller.views import OBJECTIVE, PLAN, view
from trefoil.core.demand import ScaleSignal, TokenTimes
from trefoil.core.fleet import DeviceState, FleetState, SliceState

LIMITS = Thresholds()
INFINITE = float("inf")


def fire(seen, last=None, memory=None, thresholds=LIMITS, allowed=CAUSES, rolling=False):
    last = last or plan_basis(view(), PLAN, INFINITE)
    return evaluate_triggers(seen, last, memory or HoldTimers(), thresholds, allowed, rolling)[0]


def play(views, thresholds=LIMITS, replan=True):
    """Causes of the triggers along a sequence of views, each replanned for."""
    last, memory, causes = plan_basis(views[0], PLAN, INFINITE), HoldTimers(), []
    for seen in views[1:]:
        trigger, memory = evaluate_triggers(seen, last, memory, thresholds, CAUSES)
        if trigger is not None:
            causes.append(trigger.cause)
            if replan:
                last = plan_basis(seen, PLAN, INFINITE)
    return causes


def test_starts_when_there_is_no_plan():
    assert evaluate_triggers(view(current=None), None, HoldTimers(), LIMITS, CAUSES)[0].cause == "start"


def test_nothing_fires_when_nothing_changed():
    assert fire(view()) is None


@given(st.floats(1, 1500) | st.just(0.0), st.floats(1, 1500) | st.just(0.0))
def test_carbon_fires_exactly_beyond_the_ratio_of_the_last_plan(planned_g, now_g):
    trigger = fire(view(intensity=now_g), plan_basis(view(intensity=planned_g), PLAN, INFINITE))
    assert (trigger is not None) == (abs(now_g - planned_g) > 0.05 * planned_g)


def test_carbon_may_compare_with_a_fixed_base():
    fixed = Thresholds(carbon_base_g_per_kwh=1000.0)
    assert fire(view(intensity=345.0), thresholds=fixed) is None
    assert "+5.1% of 1000 g/kWh" in fire(view(intensity=351.0), thresholds=fixed).why


def test_the_reason_names_both_sides_of_the_comparison():
    trigger = fire(view(intensity=330.0))
    assert trigger.why == ("intensity 330 g/kWh is +10.0% of 300 g/kWh from the 300 g/kWh planned for (limit 5%)")


def test_load_above_capacity_fires_at_once():
    trigger = fire(view(rate=40.0, p90=46.0))
    assert trigger.cause == "load"
    assert "46.0/s exceeds the capacity of 40.0/s" in trigger.why


def test_growth_that_was_planned_for_does_not_fire_again_while_it_arrives():
    grown = replace(PLAN, expected={"toy": replace(PLAN.expected["toy"], capacity_per_s=60.0)})
    last = plan_basis(view(rate=38.0, p90=60.0), grown, INFINITE)
    assert fire(view(now_s=1003.0, rate=48.0, p90=75.0), last) is None
    assert "; 58.0/s came, " in fire(view(now_s=1003.0, rate=58.0, p90=85.0), last).why


def test_noise_above_a_tight_capacity_does_not_fire():
    tight = replace(PLAN, expected={"toy": replace(PLAN.expected["toy"], capacity_per_s=30.0)})
    last = plan_basis(view(rate=26.0, p90=30.0), tight, INFINITE)
    assert fire(view(rate=29.0, p90=33.0), last) is None


@given(
    high=st.floats(1.0, 1.19),
    low=st.floats(0.76, 1.0),
    period_ticks=st.integers(1, 30),
)
def test_a_square_wave_within_the_hysteresis_never_fires(high, low, period_ticks):
    rates = [26 * (high if i // period_ticks % 2 else low) for i in range(200)]
    assert play([view(), *(view(now_s=1000 + 0.5 * i, rate=r) for i, r in enumerate(rates))]) == []


def test_a_square_wave_that_leaves_the_band_for_less_than_the_hold_never_fires():
    rates = [15.0 if i // 8 % 2 else 26.0 for i in range(200)]  # 4 s below, 4 s planned
    assert play([view(), *(view(now_s=1000 + 0.5 * i, rate=r) for i, r in enumerate(rates))]) == []


def test_a_lasting_fall_fires_once_after_the_hold():
    views = [view(), *(view(now_s=1000 + 0.5 * i, rate=13.0) for i in range(60))]
    assert play(views) == ["load"]
    trigger, memory = evaluate_triggers(views[1], plan_basis(views[0], PLAN, INFINITE), HoldTimers(), LIMITS, CAUSES)
    assert trigger is None
    assert memory.since_s == {"load<toy": 1000.0}


def test_slo_breach_waits_for_the_hold_and_rests_after_a_plan():
    late = [view(now_s=1000 + 0.5 * i, attainment=0.80) for i in range(100)]
    causes = play([view(), *late])
    assert causes == ["slo"] * 3  # 50 s: after 10 s rest and 3 s hold each
    assert fire(view(now_s=1020.0, attainment=0.94), memory=HoldTimers({"slo:toy": 1000.0})) is None


@pytest.mark.parametrize(("name", "limit"), [("ttft", "40 ms"), ("tpot", "9 ms")])
def test_an_objective_of_tokens_that_streams_miss_fires_as_one_of_latency_and_raises_the_margin(name, limit):
    wanted = replace(OBJECTIVE, ttft_ms=40.0, ttft_quantile=0.95, tpot_ms=9.0, tpot_quantile=0.95)
    whole = view(now_s=1020.0, objective=wanted)
    times = TokenTimes(50.0, 0.97, 8.0, 0.97)
    kept, missed = (
        replace(whole, measured=(replace(whole.measured[0], tokens=each),))
        for each in (times, replace(times, **{f"{name}_attainment": 0.80}))
    )
    held = HoldTimers({f"{name}:toy": 1000.0})
    assert fire(kept, memory=held) is None
    found = fire(missed, memory=held)
    assert (found.cause, f"{name.upper()} of 80.0% of streams within {limit}" in found.why) == ("slo", True)
    unasked = replace(missed, objectives=(OBJECTIVE,))
    assert fire(unasked, memory=held) is None, "no objective"
    margin = SloMargin()
    for seen, step in ((kept, 0.0), (missed, 0.15), (unasked, 0.15)):
        margin.raise_on_breach(seen)
        assert margin.by_family.get("toy", 0.0) == step


def test_a_new_objective_fires():
    assert fire(view(objective=replace(OBJECTIVE, number=2))).cause == "objective"


def test_a_failed_slice_fires_after_the_hold_and_not_again_once_planned_for():
    broken = {PLAN.nodes[0].devices[0].slices[0].key: SliceState.FAILED}
    views = [view(), *(view(now_s=1000 + 0.5 * i, states=broken) for i in range(40))]
    assert play(views) == ["loss"]


def test_a_slice_that_is_still_starting_is_no_loss_and_neither_is_anything_during_a_rollout():
    assert fire(view(now_s=1010.0, states={key("4g.20gb"): SliceState.STARTING}), memory=HoldTimers()) is None
    gone = view(now_s=1010.0, states={key("4g.20gb"): SliceState.GONE})
    held = HoldTimers({"loss:node0-gpu0-4g.20gb-0": 1000.0})
    assert fire(gone, memory=held).cause == "loss"
    assert fire(gone, memory=held, rolling=True) is None


def test_a_lost_device_and_a_stale_node_fire_and_so_does_their_return():
    whole = view()
    (node,) = whole.fleet.nodes
    lost = replace(node, devices=(node.devices[0], replace(node.devices[1], state=DeviceState.LOST)))
    partial = replace(whole, fleet=FleetState((lost,)))
    stale = replace(whole, fleet=FleetState((node,), ("node0",)))
    assert "node0/gpu1: lost" in fire(partial).why
    assert fire(stale).cause == "loss"
    assert "can be used" in fire(whole, plan_basis(partial, PLAN, INFINITE)).why


def test_a_device_of_a_stale_node_that_nobody_reaches_fires_once_more_and_during_a_rollout():
    whole = view()
    (node,) = whole.fleet.nodes
    stale = replace(whole, fleet=FleetState((node,), ("node0",)))
    lost = replace(node, devices=(replace(node.devices[0], state=DeviceState.LOST), *node.devices[1:]))
    unreached = replace(whole, fleet=FleetState((lost,), ("node0",)))
    basis = plan_basis(stale, PLAN, INFINITE)
    assert fire(stale, basis) is None
    assert "node0/gpu0: its node is stale, and no dispatcher reaches it" in fire(unreached, basis, rolling=True).why
    assert fire(unreached, plan_basis(unreached, PLAN, INFINITE)) is None
    assert "can be used" in fire(whole, plan_basis(unreached, PLAN, INFINITE)).why


@pytest.mark.parametrize("cause", ["carbon", "load", "slo"])
def test_a_policy_that_does_not_name_a_trigger_never_sees_it(cause):
    seen = view(now_s=1100.0, intensity=900.0, rate=60.0, p90=70.0, attainment=0.1)
    memory = HoldTimers({"slo:toy": 1000.0, "load>toy": 1000.0})
    found = fire(seen, memory=memory, allowed=tuple(c for c in ("carbon", "load", "slo") if c != cause))
    assert found is not None
    assert found.cause != cause
    assert fire(seen, memory=memory, allowed=()) is None


def test_a_tick_gives_a_change_of_carbon_the_time_to_be_the_cause():
    last = plan_basis(view(), PLAN, 1010.0)
    assert fire(view(now_s=1010.5), last) is None
    assert fire(view(now_s=1010.5, intensity=400.0), last).cause == "carbon"
    assert fire(view(now_s=1012.0), last).cause == "tick"


def test_accuracy_below_the_floor_fires_where_a_policy_asks_for_it():
    low = view(now_s=1100.0)
    low = replace(low, measured=tuple(replace(m, accuracy=OBJECTIVE.min_accuracy - 0.01) for m in low.measured))
    held = HoldTimers({"accuracy:toy": 1000.0})
    assert fire(low, memory=held, allowed=("accuracy",)).cause == "accuracy"
    assert fire(low, memory=HoldTimers(), allowed=("accuracy",)) is None
    assert fire(low, memory=held, allowed=("slo",)) is None


def test_a_governor_at_the_top_of_its_clocks_triggers_once_the_plan_has_rested_and_raises_its_familys_margin():
    signals = (ScaleSignal("node0", "node0/gpu1", ("toy",), "UP: toy at 99.0 of 100 ms"),)
    last = plan_basis(view(now_s=1000.0), PLAN, INFINITE)

    def fired(now_s, **more):
        given = {"allowed": CAUSES, "rolling": False, "signals": signals, **more}
        return evaluate_triggers(view(now_s=now_s), last, HoldTimers(), LIMITS, **given)[0]

    found = fired(1000.0 + LIMITS.slo_rest_s)
    assert (found.cause, found.why) == ("scale", "node0/gpu1 of toy wants capacity: UP: toy at 99.0 of 100 ms")
    assert fired(1001.0) is None, "the plan is new"
    assert fired(1100.0, rolling=True) is None
    assert fired(1100.0, signals=()) is None
    assert fired(1100.0, allowed=("load",)) is None
    margin = SloMargin(0.1, 0.15)
    margin.raise_on_breach(view(attainment=1.0), signals)
    assert margin.by_family == {"toy": 0.1}
    margin.raise_on_breach(view(attainment=0.5), signals)
    assert margin.by_family == {"toy": 0.15}, "once for both reasons, up to the limit"
