"""Real faults, and the alerts that each has to raise: on a system that serves `echo`, with HAProxy and a second feed,
and on one that streams tokens. A fault begins where its context is entered and is over where that is left.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import urlopen

import grpc
import numpy as np
import psutil
from typer.testing import CliRunner

from benchmarks import chaos_clock, chaos_disk, chaos_redis, chaos_up
from benchmarks.chaos_clock import HOUR_S
from benchmarks.chaos_up import NEVER
from benchmarks.dashboards import Program, redis_exporter
from benchmarks.echo_family import FAMILY
from benchmarks.echo_load import EchoLoad
from benchmarks.echo_system import LAYOUTS, POLL_S, Arrangement, EchoSystem, running
from protos.controller.v1 import controller_pb2
from tests.support import generation
from tests.support.certificates import Authority
from tests.support.feed_process import FeedProcess
from tests.support.ports import free_offset, free_ports
from tests.support.redis_server import RedisServer
from tests.support.simulated_driver import is_reset
from trefoil.cli.main import app
from trefoil.cli.run.launcher import Launcher, first_answer
from trefoil.cli.run.scenario import FixedSlo, ServedFamily, System
from trefoil.cli.run.state_directory import write_private
from trefoil.core.errors import StartError, TrefoilError
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Plan, RolloutState
from trefoil.installation import CHECKOUT
from trefoil.runtime.clock import WallClock

CLOCK: Final = WallClock()
PROXY: Final = CHECKOUT / "deploy" / "compose" / "haproxy.cfg"
STANDS: Final = Arrangement((LAYOUTS[0], LAYOUTS[2]))  # with room for a small instance on gpu1
OTHER: Final = Arrangement((LAYOUTS[1], LAYOUTS[2]))
PLACE: Final = {"index": 1, "start": 6}
ZONE: Final = "GB"
UNREACHABLE: Final = {"provider": "neso", "neso__base_url": "http://127.0.0.1:9"}
TRACE_S: Final = 72 * HOUR_S  # of the trace that ships
UNMETERED_S: Final = 65.0  # more than the alert allows
SETTLED_S: Final = 180.0
INSUFFICIENT: Final = 23  # NVML_ERROR_INSUFFICIENT_RESOURCES
OVERRIDES: Final = {
    "controller": {"rollout": {"ready_timeout_s": 20.0}},
    "power_agent": {"reset_poll_s": 2.0, "drift_poll_s": 2.0},
}
LEAST_MS: Final = "2.2"  # the least that is taken: the p95 of a whole GPU on which nothing else is


@dataclass(frozen=True, slots=True)
class World:
    """What faults are played on. `metrics`: addresses by job of Prometheus."""

    system: EchoSystem
    metrics: Mapping[str, Sequence[str]]
    folder: Path
    feed: FeedProcess | None = None
    programs: Mapping[str, Program] = field(default_factory=dict)
    renew: Callable[[], None] = lambda: None  # the second feed's certificate
    steps: dict[int, int] = field(default_factory=dict)  # of wall clocks, by process [s]

    async def command(self, words: str) -> None:
        """`trefoil` with these words, on this system."""
        argv = [*words.format(folder=self.folder).split(), "--state-dir", str(self.system.launcher.paths.state_dir)]
        done = await asyncio.to_thread(CliRunner().invoke, app, argv)
        if done.exit_code:
            raise StartError(f"trefoil {words}: {done.output}{done.exception}")

    async def admin(self, verb: str, **arguments: Any) -> None:
        """What others do to the simulated GPUs."""
        await asyncio.to_thread(partial(self.system.node.admin, verb, **arguments))

    async def kill(self, program: str) -> None:
        """Kill a program beside the system."""
        self.programs[program].kill()

    async def start(self, program: str) -> None:
        """Start it again."""
        self.programs[program].start()

    async def routes_key(self, path: Path) -> None:
        """Start the dispatcher with this key, by which it proves routes."""
        await self.system.launcher.restart("dispatcher", {"plan_key_file": str(path)})

    async def restart_feed(self, **settings: object) -> None:
        """Start the second feed again, with these settings."""
        assert self.feed is not None
        await ended(self.feed)
        if "state_dir" in settings:
            settings["state_dir"] = self.folder / str(settings["state_dir"])
        await self.feed.start(**settings)

    async def step(self, pid: int, step_s: int) -> None:
        """Step the wall clock of a process; those of others stay as they are."""
        self.steps[pid] = step_s
        chaos_clock.step(self.steps)

    async def settled(self) -> None:
        """Wait until a controller leads and what is planned stands."""
        async with asyncio.timeout(SETTLED_S):
            while True:
                with suppress(TrefoilError):
                    if (await self.system.client.plan()).rollout.state == int(RolloutState.DONE):
                        return
                await CLOCK.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Fault:
    """`raises`: alerts as `Name label=value`, without "Trefoil", those after ";" when the fault is over."""

    what: str
    make: Callable[[World], AbstractAsyncContextManager[None]]
    raises: str

    @property
    def alerts(self) -> dict[str, dict[str, str]]:
        """Labels by name."""
        words = [each.split() for each in re.split(r"[,;] ", self.raises)]
        return {f"Trefoil{name}": dict(label.split("=", 1) for label in labels) for name, *labels in words}

    @property
    def afterwards(self) -> set[str]:
        """Names of those that fire when it is over."""
        return {f"Trefoil{each.split()[0]}" for each in self.raises.split("; ")[1:]}


def haproxy(folder: Path, grpc: str, rest: str) -> tuple[Program, str]:
    """The shipped HAProxy before one dispatcher in clear text, and its metrics' address. Addresses, ports and TLS are
    changed, nothing else."""
    ports = free_ports(3)
    text = PROXY.read_text()
    for shipped, port in zip((":8001", ":8000", ":8404"), ports, strict=True):
        text = text.replace(f"bind {shipped}", f"bind 127.0.0.1:{port}")
    text = text.replace("dispatcher_1:8001", grpc).replace("dispatcher_1:8000", rest)
    text = re.sub(r" {4}server (dispatcher_2|either) .*\n", "", text)
    text = text.replace("port 8000 ", f"port {rest.rpartition(':')[2]} ")
    # Version 2.6 asks HTTP/1.1 of a server in clear text only where it would send requests so, too.
    text = re.sub(r"ssl verify required \S+ \S+ ca-file \S+ alpn \S+", "", text)
    text = text.replace("check-ssl check-alpn http/1.1 check-proto h1", "")
    path = folder / "haproxy.cfg"
    path.write_text(text)
    return Program(["haproxy", "-db", "-f", str(path)], folder / "haproxy.log"), f"127.0.0.1:{ports[2]}"


async def ended(feed: FeedProcess) -> None:
    """End a feed, where it runs."""
    if feed.process is not None:
        with suppress(ProcessLookupError):
            feed.process.terminate()
        await feed.ended()


# --- worlds -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[World]:
    """The whole system on `echo`, HAProxy before it, and a feed with a Redis of its own that has no provider."""
    (admin, metrics) = free_ports(2)
    redis = RedisServer()
    authority = Authority(folder)
    pair = authority.service("carbon_feed", hours=100)
    settings: dict[str, object] = {"zone": ZONE, "factors": "direct", "metrics_address": f"127.0.0.1:{metrics}"}
    settings |= {"tls_certificate": pair.certificate, "tls_key": pair.key}
    feed = FeedProcess(folder, redis.url, admin, settings)
    with chaos_disk.small_disks(folder / "system"):
        async with running(folder / "system", STANDS, overrides=OVERRIDES) as system:
            addresses = system.launch.addresses
            proxy, proxy_metrics = haproxy(folder, addresses["inference"], addresses["rest"])
            exporter, exporter_metrics = redis_exporter(system.launch.redis_url, folder)
            targets = {name: [address] for name, address in system.launch.metrics.items()}
            targets |= {"carbon_feed": [*targets["carbon_feed"], f"127.0.0.1:{metrics}"]}
            targets |= {"haproxy": [proxy_metrics], "redis": [exporter_metrics]}

            def renew() -> None:
                authority.service("renewed", hours=30 * 24).copy_to(pair)

            try:
                with proxy, exporter:
                    await feed.start()
                    world = World(system, targets, folder, feed, {"haproxy": proxy, "exporter": exporter}, renew)
                    np.savez(folder / "items.npz", PAYLOAD=np.ones((200_000, 2), np.int64))
                    write_private(folder / "other.key", f"{'ab' * 32}\n")
                    await world.command("objective set --slo-latency-ms 2000")
                    yield world
            finally:
                await ended(feed)
                redis.close()


@asynccontextmanager
async def streaming(folder: Path) -> AsyncIterator[World]:
    """A system that streams tokens."""
    system = System(
        cluster="tokens",
        family=ServedFamily(name=generation.FAMILY),
        slo=FixedSlo(latency_ms=60_000.0),
        demand_initial_per_s=2.0,
        port_offset=free_offset(),
    )
    async with Launcher(system, folder / "system") as launcher:
        await first_answer(launcher, CLOCK)
        one = EchoSystem(launcher, folder, Plan())
        try:
            world = World(one, {name: [address] for name, address in one.launch.metrics.items()}, folder)
            await world.command("objective set --slo-ttft-ms 2000")
            yield world
        finally:
            await one.close()


# --- faults -----------------------------------------------------------------------------------------------------------


def between(
    begin: Callable[[World], Awaitable[None]], end: Callable[[World], Awaitable[None]]
) -> Callable[[World], AbstractAsyncContextManager[None]]:
    """What begins a fault, and what ends it."""

    @asynccontextmanager
    async def make(world: World) -> AsyncIterator[None]:
        await begin(world)
        try:
            yield
        finally:
            await end(world)

    return make


async def nothing(_: World) -> None:
    """Nothing: what always fires, does."""


def refusing(name: str) -> Callable[[World], AbstractAsyncContextManager[None]]:
    """A service that is killed, and refuses each start."""
    return lambda world: chaos_up.refusing(world.system, name)


@asynccontextmanager
async def agent_away(world: World) -> AsyncIterator[None]:
    """The agent is killed and refuses to start; meanwhile the driver is loaded again."""
    began_s = CLOCK.monotonic_s()
    async with chaos_up.refusing(world.system, "power_agent"):
        await asyncio.to_thread(world.system.node.admin, "reload_driver")
        yield
        await CLOCK.sleep(max(0.0, UNMETERED_S - (CLOCK.monotonic_s() - began_s)))


async def reset(world: World) -> None:
    """Reset GPU 1, as soon as nobody has it open."""
    while not await asyncio.to_thread(is_reset, world.system.node, 1):
        await CLOCK.sleep(POLL_S)


@asynccontextmanager
async def model_gone(world: World) -> AsyncIterator[None]:
    """A Triton dies while the files of its model are away."""
    system = world.system
    key: SliceKey = min(serving := await system.serving())
    folder = system.repository / FAMILY / str(serving[key].hosted[0].version)
    kept = folder.rename(folder.with_name(f".{folder.name}.kept"))
    triton = await system.triton(key)
    assert triton is not None
    triton.kill()
    try:
        yield
    finally:
        kept.rename(folder)


async def cut_without_instances(world: World) -> None:
    """Cut a GPU again while the driver makes no compute instance; the agent continues once it does."""
    await world.admin("fault", symbol="nvmlGpuInstanceCreateComputeInstance", code=INSUFFICIENT, times=NEVER)
    await world.system.pin(OTHER)


async def objective_unmet(world: World) -> None:
    """Set an objective that no plan keeps, for a planner that nobody has pinned."""
    await world.system.client.call("Pin", controller_pb2.PinRequest())
    await world.command(f"objective set --slo-latency-ms {LEAST_MS}")


async def objective_met(world: World) -> None:
    """As before."""
    await world.command("objective set --slo-latency-ms 2000")
    await world.system.pin(STANDS)


@asynccontextmanager
async def hanging(world: World, requests: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Every Triton stands still for six seconds again and again. Requests come meanwhile, and for a while after."""
    system = world.system

    async def stop() -> None:
        while True:
            found = [triton for key in await system.serving() if (triton := await system.triton(key)) is not None]
            for step in (psutil.Process.suspend, psutil.Process.resume):
                for triton in found:
                    with suppress(psutil.NoSuchProcess):
                        step(triton)
                await CLOCK.sleep(6.0 if step is psutil.Process.suspend else 0.5)

    tasks = [asyncio.create_task(requests), asyncio.create_task(stop())]
    try:
        yield
        tasks[1].cancel()
        for triton in [each for key in await system.serving() if (each := await system.triton(key)) is not None]:
            triton.resume()
        await world.settled()
        await CLOCK.sleep(15.0)  # of requests that are in time, over the short windows
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def slices_hang(world: World) -> AbstractAsyncContextManager[None]:
    """Requests meet Tritons that hang."""
    return hanging(world, EchoLoad(world.system.target, 20.0, 10_000_000, 1, 15.0, keep=False).run())


