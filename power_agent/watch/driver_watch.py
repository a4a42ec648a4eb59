"""Driver watch: a GPU that is lost or comes back, instances that other software makes or destroys, a driver that is
loaded again. It declares and fences; `reconciler` fixes; what others made is reported and never touched.

Each device is polled on its own, so that one whose driver hangs delays no other.
"""

import asyncio
from collections.abc import Sequence

import structlog

from power_agent.devices.driver_calls import DriverCalls
from power_agent.devices.errors import DeviceError, DeviceLost, NodeUnreachable
from power_agent.devices.gpus import driver_load_id
from power_agent.devices.inventory import Inventory, ObservedSlice
from power_agent.slices.adoption import list_devices
from power_agent.slices.mig import MIG_WAITS, enable_mig, waits_for_reset
from power_agent.slices.node_state import Device, Node
from power_agent.slices.reconciler import Reconciler
from power_agent.slices.slice_state import Slice
from power_agent.slices.step_executor import StepExecutor
from power_agent.watch.resets import Look, Resets
from power_agent.watch.xid_watch import Quarantine
from trefoil.core.errors import TrefoilError, Unavailable
from trefoil.core.fleet import DeviceKind, DeviceState, SliceKey


class DriverWatch:
    """Watch of the driver: compares what it says with what the agent made."""

    def __init__(
        self,
        node: Node,
        reconciler: Reconciler,
        executor: StepExecutor,
        calls: DriverCalls,
        inventory: Inventory,
        quarantine: Quarantine,
        look: Look | None = None,
    ) -> None:
        """look: how a GPU that was let go of is looked at; None: by a separate process."""
        self._node = node
        self._reconciler = reconciler
        self._executor = executor
        self._calls = calls
        self._inventory = inventory
        self._quarantine = quarantine
        self._resets = Resets(node, calls, inventory, quarantine, look)
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._next_poll_s = 0.0
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Poll the driver every `health_poll_s`, its devices every `drift_poll_s`, until cancelled."""
        settings, clock = self._node.settings, self._node.clock
        while True:
            try:
                await self._check_driver()
                if self._node.driver_load_id:  # else none is loaded, and `missing` says so
                    self._node.report_missing("driver", "")
            except (DeviceError, Unavailable) as error:
                self._node.report_missing("driver", str(error))
            else:
                if clock.monotonic_s() >= self._next_poll_s:
                    self._next_poll_s = clock.monotonic_s() + settings.drift_poll_s
                    self._poll_all()
            self._raise_bugs()
            await clock.sleep(settings.health_poll_s)

    def poll_soon(self) -> None:
        """Poll all devices at the next turn of `run`."""
        self._next_poll_s = 0.0

    async def stop(self) -> None:
        """Cancel polls in flight."""
        for look in self._polls.values():
            look.cancel()
        await asyncio.gather(*self._polls.values(), return_exceptions=True)

    def _poll_all(self) -> None:
        for device in self._node.devices.values():
            if device.device not in self._polls and device.type.kind != DeviceKind.CPU:
                self._polls[device.device] = asyncio.create_task(self.poll(device), name=f"look at {device.device}")

    def _raise_bugs(self) -> None:
        for name, look in list(self._polls.items()):
            if look.done():
                del self._polls[name]
                if not look.cancelled():
                    look.result()  # a bug in a look ends the service

    # --- the driver ---------------------------------------------------------------------------------------------------

    async def _check_driver(self) -> None:
        """The driver was loaded again: nothing that it held exists any more."""
        loaded = driver_load_id(self._node.settings.driver_marker)
        if loaded == self._node.driver_load_id:
            if loaded and not self._inventory.is_open:
                await self._calls.resume()
            return
        self._log.warning("driver loaded again", was=self._node.driver_load_id, now=loaded)
        observed = await self._calls.reopen()
        self._node.driver_load_id = loaded
        self._quarantine.clear()
        self._resets.clear()
        self._node.journal.driver_changed(loaded)
        kinds = {device.device: device.type.kind for device in self._node.devices.values()}
        parts = [part for part in self._node.slices.values() if kinds[part.key.device] != DeviceKind.CPU]
        for part in parts:
            self._reconciler.interrupt(part)
            part.fail("the driver was loaded again", self._node.clock.now_s())
            part.failures, part.retry_at_s = 0, 0.0  # its last starts failed for want of a driver
        await asyncio.gather(*(self._end_process(part) for part in parts if part.running))
        for part in parts:
            if kinds[part.key.device] == DeviceKind.MIG_GPU:
                _forget_instance(part)
        await list_devices(self._node, self._calls, self._inventory, observed)
        for device in self._node.devices.values():
            if device.type.kind != DeviceKind.CPU and device.state != DeviceState.LOST:
                self._node.set_device(device, DeviceState.ASLEEP)
                await enable_mig(self._node, self._calls, self._inventory, device)
        self._node.changed()

    async def _end_process(self, part: Slice) -> None:
        """A Triton whose device is gone cannot compute any more, but may live on."""
        try:
            await self._executor.stop_process(part)
        except TrefoilError as error:
            self._log.info("nothing to stop", slice=part.key.name, why=str(error))
            await self._executor.process_ended(part)

    # --- one device ---------------------------------------------------------------------------------------------------

    async def poll(self, device: Device) -> None:
        """Poll one device: whether it answers, its MIG mode, and its instances against those that the agent made.

        One that needs a reset is let go of, and from then on only looked at from time to time.
        """
        if device.device in self._inventory.released and not await self._resets.is_back(device):
            return
        own, was_lost = self._slices_of(device), device.state == DeviceState.LOST
        had = {part.key for part in own if part.has_instance}  # before the driver is asked
        moving = {part.key for part in own if self._reconciler.busy(part)}
        try:
            listed = await self._list_instances(device)
            await enable_mig(self._node, self._calls, self._inventory, device)
        except DeviceLost as error:
            await self.fence(device, str(error))
            await self._let_go(device, error.message)
            return
        except (DeviceError, Unavailable) as error:
            self._node.report_missing(device.device, str(error))
            return
        if device.state == DeviceState.LOST and not was_lost:
            return  # fenced for what came after this look began
        self._node.report_missing(device.device, "")
        if device.type.kind == DeviceKind.MIG_GPU:
            await self._compare_instances(device, listed, had, moving)
        if waits_for_reset(device):
            await self._let_go(device, MIG_WAITS, waits_for_mig=True)
        if device.state == DeviceState.LOST:
            self._log.info("device back", device=device.device)
            self._node.set_device(device, DeviceState.AWAKE if listed else DeviceState.ASLEEP)

    def _slices_of(self, device: Device) -> list[Slice]:
        return [part for part in self._node.slices.values() if part.key.device == device.device]

    async def _list_instances(self, device: Device) -> tuple[ObservedSlice, ...]:
        """What is on it now; on a whole GPU nothing can be, but it is asked whether it is there."""

        ours = any(part.running or self._reconciler.busy(part) for part in self._slices_of(device))
        holders: tuple[int, ...] = ()

        def read() -> tuple[bool, bool, tuple[str, ...], tuple[ObservedSlice, ...]]:
            nonlocal holders
            if why := self._quarantine.reason(device.device):
                raise DeviceLost(why)
            if device.type.kind != DeviceKind.MIG_GPU:
                self._inventory.clock_mhz(device.device)
                holders = () if ours else self._inventory.pids(device.uuid)
                return *self._inventory.mig_mode(device.device), (), ()
            current, pending = self._inventory.mig_mode(device.device)
            if not current:
                return current, pending, (), ()
            lacks = self._inventory.lacks(device.device, device.type)
            return current, pending, lacks, self._inventory.gpu_instances(device.device)

        device.mig_current, device.mig_pending, device.lacks, listed = await self._calls.call(device.device, read)
        stays = tuple(pid for pid in holders if pid in device.holders)  # not of a process of ours that has just ended
        device.holders = holders
        closed = self._node.closed_reason(device, device.mig_current, stays)
        if closed != device.closed:
            device.closed = closed
            self._node.changed()
        return listed

    async def fence(self, device: Device, why: str) -> None:
        """Fence a lost GPU: end what runs there, so that it can be reset; touch nothing else until it answers again."""
        if device.device in self._inventory.released:
            return  # it was, and says why
        if device.state != DeviceState.LOST:
            self._log.error("device lost", device=device.device, why=why)
            self._node.set_device(device, DeviceState.LOST)
        self._node.report_missing(device.device, why)
        for part in self._slices_of(device):
            if not self._reconciler.busy(part):
                part.fail(f"device lost: {why}", self._node.clock.now_s())
                await self._stop_process(part)

    async def _let_go(self, device: Device, why: str, *, waits_for_mig: bool = False) -> None:
        """Let go of a GPU that needs a reset, once nothing of ours runs there."""
        if not any(part.running or self._reconciler.busy(part) for part in self._slices_of(device)):
            await self._resets.let_go(device, why, waits_for_mig=waits_for_mig)

    async def _compare_instances(
        self, device: Device, listed: Sequence[ObservedSlice], had: set[SliceKey], moving: set[SliceKey]
    ) -> None:
        """`had`, `moving`: our slices that had an instance, or a step at work, before the driver was asked."""
        instances = {seen.key: seen for seen in listed}
        own = self._slices_of(device)
        moving = moving | {part.key for part in own if self._reconciler.busy(part)}
        for part in own:
            if not part.has_instance or part.key in moving or part.key not in had:
                continue  # it was not there, or a step has been at it since: the next look will tell
            seen = instances.get(part.key)
            if seen is None:
                await self._on_vanished(part, "another process destroyed its instance")
                _forget_instance(part)
                self._node.changed()
            elif seen.ci_id is None and part.has_compute:
                await self._on_vanished(part, "another process destroyed its compute instance")
                part.has_compute, part.mig_uuid = False, ""
                self._node.changed()
            elif (seen.ci_id is not None, seen.mig_uuid) != (part.has_compute, part.mig_uuid):
                part.has_compute, part.mig_uuid = seen.ci_id is not None, seen.mig_uuid
                self._node.changed()
        known = {part.key for part in own if part.has_instance} | moving
        foreign = tuple(sorted(set(instances) - known))
        if foreign != device.foreign:
            device.foreign = foreign
            self._log.warning("drift", device=device.device, drift=device.drift)
            self._node.report_unproven()
            self._node.changed()

    async def _on_vanished(self, part: Slice, why: str) -> None:
        self._log.warning("instance vanished", slice=part.key.name, why=why)
        part.fail(why, self._node.clock.now_s())
        await self._stop_process(part)

    async def _stop_process(self, part: Slice) -> None:
        try:
            await self._executor.stop_process(part)
        except NodeUnreachable as error:
            self._log.warning("it ended with its node", slice=part.key.name, why=str(error))
            await self._executor.process_ended(part)


def _forget_instance(part: Slice) -> None:
    part.has_instance = part.has_compute = False
    part.mig_uuid = ""
