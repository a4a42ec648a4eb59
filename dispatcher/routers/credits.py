"""How many requests a slice may hold at once, how many it holds, and which of several slices is the idlest.

A credit is taken by a Pick and given back by on_done, whatever the outcome. Counts outlive the table: a slice that left
it (drained, ejected) and comes back still owes what it has in flight.

A decision costs the same for 2 slices as for 2,000: a pool keeps those with a free credit in a heap by (in flight, last
chosen or answered): of idle ones the longest idle comes first. Entries are not searched for when a slice changes; they
are recognised as old when they come to the top.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from trefoil.core.brains import Pick
from trefoil.core.fleet import SliceKey

OLD_ENTRIES: Final = 4  # of the heap, per slice, before it is built again


@dataclass(slots=True, eq=False)
class Account:
    """Credit account of one slice. Its picks carry it: hashing a slice key would be most of a decision."""

    slice: SliceKey
    limit: int = 0
    in_flight: int = 0
    changed_at: int = 0  # the number of the last take or return of one of its credits
    order: int = 0  # in the table: among slices never chosen, the first
    pool: "Pool | None" = None
    lane: tuple[str, str, int] | None = None  # of the queue, for routers that have several
    pick: "CreditPick | None" = None  # what a request that is given to this slice gets, by the last table
    accuracy: float = 0.0  # of what it hosts
    cost: float = 1.0  # of one request more, for routers that weigh load: 1 / the slice's share
    lanes: tuple[int, ...] = ()  # of the queue that it may serve, for routers with one line


@dataclass(frozen=True, slots=True)
class CreditPick(Pick):
    """Pick that knows whose credit it holds."""

    account: Account = field(compare=False, repr=False)


class Pool:
    """Pool of slices that share one line of requests."""

    __slots__ = ("_accounts", "_size_max", "heap")

    def __init__(self, accounts: Iterable[Account]) -> None:
        self._accounts = tuple(accounts)
        self._size_max = OLD_ENTRIES * len(self._accounts) + 16
        self.heap: list[tuple[int, int, int, Account]] = []
        for order, account in enumerate(self._accounts):
            account.pool, account.order = self, order
        self._build()

    def offer(self, account: Account) -> None:
        """Note that one of the slices has a free credit, and other numbers than before."""
        heap = self.heap
        if len(heap) >= self._size_max:
            self._build()
        else:
            heapq.heappush(heap, (account.in_flight, account.changed_at, account.order, account))

    def _build(self) -> None:
        self.heap[:] = sorted(
            (each.in_flight, each.changed_at, each.order, each)
            for each in self._accounts
            if each.in_flight < each.limit
        )


class Credits:
    """Credits of all slices: requests in flight against the limits of the last table."""

    def __init__(self) -> None:
        self._accounts: dict[SliceKey, Account] = {}
        self._changes = 0
        self._last = Account(SliceKey())

    def limit(self, limits: Mapping[SliceKey, int]) -> None:
        """Set the limits of a table; slices that it does not name get nothing more. Pools are made after it."""
        self._last = Account(SliceKey())
        for slice_, account in list(self._accounts.items()):
            account.limit, account.pool, account.pick = 0, None, None
            if account.in_flight == 0 and slice_ not in limits:
                del self._accounts[slice_]
        for slice_, limit in limits.items():
            account = self._accounts.setdefault(slice_, Account(slice_))
            account.slice, account.limit = slice_, limit

    def account(self, slice_: SliceKey) -> Account:
        """Account of a slice of the last table."""
        return self._accounts[slice_]

    def free(self, slice_: SliceKey) -> Account | None:
        """Account of a slice if one more request may go there; None for one that the table does not name."""
        last = self._last  # a credit that came back is offered at once, by the very key of its pick
        account = last if last.slice is slice_ else self._accounts.get(slice_)
        return account if account is not None and account.in_flight < account.limit else None

    def take_idlest(self, pool: Pool) -> CreditPick | None:
        """Take a credit of a pool's idlest slice: the one with the fewest requests in flight. Of equals it is the one
        that was chosen or answered longest ago, so of idle ones the longest idle. None: no slice has a credit."""
        heap = pool.heap
        while heap:
            in_flight, changed_at, order, account = heap[0]
            if account.changed_at == changed_at and account.in_flight == in_flight:
                self._changes = changed_at = self._changes + 1
                account.changed_at = changed_at
                account.in_flight = in_flight = in_flight + 1
                if in_flight < account.limit:
                    heapq.heapreplace(heap, (in_flight, changed_at, order, account))
                else:
                    heapq.heappop(heap)
                return account.pick
            heapq.heappop(heap)
        return None

    def take(self, account: Account) -> CreditPick:
        """Take a credit of this very slice."""
        assert account.in_flight < account.limit, f"no credit left on {account.slice}"
        self._changes += 1
        account.changed_at = self._changes
        account.in_flight += 1
        if account.in_flight < account.limit and account.pool is not None:
            account.pool.offer(account)
        assert account.pick is not None
        return account.pick

    def give_back(self, pick: Pick) -> None:
        """Give a credit back: its request is over."""
        assert isinstance(pick, CreditPick), "a pick of another router"
        self._last = account = pick.account
        assert account.in_flight > 0, f"more requests over than sent on {account.slice}"
        account.in_flight -= 1
        self._changes = account.changed_at = self._changes + 1
        if account.in_flight < account.limit:
            if account.pool is not None:
                account.pool.offer(account)
        elif account.in_flight == 0:
            del self._accounts[account.slice]  # its limit is 0: no table names it any longer
