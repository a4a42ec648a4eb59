"""Views that the tests of the controller's brains start from."""

from dataclasses import replace
from pathlib import Path

from tests.support.plans import CATALOG, fleet, plan_of, planned
from trefoil.core.brains import PlanView
from trefoil.core.carbon import CarbonReading, Factors, Method, Series
from trefoil.core.demand import Demand, Measured
from trefoil.core.fleet import FleetState, SliceKey, SliceState, SliceStatus
from trefoil.core.objective import Objective, ObjectiveMode
from trefoil.core.plan import Expected, Plan
from trefoil.runtime.repository import load_catalog

SHIPPED = load_catalog(Path("model_repository"))
DIGITS_OBJECTIVE = Objective("digits", ObjectiveMode.BUDGET, 75.0, 0.95, 0.95, number=1, hard_min_accuracy=0.9)
SERIES = Series("test", Method.AVERAGE, Factors.LIFECYCLE)
OBJECTIVE = Objective("toy", ObjectiveMode.BUDGET, 100.0, 0.95, 0.95, number=1, window_s=3600.0)
PARTS = (planned("4g.20gb"), planned("3g.20gb", 4))
PLAN = replace(plan_of(*PARTS), expected={"toy": Expected(0.001, 5.0, 60.0, 0.96, 40.0)}, objectives=(OBJECTIVE,))


def running(plan: Plan = PLAN, states: dict[SliceKey, SliceState] | None = None) -> FleetState:
    """The fleet on which the plan runs; `states` says which slices do not serve."""
    parts = [p for node in plan.nodes for d in node.devices for p in d.slices]
    statuses = {
        p.key: SliceStatus(p.key, 1, "MIG-x", (states or {}).get(p.key, SliceState.READY), "", p.hosted, "127.0.0.1:1")
        for p in parts
        if (states or {}).get(p.key) != SliceState.GONE
    }
    (node,) = fleet().nodes
    devices = tuple(
        replace(d, slices=tuple(s for k, s in statuses.items() if k.device == d.device)) for d in node.devices
    )
    return FleetState((replace(node, devices=devices, observed_at_s=1000.0),))


def view(
    now_s: float = 1000.0,
    rate: float = 26.0,
    p90: float | None = None,
    intensity: float = 300.0,
    current: Plan | None = PLAN,
    attainment: float = 1.0,
    objective: Objective = OBJECTIVE,
    grams: float | None = None,
    states: dict[SliceKey, SliceState] | None = None,
) -> PlanView:
    """One family, two GPUs, one node."""
    return PlanView(
        now_s=now_s,
        fleet=running(states=states) if current else fleet(),
        catalog=CATALOG,
        objectives=(objective,),
        demand=(Demand("toy", "", rate, 1.15 * rate if p90 is None else p90),),
        carbon=CarbonReading(SERIES, now_s, now_s + 3600, intensity, observed_at_s=now_s),
        carbon_forecast=None,
        measured=(Measured("toy", 60.0, 70.0, attainment, 0.96, grams, rate, 10.0),),
        current=current,
        trigger="",
        move_horizon_s=600.0,
        pue=1.2,
    )


def digits_view(found: FleetState, rate: float = 20.0, current: Plan | None = None) -> PlanView:
    """The digits of the profile that ships, on this fleet."""
    return replace(
        view(),
        fleet=found,
        catalog=SHIPPED,
        objectives=(DIGITS_OBJECTIVE,),
        demand=(Demand("digits", "", rate, 1.2 * rate),),
        current=current,
    )
