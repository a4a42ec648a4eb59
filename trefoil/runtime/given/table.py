"""Rows of a table that an operator gives: CSV, or one JSON object a line; and what its cells say of time.

Delimiter: comma, semicolon or tab, whichever the first line has most of; blanks where that line is numbers.
Times: numbers of a unit (by the column's name, by a setting, or since 1970 by their size), or dates: ISO 8601, or
    digits as YYYYMMDD[HH[MM[SS]]].
"""

import csv
import datetime
import io
import json
import math
import re
import zoneinfo
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from trefoil.core.errors import TraceError, one_of, system_error
from trefoil.runtime.files import NotPlain, open_plain

TimeUnit = Literal["", "s", "ms", "us", "ns", "min", "h", "day", "date"]
"""Unit of a column of times; empty: by its name and values."""
DATE: Final = "date"
UNIT_S: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "day": 86_400.0}
_UNIT_WORDS: Final = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("ms", "msec", "milli", "millis", "millisecond", "milliseconds"), "ms"),
    **dict.fromkeys(("us", "usec", "micro", "micros", "microsecond", "microseconds"), "us"),
    **dict.fromkeys(("ns", "nsec", "nano", "nanos", "nanosecond", "nanoseconds"), "ns"),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), "min"),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("day", "days"), "day"),
}
_SINCE_1970: Final = {"s": 1e9, "ms": 1e12, "us": 1e15, "ns": 1e18}  # smallest number of each unit: September 2001
_YEAR_2286_S: Final = 1e10
_COMPACT: Final = {8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|/")
_MARKED_NUMBER: Final = re.compile(r"[-+]?\d[\d.,' ]*")
_PACKED: Final = (b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""First bytes of gzip, zip, bzip2, xz and zstd."""


def read_rows(path: Path, setting: str = "trace", bytes_max: int = 2**63) -> Iterator[tuple[int, list[str]]]:
    """Rows of a file with the numbers of their lines, the first one first; empty ones and `#` lines are left out.

    Of JSON lines the first row holds the keys of the first object. `setting`: which names the file, for errors.
    `bytes_max`: of a file whose rows are all kept.

    Raises:
        TraceError: there is no such regular file, or it cannot be read; names it and the line.
    """
    try:
        with open_plain(path, bytes_max) as data, io.TextIOWrapper(data, encoding="utf-8-sig", newline="") as file:
            first = next((line for line in file if line.strip() and not line.startswith("#")), "")
            file.seek(0)
            if first.startswith("["):
                raise TraceError(f"{path} is one JSON array", field=setting, remedy="one object a line (jq -c '.[]')")
            yield from _objects(path, file) if first.startswith("{") else _cells(path, file, _delimiter(first))
    except UnicodeDecodeError as error:
        packed = error.object.startswith(_PACKED)
        why, remedy = ("is packed", "unpack it") if packed else ("is not UTF-8", "save it as UTF-8")
        raise TraceError(why, field=setting, value=str(path), remedy=remedy) from error
    except (OSError, NotPlain, csv.Error) as error:
        raise system_error(TraceError, error, "be read", path, field=setting, remedy="name a CSV file") from error


def _cells(path: Path, lines: Iterator[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=delimiter == " ")
    while True:
        begins = reader.line_num + 1
        row = next(reader, None)
        if row is None:
            return
        if not any(cell.strip() for cell in row) or row[0].startswith("#"):
            continue
        if reader.line_num > begins:
            raise TraceError(f"{path} line {begins}: a quotation mark is not closed", remedy="fix that line")
        yield reader.line_num, [cell.strip() for cell in row]


def _objects(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    names: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path} line {number}: not JSON ({error})", remedy="one object a line") from error
        if not isinstance(found, dict) or not (found or names):
            raise TraceError(f"{path} line {number}: no object with fields", remedy="one object a line")
        if not names:
            names = list(found)
            yield number, names
        yield number, ["" if found.get(name) is None else str(found[name]) for name in names]


def _delimiter(line: str) -> str:
    counts = {mark: line.count(mark) for mark in (",", ";", "\t")}
    mark = max(counts, key=lambda one: counts[one])
    if not counts[mark] and line.split()[1:] and number_of(line.split()[0]) is not None:
        return " "
    return mark


def named_column(where: str, names: Sequence[str], name: str, field: str) -> int:
    """Place of the column that the setting `field` names.

    Raises:
        TraceError: there is none; names `where`, field and the columns.
    """
    if name not in names:
        raise TraceError(f"{where}: no such column", field=field, value=name, remedy=one_of(names, name))
    return names.index(name)


def words_of(name: str) -> tuple[str, ...]:
    """Words of a column's name in lower case: `ContextTokens`, `time (ms)`, `requests/s`."""
    return tuple(word.lower() for word in _WORD.findall(name))


def unit_of_words(words: Sequence[str]) -> str:
    """Unit of time that words name; empty: none."""
    return next((_UNIT_WORDS[word] for word in reversed(words) if word in _UNIT_WORDS), "")


def number_of(cell: str) -> float | None:
    """Finite number that a cell holds."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in cell else None


def number_remedy(cell: str, otherwise: str) -> str:
    """Remedy for a cell that is not a number."""
    return "write decimals with a point, thousands without a mark" if _MARKED_NUMBER.fullmatch(cell) else otherwise


def date_of(cell: str, zone: datetime.tzinfo = datetime.UTC) -> datetime.datetime | None:
    """Date of a cell, in `zone` unless it names its own."""
    layout = _COMPACT.get(len(cell)) if cell.isdigit() and cell.startswith(("19", "20")) else None
    try:
        found = datetime.datetime.strptime(cell, layout) if layout else datetime.datetime.fromisoformat(cell)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=zone)


def zone_of(name: str) -> datetime.tzinfo:
    """Time zone by its IANA name."""
    return datetime.UTC if name == "UTC" else zoneinfo.ZoneInfo(name)


def since_1970(cell: str) -> str:
    """Unit in which a number can only be a time since 1970; empty: in none."""
    value = number_of(cell) or 0.0
    return next((name for name, least in _SINCE_1970.items() if least <= value < 10 * least), "")


def time_unit(where: str, name: str, cell: str, stated: str, known: str = "") -> str:
    """Unit of a column of times, judged by its first cell: as stated, else as its name or its format (`known`) says.

    Raises:
        TraceError: nothing says it, or two things say different ones.
    """
    named = known or unit_of_words(words_of(name))
    value = number_of(cell)
    found = _number_unit(cell, stated or named) if value is not None else DATE if date_of(cell) else ""
    if value is None and not found:
        raise TraceError(
            f"{where}: not a time", field=name, value=cell, remedy="write numbers, or ISO 8601: 2021-03-26T21:00Z"
        )
    if stated and (found != stated or (value is not None and named not in ("", stated))):
        says = named if value is not None and named else found or "another unit"
        raise TraceError(
            f"{where}: time_unit says {stated!r}, the file says {says!r}", field=name, value=cell,
            remedy="leave time_unit out, or correct it or the header",
        )  # fmt: skip
    if not found:
        raise TraceError(
            f"{where}: the unit of these times is not known", field=name, value=cell,
            remedy=f"set time_unit to one of {', '.join((*UNIT_S, DATE))}, or end the column's name in _s, _ms, ...",
        )  # fmt: skip
    if value is not None and found != DATE and abs(value) * UNIT_S[found] >= _YEAR_2286_S:
        raise TraceError(
            f"{where}: no time in {found}", field=name, value=cell, remedy="correct time_unit or the column's name"
        )
    return found


def _number_unit(cell: str, unit: str) -> str:
    if unit == DATE:
        return DATE if date_of(cell) else ""
    if unit:
        return unit
    return DATE if date_of(cell) else since_1970(cell)
