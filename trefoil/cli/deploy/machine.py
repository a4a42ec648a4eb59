"""This machine as a Compose deployment needs it: what is seen, and what is refused, in one line with its remedy."""

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from power_agent.devices.errors import DeviceError
from power_agent.devices.inventory import Inventory
from power_agent.runtimes.docker_engine import Engine
from power_agent.runtimes.factory import build_runtime, install_triton
from power_agent.runtimes.gpu_access import RUNTIME, TOOLKIT, specifications
from power_agent.settings import PowerAgentSettings
from trefoil.core.errors import PortInUse, SettingError, StartError, TrefoilError
from trefoil.runtime import rpc
from trefoil.runtime.repository import load_catalog

COMPOSE_LEAST: Final = (2, 3)
GIB: Final = 2**30
SOCKET: Final = Path("/var/run/docker.sock")
OTHERS: Final = 0o004
WORKING_DIR: Final = "com.docker.compose.project.working_dir"
LOOK: Final = (
    "from pathlib import Path; from power_agent.triton.installation import find_triton; "
    "find_triton(None, Path('/opt/triton'))"
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the operator asks for."""

    profile: str = ""
    models: Path = Path("model_repository")
    node: str = "node0"
    advertise_host: str = ""
    redis_url: str = ""
    image: str = ""
    given: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SeenMachine:
    """What was seen. `own_ports`: those that this deployment has taken itself."""

    cores: int
    memory_gib: float
    address: str
    driver: str  # "" = none
    gpus: int
    engine: str  # version; "" = none answers
    engine_trouble: str
    toolkit: bool
    compose: str  # version; "" = none
    own_ports: tuple[int, ...] = ()
    docker_group: int = 0  # of the engine's socket

    @property
    def lines(self) -> tuple[str, ...]:
        """What was seen, in words."""
        gpus = f"driver {self.driver}, {self.gpus} GPUs" if self.driver else "no NVIDIA driver"
        return (
            f"{self.cores} cores, {self.memory_gib:.0f} GiB of memory, address {self.address}",
            f"{gpus}; {'a' if self.toolkit else 'no'} container toolkit",
            f"Docker engine {self.engine or 'does not answer'}, Compose {self.compose or 'is not installed'}",
        )


def look(folder: Path) -> SeenMachine:
    """Look at this machine; changes nothing."""
    engine, info, trouble = Engine(), dict[str, Any](), ""
    ports: tuple[int, ...] = ()
    try:
        info = dict(engine.info())
        ports = _ports_of(engine, folder)
    except TrefoilError as error:
        trouble = str(error)
    driver, gpus = _driver()
    return SeenMachine(
        cores=os.cpu_count() or 1,
        memory_gib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB,
        address=_address(),
        driver=driver,
        gpus=gpus,
        engine=str(info.get("ServerVersion", "")),
        engine_trouble=trouble,
        toolkit=RUNTIME in (info.get("Runtimes") or {})
        or bool(specifications([Path(place) for place in info.get("CDISpecDirs") or ()])),
        compose=_compose_version(),
        own_ports=ports,
        docker_group=SOCKET.stat().st_gid if SOCKET.exists() else 0,
    )


def check(wanted: Wanted, values: Mapping[str, str], machine: SeenMachine) -> None:
    """Refuse what could not start.

    Raises:
        TrefoilError: the first thing that is wrong: field, value and remedy.
    """
    if not values["TREFOIL_REDIS_PASSWORD"]:
        raise SettingError("empty", field="TREFOIL_REDIS_PASSWORD", value="", remedy="leave it out, and one is drawn")
    _check_redis_url(values["TREFOIL_REDIS_URL"])
    if machine.engine_trouble:
        raise StartError(machine.engine_trouble)
    _check_compose(machine.compose)
    _check_ports(values, machine)
    _check_models(Path(values["TREFOIL_MODELS"]))
    if wanted.profile == "gpu":
        _check_gpus(machine)
        settings = PowerAgentSettings(docker_image=values["TREFOIL_TRITON_IMAGE"], runtime="docker")
        install_triton(settings, build_runtime(settings, None))
    else:
        _check_cpu_image(f"trefoil-triton-cpu:{values['TREFOIL_TAG']}")


def _check_redis_url(url: str) -> None:
    if not url:
        return
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    remedy = "write rediss://HOST:PORT; the password comes with `secrets import`, where no `docker inspect` shows it"
    if parts.password is not None or parts.username is not None:
        why = "an empty password" if parts.password == "" else "holds a password"
        raise SettingError(why, field="TREFOIL_REDIS_URL", value=url.replace(parts.netloc, "***"), remedy=remedy)
    if parts.scheme != "rediss" or not parts.hostname:
        shown = url.rpartition("@")[2]
        raise SettingError("no address of a Redis over TLS", field="TREFOIL_REDIS_URL", value=shown, remedy=remedy)


def _check_compose(version: str) -> None:
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < COMPOSE_LEAST:
        why = "too old" if found else "neither `docker compose` nor docker-compose is here"
        remedy = "install Compose v2 (Docker's package docker-compose-plugin; Debian 13: docker-compose)"
        raise SettingError(why, field="compose", value=version, remedy=remedy)


def _check_ports(values: Mapping[str, str], machine: SeenMachine) -> None:
    control = values["TREFOIL_CONTROL"] != "0"
    names = (
        ["TREFOIL_GRPC_PORT", "TREFOIL_REST_PORT", "TREFOIL_PROMETHEUS_PORT", "TREFOIL_REDIS_PORT"] if control else []
    )
    for name in names:
        bind = values["TREFOIL_REDIS_BIND" if name == "TREFOIL_REDIS_PORT" else "TREFOIL_BIND"]
        port = values[name]
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise SettingError("no port", field=name, value=port, remedy="1 to 65535")
        if int(port) in machine.own_ports:
            continue
        try:
            rpc.check_port(f"{bind}:{port}")
        except PortInUse as error:
            remedy = f"stop what listens there (ss -ltnp), or --set {name}={int(port) + 10}"
            raise PortInUse("taken", field=name, value=port, remedy=remedy) from error


def _check_models(folder: Path) -> None:
    if not folder.is_dir():
        remedy = "--models FOLDER; model_repository of the checkout has one family with weights"
        raise SettingError("no such model repository", field="TREFOIL_MODELS", value=str(folder), remedy=remedy)
    if not load_catalog(folder).families:
        raise SettingError("no family in it", field="TREFOIL_MODELS", value=str(folder), remedy="docs/adopt.md")
    closed = next((path for path in folder.rglob("*") if path.is_file() and not path.stat().st_mode & OTHERS), None)
    if closed is not None:
        why = f"the user of the containers cannot read {closed.relative_to(folder)}"
        raise SettingError(why, field="TREFOIL_MODELS", value=str(folder), remedy=f"chmod -R o+rX {folder}")


def _check_gpus(machine: SeenMachine) -> None:
    if not machine.driver or not machine.gpus:
        why = f"driver {machine.driver} lists no GPU" if machine.driver else "no NVIDIA driver on this machine"
        remedy = "load it until `nvidia-smi -L` lists the GPUs; or leave --profile out: GPUs are simulated"
        raise SettingError(why, field="--profile", value="gpu", remedy=remedy)
    if not machine.toolkit:
        why = "the engine knows neither NVIDIA's runtime nor a CDI specification of it"
        raise SettingError(why, field="--profile", value="gpu", remedy=TOOLKIT)


def _check_cpu_image(image: str) -> None:
    """An image that is not here yet is built by `up`."""
    if not Engine().query("images", lambda api: api.images(name=image)):
        return
    argv = ["docker", "run", "--rm", "--network=none", "--entrypoint=python3", image, "-c", LOOK]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        said = next(iter(done.stderr.strip().splitlines()), "it says nothing")
        remedy = "docker compose build, or an image of target triton-cpu of deploy/Dockerfile"
        raise SettingError(f"no Triton in it ({said})", field="image", value=image, remedy=remedy)


def _driver() -> tuple[str, int]:
    inventory = Inventory("here")
    try:
        inventory.open()
        return inventory.driver_version(), len(inventory.list_devices())
    except DeviceError:
        return "", 0
    finally:
        inventory.close()


def _compose_version() -> str:
    for argv in (["docker", "compose"], ["docker-compose"]):
        try:
            done = subprocess.run([*argv, "version", "--short"], capture_output=True, text=True)
        except OSError:
            continue
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


def _address() -> str:
    """The address by which this machine reaches others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _ports_of(engine: Engine, folder: Path) -> tuple[int, ...]:
    filters = {"label": f"{WORKING_DIR}={folder}"}
    rows = engine.query("containers", lambda api: api.containers(filters=filters))
    return tuple({port["PublicPort"] for row in rows for port in row["Ports"] if "PublicPort" in port})
