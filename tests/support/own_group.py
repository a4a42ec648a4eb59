"""Routers of one's own that ask for more: one for a group of families, one that holds requests back for a time."""

from collections import Counter
from collections.abc import Mapping

from dispatcher.routers.fifo import Fifo
from trefoil.core.brains import Outcome, Pick, Queue, Ticket
from trefoil.core.fleet import SliceKey
from trefoil.core.parts import Traits
from trefoil.core.plan import Route, RouteTarget


class Together:
    """One line for a group of families: a free slice takes whoever waits longest of those that it hosts."""

    traits = Traits(group=True)
    made = 0

    def __init__(self, family: str, queue: Queue) -> None:
        type(self).made += 1
        self.queue = queue
        self.hosts: dict[str, Mapping[SliceKey, RouteTarget]] = {}
        self.in_flight: Counter[SliceKey] = Counter()
        self.ratios: list[float | None] = []
        self.offered: list[SliceKey] = []

    def on_table(self, route: Route, now_s: float) -> None:
        self.hosts[route.family] = {target.slice: target for target in route.targets if not target.draining}
        if route.targets:
            self.queue.limit(route.queue_requests_max, route.queue_bytes_max)

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        self.ratios.append(ratio)

    def on_arrival(self, ticket: Ticket, now_s: float) -> Pick | None:
        free = [t for t in self.hosts[ticket.family].values() if self.in_flight[t.slice] < t.credits]
        if free and not self.queue.depth(ticket.family):
            return self._pick(min(free, key=lambda target: self.in_flight[target.slice]))
        self.queue.check(ticket)
        self.queue.push(ticket.family, ticket)
        return None

    def on_credit(self, slice: SliceKey, now_s: float) -> tuple[Ticket, Pick] | None:
        self.offered.append(slice)
        here = {family: on[slice] for family, on in self.hosts.items() if slice in on}
        hosted = {family: target for family, target in here.items() if self.in_flight[slice] < target.credits}
        ticket = self.queue.pop_first(list(hosted))
        return None if ticket is None else (ticket, self._pick(hosted[ticket.family]))

    def on_done(self, ticket: Ticket, pick: Pick, outcome: Outcome, now_s: float) -> None:
        self.in_flight[pick.slice] -= 1

    def on_cancel(self, ticket: Ticket, now_s: float) -> None:
        self.queue.remove(ticket)

    def on_pinned(self, ticket: Ticket, slice: SliceKey, now_s: float) -> Pick | None:
        target = self.hosts[ticket.family].get(slice)
        return self._pick(target) if target is not None and self.in_flight[slice] < target.credits else None

    def next_s(self) -> float | None:
        return None

    def _pick(self, target: RouteTarget) -> Pick:
        self.in_flight[target.slice] += 1
        return Pick(target.slice, target.variant, target.stage, "longest waiting of its families")


class Patient(Fifo):
    """Nobody goes before the whole second after his arrival; while carbon is high, nobody goes at all."""

    traits = Traits(work_conserving=False)
    name = "patient"

    def __init__(self, family: str, queue: Queue) -> None:
        super().__init__(family, queue)
        self._high = False

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        self._high = ratio is not None and ratio > 1.0

    def on_arrival(self, ticket: Ticket, now_s: float) -> Pick | None:
        self._queue.check(ticket)
        self._queue.push(0, ticket)
        return None

    def on_credit(self, slice: SliceKey, now_s: float) -> tuple[Ticket, Pick] | None:
        due_s = self.next_s()
        return None if self._high or due_s is None or now_s < due_s else super().on_credit(slice, now_s)

    def next_s(self) -> float | None:
        waiting = self._queue.tickets()
        return float(int(waiting[0].arrived_s) + 1) if waiting else None
