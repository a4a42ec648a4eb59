"""Energy log: the last minutes of the energy stream on disk, with the meter states, and the feed to those who watch it.

One line is one truth: it holds the samples of one reading and the meter's state after it, written before the samples
are published. So a crash at any point neither loses nor repeats a joule: what is on disk is sent (again) by `seq`, what
is not is still in the counter. A torn last line never counted. Two files of half the ring's length take turns.

While the disk refuses, readings wait here and are not published. When more wait than a file holds, each two neighbours
become one of twice the time: coarser, and no joule less.

A watcher of the stream has a position in it and no queue. One that is slower than the ring loses the oldest samples,
and sees by `seq` that it did; no other part notices.
"""

import itertools
import json
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from power_agent.energy.core.meter import MeterState
from power_agent.slices.node_state import ChangeNotifier
from trefoil.core.accounting import fold
from trefoil.core.energy import EnergySample
from trefoil.core.errors import Unavailable
from trefoil.core.outside.plausible import sample_fault
from trefoil.runtime import codec
from trefoil.runtime.files import FileTrouble, LineFile
from trefoil.runtime.state_files import as_epoch, of_shape, read_lines
from trefoil.runtime.telemetry import Metrics

CHUNK: Final = 64  # samples that a watcher holds at once
WATCHERS_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class _Reading:
    """One reading of all devices: its samples, and the meters' states after it. `number` counts lines."""

    samples: tuple[EnergySample, ...]
    states: Mapping[str, MeterState]
    number: int = 0


class EnergyLog:
    """Log of energy samples and meter states; append-only, bounded by `lines_max` readings."""

    def __init__(self, directory: Path, lines_max: int, metrics: Metrics | None = None) -> None:
        self._files = (LineFile(directory / "energy.0.jsonl"), LineFile(directory / "energy.1.jsonl"))
        self._metrics = metrics
        self._half = max(1, lines_max // 2)
        self._active = 0
        self._lines = self._count = 0
        self._trouble = FileTrouble("energy", "samples wait in memory and are sent when they are on disk", metrics)
        self._waiting: deque[_Reading] = deque()
        self.states: dict[str, MeterState] = {}
        self.ring: deque[EnergySample] = deque()
        self._dropped = 0  # samples that the ring has let go since it was opened

    def open(self) -> None:
        """Open the log: read what a predecessor left."""
        read = [_read(file.path, self._metrics) for file in self._files]
        newest = max(range(2), key=lambda i: read[i][-1].number if read[i] else -1)
        found = read[1 - newest] + read[newest]
        for reading in found:
            self.ring.extend(reading.samples)
        if found:
            self.states, self._count = dict(found[-1].states), found[-1].number + 1
        self._active, self._lines = newest, len(read[newest])

    def append(self, samples: Sequence[EnergySample], states: Mapping[str, MeterState]) -> list[EnergySample]:
        """Append the samples and states of one reading, durably (against the end of this process).

        Returns the samples that may be published, oldest first: those on disk. None while the disk refuses, and all
        that waited once it does not.
        """
        self._waiting.append(_Reading(tuple(samples), dict(states)))
        if len(self._waiting) > self._half:
            self._waiting = deque(_in_pairs(list(self._waiting)))
        written: list[EnergySample] = []
        while self._waiting:
            try:
                self._write(self._waiting[0])
            except OSError as error:
                self._trouble.begin(self._files[self._active].path, error)
                return written
            written += self._waiting.popleft().samples
        self._trouble.end()
        return written

    def _write(self, reading: _Reading) -> None:
        if self._lines >= self._half:
            self._files[1 - self._active].restart()
            self._files[self._active].close()
            self._active, self._lines = 1 - self._active, 0
        line = {
            "n": self._count,
            "samples": [codec.to_plain(sample) for sample in reading.samples],
            "states": {device: codec.to_plain(state) for device, state in reading.states.items()},
        }
        self._files[self._active].append(json.dumps(line, separators=(",", ":")).encode())
        self._count += 1
        self._lines += 1
        self.states = dict(reading.states)
        self.ring.extend(reading.samples)
        while len(self.ring) > 2 * self._half * max(1, len(reading.states)):
            self.ring.popleft()
            self._dropped += 1

    def since(self, position: int, count: int) -> list[tuple[int, EnergySample]]:
        """List at most `count` samples from a position on, each with its own; positions grow by 1 per sample."""
        first = max(0, position - self._dropped)
        return [
            (self._dropped + first + offset, sample)
            for offset, sample in enumerate(itertools.islice(self.ring, first, first + count))
        ]

    def close(self) -> None:
        """Close the files; they stay."""
        for file in self._files:
            file.close()


def _read(path: Path, metrics: Metrics | None) -> list[_Reading]:
    """Readings of a file; lines that a crash or a failing disk has torn never counted."""
    try:
        found, _ = read_lines(path, _reading, metrics)
    except OSError as error:
        structlog.get_logger().error("energy log unreadable: metering starts again", path=str(path), why=str(error))
        return []
    return found


def _reading(line: Any) -> _Reading:
    samples = tuple(of_shape(EnergySample, sample) for sample in line["samples"])
    states = {name: codec.from_plain(MeterState, state, "state") for name, state in line["states"].items()}
    if why := next(filter(None, map(sample_fault, samples)), ""):
        raise ValueError(why)
    return _Reading(samples, states, as_epoch(line["n"]))


def _in_pairs(readings: Sequence[_Reading]) -> list[_Reading]:
    """Each two neighbours as one reading."""
    made = []
    for start in range(0, len(readings), 2):
        pair = readings[start : start + 2]
        by_device: dict[str, list[EnergySample]] = {}
        for sample in (sample for one in pair for sample in one.samples):
            by_device.setdefault(sample.device, []).append(sample)
        made.append(_Reading(tuple(fold(samples) for samples in by_device.values()), pair[-1].states))
    return made


class EnergyFeed:
    """Feed of energy samples to those who watch: what the ring still holds, then each new one."""

    def __init__(self, energy_log: EnergyLog) -> None:
        self._energy_log = energy_log
        self._changes = ChangeNotifier()
        self.watchers = 0

    def notify(self, samples: Sequence[EnergySample]) -> None:
        """Wake the watchers: these samples are in the log now."""
        self._changes.notify()

    async def watch(self, after_seq: Mapping[str, int]) -> AsyncGenerator[EnergySample]:
        """Watch samples beyond `after_seq` of their device, without end.

        Raises:
            Unavailable: too many watch already.
        """
        if self.watchers >= WATCHERS_MAX:
            raise Unavailable(f"{WATCHERS_MAX} watch the energy already", remedy="read the stream in Redis instead")
        self.watchers += 1
        try:
            position, sent = 0, dict(after_seq)
            while True:
                seen = self._changes.count
                while fresh := self._energy_log.since(position, CHUNK):
                    position = fresh[-1][0] + 1
                    for _, sample in fresh:
                        if sample.seq > sent.get(sample.device, 0):
                            sent[sample.device] = sample.seq
                            yield sample
                await self._changes.wait(seen)
        finally:
            self.watchers -= 1
