"""Parcels of a job that peers' zones run, and which items are where. Pure.

A parcel is a lease: consecutive items that a peer has as a job of that zone, until a time. Each item is in one state,
and only some changes are allowed, so it gets exactly one result however often it is run:

    FREE -> HERE -> ENDED      read by this zone, which runs it.
    FREE -> AWAY -> ENDED      in a parcel whose peer answers it.
    AWAY -> FREE               the parcel was taken back: lost, refused or late.
    FREE -> ENDED              an answer of a parcel that was taken back, before the item is read here.

An answer for an item that is HERE or ENDED is a duplicate and is dropped. Parcels are in a file of the job before a
peer gets them. A lost file costs work, not items: they are run here, and no answer of the parcel is asked for.
"""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from dispatcher.request.core.zone_choice import check_receipt
from trefoil.core.errors import InvalidInput

FREE, HERE, AWAY, ENDED = range(4)
NAME_CHARS: Final = 40
PEER: Final = "correct that zone, or leave it out of the job's zones; its items run here"


@dataclass(slots=True)
class Parcel:
    """Parcel of a job. `id`: of the job that it is in its zone. `back`: its items may be run here again. Not kept:
    `sent`, `seen` and `after`. `sent`: whether the zone is known to have it. `seen`: its items that had ended there.
    `after`: items at its begin whose results have come."""

    id: str
    zone: str
    first: int
    count: int
    complete_by_s: float
    back: bool = False
    sent: bool = field(default=False, compare=False)
    seen: int = field(default=0, compare=False)
    after: int = field(default=0, compare=False)

    @property
    def end(self) -> int:
        """Number of the item after its last one."""
        return self.first + self.count


def kept(parcels: Iterable[Parcel]) -> list[dict[str, Any]]:
    """Parcels as they are written."""
    names = ("id", "zone", "first", "count", "complete_by_s", "back")
    return [{name: asdict(parcel)[name] for name in names} for parcel in parcels]


def restored(tree: Any, items: int) -> list[Parcel]:
    """Parcels as they were written, of a job with so many items.

    Raises:
        TypeError, ValueError: not what `kept` gives.
    """
    parcels = [Parcel(**one) for one in tree]
    for parcel in parcels:
        if not (
            0 <= parcel.first < parcel.end <= items and isinstance(parcel.back, bool) and parcel.id and parcel.zone
        ):
            raise ValueError(f"parcel {parcel.id!r} is not the job's")
    return parcels


class ItemStates:
    """States of a job's items. `parcels`: those that have not ended."""

    def __init__(self, done: bytearray, parcels: Sequence[Parcel] = ()) -> None:
        """`done`: 1 for each item that has its result."""
        self._state = bytearray(done.replace(b"\x01", bytes((ENDED,))))
        self.parcels = list(parcels)
        self._counts = [self._state.count(state) for state in range(4)]
        self.next = 0
        """No item before it is FREE."""
        for parcel in self.parcels:
            if not parcel.back:
                self._set(range(parcel.first, parcel.end), FREE, AWAY)

    def of(self, item: int) -> int:
        """State of an item."""
        return self._state[item]

    @property
    def free(self) -> int:
        """Items that are FREE."""
        return self._counts[FREE]

    @property
    def away(self) -> int:
        """Items that are AWAY."""
        return self._counts[AWAY]

    def claim(self, count: int) -> list[int]:
        """Take the next FREE items to be read here, within a range of so many items; empty: none is."""
        first = self._state.find(FREE, self.next)
        if first < 0:
            self.next = len(self._state)
            return []
        self.next = min(first + count, len(self._state))
        return self._set(range(first, self.next), FREE, HERE)

    def release(self, items: Iterable[int]) -> None:
        """Items that were claimed are not run here after all."""
        self._freed(self._set(items, HERE, FREE))

    def end(self, item: int) -> None:
        """An item that this zone ran has its result."""
        assert self._set((item,), HERE, ENDED), (item, self._state[item])

    def pack(self, zone: str, count: int, job: str, complete_by_s: float) -> Parcel | None:
        """Make a parcel of the last FREE items, at most so many; None: there is none."""
        last = self._state.rfind(FREE, self.next)
        if last < 0 or count < 1:
            return None
        first = last
        while first > max(self.next, last + 1 - count) and self._state[first - 1] == FREE:
            first -= 1
        parcel = Parcel(f"{job[:NAME_CHARS]}-{uuid.uuid4().hex[:16]}", zone, first, last + 1 - first, complete_by_s)
        self._set(range(parcel.first, parcel.end), FREE, AWAY)
        self.parcels.append(parcel)
        return parcel

    def shorten(self, parcel: Parcel, count: int) -> None:
        """Only the first items of a parcel go; at least one does."""
        assert 0 < count <= parcel.count
        self._freed(self._set(range(parcel.first + count, parcel.end), AWAY, FREE))
        parcel.count = count

    def take_back(self, parcel: Parcel) -> None:
        """Run what a parcel has not answered here; its answers still count until then."""
        if not parcel.back:
            parcel.back = True
            self._freed(self._set(range(parcel.first, parcel.end), AWAY, FREE))

    def deliver(self, parcel: Parcel, item: int) -> bool:
        """Whether the answer of a parcel to an item counts; if so, the item has its result."""
        assert parcel.first <= item < parcel.end
        return bool(self._set((item,), AWAY, ENDED) or self._set((item,), FREE, ENDED))

    def ended(self, parcel: Parcel) -> int:
        """Items of a parcel that have their results."""
        return self._state.count(ENDED, parcel.first, parcel.end)

    def forget(self, parcel: Parcel) -> None:
        """A parcel has ended; what of it has no result is run here."""
        self.take_back(parcel)
        self.parcels.remove(parcel)

    def _set(self, items: Iterable[int], before: int, after: int) -> list[int]:
        """Change the state of those items that are in another."""
        found = [item for item in items if self._state[item] == before]
        for item in found:
            self._state[item] = after
        self._counts[before] -= len(found)
        self._counts[after] += len(found)
        return found

    def _freed(self, items: Sequence[int]) -> None:
        self.next = min(self.next, *items) if items else self.next


def check_answer(parcel: Parcel, index: int, joules: float, carbon_g: float) -> None:
    """Check an answer of a parcel: a number within it, a receipt that can be.

    Raises:
        InvalidInput: naming the field.
    """
    if not 0 <= index < parcel.count:
        why = f"the parcel has {parcel.count} items"
        raise InvalidInput(why, field="results.item", value=index, remedy=PEER)
    check_receipt(joules, carbon_g, PEER)
