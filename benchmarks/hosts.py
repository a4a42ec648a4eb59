"""Trefoil across hosts, while it serves: `make e2e-hosts`, or `python -m benchmarks.hosts`. As root, on Linux.

Three network namespaces are three hosts: `control` (Redis, carbon feed, controller, dispatcher), `node-a` and `node-b`
(each a power agent, a simulated GPU and real Tritons). The services are started by settings files as an operator would
write them; all of them, Redis and the clients, speak mutual TLS. An unmodified tritonclient asks 100 times a second
from a fourth place, while a plan changes, all certificates are renewed, both agents are killed and started again, and
first one node, then the other is drained. Prints what was asked and what was seen of each event; exit code 1 where one
does not hold. Nothing is left behind; --keep leaves the folder with settings and logs.
"""

import asyncio
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import redis.asyncio as redis
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from benchmarks.hosts_machines import OUTSIDE, Authority, Host, Machines, play_in_a_namespace, write_settings
from power_agent.devices.node_client import NodeClient
from power_agent.runtimes.simulated_node import NodeRuntime
from protos.controller.v1 import controller_pb2, controller_pb2_grpc
from trefoil.cli.run.processes import ChildProcess
from trefoil.cli.run.services import redis_binary
from trefoil.cli.run.state_directory import write_private
from trefoil.core.errors import TrefoilError, Unavailable
from trefoil.core.fleet import NodeStatus, SliceState
from trefoil.core.objective import Objective
from trefoil.core.plan import Plan, RolloutState
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.security.plan_keys import routes_key
from trefoil.runtime.security.tls import Tls
from trefoil.runtime.state import State

CLOCK: Final = WallClock()
ROOT: Final = Path(__file__).resolve().parents[1]
MODELS: Final = ROOT / "model_repository"
RATE_PER_S: Final = 100.0
DEMAND: Final = {"rate_per_s": RATE_PER_S, "rate_p90_per_s": 1.4 * RATE_PER_S}
ANSWERED_MIN: Final = 20_000
FLOOR_FIRST: Final = 0.90
FLOOR_LATER: Final = 0.95
OBJECTIVE: Final = {
    "family": "digits", "type": "instant", "slo": {"latency_ms": 400.0}, "accuracy": {"floor": FLOOR_FIRST},
    "params": {"queue_requests_max": 12_000.0},  # two minutes of them: this machine may stand still, none is refused
}  # fmt: skip
UIDS: Final = 65_536  # of one node: the hosts are one kernel's, and so are the users of their Tritons
UID_BASE: Final = 2_000_000_000 + 2 * UIDS * (os.getpid() % 1000)  # and those of another run at the same time
PORT_BASE: Final = 8200 + 256 * (os.getpid() % 200)  # names users and shared memory: two runs may meet on one machine
NODE_SOCKET: Final = "node.sock"
PATIENCE_S: Final = 120.0  # of one event: two cores that others use, too
POLL_S: Final = 0.2
SETTLED_ANSWERS: Final = 300  # so many answers in a row show who serves
REDIS, FEED, CONTROLLER, AGENT, DISPATCHER, FRONT = 6379, 8101, 8102, 8103, 8104, 8001

T = TypeVar("T")


class Broken(Exception):
    """An event that does not hold."""


def need(holds: bool, text: str) -> None:
    """What has to hold."""
    if not holds:
        raise Broken(text)


