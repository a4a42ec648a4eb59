"""Tickets that wait for one slice alone, because their sequence lives there: its clients take turns."""

from typing import NamedTuple

from dispatcher.queues.fair import Turns
from trefoil.core.brains import Ticket


class Pinned(NamedTuple):
    """Ticket that waits for one slice alone, and the variant there."""

    ticket: Ticket
    variant: str


class PinnedLine:
    """Tickets of one slice: among clients as in `FairQueue`, of one client in the order of arrival."""

    def __init__(self) -> None:
        self._by_client: dict[str, dict[int, Pinned]] = {}
        self._clients: dict[int, str] = {}
        self._turns = Turns()

    def __len__(self) -> int:
        return len(self._clients)

    def add(self, pinned: Pinned) -> None:
        """A ticket comes."""
        id_, client = pinned.ticket.id, pinned.ticket.flow[0]
        if client not in self._by_client:
            self._by_client[client] = {}
            self._turns.enter(client)
        self._by_client[client][id_] = pinned
        self._clients[id_] = client

    def first(self) -> Pinned | None:
        """The ticket whose turn it is; it stays."""
        client = self._turns.next()
        return next(iter(self._by_client[client].values())) if client is not None else None

    def serve(self) -> None:
        """The first is served."""
        first = self.first()
        assert first is not None
        ticket = first.ticket
        self.remove(ticket.id)
        self._turns.charge(ticket.flow[0], ticket.cost_s / ticket.weight)

    def remove(self, id_: int) -> bool:
        """Remove a ticket; False: it does not wait here."""
        client = self._clients.pop(id_, None)
        if client is None:
            return False
        line = self._by_client[client]
        del line[id_]
        if not line:
            del self._by_client[client]
            self._turns.leave(client)
        return True

    def all(self) -> list[Pinned]:
        """All tickets."""
        return [pinned for line in self._by_client.values() for pinned in line.values()]
