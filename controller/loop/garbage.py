"""Garbage of the controller's process: full collections by the hour, and none within a decision.

Each looks through all plans and statuses while every thread waits: 0.3 s for 100,000 GPUs, several times a decision.
Plans and views have no cycles, so that next to nothing waits for a collection.
"""

import gc
from typing import Final

from trefoil.runtime.clock import Clock

COLLECT_S: Final = 3600.0
NEVER: Final = 2**31 - 1


def put_off_full_collections() -> None:
    """Switch off the full collections that Python starts by itself."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


async def collect_by_the_hour(clock: Clock) -> None:
    """Collect forever, once every `COLLECT_S`."""
    while True:
        await clock.sleep(COLLECT_S)
        gc.collect()
