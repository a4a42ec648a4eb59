"""Time operators at a clock and at half of it, on a slice of a node whose power agent holds the clock by a lease.

Each operator is served in turn as if it were a stage of its model's family: the agent reads the models of stages from
its repository when they are planned, so nothing is restarted for them. Medians of requests that never wait, of n passes
through COPIES copies and of one: their difference removes all but the operator (operator_models.py). What the loop
itself takes is in it, a COPIES-th of it for each run.
The lease ends by itself LEASE_S after its last renewal, whatever becomes of this process.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from protos.power_agent.v1 import power_agent_pb2
from trefoil.core.catalog import Variant
from trefoil.core.errors import CatalogError, TrefoilError, Unavailable
from trefoil.core.fleet import ClockLease, DeviceStatus, stage_model, triton_name
from trefoil.profiler.assumed import graph_costs
from trefoil.profiler.exclusive_node import ExclusiveNode
from trefoil.profiler.operator_models import COPIES, COPY, INPUT, OUTPUT, RepeatedOperator
from trefoil.profiler.places import POLL_S, RPC_S, NodePlace, node_status
from trefoil.profiler.sensitivity import OperatorTimes
from trefoil.profiler.triton_load import TritonSlice, Window
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import Clock
from trefoil.runtime.model_files import CONFIG, FILES
from trefoil.runtime.security.tls import Tls

PLACES: Final = 64  # stages as which operators are served in turn: as many as a plan may name
PASSES_MAX: Final = 4096
LONG_MS: Final = 200.0  # of a request of many passes: the jitter of requests is small beside it
SHORT_S: Final = 0.02  # of a window that only tells how long a request takes
LEASE_S: Final = 60.0
CLOCK_TIMEOUT_S: Final = 15.0
CLOCK_TOLERANCE: Final = 0.02


class HeldClock:
    """The clock of one device, held by a lease of its power agent. `release` gives it back."""

    def __init__(self, agent: Any, device: str, clock: Clock, holder: str) -> None:
        """`agent` is a stub of the node's power agent."""
        self._agent, self._device, self._clock, self._holder = agent, device, clock, holder
        self.lease: ClockLease | None = None

    async def lock(self, mhz: int) -> int:
        """Take or renew the lease; the supported clock that it came to [MHz].

        Raises:
            TrefoilError: the agent does not grant it; says why.
        """
        epoch = (await node_status(self._agent)).highest_epoch_seen
        wanted = ClockLease(self._device, mhz, mhz, self._holder, epoch)
        request = power_agent_pb2.SetClocksRequest(lease=codec.to_proto(wanted), ttl_s=LEASE_S)
        self.lease = codec.from_proto((await rpc.call(self._agent.SetClocks, request, RPC_S)).lease)
        return self.lease.max_mhz

    async def run_at(self, mhz: int) -> None:
        """Lock the clock, and wait until the device runs at it.

        Raises:
            Unavailable: it does not, or the lease is gone. TrefoilError: as `lock`.
        """
        locked = await self.lock(mhz)
        deadline_s = self._clock.monotonic_s() + CLOCK_TIMEOUT_S
        while True:
            status = await self._mine()
            if abs(status.clock_mhz - locked) <= CLOCK_TOLERANCE * locked:
                return
            if self._clock.monotonic_s() > deadline_s:
                reasons = ", ".join(status.clock_event_reasons) or "for no reason that its driver names"
                raise Unavailable(
                    f"runs at {status.clock_mhz} MHz, not at {locked}: {reasons}", field="device", value=self._device,
                    remedy="a lower --clock",
                )  # fmt: skip
            await self._clock.sleep(POLL_S)

    async def check(self) -> None:
        """Check that the clock was held until now.

        Raises:
            Unavailable: the lease is gone, or the device did not honour it.
        """
        if unlike := [text for text in (await self._mine()).drift if "clock" in text]:
            raise Unavailable(unlike[0], field="device", value=self._device, remedy="a lower --clock")

    async def release(self) -> None:
        """Give the lease back, where it still is this one."""
        if self.lease is None:
            return
        self.lease, node = None, await node_status(self._agent)
        leases = [one.clock_lease for one in node.devices if one.device == self._device]
        if any(lease is not None and lease.holder == self._holder for lease in leases):
            mine = power_agent_pb2.ReleaseClocksRequest(
                device=self._device, holder=self._holder, epoch=node.highest_epoch_seen
            )
            await rpc.call(self._agent.ReleaseClocks, mine, RPC_S)

    async def _mine(self) -> DeviceStatus:
        assert self.lease is not None
        node, wanted = await node_status(self._agent), self.lease
        status = next((one for one in node.devices if one.device == self._device), DeviceStatus(self._device))
        held = status.clock_lease
        if held is None or (held.holder, held.max_mhz) != (wanted.holder, wanted.max_mhz):
            raise Unavailable(
                f"its clock lease was lost while it was measured: {held.holder if held else 'no process'} holds it now",
                field="device", value=self._device, remedy="start again when no other process sets its clocks",
            )  # fmt: skip
        return status


class Unmeasured(TrefoilError):
    """One operator cannot be timed here; others can."""


