"""Attacks on what docker-compose.yml runs: `make e2e-security`, or alone `python -m benchmarks.security_images`.

Brings it up without a .env and tries, from inside each service's container and a slice's (runtime docker), what
`security_probe` and `security_holder` hold; then looks for secrets in history, inspect, ps and logs, and into the
images. A row an attempt; exit code 1 where one was not refused. Engine and Compose are found as by `compose`; where
there are none it says why, and that is not a failure.
"""

import argparse
import asyncio
import contextlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import docker
import yaml

from benchmarks import compose, security_holder, security_probe
from benchmarks.compose_engine import PROJECT, SERVICE, Containers
from benchmarks.hosts import Broken, need
from benchmarks.security import LINE, PROBE, Table, readable, rows_of_a_container
from benchmarks.security_probe import DONE
from power_agent.runtimes import docker_engine
from power_agent.runtimes.docker import DockerRuntime
from power_agent.settings import PowerAgentSettings
from tests.support.ports import free_ports

CALLS: Final = Path(security_holder.__file__).read_text()
TAG: Final = "e2e"
IMAGE, TRITON_IMAGE = f"trefoil:{TAG}", f"trefoil-triton-cpu:{TAG}"
CLUSTER, SLICE_NODE = "images", "node-d"
CLUSTER_LABEL: Final = f"{docker_engine.LABEL}cluster"
SLICE_LABELS: Final = {"label": [f"{CLUSTER_LABEL}={CLUSTER}"]}
ADMIN: Final = {  # service: port, a method
    "carbon_feed": (8101, "/trefoil.carbon_feed.v1.CarbonFeed/ListZones"),
    "controller": (8102, "/trefoil.controller.v1.Controller/GetPlan"),
    "agent": (8103, "/trefoil.power_agent.v1.PowerAgent/GetNode"),
    "dispatcher_1": (8104, "/trefoil.dispatcher.v1.Dispatcher/GetTable"),
    "dispatcher_2": (8104, "/trefoil.dispatcher.v1.Dispatcher/GetTable"),
}
DISPATCHERS: Final = ("dispatcher_1", "dispatcher_2")
CONTROL: Final = ("carbon_feed", "controller", *DISPATCHERS)
PEERS, PEERS_METHOD = 8105, "/trefoil.dispatcher.v1.Peers/Metrics"
REDIS: Final = 6379
HEALTH: Final = "/grpc.health.v1.Health/Check"
KSERVE: Final = "/inference.GRPCInferenceService"
PAIR: Final = ("/run/trefoil/tls.crt", "/run/trefoil/tls.key")
TRITONS: Final = "tritons.node0"
# name: where the one-shot service `secrets` has it, and who holds it
SECRETS: Final[Mapping[str, tuple[str, set[str]]]] = {
    "token": ("/run/trefoil/token", {*CONTROL, "agent"}),
    "key of plans": ("/run/trefoil-controller/plan.key", {"controller", "agent"}),
    "key of routes": ("/run/trefoil-dispatcher/routes.key", {*DISPATCHERS}),
    "password of Redis": ("/run/trefoil-authority/redis_password", {*CONTROL, "agent", "redis"}),
    "password of Redis' metrics": ("/run/trefoil-authority/metrics_password", {"redis", "redis_exporter"}),
    "password of Grafana": ("/run/trefoil-grafana/password", set()),
    "private key: authority": ("/run/trefoil-authority/ca.key", set()),
    "private key: control": ("/run/trefoil/tls.key", {*CONTROL}),
    "private key: Redis": ("/run/trefoil-redis/tls.key", {"redis"}),
    "private key: exporter": ("/run/trefoil-redis_exporter/tls.key", {"redis_exporter"}),
    "private key: agent": ("/run/trefoil-agent/tls.key", {"agent"}),
    "private key: Tritons": ("/run/trefoil-agent/tritons.key", {"agent", "node"}),
}
HEAD: Final = """services, each from inside its container
  No attack, so in no row: feed, controller, dispatchers and agent hold the token, by which each may command all; who
  has a certificate of the authority may ask for health, and Tritons for inferences; the dispatchers' fronts serve
  everybody (front_open); metrics pages, Prometheus and HAProxy are clear text; in `node` models share a user with the
  simulated hardware, and may command that; `renewal` holds all secrets, in no network. What is tried
  has the container's own user and capabilities."""
