"""Attacks on Trefoil across hosts: `make e2e-security`, or `python -m benchmarks.security`. As root, on Linux.

The hosts of `benchmarks.hosts` (mutual TLS everywhere, plans signed) serve with an attacker's model.py in each slice,
which tries what `security_probe` holds; the same in a container where an engine runs. Then every listener without a
certificate, with another authority's and with an expired one; forged plans and a forged agent_target in Redis, a forged
epoch; secrets in commands, logs and what `state dump` prints. A row an attempt; exit code 1 where one was not refused.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import redis.asyncio as redis

from benchmarks import hosts, security_probe
from benchmarks.hosts import (
    AGENT,
    CLOCK,
    CONTROLLER,
    DISPATCHER,
    FEED,
    FRONT,
    MODELS,
    REDIS,
    Broken,
    Site,
    need,
)
from benchmarks.hosts_machines import EC_KEY, OUTSIDE, Authority, Host, play_in_a_namespace, run
from power_agent.runtimes.docker import DockerRuntime
from power_agent.runtimes.docker_engine import Engine
from power_agent.settings import PowerAgentSettings
from power_agent.triton.slice_launch import SliceLaunch
from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from protos.types.v1 import fleet_pb2
from trefoil.cli.operate.status import decode_keys
from trefoil.cli.run.state_directory import write_private
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import NodeStatus
from trefoil.core.plan import NodePlan, RolloutState
from trefoil.runtime import codec, rpc
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.security.tls import Tls

DONE: Final = security_probe.DONE
PROBE: Final = Path(security_probe.__file__).read_text() + "\nbegin(json.loads(sys.argv[1]))\n"
LINE: Final = "PROBE "
START: Final = """
import os, shutil
os.posix_spawn(shutil.which("python3"), ["python3", "-c", {probe!r}, {told!r}], os.environ)
"""
AFTER_S: Final = 20.0  # the first slice serves long before the last one listens
HUGE_EPOCH: Final = 2**62
AHEAD: Final = 1000  # revisions: the controller continues planning meanwhile
FORGE_PERIOD_S: Final = 0.02
TRITON_PORTS: Final = (hosts.PORT_BASE, hosts.PORT_BASE + 16)  # of the one GPU of a node


class Table:
    """Rows, printed as they come."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.count = 0

    def head(self, text: str) -> None:
        """Begin a part."""
        print(f"\n{text}", flush=True)

    def row(self, whom: str, tried: str, came: str) -> None:
        """Print a row; what begins with DONE was not refused."""
        self.count += 1
        held = not came.startswith(DONE)
        print(f"  {'refused' if held else 'OPEN   '} {whom:<30} {tried:<32} {came[:160]}", flush=True)
        if not held:
            self.open.append(f"{whom}: {tried}: {came}")

    def verdict(self) -> bool:
        """Whether all was refused; prints what was not."""
        print(f"\n{self.count - len(self.open)} of {self.count} refused", *self.open, sep="\n  OPEN ")
        return not self.open


