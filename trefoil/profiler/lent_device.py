"""A device that the controller of a running system lends: one variant at a time on one slice of it, others serve on.

The loan is renewed for as long as this process uses the device, and given back at the end. If the process is killed,
the loan ends with the lease.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from protos.controller.v1 import controller_pb2
from trefoil.core.catalog import Variant
from trefoil.core.errors import NotFound, TrefoilError
from trefoil.core.fleet import DeviceState, DeviceStatus, NodeStatus, SliceState, SliceStatus
from trefoil.core.plan import PlannedDevice
from trefoil.profiler.places import NodePlace, places_on, until
from trefoil.runtime import codec
from trefoil.runtime.clock import Clock

LEASE_S: Final = 30.0
RENEWED_S: Final = 8.0

Call = Callable[[str, Any], Awaitable[Any]]
"""Calls a method of the controller by name; raises TrefoilError."""


class LentDevice:
    """One device of a running system, lent by its controller. `empty` gives it back."""

    def __init__(
        self, call: Call, agent: Any, status: DeviceStatus, clock: Clock, *, holder: str, force: bool = False
    ) -> None:
        """`call` asks the controller, `agent` is a stub of the node's power agent, `force`: whatever others miss."""
        self._call, self._agent, self._status, self._clock = call, agent, status, clock
        self._holder, self._force = holder, force
        self._planned: PlannedDevice | None = None
        self._renewing: asyncio.Task[None] | None = None
        self.lost: TrefoilError | None = None

    def places(self, slices: Sequence[str], clocks: Sequence[int]) -> list[NodePlace]:
        """Places to measure at: `places_on`, with what it raises."""
        return places_on((self._status,), slices, clocks)

    async def serve(self, place: NodePlace, family: str, variant: Variant, max_batch: int) -> SliceStatus:
        """Serve one variant on one slice of the device, and wait until it is READY.

        Raises:
            TrefoilError: the controller does not lend it; says why. Unavailable: the slice does not get ready.
        """
        planned = place.hosting(family, variant, max_batch)
        await self._ask(planned)
        self._planned = planned
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(), name="loan")
        part = planned.slices[0]

        def ready(node: NodeStatus) -> SliceStatus | None:
            parts = (found for device in node.devices for found in device.slices)
            here = next((found for found in parts if found.key == part.key), None)
            serves = here is not None and here.state == SliceState.READY and here.hosted == part.hosted
            return here if serves and place.limits(node) else None

        _, found = await until(self._agent, self._clock, ready)
        return found

    async def empty(self) -> None:
        """Give the device back; the controller plans with it again."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
        if self._planned is not None:
            request = controller_pb2.ReturnDeviceRequest(device=self._planned.device, holder=self._holder)
            self._planned = None
            await self._call("ReturnDevice", request)

    async def _ask(self, planned: PlannedDevice) -> None:
        await self._call(
            "LendDevice",
            controller_pb2.LendDeviceRequest(
                holder=self._holder, device=codec.to_proto(planned), lease_s=LEASE_S, force=self._force
            ),
        )

    async def _renew(self) -> None:
        """Ask again well before the lease is over; a controller that is away is asked until it is."""
        asked_s = self._clock.monotonic_s()
        while self.lost is None:
            await self._clock.sleep(RENEWED_S)
            assert self._planned is not None
            try:
                await self._ask(self._planned)
                asked_s = self._clock.monotonic_s()
            except TrefoilError as error:
                if self._clock.monotonic_s() - asked_s > LEASE_S:
                    self.lost = error


def lendable(nodes: Sequence[NodeStatus], named: str = "") -> Mapping[str, tuple[NodeStatus, DeviceStatus]]:
    """Device to borrow of each type, the one whose loss costs least: asleep, else with the fewest slices.

    Raises:
        NotFound: no device of that name is in service, or none at all.
    """
    found = [(node, d) for node in nodes for d in node.devices if d.usable and named in ("", d.device)]
    if not found:
        every = sorted(d.device for node in nodes for d in node.devices)
        raise NotFound(f"no device {named or 'in service'}", remedy=f"name one of {every} that is in service")
    best: dict[str, tuple[NodeStatus, DeviceStatus]] = {}
    for node, device in sorted(found, key=lambda pair: (*_cost(pair[1]), pair[1].device)):
        best.setdefault(device.type.name, (node, device))
    return best


def _cost(device: DeviceStatus) -> tuple[bool, int]:
    return device.state != DeviceState.ASLEEP, len(device.slices)
