"""Tries ejected slices until one answers, and slices whose agent has gone silent.

A slice with a dead python stub says that it is ready; it is readmitted by a real inference only.
"""

import asyncio
from collections import Counter

import grpc
import structlog
from tritonclient.grpc import service_pb2 as pb

from dispatcher.contracts import Contracts
from dispatcher.ejection import Failure, classify
from dispatcher.hub import Hub
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import SliceKey

LOG = structlog.get_logger()
TICK_S = 0.1


class Prober:
    """A part of the service."""

    def __init__(self, hub: Hub, contracts: Contracts) -> None:
        self._hub = hub
        self._contracts = contracts
        self._probing: dict[SliceKey, asyncio.Task[None]] = {}
        self._silent_failures: Counter[SliceKey] = Counter()
        self._silent_at_s = 0.0
        self._learning: asyncio.Task[None] | None = None

    async def init(self) -> None:
        """Nothing to acquire."""

    async def run(self) -> None:
        """Probe what is due, until cancelled."""
        while True:
            now_s = self._hub.clock.monotonic_s()
            for slice_, failure in self._hub.ejections.due(now_s).items():
                self._start(slice_, failure)
            if now_s - self._silent_at_s >= self._hub.settings.stale_probe_s:
                self._silent_at_s = now_s
                for slice_ in self._silent():
                    self._start(slice_, None)
            for pump in self._hub.pumps.values():
                pump.expire()
            self._learn()
            await self._hub.clock.sleep(TICK_S)

    async def shutdown(self) -> None:
        """Cancel the probes under way."""
        tasks = [*self._probing.values(), *([self._learning] if self._learning is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, slice_: SliceKey, failure: Failure | None) -> None:
        if slice_ not in self._probing:
            task = asyncio.create_task(self._probe(slice_, failure), name=f"probe {slice_.name}")
            self._probing[slice_] = task
            task.add_done_callback(lambda _: self._probing.pop(slice_, None))

    async def _probe(self, slice_: SliceKey, failure: Failure | None) -> None:
        """`failure` None: not ejected, its node is silent."""
        try:
            why = await self._try(slice_, infer=failure is Failure.DEAD_STUB)
        except TrefoilError as error:
            why = str(error)
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name} {error.details()}"
        if failure is not None:
            if why:
                LOG.debug("probe failed", slice=slice_.name, why=why)
            else:
                self._hub.readmit(slice_)
            return
        self._silent_failures[slice_] = self._silent_failures[slice_] + 1 if why else 0
        if self._silent_failures[slice_] >= self._hub.settings.stale_probe_failures:
            del self._silent_failures[slice_]
            self._hub.eject(slice_, Failure.UNREACHABLE, f"its agent is silent, and so is it: {why}")

    async def _try(self, slice_: SliceKey, infer: bool) -> str:
        """Why the slice is not well, "" if it is."""
        timeout_s = self._hub.settings.probe_timeout_s
        connection = self._hub.transport.to(slice_)
        for family in self._hub.families_of(slice_):
            if not await connection.ready(family, timeout_s):
                return f"not ready for {family}"
            if not infer:
                continue
            contract = self._contracts.known(family)
            if contract is None:
                contract = await self._contracts.from_slice(family, slice_)
            try:
                await connection.ask("ModelInfer", contract.zeros(family), pb.ModelInferResponse, timeout_s)
            except grpc.aio.AioRpcError as error:
                code, details = error.code().name, error.details() or ""
                if code == "DEADLINE_EXCEEDED" or classify(code, details) is not Failure.OWN:
                    return f"{code} {details}"
        return ""

    def _learn(self) -> None:
        """Ask for a family's contract as soon as a slice can tell: later there may be none."""
        unknown = [f for f, r in self._hub.table.routes.items() if r.targets and self._contracts.known(f) is None]
        if unknown and (self._learning is None or self._learning.done()):
            self._learning = asyncio.create_task(self._ask(unknown), name="learn contracts")

    async def _ask(self, families: list[str]) -> None:
        for family in families:
            try:
                await self._contracts.of(family)
            except TrefoilError as error:
                LOG.debug("contract not known yet", family=family, why=str(error))

    def _silent(self) -> list[SliceKey]:
        """Slices that are routed to although their node's status is stale."""
        now_s, limit_s = self._hub.clock.now_s(), self._hub.settings.node_stale_s
        stale = {
            status.key
            for node in self._hub.nodes.values()
            if now_s - node.observed_at_s > limit_s
            for device in node.devices
            for status in device.slices
        }
        return [t.slice for route in self._hub.table.routes.values() for t in route.targets if t.slice in stale]
