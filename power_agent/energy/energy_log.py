"""Energy log: the last minutes of the energy stream on disk, with the meter states, and the feed to those who watch it.

One line is one truth: it holds the samples of one reading and the meter's state after it, written before the samples
are published. So a crash at any point neither loses nor repeats a joule: what is on disk is sent (again) by `seq`, what
is not is still in the counter. A torn last line never counted. Two files of half the ring's length take turns.

Whoever watches the stream has a position in it and no queue. One that is slower than the ring loses the oldest samples,
and sees by `seq` that it did; nobody else notices.
"""

import itertools
import json
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from power_agent.energy.core.meter import MeterState
from power_agent.slices.node_state import ChangeNotifier
from trefoil.core.energy import EnergySample
from trefoil.core.errors import Unavailable
from trefoil.runtime import codec

CHUNK: Final = 64  # samples that a watcher holds at once
WATCHERS_MAX: Final = 32


class EnergyLog:
    """Log of energy samples and meter states; append-only, bounded by `lines_max` readings."""

    def __init__(self, directory: Path, lines_max: int) -> None:
        self._paths = (directory / "energy.0.jsonl", directory / "energy.1.jsonl")
        self._half = max(1, lines_max // 2)
        self._file: IO[str] | None = None
        self._active = 0
        self._lines = self._count = 0
        self.states: dict[str, MeterState] = {}
        self.ring: deque[EnergySample] = deque()
        self._dropped = 0  # samples that the ring has let go since it was opened

    def open(self) -> None:
        """Open the log and read what a predecessor left."""
        read = [self._read(path) for path in self._paths]
        newest = max(range(2), key=lambda i: int(read[i][-1]["n"]) if read[i] else -1)
        self._active, lines = newest, read[1 - newest] + read[newest]
        for line in lines:
            self.ring.extend(codec.from_plain(EnergySample, sample, "sample") for sample in line["samples"])
        if lines:
            self.states = {
                device: codec.from_plain(MeterState, state, "state") for device, state in lines[-1]["states"].items()
            }
        self._count = lines[-1]["n"] + 1 if lines else 0
        self._lines = len(read[newest])
        self._paths[newest].parent.mkdir(parents=True, exist_ok=True)
        self._file = self._paths[newest].open("a", encoding="utf-8")
        if read[newest]:
            self._file.write("\n")  # a torn line must not swallow the next one

    def _read(self, path: Path) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue  # torn by a crash in mid-write
        return lines

    def append(self, samples: Sequence[EnergySample], states: Mapping[str, MeterState]) -> None:
        """Append the samples and states of one reading, durably (against the end of this process)."""
        assert self._file is not None, "open() comes first"
        if self._lines >= self._half:
            self._file.close()
            self._active, self._lines = 1 - self._active, 0
            self._file = self._paths[self._active].open("w", encoding="utf-8")
        line = {
            "n": self._count,
            "samples": [codec.to_plain(sample) for sample in samples],
            "states": {device: codec.to_plain(state) for device, state in states.items()},
        }
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()
        self._count += 1
        self._lines += 1
        self.states = dict(states)
        self.ring.extend(samples)
        while len(self.ring) > 2 * self._half * max(1, len(states)):
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
        """Close the file; it stays."""
        if self._file is not None:
            self._file.close()


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