def tokens_late(world: World) -> AbstractAsyncContextManager[None]:
    """Streams meet Tritons that hang."""

    async def stream() -> None:
        while True:
            with suppress(AssertionError, grpc.aio.AioRpcError):  # one that has failed is late, too
                await generation.ask(world.system.target, generation.request(generation.prompts()[0], 4))

    async def streams() -> None:
        await asyncio.gather(*(stream() for _ in range(4)))

    return hanging(world, streams())


def disk_full(world: World) -> AbstractAsyncContextManager[None]:
    """The controller's disk is full."""
    (trouble,) = (each for each in chaos_disk.troubles() if each.what == "disk full under controller")
    return trouble.make(world.system)


@asynccontextmanager
async def redis_nearly_full(world: World) -> AsyncIterator[None]:
    """Redis has room for a twentieth more than it holds."""
    used = (await chaos_redis.connect(world.system).info("memory"))["used_memory"]
    async with chaos_redis.configured({"maxmemory": str(used * 21 // 20)}, {"maxmemory": "0"})(world.system):
        yield


@asynccontextmanager
async def redis_not_saved(world: World) -> AsyncIterator[None]:
    """Redis cannot write a snapshot; then it can."""
    async with chaos_redis.misconf(world.system):
        yield
    await chaos_redis.connect(world.system).bgsave()


@asynccontextmanager
async def redis_turns_away(world: World) -> AsyncIterator[None]:
    """Redis takes no connection more than it has, not that of its exporter either."""
    client, url = chaos_redis.connect(world.system), urlsplit(world.system.launch.redis_url)
    clients = (await client.info("clients"))["connected_clients"]
    async with chaos_redis.configured({"maxclients": str(clients)}, {"maxclients": "10000"})(world.system):
        for _ in range(clients):
            _, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.close()
        yield


def feed(**settings: object) -> Callable[[World], AbstractAsyncContextManager[None]]:
    """The second feed with other settings, and at the end as before."""
    return between(lambda world: world.restart_feed(**settings), World.restart_feed)


async def reading_old(world: World) -> None:
    """Let four hours pass at the second feed, in which its trace ends."""
    await world.restart_feed(trace__starts_at_s=CLOCK.now_s() - TRACE_S + 600, trace__lead_in_h=0, trace__at_end="stop")
    assert world.feed is not None
    assert world.feed.process is not None
    page = f"http://{world.metrics['carbon_feed'][-1]}/metrics"
    async with asyncio.timeout(SETTLED_S):
        while "trefoil_carbon_reading_age_seconds{" not in await asyncio.to_thread(page_of, page):
            await CLOCK.sleep(POLL_S)
    await world.step(world.feed.process.pid, 4 * HOUR_S)


def page_of(url: str) -> str:
    """Text of a page; empty where nobody listens yet."""
    with suppress(OSError), urlopen(url, timeout=5) as answer:
        return str(answer.read(), "utf-8")
    return ""


async def renewed(world: World) -> None:
    """Renew the second feed's certificate."""
    world.renew()


async def certificate_cut(world: World) -> None:
    """Cut the second feed's certificate short."""
    assert world.feed is not None
    os.truncate(str(world.feed.settings["tls_certificate"]), 100)


SYSTEM: Final = (
    Fault("none", between(nothing, nothing), "Watchdog"),
    Fault("Redis killed, and refuses to start", refusing("redis"),
          "RedisAway job=dispatcher, NoLeader, CarbonNobodyAsks zone=demo"),
    Fault("controller killed, and refuses to start", refusing("controller"), "ServiceDown job=controller, NoLeader"),
    Fault("agent away for a minute; driver loaded again", agent_away,
          "ServiceDown job=power_agent, NodeStale node=node0; EnergyUnknown node=node0"),
    Fault("dispatcher killed, and refuses to start", refusing("dispatcher"),
          "ServiceDown job=dispatcher, ProxyNoDispatcher proxy=grpc"),
    Fault("HAProxy killed", between(lambda on: on.kill("haproxy"), lambda on: on.start("haproxy")), "ProxyDown"),
    Fault("Redis' exporter killed", between(lambda on: on.kill("exporter"), lambda on: on.start("exporter")),
          "RedisUnseen"),
    Fault("Redis' memory nearly full", redis_nearly_full, "RedisMemory"),
    Fault("Redis cannot save", redis_not_saved, "RedisNotSaved"),
    Fault("Redis at its maxclients", redis_turns_away, "RedisUnseen; RedisRefuses"),
    Fault("dispatcher with another key of routes",
          between(lambda on: on.routes_key(on.folder / "other.key"),
                  lambda on: on.routes_key(on.system.launcher.paths.routes_key)), "PlanRefused job=dispatcher"),
    Fault("disk of the controller full", disk_full, "DiskTrouble job=controller"),
    Fault("wall clock of the feed an hour ahead",
          between(lambda on: on.step(on.system.launcher.pid("carbon_feed"), HOUR_S),
                  lambda on: on.step(on.system.launcher.pid("carbon_feed"), 0)), "ClockOffset job=carbon_feed"),
    Fault("a budget of 1 J",
          between(lambda on: on.command("budget set --family echo --joules-per-day 1"),
                  lambda on: on.command("budget clear --family echo")), "BudgetSpent family=echo"),
    Fault("a job of 200,000 items due in a minute",
          between(lambda on: on.command("jobs submit echo {folder}/items.npz --complete-by 1min --id late"),
                  lambda on: on.command("jobs cancel late")), "JobsLate"),
    Fault("an instance of somebody else",
          between(lambda on: on.admin("create_gi", slice_type="1g.5gb", **PLACE),
                  lambda on: on.admin("destroy", **PLACE)), "Unproven"),
    Fault("clocks locked by somebody else",
          between(lambda on: on.admin("lock_clocks", index=0, min_mhz=210, max_mhz=600),
                  lambda on: on.admin("reset_clocks", index=0)), "ClockNotHonoured device=node0/gpu0"),
    Fault("300 W drawn by others",
          between(lambda on: on.admin("foreign_load", index=0, watts=300.0),
                  lambda on: on.admin("foreign_load", index=0, watts=0.0)), "EnergyUnattributed node=node0"),
    Fault("Triton killed, its model away", model_gone, "SliceFailed"),
    Fault("the driver makes no compute instance",
          between(cut_without_instances, lambda on: on.admin("clear_faults")), "RolloutHalted"),
    Fault("objective that no plan keeps", between(objective_unmet, objective_met), "PlanDegraded"),
    Fault("every Triton stands still again and again", slices_hang, "SloBurnFast family=echo, SloBurnSlow family=echo"),
    Fault("a GPU off the bus, then reset", between(lambda on: on.admin("lose", index=1), reset),
          "DeviceLost device=node0/gpu1, GpuError device=node0/gpu1 xid=79"),
)  # fmt: skip
FEED: Final = (
    Fault("certificate of 100 hours", between(nothing, renewed), "CertificateEnds job=carbon_feed"),
    Fault("certificate that is cut short", between(certificate_cut, renewed), "FileRefused job=carbon_feed"),
    Fault("provider that does not answer, static_g_per_kwh", feed(**UNREACHABLE, static_g_per_kwh=210),
          "CarbonStandIn zone=GB rung=static, CarbonUnknown zone=GB rung=static"),
    Fault("provider that has never answered", feed(**UNREACHABLE, cluster="fresh", state_dir="fresh"),
          "CarbonStandIn zone=GB, CarbonUnknown zone=GB"),
    Fault("no answer for four hours", between(reading_old, World.restart_feed), "CarbonOld zone=GB"),
)  # fmt: skip
TOKENS: Final = (
    Fault("every Triton stands still again and again", tokens_late, "TokensLate family=pydoc objective=ttft"),
)
WORLDS: Final[Sequence[tuple[Callable[[Path], AbstractAsyncContextManager[World]], Sequence[Sequence[Fault]]]]] = (
    (serving, (SYSTEM, FEED)),
    (streaming, (TOKENS,)),
)
"""Systems, and the faults that are played on each: lanes go at once."""
