"""The Compose file at the top of this checkout, while it serves: `make e2e-compose`, or `python -m benchmarks.compose`.

Builds the images, brings all up without a .env, and asks 100 times a second by an unmodified tritonclient through
HAProxy, while carbon changes the plan, each service is replaced, Redis is killed and its volume emptied. Then each
service is stopped by SIGSTOP, and all is taken down. Prints what was asked and what was seen of each event; exit code 1
where one does not hold. It takes the Docker engine that runs here (DOCKER_HOST), else, as root, one of its own; where
neither can be had it says why, and that is not a failure. --compose: which Compose v2.
"""

import argparse
import asyncio
import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import redis.asyncio as redis
from tritonclient.utils import InferenceServerException

from benchmarks import hosts_load
from benchmarks.compose_engine import Containers, engine_of_this_machine, find_compose
from benchmarks.hosts import ANSWERED_MIN, RATE_PER_S, Broken, Load, layout, load_text, need, poll_until, revision
from protos.controller.v1 import controller_pb2, controller_pb2_grpc
from tests.support.ports import free_ports
from trefoil.cli.run.processes import ChildProcess, Command
from trefoil.core.errors import TrefoilError
from trefoil.core.plan import RolloutState
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.security.tls import Tls

CLOCK: Final = WallClock()
ROOT: Final = Path(__file__).resolve().parents[1]
UP_S: Final = 60.0
UNHEALTHY_S: Final = 15.0
PATIENCE_S: Final = 600.0  # of one event: two cores that others use, too
POLL_S: Final = 0.2
SETTLE_ANSWERS: Final = 500  # answered after each event, before it is judged
FAST_CARBON: Final = "720"  # a four-hour step in 20 s
REPLACED: Final = ("dispatcher_1", "dispatcher_2", "haproxy", "controller", "prometheus", "redis_exporter", "redis")
STOPPED: Final = (
    "redis", "carbon_feed", "controller", "dispatcher_1", "dispatcher_2", "haproxy", "node", "agent", "prometheus",
    "redis_exporter",
)  # fmt: skip
QUEUE_REQUESTS: Final = 12_000.0  # two minutes of them: this machine may stand still, none is refused
SLO_MS: Final = 400.0
IN_FLIGHT_MAX: Final = 64  # of all slices of the node together


