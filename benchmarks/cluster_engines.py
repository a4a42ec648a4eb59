"""Engines of `make e2e-cluster` and `make e2e-join`: a host of `hosts_machines` with a Docker engine on it, and the
Swarm that they make.

Everything on a host is in one PID namespace: when its first process is killed, the kernel kills all, containers too.
That is how a node dies here, and how nothing is left of a run that is itself killed, but for empty control groups.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import docker
import docker.errors

from benchmarks.compose_engine import engine_of_this_machine
from benchmarks.hosts import need, poll_until
from benchmarks.hosts_machines import Host, Machines, run, run_in, skip_reason
from trefoil.cli.run.processes import ChildProcess
from trefoil.runtime.clock import Clock

ROOT: Final = Path(__file__).resolve().parents[1]
IMAGES: Final = ("trefoil", "trefoil-triton-cpu")
OTHERS: Final = ("redis:7.0", "haproxy:2.6", "prom/prometheus:v2.42.0", "oliver006/redis_exporter:v1.45.0-alpine")
ENGINE: Final = "dockerd"
READY_S: Final = 120.0
CGROUPS: Final = Path("/sys/fs/cgroup")
MANAGER_PORT: Final = 2377
SHARES: Final = 20  # of a CPU's time, against one process of this machine: that many run on each host


class Engine:
    """The engine of one host, and its place in the Swarm."""

    def __init__(self, machines: Machines, host: Host, clock: Clock) -> None:
        self.host, self._machines, self._clock = host, machines, clock
        self.url = f"unix://{host.folder}/docker.sock"
        self.client: Any = None
        self.process: ChildProcess | None = None
        self.enter = ":"  # how a shell gets the weight of this host
        self._group = f"trefoil-cluster-{os.getpid()}-{host.name}"

    async def start(self) -> None:
        """Start it, or start it again with all that it had on its disk."""
        folder = self.host.folder
        (folder / "daemon.json").write_text("{}")  # and not what an operator configured for the machine's own
        for name in ("pid", "docker.sock", "exec"):
            path = folder / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        self.enter = self._make_group()
        engine = (
            f"{ENGINE} --host={self.url} --data-root={folder}/data --exec-root={folder}/exec --pidfile={folder}/pid"
        )
        engine += f" --config-file={folder}/daemon.json --cgroup-parent=/{self._group}"
        # `wait` and not exec: the first process of a PID namespace has to take in what others leave behind.
        inner = f"hostname {self.host.name}; {self.enter}; TMPDIR={folder} {engine} & wait"
        alone = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        self.process = self._machines.start(self.host, ENGINE, (*alone, "sh", "-c", inner))
        give_up_s = self._clock.monotonic_s() + READY_S
        while True:
            with contextlib.suppress(docker.errors.DockerException):  # not yet
                self.client = docker.DockerClient(self.url, timeout=60)
                return
            need(self._clock.monotonic_s() < give_up_s, f"no engine on {self.host.name}: {self.process.last_error()}")
            await self._clock.sleep(0.2)

    def kill(self) -> None:
        """The node dies: its engine and all its containers, by SIGKILL."""
        assert self.process is not None, "it was started"
        self.process.kill()

    def docker(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Run a command of the engine's own command line."""
        return docker_command(self.url, *words, env=env)

    def tasks(self, service: str) -> list[Any]:
        """Containers of a service that run here."""
        label = {"label": f"com.docker.swarm.service.name=trefoil_{service}"}
        found: list[Any] = self.client.containers.list(filters=label, ignore_removed=True)
        return found

    def link(self, state: str) -> None:
        """Take the host's network away (`down`), or give it back (`up`)."""
        run("ip", "link", "set", f"port{self.host.address.rpartition('.')[2]}", state)

    def _make_group(self) -> str:
        """Make a control group for all of the host: without more weight its containers together count as one process.
        Returns how a shell enters it."""
        for controller, weight in (("cpu/cpu.shares", 1024), ("cpu.weight", 100)):
            parent, _, file = controller.rpartition("/")
            if (CGROUPS / parent / "cgroup.procs").exists():
                group = CGROUPS / parent / self._group
                group.mkdir(exist_ok=True)
                (group / file).write_text(str(weight * SHARES))
                # Version 2 has no processes in a group that has groups below it.
                return f"echo 0 > {group}/cgroup.procs" if parent else ":"
        return ":"

    def remove_groups(self) -> None:
        """Remove the empty control groups of what ran here."""
        for group in (*CGROUPS.glob(f"*/{self._group}"), *CGROUPS.glob(self._group)):
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):  # of a process that is not gone yet
                    Path(folder).rmdir()


