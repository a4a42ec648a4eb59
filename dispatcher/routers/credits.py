"""How many requests a slice may hold at once, and how many it holds.

A credit is taken by a Pick and given back by on_done, whatever the outcome. Counts outlive the table: a slice that left
it (drained, ejected) and comes back still owes what it has in flight.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trefoil.core.fleet import SliceKey


@dataclass(slots=True, eq=False)
class Account:
    """One slice. Routers keep the object: hashing a slice key for every slice of a class is most of a decision."""

    slice: SliceKey
    limit: int = 0
    in_flight: int = 0
    taken_at: int = 0

    @property
    def free(self) -> bool:
        """Whether one more request may go there."""
        return self.in_flight < self.limit


class Credits:
    """In-flight requests per slice against the limits of the last table."""

    def __init__(self) -> None:
        self._accounts: dict[SliceKey, Account] = {}
        self._takes = 0

    def limit(self, limits: Mapping[SliceKey, int]) -> None:
        """Take the limits of a table; slices that it does not name get nothing more."""
        for slice_, account in list(self._accounts.items()):
            account.limit = 0
            if account.in_flight == 0 and slice_ not in limits:
                del self._accounts[slice_]
        for slice_, limit in limits.items():
            self._accounts.setdefault(slice_, Account(slice_)).limit = limit

    def account(self, slice_: SliceKey) -> Account:
        """The account of a slice of the last table."""
        return self._accounts[slice_]

    def free(self, slice_: SliceKey) -> bool:
        """Whether one more request may go there; False for a slice that the table does not name."""
        account = self._accounts.get(slice_)
        return account is not None and account.free

    def take(self, account: Account) -> None:
        """One more request is in flight."""
        assert account.free, f"no credit left on {account.slice}"
        self._takes += 1
        account.taken_at = self._takes
        account.in_flight += 1

    def give_back(self, slice_: SliceKey) -> None:
        """One request is over."""
        account = self._accounts[slice_]
        assert account.in_flight > 0, f"more requests over than sent on {slice_}"
        account.in_flight -= 1
        if account.in_flight == 0 and account.limit == 0:
            del self._accounts[slice_]


def idlest(accounts: Iterable[Account]) -> Account | None:
    """Of those with a credit: the fewest in flight, then the longest not chosen (round robin among the idle)."""
    best: Account | None = None
    for account in accounts:
        if account.in_flight < account.limit and (
            best is None
            or account.in_flight < best.in_flight
            or (account.in_flight == best.in_flight and account.taken_at < best.taken_at)
        ):
            best = account
    return best
