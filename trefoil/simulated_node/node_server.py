"""Server of a simulated GPU node: its Unix socket, its ticks, its processes, and its end.

It owns driver state, the energy integral and the processes on slices, so that killing the agent loses nothing, as on
hardware. Ending it is a driver unload: everything on its slices ends with it.

Protocol: Unix stream; 4-byte little-endian length, then JSON {"op", ...}; answer {"result"} or {"error"}. One request
at a time per connection; connections are served concurrently, so a slow stop blocks no other call.
"""

import asyncio
import functools
import inspect
import json
import os
import signal
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import structlog
from pydantic import TypeAdapter, ValidationError

from power_agent.devices.errors import NodeRefused
from power_agent.devices.gpus import boot_id
from power_agent.devices.node_client import FRAME, FRAME_BYTES_MAX, peer_pid
from power_agent.runtimes.cgroup import Cgroups
from power_agent.runtimes.child import become_subreaper
from power_agent.runtimes.confinement import Confinement
from power_agent.runtimes.process import ProcessRuntime
from power_agent.triton.slice_launch import SliceLaunch
from trefoil.core import errors
from trefoil.runtime import config
from trefoil.runtime.clock import WallClock
from trefoil.runtime.files import replace_file
from trefoil.runtime.given.catalog_files import CatalogFiles
from trefoil.runtime.service import NetworkComponent
from trefoil.simulated_node.gpu_models import gpu_model
from trefoil.simulated_node.interference import Interference
from trefoil.simulated_node.machine import SETTLE_S, Machine
from trefoil.simulated_node.node import SimulatedNode
from trefoil.simulated_node.settings import NodeSettings
from trefoil.simulated_node.workload import Workload

log = structlog.get_logger()

SHUTDOWN_GRACE_S: Final = 2.5  # from SIGTERM of the processes to SIGKILL, when the node itself ends
SOCKET_PATH_BYTES_MAX: Final = 107
STOPS_MAX: Final = 64  # that wait at one time
LAUNCH: Final = TypeAdapter(SliceLaunch)
CONFINEMENT: Final = TypeAdapter(Confinement)
SIGNATURE_OF: Final = functools.cache(inspect.signature)

_client: ContextVar[int] = ContextVar("client")  # pid at the other end of the connection that is served


