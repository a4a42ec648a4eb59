"""The launcher: refuses before it starts anything, shows why a service died, revives, and leaves nothing behind."""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ports import free_ports
from trefoil.cli.run import processes, services
from trefoil.cli.run.launcher import Launcher, clean_up, first_answer, remove_runtime_files, restart_pause_s
from trefoil.cli.run.scenario import ServedFamily, System
from trefoil.cli.run.services import Service
from trefoil.cli.run.state_directory import AlreadyRunning, StateLock, StatePaths
from trefoil.cli.system_client import SystemClient
from trefoil.core.errors import BinaryMissing, CatalogError, PortInUse, SettingError, StartError, TraceError
from trefoil.core.fleet import DeviceStatus, NodeStatus, SliceKey, SliceState, SliceStatus
from trefoil.runtime.clock import ManualClock, WallClock
from trefoil.runtime.config import to_toml
from trefoil.runtime.files import rotate_log
from trefoil.runtime.proc import Identity
from trefoil.runtime.socket_paths import socket_folder, temporary_folder

CLOCK = WallClock()
SERVE = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
SYSTEM = System(port_offset=23_000)  # above those that systems beside this one get, `tests.support.ports`


def service(folder: Path, name: str, code: str = SERVE, after: tuple[str, ...] = (), **more: Any) -> Service:
    up = folder / f"{name}.up"

    async def healthy() -> bool:
        return up.exists()

    return Service(name, (sys.executable, "-c", code, str(up)), healthy, after, stop_grace_s=1.0, **more)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Service]:
    """A system of small processes; a test may replace rows before it launches."""
    rows = {"redis": service(tmp_path, "redis"), "controller": service(tmp_path, "controller", after=("redis",))}
    monkeypatch.setattr(services, "service_table", lambda *_: rows)
    monkeypatch.setattr(services, "preflight", lambda *_: None)
    return rows


def launcher(tmp_path: Path, system: System = SYSTEM, **more: Any) -> Launcher:
    return Launcher(system, tmp_path / "state", **more)


def left(tmp_path: Path) -> list[str]:
    return [str(path.relative_to(tmp_path / "state")) for path in (tmp_path / "state").rglob("*")]


async def assert_nothing_left(tmp_path: Path, one: Launcher) -> None:
    assert one.launch is None or processes.descendants(one.launch.launch_id) == []
    assert not StatePaths(tmp_path / "state").lock.exists()
    assert not StatePaths(tmp_path / "state").run.exists()


async def test_it_starts_in_order_and_leaves_nothing(tmp_path: Path, table: dict[str, Service]) -> None:
    said: list[str] = []
    async with launcher(tmp_path, say=said.append) as one:
        paths = StatePaths(tmp_path / "state")
        assert [line.split()[0] for line in said] == ["redis", "controller"]
        assert paths.running().supervisor.pid == os.getpid()
        assert stat.S_IMODE(paths.launch.stat().st_mode) == 0o600
        assert "redis_url" not in repr(paths.running()), "a password must not reach a log"
        assert paths.lock.exists()
    await assert_nothing_left(tmp_path, one)


async def test_a_second_launcher_on_the_same_state_is_refused_and_disturbs_nothing(
    tmp_path: Path, table: dict[str, Service]
) -> None:
    async with launcher(tmp_path) as first:
        with pytest.raises(AlreadyRunning, match="trefoil down"):
            async with launcher(tmp_path):
                pass
        assert StatePaths(tmp_path / "state").lock.exists()
        assert len(processes.descendants(first.launch.launch_id)) == 2 if first.launch else False


async def test_a_service_that_dies_at_its_start_shows_its_last_words(tmp_path: Path, table: dict[str, Service]) -> None:
    code = "print('thinking'); print('cannot find the moon'); raise SystemExit(1)"
    table["controller"] = service(tmp_path, "controller", code, ("redis",))
    one = launcher(tmp_path)
    with pytest.raises(StartError, match="cannot find the moon") as died:
        async with one:
            pass
    assert "controller" in str(died.value)
    await assert_nothing_left(tmp_path, one)


