"""Incremental computation: a generator that stops where others may have their turn, and returns its result.

Pure code cannot wait, so it says where it could; a shell gives way there, and a test does not.
"""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Incremental = Generator[None, None, T]


def run_to_end(parts: "Incremental[T]") -> T:
    """Run an incremental computation without a break; returns its result."""
    while True:
        try:
            next(parts)
        except StopIteration as done:
            result: T = done.value
            return result
