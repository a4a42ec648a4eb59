"""What holds for every runtime of Tritons. Subclasses say how to make one: `kit` of RuntimeContract.

The Triton is a stand-in that binds its port, forks a child which holds it too, and does what its words say:
ignore (SIGTERM, the child too), exit=<code> (at once), leave (a file in /dev/shm), stray (the child leaves its
session).
"""

import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from power_agent.runtimes.base import RunningTriton, Runtime
from power_agent.triton.slice_launch import SliceLaunch
from tests.support.ports import free_ports
from trefoil.core.errors import StartError, TrefoilError

SERVER = """
import os, signal, socket, sys, time
words = dict(word.partition("=")[::2] for word in sys.argv[2:])
if "exit" in words:
    sys.exit(int(words["exit"]))
# As tritonserver does: for the first process of a container there is no default.
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if "ignore" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "leave" in words:
    open("/dev/shm/" + words["leave"] + "region", "w").write("x")
door = socket.socket()
host, port = sys.argv[1].split(":")
door.bind((host, int(port)))
if os.fork() == 0:
    os.setsid() if "stray" in words else None
    signal.pause()
door.listen()
while True:
    caller, _ = door.accept()
    caller.send(b"!")
    caller.recv(1)  # who closes first keeps the port for a while
    caller.close()
"""
# Model code that tries what it must not be able to do, and tells whoever connects its outcome.
PROBE = """
import json, os, socket, sys
host, port = sys.argv[1].split(":")
secret, engine, outsider, neighbour, region = sys.argv[2:7]
def signal_to(pid):
    os.kill(int(pid), 0)
def connect(path):
    socket.socket(socket.AF_UNIX).connect(path)
attempts = {
    "read a file of root's": lambda: open(secret).read(),
    "connect to the engine's socket": lambda: connect(engine),
    "signal a process of the host": lambda: signal_to(outsider),
    "signal the Triton of another slice": lambda: signal_to(neighbour),
    "read the variables of another slice": lambda: open("/proc/" + neighbour + "/environ").read(),
    "read the command of another slice": lambda: open("/proc/" + neighbour + "/cmdline").read(),
    "read what another slice shares": lambda: open("/dev/shm/" + region).read(),
    "write into its own repository": lambda: open("written", "w"),
}
found = {"uid": os.getuid(), "groups": os.getgroups()}
status = dict(line.split(":\t") for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
found |= {name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs")}
for name, attempt in attempts.items():
    try:
        attempt()
        found[name] = "done"
    except OSError as error:
        found[name] = error.__class__.__name__
door = socket.socket()
door.bind((host, int(port)))
door.listen()
while True:
    caller, _ = door.accept()
    caller.send(b"!" + json.dumps(found).encode())
    caller.close()
"""
REFUSED = {"PermissionError", "FileNotFoundError", "ProcessLookupError", "OSError"}
PATIENCE_S = 60.0


@dataclass
class Kit:
    """How the tests get at one kind of runtime."""

    again: Callable[[], Runtime]  # another client of the same runtime, as the next agent would have
    python: str
    folder: Path
    gpu_uuid: str = ""
    pid: Callable[[RunningTriton], int] = lambda triton: int(triton.id)
    isolates: bool = True  # what it runs can do less than whoever started it; needs root, or an engine
    host: str = "127.0.0.1"  # where the stand-in listens, as it sees it

    def launch(self, *words: str, port: int = 0) -> SliceLaunch:
        """The stand-in with these words, on a separate port."""
        port = port or free_ports(1)[0]
        prefix = f"trefoil-test-{port}-"
        words = tuple(f"leave={prefix}" if word == "leave" else word for word in words)
        repository = self.folder / "slice"
        repository.mkdir(exist_ok=True)
        return SliceLaunch(
            argv=(self.python, "-c", SERVER, f"{self.host}:{port}", *words, f"shm-region-prefix-name={prefix}"),
            env={"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": self.gpu_uuid},
            cwd=repository,
            repository=repository,
            grpc_target=f"127.0.0.1:{port}",
            metrics_url="",
            published_target="",
            published_metrics_url="",
            shm_prefix=prefix,
            source=repository,
            ports={port: "127.0.0.1"},
            gpu_uuid=self.gpu_uuid,
        )

    @property
    def log(self) -> Path:
        return self.folder / "logs" / "triton.log"


