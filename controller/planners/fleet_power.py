"""Planned power of a fleet, for any planner, and the operator's cap on it.

Source: ours. Data: a view's fleet, catalogue, demand and cap; a plan. Result: watts, and a refusal.
Formulation: baseline power of every GPU as planned (awake at its clock, or asleep) + active power. Active power = mean
rate of each family x share of each target x active joules of a request there. All energy in Trefoil counts at the mean:
a burst takes more. Each request counts as a separate batch, which is the most that it takes. A slice takes no more than
when it is always busy; a slice without a profile counts as always busy. GPUs that no plan names count as they stand.
CPUs count where they are cut into slices.
"""

from typing import Final

from controller.planners.planning_input import PlanningInput
from controller.planners.profile_rows import effective_row
from trefoil.core.brains import PlanView
from trefoil.core.catalog import Catalog
from trefoil.core.demand import Demand
from trefoil.core.device_types import slice_type
from trefoil.core.errors import PlanError
from trefoil.core.fleet import DeviceKind, DeviceState, DeviceStatus, DeviceType
from trefoil.core.plan import Plan, PlannedDevice, RouteTarget
from trefoil.core.power import active_w, idle_w
from trefoil.core.queueing import service_time
from trefoil.core.units import MS_PER_S

TOLERANCE: Final = 1e-6  # relative: a solver's feasibility tolerance breaks no cap


def check_power(view: PlanView, plan: Plan) -> None:
    """Refuse a plan that takes more than the fleet's cap.

    Raises:
        PlanError: naming the watts of both.
    """
    if not view.max_watts:
        return
    watts = planned_w(view, plan)
    if watts > view.max_watts * (1 + TOLERANCE):
        raise PlanError(
            f"the plan takes {watts:.0f} W",
            field="fleet.max_watts",
            value=view.max_watts,
            remedy="raise it with `trefoil objective fleet --max-watts`, or run policy exact, which plans within it",
        )


def planned_w(view: PlanView, plan: Plan) -> float:
    """Planned power of all GPUs in the mean [W]."""
    planned = {device.device: device for node in plan.nodes for device in node.devices}
    known = {device.device: device for node in view.fleet.nodes for device in node.devices}
    watts = sum(_baseline_w(status, planned.get(name)) for name, status in known.items())
    demands = {demand.family: demand for demand in view.demand if not demand.slo_class}
    for route in plan.routes:
        demand = demands.get(route.family)
        for target in route.targets if demand is not None else ():
            assert demand is not None
            status, device = known.get(target.slice.device), planned.get(target.slice.device)
            if status is None or status.type.unknown or device is None or target.draining:
                continue
            watts += _target_w(view.catalog, status.type, demand, target, device.held_mhz)
    return watts


def unplanned_w(inputs: PlanningInput) -> float:
    """Power of the GPUs that no plan can use [W]: asleep until they can be used again, or as they stand."""
    usable, asleep = {d.name for d in inputs.devices}, {name for _, name in inputs.lost}
    planned = PlannedDevice(target=DeviceState.ASLEEP)
    return sum(
        _baseline_w(status, planned if status.device in asleep else None)
        for node in inputs.view.fleet.nodes
        for status in node.devices
        if status.device not in usable
    )


def _baseline_w(status: DeviceStatus, planned: PlannedDevice | None) -> float:
    kind = status.type
    if kind.unknown or (kind.kind == DeviceKind.CPU and (planned is None or not planned.slices)):
        return 0.0
    if planned is None:
        return idle_w(kind, status.state, 0)
    return idle_w(kind, planned.target, planned.held_mhz)


def _target_w(catalog: Catalog, kind: DeviceType, demand: Demand, target: RouteTarget, clock_mhz: int) -> float:
    """Active power of one target [W]."""
    shape, family = slice_type(kind, target.slice.slice_type), catalog.family(demand.family)
    variant = family.variant(target.variant)
    row = effective_row(catalog, kind, shape, family, variant, demand.items_mean, clock_mhz)
    if row is None:
        return active_w(kind, shape.name, clock_mhz)
    rate_per_s = min(target.weight * demand.mean_per_s, MS_PER_S / service_time(row).mean_ms)
    return rate_per_s * row.energy_active_j_per_batch