class Besieged(Site):
    """The site of `make e2e-hosts`, with signed plans, an attacker's model.py, and what he is after."""

    def __init__(self, folder: Path, secret: Path, engine: Path) -> None:
        super().__init__(folder)
        self._bait = (secret, engine)
        self.foreign = Authority(folder / "foreign", "somebody else's")

    @property
    def secrets(self) -> dict[str, str]:
        """What nobody may find."""
        return {"token": self.token, "password of Redis": self.password, "key of plans": self.plan_key}

    def _start(self) -> None:
        # What its agents serve from: the families of this tree, by the attacker's model.py.
        repository = self.folder / "models"
        (repository / "_shared").mkdir(parents=True)
        (repository / "digits").symlink_to(MODELS / "digits")
        genuine = (MODELS / "_shared" / "model.py").read_text()
        start = START.format(probe=PROBE, told=json.dumps(self.told()))
        (repository / "_shared" / "model.py").write_text(f"{genuine}\n{start}")
        hosts.MODELS = repository  # type: ignore[misc]
        super()._start()

    @property
    def fixed(self) -> dict[str, tuple[str, int]]:
        """Listeners whose address everybody knows."""
        ports = {"Redis": REDIS, "carbon feed": FEED, "controller": CONTROLLER, "dispatcher": DISPATCHER}
        found = {name: (self.control.address, port) for name, port in {**ports, "dispatcher's front": FRONT}.items()}
        return found | {f"agent of {host.name}": (host.address, AGENT) for host in self.nodes}

    def told(self) -> dict[str, Any]:
        """What the attacker knows."""
        secret, engine = self._bait
        home = self.nodes[0].folder
        files = [home / name for name in ("token", "tls.key", "redis_url", "plan_key", "power_agent/triton.key")]
        return {
            "after_s": AFTER_S,
            "listeners": self.fixed,
            "scans": {f"Triton of {host.name}": (host.address, *TRITON_PORTS) for host in self.nodes},
            "sockets": [str(engine), "/var/run/docker.sock", str(home / hosts.NODE_SOCKET)],
            "files": [str(path) for path in (secret, "/etc/shadow", *files)],
            "folders": ["/etc", str(self.folder / "models" / "_shared")],
            "pids": {"this run": os.getpid(), "init": 1},
        }

    async def listeners(self) -> dict[str, tuple[str, int]]:
        """All of them, the Tritons' too."""
        found = dict(self.fixed)
        for host in self.nodes:
            status = await self.status(host)
            for part in (part for device in status.devices for part in device.slices) if status is not None else ():
                found[f"Triton {part.key.name}"] = rpc.split_address(part.grpc_target)
        return found

    @contextlib.asynccontextmanager
    async def agent(self, host: Host, token: str) -> Any:
        """A node's agent, asked with the operator's certificate."""
        tls = Tls(self.desk / "tls.crt", self.desk / "tls.key", self.desk / "ca.crt", serves=False)
        channel = rpc.channel(f"{host.address}:{AGENT}", tls=tls, token=token)
        try:
            yield power_agent_pb2_grpc.PowerAgentStub(channel)
        finally:
            await channel.close()

    @contextlib.asynccontextmanager
    async def forged(self, key: str, value: Callable[[], Any]) -> Any:
        """A value in Redis, written by somebody who has its password, again and again: its writer fixes it."""
        done = asyncio.Event()

        async def write() -> None:
            async with redis.from_url(self.redis_url(self.desk)) as client:
                while not done.is_set():
                    await client.set(key, codec.encode(value()))
                    await CLOCK.sleep(FORGE_PERIOD_S)

        writing = asyncio.create_task(write())
        try:
            yield
        finally:
            done.set()
            await writing


@contextlib.contextmanager
def bait() -> Iterator[tuple[Path, Path]]:
    """A file and a socket as an engine's (root's; 0600, 0660), in a folder that everybody may enter."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="bait-") as name, socket.socket(socket.AF_UNIX) as door:
        folder = Path(name)
        folder.chmod(0o755)
        secret, engine = folder / "secret", folder / "docker.sock"
        write_private(secret, "of root alone")
        door.bind(str(engine))
        engine.chmod(0o660)
        door.listen()
        yield secret, engine


# --- from inside a slice ---------------------------------------------------------------------------------------------


async def from_a_slice(site: Besieged, table: Table) -> None:
    """What the attacker's model.py found, in one slice of each node."""

    async def told(host: Host) -> tuple[str, list[list[str]]] | None:
        for log in sorted((host.folder / "power_agent" / "logs").glob("*.log")):
            for line in log.read_text(errors="replace").splitlines():
                if LINE in line:
                    return log.stem, json.loads(line.partition(LINE)[2])
        return None

    for host in site.nodes:
        name, rows = await site.until(f"a model of {host.name} has tried", lambda host=host: told(host))
        table.head(f"model code in slice {name} (runtime process)")
        for row in rows:
            table.row(*row)
        need(any(whom.startswith("Triton of") for whom, _, _ in rows), "it found no other Triton to ask")


def from_a_container(site: Besieged, table: Table) -> None:
    """The same from a container beside another slice's."""
    from tests.support.docker_engine import engine

    with engine() as docker:
        settings = PowerAgentSettings(cluster="site1", node="node-c", docker_image=docker.image, docker_gpu="none")
        runtime = DockerRuntime(Engine(docker.url), settings)
        told = site.told() | {"after_s": 1.0}
        rows = rows_of_a_container(
            docker.client, runtime, site.folder, told, [hosts.PORT_BASE + 64, hosts.PORT_BASE + 66]
        )
        table.head("model code in a container (runtime docker)")
        for row in rows:
            table.row(*row)


def rows_of_a_container(
    client: Any, runtime: DockerRuntime, folder: Path, told: dict[str, Any], ports: Sequence[int]
) -> list[list[str]]:
    """What an attacker finds in a slice's container that is started for it, beside another one's."""
    beside = _launch(folder, "beside", "import signal; signal.pause()", ports[0])
    runtime.start("beside.g1", beside, folder / "beside.log")
    probe = _launch(folder, "probe", PROBE, ports[1], json.dumps(told))
    container = client.containers.get(runtime.start("probe.g1", probe, folder / "probe.log").id)
    give_up_s = CLOCK.monotonic_s() + hosts.PATIENCE_S
    while LINE not in (said := container.logs().decode()):
        need(CLOCK.monotonic_s() < give_up_s, f"the container said nothing: {said[-500:]}")
        CLOCK.block(0.2)
    rows: list[list[str]] = json.loads(said.partition(LINE)[2].splitlines()[0])
    return rows


