"""Launcher of a whole system on this machine: starts it, keeps it running, and takes all of it down again.

Everything is checked before anything is started. A service starts as soon as its dependencies answer. It must report
itself healthy within a deadline; if it dies, its last log lines are shown. A service that ends later is started again,
at once, then after growing pauses; the others continue. Only the simulated node, which is the hardware, ends the system
if it does not stay up. Teardown runs in reverse order at every end: exception, signal, or normal end. The next launcher
cleans up after one that was killed (`clean_up`). A real inference through the inference port shows that the system
serves (`first_answer`).
"""

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from power_agent.triton.client import TritonClient
from trefoil.cli.run import processes, services
from trefoil.cli.run.processes import ChildProcess, Command
from trefoil.cli.run.scenario import System
from trefoil.cli.run.services import Service
from trefoil.cli.run.shutdown import uncancellable
from trefoil.cli.run.state_directory import Failing, Launch, StateLock, StatePaths, write_private
from trefoil.cli.system_client import SystemClient
from trefoil.core.errors import StartError, TrefoilError, Unavailable, system_words
from trefoil.core.fleet import Hosted
from trefoil.overview.troubles import failure_lines
from trefoil.runtime import config
from trefoil.runtime.clock import Clock, WallClock
from trefoil.runtime.config import to_toml
from trefoil.runtime.proc import Identity
from trefoil.runtime.socket_paths import temporary_folder

START_DEADLINE_S: Final = 45.0
POLL_S: Final = 0.1
UPKEEP_S: Final = 1.0
INFER_TIMEOUT_S: Final = 5.0
PUBLIC_VERSION: Final = 1  # of every family at the inference port
FIRST_ANSWER_DEADLINE_S: Final = 60.0
STABLE_S: Final = 30.0  # one that lived so long had started, also on a busy machine
PAUSE_FIRST_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0
EXITS_MAX: Final = 1000
NODE: Final = "node"
NODE_ENDS_MAX: Final = 5  # in a row: then it is dead, and with it all that could serve
SETTINGS_REFUSED: Final = 2  # the exit code of a TrefoilError: its last line is the complaint
STOP_ORDER: Final = (("dispatcher", "controller"), ("power_agent", "carbon_feed"), ("node",), ("redis",))


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """Unexpected exit of a process."""

    service: str
    exit_code: int
    at_s: float


