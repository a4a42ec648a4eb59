"""Creates and destroys MIG instances through the inventory, off the event loop, with bounded patience.

A driver says IN_USE for a while after the last process of an instance is gone (its context is torn down late; a
monitoring agent may hold a handle), and some report a destruction that has not happened yet. Both pass with time or
never: so a few tries with growing pauses, then the error with its holders. One thread, because the driver serialises
these calls anyway.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from power_agent.devices.errors import DeviceBusy, DeviceError, NoRoom
from power_agent.devices.inventory import Inventory, ObservedDevice, ObservedSlice
from trefoil.core.fleet import SliceKey
from trefoil.runtime.clock import Clock

T = TypeVar("T")


class Mig:
    """The verbs create_gi, create_ci, destroy_ci, destroy_gi; all idempotent."""

    def __init__(
        self, inventory: Inventory, thread: Executor, clock: Clock, retries_max: int, backoff_s: float
    ) -> None:
        self._inventory = inventory
        self._thread = thread
        self._clock = clock
        self._retries_max = retries_max
        self._backoff_s = backoff_s

    async def create_gi(self, key: SliceKey) -> ObservedSlice:
        """A GPU instance in exactly that place.

        Raises:
            NoRoom: something else is there, still after all retries.
        """
        created = await self._try(lambda: self._inventory.create_gpu_instance(key.device, key.slice_type, key.start))
        assert created.key == key, (created.key, key)
        return created

    async def create_ci(self, key: SliceKey) -> ObservedSlice:
        """Its one full-width compute instance; the MIG UUID is new each time."""
        return await self._try(lambda: self._inventory.create_compute_instance(key))

    async def destroy_ci(self, key: SliceKey) -> None:
        """Raises DeviceBusy when processes still hold it after all retries."""
        await self._try(lambda: self._inventory.destroy_compute_instances(key))

    async def destroy_gi(self, key: SliceKey) -> None:
        """Raises DeviceBusy or DeviceError when it is still there after all retries."""
        await self._try(lambda: self._inventory.destroy_gpu_instance(key), also_unexplained=True)

    async def instances(self, device: str) -> tuple[ObservedSlice, ...]:
        """What the driver lists now."""
        return await self.call(lambda: self._inventory.gpu_instances(device))

    async def reopen(self) -> tuple[ObservedDevice, ...]:
        """Begin again with a driver that was loaded again."""

        def reopen() -> tuple[ObservedDevice, ...]:
            self._inventory.open()
            return self._inventory.list_devices()

        return await self.call(reopen)

    async def _try(self, call: Callable[[], T], *, also_unexplained: bool = False) -> T:
        pause_s = self._backoff_s
        for _ in range(self._retries_max):
            try:
                return await self.call(call)
            except (DeviceBusy, NoRoom):
                pass  # passes with time, or is raised by the last try below
            except DeviceError as error:
                # "reported destroyed, but still listed" carries no NVML code; every other refusal is final
                if not also_unexplained or error.code:
                    raise
            await self._clock.sleep(pause_s)
            pause_s *= 2
        return await self.call(call)

    async def call(self, call: Callable[[], T]) -> T:
        """Any blocking call of the inventory, in the driver's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
