"""Resets: GPUs that need one are let go of, looked at from time to time, and taken back when they were reset.

A GPU is reset by a person, who must be able to: nothing may have it open, neither this agent nor any other process.
What is in the way is said in `missing`, with the commands. The other GPUs serve and are metered meanwhile: NVML is
shut down and initialised again without the one, which no Triton notices.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from power_agent.devices.core.reset_proof import BeforeReset, GpuLook, unreset_reason
from power_agent.devices.driver_calls import DriverCalls
from power_agent.devices.errors import DeviceError
from power_agent.devices.gpu_look import GpuLooker
from power_agent.devices.inventory import Inventory
from power_agent.slices.mig import mig_name
from power_agent.slices.node_state import Device, Node
from power_agent.watch.xid_watch import Quarantine
from trefoil.core.errors import Unavailable

Look = Callable[[str, str, str, Path | None], Awaitable[GpuLook]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A GPU that waits for its reset: how it was, why it waits, and under which name `missing` says so."""

    before: BeforeReset
    why: str
    subject: str


class Resets:
    """Resets that GPUs of this node wait for."""

    def __init__(
        self, node: Node, calls: DriverCalls, inventory: Inventory, quarantine: Quarantine, look: Look | None = None
    ) -> None:
        """look: looks at a GPU, by name, UUID, PCI address and the node's socket, without keeping it open."""
        self._node = node
        self._calls = calls
        self._inventory = inventory
        self._quarantine = quarantine
        self._look = look or GpuLooker()
        self._waiting: dict[str, _Waiting] = {}
        self._next_s: dict[str, float] = {}  # when to look, or to try to let go, again
        self._log = structlog.get_logger()

    def clear(self) -> None:
        """Clear all: the driver was loaded again, and with that all GPUs were reset and are open."""
        self._waiting.clear()
        self._next_s.clear()

    async def let_go(self, device: Device, why: str, *, waits_for_mig: bool = False) -> None:
        """Let go of a GPU that needs a reset; nothing of ours may run on it. Tried again later where it cannot be."""
        name, now_s = device.device, self._node.clock.monotonic_s()
        if now_s < self._next_s.get(name, 0.0) or self._calls.hangs(name):
            return
        self._next_s[name] = now_s + self._node.settings.reset_poll_s
        try:
            before = await self._calls.call(name, lambda: self._quarantine.before_reset(name, waits_for_mig))
            self._waiting[name] = _Waiting(before, why, mig_name(name) if waits_for_mig else name)
            await self._calls.let_go(name)
        except (DeviceError, Unavailable) as error:
            self._log.warning("letting go of a GPU", device=name, error=str(error))
        waiting = self._waiting.get(name)
        if waiting is None:  # the driver was loaded again meanwhile, and with that the GPU was reset
            self._inventory.take_back(name)
        elif name in self._inventory.released:
            self._log.warning("let go of a GPU, so that it can be reset", device=name, why=why)
            await self._say(name, waiting, "")

    async def is_back(self, device: Device) -> bool:
        """Whether a GPU that was let go of was reset, and is taken back; if not, that is said."""
        name, now_s = device.device, self._node.clock.monotonic_s()
        if now_s < self._next_s.get(name, 0.0):
            return False
        self._next_s[name] = now_s + self._node.settings.reset_poll_s
        waiting, place = self._waiting[name], self._inventory.place(name)
        try:
            seen = await self._look(name, device.uuid, place.bus_id, self._node.settings.node_socket)
            not_yet = unreset_reason(waiting.before, seen)
        except DeviceError as error:
            not_yet = error.message
        if self._waiting.get(name) is not waiting:
            return False  # the driver was loaded again meanwhile
        if not_yet:
            await self._say(name, waiting, not_yet)
            return False
        self._log.warning("a GPU was reset", device=name)
        self._node.set_missing(waiting.subject, "")
        del self._waiting[name], self._next_s[name]
        self._quarantine.release(name)
        self._inventory.take_back(name)
        return True

    async def _say(self, name: str, waiting: _Waiting, not_yet: str) -> None:
        try:
            remedy = await self._calls.call(name, lambda: self._inventory.reset_remedy(name))
        except (DeviceError, Unavailable) as error:  # of a simulated node that is away
            remedy = str(error)
        if self._waiting.get(name) is waiting:
            now = f"; {not_yet}" if not_yet and not_yet not in waiting.why else ""
            why = f"{waiting.why}{now}. This agent has let go of it. Remedy: {remedy}"
            self._node.report_missing(waiting.subject, why)
