"""Columns of a trace of requests: which one counts or dates them, by its name, its published format or a setting.

A table either counts the requests of each interval (`second,requests`, `timestamp,qps`), or has one row a request.
What no name, format or setting says is refused: a wrong guess would be another load.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trefoil.core.errors import SettingError, TraceError, shown
from trefoil.runtime.given.table import (
    DATE,
    UNIT_S,
    date_of,
    named_column,
    number_of,
    since_1970,
    time_unit,
    unit_of_words,
    words_of,
)


def _of(words: str) -> frozenset[str]:
    return frozenset(words.split())


_BINS: Final = ("second", "minute", "hour", "day")
"""First columns that number intervals of equal width."""
_COUNTS: Final = _of(
    "arrival arrivals call calls count counts hit hits inference inferences invocation invocations job jobs message "
    "messages pageview pageviews prompt prompts queries query req reqs request requests task tasks tweet tweets view "
    "views visit visits"
)
_FILL: Final = _of("all http no num number of sum total")
_RATES: Final = _of("qps rps")
_RATE_WORDS: Final = _RATES | _of("hz irate per qpm rate rates rpm throughput tpm tps /")
_MEANS: Final = _of("average avg mean")
_TIMES: Final = _of(
    "arrival arrived create created creation date datetime epoch invoked submit submitted time timestamp ts unix"
)
_ARRIVALS: Final = _of("arrival arrived invoked submit submitted")
_OTHER_TIMES: Final = _of(
    "completion deletion deleted duration elapsed end ended exec execution finish finished firstbyte gap idle inter "
    "interarrival interval latency processing queue response rt scheduled service tokens ttft updated wait"
)
_PROMPTS: Final = ("context_tokens", "contexttokens", "prompt_tokens", "request tokens", "input_length")
_ANSWERS: Final = ("generated_tokens", "generatedtokens", "completion_tokens", "response tokens", "output_length")
"""Columns of a request's tokens: Azure LLM, OpenAI's usage, BurstGPT, Alibaba Qwen and Mooncake."""
_SCALES: Final = _of("k kilo mega million millions mio thousand thousands")
_RUNNING: Final = _of("accumulated cum cumulative nv running total totals")
_DIFFERENCES: Final = _of("delta increase")
_SAMPLES: Final = _MEANS | _of("load metric metrics usage util utilization value")
_NUMBERS: Final = _COUNTS | _of("connection connections user users")
_OF_ONE: Final = _of(
    "byte bytes duration elapsed hash id ids index latency len length ms priority size token tokens type"
)
"""Words of what one request has: `request_id`, `prompt_tokens`."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Settings of a trace that its header does not say, or that it must agree with.

    column: of the counts; of an Azure Functions table the function, app or owner
    time_column, time_unit: of the times
    bin_s: seconds that a row counts

    Columns without a name have numbers, from 1.
    """

    column: str = ""
    time_column: str = ""
    time_unit: str = ""
    bin_s: float = 0.0

    def __post_init__(self) -> None:
        if self.time_unit not in ("", *UNIT_S, DATE):
            raise SettingError(
                "no such unit", field="time_unit", value=self.time_unit, remedy=f"one of {', '.join((*UNIT_S, DATE))}"
            )
        if not 0 <= self.bin_s < math.inf:
            raise SettingError("no width", field="bin_s", value=self.bin_s, remedy="seconds that a row counts")


@dataclass(frozen=True, slots=True)
class _Format:
    """Published format whose header leaves the unit of its times open."""

    names: frozenset[str]
    time: str
    unit: str
    minus: str = ""
    once: str = ""


_FORMATS: Final = (
    # Azure Functions 2021: an invocation is dated by its end.
    _Format(frozenset(("app", "func", "end_timestamp", "duration")), "end_timestamp", "s", minus="duration"),
    _Format(frozenset(("timestamp", "model", "request tokens", "response tokens")), "timestamp", "s"),  # BurstGPT
    _Format(frozenset(("timestamp", "contexttokens", "generatedtokens")), "timestamp", DATE),  # Azure LLM 2023, 2024
    # Alibaba microservices 2021, 2022: a request is all calls of one trace.
    _Format(frozenset(("timestamp", "traceid", "um", "dm")), "timestamp", "ms", once="traceid"),
    _Format(frozenset(("creation_time", "deletion_time", "scheduled_time")), "creation_time", "s"),  # Alibaba GPU 2023
    _Format(frozenset(("chat_id", "timestamp", "hash_ids")), "timestamp", "s"),  # Alibaba Qwen
    _Format(frozenset(("timestamp", "input_length", "output_length", "hash_ids")), "timestamp", "ms"),  # Mooncake
    _Format(frozenset(("relative_unix", "response_size", "time_firstbyte")), "relative_unix", "s"),  # Wikipedia
)
_WIKIBENCH: Final = ("counter", "timestamp", "url", "save")


@dataclass(frozen=True, slots=True)
class Columns:
    """Places of the columns that are read; -1: none.

    bin_s: seconds that a row counts; 0: the distance of the times. per_s: unit of a rate; 0: counts.
    minus: subtracted from the time. once: rows of one value are one request. steps: times are numbers of intervals
    """

    time: int = -1
    unit: str = ""
    count: int = -1
    per_s: float = 0.0
    bin_s: float = 0.0
    minus: int = -1
    once: int = -1
    steps: bool = False
    may_be_samples: bool = False
    """Nothing but a column of times says that rows are requests."""
    numbers: tuple[str, ...] = ()
    """Columns whose first cell is a number, or missing."""


def header_of(first: list[str], options: TraceOptions) -> tuple[list[str], bool]:
    """Names of the columns, and whether the first row is one of data."""
    if len(first) in (3, 4) and number_of(first[0]) is not None and first[2].startswith("http"):
        return list(_WIKIBENCH[: len(first)]), True
    numbered = [str(i + 1) for i in range(len(first))]
    named = [first[int(name) - 1] for name in (options.column, options.time_column) if name in numbered]
    cells = [cell for cell in (first[0], *named) if number_of(cell) is not None or date_of(cell)]
    return (numbered, True) if cells else (first, False)


def choose(path: Path, names: Sequence[str], row: Sequence[str], options: TraceOptions) -> Columns:
    """Choose columns by header, first row of data and settings.

    Raises:
        TraceError: unknown or contradictory; names file, column and remedy.
    """
    lower = [name.lower() for name in names]
    known = next((one for one in _FORMATS if one.names <= frozenset(lower)), None)
    count = named_column(str(path), names, options.column, "column") if options.column else _count(path, names, options)
    if known is not None and not options.time_column:
        time, by_name = lower.index(known.time), True
    else:
        time, by_name = _time(path, names, row, options, counted=count >= 0)
    if time == count >= 0:
        raise TraceError(
            f"{path}: column and time_column name one column", field="column", value=names[time], remedy="name two"
        )
    if count < 0 and options.bin_s:
        raise TraceError(
            f"{path}: bin_s says that rows count requests, no column of {shown(list(names))} is one of counts",
            field="bin_s", value=options.bin_s, remedy="name it with column, or leave bin_s out: each row a request",
        )  # fmt: skip
    found = Columns(time=time, count=count, bin_s=options.bin_s)
    if time >= 0:
        unit = known.unit if known is not None and lower[time] == known.time else ""
        found = replace(found, unit=time_unit(str(path), names[time], row[time], options.time_unit, unit))
    if count >= 0:
        return _counting(path, names, found)
    if known is not None and time == lower.index(known.time):
        minus, once = (lower.index(name) if name else -1 for name in (known.minus, known.once))
        return replace(found, minus=minus, once=once)
    unsure = by_name and len(names) > 1 and not _ARRIVALS & set(words_of(names[time]))
    numbers = tuple(name for name, cell in zip(names, row, strict=False) if _may_be_number(cell))
    return replace(found, may_be_samples=unsure, numbers=numbers)


def _may_be_number(cell: str) -> bool:
    return number_of(cell) is not None or cell.lower() in ("", "nan", "null", "none")


def _counting(path: Path, names: Sequence[str], found: Columns) -> Columns:
    """Columns of a table of counts or rates."""
    words = words_of(names[found.count])
    per_s = _rate_unit_s(words) or 0.0
    if not per_s and _may_be_rate(words):
        raise TraceError(
            f"{path}: a rate of which unit", field="column", value=names[found.count],
            remedy="rename that column to rps or requests/min; of counts to requests",
        )  # fmt: skip
    if _SCALES & set(words):
        raise TraceError(
            f"{path}: counts of thousands or millions", field="column", value=names[found.count],
            remedy="write the numbers out and rename that column to requests",
        )  # fmt: skip
    bins = found.time >= 0 and words_of(names[found.time]) in [(name,) for name in _BINS]
    if found.time < 0 and not found.bin_s:
        raise TraceError(
            f"{path} does not say how long a bin is: no column of times in {shown(list(names))}",
            field="bin_s", remedy=f"set it, name the times with time_column, or name the first column one of {_BINS}",
        )  # fmt: skip
    width_s = UNIT_S[unit_of_words(words_of(names[found.time]))] if bins else 0.0
    return replace(found, per_s=per_s, bin_s=found.bin_s or width_s, steps=bins and not found.bin_s)


def _count(path: Path, names: Sequence[str], options: TraceOptions) -> int:
    """Place of the column that counts requests by its name; -1: none."""
    all_words = [words_of(name) for name in names]
    if options.bin_s and len(names) == 1 and number_of(names[0]) is not None:
        return 0
    found = [
        i
        for i, words in enumerate(all_words)
        if names[i] != options.time_column and (_counts(words) or _rate_unit_s(words) is not None)
    ]
    if len(found) > 1:
        raise TraceError(
            f"{path}: several columns could count the requests",
            field="column", value=[names[i] for i in found], remedy="set column to one of them",
        )  # fmt: skip
    if not found and any(words == (name,) for words in all_words[:1] for name in _BINS):
        raise TraceError(
            f"{path} line 1: unknown header {shown(','.join(names))}: no column is known to count requests",
            field="column", value=list(names), remedy="set column to the one that does, or name it requests",
        )  # fmt: skip
    return found[0] if found else -1


def _counts(words: Sequence[str]) -> bool:
    return bool(_COUNTS & set(words)) and set(words) <= _COUNTS | _FILL


def _rate_unit_s(words: Sequence[str]) -> float | None:
    """Seconds per unit of a rate of requests; None: the words name none."""
    if len(own := [word for word in words if word not in _MEANS]) == 1 and own[0] in _RATES:
        return 1.0
    unit = unit_of_words(words[-1:])
    parted = len(words) >= 3 and words[-2] in ("per", "/") and bool(unit)
    return UNIT_S[unit] if parted and (_counts(words[:-2]) or tuple(words[:-2]) == ("rate",)) else None


def may_run(name: str) -> bool:
    """Whether a column of counts may be a running total, as counters of Prometheus and Triton are."""
    words = set(words_of(name))
    return bool(_RUNNING & words) and not _DIFFERENCES & words


def _may_be_rate(words: Sequence[str]) -> bool:
    """Whether words may name a rate, in whatever unit: `krps`, `tokens/s`, `requests_per_5min`."""
    return bool(_RATE_WORDS & set(words)) or any(word.endswith(tuple(_RATES)) for word in words)


def _may_be_samples(name: str, *, numeric: bool) -> bool:
    """Whether a column may hold values of a metric rather than what one request has."""
    words = words_of(name)
    counted = _NUMBERS & set(words) if numeric else frozenset()
    if _OF_ONE & set(words):
        counted = frozenset(word for word in counted if word.endswith("s"))
    return bool(counted) or bool(_SAMPLES & set(words)) or _may_be_rate(words)


def _time(
    path: Path, names: Sequence[str], row: Sequence[str], options: TraceOptions, *, counted: bool
) -> tuple[int, bool]:
    """Place of the column of times, and whether its name alone says so; -1: none, as counts may have."""
    if options.time_column:
        return named_column(str(path), names, options.time_column, "time_column"), False
    if counted and words_of(names[0]) in [(name,) for name in _BINS]:
        return 0, True
    dated = [i for i, cell in enumerate(row) if number_of(cell) is not None or date_of(cell)]
    named = [i for i, name in enumerate(names) if _TIMES & (words := set(words_of(name))) and not _OTHER_TIMES & words]
    found = [i for i in named if i in dated] or ([] if options.bin_s else named)
    if not found and len(names) == 1 and dated and not counted:
        if names == ["1"] and not options.time_unit and number_of(row[0]) is not None and not since_1970(row[0]):
            raise TraceError(
                f"{path} line 1: numbers without a header", field="bin_s, time_unit",
                remedy="set bin_s if each counts requests (seconds that it counts), time_unit if each is a time",
            )  # fmt: skip
        return 0, True
    arrivals = [i for i in found if _ARRIVALS & set(words_of(names[i]))]
    found = arrivals if len(arrivals) == 1 else found
    if len(found) > 1:
        raise TraceError(
            f"{path}: several columns could date the requests",
            field="time_column", value=[names[i] for i in found], remedy="set time_column to one of them",
        )  # fmt: skip
    if found:
        return found[0], True
    if not counted:
        raise TraceError(
            f"{path} line 1: unknown header {shown(','.join(names))}: no column is known to count or date requests",
            field="column, time_column", value=list(names),
            remedy="set column to the counts and bin_s or time_column, or time_column to the time of each request",
        )  # fmt: skip
    return -1, False


def token_columns(path: Path, names: Sequence[str], choice: Columns) -> tuple[int, int]:
    """Places of the tokens of each request's prompt and of its answer.

    Raises:
        TraceError: rows are not single requests in order, or no column has them.
    """
    lower = [name.lower() for name in names]
    found = [next((lower.index(name) for name in known if name in lower), -1) for known in (_PROMPTS, _ANSWERS)]
    if choice.count >= 0 or choice.minus >= 0 or choice.once >= 0 or min(found) < 0:
        single = choice.count < 0 and choice.minus < 0 and choice.once < 0
        why = "no columns with the tokens of prompts and answers" if single else "rows are not single requests"
        raise TraceError(
            f"{path}: {why}", field="arrivals.replay", value=list(names),
            remedy=f"one row a request with {_PROMPTS[0]} and {_ANSWERS[0]}, or set replay to false",
        )  # fmt: skip
    return found[0], found[1]


def check_samples(path: Path, names: Sequence[str], choice: Columns, spaced: bool) -> None:
    """Refuse rows that may be samples of a metric and not requests: equal steps, a column of values or of counts.

    Raises:
        TraceError: names the columns.
    """
    values = [name for name in names if _may_be_samples(name, numeric=name in choice.numbers)]
    if choice.may_be_samples and (spaced or values):
        why = "lie at equal distances" if spaced else f"have a column {values[0]!r}"
        raise TraceError(
            f"{path}: rows {why}: they may be samples and not single requests", field="column", value=list(names),
            remedy="set column to the one that counts requests; if each row is one request, set time_column",
        )  # fmt: skip