class Deployment:
    """The deployment of one run, and an operator beside it."""

    def __init__(self, folder: Path, containers: Containers) -> None:
        self.folder, self.containers = folder, containers
        self.grpc_port, rest, self.redis_port, prometheus = free_ports(4)
        ports = {"GRPC": self.grpc_port, "REST": rest, "REDIS": self.redis_port, "PROMETHEUS": prometheus}
        containers.env |= {f"TREFOIL_{name}_PORT": str(port) for name, port in ports.items()}
        containers.env |= {"TREFOIL_TAG": "e2e", "TREFOIL_NODE_BIND": f"127.0.0.{2 + os.getpid() % 250}"}
        self.compose = containers.compose
        self.missed: list[str] = []  # what held, and took too long

    async def first_answer_s(self) -> float:
        """Time from `up` to the first right answer."""
        began_s = CLOCK.monotonic_s()
        up = asyncio.create_task(asyncio.to_thread(self.compose, "up", "-d"))
        arguments = argparse.Namespace(ca="", target=f"127.0.0.1:{self.grpc_port}", token_file="", wait_for_ready=False)
        hosts_load.DEADLINE_S = 5.0  # type: ignore[misc]
        try:
            while True:
                clients = hosts_load.Clients(arguments)  # as somebody who tries again: no connection that backs off
                with contextlib.redirect_stdout(io.StringIO()):  # each that fails until then would be told
                    await clients.ask(0, CLOCK.monotonic_s())
                await clients.close()
                took_s = CLOCK.monotonic_s() - began_s
                if clients.correct:
                    return took_s
                need(took_s < PATIENCE_S, f"no answer: {dict(clients.failed)}")
                if up.done():
                    up.result()  # raises why it failed
                await CLOCK.sleep(POLL_S)
        finally:
            await up

    def read_secrets(self) -> None:
        """Take what an operator needs out of a service's container: token, certificates, password of Redis."""
        self.containers.copy_out("controller", "/run/trefoil", self.folder)
        secrets = self.folder / "trefoil"
        self.tls = Tls(secrets / "tls.crt", secrets / "tls.key", secrets / "ca.crt", serves=False)
        self.token = (secrets / "token").read_text().strip()
        url = (secrets / "redis_url").read_text().strip()
        self.redis_url = url.replace("/run/trefoil/", f"{secrets}/").replace(
            "@redis:6379", f"@127.0.0.1:{self.redis_port}"
        )

    async def ask(self, method: str, request: Any) -> Any:
        """Ask the controller, where it is now."""
        target = f"{self.containers.address('controller')}:8102"
        async with rpc.channel(target, tls=self.tls, name="controller", token=self.token) as channel:
            return await rpc.call(getattr(controller_pb2_grpc.ControllerStub(channel), method), request, 20.0)

    async def plan(self) -> Any:
        """The plan in force (GetPlanResponse)."""
        return await self.ask("GetPlan", controller_pb2.GetPlanRequest())

    async def freeze(self) -> None:
        """Keep the plan in force, once it is rolled out."""
        await self.ask("Freeze", controller_pb2.FreezeRequest(frozen=True))

        async def settled() -> bool:
            return bool((await self.plan()).rollout.state == RolloutState.DONE)

        await self.until("the rollout is done", settled)

    async def epochs(self) -> dict[str, int]:
        """Epoch of each role, as Redis knows."""
        async with redis.from_url(self.redis_url, decode_responses=True) as client:
            keys = [key async for key in client.scan_iter("trefoil:default:epoch:*")]
            return {key.rpartition("epoch:")[2]: int((await client.get(key)).split(":")[-1]) for key in keys}

    def tritons(self) -> list[int]:
        """Process ids of the Tritons, as this host numbers them."""
        return self.containers.pids("node", "tritonserver")

    async def until(self, what: str, check: Callable[[], Awaitable[Any]]) -> Any:
        """Poll until the check gives something; returns that.

        Raises:
            Broken: not within the patience.
        """
        failing = (TrefoilError, redis.RedisError, InferenceServerException, OSError)
        return await poll_until(what, check, PATIENCE_S, POLL_S, failing)

    async def healthy(self, *services: str) -> None:
        """Wait until these are healthy; none: all."""
        for service in services or self.containers.services():

            async def is_healthy(service: str = service) -> bool:
                return self.containers.health(service) == "healthy"

            await self.until(f"{service} is healthy", is_healthy)

    async def replaced(self, *services: str) -> None:
        """Replace containers, and wait until the new ones are healthy."""
        before = {service: self.containers.id(service) for service in services}
        await asyncio.to_thread(self.compose, "up", "-d", "--no-deps", "--force-recreate", *services)
        for service in services:
            need(self.containers.id(service) != before[service], f"{service} was not replaced")
        await self.healthy(*services)


class Clients(Load):
    """The clients, a separate process. What was not sent yet waits while there is no connection to HAProxy."""

    def __init__(self, site: Deployment) -> None:
        argv = [sys.executable, "-m", "benchmarks.hosts_load", "--target", f"127.0.0.1:{site.grpc_port}"]
        argv += ["--rate", str(RATE_PER_S), "--wait-for-ready"]
        self._process = ChildProcess(Command("load", argv, site.folder / "load.log"), site.containers.project, CLOCK)

    async def none_failed(self, site: Deployment) -> str:
        """Wait for more answers; how many there are by now.

        Raises:
            Broken: a request failed.
        """
        await self.until(site, self.sums()["answered"] + SETTLE_ANSWERS)  # type: ignore[arg-type]
        sums = self.sums()
        need(
            not sums["failed"],
            f"failed: {sums['failed']}: {self._process.last_lines(400).partition('the first')[2][:300]}",
        )
        return f"0 of {sums['sent']} failed until then"

    def kill(self) -> None:
        """End it now."""
        self._process.kill()


# Events: each returns what was seen, and raises Broken where that is not what was asked


async def start(site: Deployment) -> str:
    """All is up, and answers."""
    took_s = await site.first_answer_s()
    if took_s > UP_S:
        site.missed.append(f"the first right answer came after {took_s:.1f} s")
    await site.healthy()
    site.read_secrets()
    used = ", ".join(f"{name} {mib:.0f}" for name, mib in site.containers.memory_mib().items())
    return f"{took_s:.1f} s; then all {len(site.containers.services())} healthy; memory in MiB: {used}"


