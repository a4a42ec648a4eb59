"""Router `least_loaded`: a request goes to the slice that it loads least, by the share that the plan gives the slice.

Source: shortest expected delay, as in the Linux virtual server (IPVS `sed`) and Envoy's weighted least request.
Data: live targets k with credits c_k and weights w_k (a planner's share of the traffic stands for a slice's speed).
Decision: the slice that serves a request.
Formulation: of the slices with a credit argmin (n_k + 1) / w_k, n_k requests in flight, then the longest idle.
    No slice has a credit: wait in one queue; the first credit that comes free takes the request that waits longest.
    Targets without weight get nothing, unless no other is live: then all weigh the same.
Deviations: a slice must have a credit; under load the line decides, as in `fifo`, and shares follow speed: they do not
    bind as `weighted` binds them.
"""

import heapq
from collections.abc import Iterable, Sequence

from dispatcher.routers.credits import Account, CreditPick, Pool
from dispatcher.routers.single_queue import SingleQueueRouter
from trefoil.core.brains import Queue
from trefoil.core.plan import RouteTarget


class CheapestPool(Pool):
    """Pool with a heap by what one request more costs its slices."""

    __slots__ = ("line",)

    def __init__(self, accounts: Iterable[Account]) -> None:
        self.line: list[tuple[float, int, int, Account]] = []
        super().__init__(accounts)

    def offer(self, account: Account) -> None:
        """Note that one of the slices has a free credit, and other numbers than before."""
        if len(self.line) >= self._size_max:
            self._build()
        else:
            heapq.heappush(self.line, _entry(account))

    def cheapest(self) -> Account | None:
        """Cheapest slice, whose credit the caller takes; None: no slice has one."""
        while self.line:
            entry = heapq.heappop(self.line)
            account = entry[3]
            if entry == _entry(account) and account.in_flight < account.limit:  # else it is of an earlier state
                return account
        return None

    def _build(self) -> None:
        self.line[:] = sorted(_entry(each) for each in self._accounts if each.in_flight < each.limit)


class LeastLoaded(SingleQueueRouter):
    """Router `least_loaded`: a pure state machine, called in order."""

    name = "least_loaded"
    _measure = "(in flight + 1) / share"

    def __init__(self, family: str, queue: Queue) -> None:
        super().__init__(family, queue)
        self._pool = CheapestPool(())

    def _deal(self, live: Sequence[RouteTarget]) -> None:
        self._accounts = weighed(self._accounts, live)
        self._pool = CheapestPool(self._accounts)

    def _idlest(self) -> CreditPick | None:
        account = self._pool.cheapest()
        return self._credits.take(account) if account is not None else None

    def _score(self, account: Account) -> float:
        return (account.in_flight + 1) * account.cost


def weighed(accounts: Sequence[Account], live: Sequence[RouteTarget]) -> list[Account]:
    """Give each account that gets requests the cost of one; the others lose their credits."""
    total = sum(target.weight for target in live)
    served = []
    for target, account in zip(live, accounts, strict=True):
        if total > 0 and target.weight <= 0:
            account.limit = 0
        else:
            account.cost = total / target.weight if total > 0 else float(len(live))
            served.append(account)
    return served


def _entry(account: Account) -> tuple[float, int, int, Account]:
    return (account.in_flight + 1) * account.cost, account.changed_at, account.order, account
