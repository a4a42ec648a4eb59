"""The driver's side of pace files: service times out, busy time in. The constants below are the layout.

A pace file is mapped by the node and by every model that runs on a slice. The driver writes clock and service times
under a sequence lock. They are of its whole catalogue, as a family may be loaded at any time. Each instance of a model
takes a separate slot, where it adds up what it did. It pads each batch to a time drawn from the table.
"""

import mmap
import operator
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trefoil.core.interference import INTERFERENCE

MAGIC: Final = b"TRFPACE2"
SEQUENCE: Final = struct.Struct("<Q")
SEQUENCE_AT: Final = 8
HEADER: Final = struct.Struct("<IIII")  # clock_mhz, table_id, entries, padding
HEADER_AT: Final = 16
SEED_AT: Final = 32
SEED: Final = struct.Struct("<Qd")  # rng_seed, interference
ENTRY: Final = struct.Struct("<IIIIddd")  # family_crc32, version, batch, padding, service_ms_mean, service_cv, activity
# version, family_crc32, busy_ns, batches, items, overruns, overrun_ns, started_ns, instance, activity
SLOT: Final = struct.Struct("<IIQQQQQQIf")
SLOTS_AT: Final = 64
SLOTS: Final = 64
ENTRIES_AT: Final = SLOTS_AT + SLOTS * SLOT.size
ENTRIES_SPARE: Final = 8192  # of operating points, for families that come later; pages that are not used cost nothing
STALLED_SERVICE_TIMES: Final = 8  # a batch that runs longer than so many of the longest ones: its stub is dead
STALLED_S_MIN: Final = 2.0


@dataclass(frozen=True, slots=True)
class PaceEntry:
    """Service time of a batch of a version on this slice at this clock, and the part of it that it keeps busy."""

    family: str
    version: int
    batch: int
    service_ms_mean: float
    service_cv: float
    activity: float = 1.0


@dataclass(frozen=True, slots=True)
class PacedWork:
    """Work of one instance of a version since the last reading. `busy_s`: as if it had been alone on its slice."""

    family_crc32: int
    version: int
    busy_s: float
    batches: int
    items: int
    overruns: int
    overrun_s: float


@dataclass(slots=True)
class _Slot:
    """Last reading of one slot: busy_ns, batches, items, overruns, overrun_ns; and of the batch in progress."""

    counted: tuple[int, ...] = (0,) * 5
    running_ns: int = 0


def family_crc32(family: str) -> int:
    """CRC-32 by which a pace file names a family."""
    return zlib.crc32(family.encode())


class PaceFile:
    """Pace file of one process on one slice. A new process gets a new file, so a leftover writer cannot reach it."""

    def __init__(self, path: Path, seed: int, entries_max: int, interference: float = INTERFERENCE) -> None:
        """Make the file. `entries_max`: as many as a table has at any clock, now."""
        self.path, self._entries_max = path, entries_max + ENTRIES_SPARE
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, ENTRIES_AT + self._entries_max * ENTRY.size)
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._map[SEED_AT : SEED_AT + SEED.size] = SEED.pack(seed, interference)
        self._map[: len(MAGIC)] = MAGIC
        self._sequence = 0
        self._table_id = 0
        self._stalled_ns = int(STALLED_S_MIN * 1e9)
        self._slots: dict[tuple[int, int, int], _Slot] = {}  # by position, family, version

    def holds(self, entries: Sequence[PaceEntry]) -> bool:
        """Whether there is room for a table."""
        return len(entries) <= self._entries_max

    def write_table(self, clock_mhz: int, entries: Sequence[PaceEntry]) -> None:
        """Replace clock and service times; a reader sees all of it or none."""
        assert self.holds(entries), "the file was made for fewer operating points"
        self._table_id += 1
        body = b"".join(
            ENTRY.pack(family_crc32(e.family), e.version, e.batch, 0, e.service_ms_mean, e.service_cv, e.activity)
            for e in entries
        )
        self._put_sequence()
        self._map[HEADER_AT : HEADER_AT + HEADER.size] = HEADER.pack(clock_mhz, self._table_id, len(entries), 0)
        self._map[ENTRIES_AT : ENTRIES_AT + len(body)] = body
        self._put_sequence()
        longest_ms = max((entry.service_ms_mean for entry in entries), default=0.0)
        self._stalled_ns = int(max(STALLED_S_MIN, STALLED_SERVICE_TIMES * longest_ms / 1e3) * 1e9)

    def _put_sequence(self) -> None:
        self._sequence += 1
        self._map[SEQUENCE_AT : SEQUENCE_AT + 8] = SEQUENCE.pack(self._sequence)

    def collect_work(self, now_ns: int) -> list[PacedWork]:
        """Work of each instance since the last call, the batch in progress included. Never negative."""
        done = []
        for position in range(SLOTS):
            raw = SLOT.unpack_from(self._map, SLOTS_AT + position * SLOT.size)
            if raw[0] == 0:
                break  # they are taken in order
            last = self._slots.setdefault((position, raw[1], raw[0]), _Slot())
            if raw[7] and raw[2] != last.counted[0]:
                # Perhaps read between the model's two stores (busy added, started not yet cleared): look once more.
                raw = SLOT.unpack_from(self._map, SLOTS_AT + position * SLOT.size)
            work = self._difference(raw, last, now_ns)
            if work is not None:
                done.append(work)
        return done

    def _difference(self, raw: tuple[Any, ...], last: _Slot, now_ns: int) -> PacedWork | None:
        version, crc, *counted, started_ns = raw[:8]
        if counted[0] < last.counted[0] or counted[1] < last.counted[1]:  # it was taken again and counts from zero
            last.counted, last.running_ns = _Slot().counted, 0
        busy_ns, batches, items, overruns, overrun_ns = map(operator.sub, counted, last.counted)
        elapsed_ns = max(0, now_ns - started_ns) if started_ns else 0
        # A killed stub leaves its start behind: nothing more is drawn for it, and what was counted stays counted.
        running_ns = min(elapsed_ns, self._stalled_ns)
        busy_s = max(0, busy_ns + running_ns - last.running_ns) / 1e9
        last.counted, last.running_ns = tuple(counted), running_ns
        work = PacedWork(crc, version, busy_s, batches, items, overruns, overrun_ns / 1e9)
        return work if work.busy_s or work.batches else None

    def close(self) -> None:
        """Unmap and remove; a model that still maps it writes into nothing."""
        self._map.close()
        self.path.unlink(missing_ok=True)
