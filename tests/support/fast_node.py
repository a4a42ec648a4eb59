"""A simulated node whose slices run fake Tritons inside the node's own process: a start takes 5 ms instead of 3 s.

Driver, NVML calls, faults, sockets and the process operations are those of the product; only what a process is differs.
"""

import asyncio
import inspect
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from power_agent.devices.errors import NodeRefused
from power_agent.runtimes.confinement import Confined
from power_agent.simulated.node_server import NodeServer
from power_agent.simulated.processes import Child
from power_agent.simulated.settings import NodeSettings
from tests.support.fake_slice import FakeSlice
from tests.support.fast_agent import catalog
from trefoil.core.catalog import Catalog
from trefoil.core.errors import TrefoilError
from trefoil.runtime.clock import WallClock
from trefoil.runtime.telemetry import setup_logging

FIRST_PID: Final = 2**23  # above any real one: a signal to it hits nobody
HUNG_S: Final = 3600.0


class FakeProcess:
    """In place of a Popen."""

    def __init__(self, pid: int, triton: FakeSlice) -> None:
        self.pid = pid
        self.triton = triton
        self.up = asyncio.get_running_loop().create_task(self._start())
        self.returncode: int | None = None
        self._down: asyncio.Task[None] | None = None

    async def _start(self) -> None:
        try:
            await self.triton.start()
        except (RuntimeError, OSError, TrefoilError) as error:  # as a Triton that writes a line and exits
            print(f"pid {self.pid} does not start: {error!r}", file=sys.stderr, flush=True)
            self.kill()

    def terminate(self) -> None:
        """SIGTERM."""
        self._end(0)

    def kill(self) -> None:
        """SIGKILL."""
        self._end(-signal.SIGKILL)

    def _end(self, code: int) -> None:
        if self._down is None:
            self._down = asyncio.get_running_loop().create_task(self._stop(code))

    async def _stop(self, code: int) -> None:
        if asyncio.current_task() is not self.up:
            await asyncio.wait((self.up,))
        await self.triton.stop()
        self.returncode = code


class FakeProcesses:
    """In place of the node's ProcessTable."""

    def __init__(self) -> None:
        self.children: dict[str, Child] = {}
        self.starts = 0

    def __iter__(self) -> Iterator[Child]:
        return iter(tuple(self.children.values()))

    def get(self, tag: str) -> Child:
        """Raises NodeRefused when unknown."""
        if tag not in self.children:
            raise NodeRefused(f"no process with tag {tag!r}")
        return self.children[tag]

    def find_alive(self, tag: str) -> Child | None:
        """One that lives."""
        child = self.children.get(tag)
        return child if child is not None and child.alive else None

    def start(
        self, tag: str, argv: Sequence[str], env: Mapping[str, str], log_path: str, cwd: str, mig_uuid: str,
        now_s: float, confined: Confined,
    ) -> Child:  # fmt: skip
        """Start one; its port listens when `process.up` is done."""
        self.starts += 1
        process: Any = FakeProcess(FIRST_PID + self.starts, FakeSlice(argv))
        self.children[tag] = Child(tag, process, mig_uuid, tuple(argv), log_path, now_s)
        return self.children[tag]

    def forget(self, tag: str) -> None:
        """Raises NodeRefused while it lives."""
        if self.get(tag).alive:
            raise NodeRefused(f"{tag} is alive")
        del self.children[tag]

    def poll(self) -> list[Child]:
        """Those that ended since the last call."""
        ended = []
        for child in self.children.values():
            if not child.alive or child.popen.returncode is None:
                continue
            child.exit_code = child.popen.returncode
            child.ended.set()
            ended.append(child)
        return ended


class FastNode(NodeServer):
    """Operations for tests: `inspect` tells everything, `kill` ends a fake Triton, `kill_stub` its stub."""

    def __init__(self, settings: NodeSettings, catalog: Catalog) -> None:
        super().__init__(settings, catalog, WallClock())
        self._fakes = FakeProcesses()
        self.node.processes = self._fakes  # type: ignore[assignment]
        extra = {"inspect": self._inspect, "kill": self._kill, "kill_stub": self._kill_stub}
        self._ops.update(extra)
        self._signatures.update({op.__name__: inspect.signature(op) for op in extra.values()})

    async def _process_start(self, **request: Any) -> dict[str, Any]:
        status = await super()._process_start(**request)
        await self._fakes.get(request["tag"]).popen.up  # type: ignore[attr-defined]
        return status

    async def _process_stop(self, tag: str, kill_after_s: float = 8.0) -> dict[str, Any]:
        child = self._fakes.get(tag)
        child.popen.terminate()
        while child.popen.returncode is None:
            await asyncio.sleep(0.001)
        self.tick()
        return await super()._process_stop(tag, kill_after_s)

    async def _kill(self, tag: str) -> None:
        self._fakes.get(tag).popen.kill()

    async def _kill_stub(self, tag: str) -> None:
        self._fakes.get(tag).popen.triton.stub_dead = True  # type: ignore[attr-defined]

    async def _inspect(self) -> dict[str, Any]:
        gpus = []
        for gpu in self.node.driver.gpus:
            instances = [
                {
                    "name": gi.profile.name,
                    "start": gi.start,
                    "generation": gi.generation,
                    "computes": [[ci.width, ci.mig_uuid] for ci in gi.computes.values()],
                    "width": gi.profile.compute_slices,
                }
                for gi in gpu.instances.values()
            ]
            limit = [gpu.power_limit_w, gpu.model.power_limit_w[1]]
            gpus.append(
                {
                    "uuid": gpu.uuid,
                    "instances": instances,
                    "locked": gpu.locked_mhz,
                    "clock_max_mhz": gpu.model.clock_max_mhz,
                    "limit_w": limit,
                    "processes": len(gpu.processes),
                }
            )
        processes = [
            {"tag": c.tag, "pid": c.pid, "uuid": c.mig_uuid, "alive": c.alive, "versions": c.popen.triton.versions}  # type: ignore[attr-defined]
            for c in self._fakes
        ]
        return {"gpus": gpus, "processes": processes, "starts": self._fakes.starts}


def main(config: dict[str, Any]) -> int:
    """In the forked process."""
    settings = NodeSettings(**config)
    setup_logging("node", "warning", True)
    asyncio.run(_run(settings, catalog(Path(settings.model_repository))))
    return 0


async def _run(settings: NodeSettings, catalog: Catalog) -> None:
    await FastNode(settings, catalog).run()
