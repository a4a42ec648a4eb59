"""Small legal fleets and plans that tests start from."""

from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.common import Revision
from trefoil.core.device_types import A100_40GB, slice_type
from trefoil.core.fleet import DeviceState, DeviceStatus, FleetState, Hosted, NodeStatus, SliceKey
from trefoil.core.plan import NodePlan, Plan, PlannedDevice, PlannedSlice, Route, RouteTarget

SMALL = Variant("toy-s", 1, 0.90, "made up", 100, 2.0, 1_000, "CC0-1.0")
LARGE = Variant("toy-l", 2, 0.98, "made up", 4_000, 2.5, 100_000, "CC0-1.0")
TOY = Family("toy", "top1", (SMALL, LARGE))
CATALOG = Catalog((TOY,), ())


def fleet(gpus: int = 2, node: str = "node0") -> FleetState:
    """Awake, empty A100-40GB devices on one node."""
    devices = tuple(
        DeviceStatus(f"{node}/gpu{i}", A100_40GB, DeviceState.AWAKE, mig_current=True, mig_pending=True)
        for i in range(gpus)
    )
    return FleetState((NodeStatus(node=node, zone="test", devices=devices),))


def key(kind: str, start: int = 0, device: str = "node0/gpu0") -> SliceKey:
    """A slice key whose size follows from its type."""
    return SliceKey(device, kind, start, slice_type(A100_40GB, kind).memory_slices)


def planned(kind: str, start: int = 0, variant: Variant = LARGE, device: str = "node0/gpu0") -> PlannedSlice:
    """A slice that hosts one variant of the toy family."""
    return PlannedSlice(key(kind, start, device), (Hosted("toy", variant.name, variant.version, 0, 1, 1, 8),), 2)


def plan_of(*slices: PlannedSlice, number: int = 1) -> Plan:
    """A plan of one node that runs these slices, with equal weights."""
    devices: dict[str, list[PlannedSlice]] = {}
    for part in slices:
        devices.setdefault(part.key.device, []).append(part)
    targets = tuple(RouteTarget(p.key, p.hosted[0].variant, 0, 1 / len(slices), 2) for p in slices)
    node = NodePlan(
        Revision(1, number),
        "node0",
        tuple(PlannedDevice(d, DeviceState.AWAKE, tuple(parts)) for d, parts in sorted(devices.items())),
    )
    return Plan(
        Revision(1, number),
        "test",
        "test",
        nodes=(node,),
        routes=(Route("toy", "weighted", "fifo", targets, 100),),
    )
