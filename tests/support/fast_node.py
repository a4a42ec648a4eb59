"""A simulated node whose slices run fake Tritons inside the node's own process: a start takes 5 ms instead of 3 s.

Driver, NVML calls, faults, sockets and the process operations are those of the product; only what a process is differs.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from power_agent.runtimes.base import RunningTriton
from power_agent.runtimes.confinement import Confinement
from power_agent.triton.slice_launch import LAUNCHED_AS, SliceLaunch
from tests.support.fake_slice import FakeSlice
from tests.support.fast_agent import catalog
from trefoil.core.errors import StartError, TrefoilError
from trefoil.runtime.clock import WallClock
from trefoil.runtime.given.catalog_files import CatalogFiles
from trefoil.runtime.telemetry import setup_logging
from trefoil.simulated_node.node_server import NodeServer
from trefoil.simulated_node.settings import NodeSettings

FIRST_PID: Final = 2**23  # above any real one: a signal to it hits nobody


class FakeProcess:
    """A fake Triton that has a pid."""

    def __init__(self, pid: int, tag: str, launch: SliceLaunch) -> None:
        self.pid, self.tag, self.launch = pid, tag, launch
        self.triton = FakeSlice(launch.argv)
        self.started_at_s = time.time()
        self.up = asyncio.get_running_loop().create_task(self._start())
        self.exit_code: int | None = None
        self._down: asyncio.Task[None] | None = None

    @property
    def running(self) -> RunningTriton:
        """As the product's runtime lists it."""
        alive = self.exit_code is None
        launch = self.launch
        return RunningTriton(
            self.tag, str(self.pid), str(self.pid), alive, self.exit_code, self.started_at_s,
            launch.env.get(LAUNCHED_AS, "").rpartition("/")[0], tuple(launch.argv), launch.gpu_uuid,
        )  # fmt: skip

    async def _start(self) -> None:
        try:
            await self.triton.start()
        except (RuntimeError, OSError, TrefoilError) as error:  # as a Triton that writes a line and exits
            print(f"pid {self.pid} does not start: {error!r}", file=sys.stderr, flush=True)
            self.end(-signal.SIGKILL)

    def end(self, code: int) -> asyncio.Task[None]:
        """Let it end; done when it has."""
        if self._down is None:
            self._down = asyncio.get_running_loop().create_task(self._stop(code))
        return self._down

    async def ended(self, code: int) -> None:
        """Let it end and wait for that."""
        await self.end(code)

    async def _stop(self, code: int) -> None:
        if asyncio.current_task() is not self.up:
            await asyncio.wait((self.up,))
        await self.triton.stop()
        self.exit_code = code


class FakeRuntime:
    """In place of the node's ProcessRuntime."""

    def __init__(self) -> None:
        self.processes: dict[str, FakeProcess] = {}
        self.starts = 0
        self.loop: asyncio.AbstractEventLoop | None = None

    def start(
        self, tag: str, launch: SliceLaunch, log_path: Path, confinement: Confinement, writes: Sequence[Path] = ()
    ) -> RunningTriton:
        """Start one; its port listens when `up` is done."""
        self.loop = asyncio.get_running_loop()
        process = self.processes.get(tag)
        if process is None or not process.running.alive:
            self.starts += 1
            process = self.processes[tag] = FakeProcess(FIRST_PID + self.starts, tag, launch)
        elif process.launch.argv != launch.argv:
            raise StartError("alive with another command", field="tag", value=tag, remedy="stop it first")
        return process.running

    def list(self) -> Sequence[RunningTriton]:
        """All of them."""
        return tuple(process.running for process in tuple(self.processes.values()))  # `forget` runs in a thread

    def stop(self, tag: str, kill_after_s: float) -> None:
        """SIGTERM; called from a thread, as the product's."""
        process = self.processes.get(tag)
        if process is not None and self.loop is not None:
            asyncio.run_coroutine_threadsafe(process.ended(0), self.loop).result()

    def forget(self, tag: str) -> None:
        """Raises StartError while it lives."""
        process = self.processes.get(tag)
        if process is not None and process.running.alive:
            raise StartError("alive", field="tag", value=tag, remedy="stop it first")
        self.processes.pop(tag, None)

    def kill_all(self) -> None:
        """SIGKILL."""
        for process in tuple(self.processes.values()):
            process.end(-signal.SIGKILL)

    def reap(self) -> bool:
        """Nothing is below them; whether one ended, `list` tells."""
        return True


class FastNode(NodeServer):
    """Operations for tests: `inspect` tells everything, `kill` ends a fake Triton, `kill_stub` its stub."""

    def __init__(self, settings: NodeSettings, files: CatalogFiles) -> None:
        super().__init__(settings, files, WallClock())
        self._fakes = FakeRuntime()
        self.node.runtime = self._fakes  # type: ignore[assignment]
        self._ops |= {"inspect": self._inspect, "kill": self._kill, "kill_stub": self._kill_stub}

    async def _process_start(self, **request: Any) -> dict[str, Any]:
        status = await super()._process_start(**request)
        await self._fakes.processes[request["tag"]].up
        return status

    async def _kill(self, tag: str) -> None:
        self._fakes.processes[tag].end(-signal.SIGKILL)

    async def _kill_stub(self, tag: str) -> None:
        self._fakes.processes[tag].triton.stub_dead = True

    async def _inspect(self) -> dict[str, Any]:
        alive = {one.tag for one in self.node.list_processes() if one.alive}
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
                    "clock_max_mhz": gpu.model.clocks_mhz[-1],
                    "limit_w": limit,
                    "processes": len(gpu.processes),
                }
            )
        processes = [
            {
                "tag": tag,
                "pid": process.pid,
                "uuid": process.launch.gpu_uuid,
                "alive": tag in alive,
                "versions": process.triton.versions,
            }
            for tag, process in tuple(self._fakes.processes.items())
        ]
        return {"gpus": gpus, "processes": processes, "starts": self._fakes.starts}


def main(config: dict[str, Any]) -> int:
    """In the forked process."""
    settings = NodeSettings(**config)
    setup_logging("node", "warning", True)
    asyncio.run(_run(settings, CatalogFiles(Path(settings.model_repository), load=catalog)))
    return 0


async def _run(settings: NodeSettings, files: CatalogFiles) -> None:
    await FastNode(settings, files).run()
