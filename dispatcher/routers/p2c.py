"""Router `p2c`: the power of two choices. Two slices are drawn, the one that a request loads less gets it.

Source: Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS 2001.
Data: live targets k with credits c_k and weights w_k; a seed.
Decision: the slice that serves a request.
Formulation: draw two different slices with a free credit, each as likely as any other; argmin (n_k + 1) / w_k of them,
    n_k requests in flight. Nobody has a credit: wait in one line, as in `least_loaded`. The draws are those of a
    generator seeded with the family's name and the route's parameter `seed`: equal calls, equal choices.
Deviations: the textbook draws among all slices and queues at them; here only those with a credit are drawn, so that
    nobody waits beside a free slice. Workers and dispatchers know only what they sent themselves, which is what the
    draw is for: without it all of them would find the same slice idle.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from dispatcher.routers.credits import Account, Pool, Seat
from dispatcher.routers.least_loaded import weighed
from dispatcher.routers.one_line import OneLine
from trefoil.core.brains import Queue
from trefoil.core.plan import Route, RouteTarget

BLOCK: Final = 1024  # draws at once: one alone takes as long as all the rest of a decision


class FreePool(Pool):
    """Slices with a free credit in a list to draw from; those that have none any longer go when they are drawn."""

    __slots__ = ("_listed", "free")

    def __init__(self, accounts: Iterable[Account]) -> None:
        self.free: list[Account] = []
        self._listed: set[int] = set()
        super().__init__(accounts)

    def offer(self, account: Account) -> None:
        """One of its slices has a free credit."""
        if account.order not in self._listed:
            self._listed.add(account.order)
            self.free.append(account)

    def drop(self, at: int) -> None:
        """The slice at this place of the list has no credit."""
        self._listed.discard(self.free[at].order)
        last = self.free.pop()
        if at < len(self.free):
            self.free[at] = last

    def _build(self) -> None:
        for account in self._accounts:
            if account.in_flight < account.limit:
                self.offer(account)


class PowerOfTwo(OneLine):
    """A `Router`: state machine, called in order; its draws are its own generator's."""

    name = "p2c"
    _measure = "(in flight + 1) / share; the lower of two that are drawn"

    def __init__(self, family: str, queue: Queue) -> None:
        super().__init__(family, queue)
        self._family = family
        self._pool = FreePool(())
        self._seed: int | None = None
        self._rng = np.random.default_rng(0)
        self._draws: list[float] = []

    def on_table(self, route: Route, now_s: float) -> None:
        """Route by this table from now on; what waits keeps its place."""
        seed = int(route.params.get("seed", 0.0))
        if seed != self._seed:
            self._seed = seed
            self._rng, self._draws = np.random.default_rng((zlib.crc32(self._family.encode()), abs(seed))), []
        super().on_table(route, now_s)

    def _deal(self, live: Sequence[RouteTarget]) -> None:
        self._accounts = weighed(self._accounts, live)
        self._pool = FreePool(self._accounts)

    def _idlest(self) -> Seat | None:
        pool = self._pool
        while pool.free:
            number = len(pool.free)
            first = int(self._draw() * number)
            if pool.free[first].in_flight >= pool.free[first].limit:
                pool.drop(first)
                continue
            if number == 1:
                return self._credits.take(pool.free[first])
            second = int(self._draw() * (number - 1))
            second += second >= first
            if pool.free[second].in_flight >= pool.free[second].limit:
                pool.drop(second)
                continue
            return self._credits.take(self._less(pool.free[first], pool.free[second]))
        return None

    def _idlest_of(self, accounts: Sequence[Account]) -> Account:
        number = len(accounts)
        if number == 1:
            return accounts[0]
        first, second = int(self._draw() * number), int(self._draw() * (number - 1))
        return self._less(accounts[first], accounts[second + (second >= first)])

    def _less(self, a: Account, b: Account) -> Account:
        return a if self._score(a) <= self._score(b) else b

    def _score(self, account: Account) -> float:
        return (account.in_flight + 1) * account.cost

    def _draw(self) -> float:
        if not self._draws:
            self._draws = self._rng.random(BLOCK).tolist()
        return self._draws.pop()
