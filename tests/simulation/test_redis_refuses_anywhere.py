"""An error at any one command, read or write, of a history of the whole system: no promise breaks, no request fails.

A sample of the commands by default. EVERY=1 takes each of them, alone and with the five that follow it: some 6,400
histories, three quarters of an hour on one core. Drawn ones: test_whole_system.py.
"""

import functools
import os
from collections.abc import Callable

import pytest

from tests.support.virtual.faults import ALL_REFUSED, WRITES_REFUSED
from tests.support.virtual.promises import told
from tests.support.virtual.system import System, history

TEXTS = (*WRITES_REFUSED, *ALL_REFUSED)
SEED, BLOCKS = 12, 10
EVERY = int(os.environ.get("EVERY", "500"))


def refused_at(first: int, count: int = 1) -> Callable[[System], None]:
    def strike(system: System) -> None:
        system.server.refusal = lambda n: TEXTS[first % len(TEXTS)] if first <= n < first + count else ""

    return strike


@functools.cache
def commands() -> int:
    """How many commands an undisturbed history takes."""
    return history(SEED, lambda _: None)[1].server.commands


@pytest.mark.parametrize("block", range(BLOCKS))
def test_an_error_at_any_command_breaks_nothing(block: int) -> None:
    for number in range(1 + block, commands(), EVERY * BLOCKS):
        for count in (1, 6):  # one alone, and several in a row
            found, system = history(SEED, refused_at(number, count))
            assert not found, f"command {number}, {count}: {told(found, system.log)}"
            assert {end for request in system.requests for end in request.ends} == {"OK"}, (number, count)
