"""Probes what is ejected until it answers, what is suspected, slices whose agent has gone silent, and slices that are
silent themselves.

A model whose python stub is dead says that it is ready: a suspected model is probed by a real inference, and
readmitted by one only. A probe is of one model: what it shows takes no other model of the slice out.

A server that was stopped (SIGSTOP, a driver that hangs) refuses nothing: its kernel still takes connections and bytes.
So a slice that has requests and answers none is asked whether it is alive, and ejected when it does not say so: after
hang_quiet_s + HANG_PROBE_S no request is sent there. Those that it has wait on, for it may go on and then answers them;
trying them elsewhere would execute them twice. After hung_fail_s they fail. If the slice's agent is silent too, the
host is taken for gone, and no answer can come from there. Then they are tried elsewhere.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog
from tritonclient.grpc import service_pb2 as pb

from dispatcher.request import decoupled
from dispatcher.request.admission import StatusError
from dispatcher.request.contracts import Contract, Contracts
from dispatcher.routing.slices import Connection
from dispatcher.service.ejector import proof_of
from dispatcher.service.local_worker import LocalWorker
from dispatcher.slice_health.core.ejection import PROVEN_BY_INFERENCE, Failure, Place
from dispatcher.slice_health.core.suspicion import Suspicion, probe_failure
from dispatcher.transport.core import kserve_wire
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import SliceKey

LOG = structlog.get_logger()
TICK_S: Final = 0.1
PROBE_TIMEOUT_S: Final = 3.0  # of a probe of an ejected slice; a dead python stub answers after 1 s
HANG_PROBE_S: Final = 0.7  # in which a quiet slice has to say that it lives
STALE_PROBE_FAILURES: Final = 2  # in a row, after which a slice of a silent node is ejected
LAG_S: Final = 0.1  # a tick that comes later than this tells of an event loop that is behind
STALL_S: Final = 0.3  # a probe that took this much longer than it may was held up here, and tells nothing
IDLE_PROBES_MAX: Final = 10  # a tick
STUCK_FACTOR: Final = 20.0  # a server that says it lives, and has answered nothing for so many times its usual time
STUCK_MIN_S: Final = 0.4
PROBE_FACTOR: Final = 4.0  # of its usual time, for an inference that proves a model well
SLOW_PROBE_S: Final = 0.5  # for an inference of a model that is suspected of answering late, or not at all
STUB_ANSWER_S: Final = 1.0  # that Triton takes for each request to a dead python stub, one after the other
LINE_MAX_S: Final = 10.0
SICK_MAX_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class _Found:
    """What a probe found: why `model` ("" = all of its slice) is not well, None = it is. `held_up`: by a time-out that
    may be this process's own, or the whole server's, which `_ask_alive` finds."""

    failure: Failure | None = None
    why: str = ""
    model: str = ""
    held_up: bool = False


class Prober:
    """Health checks of slices: probes of ejected ones, questions to silent ones. A part of the service."""

    def __init__(self, local: LocalWorker, contracts: Contracts) -> None:
        self._health = local.health
        self._routing = local.routing
        self._clock = local.clock
        self._settings = local.settings
        self._contracts = contracts
        self._probing: dict[Place, asyncio.Task[None]] = {}
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
            for place, failure in self._health.ejections.due(now_s).items():
                self._start(place, self._probe_ejected(place, failure))
            self._probe_suspects(now_s)
            if now_s - self._silent_at_s >= self._settings.stale_probe_s:
                self._silent_at_s = now_s
                for slice_ in self._stale_slices():
                    self._start((slice_, ""), self._probe_stale(slice_))
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

    def _probe_suspects(self, now_s: float) -> None:
        suspicions = self._health.evidence.suspicions
        for place, suspicion in suspicions.due(now_s).items():
            if self._health.ejections.out(*place) or place in self._probing:
                suspicions.close(place)
            else:
                self._start(place, self._probe_suspected(place, suspicion))

    def _start(self, place: Place, probe: Coroutine[Any, Any, None]) -> None:
        if place in self._probing:
            probe.close()
            return
        task = asyncio.create_task(probe, name=f"probe {place[0].name} {place[1]}")
        self._probing[place] = task
        task.add_done_callback(lambda _: self._probing.pop(place, None))

    def _check_silence(self, now_s: float) -> None:
        """Ask slices that are silent over their work, and idle ones now and then; end what waits on dead ones."""
        health, settings = self._health, self._settings
        in_flight, silence = self._routing.in_flight_by_model(), health.evidence.silence
        silent: dict[SliceKey, list[Place]] = {}
        for place in silence.tick(in_flight, health.evidence.answer_counts, now_s):
            silent.setdefault(place[0], []).append(place)
        for slice_, places in silent.items():
            if not health.ejections.out(slice_):
                self._start((slice_, ""), self._ask_alive(slice_, HANG_PROBE_S, places))
        busy = {slice_ for slice_, _ in in_flight}
        for slice_ in self._idle_slices(busy, now_s) if settings.idle_probe_s else ():
            self._start((slice_, ""), self._ask_alive(slice_, PROBE_TIMEOUT_S))
        for slice_, since_s in list(self._hung_since_s.items()):
            quiet_s = [silence.quiet_s(place) for place in in_flight if place[0] == slice_]
            if min(quiet_s, default=0.0) < settings.hang_quiet_s:
                del self._hung_since_s[slice_]  # it continues, or has nothing any more
            elif now_s - since_s >= settings.hung_fail_s:
                del self._hung_since_s[slice_]
                why = f"slice {slice_.name} has not answered for {now_s - since_s:.1f} s: it hangs"
                self._routing.connections.cut(slice_, why, gone=slice_ in self._silent_hosts())

    def _idle_slices(self, busy: Set[SliceKey], now_s: float) -> list[SliceKey]:
        due: list[SliceKey] = []
        known, self._idle_since_s = self._idle_since_s, {}
        live = {target.slice for route in self._routing.table.routes.values() for target in route.targets}
        for slice_ in live - busy:
            count, since_s = known.get(slice_, (-1, now_s))
            answers = self._health.evidence.answers_of(slice_)
            if count != answers:
                since_s = now_s
            elif now_s - since_s >= self._settings.idle_probe_s and len(due) < IDLE_PROBES_MAX:
                due.append(slice_)
                since_s = now_s
            self._idle_since_s[slice_] = answers, since_s
        return due

    async def _ask_alive(self, slice_: SliceKey, timeout_s: float, silent: Sequence[Place] = ()) -> None:
        """Whether a slice answers anything at all; if so, `silent` are those of its models that do not."""
        evidence, clock = self._health.evidence, self._clock
        before, started_s = evidence.answers_of(slice_), clock.monotonic_s()
        try:
            await self._routing.connections.connection(slice_).alive(timeout_s)
        except TrefoilError:
            return  # it has no connection: the table is about to leave it out
        except grpc.aio.AioRpcError as error:
            code, details = error.code().name, error.details() or ""
            if (proof := proof_of(error)) is not None:
                self._health.eject(slice_, proof, f"asked whether it is alive: {code} {details}")
                return
            if code == "DEADLINE_EXCEEDED":
                took_s = clock.monotonic_s() - started_s
                if evidence.answers_of(slice_) == before and took_s <= timeout_s + STALL_S:
                    self._hung_since_s.setdefault(slice_, clock.monotonic_s())
                    why = f"silent, and does not say within {timeout_s:g} s whether it is alive"
                    self._health.eject(slice_, Failure.HUNG, why)
                return
        usual_s = evidence.times.longest_s(slice_)
        for place in silent:
            evidence.silence.on_alive(place)
            quiet_s = evidence.silence.quiet_s(place)
            stuck_s = max(STUCK_MIN_S, STUCK_FACTOR * usual_s)
            if usual_s and quiet_s >= stuck_s and not evidence.times.has_first(slice_, clock.monotonic_s()):
                why = f"says that it is alive, but answered nothing for {quiet_s:.1f} s"
                evidence.suspicions.suspect(place, Failure.STUCK, why)
        self._probe_suspects(clock.monotonic_s())

    async def _probe_ejected(self, place: Place, failure: Failure) -> None:
        """Readmit an ejected place that is well again."""
        slice_, model = place
        unready: list[str] = []
        if model:
            found = await self._check_model(place, failure, PROBE_TIMEOUT_S)
            why = found.why
            if found.failure in (Failure.SICK, Failure.DEAD_STUB) and self._out_for_long(place):
                why = ""
        else:
            why, unready = await self._check_server(slice_)
        if why:
            LOG.debug("probe failed", slice=slice_.name, model=model, why=why)
            if model and found.failure is Failure.DEAD_STUB:
                self._health.eject(slice_, found.failure, why, model)
            return
        for each in unready:
            self._health.eject(slice_, Failure.UNREACHABLE, f"not ready for {each}", each)
        self._health.readmit(slice_, model)

    async def _probe_suspected(self, place: Place, suspicion: Suspicion) -> None:
        """Eject a suspected place if a probe of it fails. A place that answered well meanwhile is not a dead one."""
        if suspicion.failure in (Failure.LATE, Failure.STUCK):
            timeout_s = SLOW_PROBE_S
        else:
            line_s = STUB_ANSWER_S * self._routing.in_flight_by_model()[place]
            timeout_s = PROBE_TIMEOUT_S + min(LINE_MAX_S, line_s)
        found = await self._check_model(place, suspicion.failure, timeout_s)
        self._health.evidence.suspicions.close(place)
        if found.failure is None or found.held_up or (found.failure in PROVEN_BY_INFERENCE and suspicion.answered):
            return
        timed_out = found.failure in (Failure.LATE, Failure.STUCK)
        if timed_out and self._health.evidence.times.has_first(place[0], self._clock.monotonic_s()):
            return  # the probe stood behind it
        self._health.eject(place[0], found.failure, f"{suspicion.why}; probed: {found.why}", found.model)

    async def _probe_stale(self, slice_: SliceKey) -> None:
        """Eject a slice whose agent is silent, and that does not answer either."""
        why, _ = await self._check_server(slice_)
        self._silent_failures[slice_] = self._silent_failures[slice_] + 1 if why else 0
        if self._silent_failures[slice_] >= STALE_PROBE_FAILURES:
            del self._silent_failures[slice_]
            self._health.eject(slice_, Failure.UNREACHABLE, f"its agent is silent, and so is it: {why}")

    async def _check_server(self, slice_: SliceKey) -> tuple[str, list[str]]:
        """Why a server takes no requests, "" if it does; and for which of its models it is not ready."""
        models = self._routing.families_of(slice_)
        unready: list[str] = []
        try:
            connection = self._routing.connections.connection(slice_)
            await connection.alive(PROBE_TIMEOUT_S)
            for model in models:
                if not await connection.ready(model, PROBE_TIMEOUT_S):
                    unready.append(model)
        except (TrefoilError, grpc.aio.AioRpcError) as error:
            return _text(error), []
        return f"not ready for {', '.join(unready)}" if models and len(unready) == len(models) else "", unready

    async def _check_model(self, place: Place, suspected: Failure | None, timeout_s: float) -> _Found:
        """What a probe of one model finds, by an inference where only that proves it well."""
        slice_, model = place
        try:
            connection = self._routing.connections.connection(slice_)
            if not await connection.ready(model, PROBE_TIMEOUT_S):
                return _Found(Failure.UNREACHABLE, f"not ready for {model}", model)
            contract = self._contracts.known(model) or await self._contracts.from_slice(model, slice_)
        except (TrefoilError, grpc.aio.AioRpcError) as error:
            proof, why = proof_of(error), _text(error)
            silent = why.startswith("DEADLINE_EXCEEDED")
            return _Found(proof or Failure.UNREACHABLE, why, "" if proof else model, silent)
        if suspected is not None and suspected not in PROVEN_BY_INFERENCE:
            return _Found()
        timeout_s = max(timeout_s, PROBE_FACTOR * self._health.evidence.times.longest_s(slice_))
        started_s = self._clock.monotonic_s()
        try:
            await _infer(connection, contract, model, timeout_s)
        except grpc.aio.AioRpcError as error:
            if (proof := proof_of(error)) is not None:
                return _Found(proof, _text(error), "")
            code, details = error.code().name, error.details() or ""
        except StatusError as refused:
            code, details = refused.code.name, refused.details
        else:
            return _Found()
        held_up = self._clock.monotonic_s() - started_s > timeout_s + STALL_S
        failure = probe_failure(suspected, code, details)
        return _Found(failure, f"{code} {details}" if failure is not None else "", model, held_up)

    def _out_for_long(self, place: Place) -> bool:
        """Whether a model that refuses probes has been out for so long that they prove nothing: some refuse zeros."""
        known = self._health.ejections.get(*place)
        return known is None or self._clock.monotonic_s() - known.since_s > SICK_MAX_S

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


async def _infer(connection: Connection, contract: Contract, model: str, timeout_s: float) -> None:
    """One real inference; raises AioRpcError, or StatusError for an error among a decoupled model's answers."""
    request = contract.zeros(model)
    if not contract.decoupled:
        await connection.ask("ModelInfer", request, pb.ModelInferResponse, timeout_s)
        return
    async with aclosing(connection.stream((request.SerializeToString(), kserve_wire.ASK_FINAL), timeout_s)) as answers:
        async for data in answers:
            if (error := decoupled.error_of(pb.ModelStreamInferResponse.FromString(data))) is not None:
                raise error


def _text(error: TrefoilError | grpc.aio.AioRpcError) -> str:
    return str(error) if isinstance(error, TrefoilError) else f"{error.code().name} {error.details()}"
