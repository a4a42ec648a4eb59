"""Acknowledgements of dispatcher workers that may still send to a slice, kept over a loss of Redis' data.

An acknowledgement lives ACK_TTL_S after it was written; a worker without one is dead. But an emptied Redis has none of
the living either, and one that stood still has let them expire: who stopped a slice on that would stop it under its
requests. So a reader remembers what it has seen, and counts its age only while Redis could be read.
"""

from dataclasses import dataclass
from typing import Final

from trefoil.core.demand import TableAck
from trefoil.runtime.clock import Clock
from trefoil.runtime.state import ACK_TTL_S, State

GLANCE_S: Final = 1.0  # of sight that one reading is worth at most: between two, Redis may have been away
FIRST_S: Final = 2.0  # of sight before nobody means nobody: workers write every second


@dataclass(frozen=True, slots=True)
class _Seen:
    ack: TableAck
    at_s: float  # in seconds of sight


class LiveAcks:
    """Acknowledgements of live workers, to be read every second or so. `sight_s`: for how long Redis was read."""

    def __init__(self, state: State, clock: Clock) -> None:
        self._state, self._clock = state, clock
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._read_at_s: float | None = None
        self.sight_s = 0.0

    @property
    def blind(self) -> str:
        """Reason why the absence of acknowledgements proves nothing yet, "" when it does."""
        if self.sight_s >= FIRST_S:
            return ""
        return f"acknowledgements have been read for {self.sight_s:.1f} s only, of {FIRST_S:g} s"

    async def read(self) -> tuple[TableAck, ...]:
        """Read the last acknowledgement of every worker that may be alive.

        Raises:
            StateUnavailable: Redis does not answer; nothing ages meanwhile.
        """
        found = (await self._state.scan(self._state.keys.ack_prefix(), TableAck)).values()
        now_s = self._clock.monotonic_s()
        if self._read_at_s is not None:
            self.sight_s += min(GLANCE_S, now_s - self._read_at_s)
        self._read_at_s = now_s
        there = {(ack.dispatcher, ack.worker): ack for ack in found}
        for worker, seen in self._seen.items():  # what cannot be read is somebody's all the same
            if self._state.keys.ack(*worker) in self._state.unreadable:
                there.setdefault(worker, seen.ack)
                self._seen[worker] = _Seen(seen.ack, self.sight_s)
        for worker, ack in there.items():
            known = self._seen.get(worker)
            if known is None or known.ack != ack:
                self._seen[worker] = _Seen(ack, self.sight_s)
        self._seen = {
            worker: seen
            for worker, seen in self._seen.items()
            if worker in there or (not seen.ack.leaving and self.sight_s - seen.at_s < ACK_TTL_S)
        }
        return tuple(self._seen[worker].ack for worker in sorted(self._seen))
