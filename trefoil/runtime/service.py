"""Life cycle of a process: components are initialised in order, run together, and shut down in reverse order.

A `__main__.py` calls only `main(build)`. SIGTERM and SIGINT end it with exit code 0. An operating error prints one line
and ends it with 2. A bug prints its traceback and ends it with 1. A component that drains states for how long
(`patience_s`). A second signal shortens the drain (`hurry`), a third one kills. Without a drain the second one kills.
"""

import asyncio
import contextlib
import faulthandler
import gc
import math
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, Protocol, runtime_checkable

import structlog

from trefoil.core import errors
from trefoil.core.units import format_time
from trefoil.runtime import rpc
from trefoil.runtime.clock import Clock, WallClock
from trefoil.runtime.config import ServiceSettings
from trefoil.runtime.security.other_zones import OtherZone
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.security.reread import Reread
from trefoil.runtime.security.secret_files import secret_files
from trefoil.runtime.security.tls import Tls
from trefoil.runtime.security.zone_channel import zone_tls
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics

SHUTDOWN_S: Final = 4.0  # for all components together: a service is gone 5 s after SIGTERM
GRACE_S: Final = 1.0  # for calls under way when a server stops
OFFSET: Final = "trefoil_clock_offset_seconds"
OFFSET_POLL_S: Final = 10.0
FIRST_POLL_S: Final = 1.0  # until Redis has answered once
OFFSET_WARN_S: Final = 0.5
OFFSET_ERROR_S: Final = 2.0
NETWORK_POLL_S: Final = 0.5
NETWORK_GONE_S: Final = 2.0
LOOPBACK_INTERFACE: Final = "lo"
EXPIRY: Final = "trefoil_tls_expiry_timestamp_seconds"
REFUSED_FILE: Final = "trefoil_changed_file_refused"
RENEWALS_POLL_S: Final = 2.0
EXPIRY_WARN_S: Final = 14 * 86_400.0
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
BEAT_S: Final = 1.0
STILL_S: Final = 15.0  # without a beat of its event loop a service is no longer alive


class Component(Protocol):
    """Part of a service. All three methods are awaited in one event loop."""

    async def init(self) -> None:
        """Acquire what running needs; raise to stop the start. Others see nothing before all have done so."""
        ...

    async def run(self) -> None:
        """Work until cancelled. Returning means that nothing is left to do; raising ends the process."""
        ...

    async def shutdown(self) -> None:
        """Give everything back. Called once, after `run` has ended, and only if `init` succeeded."""
        ...


@runtime_checkable
class Patient(Protocol):
    """Part that takes its time to shut down."""

    @property
    def patience_s(self) -> float:
        """Time its shutdown may take beyond what every component has [s]."""
        ...

    def hurry(self) -> None:
        """Hurry from now on: there was a second signal."""
        ...


async def run(components: Sequence[Component], clock: Clock, stop: asyncio.Event | None = None) -> None:
    """Run until a signal, until `stop` is set, or a component fails; then shut down in reverse order and re-raise."""
    stopping = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    ready: list[Component] = []
    tasks: list[asyncio.Task[None]] = []

    def on_signal() -> None:
        if stopping.is_set():
            remove_signal_handlers()
            for component in ready:
                if isinstance(component, Patient):
                    component.hurry()
        stopping.set()

    def remove_signal_handlers() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        for component in components:
            if not await _initialised(component, stopping):
                return
            ready.append(component)
        gc.collect()
        gc.freeze()  # else all that is here would be looked through again and again: 50 ms in which no call is answered
        tasks += [
            asyncio.create_task(component.run(), name=f"run {type(component).__name__}") for component in components
        ]
        await _until_stopped(tasks, stopping)
    finally:
        patient = [component for component in ready if isinstance(component, Patient)]
        if not patient:
            remove_signal_handlers()
        gc.unfreeze()
        await _unwind(ready, tasks, clock, SHUTDOWN_S + sum(component.patience_s for component in patient))
        remove_signal_handlers()