def _launch(folder: Path, name: str, code: str, port: int, *words: str) -> SliceLaunch:
    repository = folder / "containers" / name
    repository.mkdir(parents=True)
    target = f"127.0.0.1:{port}"
    return SliceLaunch(
        argv=("python3", "-c", code, *words),
        env={},
        cwd=repository,
        repository=repository,
        grpc_target=target,
        metrics_url="",
        published_target=target,
        published_metrics_url="",
        shm_prefix="",
        source=repository,
        ports={port: "127.0.0.1"},
    )


# --- from outside ----------------------------------------------------------------------------------------------------


async def every_listener(site: Besieged, table: Table) -> None:
    """Each without a certificate, with a foreign one and with one that has expired."""
    table.head("every listener, from a machine of the network")
    folder = site.folder / "visitor"
    folder.mkdir()
    site.foreign.issue(folder, "operator", OUTSIDE, "foreign")
    for authority, stem in ((site.authority, "expired"), (site.clients, "expired-client")):
        expire(authority, folder, stem)
    for name, address in (await site.listeners()).items():
        expired = "expired-client" if name.endswith("front") else "expired"
        tries: dict[str, dict[str, Any]] = {"clear text": {"clear": True}, "TLS, no certificate": {}}
        tries |= {
            f"TLS, {word} certificate": {"pair": (folder / f"{stem}.crt", folder / f"{stem}.key")}
            for word, stem in (("another authority's", "foreign"), ("an expired", expired))
        }
        for tried, how in tries.items():
            table.row(name, tried, await asyncio.to_thread(security_probe.knock, *address, **how))
        # Whoever is let in is: or the rows above show nothing.
        own = site.client if name.endswith("front") else site.desk
        came = await asyncio.to_thread(security_probe.knock, *address, pair=(own / "tls.crt", own / "tls.key"))
        need(came.startswith((DONE, "-NOAUTH")), f"{name} refuses the right certificate too: {came}")


def expire(authority: Authority, folder: Path, stem: str) -> None:
    """Make a certificate of this authority that ended yesterday."""
    run(
        "openssl",
        "req",
        "-new",
        *EC_KEY,
        "-subj",
        "/CN=operator",
        "-keyout",
        folder / f"{stem}.key",
        "-out",
        folder / "csr",
    )
    run(
        "openssl", "x509", "-req", "-in", folder / "csr", "-CA", authority.certificate,
        "-CAkey", authority.certificate.with_suffix(".key"), "-days", "-1", "-out", folder / f"{stem}.crt",
    )  # fmt: skip


async def wrong_token(site: Besieged, table: Table) -> None:
    """The right certificate, and a token that is none."""
    table.head("with a certificate of the site, without its token")
    for tried, token in (("no token", ""), ("a wrong token", "x" * 32)):
        async with site.agent(site.nodes[0], token) as stub:
            table.row("agent of node-a", tried, await came_of(stub.GetNode, power_agent_pb2.GetNodeRequest()))


async def came_of(method: Any, request: Any) -> str:
    """How a call was refused, or DONE."""
    try:
        await rpc.call(method, request, 10.0)
    except TrefoilError as error:
        return str(error)
    return DONE


# --- forgeries -------------------------------------------------------------------------------------------------------


async def forged_plan(site: Besieged, table: Table) -> None:
    """Plans that somebody wrote into Redis are not taken by an agent that starts."""
    table.head("forged plans in Redis, for an agent that starts")
    host, keys = site.nodes[0], site.state.keys
    genuine = await site.state.get(keys.plan_node(host.name), NodePlan)
    assert genuine is not None, "its controller has planned for it"
    empty = replace(genuine, revision=replace(genuine.revision, number=genuine.revision.number + AHEAD), devices=())
    before = site.tritons(host)
    forgeries = {
        "not signed": replace(empty, signature=""),
        "signed with another key": PlanKeys("site1", ["k" * 64]).sign(replace(empty, signature="")),
        "with the signature of another plan": empty,
    }
    for what, plan in forgeries.items():
        was = await site.status(host)
        assert was is not None

        async def refusal(was: NodeStatus = was) -> str | None:
            now = await site.status(host)
            if now is None or now.epoch <= was.epoch:
                return None
            return next((why for why in now.missing if why.startswith("plan: ")), None)

        async with site.forged(keys.plan_node(host.name), partial(replace, plan)):
            host.processes["power_agent"].kill()
            site.start_agent(host)
            said = await site.until(f"the agent of {host.name} is back and says what it thinks of that plan", refusal)
        same = site.tritons(host) == before
        table.row(f"plan of {host.name}", what, said if same else f"{DONE}: its Tritons changed")


