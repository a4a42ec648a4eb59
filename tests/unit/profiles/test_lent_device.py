"""A device that a running system lends: held while it is measured on, given back whatever ends it."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from protos.power_agent.v1 import power_agent_pb2
from trefoil.core.catalog import Variant
from trefoil.core.device_types import A100_40GB, T4
from trefoil.core.errors import NotFound, SettingError, Unavailable
from trefoil.core.fleet import DeviceState, DeviceStatus, DeviceType, NodeStatus, SliceState, SliceStatus
from trefoil.core.plan import PlannedDevice
from trefoil.profiler.lent_device import LEASE_S, RENEWED_S, LentDevice, lendable
from trefoil.runtime import codec
from trefoil.runtime.clock import ManualClock

VARIANT = Variant("digits-m", 3, 0.95, "a test", 16, 0.1, 1000, "MIT")
STATUS = DeviceStatus("node0/gpu1", A100_40GB, DeviceState.ASLEEP, mig_current=True)


@dataclass
class Site:
    """A controller that lends what it is asked for, and the agent that puts it there."""

    calls: list[str] = field(default_factory=list)
    refuses: Exception | None = None
    slices: tuple[SliceStatus, ...] = ()
    limit_w: float = 400.0
    missing: tuple[str, ...] = ()

    async def call(self, method: str, request: Any) -> None:
        self.calls.append(method)
        if self.refuses is not None:
            raise self.refuses
        if method == "LendDevice":
            planned: PlannedDevice = codec.from_proto(request.device)
            self.slices = tuple(
                SliceStatus(part.key, state=SliceState.READY, hosted=part.hosted, grpc_target="127.0.0.1:1")
                for part in planned.slices
            )

    @property
    def status(self) -> DeviceStatus:
        return DeviceStatus("node0/gpu1", A100_40GB, slices=self.slices, power_limit_w=self.limit_w)

    async def GetNode(self, _request: Any, timeout: float) -> Any:
        node = NodeStatus("node0", devices=(self.status,), missing=self.missing)
        return power_agent_pb2.GetNodeResponse(node=codec.to_proto(node))


@pytest.fixture
def site() -> Site:
    return Site()


async def test_a_loan_is_renewed_until_it_is_given_back(site):
    clock = ManualClock()
    lent = LentDevice(site.call, site, STATUS, clock, holder="a test")
    one, other = lent.places(["1g.5gb", "7g.40gb"], [])
    assert (await lent.serve(one, "digits", VARIANT, 8)).hosted[0].variant == "digits-m"
    await clock.advance(3.5 * RENEWED_S)
    assert site.calls == ["LendDevice"] * 4
    assert (await lent.serve(other, "digits", VARIANT, 8)).key.slice_type == "7g.40gb"
    await lent.empty()
    await clock.advance(10 * RENEWED_S)
    assert site.calls[-1] == "ReturnDevice"
    assert site.calls.count("ReturnDevice") == 1
    await lent.empty()  # again: nothing is held any more
    assert site.calls.count("ReturnDevice") == 1


def test_limits_are_held_where_a_slice_is_the_whole_board():
    lent = LentDevice(None, None, STATUS, ManualClock(), holder="a test")
    found = [(place.shape.name, place.clock_mhz) for place in lent.places(["3g.20gb", "7g.40gb"], [1005, -150, -200])]
    assert found == [("3g.20gb", 1005), ("7g.40gb", 1005), ("7g.40gb", -150), ("7g.40gb", -200)]
    assert [place.clock_mhz for place in lent.places(["7g.40gb"], [-150])] == [1410, -150], "without a limit too"
    with pytest.raises(
        SettingError, match=r"--limits = \[50\]: .*no such power limit. Remedy: choose from 100 to 400 W"
    ):
        lent.places([], [-50, -200])
    *_, place = lent.places(["7g.40gb"], [-150])
    planned = place.hosting("digits", VARIANT, 8)
    assert (planned.clock_max_mhz, planned.power_limit_w) == (0, 150.0)


async def test_nothing_is_measured_before_a_limit_is_in_force(site):
    clock = ManualClock()
    lent = LentDevice(site.call, site, STATUS, clock, holder="a test")
    *_, place = lent.places(["7g.40gb"], [-150])
    serving = asyncio.create_task(lent.serve(place, "digits", VARIANT, 8))
    await clock.advance(5.0)
    assert not serving.done()
    site.limit_w = 150.0
    await clock.advance(5.0)
    assert serving.result().key.slice_type == "7g.40gb"
    site.missing = ("power_limit gpu1: not permitted. Remedy: run it as root",)
    with pytest.raises(Unavailable, match=r"--limits = 150: .*not in force: not permitted. Remedy: run it as root"):
        await lent.serve(place, "digits", VARIANT, 8)
    await lent.empty()


async def test_what_is_refused_is_not_given_back_and_a_controller_that_is_away_is_asked_until_the_lease_is_over(site):
    clock = ManualClock()
    site.refuses = SettingError("lent to another", field="device")
    lent = LentDevice(site.call, site, STATUS, clock, holder="a test")
    (place,) = lent.places(["7g.40gb"], [1005])
    with pytest.raises(SettingError, match="lent to another"):
        await lent.serve(place, "digits", VARIANT, 8)
    await lent.empty()
    assert site.calls == ["LendDevice"]
    site.refuses = None
    await lent.serve(place, "digits", VARIANT, 8)
    site.refuses = Unavailable("the controller is away")
    await clock.advance(LEASE_S - 1)
    assert lent.lost is None
    await clock.advance(3 * RENEWED_S)
    assert lent.lost is site.refuses
    site.refuses = None
    await asyncio.wait_for(lent.empty(), 5)


def test_the_device_that_is_missed_least_is_borrowed():
    def device(
        name: str, kind: DeviceType, slices: int, state: DeviceState = DeviceState.AWAKE, cordon: str = ""
    ) -> Any:
        return DeviceStatus(f"node0/{name}", kind, state, (SliceStatus(),) * slices, cordon=cordon)

    busy, light = device("gpu0", A100_40GB, 3), device("gpu1", A100_40GB, 1)
    asleep, broken = device("gpu3", A100_40GB, 0, DeviceState.ASLEEP), device("gpu4", T4, 0, cordon="fan")
    nodes = [NodeStatus("node0", devices=(busy, light, broken))]
    assert {k: d.device for k, (_, d) in lendable(nodes).items()} == {A100_40GB.name: "node0/gpu1"}
    more = [NodeStatus("node0", devices=(busy, light, asleep))]
    assert lendable(more)[A100_40GB.name][1] is asleep
    assert lendable(more, "node0/gpu0")[A100_40GB.name][1] is busy
    with pytest.raises(NotFound, match="node0/gpu4"):
        lendable(nodes, "node0/gpu4")
