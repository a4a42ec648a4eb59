"""Copies of answered requests for a variant on trial: with free credits only, after the client has its answer.

A copy never waits, is never retried, and counts nowhere but here: neither as a request nor in a receipt. What it costs
is energy of its slice and, in this process, one call and a comparison.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from dispatcher.core import trials
from dispatcher.core.trials import Mirror
from trefoil.core.brains import Ticket
from trefoil.core.errors import Unavailable
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import RouteTarget

COPY_S: Final = 30.0  # a copy that takes longer is of no use
_parse = pb.ModelInferResponse.FromString


class Mirrors:
    """The copies of one worker. Belongs to one event loop.

    `counts` is (family, variant that answered, variant on trial, what became of it) -> items; of copies that brought no
    answer (`skipped`: no free credit; `failed`) the items of the request.
    """

    def __init__(
        self,
        busy: Callable[[SliceKey], int],
        call: Callable[[SliceKey], Callable[..., "asyncio.Future[bytes]"]],
        on_idle: Callable[[], None],
    ) -> None:
        """`busy(slice)`: requests in flight there; `call(slice)`: its raw ModelInfer, raising Unavailable;
        `on_idle` is told when a copy has ended."""
        self.in_flight: Counter[SliceKey] = Counter()
        self.counts: Counter[tuple[str, str, str, str]] = Counter()
        self._busy, self._call, self._on_idle = busy, call, on_idle
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, mirror: Mirror, ticket: Ticket, payload: bytes, answer: bytes, variant: str) -> None:
        """A request was answered: copy it, if it is one of those and a slice has a free credit."""
        if not mirror.copies(ticket.id) or ticket.sequence_id:
            return
        target = self._free(mirror)
        if target is None:
            self.counts[ticket.family, variant, mirror.targets[0].variant, "skipped"] += ticket.items
            return
        self.in_flight[target.slice] += 1
        task = asyncio.create_task(self._copy(target, ticket, payload, answer, variant))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cut off what is under way."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _free(self, mirror: Mirror) -> RouteTarget | None:
        def left(target: RouteTarget) -> int:
            return target.credits - self.in_flight[target.slice] - self._busy(target.slice)

        target = max(mirror.targets, key=left)
        return target if left(target) > 0 else None

    async def _copy(self, target: RouteTarget, ticket: Ticket, payload: bytes, answer: bytes, variant: str) -> None:
        key = (ticket.family, variant, target.variant)
        try:
            agreed, items = trials.agreement(
                _parse(answer), _parse(await self._call(target.slice)(payload, timeout=COPY_S))
            )
        except (grpc.aio.AioRpcError, Unavailable, DecodeError, ValueError):
            self.counts[(*key, "failed")] += ticket.items
        else:
            self.counts[(*key, "agreed")] += agreed
            self.counts[(*key, "differed")] += items - agreed
        finally:
            self.in_flight[target.slice] -= 1
            if not self.in_flight[target.slice]:
                del self.in_flight[target.slice]
                self._on_idle()
