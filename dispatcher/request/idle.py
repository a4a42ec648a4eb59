"""Requests of jobs: sent to a slice while that is idle, or not at all for now."""

from dispatcher.request.admission import Request
from dispatcher.routing.async_queue import AsyncFamilyQueue
from trefoil.core.brains import Pick
from trefoil.core.fleet import SliceKey


class NotIdle(Exception):
    """A slice that items of a job were to have is not idle; nothing of them is booked."""


def pick_idle(request: Request, slice_: SliceKey) -> Pick:
    """Take a credit of an idle slice; raises NotIdle."""
    queue = request.queue
    pick = queue.submit_idle(request.ticket, slice_) if isinstance(queue, AsyncFamilyQueue) else None
    if pick is None:
        raise NotIdle
    return pick
