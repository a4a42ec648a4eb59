"""Samples of a metric page in Prometheus' text format, as exporters really write it."""

import re
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_NAME: Final = re.compile(r"\s*([a-zA-Z_:][\w:]*)")


def page_samples(text: str, known: Callable[[str], object]) -> Iterator[Sample]:
    """Samples of the names that are known.

    A line of them that cannot be read costs that line: dcgm-exporter writes `ERROR - FAILED TO CONVERT TO STRING` and
    names of devices as values (github.com/NVIDIA/dcgm-exporter issues 394, 488).

    Raises:
        ValueError: no page of metrics.
    """
    for line in text.split("\n"):  # labels may hold other ends of lines
        if not (begun := line.lstrip()) or begun.startswith("#"):
            continue
        name = _NAME.match(line)
        if name is None:
            raise ValueError(f"no page of metrics: {line[:80]!r}")
        if known(name[1]):
            yield from _samples(line)


def _samples(line: str) -> list[Sample]:
    try:
        return [sample for family in text_string_to_metric_families(line) for sample in family.samples]
    except (ValueError, IndexError, KeyError):
        return []
