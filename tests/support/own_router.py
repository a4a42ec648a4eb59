"""Your own router, as docs/howto/own-policy.md shows one: `--router tests.support.own_router:LongestIdle`."""

from collections.abc import Sequence

from dispatcher.routers.credits import Account, CreditPick
from dispatcher.routers.single_queue import SingleQueueRouter
from trefoil.core.plan import RouteTarget


class LongestIdle(SingleQueueRouter):
    """Whoever has a credit, the longest idle first."""

    name = "longest_idle"
    _measure = "when it was last chosen or answered"

    def _deal(self, live: Sequence[RouteTarget]) -> None:
        pass

    def _idlest(self) -> CreditPick | None:
        free = [account for account in self._accounts if account.in_flight < account.limit]
        return self._credits.take(min(free, key=self._score)) if free else None

    def _score(self, account: Account) -> float:
        return account.changed_at