class Launcher:
    """Launcher of one running system. `async with Launcher(...) as system:` holds it."""

    def __init__(
        self,
        system: System,
        state_dir: Path,
        *,
        clock: Clock | None = None,
        say: Callable[[str], None] = lambda _: None,
        kill_now: Callable[[], bool] = lambda: False,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.system = system
        self.paths = StatePaths(state_dir.resolve())
        self.exits: list[ProcessExit] = []
        self.failure: str = ""  # why nothing can be kept running
        self._clock = clock or WallClock()
        self._say = say
        self._kill_now = kill_now
        self._overrides = {name: dict(values) for name, values in (overrides or {}).items()}
        self._lock = StateLock(self.paths)
        self._launch_id = secrets.token_hex(8)
        self._children: dict[str, ChildProcess] = {}
        self._started_s: dict[str, float] = {}  # monotonic
        self._again_s: dict[str, float] = {}  # monotonic: when one that ended is started again
        self._failing: dict[str, Failing] = {}
        self._supervision: asyncio.Task[None] | None = None
        self._upkeep: list[asyncio.Task[None]] = []
        self._restarting: set[str] = set()  # being restarted on purpose: their end is not a crash
        self._services: dict[str, Service] = {}
        self.launch: Launch | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await uncancellable(self.stop())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await uncancellable(self.stop())

    # Start

    async def start(self) -> None:
        """Start everything: check, write settings, start, and wait until all services are healthy.

        Raises:
            TrefoilError: what is wrong here; nothing of ours is left running then (see `__aenter__`).
        """
        self._lock.acquire()
        await clean_up(self.paths, self._clock)
        repository = self.system.family.repository
        self.system = services.with_one_repository(self.system, self.paths)
        services.preflight(self.system, self._clock.now_s())
        self.launch = services.new_launch(
            self.system, self.paths, self._launch_id, Identity.of_pid(os.getpid()), self._clock.now_s()
        )
        self.paths.write_launch(self.launch)
        self.paths.begin_logs()
        rotate, bytes_max = self.paths.rotate_logs, self.system.log_mib * 2**20
        works = {"a log cannot be rotated, it grows on": lambda: rotate(bytes_max)}
        if services.looks_twice(repository):
            works["new families are not seen"] = lambda: services.link_families(repository, self.paths.folder("models"))
        self._upkeep = [asyncio.create_task(self._keep_doing(work, trouble)) for trouble, work in works.items()]
        self._services = services.service_table(self.system, self.launch, self.paths, self._clock)
        for service in self._services.values():
            self._write_settings(service)
        healthy = {name: asyncio.Event() for name in self._services}
        await _run_all([self._start_service(service, healthy) for service in self._services.values()])
        self.launch = replace(self.launch, ready_at_s=self._clock.now_s())
        self.paths.write_launch(self.launch)
        self._supervision = asyncio.create_task(self._supervise(), name="supervision")

    def _write_settings(self, service: Service) -> None:
        if service.settings is None:
            return
        values = config.merge(service.settings, self._overrides.get(service.name, {}))
        write_private(self.paths.settings(service.name), service.render(values) if service.render else to_toml(values))

    async def _start_service(self, service: Service, healthy: Mapping[str, asyncio.Event]) -> None:
        for needed in service.after:
            await healthy[needed].wait()
        self._spawn(service)
        await self._until_healthy(service)
        healthy[service.name].set()

    def _spawn(self, service: Service) -> None:
        command = Command(service.name, service.argv, self.paths.log(service.name), service.stop_grace_s)
        self._children[service.name] = ChildProcess(command, self._launch_id, self._clock)
        self._started_s[service.name] = self._clock.monotonic_s()
        self._tell(service.name)

    def _tell(self, name: str) -> None:
        """Tell other commands of a service: its process, and how it fails."""
        try:
            self.paths.write_process(name, self._children.get(name), self._failing.get(name))
        except OSError as error:  # of use to people only; it is written again when there is news
            self._say(f"{name}: its file in {self.paths.run} cannot be written ({system_words(error)})")

    async def _until_healthy(self, service: Service) -> None:
        child = self._children[service.name]
        started_s = self._clock.monotonic_s()
        while True:
            if (code := child.exit_code) is not None:
                raise _exit_error(child, code)
            if await service.healthy():
                self._say(f"{service.name} is up after {self._clock.monotonic_s() - started_s:.1f} s")
                return
            if self._clock.monotonic_s() - started_s > START_DEADLINE_S:
                raise StartError(
                    f"not healthy after {START_DEADLINE_S:.0f} s; its last lines:\n{child.last_lines()}",
                    field=service.name,
                    remedy=f"read {child.command.log_path}",
                )
            await self._clock.sleep(POLL_S)

    # While it runs

    async def restart(self, name: str, overrides: Mapping[str, Any] | None = None) -> None:
        """Stop a service and start it again with changed settings; returns when it is healthy."""
        service = self._services[name]
        self._restarting.add(name)
        try:
            self._overrides[name] = config.merge(self._overrides.get(name, {}), overrides or {})
            if (child := self._children.get(name)) is not None:
                await child.stop(kill_now=self._kill_now)
            self._failing.pop(name, None)
            self._write_settings(service)
            self._spawn(service)
            await self._until_healthy(service)
        finally:
            self._restarting.discard(name)

    def pid(self, name: str) -> int:
        """Process id of a service, as of its last start.

        Raises:
            KeyError: it has ended and waits for its next start.
        """
        return self._children[name].pid

    async def wait_for_failure(self) -> None:
        """Wait until the node is dead, the one service whose death ends all."""
        assert self._supervision is not None, "the launcher has started"
        await asyncio.shield(self._supervision)

    async def _supervise(self) -> None:
        """Start again what ends. Nothing here waits for one service: the others are looked after all the time."""
        while not self.failure:
            for name, service in self._services.items():
                if name not in self._restarting:
                    self._keep_up(service)
            await self._clock.sleep(POLL_S)

    async def _keep_doing(self, work: Callable[[], None], trouble: str) -> None:
        """Upkeep, every second and in a thread: a slow disk keeps nothing else waiting. `trouble`: what an error means,
        which is said once."""
        why = ""
        while True:
            before, why = why, ""
            try:
                await asyncio.to_thread(work)
            except OSError as error:
                why = f"{error.filename}: {system_words(error)}"
            except TrefoilError as error:
                why = str(error)
            if why and why != before:
                self._say(f"{trouble}: {why}")
            await self._clock.sleep(UPKEEP_S)

    def _keep_up(self, service: Service) -> None:
        name, child = service.name, self._children.get(service.name)
        if child is not None and (code := child.exit_code) is not None:
            self._on_exit(child, code)
            child = None
        now_s = self._clock.monotonic_s()
        if child is None:
            if now_s >= self._again_s[name] and not self.failure:
                try:
                    self._spawn(service)
                except OSError as error:  # no process, descriptor or room on the disk is left for it
                    self._back_off(name, "no process", str(error))
        elif name in self._failing and now_s - self._started_s[name] >= STABLE_S:
            del self._failing[name]
            self._say(f"{name} stays up again")
            self._tell(name)

    def _on_exit(self, child: ChildProcess, code: int) -> None:
        name = child.name
        self.exits.append(ProcessExit(name, code, self._clock.now_s()))
        del self.exits[:-EXITS_MAX]
        child.kill()  # what it may have left in its group
        del self._children[name]
        self._back_off(name, _exit_text(code), child.last_error())
        if name == NODE and self._failing[name].ends > NODE_ENDS_MAX:
            self.failure = str(_exit_error(child, code))
            self._say(self.failure)

    def _back_off(self, name: str, how: str, last_error: str) -> None:
        """Note that a service has ended, and when it is started again."""
        now_s = self._clock.monotonic_s()
        before = self._failing.get(name)
        ends = 1 if before is None else before.ends + 1
        pause_s = restart_pause_s(ends)
        self._again_s[name] = now_s + pause_s
        self._failing[name] = Failing(ends, how, last_error, self._clock.now_s() + pause_s)
        row = f", {ends} times in a row" if ends > 1 else ""
        when = f"starting it again in {pause_s:g} s" if pause_s else "starting it again"
        self._say(f"{name} ended with {how}{row}; {when}; its last error: {last_error}")
        self._tell(name)

    # End

    async def stop(self) -> None:
        """Stop everything, in order. Idempotent; safe after a start that stopped half-way."""
        for task in (self._supervision, *self._upkeep):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._supervision, self._upkeep = None, []
        for group in STOP_ORDER:
            children = [self._children.pop(name) for name in group if name in self._children]
            for name in await processes.stop_all(children, kill_now=self._kill_now):
                self._say(f"{name} did not stop when asked and was killed")
        await processes.kill_leftovers(self._launch_id, self._clock)
        if self._lock.held:
            remove_runtime_files(self.paths)
            self._lock.release()


async def clean_up(paths: StatePaths, clock: Clock) -> bool:
    """Remove what a launcher that was killed left here; True when there was something. Call it holding the lock."""
    launch = paths.read_launch()
    if launch is None:
        return False
    await processes.kill_leftovers(launch.launch_id, clock)
    remove_runtime_files(paths)
    return True


def remove_runtime_files(paths: StatePaths) -> None:
    """Remove what stands for running processes: pid files, sockets, shared memory, Redis' and the node's files."""
    with contextlib.suppress(StartError):  # a file that is not understood names no shared memory
        if (launch := paths.read_launch()) is not None:
            services.remove_shared_memory(launch)
    for name in ("run", "redis"):
        shutil.rmtree(paths.state_dir / name, ignore_errors=True)
    for lock in paths.state_dir.glob("*/lock"):  # of services that are gone: the kernel has freed it already
        lock.unlink()
    paths.node_socket.unlink(missing_ok=True)
    if paths.node_socket.parent.parent != paths.state_dir:  # a folder of the node's own, with its other files
        shutil.rmtree(paths.node_socket.parent, ignore_errors=True)
    peers = (paths.state_dir / "dispatcher" / "peers").resolve()
    for sockets in (peers, temporary_folder(peers)):  # of its workers; the latter where the path is too long
        shutil.rmtree(sockets, ignore_errors=True)


async def _run_all(work: list[Awaitable[None]]) -> None:
    """All at once; the first error ends the others and is raised as itself."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def restart_pause_s(ends: int) -> float:
    """Pause before the next start of a service that has ended so many times in a row [s]: none, then doubling."""
    return 0.0 if ends <= 1 else min(PAUSE_MAX_S, PAUSE_FIRST_S * 2.0 ** min(ends - 2, 10))


def _exit_error(child: ChildProcess, code: int) -> TrefoilError:
    if code == SETTINGS_REFUSED:  # its last line is the complaint, already with its remedy
        return StartError(f"{child.name} refuses to start: {child.last_lines(1).removeprefix('error: ')}")
    return StartError(
        f"ended with {_exit_text(code)}; its last lines:\n{child.last_lines()}\n(log: {child.command.log_path})",
        field=child.name,
    )


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


async def first_answer(launcher: Launcher, clock: Clock, deadline_s: float = FIRST_ANSWER_DEADLINE_S) -> float | None:
    """Wait until every family in service answers; returns the seconds since the launch began, None where none is.

    Raises:
        StartError: a service failed, or nothing answered in time; says what the dispatcher answered last, and what
            slices failed by and services logged first.
    """
    launch = launcher.launch
    assert launch is not None, "the launcher has started"
    give_up_s = clock.monotonic_s() + deadline_s
    last_error = "nothing"
    if not (families := await _in_service(launch)):
        return None
    while clock.monotonic_s() < give_up_s:
        if launcher.failure:
            raise StartError(launcher.failure)
        try:
            for family in families:
                await infer_zeros(launch.addresses["inference"], family)
        except Unavailable as error:
            last_error = str(error)
            await clock.sleep(POLL_S)
        else:
            return clock.now_s() - launch.started_at_s
    failed = "; ".join(await _slice_failures(launch))
    why = f"slices fail: {failed}" if failed else f"the dispatcher answers: {last_error}"
    silence = StartError(
        f"no answer within {deadline_s:.0f} s; {why}",
        field="inference",
        value=launch.addresses["inference"],
        remedy=f"read the logs in {launch.state_dir}/logs, and those of Tritons in {launch.state_dir}/agent/logs",
    )
    raise launcher.paths.with_first_errors(silence, launch.started_at_s)


async def _in_service(launch: Launch) -> list[str]:
    """Families of a launch without those that a command has stopped; all where the controller does not say."""
    families = [launch.family, *launch.more_families]
    async with SystemClient(launch) as client:
        try:
            known = {objective.family for objective in (await client.objectives())[0]}
        except TrefoilError:
            return families
    return [family for family in families if family in known]


async def _slice_failures(launch: Launch) -> list[str]:
    """Why slices do not serve, as their agent publishes it."""
    async with SystemClient(launch) as client:
        try:
            return failure_lines(await client.nodes())
        except TrefoilError as error:
            return [f"why slices do not serve is not known: {error}"]


async def infer_zeros(address: str, family: str) -> float:
    """Infer once on an input of zeros, as an agent does at a slice; of a stream the first answer. Its time [ms].

    Raises:
        Unavailable: no answer, with what came instead.
    """
    client = TritonClient(address, "", Path(), WallClock(), call_timeout_s=INFER_TIMEOUT_S)
    try:
        config = await client.config(family)
        if not await client.is_ready(Hosted(family, "", PUBLIC_VERSION, 0, 1, 1, 1), INFER_TIMEOUT_S):
            raise Unavailable(f"no slice serves {family} yet")
        return await client.infer(config, 0, INFER_TIMEOUT_S)
    finally:
        await client.close()