class NodeServer:
    """Server of a simulated node: its socket, its ticks and its end."""

    def __init__(self, settings: NodeSettings, files: CatalogFiles, clock: WallClock) -> None:
        self._settings, self._files = settings, files
        self._clock = clock
        self._stop = asyncio.Event()
        self._handlers: set[asyncio.Task[None]] = set()
        self._connections: Counter[int] = Counter()  # by the pid of the client
        self._started_at_s = clock.now_s()
        self.driver_load_id = str(uuid.uuid4())
        machine = build_machine(settings, _load_number(self.driver_load_id))
        machine.on_reload = self._reload_driver
        self._interference = Interference(machine)
        no_groups = Cgroups(0, {}, {})
        folder, log_mib = self._directory / "processes", settings.triton_log_mib
        runtime = ProcessRuntime(folder, no_groups, clock, boot_id(), owned=True, log_mib=log_mib)
        pace_dir, now_s = self._directory / "pace", clock.monotonic_s()
        self.node = SimulatedNode(machine, runtime, self._workloads(), pace_dir, settings.seed, now_s)
        files.in_use, files.adopt = self.node.families, lambda: self.node.learn(self._workloads())
        self._ops: dict[str, Callable[..., Any]] = {
            "nvml": self._nvml,
            "process_start": self._process_start,
            "process_list": lambda: [asdict(one) for one in self.node.list_processes()],
            "process_stop": self._process_stop,
            "process_forget": self._process_forget,
            "pace_summary": lambda: asdict(self.node.work_total),
            "truth": machine.truth,
            "holders": lambda index: machine.driver.holders(machine.gpu(index)),  # as (pid, name)
            "describe": self._describe,
            "admin": self._admin,
            "shutdown": self._stop.set,
        }

    def _workloads(self) -> dict[str, Workload]:
        return {name: Workload(gpu_model(name).type, self._files.catalog) for name in self._settings.devices}

    @property
    def _directory(self) -> Path:
        return self._settings.socket.parent

    # --- life ---

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or the `shutdown` op; then end every process and leave nothing behind."""
        become_subreaper()
        self._prepare_directory()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(STOPS_MAX, "stop"))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        server = await asyncio.start_unix_server(self._serve, str(self._settings.socket))
        self._settings.socket.chmod(0o600)
        log.info("simulated node is up", **config.masked(self._settings), driver_load_id=self.driver_load_id)
        ticking = asyncio.create_task(self._tick_until_stopped())
        reaching = asyncio.create_task(NetworkComponent(self._clock).run())
        reading = asyncio.create_task(self._files.run(self._clock))
        try:
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait((ticking, reaching, reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if ticking.done():
                ticking.result()  # a bug in the driver ends the node loudly
            server.close()
            await self._end_processes()
            for ended in (task for task in (reaching, reading) if task.done()):
                ended.result()  # raises: its Tritons cannot be reached any more, or a bug
        finally:
            ticking.cancel()
            reaching.cancel()
            reading.cancel()
            for handler in self._handlers:
                handler.cancel()
            await asyncio.gather(ticking, reaching, reading, *self._handlers, return_exceptions=True)
            self._settings.socket.unlink(missing_ok=True)
            log.info("simulated node is down")

    def _prepare_directory(self) -> None:
        path = str(self._settings.socket)
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            message = f"longer than the {SOCKET_PATH_BYTES_MAX} bytes of a Unix socket path"
            raise errors.SettingError(message, field="socket", value=path, remedy="name a shorter path")
        self._directory.mkdir(parents=True, exist_ok=True)
        if listens(path):
            raise errors.PortInUse("a node listens there already", field="socket", value=path, remedy="stop it")
        self._settings.socket.unlink(missing_ok=True)
        for leftover in (self._directory / "pace").glob("*.pace"):
            leftover.unlink()
        for left in self.node.runtime.list():  # a predecessor was killed, and its processes with it
            self.node.runtime.stop(left.tag, 0)
            self.node.runtime.forget(left.tag)
        self._write_load_id()

    async def _tick_until_stopped(self) -> None:
        while True:
            await self._clock.sleep(self._settings.tick_ms / 1e3)
            self.node.tick(self._clock.monotonic_s())

    async def _end_processes(self) -> None:
        runtime = self.node.runtime
        tags = [one.tag for one in self.node.list_processes()]
        stops = (asyncio.to_thread(runtime.stop, tag, SHUTDOWN_GRACE_S) for tag in tags)
        for tag, outcome in zip(tags, await asyncio.gather(*stops, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException):
                log.error("a process does not end", tag=tag, why=str(outcome))
            else:
                runtime.forget(tag)
        self.node.list_processes()

    # --- protocol ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        pid = peer_pid(writer.get_extra_info("socket"))
        _client.set(pid)
        self._connections[pid] += 1
        try:
            while True:
                (length,) = FRAME.unpack(await reader.readexactly(FRAME.size))
                if length > FRAME_BYTES_MAX:
                    break
                answer = await self._answer(await reader.readexactly(length))
                body = json.dumps(answer, separators=(",", ":")).encode()
                writer.write(FRAME.pack(len(body)) + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away: nothing of it is kept here
        finally:
            self._handlers.discard(handler)
            self._connections[pid] -= 1
            if not self._connections[pid]:  # it has ended, or has no call in flight and none in mind
                del self._connections[pid]
                self.node.machine.end_client(pid)
            writer.close()

    async def _answer(self, frame: bytes) -> dict[str, Any]:
        try:
            request = json.loads(frame)
            operation = self._ops[request.pop("op")]
            SIGNATURE_OF(operation).bind(**request)
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            remedy = f"an op of {', '.join(self._ops)}, with its arguments"
            return {"error": f"malformed request ({error!r}). Remedy: {remedy}"}
        try:
            answer = operation(**request)
            return {"result": await answer if inspect.isawaitable(answer) else answer}
        except ValidationError as error:
            return {"error": f"malformed request ({error}). Remedy: start node and agent from one version"}
        except errors.TrefoilError as error:
            return {"error": str(error)}

    # --- operations ---

    async def _nvml(self, fn: str, args: Sequence[Any]) -> tuple[int, list[Any]]:
        machine = self.node.machine
        pending = machine.begin_call(fn, args)
        if pending.delay_s:
            await self._clock.sleep(pending.delay_s)
        self.node.driver.now_s = self._clock.monotonic_s()
        return machine.execute_call(pending, args, _client.get())

    async def _process_start(
        self, tag: str, launch: Mapping[str, Any], log_path: str, confinement: Mapping[str, Any]
    ) -> dict[str, Any]:
        words = LAUNCH.validate_python(launch), Path(log_path), CONFINEMENT.validate_python(confinement)
        started = self.node.start(tag, *words)
        log.info("process started", tag=tag, pid=started.id)
        return asdict(started)

    async def _process_stop(self, tag: str, kill_after_s: float) -> None:
        await asyncio.to_thread(self.node.runtime.stop, tag, kill_after_s)
        self.node.list_processes()  # its slice is free when this is answered

    async def _process_forget(self, tag: str) -> None:
        await asyncio.to_thread(self.node.runtime.forget, tag)  # waits while it is being stopped

    def _describe(self) -> dict[str, Any]:
        return {
            "node": self._settings.node,
            "simulated": True,
            "pid": os.getpid(),
            "driver_load_id": self.driver_load_id,
            "devices": list(self._settings.devices),
            "started_at_s": self._started_at_s,
            "root": self._settings.root,
            "symbols_missing": list(self._settings.symbols_missing),
            "faults": self.node.machine.faults.summary(),
        }

    def _admin(self, verb: str, args: dict[str, Any]) -> Any:
        """Verbs: fault, clear_faults (FaultPlan), reload_driver, and every method of Interference."""
        machine = self.node.machine
        verbs: dict[str, Callable[..., Any]] = {
            "fault": machine.faults.plan,
            "clear_faults": machine.faults.clear,
            "reload_driver": self._reload_driver,
            **{name: getattr(self._interference, name) for name in INTERFERENCE_VERBS},
        }
        if verb not in verbs:
            raise NodeRefused(f"no admin verb {verb!r}", remedy=f"one of {', '.join(verbs)}")
        try:
            inspect.signature(verbs[verb]).bind(**args)
        except TypeError as error:
            raise NodeRefused(f"{verb}: {error}", remedy="see its signature in interference.py or faults.py") from error
        log.warning("rehearsed trouble", verb=verb, **args)
        return verbs[verb](**args)

    def _reload_driver(self) -> None:
        self.driver_load_id = str(uuid.uuid4())
        self.node.reload(_load_number(self.driver_load_id))
        self._write_load_id()

    def _write_load_id(self) -> None:
        replace_file(self._directory / "driver_load_id", self.driver_load_id + "\n", sync=False)


INTERFERENCE_VERBS: Final = tuple(name for name in vars(Interference) if not name.startswith("_"))


def build_machine(settings: NodeSettings, load_number: int = 1) -> Machine:
    """Build the machine that these settings describe."""
    return Machine(
        settings.node,
        settings.devices,
        seed=settings.seed,
        noise_ratio=settings.noise_ratio,
        mig_enabled=settings.mig_enabled,
        fresh_uuids=settings.fresh_uuids,
        driver_version=settings.driver_version,
        root=settings.root,
        symbols_missing=settings.symbols_missing,
        stale_listing=settings.stale_listing,
        settle_s=SETTLE_S if settings.clock_settle else (0.0, 0.0),
        call_latency=settings.call_latency,
        counter_period_s=settings.counter_ms / 1e3,
        load_number=load_number,
    )


def _load_number(driver_load_id: str) -> int:
    return uuid.UUID(driver_load_id).int % 2**24 + 1


def listens(path: str) -> bool:
    """Whether a node listens at this socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True
