"""Queue `ssjf`: shortest job first, by the predicted class of a request's length; first come, first served without one.

Source: mu-Serve section 3.3 (speculative shortest job first by five classes of output length, with aging).
Data: of a ticket what `fifo` reads, `length_score`: 0 = the shortest class, to CLASSES - 1, None = not predicted, and
    `cost_s`: the mean service time of requests like it.
Formulation: a ticket's turn is that of `fifo` plus AGING m for each class, and the earliest turn goes first. m is the
    mean service time, of whatever client and size: m <- m + ALPHA (cost_s - m) with each ticket that comes to wait. All
    tickets that wait have one m, or those of one class would not be in order of arrival. So the order is by class, then
    arrival, among those that arrive within that time, and a request without a prediction is in the middle. With M the
    largest m while it waits, no request is overtaken by one that arrives AGING M (CLASSES - 1) after it or later.
Bound: on one server that is never idle while requests wait, and serves to the end what it began. There a request of
    class c that arrives at t begins no later than T + V(T), with T = t + AGING M c. That is when first come, first
    served would begin a request that arrives at T. V(T) is the work that is left of all others that came until T, equal
    in every order. Test: tests/property/test_length_queue.py.
Deviations: the paper names no law of aging; this one is linear, as the theory that it cites has it.
"""

from typing import Final

from dispatcher.queues.fifo import FifoQueue, Lane, Line, level, line_of_level, order_key
from trefoil.core.brains import Ticket

CLASSES: Final = 5  # below the 25th, 50th, 75th and 99th percentile of lengths, and beyond
MIDDLE: Final = (CLASSES - 1) / 2
AGING: Final = 20.0  # mean service times: order is by class until a request has waited that long for each
ALPHA: Final = 0.1  # of the mean service time


def length_class(score: float | None) -> int | None:
    """Class that a real-valued prediction stands for: the nearest."""
    return None if score is None else min(CLASSES - 1, max(0, round(score)))


def turn(ticket: Ticket, mean_s: float, aging: float = AGING) -> tuple[float, int]:
    """Sort key of a ticket: the order in which tickets of one lane are served, where service takes this mean time."""
    arrived_s, id_ = order_key(ticket)
    class_ = length_class(ticket.length_score)
    return arrived_s + aging * mean_s * (MIDDLE if class_ is None else class_), id_


class SsjfQueue(FifoQueue[Lane]):
    """Tickets by lane, in it by predicted class and arrival. `mean_s`: service time of those that came lately."""

    mean_s = 0.0

    def push(self, lane: Lane, ticket: Ticket) -> None:
        """Let a ticket wait in a lane, and learn from it what service takes."""
        self.mean_s += (ALPHA if self.mean_s else 1.0) * (ticket.cost_s - self.mean_s)
        super().push(lane, ticket)

    def turn(self, ticket: Ticket) -> tuple[float, int]:
        """Sort key of a ticket in its lane."""
        return turn(ticket, self.mean_s)

    def _line(self, lines: list[Line], ticket: Ticket) -> Line:
        return line_of_level(lines, (level(ticket.priority), length_class(ticket.length_score)))
