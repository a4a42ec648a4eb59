"""A dispatcher worker in virtual time: the real tables, loop, queues and routers; slices answer here."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import dispatcher.service.state_sync
from dispatcher.request.core.retry_budget import RetryBudget
from dispatcher.request.inference import NEWS_S
from dispatcher.routing.async_queue import ServedElsewhere
from dispatcher.routing.core.routing_table import Endpoint
from dispatcher.service.local_worker import LocalWorker
from dispatcher.settings import DispatcherSettings
from dispatcher.slice_health.core.ejection import Failure
from tests.support.virtual.doubles import Files, Silent
from tests.support.virtual.loop import PROCESS, Process
from tests.support.virtual.planner import FAMILY
from trefoil.core.brains import Outcome, Pick, Ticket
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import NodeStatus, SliceKey
from trefoil.core.outside.addresses import TRITON_SCHEME
from trefoil.core.plan import Plan
from trefoil.engine_api import TritonTarget
from trefoil.runtime.state import State

if TYPE_CHECKING:
    from tests.support.virtual.system import System

TICK_S = 0.25
PATIENCE_S = 12.0  # of a client
NO_SLICE_WAIT_S = 6.0
LEAVES = 0.05  # of the clients that waited
LOST = Outcome("UNAVAILABLE", 0.0, 0.0, 0, False)
OK = Outcome("OK", 10.0, 9.0, 0, True)


@dataclass(slots=True, eq=False)
class Request:
    """One request of a client; `ends` must hold one entry at last, and never two."""

    id: int
    arrived_s: float
    ends: list[str] = field(default_factory=list)


class Silence:
    """In place of connections to slices."""

    def connect(self, endpoints: Mapping[SliceKey, Endpoint]) -> None:
        """Read the addresses as `SliceConnections` does."""
        for endpoint in endpoints.values():
            if endpoint.target.startswith(TRITON_SCHEME):
                TritonTarget.parse(endpoint.target)


class MemoryTable:
    """`dispatcher.service.state_sync.TableFile` without a file."""

    def __init__(self, files: Files) -> None:
        self._files, self._process, self.path = files, PROCESS.get(), "memory"

    def save(self, plan: Plan, nodes: tuple[NodeStatus, ...]) -> None:
        if self._process is None or not self._process.dead:
            self._files["table"] = (plan, nodes)

    def load(self) -> tuple[Plan, tuple[NodeStatus, ...]] | None:
        found: tuple[Plan, tuple[NodeStatus, ...]] | None = self._files.get("table")
        return found


class Worker:
    """A place where a dispatcher runs, and starts again on the same disk under another name."""

    def __init__(self, system: "System", name: str) -> None:
        self.name, self.files = name, Files()
        self._system = system
        self._starts = 0
        self.process: Process | None = None
        self.local: LocalWorker | None = None
        self._retries = RetryBudget(0.0)
        self.open: dict[int, Request] = {}
        self._tickets = count(1 if name.endswith("0") else 2, 2)  # numbers that no other worker gives
        self._waits: dict[int, tuple[asyncio.Future[Pick], asyncio.Task[Any] | None]] = {}
        self._away: set[int] = set()
        """Open requests that another worker has, or that have come back from there and wait for news."""
        self._guests: dict[int, asyncio.Task[bool]] = {}
        """Requests of other workers' clients that are tried here."""

    @property
    def running(self) -> bool:
        """Whether it answers now."""
        return self.process is not None and not self.process.stopped

    def start(self) -> None:
        """A new process."""
        if self.process is None:
            self._starts += 1
            self.process = Process(f"{self.name}.{self._starts}")
            self.process.start(self._system.loop, self._live(self.process)).add_done_callback(self._ended)

    def kill(self) -> None:
        """SIGKILL: connections of its clients break."""
        if self.process is not None:
            self.process.kill()
            self.process, self.local = None, None
            self._waits.clear()
            self._away.clear()
            for guest in self._guests.values():
                guest.cancel()
            self._guests.clear()
            for request in tuple(self.open.values()):
                self._end(request, "connection lost")

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            self._system.promises.broken(f"a worker ended by {task.exception()!r}")

    async def _live(self, process: Process) -> None:
        clock = self._system.clock_of(self.name)
        settings = DispatcherSettings(
            state_dir=self._system.folder / self.name,
            plan_key_file=self._system.plan_key_file,
            no_slice_wait_s=NO_SLICE_WAIT_S,
            window_s=1.0,
        )
        local = LocalWorker(settings, process.name, clock)
        local.routing.connections = Silence()  # type: ignore[assignment]
        state = State.connect("redis://virtual", "default", clock=clock)
        self._system.opening, self._retries = self.files, RetryBudget(settings.retry_ratio)
        loop = dispatcher.service.state_sync.StateSync(local, state, Silent())  # type: ignore[arg-type]
        await loop.init()
        self.local = local
        async with asyncio.TaskGroup() as group:
            group.create_task(loop.run())
            group.create_task(self._probe(local))

    async def _probe(self, local: LocalWorker) -> None:
        """What the prober does where slices answer at once."""
        while True:
            for slice_, model in local.health.ejections.due(local.clock.monotonic_s()):
                if self._system.slice_serves(slice_, local):
                    local.health.readmit(slice_, model)
            for pump in local.routing.each_queue:
                pump.expire()
            await local.clock.sleep(TICK_S)

    # --- requests -----------------------------------------------------------------------------------------------------

    def take(self, request: Request) -> None:
        """A client's request has come."""
        assert self.process is not None
        self.open[request.id] = request
        self._retries.on_request()
        if self.local is not None:
            self.local.accounting.load.arrived(FAMILY, "", self.local.clock.now_s())
        self.process.start(self._system.loop, self._serve(request))

    def held(self) -> int:
        """Requests that its queues know of: waiting or on a slice."""
        return (
            sum(pump.waiting + pump.in_flight_count for pump in self.local.routing.each_queue)
            if self.local is not None
            else 0
        )

    def open_here(self) -> int:
        """Requests that its queues should know of."""
        return len(self.open) - len(self._away) + len(self._guests)

    def _end(self, request: Request, how: str) -> None:
        self.open.pop(request.id, None)
        request.ends.append(how)

    async def _serve(self, request: Request) -> None:
        process = self.process
        try:
            async with asyncio.timeout(PATIENCE_S):
                how = await self._tried(request)
        except asyncio.CancelledError:
            if process is None or process.dead:
                raise
            how = "client left"
        except TimeoutError:
            how = "DEADLINE_EXCEEDED"
        except ConnectionResetError:
            how = "connection lost"
        except TrefoilError as error:
            how = type(error).__name__
        if how != "OK" and self.local is not None:
            self.local.accounting.load.failed(FAMILY, "", None, "", how, 0.0)
        self._end(request, how)

    def _clients_leave(self) -> None:
        """Now and then a client goes away in the very turn of the loop in which it is given a slice."""
        for given, task in self._waits.values():
            if given.done() and task is not None and self._system.service_rng.random() < LEAVES:
                task.cancel()

    async def _tried(self, request: Request) -> str:
        give_up_s = self._system.loop.time() + NO_SLICE_WAIT_S
        while True:
            if self.local is None or FAMILY not in self.local.routing.queues:
                return "no table"
            try:
                if await self._once(self.local, request):
                    return "OK"
                if not self._retries.try_spend():
                    return "UNAVAILABLE"
            except TrefoilError as error:
                if await self._elsewhere(self.local, request):
                    return "OK"
                if not isinstance(error, ServedElsewhere) or self._system.loop.time() > give_up_s:
                    return type(error).__name__
                self._away.add(request.id)
                await asyncio.sleep(NEWS_S)  # who shares the credits has changed, and a worker has not heard of it
                self._away.discard(request.id)

    async def _elsewhere(self, local: LocalWorker, request: Request) -> bool:
        """Forward it to a worker that has credits; False: there is none, or it could not either.

        Raises:
            ConnectionResetError: the other worker was killed meanwhile.
        """
        names = [name for name, _ in local.routing.table.elsewhere.get(FAMILY, ())]
        peer = next((w for w in self._system.workers if w.running and w.process and w.process.name in names), None)
        if peer is None or peer.local is None or FAMILY not in peer.local.routing.queues:
            return False
        own, other = self.process, peer.process
        assert own is not None
        self._away.add(request.id)
        tried = peer._guests[request.id] = asyncio.ensure_future(self._once(peer.local, request))
        try:
            return await tried
        except asyncio.CancelledError:
            if other.dead and not own.dead:
                raise ConnectionResetError from None
            raise
        except TrefoilError:
            return False
        finally:
            self._away.discard(request.id)
            peer._guests.pop(request.id, None)

    async def _once(self, local: LocalWorker, request: Request) -> bool:
        """One pick of one queue; False: the slice did not take it."""
        clock = local.clock
        ticket = Ticket(
            id=next(self._tickets), family=FAMILY, slo_class="", tenant="", items=1, bytes=64,
            arrived_s=clock.monotonic_s(), deadline_s=None, min_accuracy=0.0, priority=0, sequence_id="",
            sequence_start=False, sequence_end=False, length_score=None,
        )  # fmt: skip
        pump = local.routing.queues[FAMILY]
        got = pump.submit(ticket)
        if isinstance(got, Pick):
            pick = got
        else:
            self._waits[ticket.id] = (got, asyncio.current_task())
            try:
                pick = await got
            except asyncio.CancelledError:
                pump.abandon(ticket, got)
                raise
            finally:
                self._waits.pop(ticket.id, None)
        outcome = LOST
        try:
            if await self._system.infer(pick.slice, local):
                outcome = OK
                spent_ms = 1e3 * (clock.monotonic_s() - ticket.arrived_s)
                local.accounting.load.answered(
                    FAMILY, pick.variant, pick.slice, "", 1, spent_ms, 0.0, 75.0, clock.now_s()
                )
        finally:
            pump.done(ticket, pick, outcome)
            self._clients_leave()
        if outcome is LOST:
            local.health.eject(pick.slice, Failure.UNREACHABLE, "connection refused")
        return outcome is OK
