"""Redis by Sentinel: real servers, whose primary is killed under load."""

import asyncio
import contextlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import redis.asyncio as redis
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from controller.role.disk_store import DiskStore
from controller.role.leadership import Leadership
from tests.support.certificates import Authority
from tests.support.dispatching import dispatching, image, until
from tests.support.fake_triton import FakeTriton
from tests.support.ports import free_ports
from tests.support.redis_server import binary
from tests.support.system import until as eventually
from tests.unit.dispatcher.worlds import node, plan, route, status, target
from trefoil.core.common import Revision
from trefoil.core.errors import Fenced, RoleFree, SettingError, StateUnavailable
from trefoil.core.fleet import SliceState
from trefoil.runtime.clock import WallClock
from trefoil.runtime.fenced import Put
from trefoil.runtime.redis_client import make_client
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
PASSWORD, OF_SENTINELS = "of-redis", "of-sentinels"


class Servers:
    """A primary, its replica and three Sentinels, with passwords. `tls`: they talk nothing else, and ask for
    certificates."""

    def __init__(self, down_ms: int = 500, *, tls: bool = False) -> None:
        self.folder, self.down_ms = Path(tempfile.mkdtemp(prefix="trefoil-sentinel-")), down_ms
        self.ports = free_ports(5)
        self.files = dict[str, str]()
        if tls:
            authority = Authority(self.folder)
            pair = authority.service("redis")
            files = {"ca_certs": authority.certificate, "certfile": pair.certificate, "keyfile": pair.key}
            self.files = {f"ssl_{name}": str(path) for name, path in files.items()}
        self.processes = dict[int, subprocess.Popen[bytes]]()
        for port in self.ports[:2]:
            self.start(port)

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports[2:])
        url = f"redis{'s' if self.files else ''}+sentinel://:{PASSWORD}@{hosts}/main?sentinel_password={OF_SENTINELS}"
        return "&".join((url, *(f"{name}={path}" for name, path in self.files.items())))

    def _listens(self, port: int) -> dict[str, object]:
        if not self.files:
            return {"port": port}
        named = zip(("ca-cert", "cert", "key"), self.files.values(), strict=True)
        return {"port": 0, "tls-port": port, "tls-replication": "yes", **{f"tls-{n}-file": path for n, path in named}}

    def start(self, port: int) -> None:
        words = ["--save", "", "--requirepass", PASSWORD, "--masterauth", PASSWORD]
        words += [word for name, value in self._listens(port).items() for word in (f"--{name}", str(value))]
        words += ["--repl-diskless-sync-delay", "0", "--dir", str(self.folder), "--bind", "127.0.0.1"]
        self._run(port, *words)

    def start_sentinels(self) -> None:
        for port in self.ports[2:]:
            config = self.folder / f"{port}.conf"
            lines = [f"{name} {value}\n" for name, value in self._listens(port).items()]
            config.write_text(
                f"{''.join(lines)}bind 127.0.0.1\ndir {self.folder}\nrequirepass {OF_SENTINELS}\n"
                f"sentinel sentinel-pass {OF_SENTINELS}\n"
                f"sentinel monitor main 127.0.0.1 {self.ports[0]} 2\nsentinel auth-pass main {PASSWORD}\n"
                f"sentinel down-after-milliseconds main {self.down_ms}\nsentinel failover-timeout main 3000\n"
            )
            self._run(port, str(config), "--sentinel")

    def _run(self, port: int, *words: str) -> None:
        with (self.folder / f"{port}.log").open("ab") as log:
            self.processes[port] = subprocess.Popen([binary(), *words], stdout=log, stderr=log)

    def client(self, port: int) -> "redis.Redis":
        password = OF_SENTINELS if port in self.ports[2:] else PASSWORD
        where = {"host": "127.0.0.1", "port": port, "ssl": bool(self.files), **self.files}
        return redis.Redis(password=password, decode_responses=True, **where)

    async def ask(self, port: int, *words: str) -> object:
        async with self.client(port) as client:
            return await client.execute_command(*words)

    def kill(self, port: int) -> None:
        self.processes[port].kill()
        self.processes[port].wait()

    async def ready(self) -> None:
        """Replica and Sentinels know all others."""

        async def up(port: int) -> bool:
            with contextlib.suppress(redis.ConnectionError):
                return await self.ask(port, "PING") is not None
            return False

        for port in self.ports[:2]:
            await eventually(partial(up, port), 60.0)
        await self.ask(self.ports[1], "REPLICAOF", "127.0.0.1", str(self.ports[0]))
        self.start_sentinels()

        async def known() -> bool:
            for port in self.ports[2:]:
                if not await up(port):
                    return False
                async with self.client(port) as client:
                    found = await client.sentinel_master("main")
                if (found["num-slaves"], found["num-other-sentinels"]) != (1, 2):
                    return False
            async with self.client(self.ports[1]) as client:
                return (await client.info("replication"))["master_link_status"] == "up"

        await eventually(known, 60.0)

    async def cut_replication(self) -> None:
        """The replica gets no further write, and stays able to be promoted."""
        replica = self.ports[1]
        await self.ask(replica, "CONFIG", "SET", "masterauth", "wrong")
        await self.ask(replica, "CLIENT", "KILL", "TYPE", "master")

        async def cut() -> bool:
            async with self.client(replica) as client:
                return (await client.info("replication"))["master_link_status"] == "down"

        await eventually(cut, 60.0)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        shutil.rmtree(self.folder)


