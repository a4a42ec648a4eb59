"""How many requests a slice may hold at once, and how many it holds.

A credit is taken by a Pick and given back by on_done, whatever the outcome. Counts outlive the table: a slice that left
it (drained, ejected) and comes back still owes what it has in flight.
"""

from collections.abc import Iterable, Mapping

from trefoil.core.fleet import SliceKey


class Credits:
    """In-flight requests per slice against the limits of the last table."""

    def __init__(self) -> None:
        self._limit: dict[SliceKey, int] = {}
        self._in_flight: dict[SliceKey, int] = {}
        self._taken_at: dict[SliceKey, int] = {}
        self._takes = 0

    def limit(self, limits: Mapping[SliceKey, int]) -> None:
        """Take the limits of a table; slices that it does not name get nothing more."""
        self._limit = dict(limits)
        for slice_ in [key for key, count in self._in_flight.items() if count == 0 and key not in self._limit]:
            del self._in_flight[slice_]
            self._taken_at.pop(slice_, None)

    def free(self, slice_: SliceKey) -> bool:
        """Whether one more request may go there."""
        return self._in_flight.get(slice_, 0) < self._limit.get(slice_, 0)

    def take(self, slice_: SliceKey) -> None:
        """One more request is in flight."""
        assert self.free(slice_), f"no credit left on {slice_}"
        self._takes += 1
        self._taken_at[slice_] = self._takes
        self._in_flight[slice_] = self._in_flight.get(slice_, 0) + 1

    def give_back(self, slice_: SliceKey) -> None:
        """One request is over."""
        left = self._in_flight[slice_] - 1
        assert left >= 0, f"more requests over than sent on {slice_}"
        self._in_flight[slice_] = left
        if left == 0 and slice_ not in self._limit:
            del self._in_flight[slice_]
            self._taken_at.pop(slice_, None)

    def idlest(self, slices: Iterable[SliceKey]) -> SliceKey | None:
        """Of those with a credit: the fewest in flight, then the longest not chosen (round robin among the idle)."""
        best, best_rank = None, (0, 0)
        for slice_ in slices:
            in_flight = self._in_flight.get(slice_, 0)
            if in_flight < self._limit.get(slice_, 0):
                rank = (in_flight, self._taken_at.get(slice_, 0))
                if best is None or rank < best_rank:
                    best, best_rank = slice_, rank
        return best