PEM_CHARS: Final = 64
SECRET_CHARS_MIN: Final = 32
SET_ID: Final = 0o6000
CAPABILITY: Final = "SCHILY.xattr.security.capability"
TOOL: Final = re.compile(
    r"(.*-)?(gcc|g\+\+|cc|c\+\+|cpp|clang|tcc|ld|ld\.bfd|ld\.gold|as|make|pip(\d(\.\d+)?)?)(-\d+(\.\d+)*)?"
)
PIP: Final = "-packages/pip"
PLANTED: Final = {"opt/planted/su": 0o4755, "opt/planted/x86_64-linux-gnu-gcc-12": 0o755}
ROOTS: Final = ("", "0", "root")
ALLOWED: Final[Mapping[str, set[str]]] = {  # what docker-compose.yml gives to whom
    "be root": {"agent_gpu"},
    "a capability": {"agent_gpu SYS_ADMIN"},
    "all of them, or a root to write to": set(),
    "the engine's socket": {"engine_proxy"},
}
MAKERS: Final = {"renewal"}  # it holds every secret, as `secrets` does; it has no network and reads nothing of anyone
NETWORKS: Final = {"agent": "node_network", "node": "node_network"}  # services that share another one's network
ARCHIVES_MAX: Final = 5  # a file that grows meanwhile spoils an archive


class Besieged(compose.Deployment):
    """The deployment, and what an attacker knows of it. `look` first, once it serves."""

    def __init__(self, folder: Path, containers: Containers) -> None:
        super().__init__(folder, containers)
        self.url = containers.env.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        self.client: Any = docker.DockerClient(self.url)

    def look(self) -> None:
        """Find containers, secrets and Tritons."""
        filters = {"label": f"{PROJECT}={self.containers.project}"}
        self.by_service = {one.labels[SERVICE]: one for one in self.client.containers.list(all=True, filters=filters)}
        running = {name: one for name, one in sorted(self.by_service.items()) if one.status == "running"}
        self.running = {name: one for name, one in running.items() if name not in MAKERS}
        self.files = {name: files_in_volumes(one) for name, one in self.by_service.items()}
        self.secrets = {name: essence(self.files["secrets"][path]) for name, (path, _) in SECRETS.items()}
        ports = re.findall(r"--grpc-port=(\d+)", str(self.by_service["node"].top(ps_args="-eo pid,args")))
        self.triton_ports = sorted({int(port) for port in ports})
        need(bool(self.triton_ports), "no Triton runs in node")

    def holders(self, name: str) -> set[str]:
        """Services with a secret in their files."""
        return {one for one in self.running if self.secrets[name] in b"\n".join(self.files[one].values())}

    def slices(self) -> list[Any]:
        """Containers of slices."""
        found: list[Any] = self.client.containers.list(all=True, filters=SLICE_LABELS, ignore_removed=True)
        return found

    def listeners(self) -> dict[str, tuple[str, int]]:
        """All that ask for a certificate, by address."""
        address = {one: self.containers.address(NETWORKS.get(one, one)) for one in (*ADMIN, "redis", "node")}
        found = {name: (address[name], port) for name, (port, _) in ADMIN.items()}
        found |= {f"peers of {name}": (address[name], PEERS) for name in DISPATCHERS}
        found |= {"redis": (address["redis"], REDIS)}
        return found | {f"Triton {port}": (address["node"], port) for port in self.triton_ports}

    def told(self, service: str) -> dict[str, Any]:
        """What the attacker in a service's container knows; "": in a slice's."""
        mine = {one["Destination"] for one in self.running[service].attrs["Mounts"]} if service else set()
        sources = {one["Destination"]: one["Source"] for one in self.by_service["secrets"].attrs["Mounts"]}
        others = [PurePosixPath(path) for path, _ in SECRETS.values() if str(PurePosixPath(path).parent) not in mine]
        sockets = ["/var/run/docker.sock", self.url.removeprefix("unix://"), "/run/trefoil-engine/docker.sock"]
        sockets += [] if "/run/trefoil-node" in mine else ["/run/trefoil-node/node.sock"]
        return {
            "after_s": 0.0,
            "listeners": self.listeners(),
            "scans": {},
            "certified": {"redis": PAIR} if PAIR[0] in self.files.get(service, ()) else {},
            "sockets": list(dict.fromkeys(sockets)),
            "files": [
                *map(str, others),
                *(f"{sources[str(path.parent)]}/{path.name}" for path in others),
                "/etc/shadow",
            ],
            "folders": ["/", "/etc", "/etc/trefoil", "/models", "/run/trefoil"],
            "pids": {name: one.attrs["State"]["Pid"] for name, one in self.running.items() if name != service},
        }

    def calls(self) -> dict[str, Any]:
        """What a holder of a certificate must not call without more, and what it may."""
        calls = [(name, f"{name}:{port}", name, method) for name, (port, method) in ADMIN.items()]
        calls += [(f"peers of {name}", f"{name}:{PEERS}", name, PEERS_METHOD) for name in DISPATCHERS]
        free = [(name, f"{name}:{port}", name, HEALTH) for name, (port, _) in ADMIN.items()]
        for port in self.triton_ports:
            triton = (f"Triton {port}", f"node:{port}", TRITONS)
            calls += [(*triton, f"{KSERVE}/{method}") for method in ("RepositoryIndex", "RepositoryModelUnload")]
            free += [(*triton, f"{KSERVE}/ServerReady")]
        return {"folder": "/run/trefoil", "calls": calls, "free": free}

    def play(self, service: str, code: str, told: Mapping[str, Any]) -> Any:
        """What a program tells that is run in a service's container, or in one that enters it."""
        container, command = self.running[service], ["python3", "-c", code, json.dumps(told)]
        if is_ours(container):
            said = container.exec_run(command).output
        else:
            said = self.client.containers.run(
                IMAGE, command, user=container.attrs["Config"]["User"], network_mode=f"container:{container.id}",
                pid_mode=f"container:{container.id}", volumes_from=[container.id], tmpfs={"/tmp": ""}, read_only=True,
                cap_drop=["ALL"], security_opt=["no-new-privileges:true"], stderr=True, remove=True,
            )  # fmt: skip
        text = said.decode()
        need(LINE in text, f"the program in {service} says nothing: {text[-1000:]}")
        return json.loads(text.partition(LINE)[2].splitlines()[0])


