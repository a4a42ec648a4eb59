"""Queues by the name that a Route gives them."""

from collections.abc import Callable
from typing import Any, Final

from dispatcher.queues.fifo import FifoQueue

QUEUES: Final[dict[str, Callable[[str], FifoQueue[Any]]]] = {"fifo": FifoQueue}