async def forged_epoch(site: Besieged, table: Table) -> None:
    """An epoch that no controller can reach does not shut out those that come."""
    table.head("a forged epoch, by somebody who has the operator's certificate and token")
    host = site.nodes[0]
    lease = fleet_pb2.ClockLease(
        device=f"{host.name}/gpu0", min_mhz=210, max_mhz=1410, holder="attacker", epoch=HUGE_EPOCH
    )
    async with site.agent(host, site.token) as stub:
        request = power_agent_pb2.SetClocksRequest(lease=lease, ttl_s=60.0)
        table.row(
            f"agent of {host.name}", f"SetClocks of epoch {HUGE_EPOCH:.1e}", await came_of(stub.SetClocks, request)
        )
    await another_plan(site, hosts.FLOOR_LATER)


async def forged_target(site: Besieged, table: Table) -> None:
    """A node that is said to be where another one's agent listens, which has a certificate of the site."""
    table.head("a forged agent_target in Redis, while the right agent stands still")
    host, elsewhere = site.nodes
    was, pid = await site.status(host), host.processes["power_agent"].pid

    async def refusal() -> str | None:
        return next((why for why in (await site.plan()).agents_unreached if "neither plan nor token" in why), None)

    def forgery() -> NodeStatus:
        return replace(was, agent_target=f"{elsewhere.address}:{AGENT}", observed_at_s=CLOCK.now_s())

    os.kill(pid, signal.SIGSTOP)
    try:
        async with site.forged(site.state.keys.node(host.name), forgery):
            await hosts.set_floor(site, hosts.FLOOR_FIRST)
            said = await site.until("the controller says what it thinks of that agent_target", refusal)
    finally:
        os.kill(pid, signal.SIGCONT)
    table.row(f"agent_target of {host.name}", f"the agent of {elsewhere.name}", said)
    await site.until("a plan is rolled out again", lambda: rolled_out(site))


async def another_plan(site: Besieged, floor: float) -> None:
    """Change the objective and wait until its plan is rolled out: the agents obey their controller."""
    before = hosts.revision((await site.plan()).plan)
    await hosts.set_floor(site, floor)
    await hosts.rolled_out_after(site, before)


# --- secrets ---------------------------------------------------------------------------------------------------------


async def secrets_kept(site: Besieged, table: Table) -> None:
    """No secret stands in a command, a log, or what `state dump` prints."""
    table.head("secrets of the site")
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if readable(path)]
    logs = [path.read_bytes() for path in site.folder.rglob("*.log*")]
    dump = json.dumps(await decode_keys(site.state, "", 1000)).encode()
    for name, secret in site.secrets.items():
        for where, texts in (("ps", commands), ("logs", logs), ("state dump", [dump])):
            found = sum(secret.encode() in text for text in texts)
            table.row(name, where, f"{DONE}: {found} times" if found else f"not in {len(texts)} of them")
    modes = {path: path.stat().st_mode & 0o077 for path in site.folder.rglob("*") if path.is_file()}
    holding = [path for path in modes if modes[path] and _holds(path, site.secrets.values())]
    table.row(
        "files that others may read", "hold a secret", f"{DONE}: {holding}" if holding else f"none of {len(modes)}"
    )


def readable(path: Path) -> bool:
    """Whether a file, e.g. of a process, is there to be read."""
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def _holds(path: Path, secrets_: Any) -> bool:
    data = path.read_bytes()
    return any(secret.encode() in data for secret in secrets_)


# --- all of it -------------------------------------------------------------------------------------------------------


async def play(folder: Path, *, docker: bool) -> bool:
    """Start the site, try everything, and print its outcome."""
    table = Table()
    with bait() as (secret, engine):
        site = Besieged(folder, secret, engine)
        try:
            async with site:
                await site.until("a plan is rolled out", lambda: rolled_out(site))
                await from_a_slice(site, table)
                if docker:
                    await asyncio.to_thread(from_a_container, site, table)
                else:
                    table.head("model code in a container (runtime docker): skipped: no dockerd on PATH")
                await every_listener(site, table)
                await wrong_token(site, table)
                await forged_plan(site, table)
                await forged_epoch(site, table)
                await forged_target(site, table)
                await secrets_kept(site, table)
        except Broken as error:
            print(f"BROKEN: {error}")
            return False
        finally:
            await site.machines.close()
    return table.verdict()


async def rolled_out(site: Site) -> bool:
    """Whether the plan in force is rolled out."""
    answer = await site.plan()
    return bool(answer.rollout.state == RolloutState.DONE)


def main() -> int:
    """Play it in a network namespace of its own."""
    docker = shutil.which("dockerd") is not None
    return play_in_a_namespace("security", (__doc__ or "").splitlines()[0], partial(play, docker=docker))


if __name__ == "__main__":
    sys.exit(main())
