"""Xid watch: a fatal Xid fences its GPU at once, before polling could notice; every one is logged and counted.

A GPU may continue answering after a fatal Xid although no result of it can be trusted. So it stays in quarantine until
there is proof of a reset (`resets`), or the driver was loaded again. Newer drivers say themselves what a GPU needs;
that also tells an agent that was not there when the Xid came.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import structlog

from power_agent.devices.core.reset_proof import BeforeReset
from power_agent.devices.errors import DeviceLost
from power_agent.devices.inventory import Inventory
from power_agent.devices.xid_events import EventWatch, GpuEvent
from power_agent.slices.node_state import Device, Node
from trefoil.core.fleet import DeviceKind

RENEW_S: Final = 1.0  # how soon a driver that was loaded again is watched again
QUEUE_MAX: Final = 1000  # a GPU that fails may report thousands


class Quarantine:
    """GPUs that must not be used although they may answer: `add` on the event loop, `why` in a device's thread."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._whys: dict[str, str] = {}

    def add(self, device: str, why: str) -> None:
        """Add a GPU that must not be used from now on."""
        self._whys.setdefault(device, why)

    def clear(self) -> None:
        """Clear all: the driver was loaded again, and all GPUs were reset by it."""
        self._whys.clear()

    def release(self, device: str) -> None:
        """Release a GPU that was reset."""
        self._whys.pop(device, None)

    def reason(self, device: str) -> str:
        """Reason why a GPU must not be used; empty when it may. Blocking.

        Raises:
            DeviceError: it does not answer at all.
        """
        action = self._inventory.recovery_action(device)
        return self._whys.get(device) or (f"its driver asks for {action}" if action else "")

    def before_reset(self, device: str, waits_for_mig: bool) -> BeforeReset:
        """What is known of a GPU that is about to be let go of. Blocking."""
        gpus = self._inventory
        try:
            action, counter_j, persistence = (
                gpus.recovery_action(device), gpus.energy_j(device), gpus.persistence_mode(device)
            )  # fmt: skip
        except DeviceLost:
            return BeforeReset(waits_for_mig=waits_for_mig)  # when it answers again it was reset
        condemned = device in self._whys or bool(action)
        return BeforeReset(condemned, bool(action), waits_for_mig, counter_j, persistence)


class XidWatch:
    """Watch of Xid events: reports each, and fences the GPU of a fatal one."""

    def __init__(
        self,
        node: Node,
        inventory: Inventory,
        quarantine: Quarantine,
        fence: Callable[[Device, str], Awaitable[None]],
        poll_soon: Callable[[], None],
    ) -> None:
        """fence: takes a device out of use; poll_soon: has all devices polled, when an event does not say which."""
        self._node = node
        self._quarantine = quarantine
        self._fence = fence
        self._poll_soon = poll_soon
        self._queue: asyncio.Queue[GpuEvent] = asyncio.Queue(QUEUE_MAX)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch = EventWatch(inventory, node.clock, self._on_event)
        self._inventory = inventory
        self._watched: object = None
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Act on events until cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            released = self._inventory.released
            if self._watched != (self._node.driver_load_id, released):
                self._watched = (self._node.driver_load_id, released)
                gpus = [d.device for d in self._node.devices.values() if d.type.kind != DeviceKind.CPU]
                self._watch.start([gpu for gpu in gpus if gpu not in released])
            event = None
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    event = await self._queue.get()
            if event is not None:
                await self.act(event)

    async def act(self, event: GpuEvent) -> None:
        """Report an event, and fence its GPU when it is fatal."""
        device = self._node.devices.get(event.device)
        where = event.device or "unknown"
        self._node.metrics.inc("trefoil_device_xids_total", device=where, xid=str(event.xid))
        log = self._log.error if event.fatal else self._log.warning
        log("xid", device=where, xid=event.xid, why=event.text, instance=event.gi_id, fatal=event.fatal)
        if not event.fatal:
            return
        if device is None:
            self._poll_soon()
            return
        self._quarantine.add(device.device, f"{event.text}; reset the GPU")
        await self._fence(device, f"{event.text}; reset the GPU")

    async def stop(self) -> None:
        """Stop listening; before NVML is shut down."""
        await asyncio.to_thread(self._watch.stop)

    def _on_event(self, event: GpuEvent) -> None:
        """In the watching thread."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended: so has the agent
                loop.call_soon_threadsafe(self._enqueue, event)

    def _enqueue(self, event: GpuEvent) -> None:
        if self._queue.full():
            self._log.warning("xid dropped", xid=event.xid, device=event.device)
            return
        self._queue.put_nowait(event)
