"""Trefoil on a Docker Swarm of three nodes, while it serves: `make e2e-cluster`, or `python -m benchmarks.cluster`. As
root, on Linux.

Three network namespaces are three hosts, each with a Docker engine of its own; the stack of deploy/swarm is deployed on
them as docs/howto/swarm.md says. An unmodified tritonclient asks from a fourth place, by the HAProxy of any node, while
the active controller is killed, a node is drained, one is killed with all that runs there, one is cut off for a minute,
and every image is replaced. Prints what was asked and what was seen of each event; exit code 1 where one does not hold.
--rate: requests a second; --upgrade-rate, --requests: how many a second while images are replaced, and at least how
many then; --images: a file of `docker save` instead of images built here; --events: only these. Nothing is left behind;
--keep leaves the logs.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import redis.asyncio as redis

from benchmarks.cluster_engines import IMAGES, Engine, Engines, join_swarm, play_on_engines
from benchmarks.hosts import Broken, Load, load_text, need
from trefoil.core.common import Lease
from trefoil.core.errors import StateUnavailable, TrefoilError
from trefoil.core.fleet import NodeStatus, SliceState
from trefoil.core.plan import Plan
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

CLOCK: Final = WallClock()
ROOT: Final = Path(__file__).resolve().parents[1]
STACK: Final = ROOT / "deploy/swarm/trefoil.yml"
NODES: Final = ("node-a", "node-b", "node-c")  # the state is on the first
CLIENTS: Final = ("node-a", "node-c", "node-b")  # whose HAProxy clients ask first, and next where it is lost
FRONT: Final = 8001
REDIS: Final = 6379
POLL_S: Final = 0.1
EPOCH_S: Final = 8.0
PLAN_S: Final = 15.0
ERRORS_S: Final = 2.5
CUT_OFF_S: Final = 60.0
SILENT_S: Final = 10.0
SETTLE_ANSWERS: Final = 500
LINE_BYTES_MAX: Final = 1 << 26
TOKEN: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"')


class Cluster(Engines):
    """The Swarm of one run, and an operator beside it."""

    def __init__(self, folder: Path, rate_per_s: float, upgrade_rate_per_s: float) -> None:
        super().__init__(folder, "cluster", CLOCK)
        self.rate_per_s, self.upgrade_rate_per_s = rate_per_s, upgrade_rate_per_s
        self.leaders: dict[str, set[str]] = defaultdict(set)  # epoch -> who wrote under it
        self.writes = 0
        self.unwatched: list[str] = []  # why nobody watched, each time
        self.broken: list[str] = []  # what did not hold, and was no reason to stop
        self._watching: asyncio.Task[None] | None = None

    async def start(self, archive: Path) -> None:
        """Start engines and Swarm, with the images."""
        engines = await self.start_engines(NODES, archive)
        for engine in engines:
            for image in IMAGES:
                engine.docker("tag", f"{image}:e2e", f"{image}:e2e-next")
        labels = {name: ["trefoil.simulated=1", *(["trefoil.state=1"] if name == NODES[0] else [])] for name in NODES}
        join_swarm(engines, labels)

    def deploy(self, tag: str) -> None:
        """Deploy the stack, as docs/howto/swarm.md says."""
        environment = {"TREFOIL_TAG": tag, "TREFOIL_PROMETHEUS": "0"}
        self.manager.docker(
            "stack", "deploy", "--resolve-image", "never", "--compose-file", str(STACK), "trefoil", env=environment
        )

    def make_secrets(self) -> None:
        """Make the Swarm's secrets, and keep what an operator's machine needs to ask Redis."""
        environment = os.environ | {"DOCKER_HOST": self.manager.url, "TREFOIL_TAG": "e2e"}
        argv = [str(STACK.parent / "secrets.sh"), self.manager.host.address, *NODES]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True)
        need(done.returncode == 0, f"{argv[0]} ended with {done.returncode}: {done.stdout}{done.stderr}")
        own = self.folder / "operator"
        own.mkdir()
        for name in ("ca.crt", "tls.crt", "tls.key", "redis_url"):
            mount = ["--volume", "trefoil_secrets:/run/trefoil", "trefoil:e2e"]
            (own / name).write_text(self.manager.docker("run", "--rm", *mount, "cat", f"/run/trefoil/{name}"))
            (own / name).chmod(0o600)
        for volume in ("redis", "prometheus"):
            mount = ["--volume", f"trefoil_{volume}:/var/lib/trefoil-{volume}", "trefoil:e2e", "true"]
            self.manager.docker("run", "--rm", *mount)
        url = (own / "redis_url").read_text().strip().replace("/run/trefoil/", f"{own}/")
        self.redis_url = url.replace("@redis:", f"@{self.manager.host.address}:")
        self.state = State.connect(self.redis_url, "default", clock=CLOCK, timeout_s=10.0)

    @property
    def manager(self) -> Engine:
        """The engine that an operator asks."""
        return self.engines[NODES[0]]

    # What an operator sees and does

    async def plan(self) -> Plan | None:
        """The plan in force."""
        return await self.state.get(self.state.keys.plan(), Plan)

    async def epoch(self) -> int:
        """Epoch of the controllers, as Redis knows."""
        async with redis.from_url(self.redis_url, decode_responses=True) as client:
            try:
                return int(await client.get(self.state.keys.epoch("controller")) or 0)
            except redis.RedisError as error:
                raise StateUnavailable(str(error)) from error

    async def leader(self) -> Any:
        """Container of the controller that leads."""
        lease = await self.until("a controller leads", self._lease)
        for engine in self.engines.values():
            for task in engine.tasks("controller"):
                if lease.holder.startswith(task.id[:12]):
                    return task
        raise Broken(f"no controller is {lease.holder}")

    async def _lease(self) -> Lease | None:
        return await self.state.get(self.state.keys.lease("controller"), Lease)

    async def routed(self) -> dict[str, str]:
        """Slices that the plan in force sends requests to, and the node of each."""
        plan = await self.plan()
        targets = [target for route in plan.routes for target in route.targets] if plan else []
        return {target.slice.name: target.slice.device.partition("/")[0] for target in targets if not target.draining}

    async def ready(self, name: str) -> set[str]:
        """Slices of a node that are ready."""
        status = await self.state.get(self.state.keys.node(name), NodeStatus)
        parts = [part for device in status.devices for part in device.slices] if status else []
        return {part.key.name for part in parts if part.state == SliceState.READY}

    async def layout(self) -> str:
        """How many slices serve on which node."""
        counts = Counter((await self.routed()).values())
        return "slices " + ", ".join(f"{name} {counts[name]}" for name in NODES)

    async def busy(self, among: Sequence[str]) -> str:
        """The node of these with the most slices."""
        counts = Counter((await self.routed()).values())
        return max(among, key=lambda name: counts[name])

    async def trefoil(self, engine: Engine, service: str, *words: str) -> str:
        """Run a command of an operator in a service's container."""
        (task,) = engine.tasks(service)
        return await asyncio.to_thread(engine.docker, "exec", task.id, "trefoil", *words)

    async def settled(self, *names: str) -> None:
        """Wait until the plan is on those nodes alone, every slice ready."""

        async def check() -> bool:
            routed = await self.routed()
            found = {name for node in names for name in await self.ready(node)}
            return bool(routed) and set(routed.values()) <= set(names) and routed.keys() <= found

        await self.until(f"a plan on {', '.join(names)} is carried out", check)

    async def all_run(self) -> None:
        """Wait until every service has all its tasks, healthy."""

        async def check() -> bool:
            told = ""
            with contextlib.suppress(Broken):  # the Swarm elects a leader
                told = await asyncio.to_thread(self.manager.docker, "service", "ls", "--format", "{{json .Replicas}}")
            return bool(told) and all(
                now == wanted for now, _, wanted in (line.strip('"').partition("/") for line in told.split())
            )

        await self.until("every service has all its tasks", check)

    # Who writes as the controller

    def watch_writes(self) -> None:
        """Note from now on, from every command that Redis takes, who writes as the controller under which epoch."""
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        role = self.state.keys.writes("controller").encode()
        while True:
            try:
                await self._watch_once(role)
            except OSError as error:  # Redis is replaced: from its next start on
                self.unwatched.append(f"{type(error).__name__}: {error}")
            await CLOCK.sleep(POLL_S)

    async def _watch_once(self, role: bytes) -> None:
        """Watch one Redis. Nobody says so when its container has gone; somebody writes every second."""
        url = urlsplit(self.redis_url)
        files = dict(parse_qsl(url.query))
        tls = ssl.create_default_context(cafile=files["ssl_ca_certs"])
        tls.load_cert_chain(files["ssl_certfile"], files["ssl_keyfile"])
        # Not by redis-py: a command of more than 64 KiB (a plan, what a controller keeps) ends its connection.
        # Not by `wait_for`: where a line comes at that very moment, it ignores a cancellation (until Python 3.12).
        async with asyncio.timeout(SILENT_S):
            reader, writer = await asyncio.open_connection(url.hostname, url.port, ssl=tls, limit=LINE_BYTES_MAX)
        try:
            writer.write(f"AUTH {unquote(url.password or '')}\r\nMONITOR\r\n".encode())
            while True:
                async with asyncio.timeout(SILENT_S):
                    line = await reader.readline()
                if not line:
                    break
                self._note(line, role)
            raise ConnectionError("closed by Redis")
        finally:
            writer.close()

    def check_watching(self) -> None:
        """Raise what ended the watching, if anything did."""
        if self._watching is not None and self._watching.done():
            self._watching.result()

    def _note(self, line: bytes, role: bytes) -> None:
        if role not in line or b" lua]" in line:
            return
        words = TOKEN.findall(line)
        if words[0].upper() != b"EVALSHA":
            return
        epoch = words[3 + int(words[2])].decode()
        who = line.partition(b"[")[2].partition(b"]")[0].split()[-1].rpartition(b":")[0].decode()
        self.leaders[epoch].add(who)
        self.writes += 1

    async def close(self) -> None:
        """End everything."""
        if self._watching is not None:
            self._watching.cancel()
        await super().close()


