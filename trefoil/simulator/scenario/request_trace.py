"""Reader of traces of requests, the only one: for the simulator, comparisons, load and forecasts of load.

Formats, by their header: second,requests (minute, hour, day); any time with a count or a rate (timestamp,qps); one row
    a request (arrival_s, dates, seconds since 1970). Also Azure Functions 2019 and 2021, Azure LLM 2023 and 2024,
    BurstGPT, Wikipedia (WikiBench, caching), Twitter, Alibaba (microservices, GPU, Qwen). Others by `TraceOptions`.
Times: `arrival_s` counts from the beginning of the load; all others from the first row.
"""

import functools
import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from trefoil.core.errors import TraceError
from trefoil.core.outside.ranges import BY_UNIT, YEAR_S
from trefoil.runtime.given.table import DATE, UNIT_S, date_of, number_of, number_remedy, read_rows
from trefoil.simulator.scenario.request_columns import (
    Columns,
    TraceOptions,
    check_samples,
    choose,
    header_of,
    may_run,
    token_columns,
)

Floats = npt.NDArray[np.float64]
Rows = Iterator[tuple[int, list[str]]]

ROWS_MAX: Final = 50_000_000  # 0.8 GB of times and lines
SPAN_MAX_S: Final = 10 * YEAR_S  # 2.5 GB of counts by the second
TRACES_KEPT: Final = 4
STEP_TOLERANCE: Final = 1e-3  # of a bin: by how much times of equal steps may differ
ARRIVAL_NAME: Final = "arrival_s"


@dataclass(frozen=True, slots=True, eq=False)
class RequestTrace:
    """Trace as it was read: requests of each bin, or (bin_s = 0) the time of each request [s], ascending.

    `tokens`, shape (requests, 2): of each prompt and each answer, where they were asked for.
    """

    source: str
    rows: int
    read_as: str
    numbers: Floats
    bin_s: float = 0.0
    tokens: Floats | None = None

    @property
    def requests(self) -> float:
        """Requests in all."""
        return float(self.numbers.sum()) if self.bin_s else float(self.numbers.size)

    @property
    def span_s(self) -> float:
        """Span that it covers; of single requests in whole seconds."""
        return self.numbers.size * self.bin_s if self.bin_s else math.floor(self.numbers[-1]) + 1.0

    @property
    def mean_per_s(self) -> float:
        """Mean rate."""
        return self.requests / self.span_s

    def counted(self) -> tuple[Floats, float]:
        """Requests of each bin and its width [s]; single requests by the second."""
        if self.bin_s:
            return self.numbers, self.bin_s
        return np.bincount(self.numbers.astype(np.int64)).astype(np.float64), 1.0

    def __str__(self) -> str:
        """What was read, in one line."""
        mean = f"{self.mean_per_s:.4g}" if self.mean_per_s < 1000 else f"{self.mean_per_s:,.0f}"
        prompt, answer = (0.0, 0.0) if self.tokens is None else self.tokens.mean(axis=0)
        tokens = f"; {prompt:,.4g} prompt tokens and {answer:,.4g} answer tokens in the mean" if answer else ""
        return (
            f"trace {self.source}: {self.rows:,} rows, {self.read_as}; {self.requests:,.0f} requests in "
            f"{self.span_s:,.10g} s, mean {mean}/s{tokens}"
        )


def read_trace(
    path: Path, options: TraceOptions | None = None, *, whole: bool = False, tokens: bool = False
) -> RequestTrace:
    """Read a trace. `whole`: counts must be whole numbers, because they are played exactly. `tokens`: of each request.

    Raises:
        TraceError: unknown or contradictory columns or units, a gap, an unordered row; with file, line and remedy.
    """
    try:
        stat = path.stat()
        found = _read(path, options or TraceOptions(), whole, tokens, (stat.st_mtime_ns, stat.st_size))
    except OSError:  # the reader names the reason
        found = _read.__wrapped__(path, options or TraceOptions(), whole, tokens, (0, 0))
    return found


