"""Journal of a job: which items have ended and where their results are. Pure.

Each owner of a job writes separate files, named by its epoch: `journal.<epoch>` has lines, `answers.<epoch>` bytes. The
first line of a journal says how many bytes of each earlier journal count. Readers ignore what an earlier owner writes
after that, so each item has exactly one result. Bytes are on disk before the line that names them is written.
"""

import json
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dispatcher.jobs.core.job import ENDED, JobState
from trefoil.core.outside.ranges import complaint

CRC_DIGITS: Final = 8
FILE_BYTES_MAX: Final = 2**63
ERROR_CHARS_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Result:
    """Result of an item as it is written: bytes of an ItemResult, and its receipt, 0.0 where it has none. `line`: bytes
    of its line in a file of a batch. `error`: code and text, of one that failed. `zone`: peer's that answered."""

    item: int
    data: bytes
    failed: bool = False
    joules: float = 0.0
    grams: float = 0.0
    line: int = 0
    error: str = ""
    zone: str = ""


@dataclass(slots=True)
class ZoneSum:
    """Answers of a peer's zone, with joules and grams."""

    answered: int = 0
    joules: float = 0.0
    grams: float = 0.0


@dataclass(slots=True)
class Ledger:
    """What a journal says. `kept`: also where each result is, for readers of results."""

    items: int
    kept: bool = False
    answered: int = 0
    failed: int = 0
    joules: float = 0.0
    grams: float = 0.0
    output_bytes: int = 0
    error_bytes: int = 0
    """Of the output and the error file of a batch."""
    first_error: str = ""
    """Of the item that failed first: its number, code and text."""
    ended: str = ""
    """State in which the job ended; empty: it continues."""
    ended_at_s: float = 0.0
    why: str = ""
    damaged: int = 0
    zones: dict[str, ZoneSum] = field(default_factory=dict)
    done: bytearray = field(default_factory=bytearray)
    """One byte for each item: 1 = it has ended."""
    _epochs: "array[int]" = field(default_factory=lambda: array("Q"))
    _at: "array[int]" = field(default_factory=lambda: array("Q"))
    _size: "array[int]" = field(default_factory=lambda: array("Q"))

    def __post_init__(self) -> None:
        self.done = bytearray(self.items)
        if self.kept:
            for each in (self._epochs, self._at, self._size):
                each.frombytes(bytes(8 * self.items))

    @property
    def left(self) -> int:
        """Items without a result."""
        return self.items - self.answered - self.failed

    def place(self, item: int) -> tuple[int, int, int]:
        """Where the result of an item lies: epoch of the answers, begin and size there."""
        return self._epochs[item], self._at[item], self._size[item]

    def apply(self, entry: Mapping[str, Any], epoch: int) -> None:
        """Apply one line.

        Raises:
            KeyError, TypeError, ValueError, IndexError: not what an owner writes.
        """
        if "ended" in entry:
            ended, at_s, why = str(entry["ended"]), float(entry["at_s"]), str(entry["why"])
            if JobState[ended] not in ENDED or at_s < 0.0 or complaint("_at_s", at_s):
                raise ValueError("an end that is none")
            self.ended, self.ended_at_s, self.why = ended, at_s, why
        if "results" not in entry:
            return
        at, sizes = int(entry["at"]), entry["sizes"]
        ranges = [(int(first), int(first) + int(count)) for first, count in entry["results"]]
        total = sum(end - first for first, end in ranges)
        if len(sizes) != total or any(not 0 <= first < end <= self.items for first, end in ranges):
            raise ValueError("results that are not the job's")
        if not all(type(size) is int and size >= 0 for size in sizes) or not 0 <= at + sum(sizes) < FILE_BYTES_MAX:
            raise ValueError("places that are in no file")
        if any(self.done.find(1, first, end) >= 0 for first, end in ranges):
            raise ValueError("results that were there")
        failed, joules, grams = int(entry["failed"]), float(entry["joules"]), float(entry["grams"])
        output, errors = map(int, entry.get("lines", (0, 0)))
        zones = {zone: (int(count), float(j), float(g)) for zone, (count, j, g) in entry.get("zones", {}).items()}
        for first, end in ranges:
            self.done[first:end] = b"\x01" * (end - first)
        if self.kept:
            for number, size in zip(
                (number for first, end in ranges for number in range(first, end)), sizes, strict=True
            ):
                self._epochs[number], self._at[number], self._size[number] = epoch, at, size
                at += size
        self.first_error = self.first_error or str(entry.get("error", ""))
        self.failed += failed
        self.answered += total - failed
        self.joules += joules
        self.grams += grams
        self.output_bytes += output
        self.error_bytes += errors
        for zone, (count, zone_j, zone_g) in zones.items():
            known = self.zones.setdefault(zone, ZoneSum())
            known.answered, known.joules, known.grams = (
                known.answered + count, known.joules + zone_j, known.grams + zone_g,
            )  # fmt: skip


def results_entry(results: Sequence[Result], at: int) -> dict[str, Any]:
    """Entry of results that lie one after the other from a place on."""
    error = next((f"item {each.item}: {each.error}" for each in results if each.failed), "")
    zones: dict[str, list[float]] = {}
    for each in results:
        if each.zone and not each.failed:
            known = zones.setdefault(each.zone, [0, 0.0, 0.0])
            zones[each.zone] = [known[0] + 1, known[1] + each.joules, known[2] + each.grams]
    return {
        "results": _ranges(each.item for each in results),
        "sizes": [len(each.data) for each in results],
        "at": at,
        "failed": sum(each.failed for each in results),
        "joules": sum(each.joules for each in results),
        "grams": sum(each.grams for each in results),
        "lines": [sum(each.line for each in results if each.failed is failed) for failed in (False, True)],
        **({"error": error[:ERROR_CHARS_MAX]} if error else {}),
        **({"zones": zones} if zones else {}),
    }


def ended_entry(state: str, at_s: float, why: str) -> dict[str, Any]:
    """Entry of a job that ended."""
    return {"ended": state, "at_s": at_s, "why": why}


def encode(entry: Mapping[str, Any]) -> bytes:
    """Encode an entry as one line without its end: JSON, a tab, its checksum."""
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%s\t%08x" % (text, zlib.crc32(text))


def decode(line: bytes) -> Mapping[str, Any] | None:
    """Entry of a line; None: it is torn or damaged."""
    text, _, checksum = line.partition(b"\t")
    try:
        if len(checksum) != CRC_DIGITS or int(checksum, 16) != zlib.crc32(text):
            return None
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def replay(ledger: Ledger, epoch: int, data: bytes) -> int:
    """Apply the whole lines of a journal, or of a later part of one; returns how many bytes they have."""
    end = data.rfind(b"\n") + 1
    for line in data[:end].split(b"\n"):
        if not line:
            continue
        entry = decode(line)
        try:
            if entry is None:
                raise ValueError("damaged")
            ledger.apply(entry, epoch)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError):
            ledger.damaged += 1
    return end


def accepted(data: bytes) -> dict[int, int] | None:
    """How many bytes of each earlier epoch's journal count, by the first line of one; None: it has none yet."""
    line, newline, _ = data.partition(b"\n")
    entry = decode(line) if newline else None
    try:
        return {int(epoch): int(size) for epoch, size in entry["accepts"].items()} if entry is not None else None
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return None


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers as [first, count] of those that follow each other."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][0] + found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return found