def is_ours(container: Any) -> bool:
    """Whether it is of an image of Trefoil, with Python."""
    return str(container.attrs["Config"]["Image"]).startswith("trefoil")


def files_in_volumes(container: Any) -> dict[str, bytes]:
    """Files of a container's volumes, by their paths there."""
    found = {}
    for place in (one["Destination"] for one in container.attrs["Mounts"] if one["Type"] == "volume"):
        for attempt in range(ARCHIVES_MAX):
            data, _ = container.get_archive(place)
            try:
                with tarfile.open(fileobj=io.BytesIO(b"".join(data))) as archive:
                    for file in (one for one in archive if one.isfile()):
                        found[f"{PurePosixPath(place).parent}/{file.name}"] = archive.extractfile(file).read()  # type: ignore[union-attr]
                break
            except tarfile.ReadError:
                need(attempt + 1 < ARCHIVES_MAX, f"{place} of {container.name} cannot be read")
    return found


def essence(secret: bytes) -> bytes:
    """What of a secret's text stands nowhere else: of a PEM its second line, for the first names the curve."""
    lines = secret.split()
    if b"PRIVATE" in secret:
        lines = [line for line in lines if len(line) == PEM_CHARS][1:]
    need(bool(lines) and len(lines[0]) >= SECRET_CHARS_MIN, "a secret is too short to be looked for")
    return lines[0]


# --- from inside -----------------------------------------------------------------------------------------------------


def from_services(site: Besieged, table: Table) -> None:
    """From inside each service's container."""
    pair = [str(path) for path in (site.folder / "trefoil" / "tls.crt", site.folder / "trefoil" / "tls.key")]
    for name, address in site.listeners().items():
        # Whoever is let in is: or the rows below show nothing.
        came = security_probe.knock(*address, pair=pair)
        need(came.startswith((DONE, "-NOAUTH")), f"{name} refuses the right certificate too: {came}")
    table.head(HEAD)
    for service, container in site.running.items():
        entered = "" if is_ours(container) else f" (no Python: by a container of {IMAGE} that enters it)"
        holds = ", ".join(name for name in SECRETS if service in site.holders(name))
        table.head(f"from {service}{entered}; it holds: {holds or 'no secret'}")
        for row in site.play(service, PROBE, site.told(service)):
            table.row(*row)
        written = container.exec_run(["sh", "-c", ": > /planted"])
        said = written.output.decode().strip()
        table.row("/", "write there by its own shell", said if written.exit_code else f"{DONE}: {said}")
        if PAIR[0] in site.files[service]:
            rows, let_in = site.play(service, CALLS, site.calls())
            for row in rows:
                table.row(*row)
            refused = [one for one in let_in if one[-1] != "OK"]
            need(not refused, f"what {service} may is refused as well: {refused}")


