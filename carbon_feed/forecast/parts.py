"""Long work in short parts: a generator that stops where others may have their turn, and returns its result.

A brain cannot wait, so it says where it could; a shell gives way there, and a test does not.
"""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Parts = Generator[None, None, T]


def finished(parts: "Parts[T]") -> T:
    """The result, without a break."""
    while True:
        try:
            next(parts)
        except StopIteration as done:
            result: T = done.value
            return result
