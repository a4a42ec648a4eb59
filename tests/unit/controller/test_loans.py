"""A device that is lent for a measurement: its plan is none to go back to, and its joules belong to no family."""

from collections.abc import Callable
from typing import Any

import pytest

from protos.controller.v1 import controller_pb2 as pb
from tests.support.virtual.planner import FAMILY
from tests.support.virtual.system import CATALOG, System, history
from tests.unit.controller.test_receipt_shell import HOUR, World
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import DeviceState, Hosted, SliceKey
from trefoil.core.plan import PlannedDevice, PlannedSlice
from trefoil.runtime import codec

HOLDER = "a profiler"


def lending(device: str, version: int) -> pb.LendDeviceRequest:
    variant = CATALOG.family(FAMILY).variants[version - 1]
    part = PlannedSlice(SliceKey(device, "7g.40gb", 0, 8), (Hosted(FAMILY, variant.name, version, 0, 1, 1, 8),), 4)
    planned = PlannedDevice(device, DeviceState.AWAKE, (part,))
    return pb.LendDeviceRequest(holder=HOLDER, device=codec.to_proto(planned), lease_s=60.0, force=True)


@pytest.mark.parametrize("restarts", [False, True])
def test_rollback_after_a_measurement_goes_to_a_plan_of_before(restarts: bool) -> None:
    seen: dict[str, Any] = {}

    def work(system: System) -> None:
        node = system.nodes["node0"]
        device = sorted(node.devices)[0]

        def asks(at_s: float, name: str, method: str, request: Any) -> None:
            async def ask() -> None:
                try:
                    seen[name] = await getattr(system.controller.service, method)(request, None)
                except TrefoilError as error:
                    seen[name] = error

            system.loop.call_later(at_s, lambda: system.controller.process.start(system.loop, ask()))

        def then(at_s: float, does: Callable[[], Any]) -> None:
            system.loop.call_later(at_s, does)

        asks(10.0, "first", "LendDevice", lending(device, 1))
        asks(12.0, "second", "LendDevice", lending(device, 2))
        asks(14.0, "lent", "GetPlan", pb.GetPlanRequest())
        if restarts:
            then(15.0, system.controller.kill)
            then(15.5, system.controller.start)
        else:
            asks(15.0, "given back", "ReturnDevice", pb.ReturnDeviceRequest(device=device, holder=HOLDER))
        asks(20.0, "now", "GetPlan", pb.GetPlanRequest())
        asks(21.0, "back", "Rollback", pb.RollbackRequest())
        asks(23.0, "after", "GetPlan", pb.GetPlanRequest())

    history(3, work)
    assert seen["lent"].loans
    assert lent_slices(seen["lent"])
    assert not lent_slices(seen["now"])
    assert not isinstance(seen["after"], TrefoilError)
    assert not lent_slices(seen["after"]), f"{seen['back']} brought back what was measured"


def lent_slices(answer: Any) -> list[str]:
    """Devices of a plan whose slices no route leads to: only what is lent is so."""
    plan = codec.from_proto(answer.plan)
    routed = {target.slice for route in plan.routes for target in route.targets}
    return [d.device for n in plan.nodes for d in n.devices if d.slices and not {s.key for s in d.slices} & routed]


async def test_joules_of_a_lent_device_are_no_familys_and_spoil_no_receipts(tmp_path):
    world = World(tmp_path)
    await world.start()
    for _ in range(5):
        await world.second(0.6, receipt_j=6.0)
    await world.second(0.6, receipt_j=6.0, lent=["n/gpu0"])  # ended as the loan began
    for _ in range(5):
        await world.second(0.6, lent=["n/gpu0"])
    for _ in range(5):
        await world.second(0.6, receipt_j=6.0)
    await world.accountant.flush()
    totals = await world.state.totals(world.state.keys.totals("digits", HOUR))
    assert totals["joules"] == pytest.approx(11 * 6.0)
    assert totals["receipt_joules"] == pytest.approx(totals["active_joules"]), "its receipts stay right"