def main(
    build: Callable[[Sequence[str]], Sequence[Component]],
    argv: Sequence[str] | None = None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Main of a service: wire, run, and return the exit code. `raise SystemExit(main(build))`; asyncio's own loop.

    A crash in native code (gRPC, uvloop) writes where every thread was to stderr. Who has stood by until a role is free
    starts again at once, in this process: no process has the role meanwhile.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable()
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            while True:
                try:
                    with errors.in_one_line():
                        components = build(sys.argv[1:] if argv is None else argv)
                    runner.run(run(components, WallClock()))
                    break
                except errors.RoleFree as error:
                    structlog.get_logger().info("starts again", why=str(error))
    except errors.TrefoilError as error:
        with contextlib.suppress(OSError):  # of a full disk under stderr: the exit code still says it
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:  # before the handlers were there
        return 130
    return 0


async def _initialised(component: Component, stopping: asyncio.Event) -> bool:
    """Initialise, unless a signal comes first."""
    init = asyncio.create_task(component.init(), name=f"init {type(component).__name__}")
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait((init, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not init.done():
        init.cancel()
        await asyncio.wait((init,))
        return False
    with errors.in_one_line():
        await init
    return True


async def _until_stopped(tasks: Sequence[asyncio.Task[None]], stopping: asyncio.Event) -> None:
    stop = asyncio.create_task(stopping.wait())
    pending: set[asyncio.Task[object]] = {stop, *tasks}
    try:
        while pending and not stopping.is_set() and pending != {stop}:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()  # raises what the component raised
    finally:
        stop.cancel()


async def _unwind(
    ready: Sequence[Component], tasks: Sequence[asyncio.Task[None]], clock: Clock, limit_s: float
) -> None:
    deadline_s = clock.monotonic_s() + limit_s
    log = structlog.get_logger()
    for component, task in reversed(list(zip_longest(ready, tasks))):
        name = type(component).__name__
        try:
            async with asyncio.timeout(max(0.1, deadline_s - clock.monotonic_s())):
                if task is not None:
                    task.cancel()
                    await asyncio.wait((task,))
                await component.shutdown()
        except TimeoutError:
            log.error("component did not shut down in time", component=name)
        except errors.TrefoilError as error:
            log.warning("component shut down with an error", component=name, error=str(error))


class ServerComponent:
    """gRPC server. `make` is called inside the event loop: `ServerComponent(lambda: rpc.make_server(...))`."""

    def __init__(
        self,
        make: Callable[[], rpc.RpcServer],
        report: Callable[[rpc.RpcServer], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`report` runs as long as the server and keeps the health of named conditions."""
        self._make = make
        self._report = report
        self._stopping = False
        self.server: rpc.RpcServer | None = None

    async def init(self) -> None:
        self.server = self._make()
        await self.server.start()

    async def run(self) -> None:
        assert self.server is not None
        if self._report is None:
            await self.server.wait_for_termination()
            return
        reporting = asyncio.create_task(self._report(self.server), name="health")
        ending = asyncio.create_task(self.server.wait_for_termination(), name="server")
        try:
            done, _ = await asyncio.wait((reporting, ending), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            reporting.cancel()
            ending.cancel()
            await asyncio.gather(reporting, ending, return_exceptions=True)

    async def shutdown(self) -> None:
        assert self.server is not None
        self._stopping = True
        await self.server.stop(GRACE_S)

    def not_ready(self) -> str:
        """Reason why this service is not ready; "" when it is."""
        if self._stopping:
            return "the service is stopping"
        return "" if self.server is not None else "the service is starting"


class MetricsComponent:
    """Part of the Prometheus endpoint, with `/healthz` and `/readyz`; an empty address means none.

    `not_ready`: reasons why this service is not ready, each "" when it does not hold; the first is shown.
    """

    def __init__(self, metrics: Metrics, address: str, clock: Clock, *not_ready: Callable[[], str]) -> None:
        self._metrics = metrics
        self._address = address
        self._clock = clock
        self._not_ready = not_ready
        self._beat_s = self._clock.monotonic_s()
        self._close: Callable[[], None] | None = None

    async def init(self) -> None:
        if self._address:
            rpc.check_port(self._address)
            self._close = self._metrics.serve(*rpc.split_address(self._address), self._probed)

    async def run(self) -> None:
        while self._address:
            self._beat_s = self._clock.monotonic_s()
            await asyncio.sleep(BEAT_S)

    def _probed(self, path: str) -> tuple[int, str] | None:
        return probed(path, self._clock.monotonic_s() - self._beat_s, self._reason)

    def _reason(self) -> str:
        return next(filter(None, (each() for each in self._not_ready)), "")

    async def shutdown(self) -> None:
        if self._close is not None:
            await asyncio.to_thread(self._close)


def probed(path: str, still_s: float, not_ready: Callable[[], str]) -> tuple[int, str] | None:
    """Status and text of a path of the metrics port; None: the page of metrics. `still_s`: how long the service's event
    loop has stood still.

    `/healthz` fails where a restart helps, `/readyz` while the service is not ready.
    """
    path = path.rstrip("/")
    if path in ("", "/metrics"):
        return None
    if path not in ("/healthz", "/readyz"):
        return 404, "not found: ask /metrics, /healthz or /readyz\n"
    why = f"its event loop has stood still for {still_s:.0f} s" if still_s > STILL_S else ""
    if path == "/readyz":
        why = why or not_ready()
    return (503, f"{why}\n") if why else (200, "ok\n")


def renewals(
    settings: ServiceSettings, tls: Tls | None, plan_keys: PlanKeys | None = None, peers: Sequence[OtherZone] = ()
) -> tuple[dict[str, Callable[[], float]], list[Reread[Any]]]:
    """Ends of a service's certificates, and files of its secrets, keys and certificates, for `RenewalsComponent`.
    `peers`: zones that are called with separate files."""
    files: list[Reread[Any]] = [*secret_files(settings)]
    if plan_keys is not None and plan_keys.file is not None:
        files.append(plan_keys.file)
    held = {"service": tls} if tls else {}
    for peer in peers:
        of_peer = zone_tls(peer, settings, peer.address)
        if of_peer is not None and (peer.tls_certificate or peer.tls_ca):
            held[f"zone {peer.zone}"] = of_peer
    return {whose: each.end_s for whose, each in held.items()}, [*files, *(each.files for each in held.values())]


class RenewalsComponent:
    """Part that reports certificates that end soon, and changed files (certificates, secrets) that cannot be used.

    `ends`: whose certificates, and when the first of them ends [UTC s], infinite where there is none. `files` are read
    again by looking at them. `report` gets what is wrong, and "" once nothing is.
    """

    def __init__(
        self,
        ends: Mapping[str, Callable[[], float]],
        files: Sequence[Reread[Any]],
        clock: Clock,
        metrics: Metrics,
        report: Callable[[str], object] | None = None,
    ) -> None:
        self._ends, self._files, self._clock, self._metrics, self._report = ends, files, clock, metrics, report
        self._said = ""

    async def init(self) -> None:
        self._look()

    async def run(self) -> None:
        while self._ends or self._files:
            await self._clock.sleep(RENEWALS_POLL_S)
            self._look()

    def _look(self) -> None:
        refused, fields = [], dict[str, bool]()
        for file in self._files:
            _ = file.now
            fields[file.what] = fields.get(file.what, False) or bool(file.trouble)  # peers have fields of the same name
            refused += [f"{file.what}: the file before its change is in force: {file.trouble}"] if file.trouble else []
        for field, trouble in fields.items():
            self._metrics.set(REFUSED_FILE, float(trouble), field=field)
        why = "; ".join([*refused, *self._ending()])
        if why != self._said:
            self._said, log = why, structlog.get_logger()
            log.warning("certificates or secrets", why=why) if why else log.info(
                "certificates and secrets are in order"
            )
            if self._report is not None:
                self._report(why)

    def _ending(self) -> list[str]:
        soon = []
        for whose, end in sorted(self._ends.items()):
            end_s = end()
            self._metrics.set(EXPIRY, end_s, whose=whose)
            if end_s < self._clock.now_s() + EXPIRY_WARN_S:
                soon.append(f"of {whose} at {format_time(round(end_s))}")
        return [f"certificates end: {', '.join(soon)}. Remedy: renew them (docs/howto/tls.md)"] if soon else []

    async def shutdown(self) -> None:
        return


class NetworkComponent:
    """Part that ends a process whose network was taken away, so that it is started again in the new one.

    A container that shares the network of another one stays, when that one is restarted, in a network namespace with
    only loopback: no client reaches it, and its own health check does. Where there never was another interface,
    and for interruptions shorter than NETWORK_GONE_S, nothing happens.
    """

    def __init__(self, clock: Clock, interfaces: Callable[[], Sequence[tuple[int, str]]] = socket.if_nameindex) -> None:
        self._clock, self._interfaces = clock, interfaces

    async def init(self) -> None:
        return

    async def run(self) -> None:
        """Raises:
        StartError: every interface but loopback is gone.
        """
        reached_s = math.inf  # when it was last seen; until then nothing can be gone
        while True:
            now_s = self._clock.monotonic_s()
            if self._reached():
                reached_s = now_s
            elif now_s - reached_s >= NETWORK_GONE_S:
                raise errors.StartError(
                    f"for {NETWORK_GONE_S:g} s this process has had no network but loopback",
                    field="network",
                    remedy="none where it is started again by itself (restart: unless-stopped); else start it again",
                )
            await self._clock.sleep(NETWORK_POLL_S)

    def _reached(self) -> bool:
        return any(name != LOOPBACK_INTERFACE for _, name in self._interfaces())

    async def shutdown(self) -> None:
        return


class StateComponent:
    """Part that closes the connections to Redis at the end; list it first, so that it is shut down last.

    Meanwhile it compares this service's clock with that of Redis. `report` gets an error, and "" at its end.
    """

    def __init__(
        self, state: State, clock: Clock, metrics: Metrics, report: Callable[[str], object] | None = None
    ) -> None:
        self._state, self._clock, self._metrics, self._report = state, clock, metrics, report
        self._apart = ""  # level of what was said last
        self._answered = False

    async def init(self) -> None:
        self._metrics.set(OFFSET, math.nan)

    async def run(self) -> None:
        while True:
            with contextlib.suppress(errors.StateUnavailable):  # readers and writers report it
                self._judge(await self._state.clock_offset_s())
                self._answered = True
            await self._clock.sleep(OFFSET_POLL_S if self._answered else FIRST_POLL_S)

    def not_ready(self) -> str:
        """Reason why this service is not ready: it has never reached Redis. Later Redis may be unavailable."""
        return "" if self._answered else "Redis has not answered since the start"

    def _judge(self, offset_s: float) -> None:
        self._metrics.set(OFFSET, offset_s)
        apart = "error" if abs(offset_s) > OFFSET_ERROR_S else "warning" if abs(offset_s) > OFFSET_WARN_S else ""
        if apart == self._apart:
            return
        self._apart, log = apart, structlog.get_logger()
        error = errors.ClockApart(
            "this service's clock is not that of Redis: its times, and the carbon of these, are off by that",
            field="clock_offset_s",
            value=round(offset_s, 3),
            remedy="synchronise the clocks of both machines (chronyc tracking, timedatectl), then restart this service",
        )
        if apart:
            (log.error if apart == "error" else log.warning)("clock apart from that of Redis", error=str(error))
        else:
            log.info("clock agrees with that of Redis", offset_s=round(offset_s, 3))
        if self._report is not None:
            self._report(str(error) if apart == "error" else "")

    async def shutdown(self) -> None:
        await self._state.close()
