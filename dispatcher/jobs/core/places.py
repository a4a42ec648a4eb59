"""Places for calls that may take hours (uploads, readers): one tenant or host has at most half of them. Pure."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from trefoil.core.errors import Unavailable


class Places:
    """So many places. `doing`: what those do who have one, for errors."""

    def __init__(self, most: int, doing: str) -> None:
        self._most, self._doing, self._taken = most, doing, Counter[str]()

    @contextmanager
    def one(self, client: str) -> Iterator[None]:
        """Hold a place for a tenant or host; empty: an operator, who may have all.

        Raises:
            Unavailable: none is free, or this client has half of them.
        """
        taken, own = self._taken.total(), self._taken[client]
        if taken >= self._most:
            raise Unavailable(f"{taken} {self._doing} here", remedy="try again")
        if client and 2 * own >= self._most:
            raise Unavailable(
                f"{own} {self._doing} here for {client}, at most half", remedy="let one of them end first"
            )
        self._taken[client] += 1
        try:
            yield
        finally:
            self._taken[client] -= 1
            self._taken += Counter()  # without those that have none
