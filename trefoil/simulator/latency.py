"""How long a slice takes: the law of core/queueing, drawn slice by slice.

A request that is sent to a slice is on its way for gap/2, computes when the slice has finished the one before it (one
at a time), and is back after another gap/2: its credit is free then. So one credit leaves the slice idle for a gap per
request; a second one hides that.
Draws: every slice has a stream of its own, seeded by its key. So the same request on the same slice takes the same time
    under two policies until their histories part. A slice that is given another service time starts a new stream.
"""

from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

import numpy as np
from numpy.random import Generator

from trefoil.core.fleet import SliceKey
from trefoil.core.queueing import ServiceTime, draw_s
from trefoil.core.units import MS_PER_S

DRAWS: Final = 512  # service times drawn at once


@dataclass(frozen=True, slots=True)
class SliceService:
    """What a slice does to a request. `gap_ms`: it is taken but does not compute. `energy_j`: active, per request."""

    service: ServiceTime
    accuracy: float
    energy_j: float
    variant: str
    family: str
    gap_ms: float


@dataclass(slots=True, eq=False)
class Server:
    """One slice: when it can compute next, and what it did in this window. `way_s` is half a gap."""

    key: SliceKey
    rng: Generator
    service: SliceService
    way_s: float
    free_s: float = float("-inf")  # time may begin below zero
    busy_s: float = 0.0
    answered: int = 0
    times_s: list[float] = field(default_factory=list)  # drawn ahead, the next one last: `times_s.pop()` or `more()`

    def more(self) -> float:
        """The next service time [s], with a block of those after it."""
        self.times_s.extend(draw_s(self.service.service, DRAWS, self.rng)[::-1].tolist())
        return self.times_s.pop()

    def serve_as(self, service: SliceService) -> None:
        """From now on; what is in flight has its time already."""
        if service.service != self.service.service:
            self.times_s.clear()
        self.service = service
        self.way_s = service.gap_ms / 2 / MS_PER_S


def server(key: SliceKey, service: SliceService, root: int) -> Server:
    """An idle slice; `root` is the seed of the whole run."""
    words = (root, crc32(key.device.encode()), crc32(key.slice_type.encode()), key.start, key.size)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
    return Server(key, rng, service, service.gap_ms / 2 / MS_PER_S)
