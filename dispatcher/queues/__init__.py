"""Queues by the name that a Route gives them: one table, no registration by import.

`--queue module:Class` loads a user's own; it is held to the same contract (tests/contract/test_queue_contract.py).
"""

from typing import Final

from dispatcher.queues.fifo import FifoQueue
from dispatcher.queues.ssjf import SsjfQueue
from trefoil.core.brains import Queue
from trefoil.core.parts import Kind, Part, Parts, Traits

QUEUES: Final[Parts[Queue]] = {
    "fifo": Part(Kind.QUEUE, "fifo", FifoQueue, traits=Traits(order="arrival")),
    "ssjf": Part(Kind.QUEUE, "ssjf", SsjfQueue, traits=Traits(order="length", lengths=True)),
}
