"""Which workers share the credits of the slices, as one worker sees it, and whether the others see the same.

Source: CONTRACTS section 3 (credits over live acknowledgements, one owner of a family's sequences in each dispatcher);
    rendezvous hashing, Thaler and Ravishankar 1998.
Data: the acknowledgements of all workers of all dispatchers; which of them our connections find alive or dead.
Decision: who shares (`sharers`), whether all see it so (`agrees`), how workers rank for a family (`rank_workers`).
Formulation: a worker is a member once it has renewed its acknowledgement under our eyes: any one value may be of a dead
    worker, or of none, and may stand forever. It stays one for LOST_S after each renewal, and for as long as our
    connection to it stands: an emptied Redis is not proof of death. A refused connection is: such a worker is out at
    once. sharers = members that are not leaving (all of them, if all are leaving).
    Each acknowledgement names the sharers that its worker counts, and the table that it routes by. All agree when every
    member names ours, and no acknowledgement is so new that its worker may yet renew it. A worker waits for that for
    AGREE_MAX_S at most (another hangs, or Redis is away).
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from trefoil.core.common import Revision
from trefoil.core.demand import TableAck

WorkerId = tuple[str, int]  # (dispatcher, worker)

RESTART_STEP: Final = 1000
"""A worker's number is its place in its dispatcher plus RESTART_STEP for each time that place was started again:
numbers are never used twice (load windows and acknowledgements are distinguished by them), places keep what hashing
gave them."""
AGREE_MAX_S: Final = 1.0
AGREE_ACK_S: Final = 0.25
"""How often a worker acknowledges until all agree: its second acknowledgement proves that it lives."""
LOST_S: Final = 5.0
"""As long as an acknowledgement lives in Redis: one that was not renewed for so long is of no worker that lives."""


@dataclass(frozen=True, slots=True)
class Member:
    """Another worker, as its last acknowledgement describes it."""

    worker: WorkerId
    target: str = ""
    leaving: bool = False
    counts: frozenset[str] = frozenset()
    table: Revision = Revision()


@dataclass(frozen=True, slots=True)
class _Heard:
    """What Redis says of a worker: the last acknowledgement's stamp, since when it has stood there, whether it renewed
    one before."""

    member: Member
    stamp_s: float
    since_s: float
    renewed: bool


class Membership:
    """Members of the cluster of dispatcher workers, as this one knows them. Times are the caller's monotonic clock."""

    def __init__(self, me: WorkerId) -> None:
        self.me = me
        self.leaving = False
        self.members: dict[WorkerId, Member] = {}
        self._heard: dict[WorkerId, _Heard] = {}
        self._unproven = False  # whether a worker that has acknowledged once may yet renew it
        self._linked: set[WorkerId] = set()
        self._lost: dict[WorkerId, float] = {}
        self._waiting: tuple[tuple[Revision, frozenset[str]], float] | None = None  # for what, since when

    def update(self, acks: Iterable[TableAck], now_s: float) -> bool:
        """Update the members by all acknowledgements, as they stand in Redis. True if who shares has changed."""
        before = self._view()
        self._lost = {worker: until_s for worker, until_s in self._lost.items() if now_s < until_s}
        told = {(ack.dispatcher, ack.worker): ack for ack in acks}
        told.pop(self.me, None)
        linked = {w: h for w, h in self._heard.items() if w in self._linked and not h.member.leaving}
        fresh = {w: _hear(ack, self._heard.get(w), now_s) for w, ack in told.items() if w not in self._lost}
        self._heard = linked | fresh
        recent = {worker for worker, heard in fresh.items() if now_s - heard.since_s < LOST_S}
        proven = {w: h.member for w, h in self._heard.items() if h.renewed and (w in recent or w in self._linked)}
        self._unproven = not recent <= proven.keys()
        self.members = _last_lives(self.me, proven)
        return self._view() != before

    def mark_connected(self, worker: WorkerId) -> None:
        """Note that our connection to a worker stands: it is alive."""
        self._linked.add(worker)

    def mark_disconnected(self, worker: WorkerId) -> None:
        """Note that our connection to a worker does not stand, which proves nothing."""
        self._linked.discard(worker)

    def mark_dead(self, worker: WorkerId, now_s: float) -> bool:
        """Remove a worker that refuses connections: it is dead. True if who shares has changed."""
        before = self._view()
        self._linked.discard(worker)
        self._lost[worker] = now_s + LOST_S
        self._heard.pop(worker, None)
        self.members.pop(worker, None)
        return self._view() != before

    def set_leaving(self, leaving: bool) -> bool:
        """Take no share from now on, if another worker does; or take one again. True if that is new."""
        changed, self.leaving = leaving != self.leaving, leaving
        return changed

    @property
    def sharers(self) -> tuple[WorkerId, ...]:
        """Workers that share the credits, sorted; never empty."""
        staying = [member.worker for member in self.members.values() if not member.leaving]
        if not self.leaving:
            staying.append(self.me)
        return tuple(sorted(staying or [self.me, *self.members]))

    @property
    def sharer_names(self) -> tuple[str, ...]:
        """Names of the workers that share the credits: what our acknowledgement says."""
        return tuple(worker_name(worker) for worker in self.sharers)

    def target(self, worker: WorkerId) -> str:
        """Address of a worker; "" if it has none."""
        member = self.members.get(worker)
        return member.target if member is not None else ""

    def agrees(self, table: Revision, now_s: float) -> bool:
        """Whether all members agree with this worker on sharers and table, and no member may still join. Also true
        after AGREE_MAX_S."""
        counts = frozenset(self.sharer_names)
        members = self.members.values()
        if not self._unproven and all(member.table == table and member.counts == counts for member in members):
            self._waiting = None
            return True
        if self._waiting is None or self._waiting[0] != (table, counts):
            self._waiting = ((table, counts), now_s)
        return now_s - self._waiting[1] >= AGREE_MAX_S

    def _view(self) -> tuple[tuple[WorkerId, ...], tuple[str, ...]]:
        return self.sharers, tuple(self.target(worker) for worker in self.sharers)


