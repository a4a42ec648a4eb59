"""Order of what one writer appends to a stream of intervals: load windows of a worker, energy samples of a device.

Data: a number `seq` that grows, and an interval that begins where the one before ended.
Formulation: a value that continues the last one is taken. One that does not (a gap, a stray value, the first one of a
writer) is held: once a later value continues a held one, both are taken. Whatever else is held then is contradicted and
set aside, as is the oldest of more than HELD_MAX. So a single stray value, whatever number or time it has, is not
counted, and no true value is left out because of it. Nor do many stray values between true ones have such an effect. Of
`proven` writers, known from elsewhere, the first value is taken at once.
Deviations: none.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

HELD_MAX: Final = 4
"""Values of a writer that wait for their successors."""
JOIN_S: Final = 1.0
"""By which the ends of two neighbours may differ: clocks that agree, and steps of a sensor."""
ALONE_S: Final = 60.0
"""Longest interval of a value that counts without a neighbour: hours of the past need one."""
SAME_S: Final = 1e-5
"""By which the ends of a value that is appended again may differ: messages carry microseconds."""
FOLDED_MAX: Final = 2**20
"""By how much the seq of neighbours may differ: an agent without a disk folds samples."""


class StreamInterval(Protocol):
    """What a writer measured in one interval."""

    @property
    def seq(self) -> int:
        """Number of the value, by its writer."""

    @property
    def starts_at_s(self) -> float:
        """Begin of the interval, by its writer's clock."""

    @property
    def ends_at_s(self) -> float:
        """End of the interval, by its writer's clock."""


IntervalT = TypeVar("IntervalT", bound=StreamInterval)


class StreamOrder(Generic[IntervalT]):
    """Order of the values of many writers. `set_aside` gets each value that is contradicted, and the reason."""

    def __init__(self, set_aside: Callable[[IntervalT, str], None], seq_step_max: int = 1) -> None:
        self._set_aside, self._seq_step_max = set_aside, seq_step_max
        self._last: dict[Hashable, tuple[int, float]] = {}  # seq and end of the last value that was taken
        self._held: dict[Hashable, list[IntervalT]] = {}

    @property
    def holds(self) -> bool:
        """Whether any value waits for its successor."""
        return bool(self._held)

    @property
    def last(self) -> Mapping[Hashable, tuple[int, float]]:
        """Seq and end of the last value taken, by writer."""
        return self._last

    def begin(self, last: Mapping[Any, tuple[int, float]]) -> None:
        """Begin after these values; what was held is forgotten."""
        self._last, self._held = {**last}, {}

    def take(self, writer: Hashable, value: IntervalT, proven: bool = False) -> tuple[IntervalT, ...]:
        """Values that count now, oldest first, given the next one of a writer's stream, who may be `proven`."""
        last, held = self._last.get(writer), self._held.get(writer, [])
        if last is not None and (
            (value.seq < last[0] and value.ends_at_s <= last[1])
            or (value.seq == last[0] and abs(value.ends_at_s - last[1]) <= SAME_S)
        ):
            return ()  # appended again by a writer that was not sure
        if value in held:
            return ()
        taken: tuple[IntervalT, ...] = ()
        if proven and _is_short(value) if last is None else self._continues(last, value):
            taken = (value,)
        elif (before := next((h for h in held if self._continues((h.seq, h.ends_at_s), value)), None)) is not None:
            taken = (before, value)
        left = [one for one in (*held, value) if one not in taken]
        waiting = () if taken else left[-HELD_MAX:]
        for one in left[: len(left) - len(waiting)]:
            after = f"does not continue seq {last[0]}" if last else "is the first of its writer"
            why = f"seq {one.seq} from {one.starts_at_s:.1f} s on {after}"
            self._set_aside(one, f"{why}, and seq {value.seq} does not continue it")
        self._held.pop(writer, None)
        if taken:
            self._last[writer] = value.seq, value.ends_at_s
        else:
            self._held[writer] = list(waiting)
        return taken

    def release(self) -> tuple[IntervalT, ...]:
        """Take what is held of writers that may append no more; of several values of one writer none is proven."""
        held, self._held = self._held, {}
        single = {writer: each[0] for writer, each in held.items() if len(each) == 1 and _is_short(each[0])}
        for value in (value for writer, values in held.items() if writer not in single for value in values):
            self._set_aside(value, f"seq {value.seq} has no successor")
        self._last |= {writer: (value.seq, value.ends_at_s) for writer, value in single.items()}
        return tuple(single.values())

    def keep(self, writers: Collection[Hashable]) -> None:
        """Forget the writers that are not among these."""
        self._last = {writer: last for writer, last in self._last.items() if writer in writers}
        self._held = {writer: value for writer, value in self._held.items() if writer in writers}

    def _continues(self, last: tuple[int, float], value: IntervalT) -> bool:
        step = value.seq - last[0]
        return 1 <= step <= self._seq_step_max and abs(value.starts_at_s - last[1]) <= JOIN_S


def _is_short(value: StreamInterval) -> bool:
    return value.ends_at_s - value.starts_at_s <= ALONE_S
