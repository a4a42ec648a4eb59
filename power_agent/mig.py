"""Creates and destroys MIG instances through the inventory, off the event loop, with bounded patience.

One worker per device makes all calls to it, one after the other: NVML is no place for two changes of one GPU at a time,
and a call that hangs in one GPU's driver must not stop another's. A call that has not returned after `call_timeout_s`
counts as the device being lost; nothing more is asked of it until that call has come back.

A driver says IN_USE for a while after the last process of an instance is gone (its context is torn down late; a
monitoring agent may hold a handle), and some report a destruction that has not happened yet. Both pass with time or
never: so a few tries with growing pauses, then the error with its holders.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from power_agent.devices.errors import DeviceBusy, DeviceError, DeviceLost, NoRoom
from power_agent.devices.gpus import ObservedDevice
from power_agent.devices.inventory import Inventory, ObservedSlice
from trefoil.core.fleet import SliceKey
from trefoil.runtime.clock import Clock

T = TypeVar("T")
CALL_TIMEOUT_S: Final = 60.0  # listing handles took 10 s on a loaded GPU; nothing that works takes longer than that
NODE: Final = ""  # the worker for calls that concern the whole driver


class Worker:
    """One thread that makes calls in the order in which they come; a daemon, so that a hung driver cannot hold us."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"driver {name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        """Queue a call; one that is cancelled before its turn is not made."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """End after the calls that are queued; does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            if future.cancelled():
                continue
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:  # noqa: BLE001  # handed to whoever waits, bugs too
                error = raised
            loop = future.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():
        return  # nobody waits any more
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class Mig:
    """The verbs create_gi, create_ci, destroy_ci, destroy_gi, all idempotent, and every other call to a device."""

    def __init__(
        self,
        inventory: Inventory,
        clock: Clock,
        retries_max: int,
        backoff_s: float,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._inventory = inventory
        self._clock = clock
        self._retries_max = retries_max
        self._backoff_s = backoff_s
        self._call_timeout_s = call_timeout_s
        self._workers: dict[str, Worker] = {}
        self._hung: dict[str, asyncio.Future[Any]] = {}

    async def create_gi(self, key: SliceKey) -> ObservedSlice:
        """A GPU instance in exactly that place.

        Raises:
            NoRoom: something else is there, still after all retries.
        """
        make = self._inventory.create_gpu_instance
        created = await self._try(key, lambda: make(key.device, key.slice_type, key.start))
        assert created.key == key, (created.key, key)
        return created

    async def create_ci(self, key: SliceKey) -> ObservedSlice:
        """Its one full-width compute instance; the MIG UUID is new each time."""
        return await self._try(key, lambda: self._inventory.create_compute_instance(key))

    async def destroy_ci(self, key: SliceKey) -> None:
        """Raises DeviceBusy when processes still hold it after all retries."""
        await self._try(key, lambda: self._inventory.destroy_compute_instances(key))

    async def destroy_gi(self, key: SliceKey) -> None:
        """Raises DeviceBusy or DeviceError when it is still there after all retries."""
        await self._try(key, lambda: self._inventory.destroy_gpu_instance(key), also_unexplained=True)

    async def instances(self, device: str) -> tuple[ObservedSlice, ...]:
        """What the driver lists now."""
        return await self.call(device, lambda: self._inventory.gpu_instances(device))

    async def reopen(self) -> tuple[ObservedDevice, ...]:
        """Begin again with a driver that was loaded again."""

        def reopen() -> tuple[ObservedDevice, ...]:
            self._inventory.open()
            return self._inventory.list_devices()

        return await self.call(NODE, reopen)

    async def list_devices(self) -> tuple[ObservedDevice, ...]:
        """The GPUs that answer now."""
        return await self.call(NODE, self._inventory.list_devices)

    async def _try(self, key: SliceKey, call: Callable[[], T], *, also_unexplained: bool = False) -> T:
        pause_s = self._backoff_s
        for _ in range(self._retries_max):
            try:
                return await self.call(key.device, call)
            except (DeviceBusy, NoRoom):
                pass  # passes with time, or is raised by the last try below
            except DeviceError as error:
                # "reported destroyed, but still listed" carries no NVML code; every other refusal is final
                if not also_unexplained or error.code:
                    raise
            await self._clock.sleep(pause_s)
            pause_s *= 2
        return await self.call(key.device, call)

    async def call(self, device: str, call: Callable[[], T]) -> T:
        """Any blocking call that concerns one device, by its worker.

        Raises:
            DeviceLost: it did not return in time, or one before it has not returned yet.
        """
        hung = self._hung.get(device)
        if hung is not None and not hung.done():
            raise self._lost(device)
        self._hung.pop(device, None)
        if device not in self._workers:
            self._workers[device] = Worker(device or "node")
        made = self._workers[device].submit(call)
        done, _ = await asyncio.wait((made,), timeout=self._call_timeout_s)
        if not done:
            self._hung[device] = made
            raise self._lost(device)
        return made.result()

    def _lost(self, device: str) -> DeviceLost:
        return DeviceLost(
            f"{device or 'the driver'}: a call has not returned for {self._call_timeout_s:g} s",
            remedy="see the kernel's log for this GPU (Xid); it may need a reset",
        )

    async def close(self) -> None:
        """Shut NVML down and end the workers."""
        await self.call(NODE, self._inventory.close)
        for worker in self._workers.values():
            worker.close()
