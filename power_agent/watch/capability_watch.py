"""Capability watch: keeps `capabilities` and `missing` of the node true; probes again when what they rest on changed.

Per device in that device's own worker, so that a GPU that hangs delays no other.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from power_agent.devices.dcgm import Dcgm
from power_agent.devices.driver_calls import DriverCalls
from power_agent.devices.errors import DeviceError
from power_agent.devices.gpus import ObservedDevice
from power_agent.devices.inventory import Inventory
from power_agent.runtimes.base import Runtime
from power_agent.slices.node_state import Node
from power_agent.watch.capabilities import Capabilities, probe_devices
from trefoil.core.errors import Unavailable
from trefoil.core.fleet import DeviceKind, DeviceState

PERIOD_S: Final = 2.0
DCGM: Final = "dcgm"
CAPABILITIES: Final = "capabilities"
MODE_OFF: Final = "MIG mode "  # `mig` says these itself, with what it is doing about them


class CapabilityWatch:
    """Watch of the node's capabilities. `found`: what the GPUs can do, as last probed."""

    def __init__(
        self,
        node: Node,
        inventory: Inventory,
        calls: DriverCalls,
        rights: Callable[[], tuple[str, str]],
        runtime: Runtime,
        dcgm: Dcgm | None,
    ) -> None:
        """rights: why nothing may be changed, and why MIG may not be configured (`capabilities`); it may block."""
        self._node = node
        self._inventory = inventory
        self._calls = calls
        self._rights = rights
        self._runtime = runtime
        self._dcgm = dcgm
        self._probed_for: object = None
        self._slices_lack: Mapping[str, str] = {}
        self._reported: set[str] = set()
        self.found = Capabilities()
        self._log = structlog.get_logger()

    async def open(self) -> None:
        """Probe for the first time; until then nothing is known."""
        if self._dcgm is not None:
            self._dcgm.start()
        await self.refresh()

    def close(self) -> None:
        """Stop reading DCGM."""
        if self._dcgm is not None:
            self._dcgm.close()

    async def run(self) -> None:
        """Probe again every period until cancelled."""
        while True:
            await self.refresh()
            await self._node.clock.sleep(PERIOD_S)

    async def refresh(self) -> None:
        """Probe again if something has changed since the last time, and publish."""
        gpus = [d for d in self._node.devices.values() if d.type.kind != DeviceKind.CPU]
        released = self._inventory.released  # that wait for a reset
        awake = [d for d in gpus if d.state != DeviceState.LOST and d.device not in released]
        probe_for = (self._node.driver_load_id, [(d.device, d.mig_current, d.mig_pending) for d in awake])
        if probe_for != self._probed_for:
            try:
                not_root, no_mig_device = await asyncio.to_thread(self._rights)
            except Unavailable as error:  # a simulated node that is away: asked again next time
                self._node.report_missing(CAPABILITIES, str(error))
                return
            self._node.report_missing(CAPABILITIES, "")
            probed = await asyncio.gather(*(self._probe(d.device, not_root, no_mig_device) for d in awake))
            devices = {name: whys for one in probed for name, whys in one.devices.items()}
            self.found = Capabilities(devices, {"root": not_root} if devices else {})
            self._probed_for = probe_for
            self._log.info("capabilities", have=self.found.have, missing=self.found.missing)
        try:
            self._slices_lack = await asyncio.to_thread(self._runtime.missing, gpus=bool(gpus))
        except Unavailable:
            pass  # the listing reports it; the last findings stay
        self._publish()

    async def _probe(self, device: str, not_root: str, no_mig_device: str) -> Capabilities:
        def probe() -> Capabilities:
            observed: ObservedDevice = self._inventory.observe(device)
            return probe_devices(self._inventory, [observed], not_root, no_mig_device)

        try:
            return await self._calls.call(device, probe)
        except (DeviceError, Unavailable) as error:
            self._log.warning("not probed", device=device, why=str(error))
            return Capabilities()

    def _publish(self) -> None:
        have = {*self.found.have}
        if not self._lacks("triton"):
            have.add("triton")
        if self._runtime.name in ("docker", "kubernetes"):
            have.add(self._runtime.name)
        if any(d.type.kind == DeviceKind.CPU for d in self._node.devices.values()) and not self._lacks("rapl"):
            have.add("rapl")
        missing = {name: why for name, why in self.found.missing.items() if not why.startswith(MODE_OFF)}
        missing |= self._slices_lack
        if self._dcgm is not None:
            if self._dcgm.unavailable_reason:
                missing[DCGM] = f"{self._dcgm.unavailable_reason}. Until then activity is GPM's or Triton's"
            else:
                have.add(DCGM)
        if self._node.settings.meter != "nvml":
            have.discard("energy_counter")
            missing["energy_counter"] = f"not wanted. Remedy: setting meter = nvml, now {self._node.settings.meter}"
        capabilities = tuple(sorted(have))
        if capabilities != self._node.capabilities:
            self._node.capabilities = capabilities
            self._node.changed()
        for name in self._reported - set(missing):
            self._node.set_missing(name, "")
        for name, why in missing.items():
            self._node.set_missing(name, why)
        self._reported = set(missing)

    def _lacks(self, name: str) -> bool:
        return any(entry.startswith(f"{name}: ") for entry in self._node.missing)
