"""The last minutes of the energy stream on disk, together with what the meter must remember: one line is one truth.

A line holds the samples of one reading and the meter's state after it, written before the samples are published. So a
crash at any point neither loses nor repeats a joule: what is on disk is sent (again) by `seq`, what is not is still in
the counter. A torn last line never counted. Two files of half the ring's length take turns.
"""

import itertools
import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from power_agent.core.meter import MeterState
from trefoil.core.energy import EnergySample
from trefoil.runtime import codec


class Ledger:
    """Append-only, bounded by `lines_max` readings."""

    def __init__(self, directory: Path, lines_max: int) -> None:
        self._paths = (directory / "energy.0.jsonl", directory / "energy.1.jsonl")
        self._half = max(1, lines_max // 2)
        self._file: IO[str] | None = None
        self._turn = 0
        self._lines = self._count = 0
        self.states: dict[str, MeterState] = {}
        self.ring: deque[EnergySample] = deque()
        self._dropped = 0  # samples that the ring has let go since it was opened

    def history(self) -> list[tuple[str, MeterState]]:
        """Every state on disk, oldest first: the counter readings behind the samples."""
        lines = sorted((line for path in self._paths for line in self._read(path)), key=lambda line: int(line["n"]))
        return [
            (device, codec.from_plain(MeterState, state, "state"))
            for line in lines
            for device, state in line["states"].items()
        ]

    def open(self) -> None:
        """Read what a predecessor left."""
        read = [self._read(path) for path in self._paths]
        newest = max(range(2), key=lambda i: int(read[i][-1]["n"]) if read[i] else -1)
        self._turn, lines = newest, read[1 - newest] + read[newest]
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
        """Make samples and state durable (against the end of this process)."""
        assert self._file is not None, "open() comes first"
        if self._lines >= self._half:
            self._file.close()
            self._turn, self._lines = 1 - self._turn, 0
            self._file = self._paths[self._turn].open("w", encoding="utf-8")
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
        """At most `count` samples of the ring from a position on, each with its own; positions grow by 1 per sample."""
        first = max(0, position - self._dropped)
        return [
            (self._dropped + first + offset, sample)
            for offset, sample in enumerate(itertools.islice(self.ring, first, first + count))
        ]

    def close(self) -> None:
        """The file stays."""
        if self._file is not None:
            self._file.close()