async def raise_objective(site: Deployment) -> None:
    """An objective that a busy machine keeps, and a queue that refuses nobody meanwhile."""
    found = await site.ask("GetObjectives", controller_pb2.GetObjectivesRequest(family="digits"))
    objective = codec.from_proto(found.objectives[0])
    params = {**objective.params, "queue_requests_max": QUEUE_REQUESTS}
    wanted = replace(objective, slo_ms=SLO_MS, params=params)
    change = controller_pb2.ObjectiveChange(objective=codec.to_proto(wanted))
    await site.ask("SetObjectives", controller_pb2.SetObjectivesRequest(objectives=[change]))


async def carbon_step(site: Deployment, load: Clients) -> str:
    """A step of the carbon trace makes another plan; the feed is replaced for it, and back."""
    before = (await site.plan()).plan
    site.containers.env["TREFOIL_CARBON_SPEEDUP"] = FAST_CARBON
    await site.replaced("carbon_feed")

    async def by_carbon() -> Any:
        plan = (await site.plan()).plan
        told = await site.ask("ListDecisions", controller_pb2.ListDecisionsRequest(newest=50))
        causes = {decision.id: decision.trigger for decision in told.decisions}
        ours = revision(plan) > revision(before) and "carbon" in causes.get(plan.decision_id, "")
        return plan if ours and layout(plan) != layout(before) else None

    plan = await site.until("a carbon step makes another plan", by_carbon)
    del site.containers.env["TREFOIL_CARBON_SPEEDUP"]
    await site.replaced("carbon_feed")
    change = f"{layout(before)} -> {layout(plan)} ({plan.why.partition(';')[0]})"
    return f"plan {revision(before)} -> {revision(plan)}: {change}; {await load.none_failed(site)}"


async def replaced(site: Deployment, service: str, load: Clients) -> str:
    """A service's container is replaced."""
    began_s = CLOCK.monotonic_s()
    await site.replaced(service)
    return f"healthy again after {CLOCK.monotonic_s() - began_s:.0f} s; {await load.none_failed(site)}"


async def upgraded(site: Deployment, load: Clients) -> str:
    """All is rolled to another tag, and back; a whole `up` with a tag that was not rolled out is refused."""
    began_s, old = CLOCK.monotonic_s(), site.containers.env.pop("TREFOIL_TAG")
    for tag in ("e2e-next", old):
        site.containers.tag(old, tag)
        await asyncio.to_thread(site.containers.script, "upgrade.sh", tag)
        await site.healthy()
        seen = await load.none_failed(site)
    site.containers.env["TREFOIL_TAG"] = "e2e-other"
    try:
        site.compose("up", "-d")
    except Broken as error:
        need("upgrade.sh" in str(error), str(error))
    else:
        raise Broken("`up -d` took another tag")
    site.containers.env["TREFOIL_TAG"] = old
    subprocess.run(["git", "checkout", "-q", "--", "deploy/compose/tags"], cwd=ROOT, check=True)  # for `latest`
    return f"there and back in {CLOCK.monotonic_s() - began_s:.0f} s; `up -d` with another tag is refused; {seen}"


async def restored(site: Deployment) -> str:
    """What a backup of the running deployment holds is there again after all was lost."""
    found = await site.ask("GetObjectives", controller_pb2.GetObjectivesRequest())
    backup = site.folder / "backup.tar"
    site.containers.script("backup.sh", "write", str(backup))
    site.compose("down", "-v")
    site.containers.script("backup.sh", "restore", str(backup))
    took_s = await site.first_answer_s()
    site.read_secrets()
    again = await site.ask("GetObjectives", controller_pb2.GetObjectivesRequest())
    need(again == found, f"the objectives were {found} and are {again}")
    return f"{backup.stat().st_size / 1e6:.1f} MB; first right answer {took_s:.0f} s after `up`, objective as before"


async def agent_replaced(site: Deployment, load: Clients) -> str:
    """The agent's container is replaced; no Triton is restarted."""
    await site.freeze()
    before = site.tritons()
    await site.replaced("agent")
    seen = await load.none_failed(site)
    need(before and site.tritons() == before, f"Tritons were {before} and are {site.tritons()}")
    await site.ask("Freeze", controller_pb2.FreezeRequest(frozen=False))
    return f"0 of {len(before)} Tritons restarted; {seen}"


