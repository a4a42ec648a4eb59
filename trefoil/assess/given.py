"""Reading without a Prometheus: metric pages, scraped for some minutes, and exports as CSV."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx

from trefoil.assess.prometheus import base_url, check_clusters, get
from trefoil.assess.series import Labels, MetricSeries, known_name, series_of
from trefoil.core.errors import InvalidInput, TrefoilError
from trefoil.runtime.clock import WallClock
from trefoil.runtime.given import metric_page
from trefoil.runtime.given.table import date_of, number_of, read_rows

NAME_COLUMNS: Final = ("metric", "name", "__name__")
TIME_COLUMNS: Final = ("timestamp", "time")
MS_FROM: Final = 1e11  # beyond it a time is in milliseconds

Sample = tuple[str, Labels, float, float]


def page_samples(text: str, at_s: float, source: str, option: str = "--scrape", **more: str) -> Iterator[Sample]:
    """Samples of a metric page that are read, at a time; raises InvalidInput: it is not a page of metrics."""
    try:
        for sample in metric_page.page_samples(text, known_name):
            yield sample.name, {**more, **sample.labels}, at_s, float(sample.value)
    except ValueError as error:
        remedy = "name pages in Prometheus' text format: Triton's :8002/metrics, vLLM's /metrics, DCGM's :9400/metrics"
        raise InvalidInput("is not a page of metrics", field=option, value=source, remedy=remedy) from error


def scrape(
    urls: Sequence[str], span_s: float, every_s: float, client: httpx.Client, asked: Counter[str],
    say: Callable[[str], None],
) -> list[MetricSeries]:  # fmt: skip
    """Series of pages that are read every `every_s` for `span_s`; each page's labels get its `instance`.

    A page that cannot be read at first is an error; later it leaves a gap, which `say` reports.
    """
    clock, samples = WallClock(), list[Sample]()
    urls = [base_url(url, "--scrape") for url in urls]
    begin_s, rounds = clock.monotonic_s(), max(2, round(span_s / every_s) + 1)
    for number in range(rounds):
        clock.block(max(0.0, begin_s + number * every_s - clock.monotonic_s()))
        for url in urls:
            try:
                text = get(client, url, "--scrape", asked)[1].decode("utf-8", "replace")
                found = list(page_samples(text, clock.now_s(), url, instance=urlsplit(url).netloc))
            except TrefoilError as error:
                if not number:
                    raise
                say(f"a gap: {error}")
                continue
            samples += found
            asked["samples"] += len(found)
    return series_of(samples)


def read_csv(paths: Sequence[Path]) -> list[MetricSeries]:
    """Series of CSV files: long (`metric,timestamp,value` and a column for each label) or wide, as Grafana exports
    (`Time` and a column for each series, headed `name{label="value"}`)."""
    samples = list[Sample]()
    for path in paths:
        rows = read_rows(path, "--from-csv")
        _, header = next(rows, (0, []))
        samples += _long(path, header, rows) if set(NAME_COLUMNS) & set(header) else _wide(path, header, rows)
    found = series_of(samples)
    check_clusters([one.labels for one in found])
    return found


def _column(path: Path, header: Sequence[str], names: Sequence[str]) -> int:
    if found := [number for number, cell in enumerate(header) if cell.lower() in names]:
        return found[0]
    remedy = "write metric,timestamp,value,LABEL..., or export the graph's series from Grafana"
    raise InvalidInput(f"no column {' or '.join(names)}", field="--from-csv", value=str(path), remedy=remedy)


def _long(path: Path, header: Sequence[str], rows: Iterator[tuple[int, list[str]]]) -> Iterator[Sample]:
    name, time, value = (_column(path, header, names) for names in (NAME_COLUMNS, TIME_COLUMNS, ("value",)))
    labels = [(n, cell) for n, cell in enumerate(header) if n not in (name, time, value)]
    for line, row in rows:
        if len(row) >= len(header) and known_name(row[name]):
            own = {label: row[n] for n, label in labels if row[n]}
            yield row[name], own, *_numbers(f"{path} line {line}", row[time], row[value])


def _wide(path: Path, header: Sequence[str], rows: Iterator[tuple[int, list[str]]]) -> Iterator[Sample]:
    time, heads = _column(path, header, TIME_COLUMNS), dict[int, tuple[str, Labels]]()
    for n, cell in enumerate(header):
        for name, labels, *_ in page_samples(f"{cell} 0\n", 0.0, f"{path}: {cell}", "--from-csv") if n != time else ():
            heads[n] = name, labels
    for line, row in rows:
        for n, head in heads.items():
            if n < len(row) and row[n]:
                yield *head, *_numbers(f"{path} line {line}", row[time], row[n])


def _numbers(where: str, time: str, value: str) -> tuple[float, float]:
    """Time [s] and value of a cell."""
    if (at := number_of(time)) is None and (date := date_of(time)) is not None:
        at = date.timestamp()
    if at is None:
        remedy = "write seconds or milliseconds since 1970, or YYYY-MM-DDTHH:MM:SSZ"
        raise InvalidInput(f"{where}: no time", field="timestamp", value=time, remedy=remedy)
    try:
        return at / 1e3 if at > MS_FROM else at, float(value)
    except ValueError as error:
        remedy = "export raw values, without units"
        raise InvalidInput(f"{where}: no number", field="value", value=value, remedy=remedy) from error
