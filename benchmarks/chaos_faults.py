"""What is done to the running system, and when it was done.

A fault strikes only where the rest can carry the load (`_spare`): what is tested is that nothing else is lost, not
that two slices do the work of five. Everything is drawn from one seed; what a draw meets depends on the run.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import psutil
import redis.asyncio
from redis.exceptions import RedisError

from benchmarks.echo_family import VERSIONS, rate_per_s
from benchmarks.echo_system import LAYOUTS, Arrangement, EchoSystem
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import SliceKey

SPARE: Final = 1.6  # capacity that stays, over the offered load
STOPPED_S: Final = (1.0, 6.0)
AWAY_S: Final = (4.0, 8.0)  # of the control plane: beyond every limit of age that its readers keep
CONTROL_PLANE: Final = ("redis", "controller", "power_agent", "carbon_feed")
PIN_TRIES_S: Final = 12.0  # a killed controller is back within a few seconds
FLUSH_S: Final = 1.0
POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that was done. Times are monotonic; `until_s` is the end of a stop or of a rollout.

    `slice` names the slice whose Triton was hurt, `worker` is true of a dispatcher worker: only they hold requests.
    """

    kind: str
    what: str
    at_s: float
    until_s: float
    slice: str = ""
    worker: bool = False


class Faults:
    """`strike(kind)` does it and notes it in `done`; None where it cannot strike now."""

    def __init__(self, system: EchoSystem, arrangement: Arrangement, rate_per_s: float, seed: int) -> None:
        self.done: list[Fault] = []
        self._system = system
        self._arrangement = arrangement
        self._rate_per_s = rate_per_s
        self._chance = np.random.Generator(np.random.PCG64(seed))
        self._stopped: dict[int, psutil.Process] = {}
        self._hurt: dict[SliceKey, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._kinds: dict[str, Callable[[], Awaitable[bool]]] = {
            "variants swap": self._swap,
            "slices repartition": self._repartition,
            "Triton killed": self._kill_triton,
            "Triton stopped": self._stop_triton,
            "Redis restarted": lambda: self._kill_service("redis", "Redis restarted"),
            "Redis flushed": self._flush,
            "Redis stopped": lambda: self._stop_services("Redis stopped", ("redis",)),
            "control plane stopped": lambda: self._stop_services("control plane stopped", CONTROL_PLANE),
            "controller killed": lambda: self._kill_service("controller", "controller killed"),
            "agent killed": lambda: self._kill_service("power_agent", "agent killed"),
            "feed killed": lambda: self._kill_service("carbon_feed", "feed killed"),
            "worker killed": self._kill_worker,
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """What this system can be struck by. A dispatcher of one process has no worker to kill."""
        return tuple(kind for kind in self._kinds if kind != "worker killed" or self._system.workers())

    def order(self, kinds: Sequence[str]) -> Iterator[str]:
        """Each kind once in a random order, then again in another."""
        while True:
            yield from self._chance.permutation(np.array(kinds, dtype=object)).tolist()

    def gap_s(self, low_s: float, high_s: float) -> float:
        """Until the next one."""
        return float(self._chance.uniform(low_s, high_s))

    async def strike(self, kind: str) -> Fault | None:
        """Do it."""
        count = len(self.done)
        return self.done[-1] if await self._kinds[kind]() and len(self.done) > count else None

    async def settle(self) -> None:
        """Let go of what is stopped, and wait for what is under way."""
        for process in self._stopped.values():
            with suppress(psutil.NoSuchProcess):
                process.resume()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _now_s(self) -> float:
        return self._system.clock.monotonic_s()

    def _note(self, kind: str, what: str, slice_: str = "", worker: bool = False) -> None:
        now_s = self._now_s()
        self.done.append(Fault(kind, what, now_s, now_s, slice_, worker))

    def _until(self, number: int) -> None:
        self.done[number] = replace(self.done[number], until_s=self._now_s())

    # Plans

    async def _swap(self) -> bool:
        turn = int(self._chance.integers(1, len(VERSIONS)))
        wanted = replace(self._arrangement, rotation=(self._arrangement.rotation + turn) % len(VERSIONS))
        return await self._pin("variants swap", wanted, f"every slice to another variant (rotation {wanted.rotation})")

    async def _repartition(self) -> bool:
        gpu = int(self._chance.integers(len(self._arrangement.layouts)))
        layouts = list(self._arrangement.layouts)
        turn = int(self._chance.integers(1, len(LAYOUTS)))
        layouts[gpu] = LAYOUTS[(LAYOUTS.index(layouts[gpu]) + turn) % len(LAYOUTS)]
        cuts = " + ".join(name for name, _, _ in layouts[gpu])
        wanted = replace(self._arrangement, layouts=tuple(layouts))
        return await self._pin("slices repartition", wanted, f"gpu{gpu} to {cuts}")

    async def _pin(self, kind: str, wanted: Arrangement, what: str) -> bool:
        """Also over a plan that is still being rolled out, and again while the controller is away."""
        give_up_s = self._now_s() + PIN_TRIES_S
        while True:
            try:
                await self._system.pin(wanted)
                break
            except TrefoilError:
                if self._now_s() > give_up_s:
                    raise
                await self._system.clock.sleep(POLL_S)
        self._arrangement = wanted
        self._note(kind, what)
        self._follow(self._rolled_out(len(self.done) - 1))
        return True

    async def _rolled_out(self, number: int) -> None:
        while True:
            try:
                await self._system.rolled_out(3600.0)
                break
            except TrefoilError:  # the controller was killed, or Redis is away
                await self._system.clock.sleep(POLL_S)
        self._until(number)

    # Tritons

    async def _kill_triton(self) -> bool:
        found = await self._victim()
        if found is None:
            return False
        key, process = found
        process.kill()
        self._note("Triton killed", f"SIGKILL to the Triton of {key.name}", key.name)
        return True

    async def _stop_triton(self) -> bool:
        found = await self._victim()
        if found is None:
            return False
        key, process = found
        seconds = self.gap_s(*STOPPED_S)
        self._stop([process])
        self._note("Triton stopped", f"SIGSTOP for {seconds:.1f} s to the Triton of {key.name}", key.name)
        self._follow(self._resume(len(self.done) - 1, [process], seconds))
        return True

    def _stop(self, processes: Sequence[psutil.Process]) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
                self._stopped[process.pid] = process

    async def _resume(self, number: int, processes: Sequence[psutil.Process], seconds: float) -> None:
        await self._system.clock.sleep(seconds)
        for process in processes:
            self._stopped.pop(process.pid, None)
            with suppress(psutil.NoSuchProcess):  # its agent has given it up meanwhile
                process.resume()
        self._until(number)

    async def _victim(self) -> tuple[SliceKey, psutil.Process] | None:
        """A slice that serves and that the others can do without."""
        serving = await self._system.serving()
        if self._stopped or len(serving) < 2:
            return None
        keys = [key for key in sorted(serving) if self._spare([other for other in serving if other != key])]
        if not keys:
            return None
        key = keys[int(self._chance.integers(len(keys)))]
        process = await self._system.triton(key)
        return (key, process) if process is not None else None

    def _spare(self, keys: Sequence[SliceKey]) -> bool:
        return sum(rate_per_s(key.slice_type) for key in keys) >= SPARE * self._rate_per_s

    # Services

    async def _kill_service(self, name: str, kind: str) -> bool:
        """Its launcher starts it again."""
        with suppress(ProcessLookupError, KeyError):  # it is dead, or waits for its next start
            os.kill(self._system.launcher.pid(name), signal.SIGKILL)
        self._note(kind, f"SIGKILL to {name}{', which keeps nothing' if name == 'redis' else ''}")
        return True

    async def _stop_services(self, kind: str, names: Sequence[str]) -> bool:
        """They neither die nor answer."""
        if self._stopped:
            return False
        seconds = self.gap_s(*AWAY_S)
        processes = []
        for name in names:
            with suppress(psutil.NoSuchProcess, KeyError):
                processes.append(psutil.Process(self._system.launcher.pid(name)))
        self._stop(processes)
        self._note(kind, f"SIGSTOP for {seconds:.1f} s to {', '.join(names)}")
        self._follow(self._resume(len(self.done) - 1, processes, seconds))
        return True

    async def _flush(self) -> bool:
        try:
            async with redis.asyncio.from_url(self._system.launch.redis_url, socket_timeout=FLUSH_S) as client:
                await client.flushall()
        except RedisError:
            return False  # it is being restarted, or stopped
        self._note("Redis flushed", "FLUSHALL")
        return True

    async def _kill_worker(self) -> bool:
        workers = [worker for worker in self._system.workers() if self._listens(worker)]
        if len(workers) < 2:
            return False  # the other is only starting: who comes now must find somebody
        process = workers[int(self._chance.integers(len(workers)))]
        process.kill()
        self._note("worker killed", f"SIGKILL to dispatcher worker {process.pid}", worker=True)
        return True

    def _listens(self, process: psutil.Process) -> bool:
        port = int(self._system.target.rpartition(":")[2])
        try:
            found = process.net_connections(kind="tcp")
        except psutil.NoSuchProcess:
            return False
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found)

    def _follow(self, work: "Awaitable[None]") -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