@contextlib.contextmanager
def slice_image(site: Besieged) -> Iterator[str]:
    """An image that has Triton where an agent looks for it, as NVIDIA's; at the end nothing of its slices is left."""
    name = f"{site.containers.project}-slice"
    triton = "/opt/triton/lib/python3.*/site-packages/pytriton/tritonserver"
    text = f"FROM {TRITON_IMAGE}\nUSER 0\nRUN ln -s {triton} /opt/tritonserver\nUSER 10001:10001\n"
    filtered = nft("list") == 0
    site.client.images.build(fileobj=io.BytesIO(text.encode()), tag=name, network_mode="none", rm=True)
    try:
        yield name
    finally:
        for container in site.slices():
            container.remove(v=True, force=True)
        for network in site.client.networks.list(filters=SLICE_LABELS):
            network.remove()
        site.client.images.remove(name, force=True)
        if not filtered:
            nft("delete")


def nft(verb: str) -> int:
    """Exit code of a command on the packet filter's table."""
    return subprocess.run(["nft", verb, "table", "inet", "trefoil"], capture_output=True, check=False).returncode


def from_a_slice(site: Besieged, table: Table, image: str) -> None:
    """From a slice's container, beside another one's."""
    table.head(f"model code in a slice's container (runtime docker, {TRITON_IMAGE}), beside another slice's")
    settings = PowerAgentSettings(cluster=CLUSTER, node=SLICE_NODE, docker_image=image, docker_gpu="none")
    runtime = DockerRuntime(docker_engine.Engine(site.url), settings)
    runtime.image()
    runtime.missing(gpus=False)  # loads the packet filter where it is missing, as an agent does
    for row in rows_of_a_container(site.client, runtime, site.folder, site.told(""), free_ports(2)):
        table.row(*row)
    reached = runtime.missing(gpus=False).get("isolate", "")
    table.row("this host, the other slice", "open a connection", f"{DONE}: {reached}" if reached else "nothing arrives")


# --- secrets ---------------------------------------------------------------------------------------------------------


def secrets_kept(site: Besieged, table: Table) -> None:
    """Each secret is with those who need it, and nowhere else."""
    table.head("secrets of the deployment")
    api, containers = site.client.api, [*site.by_service.values(), *site.slices()]
    images = {one.attrs["Image"] for one in containers}
    inspected = [*map(api.inspect_image, images), *(api.inspect_container(one.id) for one in containers)]
    places = {
        "docker history": [json.dumps(api.history(image)).encode() for image in images],
        "docker inspect": [json.dumps(one).encode() for one in inspected],
        "docker logs": [one.logs() for one in containers],
        "ps": [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if readable(path)],
    }
    commands = b"\n".join(places["ps"])
    need(b"trefoil.simulated_node" in commands and b"redis-server" in commands, "ps does not show what the engine runs")
    for name, (_, holders) in SECRETS.items():
        for where, texts in places.items():
            found = sum(site.secrets[name] in text for text in texts)
            table.row(name, where, f"{DONE}: {found} times" if found else f"not in {len(texts)} of them")
        having = site.holders(name)
        need(having >= holders, f"{name} is not found with {holders - having}, who have it")
        more = having - holders
        table.row(
            name,
            "volumes of other services",
            f"{DONE}: {more}" if more else f"with {len(holders)} of {len(site.running)} alone",
        )


# --- images, users ---------------------------------------------------------------------------------------------------


def images_hold(site: Besieged, table: Table) -> None:
    """No compiler, no installer, no file that lends its caller another user's rights."""
    names = {one.attrs["Config"]["Image"] for one in site.running.values()}
    pulled = {name for name in names if site.client.images.get(name).attrs["RepoDigests"]}
    table.head(f"images that were built{f'; of a registry, and not looked into: {pulled}' if pulled else ''}")
    _, *planted = contents(site.client, IMAGE, planted_archive())
    need(planted == [[name] for name in PLANTED], f"of what was planted only {planted} is found")
    for name in sorted(names - pulled):
        count, lending, tools = contents(site.client, name)
        for tried, found in (("setuid, setgid, capabilities", lending), ("compiler, linker, make, pip", tools)):
            table.row(name, tried, f"{DONE}: {found}" if found else f"none of {count} files")