def listens(launch: SliceLaunch) -> bool:
    """Whether the stand-in is up, and not only whoever passes connections on to it."""
    host, port = launch.grpc_target.split(":")
    with socket.socket() as door:
        if door.connect_ex((host, int(port))) != 0:
            return False
        try:
            return door.recv(1) == b"!"
        except OSError:
            return False


def port_free(launch: SliceLaunch) -> bool:
    """Whether nobody holds its port, listening or not."""
    host, port = launch.grpc_target.split(":")
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of before hold nobody up
        try:
            door.bind((host, int(port)))
        except OSError:
            return False
    return True


def until(holds: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.02)
    return found


def only(runtime: Runtime) -> RunningTriton:
    (one,) = runtime.list()
    return one


def end_all(runtime: Runtime) -> None:
    for one in runtime.list():
        runtime.stop(one.tag, 0)
        runtime.forget(one.tag)


def told_by(launch: SliceLaunch) -> dict[str, object]:
    """What the stand-in PROBE found out."""
    host, port = launch.grpc_target.split(":")
    with socket.create_connection((host, int(port))) as door, door.makefile("rb") as said:
        answer: dict[str, object] = json.loads(said.read().removeprefix(b"!"))
        return answer


class RuntimeContract:
    """One suite for all runtimes."""

    def test_model_code_is_nobody_and_reaches_nothing_but_its_slice(self, kit: Kit) -> None:
        if not kit.isolates:
            pytest.skip("isolation needs root")
        runtime, neighbour, launch = kit.again(), kit.launch("leave"), kit.launch()
        beside = kit.pid(runtime.start("b.g1", neighbour, kit.log))
        with tempfile.TemporaryDirectory(dir="/var/tmp") as name, socket.socket(socket.AF_UNIX) as engine:
            folder = Path(name)
            folder.chmod(0o755)
            secret, door = folder / "secret", folder / "docker.sock"
            secret.write_text("of root alone")
            secret.chmod(0o600)
            engine.bind(str(door))
            door.chmod(0o660)
            engine.listen()
            until(lambda: listens(neighbour))
            region = f"{neighbour.shm_prefix}region"
            words = (launch.argv[3], str(secret), str(door), str(os.getpid()), str(beside), region)
            probe = replace(launch, argv=(kit.python, "-c", PROBE, *words))
            runtime.start("a.g1", probe, kit.log)
            until(lambda: listens(probe))
            found = told_by(probe)
        assert found.pop("uid") != 0
        assert set(found.pop("groups")) <= {65534}  # type: ignore[call-overload]
        assert found.pop("NoNewPrivs") == 1
        rights = {name: found.pop(name) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
        assert set(rights.values()) == {0}, rights
        assert set(found.values()) <= REFUSED, found

    def test_a_start_is_idempotent_and_the_next_agent_finds_it(self, kit: Kit) -> None:
        runtime, launch = kit.again(), kit.launch()
        started = runtime.start("a.g1", launch, kit.log)
        assert (started.tag, started.alive, started.exit_code) == ("a.g1", True, None)
        assert abs(started.started_at_s - time.time()) < PATIENCE_S
        assert runtime.start("a.g1", launch, kit.log) == started
        until(lambda: listens(launch))
        later = kit.again()
        assert later.list() == runtime.list() == (started,)
        assert later.start("a.g1", launch, kit.log) == started
        later.stop("a.g1", PATIENCE_S)
        assert not only(later).alive
        until(lambda: port_free(launch))

    def test_another_command_under_a_live_tag_is_refused_and_nothing_is_touched(self, kit: Kit) -> None:
        runtime, launch = kit.again(), kit.launch()
        started = runtime.start("a.g1", launch, kit.log)
        until(lambda: listens(launch))
        with pytest.raises(StartError, match="Remedy: stop it first"):
            runtime.start("a.g1", kit.launch(), kit.log)
        with pytest.raises(TrefoilError, match="Remedy: stop it first"):
            runtime.forget("a.g1")
        assert only(runtime) == started
        assert listens(launch)

    def test_several_run_beside_each_other_and_one_is_stopped_alone(self, kit: Kit) -> None:
        runtime, first, second = kit.again(), kit.launch(), kit.launch()
        runtime.start("a.g1", first, kit.log)
        runtime.start("b.g1", second, kit.log)
        until(lambda: listens(first) and listens(second))
        runtime.stop("a.g1", PATIENCE_S)
        assert port_free(first)
        assert listens(second)
        assert {one.tag: one.alive for one in runtime.list()} == {"a.g1": False, "b.g1": True}

    def test_one_that_does_not_listen_is_killed_with_all_that_belongs_to_it(self, kit: Kit) -> None:
        runtime, launch = kit.again(), kit.launch("ignore", "leave", "stray")
        runtime.start("a.g1", launch, kit.log)
        until(lambda: listens(launch))
        started_s = time.monotonic()
        runtime.stop("a.g1", 0.3)
        assert time.monotonic() - started_s >= 0.3
        until(lambda: port_free(launch))
        ended = only(runtime)
        assert (ended.alive, ended.exit_code) == (False, -signal.SIGKILL)
        runtime.forget("a.g1")
        assert runtime.list() == ()
        assert not list(Path("/dev/shm").glob(f"{launch.shm_prefix}*"))

    def test_an_exit_is_noticed_with_its_code_and_the_tag_can_run_again(self, kit: Kit) -> None:
        runtime = kit.again()
        first = runtime.start("a.g1", kit.launch("exit=3"), kit.log)
        until(lambda: not only(runtime).alive)
        assert only(runtime).exit_code == 3
        assert only(kit.again()).exit_code == 3
        launch = kit.launch()
        again = runtime.start("a.g1", launch, kit.log)
        assert again.alive
        assert again.incarnation != first.incarnation
        until(lambda: listens(launch))

    def test_after_a_kill_behind_its_back_the_rest_is_ended_too(self, kit: Kit) -> None:
        runtime, launch = kit.again(), kit.launch("leave")
        started = runtime.start("a.g1", launch, kit.log)
        until(lambda: listens(launch))
        os.kill(kit.pid(started), signal.SIGKILL)
        until(lambda: not only(runtime).alive)
        assert only(runtime).exit_code == -signal.SIGKILL
        until(lambda: port_free(launch))
        assert not list(Path("/dev/shm").glob(f"{launch.shm_prefix}*"))

    def test_what_is_unknown_is_gone_already(self, kit: Kit) -> None:
        runtime = kit.again()
        runtime.stop("never.g1", 1.0)
        runtime.forget("never.g1")
        runtime.start("a.g1", kit.launch("exit=0"), kit.log)
        until(lambda: not only(runtime).alive)
        runtime.stop("a.g1", 1.0)
        runtime.forget("a.g1")
        runtime.forget("a.g1")
        assert runtime.list() == ()

    def test_a_program_that_is_not_there_is_refused_with_a_remedy_and_leaves_nothing(self, kit: Kit) -> None:
        runtime, launch = kit.again(), kit.launch()
        with pytest.raises(StartError, match=r"absent.*Remedy: "):
            runtime.start("a.g1", replace(launch, argv=("/absent/tritonserver",)), kit.log)
        assert runtime.list() == ()
