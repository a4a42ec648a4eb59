"""What model code in a container reaches, on a separate machine: run as `unshare --net --mount python -m` this.

That machine has an engine, one more host beside it (another network namespace), an agent and Redis that listen on all
its addresses, and two slices, whose ports are published on loopback (a) and on all addresses (b). Prints one JSON
object. Arguments: those of dockerd that say what it does to networks.
"""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docker.models.containers import Container

from power_agent.runtimes import slice_network
from power_agent.runtimes.docker import DockerRuntime
from power_agent.runtimes.docker_engine import Engine
from power_agent.settings import PowerAgentSettings
from power_agent.triton.client import TritonClient
from power_agent.triton.slice_launch import SliceLaunch, SliceSpec, prepare_slice
from tests.support.docker_engine import OwnEngine, unpacked
from tests.support.triton_process import MODELS, hosted
from trefoil.runtime.clock import WallClock

HERE, BESIDE = "10.99.0.1", "10.99.0.2"
AGENT, REDIS, FAR, NAMES = 8103, 6379, 8000, 53
PORTS = {"a": (8200, 8201), "b": (8202, 8203)}
PUBLISHED = {"a": "127.0.0.1", "b": "0.0.0.0"}
HOSTS = {"loopback": "127.0.0.1", "its address": HERE}
READY_S = 150.0  # a Triton in a container took more than a minute at a load of 40 on two cores
NO_NFT = "nft: as if it were refused"
LISTEN = "import socket; door = socket.create_server(('', %d)); door.accept(), door.accept()"
EXISTS = "import os, sys; sys.exit(int(os.path.exists(sys.argv[1])))"
RESOLVE = """
import socket, sys
try:
    socket.gethostbyname("secret.example")
except OSError:
    sys.exit(0)
sys.exit(1)
"""


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


def make_machine(folder: Path) -> None:
    """Addresses, a host beside this one, and a server of names on this one's loopback."""
    sh("mount --make-rprivate /")
    sh("mount -t tmpfs none /run")
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    sh(f"mount --bind {folder}/resolv.conf /etc/resolv.conf")
    for command in (
        "ip link set lo up",
        "ip netns add beside",
        "ip link add host0 type veth peer name host1 netns beside",
        f"ip addr add {HERE}/24 dev host0",
        "ip link set host0 up",
        f"ip -n beside addr add {BESIDE}/24 dev host1",
        "ip -n beside link set host1 up",
        f"ip -n beside route add default via {HERE}",
    ):
        sh(command)


def serve_names(asked: list[bytes]) -> None:
    """Keep what is asked of the machine's own name server."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", NAMES))

    def serve() -> None:
        while True:
            asked.append(server.recv(512))

    threading.Thread(target=serve, daemon=True).start()


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + READY_S
    while not holds():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.05)


def reaches(address: str, port: int) -> bool:
    with socket.socket() as door:
        door.settimeout(1.0)
        return door.connect_ex((address, port)) == 0


async def ready(launch: SliceLaunch) -> None:
    """Wait until it answers an inference."""
    server = TritonClient(launch.grpc_target, launch.metrics_url, launch.repository, WallClock())
    await server.wait_ready([hosted(2)], READY_S)
    await server.close()


def inside(container: Container, programs: dict[str, tuple[str, ...]]) -> dict[str, bool]:
    """Run programs in the container of a slice, as model code could; which of them ended with another code than 0."""
    assert container.client is not None
    api = container.client.api
    started = {what: api.exec_create(container.id, ["python3", "-c", *words])["Id"] for what, words in programs.items()}
    for one in started.values():
        api.exec_start(one, detach=True)
    until(lambda: all(api.exec_inspect(one)["ExitCode"] is not None for one in started.values()))
    return {what: api.exec_inspect(one)["ExitCode"] != 0 for what, one in started.items()}


def try_out(engine: OwnEngine, folder: Path, asked: list[bytes]) -> dict[str, Any]:
    settings = PowerAgentSettings(cluster="test", docker_image=engine.build_image(), docker_gpu="none")
    runtime = DockerRuntime(Engine(engine.url), settings)
    launches = {}
    for name, ports in PORTS.items():
        spec = SliceSpec(name, folder / name, MODELS, [hosted(2)], *ports, gpu_uuid="", listen=PUBLISHED[name])
        launches[name] = prepare_slice(runtime.install(), spec)
        runtime.start(f"{name}.g1", launches[name], folder / "log")
        asyncio.run(ready(launches[name]))
    a, b = (next(one for one in engine.containers() if one.labels["trefoil.tag"] == f"{name}.g1") for name in launches)
    network = a.attrs["NetworkSettings"]["Networks"]["trefoil-test-node0"]
    address_of_b = b.attrs["NetworkSettings"]["Networks"]["trefoil-test-node0"]["IPAddress"]
    targets = {
        "agent, by the bridge's address": (network["Gateway"], AGENT),
        "agent, by the host's address": (HERE, AGENT),
        "Redis": (HERE, REDIS),
        "another slice, by its own address": (address_of_b, PORTS["b"][0]),
        "another slice, by its published port at the bridge": (network["Gateway"], PORTS["b"][0]),
        "another slice, by its published port at the host": (HERE, PORTS["b"][0]),
        "metrics of another slice": (HERE, PORTS["b"][1]),
        "a host beside this one": (BESIDE, FAR),
    }
    programs: dict[str, tuple[str, ...]] = {
        what: (slice_network.PROBE, "1", f"{host}:{port}") for what, (host, port) in targets.items()
    }
    programs["the engine's socket"] = (EXISTS, engine.url.removeprefix("unix://"))
    programs["a name of the world"] = (RESOLVE,)

    def tried() -> dict[str, bool]:
        asked.clear()
        found = inside(a, programs)
        assert not any(b"secret" in one for one in asked), "the machine's name server was asked"
        return found

    load, slice_network.load_rules = slice_network.load_rules, lambda: NO_NFT
    without = {"missing": dict(runtime.missing(gpus=False)), "reached": tried()}
    slice_network.load_rules = load
    again = DockerRuntime(Engine(engine.url), settings)  # the next agent, which may load the rules
    again.install()
    found = {"without rules": without, "missing": dict(again.missing(gpus=False)), "reached": tried()}
    for launch in launches.values():
        asyncio.run(ready(launch))
    found["from this host"] = {
        f"{name}, by {where}": all(reaches(host, port) for port in PORTS[name])
        for name in PORTS
        for where, host in HOSTS.items()
    }
    found["networks"] = len(engine.client.networks.list(filters={"label": "trefoil.node=node0"}))
    return found


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="trefoil-isolation-"))
    asked: list[bytes] = []
    make_machine(folder)
    serve_names(asked)
    doors = [socket.create_server(("", port)) for port in (AGENT, REDIS)]
    far = subprocess.Popen(["ip", "netns", "exec", "beside", sys.executable, "-c", LISTEN % FAR])
    engine = OwnEngine(None if shutil.which("dockerd") else unpacked(), *sys.argv[1:])
    try:
        until(lambda: reaches(BESIDE, FAR))
        print(json.dumps(try_out(engine, folder, asked)))
    finally:
        engine.close()
        far.kill()
        for door in doors:
            door.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
