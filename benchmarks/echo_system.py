"""The whole system on this machine, as `trefoil up` starts it, serving the family `echo` by plans pinned here.

Two simulated A100s, a real Triton on each slice, real Redis, all four services. What stands is an `Arrangement`: how
each GPU is cut, and by how many places the variants are rotated over the slices.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.echo_family import FAMILY, VERSIONS, make_repository, rate_per_s, variant_name
from dispatcher.settings import DispatcherSettings
from power_agent.devices.node_client import NodeClient
from power_agent.runtimes.simulated_node import NodeRuntime
from protos.controller.v1 import controller_pb2
from tests.support.ports import free_offset
from trefoil.cli.run.launcher import Launcher, first_answer
from trefoil.cli.run.scenario import CarbonTrace, Ports, ServedFamily, System
from trefoil.cli.system_client import SystemClient
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import SERVING, DeviceState, Hosted, SliceKey, SliceStatus
from trefoil.core.plan import NodePlan, Plan, PlannedDevice, PlannedSlice, RolloutState, RouteTarget
from trefoil.runtime import codec
from trefoil.runtime.clock import WallClock

CREDITS: Final = 2
# Ways to cut a GPU: (slice type, first memory slice, memory slices).
LAYOUTS: Final = (
    (("3g.20gb", 0, 4), ("3g.20gb", 4, 4)),
    (("2g.10gb", 0, 2), ("2g.10gb", 2, 2), ("3g.20gb", 4, 4)),
    (("4g.20gb", 0, 4), ("2g.10gb", 4, 2)),
)
SMALL: Final = (("2g.10gb", 0, 2), ("1g.5gb", 2, 1))  # 259 requests/s
POLL_S: Final = 0.1
REST_PORT: Final = 8120  # beside those that every system has


Cut = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """`layouts`: of each GPU; `rotation`: which variant comes first."""

    layouts: tuple[Cut, ...] = LAYOUTS[:2]
    rotation: int = 0

    def slices(self) -> tuple[PlannedSlice, ...]:
        """Of all GPUs, in order."""
        keys = [SliceKey(f"node0/gpu{gpu}", *cut) for gpu, layout in enumerate(self.layouts) for cut in layout]
        versions = [VERSIONS[(n + self.rotation) % len(VERSIONS)] for n in range(len(keys))]
        return tuple(
            PlannedSlice(key, (Hosted(FAMILY, variant_name(v), v, 0, 1, 1, 8),), CREDITS)
            for key, v in zip(keys, versions, strict=True)
        )

    @property
    def capacity_per_s(self) -> float:
        """Of all its slices, always busy."""
        return sum(rate_per_s(part.key.slice_type) for part in self.slices())

    def plan(self, base: Plan) -> Plan:
        """This, in place of what `base` wants; shares by capacity."""
        slices = self.slices()
        devices = tuple(
            PlannedDevice(name, DeviceState.AWAKE, tuple(part for part in slices if part.key.device == name))
            for name in (f"node0/gpu{gpu}" for gpu in range(len(self.layouts)))
        )
        targets = tuple(
            RouteTarget(p.key, p.hosted[0].variant, 0, rate_per_s(p.key.slice_type) / self.capacity_per_s, p.credits)
            for p in slices
        )
        routes = tuple(replace(route, targets=targets) for route in base.routes)
        nodes = (NodePlan(node="node0", devices=devices),)
        return replace(base, nodes=nodes, routes=routes, degraded="pinned by a benchmark")


class EchoSystem:
    """Running. `async with running(...)` makes one."""

    def __init__(self, launcher: Launcher, repository: Path, base: Plan) -> None:
        assert launcher.launch is not None
        self.launcher = launcher
        self.launch = launcher.launch
        self.repository = repository
        self.client = SystemClient(self.launch)
        self.node = NodeClient(self.launch.node_socket)
        self.clock = WallClock()
        self._base = base

    @property
    def target(self) -> str:
        """Where clients send to."""
        return self.launch.addresses["inference"]

    async def pin(self, arrangement: Arrangement) -> None:
        """Ask the controller for it; raises TrefoilError."""
        plan = codec.to_proto(arrangement.plan(self._base))
        await self.client.call("Pin", controller_pb2.PinRequest(plan=plan))

    async def rolled_out(self, timeout_s: float) -> None:
        """Until the pinned plan stands as a whole; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while (await self.client.plan()).rollout.state != int(RolloutState.DONE):
                await self.clock.sleep(POLL_S)

    async def serving(self) -> dict[SliceKey, SliceStatus]:
        """Slices that serve, by what their agent published; empty while Redis does not know."""
        try:
            nodes = await self.client.nodes()
        except TrefoilError:
            return {}
        parts = [part for node in nodes for device in node.devices for part in device.slices]
        return {part.key: part for part in parts if part.state in SERVING}

    async def triton(self, key: SliceKey) -> psutil.Process | None:
        """The Triton of a slice, if it lives."""
        listed = await asyncio.to_thread(NodeRuntime(self.node).list)
        found = [int(each.id) for each in listed if each.tag.startswith(f"{key.name}.g") and each.alive]
        try:
            return psutil.Process(found[-1]) if found else None
        except psutil.NoSuchProcess:
            return None

    def dispatcher(self) -> psutil.Process:
        """The process that was started as the dispatcher; with several workers they are its children."""
        return psutil.Process(self.launcher.pid("dispatcher"))

    def workers(self) -> list[psutil.Process]:
        """Worker processes of the dispatcher; empty when it is one process."""
        return [child for child in self.dispatcher().children() if "dispatcher" in " ".join(child.cmdline())]

    def log(self, service: str) -> str:
        """All that it logged."""
        return self.launcher.paths.log(service).read_text(errors="replace")

    async def close(self) -> None:
        """Connections only; the launcher ends the processes."""
        self.node.close()
        await self.client.close()


@asynccontextmanager
async def running(
    folder: Path,
    arrangement: Arrangement,
    *,
    workers: int = 1,
    say: Callable[[str], None] = lambda _: None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    ready: Callable[[Launcher, WallClock], Awaitable[object]] = first_answer,
) -> AsyncIterator[EchoSystem]:
    """Start, wait until `ready` returns and the arrangement stands as a whole, and take everything down at the end. The
    logs stay. `overrides`: settings by service."""
    shutil.rmtree(folder, ignore_errors=True)
    repository = make_repository(folder / "models")
    system = System(
        cluster="echo",
        family=ServedFamily(name=FAMILY, repository=repository),
        demand_initial_per_s=50.0,
        carbon=CarbonTrace(step_s=3600.0),  # no decision about carbon takes part
        port_offset=free_offset(),
        ports=Ports(rest=REST_PORT),
    )
    settings = {name: dict(values) for name, values in (overrides or {}).items()}
    settings["dispatcher"] = settings.get("dispatcher", {}) | dispatcher_settings(workers)
    launcher = Launcher(system, folder / "cluster", say=say, overrides=settings)
    async with launcher:
        await ready(launcher, WallClock())
        assert launcher.launch is not None
        client = SystemClient(launcher.launch)
        base: Plan = codec.from_proto((await client.plan()).plan)
        await client.close()
        echo = EchoSystem(launcher, repository, base)
        try:
            await echo.pin(arrangement)
            await echo.rolled_out(60.0)
            yield echo
        finally:
            await echo.close()


def dispatcher_settings(workers: int) -> dict[str, Any]:
    """Every failure is logged, with its slice. One process, where the dispatcher cannot be several."""
    several = {"workers": workers} if "workers" in DispatcherSettings.model_fields else {}
    return {"log_failures_per_s": 1000.0, **several}