@functools.lru_cache(maxsize=TRACES_KEPT)
def _read(path: Path, options: TraceOptions, whole: bool, tokens: bool, _version: tuple[int, int]) -> RequestTrace:
    """Read it once, however often a comparison asks."""
    rows = read_rows(path)
    first = next(rows, None)
    if first is None:
        raise _empty(path)
    names, is_data = header_of(first[1], options)
    rows = itertools.chain([first], rows) if is_data else _once(path, names, rows)
    minutes = sum(name.isdigit() for name in names)
    if minutes > 1 and names[-1] == str(minutes) and not is_data and not tokens:
        found = _functions(path, names, rows, options)
    else:
        found = _table(path, names, rows, options, whole, tokens)
    found.numbers.setflags(write=False)
    return found


def _once(path: Path, names: list[str], rows: Rows) -> Rows:
    """Rows below a header that must not occur again; ten columns of minutes or more are one without the others."""
    header = [name.lower() for name in names]
    minutes = sum(name.isdigit() for name in names)
    begin = len(names) - minutes if minutes >= 10 else 0
    for line, row in rows:
        if row[-1].lower() == header[-1] and [cell.lower() for cell in row[begin:]] == header[begin:]:
            raise TraceError(
                f"{path} line {line}: header repeated", field="trace", value=",".join(row[:4]),
                remedy="one file a day: cut it before that line",
            )  # fmt: skip
        yield line, row


def _empty(path: Path) -> TraceError:
    return TraceError(
        f"{path} is empty: no rows below the column names", field="trace", value=str(path),
        remedy="one line per bin, or per arrival",
    )  # fmt: skip


def _table(path: Path, names: list[str], rows: Rows, options: TraceOptions, whole: bool, tokens: bool) -> RequestTrace:
    first = next(rows, None)
    if first is None:
        raise _empty(path)
    rows = itertools.chain([first], rows)
    if len(names) > 1 and names[0] == "1" and options.bin_s and not (options.column or options.time_column):
        rows, names, first = _one_line(path, rows), ["1"], (first[0], first[1][:1])
    row = first[1] + [""] * (len(names) - len(first[1]))
    choice = choose(path, names, row, options)
    read = _Read(path, names, choice, token_columns(path, names, choice) if tokens else ())
    read.take(rows)
    return read.counts(whole) if choice.count >= 0 else read.requests()


def _one_line(path: Path, rows: Rows) -> Rows:
    """Counts that stand in one line, one after the other."""
    number, cells = next(rows)
    if (more := next(rows, None)) is not None:
        raise TraceError(
            f"{path} line {more[0]}: several lines of {len(cells)} numbers without a header", field="column",
            remedy="name the counts by the column's number, from 1",
        )  # fmt: skip
    return iter([(number, [cell]) for cell in cells])