async def node_replaced(site: Deployment, load: Clients) -> str:
    """The only node is drained, replaced with its agent, and takes part again; requests wait meanwhile."""
    began_s = CLOCK.monotonic_s()

    async def drain(*words: str) -> None:
        command = ("exec", "-T", "agent", "trefoil", "node", "drain", "--target", "localhost:8103")
        await asyncio.to_thread(site.compose, *command, *words)

    await drain("--patience", "5", "--wait", "120")
    need(not site.tritons(), f"Tritons run on a drained node: {site.tritons()}")
    await site.replaced("node", "agent")
    await drain("--release")
    seen = await load.none_failed(site)
    return f"serves again after {CLOCK.monotonic_s() - began_s:.0f} s; {seen}"


async def node_lost(site: Deployment, *, upgraded: bool) -> str:
    """The node's container is killed, as when its memory is used up, or replaced as documented: the agent is
    not touched, and only requests fail that were in flight on the Tritons that died with it."""
    load, agent = Clients(site), site.containers.id("agent")
    await load.none_failed(site)
    before, began_s = set(site.tritons()), CLOCK.monotonic_s()
    if upgraded:
        await asyncio.to_thread(site.compose, "up", "-d", "--no-deps", "--force-recreate", "node")
    else:
        os.kill(site.containers.pid("node"), signal.SIGKILL)

    async def back() -> int | None:
        now = await site.plan()  # carbon and load may have changed it meanwhile
        planned = sum(len(device.slices) for node in now.plan.nodes for device in node.devices)
        running = set(site.tritons())
        done = now.rollout.state == RolloutState.DONE and not running & before and len(running) == planned
        return planned if done else None

    await site.healthy("node", "agent")
    tritons = await site.until("the Tritons of the plan run", back)
    healed_s = CLOCK.monotonic_s() - began_s
    need(site.containers.id("agent") == agent, "the agent's container was replaced")
    answered = load.sums()["answered"]
    await load.until(site, answered + SETTLE_ANSWERS)  # type: ignore[arg-type]
    sums = await load.stop()
    failed = sum(sums["failed"].values())
    need(failed <= IN_FLIGHT_MAX, f"{failed} of {sums['sent']} failed: {sums['failed']}")
    return f"{len(before)} Tritons before, {tritons} after {healed_s:.0f} s; {failed} of {sums['sent']} failed"


async def redis_lost(site: Deployment, load: Clients, *, emptied: bool) -> str:
    """Redis is killed; or stopped, its volume emptied, and started."""
    epochs, plan = await site.epochs(), revision((await site.plan()).plan)
    if emptied:
        await asyncio.to_thread(site.compose, "stop", "redis")
        rm = "rm -rf /var/lib/trefoil-redis/*"
        await asyncio.to_thread(
            site.compose, "run", "--rm", "--no-deps", "-T", "--entrypoint", "sh", "secrets", "-c", rm
        )
        await asyncio.to_thread(site.compose, "start", "redis")
    else:
        os.kill(site.containers.pid("redis"), signal.SIGKILL)
    await site.healthy("redis")

    async def taken() -> dict[str, int] | None:
        now = await site.epochs()
        return now if now.keys() >= epochs.keys() else None

    now = await site.until("every role is taken again", taken)
    fell = {role: (epochs[role], now[role]) for role in epochs if now[role] < epochs[role]}
    need(not fell, f"epochs fell: {fell}")
    after = revision((await site.plan()).plan)
    need(after >= plan, f"the plan was {plan} and is {after}")
    await site.healthy()
    return f"epochs {epochs} -> {now}; plan {plan} -> {after}; {await load.none_failed(site)}"


async def stopped(site: Deployment, service: str) -> str:
    """A process that stands still is unhealthy soon."""
    await site.healthy(service)
    pid = site.containers.pid(service)
    os.kill(pid, signal.SIGSTOP)
    began_s = CLOCK.monotonic_s()
    try:

        async def unhealthy() -> bool:
            return site.containers.health(service) == "unhealthy"

        await site.until(f"{service} is unhealthy", unhealthy)
        took_s = CLOCK.monotonic_s() - began_s
    finally:
        os.kill(pid, signal.SIGCONT)
    if took_s > UNHEALTHY_S:
        site.missed.append(f"{service} was unhealthy only after {took_s:.1f} s")
    return f"{service} {took_s:.1f} s"


async def down(site: Deployment) -> str:
    """Nothing is left."""
    await asyncio.to_thread(site.compose, "down", "-v")
    left = site.containers.left()
    need(not left, f"left: {left}")
    return "no container, volume or network is left"


