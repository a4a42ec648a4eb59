"""How long a router takes for one decision, at 100 slices. CPU time of this thread: a busy machine matters little."""

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, Final

from dispatcher.queues import QUEUES
from dispatcher.queues.fair import FairQueue
from dispatcher.routers import ROUTERS
from trefoil.core.brains import Outcome, Ticket
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route, RouteTarget

ROUTED_SLICES: Final = 100


def routers(repeats: int) -> dict[str, float]:
    """Microseconds of a decision of each router, at 100 slices of four variants; median of the repeats.

    Without those of a group, which look at each of a job's GPUs, of which there are few.
    """
    variants = ("xs", "s", "m", "l")
    keys = [SliceKey(f"n{n // 56}/gpu{n // 7}", "1g.5gb", n % 7, 1) for n in range(ROUTED_SLICES)]
    targets = tuple(RouteTarget(key, variants[n % 4], 0, 1 / ROUTED_SLICES, 4, False, "") for n, key in enumerate(keys))
    ended = Outcome("OK", 10.0, 9.0, 0, True)
    found = {}
    for name in sorted(name for name, part in ROUTERS.items() if not part.traits.group):
        router = ROUTERS[name].make("bench", FairQueue("bench", partial(QUEUES["fifo"].make, "bench")))
        router.on_table(Route("bench", name, "fifo", targets, 4096, 2**30, {}), 0.0)
        tickets = [
            Ticket(n, "bench", "", "", 1, 64, 0.0, None, 0.0, 0, "", False, False, None) for n in range(200 * 50)
        ]
        found[name] = median(_decide_us(router, tickets, ended) for _ in range(repeats))
    return found


def _decide_us(router: Any, tickets: Sequence[Ticket], ended: Outcome) -> float:
    """A hundred in flight while the next one comes."""
    flying: list[tuple[Ticket, Any]] = []
    decisions = 0
    began_s = time.thread_time()
    for ticket in tickets:
        if len(flying) >= ROUTED_SLICES:
            old, pick = flying.pop(0)
            router.on_done(old, pick, ended, 0.0)
            router.on_credit(pick.slice, 0.0)
        pick = router.on_arrival(ticket, 0.0)
        assert pick is not None, "there are credits for all"
        flying.append((ticket, pick))
        decisions += 1
    took_s = time.thread_time() - began_s
    for old, pick in flying:
        router.on_done(old, pick, ended, 0.0)
    return took_s / decisions * 1e6