def _hear(ack: TableAck, before: _Heard | None, now_s: float) -> _Heard:
    member = Member((ack.dispatcher, ack.worker), ack.peer_target, ack.leaving, frozenset(ack.counts), ack.table)
    if before is None:
        return _Heard(member, ack.observed_at_s, now_s, renewed=False)
    if ack.observed_at_s == before.stamp_s:
        return replace(before, member=member)
    return _Heard(member, ack.observed_at_s, now_s, renewed=True)


def worker_name(worker: WorkerId) -> str:
    """Name of a worker in acknowledgements: "dispatcher:number"."""
    return f"{worker[0]}:{worker[1]}"


def worker_place(worker: WorkerId) -> WorkerId:
    """Place of a worker, by which it is hashed: it stays when the worker is started again."""
    return worker[0], worker[1] % RESTART_STEP


def rank_workers(family: str, workers: Sequence[WorkerId]) -> list[WorkerId]:
    """Rank workers for a family by rendezvous hashing, the best first."""

    def score(worker: WorkerId) -> bytes:
        dispatcher, number = worker_place(worker)
        return hashlib.sha256(f"{family}|{dispatcher}|{number}".encode()).digest()

    return sorted(workers, key=score, reverse=True)


def sequence_owner(family: str, served_by: Sequence[WorkerId], dispatcher: str) -> WorkerId:
    """Worker that keeps the sequences of a family: of those that serve it, one of this dispatcher if there is one."""
    return next((worker for worker in rank_workers(family, served_by) if worker[0] == dispatcher), served_by[0])


def _last_lives(me: WorkerId, members: dict[WorkerId, Member]) -> dict[WorkerId, Member]:
    """Without workers whose place has been started again: they are dead, whatever still stands in Redis."""
    newest: dict[WorkerId, int] = {worker_place(me): me[1]}
    for worker in members:
        newest[worker_place(worker)] = max(worker[1], newest.get(worker_place(worker), 0))
    return {worker: member for worker, member in members.items() if worker[1] == newest[worker_place(worker)]}
