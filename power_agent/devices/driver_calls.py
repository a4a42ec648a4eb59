"""Driver calls off the event loop: one worker thread per device, in order, with a time limit.

All calls to a device are made by its worker, one after the other: NVML must not get two changes of one GPU at a time. A
call that hangs in one GPU's driver must not stop another's. A call that has not returned after `call_timeout_s` counts
as the device being lost. The agent asks nothing more of it until that call has come back.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from power_agent.devices.driver_lock import DriverLock, loaded_library
from power_agent.devices.errors import DeviceLost
from power_agent.devices.gpus import ObservedDevice
from power_agent.devices.inventory import Inventory

T = TypeVar("T")
CALL_TIMEOUT_S: Final = 60.0  # listing handles took 10 s on a loaded GPU; nothing that works takes longer than that
NODE: Final = ""  # the worker for calls that concern the whole driver


class DriverWorker:
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
        """End the thread after the calls that are queued; does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            if future.cancelled():
                continue
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:  # noqa: BLE001  # handed to the waiting caller, bugs too
                error = raised
            loop = future.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, future, result, error)


def _resolve(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():
        return  # no caller waits any more
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class DriverCalls:
    """Every blocking call to the driver of a node, by the worker of its device."""

    def __init__(
        self, inventory: Inventory, call_timeout_s: float = CALL_TIMEOUT_S, lock: DriverLock | None = None
    ) -> None:
        """`lock`: keeps other agents off the driver while it is open here."""
        self._inventory = inventory
        self._lock = lock
        self._call_timeout_s = call_timeout_s
        self._workers: dict[str, DriverWorker] = {}
        self._hung: dict[str, asyncio.Future[Any]] = {}

    async def call(self, device: str, call: Callable[[], T]) -> T:
        """Run a blocking call that concerns one device, in the session of NVML.

        Raises:
            DeviceLost: it did not return in time, or one before it has not returned yet.
        """

        def in_session() -> T:
            with self._inventory.session.use():
                return call()

        return await self._call(device, in_session)

    async def let_go(self, device: str) -> None:
        """Let go of a GPU, so that it can be reset. Raises as `Gpus.let_go`, and DeviceLost as `call`."""
        await self._call(NODE, lambda: self._inventory.let_go(device))

    async def resume(self) -> None:
        """Initialise NVML again. Raises as `Gpus.resume`, and DeviceLost as `call`."""
        await self._call(NODE, self._inventory.resume)

    async def _call(self, device: str, call: Callable[[], T]) -> T:
        if self.hangs(device):
            raise self._device_lost(device)
        self._hung.pop(device, None)
        if device not in self._workers:
            self._workers[device] = DriverWorker(device or "node")
        made = self._workers[device].submit(call)
        done, _ = await asyncio.wait((made,), timeout=self._call_timeout_s)
        if not done:
            self._hung[device] = made
            raise self._device_lost(device)
        return made.result()

    def hangs(self, device: str) -> bool:
        """Whether a call to a device has not returned in time, and still has not."""
        hung = self._hung.get(device)
        return hung is not None and not hung.done()

    def _device_lost(self, device: str) -> DeviceLost:
        return DeviceLost(
            f"{device or 'the driver'}: a call has not returned for {self._call_timeout_s:g} s",
            remedy="see the kernel's log for this GPU (Xid); it may need a reset, and this agent a restart before it",
        )

    async def reopen(self) -> tuple[ObservedDevice, ...]:
        """Open NVML, also after the driver was loaded again; returns the GPUs that answer.

        Raises:
            DeviceError: the driver is not ready.
            StartError: another agent governs these GPUs.
        """

        def reopen() -> tuple[ObservedDevice, ...]:
            self._inventory.open()
            if self._lock is not None:
                self._lock.take(loaded_library())
            return self._inventory.list_devices()

        return await self._call(NODE, reopen)

    async def close(self) -> None:
        """Shut NVML down and end the workers."""
        await self._call(NODE, self._inventory.close)
        if self._lock is not None:
            self._lock.release()
        for worker in self._workers.values():
            worker.close()