def contents(client: Any, image: str, archive: bytes = b"") -> tuple[int, list[str], list[str]]:
    """How many files an image has, which of them lend rights, and which are tools; `archive`: put there before."""
    container, count, lending, tools = client.containers.create(image), 0, [], []
    try:
        if archive:
            container.put_archive("/opt", archive)
        with tempfile.TemporaryFile() as file:
            file.writelines(container.export())
            file.seek(0)
            with tarfile.open(fileobj=file) as tar:
                for one in tar:
                    count += one.isfile()
                    if one.isfile() and (one.mode & SET_ID or CAPABILITY in one.pax_headers):
                        lending.append(one.name)
                    if (TOOL.fullmatch(PurePosixPath(one.name).name) and not one.isdir()) or one.name.endswith(PIP):
                        tools.append(one.name)
    finally:
        container.remove(v=True)
    return count, lending, tools


def planted_archive() -> bytes:
    """A file that is set-uid, and a compiler."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, mode in PLANTED.items():
            file = tarfile.TarInfo(name.removeprefix("opt/"))
            file.mode = mode
            tar.addfile(file)
    return data.getvalue()


def nobody_is_root(site: Besieged, table: Table) -> None:
    """No process is root's, and by the file, with every profile, none would be but the agent of real GPUs."""
    table.head("users, and what the Compose file asks for with every profile")
    root = site.client.containers.run(
        IMAGE, ["sleep", "600"], user="0:0", network_mode="none", detach=True, labels={CLUSTER_LABEL: CLUSTER}
    )
    need(bool(roots(root)), "a container of root is not found")
    root.remove(force=True)
    for one in [*site.running.values(), *(one for one in site.slices() if one.status == "running")]:
        found = roots(one)
        table.row(one.name, "processes of root", f"{DONE}: {found}" if found else "none")
    site.containers.env["COMPOSE_PROFILES"] = "gpu,dashboards"
    services = yaml.safe_load(site.compose("config"))["services"]
    asked = {
        "be root": {one for one, told in services.items() if str(told.get("user", "")).partition(":")[0] in ROOTS},
        "a capability": {f"{one} {added}" for one, told in services.items() for added in told.get("cap_add", ())},
        "all of them, or a root to write to": {one for one, told in services.items() if not is_confined(told)},
        "the engine's socket": {one for one, told in services.items() if "docker.sock" in str(told.get("volumes"))},
    }
    for tried, who in asked.items():
        more = who - ALLOWED[tried]
        need(who >= ALLOWED[tried], f"{tried}: only {who} of {ALLOWED[tried]}")
        table.row("docker-compose.yml", tried, f"{DONE}: {more}" if more else f"{', '.join(who) or 'nobody'} alone")


def roots(container: Any) -> list[str]:
    """Commands in a container that run as root, as this host numbers users."""
    processes = container.top(ps_args="-eo pid,uid,args")["Processes"]
    need(bool(processes), f"nothing runs in {container.name}")
    return [command for _, uid, command in processes if uid == "0"]


def is_confined(service: Mapping[str, Any]) -> bool:
    """Whether a service of the Compose file has no capability, no way to get one, and a root that is only read."""
    given = service.get("privileged"), service.get("cap_drop"), service.get("read_only")
    return given == (None, ["ALL"], True) and "no-new-privileges:true" in service.get("security_opt", ())


# --- all of it -------------------------------------------------------------------------------------------------------


async def play(folder: Path, containers: Containers, arguments: argparse.Namespace) -> bool:
    """Start the deployment, try everything, and print its outcome."""
    print(await asyncio.to_thread(containers.images if arguments.no_build else containers.build), flush=True)
    site, table = Besieged(folder, containers), Table()
    try:
        print(await compose.start(site), flush=True)
        await site.freeze()
        await asyncio.to_thread(site.look)
        await asyncio.to_thread(from_services, site, table)
        with slice_image(site) as image:
            await asyncio.to_thread(from_a_slice, site, table, image)
            await asyncio.to_thread(secrets_kept, site, table)
            await asyncio.to_thread(nobody_is_root, site, table)
        await asyncio.to_thread(images_hold, site, table)
    except Broken as error:
        print(f"BROKEN: {error}")
        (folder / "compose.log").write_text(containers.compose("logs", "--no-color"))
        return False
    finally:
        containers.compose("down", "-v")
    return table.verdict()


def main() -> int:
    """Play it on an engine."""
    return compose.play_on_an_engine(
        "security", argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]), play
    )


if __name__ == "__main__":
    sys.exit(main())