async def test_a_time_out_carries_what_services_logged_first(tmp_path: Path, table: dict[str, Service]) -> None:
    async with launcher(tmp_path) as one:
        with one.paths.log("controller").open("a") as log:
            at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            log.write("Traceback (most recent call last):\n")
            for level, event, why in (("info", "step", "x"), ("warning", "step", "full"), ("warning", "on", "y")):
                log.write(json.dumps({"event": event, "level": level, "timestamp": at, "why": why}) + "\n")
        with pytest.raises(StartError, match=r"no answer within 0 s; .*controller logged: step: full\. Remedy: read"):
            await first_answer(one, CLOCK, deadline_s=0.0)
        since_s = CLOCK.now_s() + 3600.0
        assert str(one.paths.with_first_errors(StartError("late"), since_s)) == "late", "not what was logged before"


async def test_a_time_out_says_why_slices_failed(
    tmp_path: Path, table: dict[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "Triton exited with 1; its Triton logged: model output 'label' must specify 'dims'"
    failed = SliceStatus(SliceKey("node0/gpu0", "1g.5gb", 0, 1), state=SliceState.FAILED, why=why)

    async def nodes(_: SystemClient) -> list[NodeStatus]:
        return [NodeStatus("node0", devices=(DeviceStatus("node0/gpu0", slices=(failed,)),))]

    monkeypatch.setattr(SystemClient, "nodes", nodes)
    async with launcher(tmp_path) as one:
        with pytest.raises(StartError, match=r"must specify 'dims'.* Remedy: read .*/logs, and .*/agent/logs") as late:
            await first_answer(one, CLOCK, deadline_s=0.0)
    assert f"node0-gpu0-1g.5gb-0 failed: {why}" in str(late.value)


async def test_a_refusal_of_settings_is_one_line(tmp_path: Path, table: dict[str, Service]) -> None:
    code = "print('error: seed = -1: too small. Remedy: a bigger one'); raise SystemExit(2)"
    table["controller"] = service(tmp_path, "controller", code, ("redis",))
    with pytest.raises(StartError) as refused:
        async with launcher(tmp_path):
            pass
    assert str(refused.value) == "controller refuses to start: seed = -1: too small. Remedy: a bigger one"


async def test_a_crashed_service_is_started_again(tmp_path: Path, table: dict[str, Service]) -> None:
    async with launcher(tmp_path) as one:
        before = one.pid("controller")
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(60):
            while one.pid("controller") == before:
                await asyncio.sleep(0.02)
        assert [(e.service, e.exit_code) for e in one.exits] == [("controller", -9)]
        assert not one.failure


async def test_restart_changes_settings_and_is_no_crash(tmp_path: Path, table: dict[str, Service]) -> None:
    settings: Mapping[str, Any] = {"trace": {"speedup": 2.0, "starts_at_s": 0.0}}
    table["controller"] = service(tmp_path, "controller", after=("redis",), settings=settings)
    async with launcher(tmp_path, overrides={"controller": {"trace": {"starts_at_s": 5.0}}}) as one:
        path = StatePaths(tmp_path / "state").settings("controller")
        assert tomllib.loads(path.read_text())["trace"] == {"speedup": 2.0, "starts_at_s": 5.0}
        before = one.pid("controller")
        await one.restart("controller", {"trace": {"starts_at_s": 9.0}})
        assert one.pid("controller") != before
        assert tomllib.loads(path.read_text())["trace"] == {"speedup": 2.0, "starts_at_s": 9.0}
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert not one.exits


@pytest.mark.parametrize("moment_s", [0.0, 0.02, 0.1, 0.3, 0.7])
async def test_cancelled_at_any_moment_nothing_is_left(
    tmp_path: Path, table: dict[str, Service], moment_s: float
) -> None:
    one = launcher(tmp_path)

    async def hold() -> None:
        async with one:
            await asyncio.sleep(60)

    task = asyncio.create_task(hold())
    await asyncio.sleep(moment_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_nothing_left(tmp_path, one)


async def test_what_a_killed_launcher_left_is_cleaned_up(tmp_path: Path, table: dict[str, Service]) -> None:
    one = launcher(tmp_path)
    await one.start()
    assert one.launch is not None
    # As if killed: nothing of its own teardown runs, the lock goes with the process.
    assert one._supervision is not None
    one._supervision.cancel()
    os.close(one._lock._fd or -1)
    assert len(processes.descendants(one.launch.launch_id)) == 2
    assert await clean_up(StatePaths(tmp_path / "state"), CLOCK)
    assert processes.descendants(one.launch.launch_id) == []
    for child in one._children.values():
        child.kill()
    async with launcher(tmp_path) as again:
        assert again.launch is not None
    await assert_nothing_left(tmp_path, again)


# Services that do not stay up, in a separate time


class Child:
    """In place of a ChildProcess: ends when the test says so, or at once by the code in `dies`."""

    started: ClassVar[list[tuple[float, str]]]
    dies: ClassVar[dict[str, int]]

    def __init__(self, command: processes.Command, _: str, clock: ManualClock) -> None:
        if self.dies.get(command.name) == NO_PROCESS:
            self.started.append((clock.monotonic_s(), command.name))
            raise OSError("no process is left")
        self.command, self.name, self.pid = command, command.name, len(self.started) + 1
        self.identity, self.started_at_s = Identity(self.pid, 0), clock.now_s()
        self.exit_code = self.dies.get(command.name)
        self.started.append((clock.monotonic_s(), command.name))

    def kill(self) -> None:
        self.exit_code = self.exit_code or 0

    async def stop(self, **_: Any) -> bool:
        self.kill()
        return True

    def last_lines(self) -> str:
        return "error: no moon"

    def last_error(self) -> str:
        return "no moon"


NO_PROCESS = 1000


@pytest.fixture
async def system(
    tmp_path: Path, table: dict[str, Service], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Launcher, ManualClock]]:
    """A launched system of such children: redis, node, controller."""
    monkeypatch.setattr(Child, "started", [], raising=False)
    monkeypatch.setattr(Child, "dies", {}, raising=False)
    monkeypatch.setattr("trefoil.cli.run.launcher.ChildProcess", Child)
    for name in ("redis", "node", "controller"):
        (tmp_path / f"{name}.up").touch()
        table[name] = service(tmp_path, name)
    clock = ManualClock()
    async with launcher(tmp_path, clock=clock) as one:
        yield one, clock


def starts(name: str) -> list[float]:
    return [round(at_s) for at_s, who in Child.started if who == name]


@pytest.mark.parametrize("code", [1, 2, -11, NO_PROCESS])
async def test_a_service_that_does_not_stay_up_is_started_again_for_ever_and_shown(
    system: tuple[Launcher, ManualClock], code: int
) -> None:
    assert restart_pause_s(10**6) == 30.0, "after a year too"
    one, clock = system
    Child.dies["controller"] = 1 if code == NO_PROCESS else code
    one._children["controller"].exit_code = 1
    await clock.advance(0.5)
    Child.dies["controller"] = code
    await clock.advance(200)
    assert starts("controller")[1:] == pytest.approx([0, 1, 3, 7, 15, 31, 61, 91, 121, 151, 181], abs=2.5)  # polled
    assert (starts("redis"), starts("node"), one.failure) == ([0], [0], "")
    failing = one.paths.failing()
    assert failing.keys() == {"controller"}
    assert failing["controller"].ends == len(starts("controller"))
    assert failing["controller"].how == {-11: "signal 11", NO_PROCESS: "no process"}.get(code, f"exit code {code}")
    assert failing["controller"].last_error == ("no process is left" if code == NO_PROCESS else "no moon")
    assert clock.now_s() < failing["controller"].again_at_s <= clock.now_s() + 30

    del Child.dies["controller"]
    await clock.advance(failing["controller"].again_at_s - clock.now_s() + 25)
    assert one.paths.failing().keys() == {"controller"}, "it is up, but has not stayed up yet"
    await clock.advance(6)
    assert one.paths.failing() == {}
    before_s = clock.monotonic_s()
    one._children["controller"].exit_code = -9
    await clock.advance(0.5)
    assert starts("controller")[-1] == pytest.approx(before_s, abs=1), "at once, as it had stayed up"


async def test_a_node_that_does_not_stay_up_is_dead_and_ends_the_system(system: tuple[Launcher, ManualClock]) -> None:
    one, clock = system
    Child.dies["node"] = 1
    one._children["node"].exit_code = 1
    waiting = asyncio.create_task(one.wait_for_failure())
    await clock.advance(10)
    assert not waiting.done(), "a node that comes back is a driver that was loaded again"
    await clock.advance(10)
    await waiting
    assert "node: ended with exit code 1" in one.failure
    assert len(starts("node")) == 6
    assert starts("controller") == [0]


async def test_a_system_stops_at_once_while_a_service_waits_for_its_next_start(
    system: tuple[Launcher, ManualClock],
) -> None:
    one, clock = system
    Child.dies["controller"] = 1
    one._children["controller"].exit_code = 1
    await clock.advance(40)
    with pytest.raises(KeyError):
        one.pid("controller")
    async with asyncio.timeout(60):
        await one.stop()  # nobody moves the clock
    assert not one.paths.run.exists()


# The checks before anything is started


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of processes that a launcher tried to start."""
    names: list[str] = []
    monkeypatch.setattr(Launcher, "_spawn", lambda _self, one: names.append(one.name))
    return names


async def refused(tmp_path: Path, system: System, error: type[Exception]) -> str:
    one = launcher(tmp_path, system)
    with pytest.raises(error) as caught:
        async with one:
            pass
    await assert_nothing_left(tmp_path, one)
    assert "\n" not in str(caught.value)
    assert "Remedy" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["inference", "redis", "controller_metrics"])
async def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path, started: list[str], name: str) -> None:
    port = getattr(SYSTEM.listening_ports, name)
    with closing(socket.socket()) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        said = await refused(tmp_path, SYSTEM, PortInUse)
    assert f"ports.{name} = {port}" in said
    assert started == []


LISTENS = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print(flush=True); input()"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--config", "/srv/one/config/dispatcher.toml"),
            r"in use by the Trefoil in /srv/one\. Remedy: stop it with `trefoil down --state-dir /srv/one`, or give",
        ),
        (("--config", "/srv/one.toml"), r"in use by process \d+ \(.*\)\. Remedy: stop what listens there"),
    ],
)
def test_whoever_listens_on_a_port_is_named(words: tuple[str, ...], said: str) -> None:
    [port] = free_ports(1)
    argv = [sys.executable, "-c", LISTENS, str(port), *words]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(PortInUse, match=said):
            services.check_ports_free({"inference": port})
        other.communicate("\n")


async def test_a_tritons_port_in_use_is_named(tmp_path: Path, started: list[str]) -> None:
    port = SYSTEM.listening_ports.triton_base + 5
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert f"= {port}" in await refused(tmp_path, SYSTEM, PortInUse)
    assert started == []


async def test_no_redis_binary_is_named(tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "redis-server" in await refused(tmp_path, SYSTEM, BinaryMissing)
    assert started == []


async def test_no_triton_is_named(tmp_path: Path, started: list[str]) -> None:
    system = SYSTEM.model_copy(update={"triton_environment": tmp_path})
    assert "tritonserver" in await refused(tmp_path, system, BinaryMissing)
    assert started == []


async def test_a_malformed_profile_is_named(tmp_path: Path, started: list[str]) -> None:
    profile = tmp_path / "profile.csv"
    profile.write_text("# basis: synthetic\nno,such,columns\n1,2,3\n")
    system = SYSTEM.model_copy(update={"family": ServedFamily(profile_override=profile)})
    assert "profile.csv" in await refused(tmp_path, system, CatalogError)
    assert started == []


@pytest.mark.parametrize("rows", ["0,100\n1,-5\n2,100\n", "0,100\n2,100\n3,100\n"])
async def test_a_trace_with_a_gap_or_a_negative_value_is_named(tmp_path: Path, started: list[str], rows: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("hour,intensity_g_per_kwh\n" + rows)
    carbon = SYSTEM.carbon.model_copy(update={"trace": trace})
    assert "trace.csv" in await refused(tmp_path, SYSTEM.model_copy(update={"carbon": carbon}), TraceError)
    assert started == []


# Settings files and locks

LEAVES = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=20)
VALUES = LEAVES | st.lists(LEAVES, max_size=3)
TABLES = st.recursive(
    st.dictionaries(st.text(min_size=1, max_size=8), VALUES, max_size=4),
    lambda inner: st.dictionaries(st.text(min_size=1, max_size=8), inner | VALUES, max_size=4),
    max_leaves=8,
)


@given(TABLES)
def test_settings_files_read_back_as_written(values: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(values)) == values


def test_what_is_not_set_is_left_to_the_default() -> None:
    assert tomllib.loads(to_toml({"a": None, "b": {"c": None, "d": 1}})) == {"b": {"d": 1}}


def test_a_value_that_toml_has_not_is_refused() -> None:
    with pytest.raises(SettingError):
        to_toml({"a": object()})


def test_a_lock_goes_with_its_holder(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path)
    first, second = StateLock(paths), StateLock(paths)
    first.acquire()
    with pytest.raises(AlreadyRunning):
        second.acquire()
    first.release()
    first.release()
    assert not paths.lock.exists()
    second.acquire()
    assert second.held
    second.release()


def test_a_deep_state_directory_gets_a_short_socket(tmp_path: Path) -> None:
    deep = StatePaths(tmp_path / ("d" * 120))
    assert len(os.fsencode(deep.node_socket)) <= 107
    assert StatePaths(tmp_path / ("e" * 120)).node_socket != deep.node_socket


def test_folders_of_sockets_with_long_paths_go_too(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path / ("long" * 30))
    peers = (paths.folder("dispatcher") / "peers").resolve()
    elsewhere = socket_folder(peers, "4242-0.sock", peers)
    assert elsewhere == temporary_folder(peers)
    assert socket_folder(Path("/s"), "4242-0.sock", peers) == Path("/s")
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "4242-0.sock").touch()
    remove_runtime_files(paths)
    assert not elsewhere.exists()


def test_the_sockets_of_killed_workers_go(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path)
    peers = paths.folder("dispatcher") / "peers"
    peers.mkdir(parents=True)
    (peers / "4242-0.sock").touch()
    remove_runtime_files(paths)
    assert not peers.exists()


async def test_logs_rotate_while_their_services_write_them(tmp_path: Path, table: dict[str, Service]) -> None:
    talk = f"import sys\nfor i in range(2**16): print(f'{{i:063d}}')\nsys.stdout.flush()\n{SERVE}"
    table["redis"] = service(tmp_path, "redis", talk)
    async with launcher(tmp_path, System(port_offset=23_000, log_mib=1)):
        log = StatePaths(tmp_path / "state").log("redis")
        was, last = log.with_name("redis.log.1"), f"{2**16 - 1:063d}"
        async with asyncio.timeout(60.0):  # ext4 gives blocks back before it shortens the file
            while not was.exists() or log.stat().st_blocks > 16 or not processes.last_log_lines(log).endswith(last):
                await CLOCK.sleep(0.05)
        assert 2**20 - 4096 <= was.stat().st_size <= 2**21


def test_the_last_lines_of_a_log_are_read_while_it_is_rotated(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    log.write_text("".join(f"{i:063d}\n" for i in range(2**16)))
    rotation = threading.Thread(target=rotate_log, args=(log, 2**20))
    rotation.start()
    while rotation.is_alive():
        assert processes.last_log_lines(log).endswith(f"{2**16 - 1:063d}")
    rotation.join()
