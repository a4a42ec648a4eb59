"""Requests of jobs: sent to a slice while that is idle, or not at all for now."""

from dispatcher.request.admission import Request
from dispatcher.routing.async_queue import AsyncFamilyQueue
from dispatcher.routing.routing_state import Routing
from trefoil.core.brains import Pick
from trefoil.core.fleet import SliceKey


class NotIdle(Exception):
    """A slice that items of a job were to have is not idle; nothing of them is booked."""


def pick_idle(request: Request, slice_: SliceKey, routing: Routing) -> Pick:
    """Take a credit of a slice that is idle for all of its families; raises NotIdle."""
    queue, pick = request.queue, None
    idle = all(routing.queues[family].only_jobs(slice_) for family in routing.families_of(slice_))
    if idle and isinstance(queue, AsyncFamilyQueue):
        pick = queue.submit_idle(request.ticket, slice_)
    if pick is None:
        raise NotIdle
    return pick
