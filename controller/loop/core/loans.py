"""Loans of devices: what an operator's command uses alone for a while, planned around by everybody else.

Data: devices that are lent, to whom, until when, and what each holds meanwhile (`trefoil family profile` lends them).
Decision: the view that planners and triggers see (a lent device is out of service there), and the plan with what the
lent devices hold. A loan ends when it is given back or not renewed; a controller that takes over knows of none. What is
given back is planned asleep until a planner uses it: one that no planner can use would else hold its slices forever.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from trefoil.core.brains import PlanView
from trefoil.core.catalog import Catalog
from trefoil.core.errors import SettingError
from trefoil.core.fleet import DeviceState, FleetState, NodeStatus
from trefoil.core.plan import NodePlan, Plan, PlannedDevice

LEASE_MAX_S: Final = 120.0  # longer than this no device is missed after its holder was killed


@dataclass(frozen=True, slots=True)
class Loan:
    """Loan of one device: what it holds, for whom, until when (monotonic [s]: no clock that is set keeps it lent)."""

    planned: PlannedDevice
    holder: str
    ends_s: float

    @property
    def device(self) -> str:
        """Name of the device."""
        return self.planned.device


@dataclass(slots=True)
class Loans:
    """Loans in force, and devices that were lent before, by name."""

    lent: dict[str, Loan] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)

    def expire(self, fleet: FleetState, monotonic_s: float) -> list[Loan]:
        """End the loans whose time is over, or whose device is lost; returns them."""
        present = fleet.present
        over = [loan for loan in self.lent.values() if loan.ends_s <= monotonic_s or loan.device not in present]
        for loan in over:
            self.end(loan.device)
        return over

    def end(self, device: str) -> None:
        """End one loan."""
        if self.lent.pop(device, None) is not None:
            self.returned.add(device)

    def seen(self, view: PlanView, catalog: Catalog) -> PlanView:
        """View in which what is lent is out of service; its catalogue knows what lent devices hold."""
        reasons = {loan.device: f"lent to {loan.holder}" for loan in self.lent.values()}
        families = frozenset(h.family for loan in self.lent.values() for s in loan.planned.slices for h in s.hosted)
        wanted = families | {family.name for family in view.catalog.families}
        return replace(view, fleet=_cordoned(view.fleet, reasons), catalog=catalog.restrict(wanted))

    def with_lent(self, plan: Plan, fleet: FleetState) -> Plan:
        """Plan with what the lent devices hold; while one is lent, no plan to go back to."""
        if not self.lent and not self.returned:
            return plan
        named = {d.device for node in plan.nodes for d in node.devices}
        idle = (self.returned & fleet.present) - named - self.lent.keys()
        empty = [PlannedDevice(name, DeviceState.ASLEEP) for name in sorted(idle)]
        own = {d.device: d for d in (*empty, *(loan.planned for loan in self.lent.values()))}
        measuring = plan.exploration or bool(self.lent)
        return replace(plan, nodes=tuple(_with_devices(plan.nodes, own)), exploration=measuring) if own else plan


def refuse_loan(loan: Loan, before: Loan | None, held: str) -> None:
    """Refuse a loan beside the one `before` of its device; `held`: why no plan is carried out now, "" when it is.

    Raises:
        SettingError: naming the device and the remedy.
    """
    if held:
        raise SettingError(
            f"no plan is carried out for it now: {held}", field="device", value=loan.device,
            remedy="`trefoil mode act`, unfreeze and unpin; under a policy that measures, profile another node",
        )  # fmt: skip
    if before is not None and before.holder != loan.holder:
        remedy = "wait, or name another"
        raise SettingError(f"lent to {before.holder}", field="device", value=loan.device, remedy=remedy)


def _with_devices(nodes: Iterable[NodePlan], own: dict[str, PlannedDevice]) -> Iterable[NodePlan]:
    left = dict(own)
    for node in nodes:
        mine = {name: left.pop(name) for name in list(left) if name.startswith(f"{node.node}/")}
        kept = [mine.pop(d.device, d) for d in node.devices]
        yield replace(node, devices=(*kept, *mine.values()))
    by_node: dict[str, list[PlannedDevice]] = {}
    for device in left.values():
        by_node.setdefault(device.device.partition("/")[0], []).append(device)
    for name, devices in sorted(by_node.items()):
        yield NodePlan(node=name, devices=tuple(devices))


def _cordoned(fleet: FleetState, reasons: Mapping[str, str]) -> FleetState:
    """Fleet with these devices out of service; nodes without any of them stay the same objects."""

    def cordoned(node: NodeStatus) -> NodeStatus:
        if not any(d.device in reasons for d in node.devices):
            return node
        devices = (replace(d, cordon=d.cordon or reasons.get(d.device, "")) for d in node.devices)
        return replace(node, devices=tuple(devices))

    return FleetState(tuple(map(cordoned, fleet.nodes)), fleet.stale)
