"""Queue of a family shared by its clients: a flood waits behind itself, other clients do not.

Source: start-time fair queueing (Goyal, Vin, Cheng 1996). It serves flows as deficit round robin (Shreedhar, Varghese
    1996) does, and names the next request without changing anything. The drop is longest queue drop (Suter et al.
    1998).
Data: of a ticket its flow (tenant, or the client's address where tenants are not known; connection), the weight of its
    tenant and its cost: the service time of like requests [s]. Inside a flow the order is that of the queue (`fifo`,
    `ssjf`, an own one), one of which each flow has.
Decision: the flow that a lane serves next; where the queue is full, the ticket that is pushed out for a newcomer.
Formulation: in each lane, among tenants and again among the connections of one, the least start tag goes first. A
    flow's tag grows by cost / weight when it is served; one that comes (back) begins at max(its tag, the least tag).
    Of several lanes (`pop_first`, `heads`) the flow goes first that was served longest ago, or came first. A full queue
    pushes out the newest ticket of the connection with most queued cost, of the tenant with most cost / weight. That
    backlog must exceed the newcomer's own with the newcomer; else the queue refuses the newcomer. The bound in bytes
    works likewise.
Deviations: tags are kept while requests wait in the lane, not forever. While one flow alone waits, its queue does
    everything, and costs are not read.
Cost: O(log flows) a request that waits among several flows; the flows are looked through when the queue is full.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Literal

from dispatcher.queues.fifo import BYTES_MAX, REQUESTS_MAX, QueueFull, order_key
from trefoil.core.brains import Queue, Ticket

Flow = tuple[str, str]  # tenant, or host of the client; its connection
FORGET: Final = 64  # tags of flows that wait no more, beyond twice as many as wait


class Turns:
    """Turns of flows that share a server: least start tag first, then the one that came first."""

    __slots__ = ("_heap", "_numbers", "_queued", "_tag_served", "_tags", "active")

    def __init__(self) -> None:
        self.active: set[str] = set()
        self._tags: dict[str, float] = {}
        self._queued: dict[str, float] = {}  # tag of the entry that each has in the heap
        self._heap: list[tuple[float, int, str]] = []
        self._numbers = count()
        self._tag_served = 0.0

    def enter(self, name: str) -> None:
        """A flow has something to be served: behind those whose turn it is."""
        head = self.next()
        least = self._tags[head] if head is not None else self._tag_served
        self.active.add(name)
        if len(self._tags) > 2 * len(self.active) + FORGET:
            kept = self.active.union(self._queued)
            self._tags = {each: tag for each, tag in self._tags.items() if tag > self._tag_served or each in kept}
        self._queue(name, max(self._tags.get(name, 0.0), least))

    def leave(self, name: str) -> None:
        """A flow has nothing left."""
        self.active.discard(name)

    def next(self) -> str | None:
        """Flow whose turn it is; None: there is none."""
        heap = self._heap
        while heap:
            tag, _, name = heap[0]
            if name in self.active and self._tags[name] == tag:
                return name
            heapq.heappop(heap)
            if self._queued.get(name) == tag:
                del self._queued[name]
        return None

    def charge(self, name: str, cost: float) -> None:
        """The flow whose turn it was has been served."""
        tag = self._tag_served = self._tags[name]
        heapq.heappop(self._heap)
        self._queued.pop(name, None)
        self._tags[name] = tag + cost
        if name in self.active:
            self._queue(name, tag + cost)

    def _queue(self, name: str, tag: float) -> None:
        self._tags[name] = tag
        if self._queued.get(name) != tag:
            self._queued[name] = tag
            heapq.heappush(self._heap, (tag, next(self._numbers), name))


@dataclass(slots=True, eq=False)
class _Lane:
    """Turns in one lane: of tenants, and of the connections of each. `depth`: how many tickets wait in it."""

    depth: int = 0
    tenants: Turns = field(default_factory=Turns)
    connections: dict[str, Turns] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Backlog:
    """What waits of a tenant, or of one connection, by what it costs and holds. `since`: number of the event by
    which it came, or was served last."""

    cost: float = 0.0
    bytes: float = 0.0
    weight: float = 1.0
    since: int = 0

    def add(self, ticket: Ticket, sign: int) -> None:
        self.cost += sign * ticket.cost_s
        self.bytes += sign * ticket.bytes


@dataclass(slots=True, eq=False)
class _Member(_Backlog):
    """One connection with its own queue. `order`: its tickets as they came."""

    flow: Flow = ("", "")
    queue: Any = None
    order: dict[int, Ticket] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Tenant(_Backlog):
    members: dict[str, _Member] = field(default_factory=dict)


class FairQueue:
    """Queue of queues, one for each flow. `displaced`: tickets that were pushed out, for the caller to refuse."""

    def __init__(self, name: str, make: Callable[[], Queue]) -> None:
        self.name = name
        self.waiting = 0
        self.bytes = 0
        self.displaced: list[Ticket] = []
        self._make = make
        self._limits = (0, 0)
        self._sole = make()
        self._sole_flow: Flow | None = None  # whose tickets those are, while one flow alone waits
        self._shared = False
        self._tenants: dict[str, _Tenant] = {}
        self._lanes: dict[Any, _Lane] = {}
        self._events = count()

    def __len__(self) -> int:
        return self.waiting

    def limit(self, requests_max: int, bytes_max: int) -> None:
        """Limit what may wait, over all flows; 0 = the default. What waits stays."""
        self._limits = (requests_max, bytes_max)
        for queue in (self._sole, *(member.queue for member in self._members())):
            queue.limit(requests_max, bytes_max)

    def check(self, ticket: Ticket) -> None:
        """Check that there is room for a ticket; tickets of a flow that has more may be pushed out for it.

        Raises:
            QueueFull: there is none, and no other flow has more.
        """
        if not self._shared:
            if not self.waiting or ticket.flow == self._sole_flow:
                self._sole.check(ticket)
                return
            requests_max, bytes_max = self._bounds()
            if self.waiting < requests_max and self.bytes + ticket.bytes <= bytes_max:
                return
            self._share()
        tenant = self._tenants.get(ticket.flow[0])
        member = tenant.members.get(ticket.flow[1]) if tenant is not None else None
        if member is not None:
            member.queue.check(ticket)
        requests_max, bytes_max = self._bounds()
        if self.waiting >= requests_max and not self._displace(ticket, "cost", 1.0):
            raise self._full(f"holds {self.waiting} requests, limit {requests_max}")
        excess = self.bytes + ticket.bytes - bytes_max
        if excess > 0 and not self._displace(ticket, "bytes", excess):
            raise self._full(f"holds {self.bytes} bytes, {ticket.bytes} more exceed the limit of {bytes_max}")

    def push(self, lane: Any, ticket: Ticket) -> None:
        """Push a ticket into a lane. Ask `check` first where it is new."""
        if not self._shared:
            if not self.waiting:
                self._sole_flow = ticket.flow
            elif ticket.flow != self._sole_flow:
                self._share()
        if self._shared:
            self._enter(lane, ticket)
        else:
            self._sole.push(lane, ticket)
        self.waiting += 1
        self.bytes += ticket.bytes

    def pop(self, lane: Any) -> Ticket | None:
        """Pop the ticket of a lane whose turn it is."""
        if self._shared:
            member = self._next(lane)
            ticket = self._serve(member, [lane]) if member is not None else None
        else:
            ticket = self._sole.pop(lane)
        if ticket is not None:
            self.waiting -= 1
            self.bytes -= ticket.bytes
        return ticket

    def pop_first(self, lanes: Sequence[Any]) -> Ticket | None:
        """Pop, of the tickets of several lanes, the one whose turn is first."""
        if self._shared:
            found = self._in_turn(lanes)
            ticket = self._serve(*found[0]) if found else None
        else:
            ticket = self._sole.pop_first(lanes)
        if ticket is not None:
            self.waiting -= 1
            self.bytes -= ticket.bytes
        return ticket

    def heads(self, lanes: Sequence[Any]) -> list[tuple[Any, Ticket]]:
        """Lanes with the ticket that `pop` would give of each, empty lanes left out: in turn, and of one connection in
        the order of arrival."""
        if not self._shared:
            return _heads(self._sole, lanes)
        return [head for member, mine in self._in_turn(lanes) for head in _heads(member.queue, mine)]

    def first(self, lane: Any) -> Ticket | None:
        """Ticket of a lane that `pop` would give; it stays."""
        if not self._shared:
            return self._sole.first(lane)
        member = self._next(lane)
        return member.queue.first(lane) if member is not None else None

    def remove(self, ticket: Ticket) -> bool:
        """Remove a ticket; False: it does not wait here."""
        if not self._shared:
            removed = self._sole.remove(ticket)
        else:
            tenant = self._tenants.get(ticket.flow[0])
            member = tenant.members.get(ticket.flow[1]) if tenant is not None else None
            removed = member is not None and ticket.id in member.order and self._remove(member, ticket)
        if removed:
            self.waiting -= 1
            self.bytes -= ticket.bytes
            if not self.waiting and self._shared:
                self._unshare()
        return removed

    def depth(self, lane: Any) -> int:
        """Number of tickets that wait in a lane."""
        if not self._shared:
            return self._sole.depth(lane)
        found = self._lanes.get(lane)
        return found.depth if found is not None else 0

    def lanes(self) -> tuple[Any, ...]:
        """Lanes in which tickets wait."""
        return tuple(self._lanes) if self._shared else self._sole.lanes()

    def tickets(self) -> list[Ticket]:
        """All tickets that wait, by turn inside each flow."""
        if not self._shared:
            return self._sole.tickets()
        return [ticket for member in self._members() for ticket in member.queue.tickets()]

    # --- several flows ------------------------------------------------------------------------------------------------

    def _members(self) -> list[_Member]:
        return [member for tenant in self._tenants.values() for member in tenant.members.values()]

    def _bounds(self) -> tuple[int, int]:
        return self._limits[0] or REQUESTS_MAX, self._limits[1] or BYTES_MAX

    def _full(self, what: str) -> QueueFull:
        return QueueFull(f"queue {self.name} is full: it {what}", remedy="send less, or raise the route's queue bounds")

    def _share(self) -> None:
        """A second flow comes: from here on they take turns."""
        sole, self._sole = self._sole, self._new()
        self._shared = True
        for lane in sole.lanes():
            while (ticket := sole.pop(lane)) is not None:
                self._enter(lane, ticket)

    def _unshare(self) -> None:
        """No request waits any more."""
        self._shared, self._sole_flow = False, None
        self._tenants, self._lanes = {}, {}

    def _new(self) -> Queue:
        queue = self._make()
        queue.limit(*self._limits)
        return queue

    def _enter(self, lane: Any, ticket: Ticket) -> None:
        of, connection = ticket.flow
        tenant = self._tenants.get(of)
        if tenant is None:
            tenant = self._tenants[of] = _Tenant(since=next(self._events))
        tenant.weight = ticket.weight
        member = tenant.members.get(connection)
        if member is None:
            member = tenant.members[connection] = _Member(since=next(self._events), flow=ticket.flow, queue=self._new())
        turns = self._lanes.get(lane)
        if turns is None:
            turns = self._lanes[lane] = _Lane()
        member.queue.push(lane, ticket)
        member.order[ticket.id] = ticket
        member.add(ticket, 1)
        tenant.add(ticket, 1)
        turns.depth += 1
        if of not in turns.tenants.active:
            turns.tenants.enter(of)
        connections = turns.connections.get(of)
        if connections is None:
            connections = turns.connections[of] = Turns()
        if connection not in connections.active:
            connections.enter(connection)

    def _next(self, lane: Any) -> _Member | None:
        """The connection whose turn it is in a lane."""
        turns = self._lanes.get(lane)
        of = turns.tenants.next() if turns is not None else None
        if turns is None or of is None:
            return None
        connection = turns.connections[of].next()
        assert connection is not None, f"{of} has its turn in {lane} and nothing there"
        return self._tenants[of].members[connection]

    def _in_turn(self, lanes: Sequence[Any]) -> list[tuple[_Member, list[Any]]]:
        """The connections whose turn it is in each of several lanes, with those lanes: who was served longest ago, or
        came first, is first; tenants before connections."""
        found: dict[Flow, tuple[_Member, list[Any]]] = {}
        for lane in lanes:
            if (member := self._next(lane)) is not None:
                found.setdefault(member.flow, (member, []))[1].append(lane)

        return sorted(found.values(), key=lambda one: (self._tenants[one[0].flow[0]].since, one[0].since))

    def _serve(self, member: _Member, lanes: list[Any]) -> Ticket:
        """Pop the first ticket of a connection in these lanes, in all of which it has its turn."""
        of, connection = member.flow
        queue, lane = member.queue, lanes[0]
        if len(lanes) == 1:
            ticket: Ticket = queue.pop(lane)
        else:
            depths = [queue.depth(each) for each in lanes]
            ticket = queue.pop_first(lanes)
            lane = next(each for each, depth in zip(lanes, depths, strict=True) if queue.depth(each) != depth)
        turns = self._lanes[lane]
        del member.order[ticket.id]
        member.since = self._tenants[of].since = next(self._events)
        self._left(lane, turns, member, ticket)
        turns.connections[of].charge(connection, ticket.cost_s)
        turns.tenants.charge(of, ticket.cost_s / ticket.weight)
        if self.waiting == 1:
            self._unshare()
        return ticket

    def _remove(self, member: _Member, ticket: Ticket) -> bool:
        depths = {lane: member.queue.depth(lane) for lane in self._lanes}
        removed = bool(member.queue.remove(ticket))
        del member.order[ticket.id]
        lane = next(lane for lane, depth in depths.items() if member.queue.depth(lane) != depth)
        self._left(lane, self._lanes[lane], member, ticket)
        return removed

    def _left(self, lane: Any, turns: _Lane, member: _Member, ticket: Ticket) -> None:
        """A ticket of a connection has left a lane."""
        of, connection = member.flow
        tenant = self._tenants[of]
        member.add(ticket, -1)
        tenant.add(ticket, -1)
        turns.depth -= 1
        if not member.queue.depth(lane):
            turns.connections[of].leave(connection)
            if not turns.connections[of].active:
                turns.tenants.leave(of)
        if not turns.depth:
            del self._lanes[lane]
        if not member.order:
            del tenant.members[connection]
            if not tenant.members:
                del self._tenants[of]

    def _displace(self, ticket: Ticket, by: Literal["cost", "bytes"], excess: float) -> bool:
        """Push out the newest tickets of the flow that has most, so that one more request, or that many bytes, have
        room; False: the newcomer's flow would have more than that."""
        mine = self._tenants.get(ticket.flow[0], _Tenant())
        comes = ticket.cost_s if by == "cost" else ticket.bytes
        longest = max(self._tenants.values(), key=lambda each: getattr(each, by) / each.weight)
        if longest is mine:
            own: _Backlog = mine.members.get(ticket.flow[1], _Member())
            theirs: _Backlog = max(mine.members.values(), key=lambda each: getattr(each, by))
            weights = (1.0, 1.0)
        else:
            own, theirs, weights = mine, longest, (ticket.weight, longest.weight)
        member = theirs if isinstance(theirs, _Member) else max(longest.members.values(), key=lambda m: getattr(m, by))
        victims: list[Ticket] = []
        freed = 0.0
        for victim in reversed(member.order.values()):
            if freed >= excess:
                break
            victims.append(victim)
            freed += 1.0 if by == "cost" else victim.bytes
        left = getattr(theirs, by) - (0.0 if by == "cost" else freed)
        if theirs is own or freed < excess or left / weights[1] <= (getattr(own, by) + comes) / weights[0]:
            return False
        for victim in victims:
            self.remove(victim)
        self.displaced += victims
        return True


def _heads(queue: Queue, lanes: Sequence[Any]) -> list[tuple[Any, Ticket]]:
    found = [(lane, head) for lane in lanes if (head := queue.first(lane)) is not None]
    if len(found) > 1:
        found.sort(key=lambda each: order_key(each[1]))
    return found
