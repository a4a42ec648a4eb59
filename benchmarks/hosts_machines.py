"""Machines of `make e2e-hosts` and `make e2e-security`: network namespaces as hosts on one bridge, with certificates
and processes.

All of them belong to processes: the bridge to the namespace of whoever runs this, which must be one of its own
(`unshare --net`), each host to a process that only holds it. So with the last process the kernel removes them all, and
nothing is left behind even by a SIGKILL.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trefoil.cli.run.processes import ChildProcess, Command, kill_leftovers, stop_all
from trefoil.cli.run.state_directory import write_private
from trefoil.runtime.clock import Clock
from trefoil.runtime.config import to_toml

NETWORK: Final = "10.77.0"
OUTSIDE: Final = f"{NETWORK}.1"  # of this process: operators and clients
BOTH: Final = "serverAuth,clientAuth"  # a service shows one certificate to who asks it and to whom it asks
EC_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(slots=True)
class Host:
    """One host: its address, a folder in the place of its disk, and what runs there."""

    name: str
    address: str
    folder: Path
    holder: ChildProcess
    processes: dict[str, ChildProcess] = field(default_factory=dict)

    @property
    def inside(self) -> tuple[str, ...]:
        """What to put before a command that runs on this host."""
        return ("nsenter", f"--net=/proc/{self.holder.pid}/ns/net")


class Machines:
    """Hosts of one run. `close` ends all processes; call it in a `finally`."""

    def __init__(self, folder: Path, launch_id: str, clock: Clock) -> None:
        self._folder, self._launch_id, self._clock = folder, launch_id, clock
        self.hosts: dict[str, Host] = {}
        self._outside: list[ChildProcess] = []
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "bridge", "type", "bridge")
        run("ip", "address", "add", f"{OUTSIDE}/24", "dev", "bridge")
        run("ip", "link", "set", "bridge", "up")

    async def add(self, name: str) -> Host:
        """Add a separate host network namespace to the bridge."""
        number = len(self.hosts) + 11
        folder = self._folder / name
        folder.mkdir()
        holder = self._child(f"{name}-holder", ("unshare", "--net", "sleep", "infinity"), folder)
        host = self.hosts[name] = Host(name, f"{NETWORK}.{number}", folder, holder)
        own = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == own:
            await self._clock.sleep(0.01)
        port = f"port{number}"
        run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        run("ip", "link", "set", port, "master", "bridge", "up")
        run(*host.inside, "ip", "link", "set", "lo", "up")
        run(*host.inside, "ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        run(*host.inside, "ip", "link", "set", "eth0", "up")
        return host

    def start(self, host: Host, name: str, argv: Sequence[str]) -> ChildProcess:
        """Start a process on a host, or start it again."""
        child = self._child(name, (*host.inside, *argv), host.folder)
        host.processes[name] = child
        return child

    def start_outside(self, name: str, argv: Sequence[str]) -> ChildProcess:
        """Start a process where operators and clients are."""
        self._outside.append(self._child(name, argv, self._folder))
        return self._outside[-1]

    def _child(self, name: str, argv: Sequence[str], folder: Path) -> ChildProcess:
        return ChildProcess(Command(name, argv, folder / f"{name}.log"), self._launch_id, self._clock)

    async def close(self) -> None:
        """End everything: clients first, then services before what they need."""
        await stop_all(self._outside)
        for group in (("dispatcher", "controller", "carbon_feed"), ("power_agent",), ("node", "redis")):
            await stop_all([p for h in self.hosts.values() for n, p in h.processes.items() if n in group])
        for host in self.hosts.values():
            host.holder.kill()
        await kill_leftovers(self._launch_id, self._clock)


def write_settings(host: Host, service: str, settings: Mapping[str, Any]) -> Path:
    """Write a service's settings file on its host."""
    path = host.folder / f"{service}.toml"
    write_private(path, to_toml(settings))
    return path


class Authority:
    """Certificate authority, as docs/howto/tls.md makes one."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self._folder = folder
        self.certificate, self._key = folder / "ca.crt", folder / "ca.key"
        run(
            "openssl", "req", "-x509", *EC_KEY, "-days", "3650", "-subj", f"/CN={name}",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign", "-keyout", self._key, "-out", self.certificate,
        )  # fmt: skip

    def issue(self, folder: Path, name: str, address: str, stem: str = "tls", usage: str = BOTH) -> None:
        """Put a new certificate and its key into a folder, in the place of those before: `tls.crt` and `tls.key`."""
        request, key, certificate = (self._folder / f"new.{kind}" for kind in ("csr", "key", "crt"))
        run(
            "openssl", "req", "-new", *EC_KEY, "-subj", f"/CN={name}",
            "-addext", f"subjectAltName=DNS:{name},IP:{address}", "-addext", f"extendedKeyUsage={usage}",
            "-keyout", key, "-out", request,
        )  # fmt: skip
        run(
            "openssl", "x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key,
            "-days", "30", "-copy_extensions", "copy", "-out", certificate,
        )  # fmt: skip
        for path in (key, certificate):
            write_private(folder / f"{stem}{path.suffix}", path.read_text())


def run(*argv: object) -> str:
    """Run a command that must succeed; its output.

    Raises:
        RuntimeError: it ends with another exit code.
    """
    words = [str(word) for word in argv]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def skip_reason() -> str:
    """Why this machine cannot play it; "" = it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for tool in ("ip", "unshare", "nsenter", "openssl"):
        if shutil.which(tool) is None:
            return f"no {tool} on PATH (packages iproute2, util-linux, openssl)"
    if subprocess.run(("unshare", "--net", "true"), capture_output=True, check=False).returncode:
        return "this container may not make network namespaces (CAP_SYS_ADMIN)"
    return ""


def play_in_a_namespace(name: str, description: str, play: Callable[[Path], Coroutine[Any, Any, bool]]) -> int:
    """Play it in a folder and a network namespace of its own, by the command line of `python -m benchmarks.<name>`;
    returns the exit code. Where this machine cannot, it says why, and that is not a failure."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--keep", action="store_true", help="keep the folder with settings and logs")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.inside:
        if reason := skip_reason():
            print(f"skipped: {reason}")
            return 0
        again = ["-m", f"benchmarks.{name}", *sys.argv[1:], "--inside"]
        os.execvp("unshare", ["unshare", "--net", sys.executable, *again])
    folder = Path(tempfile.mkdtemp(prefix=f"trefoil-{name}-"))
    return run_in(folder, play(folder), keep=arguments.keep)


def run_in(folder: Path, playing: Coroutine[Any, Any, bool], *, keep: bool) -> int:
    """Play it; the exit code. Its folder is gone afterwards, unless it is to be kept."""
    try:
        return 0 if asyncio.run(playing) else 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted")
        return 130
    finally:
        if keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