class Clients(Load):
    """The clients, a separate process; which HAProxy a request takes is dealt among all nodes."""

    def __init__(self, site: Cluster) -> None:
        targets = ",".join(f"{engine.host.address}:{FRONT}" for engine in (site.engines[name] for name in CLIENTS))
        argv = [sys.executable, "-m", "benchmarks.hosts_load", "--target", f"ipv4:{targets}", "--wait-for-ready"]
        argv += ["--rate", str(site.rate_per_s), "--rate-later", str(site.upgrade_rate_per_s)]
        self._process = site.machines.start_outside("load", argv)

    def at_upgrade_rate(self) -> None:
        """Send at the rate of the upgrade from now on."""
        os.kill(self._process.pid, signal.SIGUSR1)

    def failed(self) -> int:
        """How many failed until now."""
        return sum(self.sums()["failed"].values())

    async def none_failed(self, site: Cluster, before: int) -> str:
        """Wait for more answers; how many there are by now.

        Raises:
            Broken: a request failed since then.
        """
        await self.until(site, self.sums()["answered"] + SETTLE_ANSWERS)  # type: ignore[arg-type]
        need(self.failed() == before, f"{self.failed() - before} failed: {self.sums()['failed']}: {self.first()}")
        return "0 failed"

    def first(self) -> str:
        """Why the first one failed."""
        return self._process.last_lines(4000).partition("the first")[2].partition("\n")[0][:300]


