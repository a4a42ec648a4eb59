"""What a GPU says of its own accord: Xid errors, waited for in a thread with bounded waits.

    watch = EventWatch(inventory, clock, on_event)     # on_event is called in the thread
    watch.start(devices); watch.stop()

NVML has one waiting call for all GPUs, so this is the one thread that no device owns. Where a driver has no events
(a vGPU guest, a symbol missing) `watching` is empty and only polling notices a lost GPU, some seconds later.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pynvml
import structlog

from power_agent.devices.errors import (
    DeviceError,
    DeviceLost,
    DeviceReleased,
    DeviceUnsupported,
    translate_nvml_errors,
)
from power_agent.devices.inventory import Inventory
from trefoil.runtime.clock import Clock

WAIT_MS: Final = 500
PAUSE_S: Final = 0.5
PAUSE_MAX_S: Final = 8.0  # between tries while the driver is gone
JOIN_S: Final = 0.5
LAST_EVENTS_MAX: Final = 100
NO_INSTANCE: Final = 0xFFFFFFFF
LOST_XID: Final = 79

# Xids after which no work is safe until the GPU is reset or the node rebooted. Source: NVIDIA, "Analyzing Xid Errors
# with the Xid Catalog" (docs.nvidia.com/deploy/xid-errors), immediate action RESET_GPU or RESTART_BM. All others are an
# application's fault (13, 31, 43, 45, 94 ...) or need no action now (63, 92 ...): they are reported, not acted on.
FATAL_XIDS: Final = {
    46: "the GPU stopped processing",
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "a memory row could not be remapped or retired",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    119: "the GPU system processor does not answer",
    120: "error in the GPU system processor",
    140: "uncorrected ECC error",
}


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """An Xid of one GPU; `device` is empty when NVML did not say which."""

    device: str
    xid: int
    gi_id: int | None = None

    @property
    def fatal(self) -> bool:
        """Whether the GPU must be fenced at once."""
        return self.xid in FATAL_XIDS

    @property
    def text(self) -> str:
        """Meaning of the Xid, for a person."""
        meaning = FATAL_XIDS.get(self.xid, "see NVIDIA's Xid catalog")
        return f"Xid {self.xid}: {meaning}"


class EventWatch:
    """Watch for Xids of a set of GPUs until stopped. `watching`: those that report events."""

    def __init__(
        self, inventory: Inventory, clock: Clock, on_event: Callable[[GpuEvent], None], wait_ms: int = WAIT_MS
    ) -> None:
        self._inventory = inventory
        self._clock = clock
        self._on_event = on_event
        self._wait_ms = wait_ms
        self._stopping = False
        self._wake = threading.Event()  # set: look at `_stopping` and `_devices` again
        self._devices: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None
        self.watching: tuple[str, ...] = ()
        self._log = structlog.get_logger()

    def start(self, devices: Sequence[str]) -> None:
        """Watch these GPUs; called again it watches the new ones, also after the driver was loaded again."""
        self._devices = tuple(devices)
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpu events", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop; returns when the thread has ended, about one wait later. Call it before NVML is shut down. Blocking."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=self._wait_ms / 1e3 + JOIN_S)

    def _run(self) -> None:
        pause_s = PAUSE_S
        while not self._stopping:
            self._wake.clear()
            try:
                with self._inventory.session.use():
                    self._watch()
                pause_s = PAUSE_S
                if not self.watching and not self._wake.is_set():
                    self._wake.wait()  # no GPU here reports events: nothing to do until the next `start`
            except DeviceLost as error:
                self._log.warning("a GPU was lost", why=str(error))
                self._on_event(GpuEvent("", LOST_XID))
                self._wake.wait(pause_s)
            except DeviceError as error:
                # The driver is going or gone; the agent notices by itself, and calls `start` when it is back.
                self._log.warning("no GPU events for now", why=str(error))
                self._wake.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            self.watching = ()

    def _watch(self) -> None:
        """Wait for events until something changes.

        Raises:
            DeviceError: waiting is not possible any more.
        """
        if not self._devices:
            return  # a node without GPUs may have no driver either
        try:
            with translate_nvml_errors("events", "create an event set"):
                events = pynvml.nvmlEventSetCreate()
        except DeviceUnsupported:
            return
        try:
            self.watching = tuple(device for device in self._devices if self._register(device, events))
            session = self._inventory.session
            while self.watching and not self._wake.is_set() and not session.is_wanted:
                event = self._wait(events, self._wait_ms)
                if event is not None:
                    self._on_event(event)
            for _ in range(LAST_EVENTS_MAX):  # what came meanwhile goes with the set
                event = self._wait(events, 0)
                if event is None:
                    break
                self._on_event(event)
        finally:
            self._free(events)

    def _register(self, device: str, events: Any) -> bool:
        try:
            if not self._inventory.event_types(device) & pynvml.nvmlEventTypeXidCriticalError:
                return False
            self._inventory.register_events(device, pynvml.nvmlEventTypeXidCriticalError, events)
        except (DeviceUnsupported, DeviceLost, DeviceReleased) as error:
            self._log.warning("no events of this GPU", device=device, why=str(error))
            return False
        return True

    def _wait(self, events: Any, wait_ms: int) -> GpuEvent | None:
        """One event, or None after a bounded wait."""
        began_s = self._clock.monotonic_s()
        try:
            with translate_nvml_errors("events", "wait for events"):
                try:
                    data = pynvml.nvmlEventSetWait_v2(events, wait_ms)
                except pynvml.NVMLError_Timeout:
                    data = None
        except DeviceUnsupported:
            self.watching = ()
            return None
        if data is None:
            # A simulated driver answers at once; the wait is ours then.
            self._wake.wait(max(0.0, wait_ms / 1e3 - (self._clock.monotonic_s() - began_s)))
            return None
        if data.eventType != pynvml.nvmlEventTypeXidCriticalError:
            return None
        gi_id = None if data.gpuInstanceId == NO_INSTANCE else int(data.gpuInstanceId)
        return GpuEvent(self._inventory.device_of_handle(data.device), int(data.eventData), gi_id)

    def _free(self, events: Any) -> None:
        try:
            pynvml.nvmlEventSetFree(events)
        except pynvml.NVMLError as error:
            self._log.info("event set went with its driver", why=str(error))
