"""Router `fifo`: one queue for the whole family, any free credit pulls.

Source: CLOVER section 4.1 (one FIFO of requests; an instance that finishes pulls the next one).
Data: live targets k of the route with credits c_k; weights are not read.
Decision: the slice that serves a request.
Formulation: on arrival, if no request waits and a slice has a credit: the one with the fewest requests in flight, then
    the longest idle. Otherwise wait; a slice with a free credit takes the request that waits longest.
Deviations: CLOVER's instances hold one request at a time; here c_k, of which one executes and the rest hide the way
    there. The variant mix is what the pool yields: it follows speed and load, so a plan's accuracy does not bind.
    Floors and priorities of single requests: routers/single_queue.py, queues/fifo.py.
"""

from collections.abc import Sequence

from dispatcher.routers.credits import Account, CreditPick, Pool
from dispatcher.routers.single_queue import SingleQueueRouter
from trefoil.core.brains import Queue
from trefoil.core.plan import RouteTarget


class Fifo(SingleQueueRouter):
    """Router `fifo`: a pure state machine, called in order."""

    name = "fifo"
    _measure = "requests in flight"

    def __init__(self, family: str, queue: Queue) -> None:
        super().__init__(family, queue)
        self._pool = Pool(())

    def _deal(self, live: Sequence[RouteTarget]) -> None:
        self._pool = Pool(self._accounts)

    def _idlest(self) -> CreditPick | None:
        return self._credits.take_idlest(self._pool)

    def _score(self, account: Account) -> float:
        return account.in_flight
