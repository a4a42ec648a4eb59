"""Histories in virtual time without a search for garbage in their midst: it would go through the whole test process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

NO_SWEEPS = SimpleNamespace(collect=lambda: None, freeze=lambda: None, unfreeze=lambda: None)
"""In place of `gc` where a service runs in a process that is not its own."""
A_SWEEP = 50  # histories
_played = count()


@contextmanager
def unswept() -> Iterator[None]:
    """Play one history. What the ones before have left is collected now and then."""
    played, was = next(_played), gc.isenabled()
    gc.disable()
    if played == 0:
        gc.collect()
        gc.freeze()  # modules stay: they need no look
    elif played % A_SWEEP == 0:
        gc.collect()
    try:
        yield
    finally:
        if was:
            gc.enable()
