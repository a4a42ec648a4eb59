"""A real Docker engine for tests: the one that runs here, else one of our own that leaves nothing behind.

Where none is installed, root takes Debian's packages and unpacks them into a folder of the cache, so that the machine
itself stays as it is. A separate engine has its data, socket and processes in one temporary folder, makes no network
but those that it is asked for, and touches no packet filter: it passes connections on itself.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import psutil
import pytest

from power_agent.runtimes.slice_network import BRIDGE
from tests.support import triton_image

PACKAGE = "docker.io"
CACHE = Path("/var/cache/trefoil-tests")
READY_S = 60.0
HANDS_OFF = ("--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")
REPOSITORY, TAG = "trefoil-test/triton", "cpu"
# Becomes a command that ends with the thread that started it. No `preexec_fn`: that would run gRPC's fork handlers.
TIED = """
import ctypes, json, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
os.execvpe(sys.argv[2], sys.argv[2:], json.loads(sys.argv[1]))
"""


class DockerEngine:
    """An engine that answers at `url`; `close` removes every container that the tests labelled."""

    def __init__(self, url: str = "") -> None:
        self.url = url
        self.client = docker.DockerClient(url) if url else docker.from_env()
        self.client.ping()
        self.image = ""

    def build_image(self) -> str:
        """Import the stand-in image; returns its name."""
        with tempfile.TemporaryDirectory(prefix="trefoil-image-") as folder:
            archive = Path(folder) / "image.tar"
            triton_image.pack(archive)
            self.client.api.import_image(
                src=str(archive), repository=REPOSITORY, tag=TAG, changes=triton_image.changes()
            )
        self.image = f"{REPOSITORY}:{TAG}"
        return self.image

    def containers(self) -> list[docker.models.containers.Container]:
        """Ours, dead or alive."""
        return self.client.containers.list(all=True, filters={"label": "trefoil.tag"}, ignore_removed=True)

    def close(self) -> None:
        for container in self.containers():
            with contextlib.suppress(docker.errors.NotFound):
                container.remove(v=True, force=True)
        for network in self.client.networks.list(filters={"label": "trefoil.cluster"}):
            network.remove()
        if self.image:
            self.client.images.remove(self.image, force=True)
        self.client.close()


class OwnEngine(DockerEngine):
    """A dockerd of the test's own; it dies with the thread that started it. `flags`: what it does to networks."""

    def __init__(self, binaries: Path | None, *flags: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="trefoil-docker-"))  # short: sockets live in it
        self._log, self._binaries, self._flags = self._folder / "log", binaries, flags or HANDS_OFF
        try:
            self._process = self._start(binaries)
            super().__init__(f"unix://{self._folder}/docker.sock")
        except BaseException:
            self._end()
            raise

    def stop(self) -> None:
        """As an operator does; its containers end with it."""
        self._process.terminate()
        self._process.wait(60)

    def start(self) -> None:
        """Again, after `stop`."""
        self._process = self._start(self._binaries)

    def _start(self, binaries: Path | None) -> subprocess.Popen[bytes]:
        environment = dict(os.environ) | {"TMPDIR": str(self._folder)}
        if binaries is not None:
            folders = [str(binaries / folder) for folder in ("usr/sbin", "usr/bin", "sbin", "bin")]
            environment["PATH"] = ":".join([*folders, os.environ.get("PATH", os.defpath)])
            libraries = [str(path) for path in binaries.glob("usr/lib/*-linux-gnu")]
            environment["LD_LIBRARY_PATH"] = ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":")
        nothing = self._folder / "daemon.json"  # and not what an operator configured for the machine's own
        nothing.write_text("{}")
        command = ["dockerd", f"--host=unix://{self._folder}/docker.sock", f"--data-root={self._folder}/data"]
        command += [f"--exec-root={self._folder}/exec", f"--pidfile={self._folder}/pid", f"--config-file={nothing}"]
        command += ["--bridge=none", *self._flags]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", TIED, json.dumps(environment), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + READY_S
        while not _answers(self._folder / "docker.sock"):
            failed = process.poll() is not None or time.monotonic() > deadline_s
            assert not failed, f"dockerd does not start:\n{self._log.read_text()[-4000:]}"
            time.sleep(0.05)
        return process

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._end()

    def _end(self) -> None:
        with contextlib.suppress(AttributeError, subprocess.TimeoutExpired):  # never started; hangs
            self.stop()
        left = _naming(self._folder)  # a containerd or shim that outlived it
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=10)  # one that has ended may wait for this machine's init to note it
        for mount in sorted(_mounts(self._folder), reverse=True):
            subprocess.run(["umount", "--lazy", mount], check=False)
        shutil.rmtree(self._folder)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as door:
        return door.connect_ex(str(path)) == 0


def _naming(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or []):
            found.append(process)
    return found


def _mounts(folder: Path) -> list[str]:
    places = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [place for place in places if place.startswith(str(folder))]


@contextlib.contextmanager
def engine() -> Iterator[DockerEngine]:
    """An engine with the stand-in image. Without privileges the test is skipped; as root it fails."""
    found = running()
    if found is None and os.geteuid() != 0:
        pytest.skip("no Docker engine runs here, and only root can start one")
    if found is None:
        found = OwnEngine(None if shutil.which("dockerd") else unpacked())
    try:
        found.build_image()
        yield found
    finally:
        found.close()
        if shutil.which("nft") and not any(name.startswith(BRIDGE) for _, name in socket.if_nameindex()):
            subprocess.run(
                ["nft", "delete", "table", "inet", "trefoil"], check=False, capture_output=True
            )  # an agent's


def running() -> DockerEngine | None:
    """The engine that answers here; None: there is none."""
    try:
        return DockerEngine()
    except docker.errors.DockerException:
        return None


def unpacked() -> Path:
    """Debian's packages of an engine, unpacked in the cache; fetched once a machine."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        root = CACHE / "engine"
        if not root.is_dir():
            with tempfile.TemporaryDirectory(dir=CACHE, prefix="fetch-") as folder:
                fresh = Path(folder) / "engine"
                for package in _fetched(Path(folder)):
                    subprocess.run(["dpkg-deb", "-x", package, fresh], check=True)
                fresh.rename(root)
        return root


def _fetched(folder: Path) -> list[Path]:
    """The package and those that it needs and this machine lacks."""
    archives = folder / "archives"
    (archives / "partial").mkdir(parents=True)
    command = ["apt-get", "install", "--yes", "--no-install-recommends", "--download-only", "--quiet"]
    command += ["--option", "DPkg::Lock::Timeout=60", "--option", f"Dir::Cache::archives={archives}", PACKAGE]
    said = ""
    for refresh in (False, True):  # package lists may be old, or not there at all
        if refresh:
            subprocess.run(["apt-get", "update", "--quiet"], check=False, capture_output=True)
        done = subprocess.run(command, capture_output=True, text=True)
        said = done.stdout + done.stderr
        if done.returncode == 0:
            return sorted(archives.glob("*.deb"))
    raise AssertionError(f"no Docker engine runs or is installed, and {PACKAGE} cannot be fetched:\n{said[-2000:]}")
