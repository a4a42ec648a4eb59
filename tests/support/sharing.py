"""Views of families that share GPUs, and their plans once a load has stood for long."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from controller.planners.columns import class_column
from controller.planners.planner_settings import PlannerSettings
from controller.planners.planning_input import Task
from tests.support.planning import applied, digits, fleet, objective, view
from trefoil.core.brains import Decision, Planner, PlanView
from trefoil.core.catalog import Catalog
from trefoil.core.demand import Demand
from trefoil.core.device_types import A100_40GB
from trefoil.core.plan import Plan

WHOLE = "7g.40gb"


def catalog(families: Sequence[str], memory_mib: int = 32) -> Catalog:
    """The family of the digits under several names."""
    one, rows = digits().families[0], digits().rows
    variants = tuple(dataclasses.replace(v, memory_mib=memory_mib) for v in one.variants)
    return Catalog(
        tuple(dataclasses.replace(one, name=f, variants=variants) for f in families),
        tuple(dataclasses.replace(row, family=f) for f in families for row in rows),
    )


def carried_per_s(one: Catalog, items: float = 1.0, slo_ms: float = 65.0) -> float:
    """What a whole GPU carries of the best variant of a catalogue's first family within an SLO [1/s]."""
    family = one.families[0]
    task = Task(objective(family=family.name, slo_ms=slo_ms), Demand(family.name, "", 0.0, 0.0, items))
    column = class_column(one, task, A100_40GB, WHOLE, family.best.name, 1, PlannerSettings())
    assert column is not None
    return column.capacity_per_s(1)


MAX_RPS = carried_per_s(digits())


def shared(
    loads: Sequence[float],
    gpus: int = 3,
    current: Plan | None = None,
    memory_mib: int = 32,
    devices: Mapping[str, tuple[str, ...]] | None = None,
    **changes: object,
) -> PlanView:
    """Families f0, f1, ... at loads in multiples of MAX_RPS, on a fleet where `current` runs."""
    names, own = [f"f{i}" for i in range(len(loads))], devices or {}
    one = view(
        catalog=catalog(names, memory_mib),
        devices=fleet(gpus),
        wanted=[dataclasses.replace(objective(family=f), devices=own.get(f, ())) for f in names],
        demand=[Demand(f, "", load * MAX_RPS, 1.2 * load * MAX_RPS) for f, load in zip(names, loads, strict=True)],
        current=current,
    )
    seen = applied(current, one.fleet) if current is not None else one.fleet
    return dataclasses.replace(one, fleet=seen, **changes)


def decide(planner: Planner, one: PlanView) -> Decision:
    """Its decision on a view."""
    return planner.plan(one, np.random.default_rng(0))


def settled(planner: Planner, loads: Sequence[float], gpus: int = 3, current: Plan | None = None) -> Plan:
    """The plan in force once the loads have stood for long."""
    for _ in range(10):
        decision = decide(planner, shared(loads, gpus, current))
        current = decision.plan or current
    assert current is not None
    return current


def weights_of(plan: Plan, family: str) -> dict[str, float]:
    """A family's weights by GPU."""
    (route,) = (route for route in plan.routes if route.family == family)
    return {t.slice.device.rpartition("/")[2]: t.weight for t in route.targets}


def serving(plan: Plan, family: str) -> list[str]:
    """GPUs that host a family."""
    return sorted(
        d.device.rpartition("/")[2]
        for node in plan.nodes
        for d in node.devices
        if any(h.family == family for part in d.slices for h in part.hosted)
    )