async def play(folder: Path, containers: Containers, arguments: argparse.Namespace) -> bool:
    """Play all events, and print what each showed."""
    began_s = CLOCK.monotonic_s()

    def say(event: str, asked: str, seen: str) -> None:
        load_now = f"{os.getloadavg()[0]:.0f} at work"
        print(
            f"{CLOCK.monotonic_s() - began_s:6.1f} s  {event:<22} asked: {asked} ({load_now})\n{'':32}seen:  {seen}",
            flush=True,
        )

    site, load = Deployment(folder, containers), None
    images = await asyncio.to_thread(containers.images if arguments.no_build else containers.build)
    say("images", "from this checkout; of others where none can be pulled", images)
    none = "replaced; none fails"
    events: Sequence[tuple[str, str, Callable[[Clients], Awaitable[str]]]] = (
        (
            "carbon step",
            "a step of the carbon trace changes the plan; carbon_feed is replaced twice",
            partial(carbon_step, site),
        ),
        *((service, none, partial(replaced, site, service)) for service in REPLACED),
        ("agent", f"{none}, no Triton is restarted", partial(agent_replaced, site)),
        ("node", f"drained and {none}: requests wait for the only one", partial(node_replaced, site)),
        ("upgrade", f"deploy/compose/upgrade.sh: {none}", partial(upgraded, site)),
        ("redis, kill -9", "none fails, epochs and revisions never fall", partial(redis_lost, site, emptied=False)),
        ("redis, volume emptied", "the same", partial(redis_lost, site, emptied=True)),
    )
    try:
        say("up", f"first right answer within {UP_S:g} s", await start(site))
        await raise_objective(site)
        load = Clients(site)
        for event, asked, work in events:
            if event in (arguments.events or event):
                await load.none_failed(site)
                say(event, asked, await work(load))
        least = SETTLE_ANSWERS if arguments.events else ANSWERED_MIN
        await load.until(site, least)  # type: ignore[arg-type]
        sums = await load.stop()
        say("all that time", f">= {least} answered at {RATE_PER_S:g}/s, 0 failed", load_text(sums))
        need(sums["answered"] >= least and not sums["failed"], f"failed: {sums['failed']}")
        load = None
        for event, upgrade in (("node killed", False), ("node upgraded", True)):
            if event in (arguments.events or event):
                say(event, "the agent stays; only what was in flight fails", await node_lost(site, upgraded=upgrade))
        if "SIGSTOP" in (arguments.events or "SIGSTOP"):
            seen = [await stopped(site, service) for service in STOPPED]
            say("SIGSTOP", f"unhealthy within {UNHEALTHY_S:g} s", ", ".join(seen))
        if "backup" in (arguments.events or "backup"):
            say("backup", "all is lost, and restored", await restored(site))
        say("down -v", "leaves nothing", await down(site))
    except Broken as error:
        print(f"BROKEN: {error}")
        (folder / "compose.log").write_text(containers.compose("logs", "--no-color"))
        return False
    finally:
        if load is not None:
            load.kill()
        containers.compose("down", "-v")
    print(f"missed: {'; '.join(site.missed)}" if site.missed else "all of it holds")
    return not site.missed


def play_on_an_engine(
    name: str,
    parser: argparse.ArgumentParser,
    play: Callable[[Path, Containers, argparse.Namespace], Coroutine[Any, Any, bool]],
) -> int:
    """Play it on an engine, in a folder and a separate project, by the command line; returns the exit code."""
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs")
    parser.add_argument("--compose", default="", help="path of docker-compose v2; default: the one found")
    parser.add_argument("--no-build", action="store_true", help="take the images of an earlier run as they are")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=f"trefoil-{name}-"))
    try:
        with engine_of_this_machine() as engine:
            if isinstance(engine, str):
                print(f"skipped: {engine}")
                return 0
            compose = find_compose(arguments.compose)
            print(f"{engine.version}; {compose.version}", flush=True)
            containers = Containers(engine, compose, f"{name}{os.getpid()}", folder)
            return 0 if asyncio.run(play(folder, containers, arguments)) else 1
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    finally:
        if arguments.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Play it on an engine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", nargs="*", help="only these, e.g. node haproxy SIGSTOP; default: all")
    return play_on_an_engine("compose", parser, play)


if __name__ == "__main__":
    sys.exit(main())