# Events: each returns what was seen, and raises Broken where that is not what was asked


async def start(site: Cluster, archive: Path) -> tuple[Clients, str]:
    """All is up, on every node, and answers."""
    await site.start(archive)
    await asyncio.to_thread(site.make_secrets)
    began_s = CLOCK.monotonic_s()
    await asyncio.to_thread(site.deploy, "e2e")
    await site.until("a controller leads", site.epoch)
    site.watch_writes()
    await site.all_run()
    took_s = CLOCK.monotonic_s() - began_s
    leader = await site.leader()
    # A busy machine may stand still: no request is refused.
    more = ["--slo-latency-ms", "400", "--param", "queue_requests_max=60000"]
    command = ["trefoil", "objective", "set", "--controller", "localhost:8102", "--family", "digits", *more]
    code, told = await asyncio.to_thread(leader.exec_run, command)
    need(code == 0, f"{' '.join(command)} ended with {code}: {told.decode()}")
    await site.settled(*NODES)
    load = Clients(site)
    await load.until(site, SETTLE_ANSWERS)  # type: ignore[arg-type]
    await load.none_failed(site, 0)
    return load, f"all tasks healthy {took_s:.0f} s after the deploy; {await site.layout()}"


async def controller_killed(site: Cluster, load: Clients) -> str:
    """The controller that leads is killed; the other one leads."""
    before, failed = await site.epoch(), load.failed()
    leader = await site.leader()
    began_s = CLOCK.monotonic_s()
    await asyncio.to_thread(leader.kill, "SIGKILL")

    async def another() -> bool:
        return await site.epoch() > before

    await site.until("another controller leads", another)
    took_s = CLOCK.monotonic_s() - began_s
    need(took_s <= EPOCH_S, f"the next epoch came after {took_s:.1f} s")
    text = f"epoch {before} -> {await site.epoch()} after {took_s:.1f} s; {await load.none_failed(site, failed)}"
    await site.all_run()
    return text