class _Read:
    """Rows of one table while they are read."""

    def __init__(self, path: Path, names: Sequence[str], choice: Columns, of_tokens: Sequence[int]) -> None:
        self.path, self.names, self.choice, self.of_tokens = path, names, choice, of_tokens
        self.tokens = array("d")
        self.times, self.values, self.lines = array("d"), array("d"), array("q")
        self.rows = 0
        self.first_of: dict[str, float] = {}
        self.from_first = choice.time < 0 or names[choice.time].lower() != ARRIVAL_NAME

    def take(self, rows: Rows) -> None:
        """Take the cells that are wanted of every row."""
        choice, begin = self.choice, math.nan
        span_max = SPAN_MAX_S / UNIT_S.get(choice.unit, 1.0)
        for line, row in rows:
            self.rows += 1
            if self.rows > ROWS_MAX:
                raise TraceError(f"{self.path}: more than {ROWS_MAX:,} rows", remedy="cut it into several files")
            if choice.count >= 0:
                self.values.append(self.number(line, row, choice.count))
            for place in self.of_tokens:
                count = self.number(line, row, place)
                if not (count >= 1 and count == math.floor(count)):
                    raise self.wrong(line, place, count, "no number of tokens: 1, 2, ...", "fix or remove that line")
                self.tokens.append(count)
            if choice.time >= 0:
                at = self.time(line, row)
                if choice.minus >= 0:
                    at -= self.number(line, row, choice.minus)
                if math.isnan(begin):
                    begin = at if self.from_first or choice.count >= 0 else 0.0
                if not abs(at - begin) <= span_max:
                    why = f"more than ten years from {'the first row' if self.from_first else 'the beginning'}"
                    text = self.cell(row, choice.time)
                    raise self.wrong(line, choice.time, text, why, "correct that time or the first")
                if choice.once >= 0:
                    key = self.cell(row, choice.once)
                    self.first_of[key] = min(at, self.first_of.get(key, at))
                    continue
                self.times.append(at)
            self.lines.append(line)

    def cell(self, row: list[str], place: int) -> str:
        """A cell; empty where the row is too short."""
        return row[place] if place < len(row) else ""

    def number(self, line: int, row: list[str], place: int) -> float:
        """Number in a cell."""
        text = self.cell(row, place)
        value = number_of(text)
        if value is None:
            raise self.wrong(line, place, text, "no number", number_remedy(text, "fix that line"))
        return value

    def time(self, line: int, row: list[str]) -> float:
        """Time in a cell, in the unit of its column; dates in seconds since 1970."""
        if self.choice.unit != DATE:
            return self.number(line, row, self.choice.time)
        text = self.cell(row, self.choice.time)
        found = date_of(text)
        if found is None:
            raise self.wrong(line, self.choice.time, text, "not a date", "write ISO 8601, as in the first row")
        return found.timestamp()

    def wrong(self, line: int, place: int, value: object, why: str, remedy: str) -> TraceError:
        """Error of one cell."""
        return TraceError(f"{self.path} line {line}: {why}", field=self.names[place], value=value, remedy=remedy)

    def seconds(self) -> Floats:
        """Times in seconds, from the first one."""
        times = np.array(self.times, dtype=np.float64)
        return np.asarray((times - times[0] * self.from_first) * UNIT_S.get(self.choice.unit, 1.0))

    def counts(self, whole: bool) -> RequestTrace:
        """Trace of counts, once every bin is known to be there."""
        choice, values = self.choice, np.array(self.values, dtype=np.float64)
        self.refuse(values < 0, choice.count, values, "no count: must be >= 0", "fix that line")
        if whole and not choice.per_s:
            self.refuse(values != np.floor(values), choice.count, values, "no count", "0, 1, 2, ...")
        steps = np.diff(values)
        if not choice.per_s and steps.size > 1 and may_run(self.names[choice.count]):
            runs = 10 * np.count_nonzero(steps < 0) <= np.count_nonzero(steps > 0)  # it falls where a counter restarts
            self.refuse(
                np.full(values.shape, runs), choice.count, values, "a running total, as it hardly ever falls",
                "write the differences of its rows; if each row counts its own interval, name that column requests",
            )  # fmt: skip
        bin_s = self.width_s() if choice.time >= 0 else choice.bin_s
        if values.size * bin_s > SPAN_MAX_S:
            line = self.lines[int(SPAN_MAX_S // bin_s)]
            raise TraceError(
                f"{self.path} line {line}: more than ten years from the first row", field="bin_s", value=bin_s,
                remedy="lower bin_s, correct the times, or cut the trace there",
            )  # fmt: skip
        numbers = values * (bin_s / choice.per_s) if choice.per_s else values
        too_many = numbers > bin_s * BY_UNIT["_per_s"].high
        self.refuse(too_many, choice.count, values, "more than a billion requests a second", "fix that line")
        if not numbers.sum() > 0:
            raise TraceError(
                f"{self.path} holds no request: every number is 0", field="trace", remedy="give another trace"
            )
        what = "a rate" if choice.per_s else "a count"
        read_as = f"each {what} ({self.names[choice.count]}) over {bin_s:g} s"
        return RequestTrace(self.path.name, self.rows, read_as, numbers, bin_s)

    def width_s(self) -> float:
        """Width of the bins that the times tell.

        Raises:
            TraceError: they tell none, another one than is stated, or a bin is missing or occurs twice.
        """
        choice, place, seconds = self.choice, self.choice.time, self.seconds()
        if seconds.size == 1:
            if not choice.bin_s:
                raise TraceError(
                    f"{self.path}: one row does not tell how long a bin is", field="bin_s", remedy="set it"
                )
            return choice.bin_s
        gaps = np.diff(seconds)
        step = float(gaps[0])
        width_s = choice.bin_s or step
        if _spaced(gaps) and abs(step - width_s) > STEP_TOLERANCE * width_s:
            raise TraceError(
                f"{self.path}: rows are {step:g} s apart, but each counts {width_s:g} s by "
                f"{'its column ' + self.names[place] if choice.steps else 'bin_s'}", field="bin_s", value=width_s,
                remedy=f"set bin_s to {step:g} if each row counts that long, else write every interval, with 0",
            )  # fmt: skip
        wrong = np.concatenate(([False], np.abs(gaps - width_s) > STEP_TOLERANCE * abs(width_s))) | (width_s <= 0)
        times = np.array(self.times)
        if wrong.any():
            i = int(np.argmax(wrong))
            before = f" follows {times[i - 1]:.12g}: a gap or a repetition" if i else ": not before the next"
            why = f"{self.names[place]} {times[i]:.12g}{before}"
            self.refuse(wrong, place, times, why, "write every interval once, in order, with 0 where nothing arrived")
        return width_s

    def requests(self) -> RequestTrace:
        """Trace of single requests."""
        choice, place = self.choice, self.choice.time
        if choice.once >= 0:
            self.times = array("d", sorted(self.first_of.values()))
        elif choice.minus >= 0:
            self.times = array("d", sorted(self.times))
        else:
            times = np.array(self.times)
            late = np.diff(times, prepend=times[0]) < 0
            if not self.from_first:
                late |= times < 0
            self.refuse(late, place, times, "negative or earlier than the row before", "sort the trace")
            check_samples(self.path, self.names, choice, _spaced(np.diff(times)))
        what = f"rows of one {self.names[choice.once]} a request" if choice.once >= 0 else "each a request"
        read_as = f"{what} at {self.names[place]} ({choice.unit})"
        tokens = np.array(self.tokens).reshape(-1, 2) if self.of_tokens else None
        return RequestTrace(self.path.name, self.rows, read_as, self.seconds(), tokens=tokens)

    def refuse(self, wrong: npt.NDArray[np.bool_], place: int, values: Floats, why: str, remedy: str) -> None:
        """Raise TraceError for the first row that is wrong."""
        if wrong.any():
            i = int(np.argmax(wrong))
            raise self.wrong(self.lines[i], place, float(values[i]), why, remedy)


def _spaced(gaps: Floats) -> bool:
    """Whether times lie at one distance, and are more than two."""
    return gaps.size > 1 and bool(gaps[0] > 0) and bool(np.allclose(gaps, gaps[0], atol=0, rtol=STEP_TOLERANCE))


def _functions(path: Path, names: list[str], rows: Rows, options: TraceOptions) -> RequestTrace:
    """Azure Functions 2019: a row a function, a column a minute; summed over all, or those of one name (`column`).

    Raises:
        TraceError: minutes are missing, a cell is not a count, a setting contradicts it, no row has that name.
    """
    minutes = sum(name.isdigit() for name in names)
    begin = len(names) - minutes
    if names[begin:] != [str(i + 1) for i in range(minutes)]:
        raise TraceError(
            f"{path} line 1: columns of minutes are missing", field="column", remedy=f"have 1 to {minutes}, in order"
        )
    if options.time_column or options.time_unit or options.bin_s not in (0.0, 60.0):
        raise TraceError(
            f"{path} has a column a minute", field="time_column, time_unit, bin_s",
            value=(options.time_column, options.time_unit, options.bin_s), remedy="leave them out",
        )  # fmt: skip
    counts, summed = np.zeros(minutes), 0
    for line, row in rows:
        if options.column and options.column not in row[:begin]:
            continue
        cells = [number_of(cell) for cell in row[begin:]]
        bad = next((i for i, n in enumerate(cells) if n is None or n < 0 or n != int(n)), None)
        if bad is not None or len(cells) != minutes:
            place = begin + (bad if bad is not None else len(cells))
            raise TraceError(
                f"{path} line {line}: no count", field=f"column {place + 1}", value="".join(row[place : place + 1]),
                remedy="fix that line",
            )  # fmt: skip
        counts += np.array(cells, dtype=np.float64)
        summed += 1
    if not counts.any():
        raise TraceError(
            f"{path} holds no request" + (" of that name" if options.column else ""), field="column",
            value=options.column or None, remedy=f"name a cell of {names[:begin]}, or leave column out: all rows",
        )  # fmt: skip
    return RequestTrace(path.name, summed, f"summed over {minutes:,} columns of minutes", counts, 60.0)
