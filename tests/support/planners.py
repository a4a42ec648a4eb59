"""Planners of a user's own, as `planner = "module:Class"` names them: plain rules whose answers tests can foresee."""

from trefoil.core.brains import Decision
from trefoil.core.device_types import A100_40GB, slice_type
from trefoil.core.fleet import DeviceState, Hosted, SliceKey
from trefoil.core.plan import Expected, NodePlan, Plan, PlannedDevice, PlannedSlice, Route, RouteTarget

DIRTY_G_PER_KWH = 300.0
VERSIONS = {"digits-xs": 1, "digits-s": 2, "digits-m": 3, "digits-l": 4}


def layout(kinds, variant, device):
    """Slices of one variant side by side on one device."""
    hosted = (Hosted("digits", variant, VERSIONS[variant], 0, 1, 1, 8),)
    return tuple(
        PlannedSlice(SliceKey(device, kind, start, slice_type(A100_40GB, kind).memory_slices), hosted, 2)
        for kind, start in kinds
    )


def plan_of(devices, capacity_per_s=500.0, why=""):
    """A plan of node0 with equal shares; devices without slices sleep."""
    parts = [p for d in devices.values() for p in d]
    targets = tuple(RouteTarget(p.key, p.hosted[0].variant, 0, 1 / len(parts), 2) for p in parts)
    node = NodePlan(
        node="node0",
        devices=tuple(
            PlannedDevice(n, DeviceState.AWAKE if d else DeviceState.ASLEEP, d, governor="fixed")
            for n, d in sorted(devices.items())
        ),
    )
    return Plan(
        planner="test",
        nodes=(node,),
        routes=(Route("digits", "weighted", "fifo", targets, 100, 1 << 20),),
        expected={"digits": Expected(1e-3, 5.0, 60.0, 0.96, capacity_per_s)},
        why=why,
    )


CLEAN = {"node0/gpu0": (("7g.40gb", 0),), "node0/gpu1": ()}
DIRTY = {"node0/gpu0": (("4g.20gb", 0), ("3g.20gb", 4)), "node0/gpu1": ()}


class ByCarbon:
    """One large slice with the best variant while the grid is clean, two smaller ones while it is dirty."""

    def plan(self, view, rng):
        dirty = view.carbon.intensity_g_per_kwh > DIRTY_G_PER_KWH
        kinds, variant = (DIRTY, "digits-s") if dirty else (CLEAN, "digits-l")
        why = f"{'dirty' if dirty else 'clean'}: {view.carbon.intensity_g_per_kwh:.0f} g/kWh"
        lost = {d.device for n in view.fleet.nodes for d in n.devices if d.state == DeviceState.LOST}
        devices = {name: layout(slices, variant, name) if name not in lost else () for name, slices in kinds.items()}
        if not any(devices.values()):
            spare = next(n for n in kinds if n not in lost)
            devices[spare] = layout(kinds["node0/gpu0"], variant, spare)
            why += "; on the device that is left"
        wants = max((o.min_accuracy for o in view.objectives), default=0.0)
        if wants > 0.985:
            return Decision(None, why, float("inf"), f"a mean accuracy of {wants} is out of reach")
        return Decision(plan_of(devices, why=why), why, float("inf"))
