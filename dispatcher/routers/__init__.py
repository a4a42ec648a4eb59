"""Routers by the name that a Route gives them: one table, no registration by import.

`--router module:Class` loads a user's own; it is held to the same contract (tests/contract/test_router_contract.py).
"""

import importlib
from collections.abc import Callable
from typing import Any, Final

from dispatcher.queues import QUEUES
from dispatcher.queues.fifo import FifoQueue
from dispatcher.routers.fifo import Fifo
from dispatcher.routers.least_loaded import LeastLoaded
from dispatcher.routers.p2c import PowerOfTwo
from dispatcher.routers.weighted import Weighted
from trefoil.core.brains import Router
from trefoil.core.errors import PlanError

Build = Callable[[str, FifoQueue[Any]], Router]

ROUTERS: Final[dict[str, Build]] = {
    "weighted": Weighted,
    "fifo": Fifo,
    "least_loaded": LeastLoaded,
    "p2c": PowerOfTwo,
}


def resolve(name: str) -> Build:
    """The router of that name, or the class that `module:Class` names.

    Raises:
        PlanError: there is none.
    """
    if name in ROUTERS:
        return ROUTERS[name]
    module, colon, attribute = name.partition(":")
    if colon:
        try:
            found: Build = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise PlanError(f"cannot be loaded: {error}", field="router", value=name, remedy="module:Class") from error
        return found
    known = ", ".join(sorted(ROUTERS))
    raise PlanError("no such router", field="router", value=name, remedy=f"one of {known}, or module:Class")


def make(family: str, router: str, queue: str) -> Router:
    """A fresh router with its queue.

    Raises:
        PlanError: router or queue is not known.
    """
    if queue not in QUEUES:
        raise PlanError("no such queue", field="queue", value=queue, remedy=f"one of {', '.join(sorted(QUEUES))}")
    return resolve(router)(family, QUEUES[queue](family))
