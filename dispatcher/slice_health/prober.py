"""Tries ejected slices until they answer, slices whose agent has gone silent, and slices that are silent themselves.

A slice with a dead python stub says that it is ready; it is readmitted by a real inference only, as outliers are.

A server that was stopped (SIGSTOP, a driver that hangs) refuses nothing: its kernel still takes connections and bytes.
So a slice that has requests and answers none is asked whether it is alive, and ejected when it does not say so: after
hang_quiet_s + hang_probe_s no request is sent there. Those that it has wait on, for it may go on and then answers them;
trying them elsewhere would execute them twice. After hung_fail_s they fail; where its agent is silent too, so that the
host is taken for gone and no answer can come from there, they are tried elsewhere.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Final

import grpc
import structlog
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.contracts import Contract, Contracts
from dispatcher.request import decoupled
from dispatcher.request.admission import StatusError
from dispatcher.request.core import kserve_wire
from dispatcher.service.local_worker import LocalWorker
from dispatcher.slice_health.core.ejection import PROVEN_BY_INFERENCE, Failure, classify
from dispatcher.slice_health.core.outliers import FAULTS
from dispatcher.transport.slices import Connection
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import SliceKey

LOG = structlog.get_logger()
TICK_S: Final = 0.1
LAG_S: Final = 0.1  # a tick that comes later than this tells of an event loop that is behind
STALL_S: Final = 0.3  # a probe that took this much longer than it may was held up here, and tells nothing
IDLE_PROBES_MAX: Final = 10  # a tick
STUCK_FACTOR: Final = 20.0  # a server that says it lives, and has answered nothing for so many times its usual time
STUCK_MIN_S: Final = 1.5
PROBE_FACTOR: Final = 4.0  # of its usual time, for an inference that proves a slice well
SICK_MAX_S: Final = 30.0


class Prober:
    """Health checks of slices: probes of ejected ones, questions to silent ones. A part of the service."""

    def __init__(self, local: LocalWorker, contracts: Contracts) -> None:
        self._health = local.health
        self._routing = local.routing
        self._clock = local.clock
        self._settings = local.settings
        self._contracts = contracts
        self._probing: dict[SliceKey, asyncio.Task[None]] = {}
        self._silent_failures: Counter[SliceKey] = Counter()
        self._idle_since_s: dict[SliceKey, tuple[int, float]] = {}  # what it had answered then
        self._hung_since_s: dict[SliceKey, float] = {}
        self._silent_at_s = 0.0
        self._learning: asyncio.Task[None] | None = None

    async def init(self) -> None:
        """Nothing to acquire."""

    async def run(self) -> None:
        """Probe what is due ten times a second, until cancelled."""
        due_s = self._clock.monotonic_s()
        while True:
            now_s = self._clock.monotonic_s()
            if now_s - due_s > LAG_S:
                self._health.evidence.on_stall(now_s)
            due_s = now_s + TICK_S
            for slice_, failure in self._health.ejections.due(now_s).items():
                self._start(slice_, self._probe(slice_, failure))
            if now_s - self._silent_at_s >= self._settings.stale_probe_s:
                self._silent_at_s = now_s
                for slice_ in self._stale_slices():
                    self._start(slice_, self._probe(slice_, None))
            self._check_silence(now_s)
            for queue in self._routing.each_queue:
                queue.expire()
            for sequences in self._routing.sequences.values():
                sequences.expire()
            self._learn_contracts()
            await self._clock.sleep(TICK_S)

    async def shutdown(self) -> None:
        """Cancel the probes under way."""
        tasks = [*self._probing.values(), *([self._learning] if self._learning is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, slice_: SliceKey, probe: Coroutine[Any, Any, None]) -> None:
        if slice_ in self._probing:
            probe.close()
            return
        task = asyncio.create_task(probe, name=f"probe {slice_.name}")
        self._probing[slice_] = task
        task.add_done_callback(lambda _: self._probing.pop(slice_, None))

    def _check_silence(self, now_s: float) -> None:
        """Ask slices that are silent over their work, and idle ones now and then; end what waits on dead ones."""
        health, settings = self._health, self._settings
        in_flight, answers = self._routing.in_flight(), health.evidence.answer_counts
        for slice_ in health.evidence.silence.tick(in_flight, answers, now_s):
            if slice_ in health.ejections.outliers():
                self._hung_since_s.setdefault(slice_, now_s)
            elif slice_ not in health.ejections:
                self._start(slice_, self._ask_alive(slice_, settings.hang_probe_s))
        for slice_ in self._idle_slices(in_flight, answers, now_s) if settings.idle_probe_s else ():
            self._start(slice_, self._ask_alive(slice_, settings.probe_timeout_s))
        for slice_, since_s in list(self._hung_since_s.items()):
            if health.evidence.silence.quiet_s(slice_) < settings.hang_quiet_s:
                del self._hung_since_s[slice_]  # it goes on, or has nothing any more
            elif now_s - since_s >= settings.hung_fail_s:
                del self._hung_since_s[slice_]
                why = f"slice {slice_.name} has not answered for {now_s - since_s:.1f} s: it hangs"
                self._routing.connections.cut(slice_, why, gone=slice_ in self._silent_hosts())

    def _idle_slices(
        self, in_flight: Mapping[SliceKey, int], answers: Mapping[SliceKey, int], now_s: float
    ) -> list[SliceKey]:
        due: list[SliceKey] = []
        known, self._idle_since_s = self._idle_since_s, {}
        live = {target.slice for route in self._routing.table.routes.values() for target in route.targets}
        for slice_ in live - set(in_flight):
            count, since_s = known.get(slice_, (-1, now_s))
            if count != answers.get(slice_, 0):
                since_s = now_s
            elif now_s - since_s >= self._settings.idle_probe_s and len(due) < IDLE_PROBES_MAX:
                due.append(slice_)
                since_s = now_s
            self._idle_since_s[slice_] = answers.get(slice_, 0), since_s
        return due

    async def _ask_alive(self, slice_: SliceKey, timeout_s: float) -> None:
        """Whether a silent slice answers anything at all."""
        health, clock = self._health, self._clock
        before, started_s = health.evidence.answer_counts[slice_], clock.monotonic_s()
        try:
            connection = self._routing.connections.connection(slice_)
            await connection.ask("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse, timeout_s)
        except TrefoilError:
            return  # it has no connection: the table is about to leave it out
        except grpc.aio.AioRpcError as error:
            code, details = error.code().name, error.details() or ""
            failure = classify(code, details)
            if failure is not Failure.OWN:
                health.eject(slice_, failure, f"asked whether it is alive: {code} {details}")
                return
            if code == "DEADLINE_EXCEEDED":
                took_s = clock.monotonic_s() - started_s
                if health.evidence.answer_counts[slice_] == before and took_s <= timeout_s + STALL_S:
                    self._hangs(
                        slice_, Failure.HUNG, f"silent, and does not say within {timeout_s:g} s whether it is alive"
                    )
                return
        health.evidence.silence.on_alive(slice_)
        quiet_s, usual_s = health.evidence.silence.quiet_s(slice_), health.evidence.times.longest_s(slice_)
        if usual_s and quiet_s >= max(STUCK_MIN_S, STUCK_FACTOR * usual_s):
            self._hangs(slice_, Failure.STUCK, f"says that it is alive, but answered nothing for {quiet_s:.1f} s")

    def _hangs(self, slice_: SliceKey, failure: Failure, why: str) -> None:
        self._hung_since_s.setdefault(slice_, self._clock.monotonic_s())
        self._health.eject(slice_, failure, why)

    async def _probe(self, slice_: SliceKey, failure: Failure | None) -> None:
        """`failure` None: not ejected, its node is silent."""
        try:
            why = await self._check_slice(slice_, failure)
        except TrefoilError as error:
            why = str(error)
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name} {error.details()}"
        if failure is not None:
            if why:
                LOG.debug("probe failed", slice=slice_.name, why=why)
            else:
                self._health.readmit(slice_)
            return
        self._silent_failures[slice_] = self._silent_failures[slice_] + 1 if why else 0
        if self._silent_failures[slice_] >= self._settings.stale_probe_failures:
            del self._silent_failures[slice_]
            self._health.eject(slice_, Failure.UNREACHABLE, f"its agent is silent, and so is it: {why}")

    async def _check_slice(self, slice_: SliceKey, failure: Failure | None) -> str:
        """Why the slice is not well, "" if it is."""
        timeout_s = self._settings.probe_timeout_s
        connection = self._routing.connections.connection(slice_)
        for family in self._routing.families_of(slice_):
            if not await connection.ready(family, timeout_s):
                return f"not ready for {family}"
            if failure not in PROVEN_BY_INFERENCE:
                continue
            contract = self._contracts.known(family)
            if contract is None:
                contract = await self._contracts.from_slice(family, slice_)
            try:
                await self._prove_by_inference(connection, contract, family, slice_)
            except grpc.aio.AioRpcError as error:
                code, details = error.code().name, error.details() or ""
            except StatusError as refused:
                code, details = refused.code.name, refused.details
            else:
                continue
            if code == "DEADLINE_EXCEEDED" or classify(code, details) is not Failure.OWN:
                return f"{code} {details}"
            if failure is Failure.SICK and code in FAULTS and not self._out_for_long(slice_):
                return f"{code} {details}"
        return ""

    def _out_for_long(self, slice_: SliceKey) -> bool:
        """Whether a sick slice has been out for so long that its probes prove nothing: some models refuse zeros."""
        known = self._health.ejections.get(slice_)
        return known is None or self._clock.monotonic_s() - known.since_s > SICK_MAX_S

    async def _prove_by_inference(
        self, connection: Connection, contract: Contract, family: str, slice_: SliceKey
    ) -> None:
        """One real inference; raises AioRpcError, or StatusError for an error among a decoupled family's answers."""
        request = contract.zeros(family)
        timeout_s = max(self._settings.probe_timeout_s, PROBE_FACTOR * self._health.evidence.times.longest_s(slice_))
        if not contract.decoupled:
            await connection.ask("ModelInfer", request, pb.ModelInferResponse, timeout_s)
            return
        async with aclosing(connection.stream((request.SerializeToString(), kserve_wire.ASK_FINAL), timeout_s)) as told:
            async for data in told:
                if (error := decoupled.error_of(pb.ModelStreamInferResponse.FromString(data))) is not None:
                    raise error

    def _learn_contracts(self) -> None:
        """Ask for contracts as soon as a slice can tell, later there may be none; and again when they may differ."""
        if self._learning is None or self._learning.done():
            asked = [family for family in self._routing.table.alive if self._contracts.to_ask(family)]
            if asked:
                self._learning = asyncio.create_task(self._learn_all(asked), name="learn contracts")

    async def _learn_all(self, families: list[str]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for family in families:
                tasks.create_task(self._learn(family))

    async def _learn(self, family: str) -> None:
        try:
            await self._contracts.learn(family)
        except TrefoilError as error:
            LOG.debug("contract not learned", family=family, why=str(error))

    def _silent_hosts(self) -> set[SliceKey]:
        """Slices of nodes whose status is stale."""
        now_s, limit_s = self._clock.now_s(), self._settings.node_stale_s
        return {
            status.key
            for node in self._routing.nodes.values()
            if now_s - node.observed_at_s > limit_s
            for device in node.devices
            for status in device.slices
        }

    def _stale_slices(self) -> list[SliceKey]:
        """Slices that are routed to although their node's status is stale, by whichever worker: the controller takes a
        node for lost when none reaches it."""
        stale = self._silent_hosts()
        return [slice_ for slices in self._routing.table.alive.values() for slice_ in slices if slice_ in stale]