@pytest.fixture(params=[False], ids=["plain"])
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    made = Servers(tls=request.param)
    yield made
    made.close()


class Controllers:
    """Two controllers that keep one role: the leader writes plans, the other stands by."""

    def __init__(self, folder: Path, states: Sequence[State], monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, monkeypatch
        self.states, self.number = states, 0
        self.of = [self._make(n) for n in range(len(states))]

    def _make(self, n: int) -> Leadership:
        self._patch.setattr("controller.role.leadership.socket.gethostname", lambda: f"host{n}")
        disk = DiskStore(self._folder / f"controller{n}", 10)
        return Leadership(self.states[n], disk, WallClock(), Metrics("controller"), lambda: [])

    async def run(self, n: int) -> None:
        """As the process does, which starts again where another one has led."""
        while True:
            try:
                await self.of[n].maintain()
            except RoleFree:
                await self.of[n].release()
                self.of[n] = self._make(n)

    @property
    def leaders(self) -> list[Leadership]:
        return [each for each in self.of if each.epoch]

    async def plan(self) -> Revision:
        """Write the next plan, by whoever leads, until one is in Redis."""
        self.number += 1
        while True:
            for leader in self.leaders:
                wanted = plan([route([target(0)])], self.number, leader.epoch)
                with contextlib.suppress(StateUnavailable, Fenced):
                    await leader.write([Put(self.states[0].keys.plan(), wanted)])
                    return wanted.revision
            await asyncio.sleep(0.05)


async def publish(state: State, slice_: FakeTriton) -> None:
    """Publish the node, as its agent does."""
    lease = None
    while True:
        with contextlib.suppress(StateUnavailable, Fenced):
            if lease is None or not await state.renew(lease):
                lease = await state.acquire("agent:node0", "agent")
            if lease is not None:
                found = node([status(0, slice_.target, SliceState.READY)], observed_at_s=WallClock().now_s())
                await state.put(lease, state.keys.node("node0"), found)
        await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def connected(url: str, count: int) -> AsyncIterator[list[State]]:
    states = [State.connect(url, "c") for _ in range(count)]
    try:
        yield states
    finally:
        for state in states:
            await state.close()


@pytest.mark.parametrize(
    "servers", [pytest.param(False, id="plain", marks=pytest.mark.gate), pytest.param(True, id="tls")], indirect=True
)
async def test_a_failover_fails_no_request_and_one_controller_leads_on(servers, tmp_path, monkeypatch):
    await servers.ready()
    failed, answered, stop = [], 0, asyncio.Event()

    async def send(client: triton.InferenceServerClient) -> None:
        nonlocal answered
        while not stop.is_set():
            try:
                await client.infer("digits", [image(3)])
            except InferenceServerException as error:
                failed.append(error)
            answered += 1
            await asyncio.sleep(0.005)

    async with (
        connected(servers.url, 4) as (state, agent, *of_controllers), FakeTriton(4) as slice_,
        dispatching(state, tmp_path / "dispatcher") as running, asyncio.TaskGroup() as tasks,
        triton.InferenceServerClient(running.address) as client,
    ):  # fmt: skip
        controllers, routing = Controllers(tmp_path, of_controllers, monkeypatch), running.local.routing
        background = [tasks.create_task(publish(agent, slice_))]
        background += [tasks.create_task(controllers.run(n)) for n in range(2)]
        first = await controllers.plan()
        await until(lambda: routing.table.revision == first and routing.table.live("digits"))
        sending = tasks.create_task(send(client))
        await until(lambda: answered > 20)
        servers.kill(servers.ports[0])
        again = await controllers.plan()
        await until(lambda: routing.table.revision == again)
        before = answered
        await until(lambda: answered > before + 20)
        [leader] = controllers.leaders
        assert (await state.holder("controller")).epoch == leader.epoch >= first.epoch
        assert (await servers.ask(servers.ports[1], "ROLE"))[0] == "master"
        stop.set()
        await sending
        for task in background:
            task.cancel()
    assert failed == []


async def test_a_replica_that_missed_the_last_writes_sends_nothing_back(servers, tmp_path, monkeypatch):
    """Epoch, lease and plan of the second controller are lost: disks, acknowledgements and dispatchers know them."""
    await servers.ready()
    seen = []
    async with (
        connected(servers.url, 4) as (state, agent, *of_controllers), FakeTriton(4) as slice_,
        dispatching(state, tmp_path / "dispatcher") as running, asyncio.TaskGroup() as tasks,
    ):  # fmt: skip

        async def watch() -> None:
            while True:
                seen.append(running.local.routing.table.revision)
                await asyncio.sleep(0.01)

        controllers, background = Controllers(tmp_path, of_controllers, monkeypatch), []
        background += [tasks.create_task(each) for each in (publish(agent, slice_), watch())]
        keeping = [tasks.create_task(controllers.run(n)) for n in range(2)]
        early = await controllers.plan()
        await until(lambda: seen[-1] == early)
        await servers.cut_replication()
        [leader] = controllers.leaders
        keeping[controllers.of.index(leader)].cancel()
        await leader.release()
        late = await controllers.plan()
        await until(lambda: seen[-1] == late)
        assert late.epoch > early.epoch
        servers.kill(servers.ports[0])
        keeping.append(tasks.create_task(controllers.run(controllers.of.index(leader))))
        after = await controllers.plan()
        await until(lambda: seen[-1] == after)
        assert len(controllers.leaders) == 1
        for task in (*background, *keeping):
            task.cancel()
    assert after.epoch > late.epoch
    assert list(dict.fromkeys(seen))[1:] == [early, late, after]


async def test_a_sentinel_that_hangs_costs_one_call(servers):
    await servers.ready()
    servers.processes[servers.ports[2]].send_signal(signal.SIGSTOP)
    async with connected(servers.url, 1) as [state]:
        with pytest.raises(StateUnavailable):
            await state.ping()
        for _ in range(3):
            await state.ping()
            await state._client.connection_pool.disconnect()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis+sentinel://h:1,h2/", "a name of their primary"),
        ("redis+sentinel://h:1,/main", "addresses of Sentinels"),
        ("redis+sentinel://h:port/main", "Port could not be cast"),
    ],
)
def test_a_wrong_address_of_sentinels_is_refused(url, why):
    with pytest.raises(SettingError, match=rf"^redis_url: .*{why}.*Remedy: .*redis\[s\]\+sentinel://"):
        make_client(url, 1.0)


async def test_without_a_sentinel_that_knows_the_primary_the_error_names_both(servers):
    await servers.ready()
    for url, why in (
        ("redis+sentinel://127.0.0.1:1/main", r"no primary 'main': 127\.0\.0\.1:1: .*[Cc]onnect"),
        (servers.url.replace("/main?", "/other?"), rf"no primary 'other': .*:{servers.ports[2]}: does not have that"),
        (servers.url.replace(f"={OF_SENTINELS}", "=wrong"), f"no primary 'main': .*:{servers.ports[2]}: invalid user"),
    ):
        async with connected(url, 1) as [state]:
            with pytest.raises(StateUnavailable, match=why):
                await state.ping()


@pytest.mark.parametrize("servers", [True], indirect=True, ids=["tls"])
async def test_servers_whose_certificates_have_another_name_are_none(servers):
    await servers.ready()
    async with connected(f"{servers.url}&tls_name=redis", 1) as [state]:
        await state.ping()
    async with connected(f"{servers.url}&tls_name=other.example", 1) as [state]:
        with pytest.raises(StateUnavailable, match=r"'main': .*certificate is not valid for 'other\.example'"):
            await state.ping()