async def drained(site: Cluster, load: Clients) -> str:
    """A node is drained by the operator's command, and released."""
    name, failed = await site.busy(NODES), load.failed()
    engine, had = site.engines[name], await site.ready(name)
    command = ("node", "drain", "--target", "localhost:8103")
    await site.trefoil(engine, "agent", *command, "--patience", "200", "--wait", "300")
    left = await site.ready(name)
    need(not left, f"left on {name}: {left}")
    await site.settled(*(other for other in NODES if other != name))
    text = f"{len(had)} -> 0 slices on {name}; {await site.layout()}; {await load.none_failed(site, failed)}"
    await site.trefoil(engine, "agent", *command, "--release")
    return text


async def lost(site: Cluster, load: Clients, name: str, lose: Callable[[Engine], None]) -> str:
    """A node is lost: what fails, for how long, and when there is a plan without it."""
    before, failed, had = load.sums(), load.failed(), len(await site.ready(name))
    began_s = CLOCK.monotonic_s()
    lose(site.engines[name])

    async def settle() -> int:
        await CLOCK.sleep(ERRORS_S + 0.6)  # sums are told twice a second
        return load.failed() - failed

    settling = asyncio.create_task(settle())

    while (counted := name in (await site.routed()).values()) and CLOCK.monotonic_s() - began_s < 3 * PLAN_S:
        await CLOCK.sleep(POLL_S)
    took_s = CLOCK.monotonic_s() - began_s
    at_first = await settling
    await CLOCK.sleep(max(0.0, began_s + CUT_OFF_S - CLOCK.monotonic_s()))
    later = load.failed() - failed - at_first
    text = f"{name} with {had} slices: {at_first} failed within {ERRORS_S:g} s, {later} later"
    text += f" ({dict(load.since(before, 'failed'))}); {'no ' if counted else ''}plan without it after {took_s:.1f} s: "
    text += f"{await site.layout()}; {(answered := load.sums()['answered'] - before['answered'])} answered meanwhile"
    if later or not answered or (had and took_s > PLAN_S):
        site.broken.append(text)
    return text


async def killed(site: Cluster, load: Clients) -> str:
    """A node dies with all that runs there, and comes back."""
    name = await site.busy(NODES[1:])
    try:
        text = await lost(site, load, name, Engine.kill)
    finally:
        await site.engines[name].start()
    failed = load.failed()
    await site.all_run()
    return f"{text}; started again: {await load.none_failed(site, failed)}"


async def cut_off(site: Cluster, load: Clients) -> str:
    """A node's network is taken away for a minute."""
    name = await site.busy(NODES[1:])
    try:
        text = await lost(site, load, name, lambda engine: engine.link("down"))
    finally:
        site.engines[name].link("up")
    failed, epoch = load.failed(), await site.epoch()

    async def obeys() -> bool:
        status = await site.state.get(site.state.keys.node(name), NodeStatus)
        return status is not None and status.highest_epoch_seen >= epoch

    await site.until(f"the agent of {name} obeys epoch {epoch}", obeys)
    await site.all_run()
    text += f"; healed after {CUT_OFF_S:g} s: it obeys epoch {epoch}"
    try:
        return f"{text}, {await load.none_failed(site, failed)}"
    except Broken as error:
        raise Broken(f"{text}, {error}") from error


async def upgraded(site: Cluster, load: Clients, requests: int) -> str:
    """Every image is replaced while at least so many requests are answered."""
    load.at_upgrade_rate()
    failed, answered, began_s = load.failed(), load.sums()["answered"], CLOCK.monotonic_s()
    before = {task.id for engine in site.engines.values() for task in engine.client.containers.list()}
    await asyncio.to_thread(site.deploy, "e2e-next")
    for service in ("carbon_feed", "controller", "dispatcher", "agent"):
        await update_ends(site, service)
    for service in ("haproxy", "redis"):
        await asyncio.to_thread(site.manager.docker, "service", "update", "--force", "--detach", f"trefoil_{service}")
        await update_ends(site, service)
    await site.all_run()
    took_s = CLOCK.monotonic_s() - began_s
    now = [task for engine in site.engines.values() for task in engine.client.containers.list()]
    left = [task.name for task in now if task.id in before]
    need(not left, f"not replaced: {left}")
    await load.until(site, answered + requests)  # type: ignore[arg-type]
    count = load.sums()["answered"] - answered
    text = f"{len(before)} containers replaced in {took_s:.0f} s, {count} answered meanwhile"
    need(load.failed() == failed, f"{text}: {load.sums()['failed']}: {load.first()}")
    return f"{text}, 0 failed"


