"""Event sets of the simulated driver: who waits for what, and what has happened since.

Bounded, because a killed client never frees its set: the oldest goes when there are too many.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from power_agent.devices.gpu import Nvml, NvmlFault

SETS_MAX: Final = 64
EVENTS_MAX: Final = 256
XID_EVENT: Final = 0x8  # nvmlEventTypeXidCriticalError
NONE_ID: Final = 0xFFFFFFFF


class Xid(IntEnum):
    """Errors that the driver reports of a GPU (NVIDIA's list of Xid errors)."""

    APPLICATION = 13
    PAGE_FAULT = 31
    CHANNEL_STOPPED = 43
    DOUBLE_BIT_ECC = 48
    FELL_OFF_THE_BUS = 79
    CONTAINED_ECC = 94


@dataclass(frozen=True, slots=True)
class Event:
    """What nvmlEventSetWait returns; `device` is the handle of the physical GPU."""

    device: int
    kind: int
    data: int
    gi_id: int = NONE_ID


@dataclass(slots=True)
class _EventSet:
    masks: dict[int, int] = field(default_factory=dict)  # GPU index -> event types
    queue: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))


class EventSets:
    """All event sets of a driver load."""

    def __init__(self) -> None:
        self._sets: dict[int, _EventSet] = {}

    def clear(self) -> None:
        self._sets.clear()

    def create(self, handle: int) -> None:
        if len(self._sets) >= SETS_MAX:
            del self._sets[next(iter(self._sets))]
        self._sets[handle] = _EventSet()

    def free(self, handle: int) -> None:
        self._get(handle)
        del self._sets[handle]

    def register(self, handle: int, index: int, mask: int) -> None:
        """Only errors (Xid) are simulated."""
        if mask & ~XID_EVENT or not mask:
            raise NvmlFault(Nvml.NOT_SUPPORTED)
        self._get(handle).masks[index] = mask

    def post(self, index: int, device: int, code: int, gi_id: int | None = None) -> None:
        for found in self._sets.values():
            if found.masks.get(index, 0) & XID_EVENT:
                found.queue.append(Event(device, XID_EVENT, int(code), NONE_ID if gi_id is None else gi_id))

    def take(self, handle: int) -> Event:
        """The oldest event that nobody has taken from this set.

        Raises:
            NvmlFault: TIMEOUT when there is none; how long to wait is the caller's business.
        """
        queue = self._get(handle).queue
        if not queue:
            raise NvmlFault(Nvml.TIMEOUT)
        return queue.popleft()

    def _get(self, handle: int) -> _EventSet:
        if handle not in self._sets:
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        return self._sets[handle]