@dataclass(slots=True)
class OperatorBench:
    """A slice on which operators are timed, one after the other. `clocks_mhz`: the higher and the lower one."""

    node: ExclusiveNode
    place: NodePlace
    held: HeldClock
    clocks_mhz: tuple[int, int]
    family: str
    variant: Variant
    repository: Path
    clock: Clock
    window_s: float
    tls: Tls | None = None
    _written: list[Path] = field(default_factory=list)

    async def run(
        self, operators: Sequence[RepeatedOperator], python: Path, say: Callable[[str], None]
    ) -> tuple[dict[str, OperatorTimes], dict[str, str]]:
        """Times of operators by name, and why there are none; the clock is let go of and the node emptied at the end.

        `python`: of an environment with ONNX Runtime, in which each is tried first.

        Raises:
            TrefoilError: none can be served, the clock is not held, or the agent is gone.
        """
        times, whys = dict[str, OperatorTimes](), dict[str, str]()
        try:
            for number, one in enumerate(operators):
                try:
                    found = await self._time(number % PLACES, one, python, first=not times)
                    times |= dict.fromkeys(one.names, found)
                    said = f"{found.full_ms:.3g} and {found.half_ms:.3g} ms"
                except Unmeasured as error:
                    said = str(error)
                    whys |= dict.fromkeys(one.names, said)
                say(f"{number + 1}/{len(operators)} {len(one.names)} x {one.cost.operator} {[*one.cost.shape]}: {said}")
        except BaseException:
            try:
                await self._undo()
            except TrefoilError as error:  # of what is raised it is a consequence
                say(f"something is left behind: {error}")
            raise
        await self._undo()
        return times, whys

    async def _undo(self) -> None:
        async with AsyncExitStack() as undone:  # each of them, whatever the others meet
            for folder in self._written:
                undone.callback(shutil.rmtree, folder)
            undone.push_async_callback(self.node.empty)
            undone.push_async_callback(self.held.release)

    async def _time(self, stage: int, one: RepeatedOperator, python: Path, *, first: bool) -> OperatorTimes:
        graph = self._write(stage, one)
        try:
            (told,) = await asyncio.to_thread(graph_costs, [graph], [0], {}, python)
        except CatalogError as error:
            raise Unmeasured(error.message) from error
        shapes = [[*cost.shape] for cost in told.operators if cost.name == f"{COPY}0"]
        if shapes != [[*one.cost.shape]]:
            raise Unmeasured(f"its shape depends on values that cannot be generated: {shapes}")
        place = replace(self.place, stage=stage, stages=PLACES, instances=1)
        try:
            status = await self.node.serve(place, self.family, self.variant, PASSES_MAX)
        except Unavailable as error:
            if first:
                raise
            raise Unmeasured(error.message) from error
        model, shown = stage_model(self.family, stage, PLACES), triton_name(self.place.device.partition("/")[0])
        triton = TritonSlice(status.grpc_target, model, self.clock, {}, Path("none"), self.tls, shown)
        try:
            return await self._times(triton)
        finally:
            await triton.close()

    def _write(self, stage: int, one: RepeatedOperator) -> Path:
        """Put the model of an operator into the repository."""
        name = stage_model(self.family, stage, PLACES)
        folder = self.repository / name
        if folder not in self._written:
            if folder.exists():
                raise CatalogError("exists already", field="--repository", value=str(folder), remedy="remove it")
            self._written.append(folder)
        config = model_config_pb2.ModelConfig(name=name, max_batch_size=PASSES_MAX)
        for tensors, tensor in ((config.input, INPUT), (config.output, OUTPUT)):
            tensors.add(name=tensor, data_type=model_config_pb2.TYPE_FP32, dims=[1])
        path = folder / str(self.variant.version) / FILES["onnxruntime"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(one.graph.SerializeToString())
        (folder / CONFIG).write_text(text_format.MessageToString(config), encoding="utf-8")
        return path

    async def _times(self, triton: TritonSlice) -> OperatorTimes:
        passes, took_ms = 1, 0.0
        while passes < PASSES_MAX and took_ms < LONG_MS:
            passes *= 4
            took_ms = (await self._window(triton, self.clocks_mhz[0], passes, SHORT_S)).quantile_ms(0.5)
        found, samples = list[float](), 0
        for mhz in self.clocks_mhz:
            one, many = [await self._window(triton, mhz, batch, self.window_s) for batch in (1, passes)]
            found.append((many.quantile_ms(0.5) - one.quantile_ms(0.5)) / ((passes - 1) * COPIES))
            samples += len(one.latency_ms) + len(many.latency_ms)
        if min(found) <= 0:
            raise Unmeasured(f"it is too short to be distinguished from noise ({found[0]:.2g} and {found[1]:.2g} ms)")
        return OperatorTimes(found[0], found[1], samples)

    async def _window(self, triton: TritonSlice, mhz: int, passes: int, seconds: float) -> Window:
        """Requests of so many passes, one after the other, at a clock; one at least."""
        await self.held.run_at(mhz)
        window, why = None, ""
        try:
            request = await triton.make_request(self.variant.version, passes)
            await triton.warm_up(request)
            window = await triton.closed_loop(request, passes, seconds)
        except TrefoilError as error:
            why = str(error)
        await self.held.check()  # first: without it nothing that was answered counts, and no failure is the operator's
        if window is None or not window.latency_ms:
            raise Unmeasured(why or "no request was answered")
        return window
