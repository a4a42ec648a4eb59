"""Views for planners of CPU slices: nodes of CPUs, and InfAdapter's published capacities."""

from dataclasses import replace

from tests.support.planning import NOW_S, view
from trefoil.core.brains import PlanView
from trefoil.core.catalog import Catalog
from trefoil.core.demand import Demand
from trefoil.core.device_types import device_type
from trefoil.core.fleet import DeviceState, DeviceStatus, FleetState, NodeStatus
from trefoil.core.objective import Objective, ObjectiveMode
from trefoil.reproduce.infadapter import published

PUBLISHED = published.catalog()


def cpu_fleet(*cores: int) -> FleetState:
    """A node for each number of cores."""
    return FleetState(
        tuple(
            NodeStatus(
                node=f"node{i}",
                zone="test",
                devices=(DeviceStatus(f"node{i}/cpu", device_type(f"cpu:{n}"), DeviceState.AWAKE),),
            )
            for i, n in enumerate(cores)
        )
    )


def cpu_view(rate: float = 75.0, *cores: int, catalog: Catalog = PUBLISHED) -> PlanView:
    """One family of a catalogue on nodes of these cores; without any: one of 20."""
    family = catalog.families[0]
    wanted = Objective(family.name, ObjectiveMode.INSTANT, slo_ms=750.0, slo_quantile=0.99, pue=1.0, number=1)
    return replace(
        view(devices=cpu_fleet(*(cores or (20,)))),
        catalog=catalog,
        objectives=(wanted,),
        demand=(Demand(family.name, "", rate, rate),),
        trigger="tick",
        now_s=NOW_S,
    )