class Site:
    """The three hosts with all that runs on them, and an operator beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.launch_id = folder, f"hosts-{os.getpid()}"
        self.machines = Machines(folder, self.launch_id, CLOCK)
        self.token, self.password, self.plan_key = (secrets.token_hex(32) for _ in range(3))
        self.desk, self.client = folder / "operator", folder / "client"
        self.authority, self.clients = Authority(folder / "ca", "site1"), Authority(folder / "clients-ca", "clients")
        self.triton_serials: set[int] = set()  # of certificates before the renewal
        self.headers = {"authorization": f"Bearer {self.token}"}

    async def __aenter__(self) -> "Site":
        self.control = await self.machines.add("control")
        self.nodes = [await self.machines.add(name) for name in ("node-a", "node-b")]
        self.desk.mkdir()
        self.client.mkdir()
        self._start()
        self.state = State.connect(self.redis_url(self.desk), "site1", clock=CLOCK, timeout_s=10.0)
        tls = Tls(self.desk / "tls.crt", self.desk / "tls.key", self.desk / "ca.crt", serves=False)
        self.channel = rpc.channel(f"{self.control.address}:{CONTROLLER}", tls=tls, token=self.token)
        self.controller = controller_pb2_grpc.ControllerStub(self.channel)
        self.front = triton.InferenceServerClient(f"{self.control.address}:{FRONT}", ssl=True, **self.client_files())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.front.close()
        await self.channel.close()
        await self.state.close()

    def redis_url(self, folder: Path) -> str:
        """As a host, or the operator, with its certificates in that folder connects."""
        files = f"ssl_ca_certs={folder}/ca.crt&ssl_certfile={folder}/tls.crt&ssl_keyfile={folder}/tls.key"
        return f"rediss://:{self.password}@{self.control.address}:{REDIS}/0?{files}"

    def renew(self) -> None:
        """Give the operator and each host a new certificate, in the place of the one before it."""
        self.authority.issue(self.desk, "operator", OUTSIDE, usage="clientAuth")
        for host in self.machines.hosts.values():
            self.authority.issue(host.folder, host.name, host.address)
        for host in self.nodes:  # with a separate key, for models can read it
            self.authority.issue(host.folder, f"tritons.{host.name}", host.address, "tritons", "serverAuth")

    def client_files(self) -> dict[str, str]:
        """Certificates of a client, as tritonclient takes them."""
        names = {"root_certificates": "ca.crt", "private_key": "tls.key", "certificate_chain": "tls.crt"}
        return {option: str(self.client / name) for option, name in names.items()}

    # Services, as an operator installs them

    def _start(self) -> None:
        self.renew()
        for folder in (self.desk, *(host.folder for host in self.machines.hosts.values())):
            write_private(folder / "redis_url", self.redis_url(folder))
            write_private(folder / "token", self.token)
            write_private(folder / "plan_key", self.plan_key)
            write_private(folder / "routes_key", routes_key(self.plan_key))
            shutil.copy(self.authority.certificate, folder)
        self.clients.issue(self.client, "client", OUTSIDE, usage="clientAuth")
        write_private(self.client / "token", client_token := secrets.token_hex(32))
        tenant = {"name": "clients", "token_sha256": hashlib.sha256(client_token.encode()).hexdigest()}
        self.tenants = write_settings(self.control, "tenants", {"tenant": [tenant]})
        shutil.copy(self.authority.certificate, self.client)
        self._start_redis()
        for host in self.nodes:
            self._start_node(host)
            self.start_agent(host)
        self._service("carbon_feed", FEED, provider="constant", zone="site1", constant={"intensity_g_per_kwh": 300.0})
        self._service(
            "controller", CONTROLLER, policy="exact", mode="act", model_repository=MODELS,
            plan_key_file=self.control.folder / "plan_key", carbon={"zone": "site1"}, node_stale_s=20.0, causes=[],
            demand_fixed={"digits": DEMAND}, objectives=[OBJECTIVE],
        )  # fmt: skip
        self._service(
            "dispatcher", DISPATCHER, inference_address=f"{self.control.address}:{FRONT}",
            front_client_ca=self.clients.certificate, tenants_file=self.tenants,
            plan_key_file=self.control.folder / "routes_key",
        )  # fmt: skip

    def _common(self, host: Host, service: str, port: int) -> dict[str, Any]:
        return {
            "cluster": "site1",
            "redis_url_file": host.folder / "redis_url",
            "state_dir": host.folder / service,
            "admin_address": f"{host.address}:{port}",
            "metrics_address": "",
            "token_file": host.folder / "token",
            "tls_ca": host.folder / "ca.crt",
            "tls_certificate": host.folder / "tls.crt",
            "tls_key": host.folder / "tls.key",
        }

    def _service(self, name: str, port: int, **settings: Any) -> None:
        path = write_settings(self.control, name, self._common(self.control, name, port) | settings)
        self.machines.start(self.control, name, (sys.executable, "-m", name, "--config", str(path)))

    def _start_redis(self) -> None:
        folder = self.control.folder
        lines = [
            f"bind {self.control.address}", "port 0", f"tls-port {REDIS}", f"requirepass {self.password}",
            f"tls-ca-cert-file {folder}/ca.crt", f"tls-cert-file {folder}/tls.crt", f"tls-key-file {folder}/tls.key",
            f"dir {folder}", "appendonly no", 'save ""', "daemonize no",
        ]  # fmt: skip
        write_private(folder / "redis.conf", "\n".join(lines) + "\n")
        self.machines.start(self.control, "redis", (str(redis_binary()), str(folder / "redis.conf")))

    def _start_node(self, host: Host) -> None:
        """The hardware of a node."""
        settings = {"devices": ["A100-SXM4-40GB"], "model_repository": MODELS}
        path = write_settings(host, "node", settings)
        argv = [sys.executable, "-m", "trefoil.simulated_node", "--node", host.name]
        argv += ["--socket", str(host.folder / NODE_SOCKET)]
        self.machines.start(host, "node", (*argv, "--config", str(path)))

    def start_agent(self, host: Host) -> None:
        """The power agent of a node, started for the first time or again."""
        settings = self._common(host, "power_agent", AGENT) | {
            "node": host.name, "zone": "site1", "model_repository": MODELS, "node_socket": host.folder / NODE_SOCKET,
            "triton_environment": ROOT / ".venv-triton", "advertise_host": host.address, "triton_listen": host.address,
            "plan_key_file": host.folder / "plan_key", "triton_port_base": PORT_BASE,
            "triton_uid_base": UID_BASE + UIDS * self.nodes.index(host),
            "triton_tls_certificate": host.folder / "tritons.crt", "triton_tls_key": host.folder / "tritons.key",
        }  # fmt: skip
        path = write_settings(host, "power_agent", settings)
        self.machines.start(host, "power_agent", (sys.executable, "-m", "power_agent", "--config", str(path)))

    # What an operator sees and does

    async def plan(self) -> Any:
        """The plan in force (GetPlanResponse)."""
        return await rpc.call(self.controller.GetPlan, controller_pb2.GetPlanRequest(), 10.0)

    async def status(self, host: Host) -> NodeStatus:
        """What a node's agent publishes.

        Raises:
            Unavailable: nothing.
        """
        if (found := await self.state.get(self.state.keys.node(host.name), NodeStatus)) is None:
            raise Unavailable(f"the agent of {host.name} publishes nothing")
        return found

    def tritons(self, host: Host) -> dict[str, int]:
        """Process ids of a node's Tritons, by what they were started as."""
        client = NodeClient(host.folder / NODE_SOCKET)
        try:
            return {one.tag: int(one.id) for one in NodeRuntime(client).list() if one.alive}
        finally:
            client.close()

    def is_slice(self, name: str) -> bool:
        """Whether a name is that of a slice."""
        return any(name.startswith(f"{host.name}-") for host in self.nodes)

    def node_of(self, slice_name: str) -> str:
        """Node of a slice as a receipt names it."""
        return next(host.name for host in self.nodes if slice_name.startswith(f"{host.name}-"))

    def pids(self) -> dict[str, int]:
        """Process ids of all services."""
        return {f"{h.name} {name}": p.pid for h in self.machines.hosts.values() for name, p in h.processes.items()}

    async def serials(self) -> dict[str, int]:
        """Serial number of the certificate that each listener shows, the Tritons' too."""
        control = {"feed": FEED, "controller": CONTROLLER, "dispatcher": DISPATCHER, "front": FRONT, "Redis": REDIS}
        found = {name: (self.control.address, port) for name, port in control.items()}
        for host in self.nodes:
            found[f"agent of {host.name}"] = (host.address, AGENT)
            for part in (part for device in (await self.status(host)).devices for part in device.slices):
                found[part.key.name] = rpc.split_address(part.grpc_target)
        return {
            name: await asyncio.to_thread(serial, address, self.client if name == "front" else self.desk)
            for name, address in found.items()
        }

    async def renew_redis(self) -> None:
        """Have Redis read its files again, by the operator's command."""
        async with redis.from_url(self.redis_url(self.desk)) as client:
            folder = self.control.folder
            files = {"tls-cert-file": folder / "tls.crt", "tls-key-file": folder / "tls.key"}
            await client.config_set(*(str(word) for pair in files.items() for word in pair))

    def trefoil(self, *words: object) -> str:
        """Run a command of an operator.

        Raises:
            Broken: it is refused.
        """
        argv = [str(Path(sys.executable).parent / "trefoil"), *map(str, words)]
        files = {"TOKEN_FILE": "token", "TLS_CA": "ca.crt", "TLS_CERTIFICATE": "tls.crt", "TLS_KEY": "tls.key"}
        environment = os.environ | {f"TREFOIL_{name}": str(self.desk / file) for name, file in files.items()}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        need(done.returncode == 0, f"{' '.join(argv)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def drain(self, host: Host, *options: object) -> None:
        """Take a node out of service, or with `--release` put it back, by the operator's command."""
        self.trefoil("node", "drain", "--target", f"{host.address}:{AGENT}", "--patience", 90, *options)

    def check_alive(self) -> None:
        """Raise Broken if a service has ended."""
        for host in self.machines.hosts.values():
            for name, process in host.processes.items():
                need(process.exit_code is None, f"{name} of {host.name} ended: {process.last_error()}")

    async def until(self, what: str, check: Callable[[], Awaitable[T | None]]) -> T:
        """Poll until the check gives something; returns that.

        Raises:
            Broken: not within the patience, or a service has ended.
        """
        return await poll_until(what, check, PATIENCE_S, POLL_S, look=self.check_alive)


async def poll_until(
    what: str,
    check: Callable[[], Awaitable[T | None]],
    patience_s: float,
    every_s: float,
    failing: tuple[type[Exception], ...] = (TrefoilError,),
    look: Callable[[], None] = lambda: None,
) -> T:
    """Poll until the check gives something, whatever of `failing` it raises meanwhile; returns that. `look` is called
    before each check, and may raise.

    Raises:
        Broken: not within the patience.
    """
    give_up_s, last = CLOCK.monotonic_s() + patience_s, ""
    while True:
        look()
        try:
            if found := await check():
                return found
        except failing as error:
            last = f" ({error})"
        need(CLOCK.monotonic_s() < give_up_s, f"not within {patience_s:g} s: {what}{last}")
        await CLOCK.sleep(every_s)


class Load:
    """The clients, a separate process."""

    def __init__(self, site: Site) -> None:
        argv = [sys.executable, "-m", "benchmarks.hosts_load", "--target", f"{site.control.address}:{FRONT}"]
        argv += ["--rate", str(RATE_PER_S)]
        for option, file in {"token-file": "token", "ca": "ca.crt", "certificate": "tls.crt", "key": "tls.key"}.items():
            argv += [f"--{option}", str(site.client / file)]
        self._process: ChildProcess = site.machines.start_outside("load", argv)

    def sums(self) -> dict[str, Any]:
        """All that was sent and answered until now."""
        lines = [line for line in self._process.last_lines(2).splitlines() if line.startswith('{"sent"')]
        if not lines:
            return {"sent": 0, "answered": 0, "correct": 0, "slices": {}, "variants": {}, "failed": {}}
        sums: dict[str, Any] = json.loads(lines[-1])
        return sums

    def since(self, before: dict[str, Any], name: str) -> Counter[str]:
        """What was counted since then, by name."""
        return Counter(self.sums()[name]) - Counter(before[name])

    async def until(self, site: Site, answered: int) -> None:
        """Wait until so many requests are answered; the patience counts from one answer to the next."""
        while (now := self.sums()["answered"]) < answered:

            async def more(now: int = now) -> bool:
                return bool(self.sums()["answered"] > now)

            await site.until(f"more than {now} are answered", more)

    async def stop(self) -> dict[str, Any]:
        """End it when the last request is answered; all sums."""
        os.kill(self._process.pid, signal.SIGTERM)
        code = await self._process.wait()
        need(code == 0, f"the load ended with {code}: {self._process.last_lines(5)}")
        return self.sums()

    async def settled(self, site: Site, name: str, wanted: Callable[[str], bool]) -> Counter[str]:
        """Wait until so many answers in a row are all as wanted; those answers by name.

        Raises:
            Broken: not within the patience.
        """
        before = self.sums()

        async def check() -> Counter[str] | None:
            nonlocal before
            if self.sums()["answered"] - before["answered"] < SETTLED_ANSWERS:
                return None
            found = self.since(before, name)
            before = self.sums()
            return found if all(map(wanted, found)) else None

        return await site.until(f"{SETTLED_ANSWERS} answers in a row by other {name}", check)


# Events: each returns what was seen, and raises Broken where that is not what was asked


async def start(site: Site) -> tuple[Load, str]:
    """All services find each other, and both nodes answer."""

    async def rolled_out() -> Any:
        answer = await site.plan()
        return answer if answer.rollout.state == RolloutState.DONE else None

    async def ready() -> bool:
        try:
            return bool(await site.front.is_model_ready("digits", headers=site.headers, client_timeout=5.0))
        except InferenceServerException as error:
            raise Unavailable(f"{error.status()}: {error.message()}") from error

    answer = await site.until("a plan is rolled out", rolled_out)
    await site.until("the front is ready", ready)
    load = Load(site)

    async def both_answer() -> bool:
        return {site.node_of(name) for name in load.sums()["slices"]} == {host.name for host in site.nodes}

    await site.until("both nodes answer", both_answer)
    return load, f"plan {revision(answer.plan)}: {layout(answer.plan)}"


async def set_floor(site: Site, floor: float) -> str:
    """Change the accuracy floor, so that another plan is made; returns how it is degraded ("" when it is not)."""
    found = await rpc.call(site.controller.GetObjectives, controller_pb2.GetObjectivesRequest(family="digits"), 10.0)
    objective: Objective = codec.from_proto(found.objectives[0])
    wanted = codec.to_proto(replace(objective, min_accuracy=floor))
    request = controller_pb2.SetObjectivesRequest(objectives=[{"objective": wanted}])
    return str((await rpc.call(site.controller.SetObjectives, request, 30.0)).degraded)


async def plan_change(site: Site, load: Load) -> str:
    """Another floor of the accuracy makes another plan."""
    before = revision((await site.plan()).plan)
    need(not (degraded := await set_floor(site, FLOOR_LATER)), f"the plan for it is degraded: {degraded}")
    plan = await rolled_out_after(site, before)
    variants = {hosted.variant for device in devices(plan) for part in device.slices for hosted in part.hosted}
    served = await load.settled(site, "variants", variants.__contains__)
    return f"plan {before} -> {revision(plan)}: {layout(plan)}; then {dict(served)} answered"


async def renewal(site: Site, _: Load) -> str:
    """Renewed files are taken by every service, and nothing is started again. A Triton reads its own at its start."""
    pids, before, tritons = site.pids(), await site.serials(), [site.tritons(host) for host in site.nodes]
    site.triton_serials = {number for name, number in before.items() if site.is_slice(name)}
    site.renew()
    await site.renew_redis()

    async def all_new() -> list[str] | None:
        now = {name: number for name, number in (await site.serials()).items() if not site.is_slice(name)}
        return list(now) if all(number != before[name] for name, number in now.items()) else None

    now = await site.until("every service shows a new certificate", all_new)
    need(site.pids() == pids, f"services were {pids} and are {site.pids()}")
    need([site.tritons(host) for host in site.nodes] == tritons, "Tritons were started again")
    return f"new certificates at {len(now)} listeners ({', '.join(now)}); 0 of {len(pids)} processes restarted"


async def agent_restart(site: Site, number: int, load: Load) -> str:
    """An agent that was killed finds its Tritons again."""
    host = site.nodes[number]
    was, before, sums = await site.status(host), site.tritons(host), load.sums()
    old = host.processes["power_agent"]
    old.kill()
    site.start_agent(host)

    async def back() -> NodeStatus | None:
        now = await site.status(host)
        ready = all(part.state == SliceState.READY for device in now.devices for part in device.slices)
        return now if now.epoch > was.epoch and ready else None

    now = await site.until(f"the agent of {host.name} is back", back)
    need(site.tritons(host) == before, f"Tritons were {before} and are {site.tritons(host)}")
    answered = sum(n for name, n in load.since(sums, "slices").items() if site.node_of(name) == host.name)
    pids = f"pid {old.pid} -> {host.processes['power_agent'].pid}, epoch {was.epoch} -> {now.epoch}"
    return f"agent {pids}; 0 of {len(before)} Tritons restarted; {answered} answers from there meanwhile"


async def move(site: Site, numbers: tuple[int, int], load: Load) -> str:
    """A drained node's slices go to the other one, where Tritons start with renewed certificates."""
    source, target = (site.nodes[number] for number in numbers)
    had = len(site.tritons(source))
    if any(device.cordon for device in (await site.status(target)).devices):
        site.drain(target, "--release")
    site.drain(source, "--wait", PATIENCE_S)

    async def moved() -> Plan | None:
        answer = await site.plan()
        left = [
            device for device in devices(answer.plan) if device.slices and device.device.startswith(f"{source.name}/")
        ]
        return answer.plan if answer.rollout.state == RolloutState.DONE and not left else None

    plan = await site.until(f"a plan without {source.name} is rolled out", moved)
    served = await load.settled(site, "slices", lambda name: site.node_of(name) == target.name)
    left = len(site.tritons(source))
    need(left == 0, f"{left} Tritons are left on {source.name}")
    counts = f"{had} -> {left} Tritons on {source.name}, {len(site.tritons(target))} on {target.name}"
    return f"{counts}; {layout(plan)}; {sum(served.values())} answers in a row from {target.name}"


async def moved_back(site: Site, load: Load) -> str:
    """Back again; so each Triton was started since the renewal, and shows a new certificate."""
    seen = await move(site, (1, 0), load)
    shown = {number for name, number in (await site.serials()).items() if site.is_slice(name)}
    need(not shown & site.triton_serials, "a Triton shows a certificate of before the renewal")
    return f"{seen}; {len(shown)} new certificate{'s' if len(shown) > 1 else ''} at its Tritons"


async def rolled_out_after(site: Site, before: tuple[int, int]) -> Plan:
    """Wait for a plan later than that one to be rolled out."""

    async def check() -> Plan | None:
        answer = await site.plan()
        done = answer.rollout.state == RolloutState.DONE and revision(answer.plan) > before
        return codec.from_proto(answer.plan) if done else None

    return await site.until(f"a plan later than {before} is rolled out", check)


def serial(address: tuple[str, int], folder: Path) -> int:
    """Serial number of the certificate that a server shows to whom the certificates in that folder are.

    Raises:
        Unavailable: it does not answer, or one of the two does not trust the other.
    """
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection(address, timeout=10.0) as plain,
            context.wrap_socket(plain, server_hostname=address[0]) as secure,
        ):
            shown: Any = secure.getpeercert()
    except OSError as error:
        raise Unavailable(f"{address}: {error}") from error
    return int(shown["serialNumber"], 16)