class Engines:
    """Hosts of one run with an engine each; `start` first, `close` in a `finally`."""

    patience_s = 300.0  # of one event: two cores that others use, too
    poll_s = 0.1

    def __init__(self, folder: Path, name: str, clock: Clock) -> None:
        self.folder, self._clock = folder, clock
        self.machines = Machines(folder, f"{name}-{os.getpid()}", clock)
        self.engines: dict[str, Engine] = {}

    async def start_engines(self, names: Sequence[str], archive: Path) -> list[Engine]:
        """Start engines, with the images."""
        for name in names:
            self.engines[name] = Engine(self.machines, await self.machines.add(name), self._clock)
        engines = list(self.engines.values())
        await asyncio.gather(*(engine.start() for engine in engines))
        await asyncio.to_thread(load_images, engines, archive)
        return engines

    async def until(self, what: str, check: Callable[[], Awaitable[Any]]) -> Any:
        """Poll until the check gives something; returns that.

        Raises:
            Broken: not within the patience.
        """
        return await poll_until(what, check, self.patience_s, self.poll_s)

    async def close(self) -> None:
        """End everything."""
        for engine in self.engines.values():
            if engine.process is not None:
                engine.kill()
        await self.machines.close()
        for engine in self.engines.values():
            engine.remove_groups()


def docker_command(url: str, *words: str, env: Mapping[str, str] | None = None) -> str:
    """Run `docker` against an engine; "" = the one of this machine."""
    environment = {**os.environ, **(env or {})} | ({"DOCKER_HOST": url} if url else {})
    done = subprocess.run(("docker", *words), env=environment, capture_output=True, text=True)
    said = f"docker {' '.join(words)} ended with {done.returncode}: {done.stdout}{done.stderr}"
    need(done.returncode == 0, said[-3000:])
    return done.stdout


def join_swarm(engines: Sequence[Engine], labels: Mapping[str, Sequence[str]]) -> None:
    """Make one Swarm of them, all managers, with labels by host."""
    first, *others = engines
    first.docker("swarm", "init", "--advertise-addr", first.host.address)
    token = first.docker("swarm", "join-token", "--quiet", "manager").strip()
    for engine in others:
        manager = f"{first.host.address}:{MANAGER_PORT}"
        engine.docker("swarm", "join", "--advertise-addr", engine.host.address, "--token", token, manager)
    for engine in engines:
        added = [word for label in labels[engine.host.name] for word in ("--label-add", label)]
        first.docker("node", "update", *added, engine.host.name)


def load_images(engines: Sequence[Engine], archive: Path) -> None:
    """Load the images of an archive into each."""
    loading = [
        subprocess.Popen(
            ("sh", "-c", f'{one.enter}; exec docker load --quiet --input "$0"', archive),
            env=os.environ | {"DOCKER_HOST": one.url},
            stdout=subprocess.DEVNULL,
        )
        for one in engines
    ]
    codes = [one.wait() for one in loading]
    need(not any(codes), f"{archive} cannot be loaded")


def play_on_engines(
    name: str, parser: argparse.ArgumentParser, play: Callable[[Path, argparse.Namespace], Coroutine[Any, Any, bool]]
) -> int:
    """Play it with images of this checkout, in a folder and a network namespace of its own, by the command line of
    `python -m benchmarks.<name>`; returns the exit code. Where this machine cannot, it says why, and that is no
    failure."""
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs")
    parser.add_argument("--images", type=Path, help="images of docker save, trefoil ones as :e2e; default: build them")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.inside:
        return _go_inside(name, arguments.images)
    return run_in(arguments.inside, _until_sigterm(play(arguments.inside, arguments)), keep=arguments.keep)


async def _until_sigterm(playing: Coroutine[Any, Any, bool]) -> bool:
    """Play it; SIGTERM cancels it, so that all of it is taken down."""
    task = asyncio.ensure_future(playing)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _go_inside(name: str, images: Path | None) -> int:
    """Build the images, and start this again in a network namespace of its own; it returns where that cannot be."""
    reason = skip_reason()
    if not reason and not (shutil.which("docker") and shutil.which("dockerd")):
        reason = "no docker and dockerd on PATH (Debian: docker.io)"
    folder = Path(tempfile.mkdtemp(prefix=f"trefoil-{name}-"))
    try:
        built = "" if reason else images or _build(folder)
        if isinstance(built, Path):
            again = ["-m", f"benchmarks.{name}", *sys.argv[1:], "--inside", str(folder), "--images", str(built)]
            os.execvp("unshare", ["unshare", "--net", sys.executable, *again])
        print(f"skipped: {reason or built}")
        return 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _build(folder: Path) -> Path | str:
    """Build the images on this machine's engine, or one of our own: a file of them, or why there is none."""
    with engine_of_this_machine() as engine:
        if isinstance(engine, str):
            return engine
        environment = os.environ | {"TREFOIL_TAG": "e2e", "FRESH": "1", "PATH": engine.path}
        environment |= {"DOCKER_HOST": engine.url} if engine.url else {}
        argv = [str(ROOT / "deploy/images/build.sh"), "--network", "host"]
        subprocess.run(argv, env=environment, check=True)
        archive = folder / "images.tar"
        names = [*(f"{image}:e2e" for image in IMAGES), *OTHERS]
        docker_command(engine.url, "save", "--output", str(archive), *names)
        return archive
