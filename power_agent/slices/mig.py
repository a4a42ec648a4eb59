"""MIG: creates and destroys GPU and compute instances with bounded patience, and switches MIG mode on.

A driver says IN_USE for a while after the last process of an instance is gone. Its context is torn down late, or a
monitoring agent holds a handle. Some drivers report a destruction that has not happened yet. Both pass with time or
never: so a few tries with growing pauses, then the error with its holders.

MIG mode is switched on where the operator has asked for it (`mig_mode = enable`) and the GPU is empty; never off. On
Hopper it is in force at once and gone with the driver. On Ampere it stays pending until the idle GPU is reset, which
needs that no process has it open: that is for a person to do, once the agent has let go of it (`watch/resets.py`).
"""

from collections.abc import Callable
from typing import Final, TypeVar

import structlog

from power_agent.devices.driver_calls import DriverCalls
from power_agent.devices.errors import DeviceBusy, DeviceError, NoPermission, NoRoom
from power_agent.devices.inventory import Inventory, ObservedSlice
from power_agent.slices.node_state import Device, Node
from trefoil.core.fleet import DeviceKind, DeviceState, SliceKey
from trefoil.runtime.clock import Clock

T = TypeVar("T")
ENABLE: Final = "enable"
BACKOFF_S: Final = 0.1  # first pause between tries while an instance is in use; it doubles
MIG_WAITS: Final = "MIG mode waits for a reset of the GPU"


class MigInstances:
    """MIG instances of a node: the steps create_gi, create_ci, destroy_ci, destroy_gi, all idempotent."""

    def __init__(
        self, calls: DriverCalls, inventory: Inventory, clock: Clock, retries_max: int, backoff_s: float = BACKOFF_S
    ) -> None:
        self._calls = calls
        self._inventory = inventory
        self._clock = clock
        self._retries_max = retries_max
        self._backoff_s = backoff_s

    async def create_gi(self, key: SliceKey) -> ObservedSlice:
        """Create a GPU instance in exactly that place.

        Raises:
            NoRoom: something else is there, still after all retries.
        """
        make = self._inventory.create_gpu_instance
        created = await self._retry(key, lambda: make(key.device, key.slice_type, key.start))
        assert created.key == key, (created.key, key)
        return created

    async def create_ci(self, key: SliceKey) -> ObservedSlice:
        """Create the one full-width compute instance of a GPU instance; the MIG UUID is new each time."""
        return await self._retry(key, lambda: self._inventory.create_compute_instance(key))

    async def destroy_ci(self, key: SliceKey) -> None:
        """Destroy the compute instances of a GPU instance.

        Raises:
            DeviceBusy: processes still hold it after all retries.
        """
        await self._retry(key, lambda: self._inventory.destroy_compute_instances(key))

    async def destroy_gi(self, key: SliceKey) -> None:
        """Destroy a GPU instance.

        Raises:
            DeviceBusy, DeviceError: it is still there after all retries.
        """
        await self._retry(key, lambda: self._inventory.destroy_gpu_instance(key), also_unexplained=True)

    async def check_unused(self, key: SliceKey, uuid: str) -> None:
        """Check that no process computes on a GPU that is about to serve as a whole: it would slow the planned models.

        Raises:
            DeviceBusy: a process does, also after all retries.
        """

        def look() -> None:
            if pids := self._inventory.pids(uuid):
                found = ", ".join(map(str, pids))
                remedy = f"stop them, or take the GPU out of service: trefoil node drain {key.device}"
                raise DeviceBusy(f"{key.device}: processes {found} compute on it", remedy=remedy, holders=pids)

        await self._retry(key, look)

    async def list(self, device: str) -> tuple[ObservedSlice, ...]:
        """List the instances that the driver knows now."""
        return await self._calls.call(device, lambda: self._inventory.gpu_instances(device))

    async def _retry(self, key: SliceKey, call: Callable[[], T], *, also_unexplained: bool = False) -> T:
        pause_s = self._backoff_s
        for _ in range(self._retries_max):
            try:
                return await self._calls.call(key.device, call)
            except (DeviceBusy, NoRoom):
                pass  # passes with time, or is raised by the last try below
            except DeviceError as error:
                # "reported destroyed, but still listed" carries no NVML code; every other refusal is final
                if not also_unexplained or error.code:
                    raise
            await self._clock.sleep(pause_s)
            pause_s *= 2
        return await self._calls.call(key.device, call)


def mig_name(device: str) -> str:
    """Name under which `missing` says what keeps MIG mode of a GPU from being on."""
    return f"{device} mig"


def waits_for_reset(device: Device) -> bool:
    """Whether the MIG mode of a GPU was asked for and comes into force by a reset: until then nothing can run on it."""
    return device.type.kind == DeviceKind.MIG_GPU and device.mig_pending and not device.mig_current


async def enable_mig(node: Node, calls: DriverCalls, inventory: Inventory, device: Device) -> None:
    """Enable MIG mode of one device if it may be done now; what is in the way is said in `missing`.

    Raises:
        DeviceError: the GPU is lost.
    """
    what = mig_name(device.device)
    if device.type.kind != DeviceKind.MIG_GPU or device.state == DeviceState.LOST:
        return
    if device.mig_current:
        node.set_missing(what, "")
        return
    if device.mig_pending:
        node.set_missing(what, MIG_WAITS)  # until it was let go of: then what there is to do stands here
    elif node.settings.mig_mode != ENABLE:
        by_hand = f"sudo nvidia-smi -i {device.uuid} -mig 1"
        node.set_missing(what, f"MIG mode is off: setting mig_mode = enable, or {by_hand} while the GPU is idle")
    elif pids := await calls.call(device.device, lambda: inventory.pids(device.uuid)):
        holders = ", ".join(map(str, pids))
        node.set_missing(what, f"MIG mode cannot be switched on while processes {holders} use the GPU: stop them")
    else:
        await _switch_on(node, calls, inventory, device)


async def _switch_on(node: Node, calls: DriverCalls, inventory: Inventory, device: Device) -> None:
    log = structlog.get_logger()
    try:
        seen = await calls.call(device.device, lambda: inventory.set_mig_mode(device.device, True))
    except NoPermission as error:
        node.set_missing(mig_name(device.device), str(error))
        return
    except DeviceError as error:
        log.warning("MIG mode could not be switched on", device=device.device, why=str(error))
        raise
    device.mig_current, device.mig_pending = seen.mig_current, seen.mig_pending
    log.warning("MIG mode asked for", device=device.device, current=seen.mig_current, pending=seen.mig_pending)
    node.changed()
    if seen.mig_current or seen.mig_pending:
        await enable_mig(node, calls, inventory, device)  # says what is left to do
    else:
        why = "the driver took the request for MIG mode and did nothing: see the kernel's log"
        node.set_missing(mig_name(device.device), why)