def revision(plan: Any) -> tuple[int, int]:
    """Epoch and number of a plan."""
    return plan.revision.epoch, plan.revision.number


def devices(plan: Any) -> list[Any]:
    """Devices of a plan."""
    return [device for node in plan.nodes for device in node.devices]


def layout(plan: Any) -> str:
    """Slices of a plan, by node."""
    found = []
    for node in plan.nodes:
        slices = Counter(
            f"{part.key.slice_type} {part.hosted[0].variant}" for device in node.devices for part in device.slices
        )
        found.append(f"{node.node} " + (" + ".join(f"{n} x {name}" for name, n in slices.items()) or "nothing"))
    return ", ".join(found)


async def play(folder: Path) -> bool:
    """Start everything, play all events, and print what each showed."""
    began_s = CLOCK.monotonic_s()

    def say(event: str, asked: str, seen: str) -> None:
        print(f"{CLOCK.monotonic_s() - began_s:6.1f} s  {event:<24} asked: {asked}\n{'':34}seen:  {seen}", flush=True)

    playing = asyncio.current_task()
    assert playing is not None, "this is a coroutine"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, playing.cancel)
    site = Site(folder)
    restarted = "SIGKILL and start; no Triton is restarted, none of its requests fails"
    events: Sequence[tuple[str, str, Callable[[Load], Awaitable[str]]]] = (
        ("plan change", f"objective: accuracy {FLOOR_FIRST} -> {FLOOR_LATER}", partial(plan_change, site)),
        ("certificates renewed", "new files on every host; nothing is restarted", partial(renewal, site)),
        ("agent restart, node-a", restarted, partial(agent_restart, site, 0)),
        ("agent restart, node-b", restarted, partial(agent_restart, site, 1)),
        ("slices moved", "trefoil node drain of node-a", partial(move, site, (0, 1))),
        ("and back", "release of node-a, drain of node-b; Tritons show new certificates", partial(moved_back, site)),
    )
    try:
        async with site:
            load, seen = await start(site)
            say("start", "a plan, and answers from both nodes", seen)
            for number, (event, asked, work) in enumerate(events, 1):
                await load.until(site, number * ANSWERED_MIN // (len(events) + 1))
                say(event, asked, await work(load))
            await load.until(site, ANSWERED_MIN)
            sums = await load.stop()
            say("all that time", f">= {ANSWERED_MIN} answered at {RATE_PER_S:g}/s, 0 failed", load_text(sums))
            need(sums["answered"] >= ANSWERED_MIN and not sums["failed"], f"failed: {sums['failed']}; --keep has why")
    except Broken as error:
        print(f"BROKEN: {error}")
        return False
    finally:
        await site.machines.close()
    print("all of it holds")
    return True


def load_text(sums: dict[str, Any]) -> str:
    """What came of the load, in words."""
    text = f"{sums['answered']} of {sums['sent']} answered, {sum(sums['failed'].values())} failed"
    latency = ", ".join(f"{name} {value:.0f} ms" for name, value in sums["latency_ms"].items())
    return f"{text}, {sums['correct'] / sums['answered']:.4f} of them right; latency {latency}"


def main() -> int:
    """Play it in a network namespace of its own."""
    return play_in_a_namespace("hosts", (__doc__ or "").splitlines()[0], play)


if __name__ == "__main__":
    sys.exit(main())