async def update_ends(site: Cluster, service: str) -> None:
    """Wait until a service's update is complete.

    Raises:
        Broken: it was rolled back.
    """

    async def complete() -> bool:
        told = "[{}]"
        with contextlib.suppress(Broken):  # the Swarm elects a leader
            told = await asyncio.to_thread(site.manager.docker, "service", "inspect", f"trefoil_{service}")
        status = json.loads(told)[0].get("UpdateStatus", {})
        need(not status.get("State", "").startswith(("rollback", "paused")), f"the update of {service}: {status}")
        return bool(status.get("State") == "completed")

    await site.until(f"the update of {service} is complete", complete)


async def one_leader(site: Cluster, _: Clients) -> str:
    """No two controllers have written under one epoch, the one that leads now included."""

    before = site.writes

    async def leader_wrote() -> bool:
        site.check_watching()
        return site.writes > before and str(await site.epoch()) in site.leaders

    try:
        await site.until("the controller that leads now writes", leader_wrote)
    except Broken as error:
        raise Broken(f"{error}; {site.writes} writes, epochs {list(site.leaders)}, {site.unwatched[-3:]}") from error
    both = {epoch: who for epoch, who in site.leaders.items() if len(who) > 1}
    need(bool(site.writes) and not both, f"of {site.writes} writes: {both}")
    return f"{site.writes} writes under {len(site.leaders)} epochs, each by one controller: {dict(site.leaders)}"


async def play(folder: Path, arguments: argparse.Namespace) -> bool:
    """Play all events, and print what each showed."""
    began_s, holds, load = CLOCK.monotonic_s(), True, None

    def say(event: str, asked: str, seen: str) -> None:
        print(f"{CLOCK.monotonic_s() - began_s:6.1f} s  {event:<18} asked: {asked}\n{'':28}seen:  {seen}", flush=True)

    gone = f"failures in flight there alone, none after {ERRORS_S:g} s; a plan without it within {PLAN_S:g} s"
    events: dict[str, tuple[str, Callable[[Cluster, Clients], Awaitable[str]]]] = {
        "controller": (f"the leader by SIGKILL; the next epoch within {EPOCH_S:g} s", controller_killed),
        "drain": ("trefoil node drain of the busiest node; 0 failed", drained),
        "kill": (f"a node by SIGKILL; {gone}", killed),
        "cut": (f"a node without network for {CUT_OFF_S:g} s; {gone}", cut_off),
        "upgrade": (
            f"every image replaced; 0 failed of >= {arguments.requests} at {arguments.upgrade_rate:g}/s",
            lambda site, load: upgraded(site, load, arguments.requests),
        ),
        "write log": ("no two leaders under one epoch", one_leader),
    }
    site = Cluster(folder, arguments.rate, arguments.upgrade_rate)
    try:
        load, seen = await start(site, arguments.images)
        say("start", "every node answers", seen)
        for event in arguments.events or events:
            asked, work = events[event]
            await site.settled(*NODES)
            try:
                seen = await work(site, load)
                say(event, asked, f"{'BROKEN: ' if any(text in seen for text in site.broken) else ''}{seen}")
            except (Broken, TrefoilError) as error:
                holds = False
                say(event, asked, f"BROKEN: {error}")
        say("all that time", "every failure is told above", load_text(await load.stop()))
    except Broken as error:
        print(f"BROKEN: {error}")
        holds = False
    finally:
        await site.close()
    holds = holds and not site.broken
    print("all of it holds" if holds else "not all of it holds")
    return holds


def main() -> int:
    """Build the images, and play it in a network namespace of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--upgrade-rate", type=float, default=200.0)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--events", nargs="*", help="only these: controller, drain, kill, cut, upgrade, 'write log'")
    return play_on_engines("cluster", parser, play)


if __name__ == "__main__":
    sys.exit(main())
