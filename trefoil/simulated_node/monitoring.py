"""What clients of the simulated driver allocate to watch it: event sets (Xid errors) and GPM samples (Hopper).

A GPM sample keeps what its GPU or GPU instance had worked so far. Two samples of different generations of one
GPU-instance id give nonsense, as on hardware: ids are reused."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from trefoil.simulated_node.gpu_state import Gpu, GpuInstance, Nvml, NvmlFault

T = TypeVar("T")
SETS_MAX: Final = 64
EVENTS_MAX: Final = 256
XID_EVENT: Final = 0x8  # nvmlEventTypeXidCriticalError
NONE_ID: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Event:
    """Event that nvmlEventSetWait returns; `device` is the handle of the physical GPU."""

    device: int
    kind: int
    data: int
    gi_id: int = NONE_ID


@dataclass(slots=True)
class _EventSet:
    masks: dict[int, int] = field(default_factory=dict)  # GPU index -> event types
    queue: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))


class _Allocated(Generic[T]):
    """What clients have allocated, by handle; bounded, as killed clients free nothing."""

    def __init__(self, most: int) -> None:
        self._most, self._by_handle = most, dict[int, T]()

    def clear(self) -> None:
        """Forget all: their handles are void."""
        self._by_handle.clear()

    def free(self, handle: int) -> None:
        """Free one."""
        self._get(handle)
        del self._by_handle[handle]

    def _add(self, handle: int, value: T) -> int:
        if len(self._by_handle) >= self._most:
            del self._by_handle[next(iter(self._by_handle))]
        self._by_handle[handle] = value
        return handle

    def _get(self, handle: int) -> T:
        if handle not in self._by_handle:
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        return self._by_handle[handle]


class EventSets(_Allocated[_EventSet]):
    """Event sets of a driver load."""

    def __init__(self) -> None:
        super().__init__(SETS_MAX)

    def create(self, handle: int) -> int:
        """Create an event set under this handle, and return it; the oldest goes when there are too many."""
        return self._add(handle, _EventSet())

    def register(self, handle: int, index: int, mask: int) -> None:
        """Register a GPU with an event set; only errors (Xid) are simulated."""
        if mask & ~XID_EVENT or not mask:
            raise NvmlFault(Nvml.NOT_SUPPORTED)
        self._get(handle).masks[index] = mask

    def post(self, index: int, device: int, code: int, gi_id: int | None = None) -> None:
        """Post an Xid of a GPU to every event set that it is registered with."""
        for found in self._by_handle.values():
            if found.masks.get(index, 0) & XID_EVENT:
                found.queue.append(Event(device, XID_EVENT, int(code), NONE_ID if gi_id is None else gi_id))

    def pop(self, handle: int) -> Event:
        """Take the oldest event of this set.

        Raises:
            NvmlFault: TIMEOUT when there is none; how long to wait is the caller's business.
        """
        queue = self._get(handle).queue
        if not queue:
            raise NvmlFault(Nvml.TIMEOUT)
        return queue.popleft()


SAMPLES_MAX: Final = 1024
PERIOD_S: Final = 0.1  # the hardware counts in steps of this: closer samples hold no data
WHOLE_GPU: Final = 0  # key of Gpu.busy_s; GPU instances have their generation
GRAPHICS_UTIL, SM_UTIL, SM_OCCUPANCY, ANY_TENSOR_UTIL, DRAM_BW_UTIL = 1, 2, 3, 5, 10
# Percent of full use at density 1; only the first two matter here, the others are plausible.
SCALE: Final = {GRAPHICS_UTIL: 100.0, SM_UTIL: 100.0, SM_OCCUPANCY: 40.0, ANY_TENSOR_UTIL: 30.0, DRAM_BW_UTIL: 35.0}


@dataclass(frozen=True, slots=True)
class Sample:
    """GPM sample: work until one moment. busy_s: seconds with a kernel; dense_s: weighted by how full the SMs were."""

    at_s: float
    busy_s: float
    dense_s: float


class GpmSamples(_Allocated[Sample | None]):
    """GPM samples of a driver load; None: allocated, and not taken yet."""

    def __init__(self) -> None:
        super().__init__(SAMPLES_MAX)

    def allocate(self, handle: int) -> int:
        """Allocate a sample under this handle, and return it; the oldest goes when there are too many."""
        return self._add(handle, None)

    def record(self, handle: int, gpu: Gpu, instance: GpuInstance | None, now_s: float) -> None:
        """Take a sample of a GPU, or of one GPU instance."""
        self._get(handle)
        busy_s, dense_s = gpu.busy_s.get(instance.generation if instance else WHOLE_GPU, (0.0, 0.0))
        self._by_handle[handle] = Sample(now_s, busy_s, dense_s)

    def metrics(self, first: int, second: int, wanted: list[int]) -> list[dict[str, Any]]:
        """Mean of each metric between two samples [percent], with a return code of its own."""
        before, after = self._get(first), self._get(second)
        if before is None or after is None:
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        span_s = after.at_s - before.at_s
        found = []
        for metric in wanted:
            if metric not in SCALE:
                found.append({"nvmlReturn": int(Nvml.NOT_SUPPORTED), "value": 0.0})
            elif span_s < PERIOD_S:
                found.append({"nvmlReturn": int(Nvml.NO_DATA), "value": 0.0})
            else:
                done_s = after.busy_s - before.busy_s if metric == GRAPHICS_UTIL else after.dense_s - before.dense_s
                percent = min(max(SCALE[metric] * done_s / span_s, 0.0), 100.0)
                found.append({"nvmlReturn": int(Nvml.SUCCESS), "value": percent})
        return found
