"""Incremental computation: a generator that stops where others may have their turn, and returns its result.

Pure code cannot wait, so it says where it could; a shell gives way there, and a test does not.
"""

from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

Incremental = Generator[None, None, T]


class Breaks(Generic[T]):
    """Iterator over the breaks of an incremental computation; `result` is there when it has ended."""

    result: T

    def __init__(self, computation: "Incremental[T]") -> None:
        self._computation = computation

    def __iter__(self) -> Iterator[None]:
        self.result = yield from self._computation


def run_to_end(computation: "Incremental[T]") -> T:
    """Run an incremental computation without a break; returns its result."""
    breaks = Breaks(computation)
    for _ in breaks:
        pass
    return breaks.result
