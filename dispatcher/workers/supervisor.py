"""Keeps k workers of one dispatcher alive: `python -m dispatcher` with `workers` > 1 is this process.

Each worker is a whole dispatcher (`python -m dispatcher` again, with its number). Clients' ports are bound here, once,
and inherited: a connection that waits to be accepted when a worker is killed is accepted by another. On other ports all
listen (SO_REUSEPORT) and the kernel deals connections out. A worker that ends is started again at once, under a number
that was never used. One that keeps ending is started ever more slowly, forever. Only where none has ever lived is that
given up. SIGTERM and SIGINT are passed on: all drain, and a second signal ends them fast. If this process is killed,
the kernel tells the workers, which drain and end.
"""

import asyncio
import ctypes
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import structlog

from dispatcher.routing.core.membership import RESTART_STEP
from dispatcher.settings import DispatcherSettings
from dispatcher.transport.accepting import listen
from trefoil.core.errors import TrefoilError, Unavailable
from trefoil.runtime import rpc
from trefoil.runtime.clock import Clock

LOG = structlog.get_logger()
SETTINGS_REFUSED: Final = 2  # the exit code of a TrefoilError: starting again cannot help
NOT_STARTED: Final = 1
STABLE_S: Final = 5.0  # a worker that lived so long did not fail to start
STARTS_MAX: Final = 5  # of one place, before any worker has lived so long
PAUSE_FIRST_S: Final = 0.2
PAUSE_MAX_S: Final = 5.0
GRACE_S: Final = 10.0  # beyond drain_s, before workers that do not end are killed
ADDRESSES: Final = ("inference_address", "admin_address", "metrics_address", "rest_address")
FRONTS: Final = ("inference_address", "rest_address")
_PR_SET_PDEATHSIG: Final = 1


class Supervisor:
    """Supervisor of the worker processes of one dispatcher. Belongs to one event loop."""

    def __init__(self, settings: DispatcherSettings, argv: Sequence[str], clock: Clock) -> None:
        self.dispatcher = f"dispatcher-{uuid.uuid4().hex[:12]}"
        self._settings = settings
        self._argv = list(argv)
        self._clock = clock
        self._workers: dict[int, asyncio.subprocess.Process] = {}  # by place
        self._started_s: dict[int, float] = {}  # by place
        self._stopping = asyncio.Event()
        self._code = 0
        self._any_stable = False  # whether any worker ever lived for long
        self._held_sockets: list[socket.socket] = []
        self._inherited: dict[str, socket.socket] = {}  # by the setting that names their descriptor

    async def run(self) -> int:
        """Supervise until stopped, or until a worker refuses its settings; returns the exit code.

        Raises:
            PortInUse, StartError: another process listens on one of the ports.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._request_stop)
        try:
            addresses = self._hold_ports()
            keepers = [
                asyncio.create_task(self._keep_alive(place, addresses), name=f"worker {place}")
                for place in range(self._settings.workers)
            ]
            await self._stopping.wait()
            try:
                async with asyncio.timeout(self._settings.drain_s + GRACE_S):
                    await asyncio.gather(*keepers)
            except TimeoutError:
                self._signal(signal.SIGKILL)
        finally:
            for held in (*self._held_sockets, *self._inherited.values()):
                held.close()
        return self._code

    def _hold_ports(self) -> dict[str, str]:
        """Take the ports for our workers, so that no other process gets them while one is being started again. Sockets
        that do not listen get no connections."""
        addresses: dict[str, str] = {}
        for name in ADDRESSES:
            address = getattr(self._settings, name, "")
            if not address or address.startswith("unix:"):
                continue
            settings = self._settings.front() if name in FRONTS else self._settings
            authenticated = name in FRONTS and settings.authenticates
            rpc.check_listener(settings, address, read_only=name == "metrics_address", authenticated=authenticated)
            if name in FRONTS:
                held = self._inherited[f"{name.removesuffix('_address')}_socket"] = listen(address, name)
                addresses[name] = f"{address.rpartition(':')[0]}:{held.getsockname()[1]}"
                continue
            rpc.check_port(address)
            host, port = rpc.split_address(address)
            held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            self._held_sockets.append(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((host, port))
            addresses[name] = f"{address.rpartition(':')[0]}:{held.getsockname()[1]}"
        return addresses

    async def _keep_alive(self, place: int, addresses: dict[str, str]) -> None:
        life, pause_s = 0, 0.0
        while not self._stopping.is_set():
            self._started_s[place] = self._clock.monotonic_s()
            worker = place + RESTART_STEP * life
            try:
                code = await self._run_worker(place, worker, addresses)
            except OSError as error:  # no process or descriptor is left for it
                LOG.error("worker not started", worker=worker, why=str(error))
                code = NOT_STARTED
            if self._stopping.is_set():
                return
            stable = self._lives_long(place)
            self._any_stable = self._any_stable or stable or any(map(self._lives_long, self._workers))
            if not self._any_stable and (code == SETTINGS_REFUSED or life == STARTS_MAX):
                LOG.error("no worker can be started", worker=worker, code=code)
                self._code = code if code > 0 else 1
                self._request_stop()
                return
            pause_s = 0.0 if stable else min(PAUSE_MAX_S, max(PAUSE_FIRST_S, 2 * pause_s))
            LOG.warning("worker ended", worker=worker, code=code, again_in_s=pause_s)
            life += 1
            if pause_s:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._stopping.wait()

    def _lives_long(self, place: int) -> bool:
        return self._clock.monotonic_s() - self._started_s[place] >= STABLE_S

    async def _run_worker(self, place: int, worker: int, addresses: dict[str, str]) -> int:
        sockets = {name: each.fileno() for name, each in self._inherited.items()}
        values = {"worker": worker, "dispatcher": self.dispatcher, "supervisor_pid": os.getpid()} | addresses | sockets
        assignments = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        # A separate session: a terminal's Ctrl-C comes to us alone, and from us to the workers, once.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "dispatcher", *self._argv, *assignments,
            start_new_session=True, pass_fds=tuple(sockets.values()),
        )  # fmt: skip
        self._workers[place] = process
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        LOG.info("worker started", worker=worker, pid=process.pid)
        try:
            return await process.wait()
        finally:
            del self._workers[place]

    def _request_stop(self) -> None:
        """On each signal: the first lets workers drain, the second ends them at once."""
        self._stopping.set()
        for shared in self._inherited.values():
            shared.close()  # else the kernel would take connections that no process accepts
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._workers.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)


def supervise(settings: DispatcherSettings, argv: Sequence[str], clock: Clock) -> int:
    """Run the workers of one dispatcher; returns the exit code."""
    try:
        return asyncio.run(Supervisor(settings, argv, clock).run())
    except TrefoilError as error:
        print(f"error: {error}", file=sys.stderr)
        return SETTINGS_REFUSED


def end_with_supervisor(pid: int) -> None:
    """Ask the kernel for SIGTERM when our supervisor dies (Linux).

    Raises:
        Unavailable: it is dead already.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != pid:
        raise Unavailable(f"the supervisor {pid} is gone", remedy="start the dispatcher again")
