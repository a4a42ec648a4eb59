"""Host as the doctor sees it: device files, containers, control groups, permissions, time, ports. Reads only."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from power_agent.devices.rapl import RaplUnavailable, find_zones
from power_agent.doctor.findings import Finding, broken, of_reason, unknown, works
from power_agent.runtimes.gpu_access import KIND, RUNTIME, TOOLKIT, refusal_of, specifications
from power_agent.settings import PowerAgentSettings
from power_agent.triton.slice_launch import PORTS_PER_GPU
from trefoil import direct
from trefoil.core.errors import PortInUse, StateUnavailable, TrefoilError
from trefoil.runtime.clock import Clock
from trefoil.runtime.rpc import check_port, split_address
from trefoil.runtime.service import OFFSET_ERROR_S, OFFSET_WARN_S
from trefoil.runtime.state import State

CONTROLLERS: Final = frozenset({"cpu", "cpuset"})
PROBE_S: Final = 1.0
AS_ROOT: Final = "look as the agent's user: sudo trefoil node doctor"


def check_device_files(root: Path) -> list[Finding]:
    """Check what CUDA needs beside the driver: nothing of ours loads nvidia-uvm."""
    if (root / "dev/nvidia-uvm").exists():
        return [works("nvidia-uvm", "/dev/nvidia-uvm is there")]
    remedy = "nvidia-modprobe -u -c=0; at each boot: echo nvidia-uvm > /etc/modules-load.d/nvidia-uvm.conf"
    return [broken("nvidia-uvm", "no /dev/nvidia-uvm: CUDA cannot start", remedy)]


def check_containers(
    settings: PowerAgentSettings, engine_info: Callable[[], Mapping[str, Any]], root: Path, gpus: int
) -> list[Finding]:
    """Check the Docker engine and NVIDIA's toolkit. `engine_info`: what `docker info` tells; raises TrefoilError."""
    if settings.runtime_name != "docker":
        seen = f"not needed: runtime = {settings.runtime_name}"
        return [works("engine", seen), works("toolkit", seen)]
    try:
        info = engine_info()
    except TrefoilError as error:
        return [of_reason("engine", error, ""), unknown("toolkit", "no engine answers")]
    found = [works("engine", f"Docker {info.get('ServerVersion', 'of unknown version')}")]
    if info.get("LiveRestoreEnabled") is False:
        remedy = 'set "live-restore": true in /etc/docker/daemon.json, then systemctl reload docker'
        found = [broken("engine", f"{found[0].seen}: a restart of it ends all slices", remedy)]
    return [*found, _toolkit(settings, info, root, gpus)]


def _toolkit(settings: PowerAgentSettings, info: Mapping[str, Any], root: Path, gpus: int) -> Finding:
    if settings.docker_gpu == "none" or not gpus:
        return works("toolkit", "not needed: containers get no GPU")
    if (refusal := refusal_of(settings.docker_gpu, info)) is not None:
        return of_reason("toolkit", refusal, "")
    if settings.docker_gpu != "cdi" and RUNTIME in (info.get("Runtimes") or {}):
        return works("toolkit", f"the engine has the runtime {RUNTIME}")
    folders = [root / str(folder).lstrip("/") for folder in info.get("CDISpecDirs") or ()]
    if specifications(folders):
        return works("toolkit", f"CDI specifications of {KIND} in {', '.join(map(str, folders))}")
    return broken("toolkit", f"the engine knows neither a runtime {RUNTIME} nor a CDI specification of {KIND}", TOOLKIT)


def check_cgroups(settings: PowerAgentSettings, root: Path) -> Finding:
    """Check whether CPU slices can be had: control groups, and the right to make them."""
    if settings.cpu != "serve":
        return works("cgroups", f"not needed: cpu = {settings.cpu}")
    tree = root / "sys/fs/cgroup"
    parent = settings.cgroup_parent
    folder = parent or tree
    if (tree / "cgroup.controllers").is_file():
        if parent is not None and not parent.is_dir():
            return broken("cgroups", f"no folder {parent}", f"mkdir {parent}")
        missing = CONTROLLERS - set((folder / "cgroup.controllers").read_text().split())
        if missing:
            remedy = f"echo '+cpu +cpuset' > {folder.parent if parent else folder}/cgroup.subtree_control"
            return broken("cgroups", f"{folder} does not have {', '.join(sorted(missing))}", remedy)
        return _writable("cgroups", folder, "version 2, with cpu and cpuset")
    if all((tree / name).is_dir() for name in CONTROLLERS):
        return _writable("cgroups", tree / "cpu", "version 1, with cpu and cpuset")
    return broken("cgroups", f"no cgroup tree at {tree}", "mount -t cgroup2 none /sys/fs/cgroup")


def check_permissions(settings: PowerAgentSettings, rights: tuple[str, str], gpus: int) -> list[Finding]:
    """Check what the user of this process may do; the agent may be another, and then have other rights."""
    not_root, no_mig_device = rights
    found = [works("root", "not needed: no GPU"), works("MIG device", "not needed: no GPU")]
    if gpus:
        found = [
            of_reason("root", not_root and f"{not_root}; {AS_ROOT}", "clocks and instances may be changed"),
            of_reason("MIG device", no_mig_device, "may be opened"),
        ]
    return [*found, _state_dir(settings.state_dir), _rapl(settings)]


def _state_dir(folder: Path) -> Finding:
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return _writable("state_dir", there, str(folder.absolute()))


def _writable(subject: str, folder: Path, seen: str) -> Finding:
    if os.access(folder, os.W_OK):
        return works(subject, seen)
    return broken(subject, f"{folder} cannot be written by uid {os.geteuid()}", AS_ROOT)


def _rapl(settings: PowerAgentSettings) -> Finding:
    if settings.cpu == "off":
        return works("CPU joules", "not needed: cpu = off")
    try:
        return works("CPU joules", f"{len(find_zones(settings.powercap_root))} packages")
    except RaplUnavailable as error:
        if next(settings.powercap_root.glob("intel-rapl:*"), None) is None:
            return unknown("CPU joules", error.message)
        return of_reason("CPU joules", error, "")


async def check_time(settings: PowerAgentSettings, clock: Clock) -> Finding:
    """Check this clock against that of Redis, by which all services compare theirs."""
    state = State.connect(settings.redis_url, settings.cluster, clock=clock)
    try:
        offset_s = await state.clock_offset_s()
    except StateUnavailable as error:
        return unknown("time", f"Redis does not answer: {error.message}", "redis_url: start it, or name the right one")
    finally:
        await state.close()
    if abs(offset_s) > OFFSET_WARN_S:
        worse = ", an error from 2 s on" if abs(offset_s) <= OFFSET_ERROR_S else ""
        return broken("time", f"{offset_s:+.3f} s to Redis' clock{worse}", "chronyc tracking; timedatectl set-ntp true")
    return works("time", f"{offset_s:+.3f} s to Redis' clock")


def check_ports(settings: PowerAgentSettings, gpus: int) -> list[Finding]:
    """Check the agent's ports and the range of its Tritons, which an agent that runs has taken itself."""
    running = _is_agent(settings.metrics_address)
    base = settings.triton_port_base
    last = base + max(gpus, 1) * PORTS_PER_GPU - 1
    host = split_address(settings.admin_address)[0]
    named = {
        "admin port": [settings.admin_address],
        "metrics port": [settings.metrics_address],
        f"Triton ports {base}-{last}": [f"127.0.0.1:{port}" for port in range(base, last + 1)],
    }
    found = [works("agent", f"one runs: {settings.metrics_address} answers" if running else "none runs here")]
    for subject, addresses in named.items():
        try:
            taken = [address for address in addresses if _taken(address)]
        except TrefoilError as error:
            found.append(broken(subject, error.message, f"name an address of this host instead of {host}"))
            continue
        if taken and not running:
            port = split_address(taken[0])[1]
            who = f"ss -ltnp 'sport = :{port}'; end what listens, or set another"
            found.append(broken(subject, f"a process listens on {', '.join(taken)}", who))
        else:
            found.append(works(subject, f"{', '.join(taken)}: the agent's" if taken else "free"))
    return found


def _taken(address: str) -> bool:
    try:
        check_port(address)
    except PortInUse:
        return True
    return False


def _is_agent(metrics_address: str) -> bool:
    """Whether the metrics of a power agent are served there."""
    host, port = split_address(metrics_address)
    reach = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # asked, not listened on
    url = f"http://{f'[{reach}]' if ':' in reach else reach}:{port}/metrics"
    try:
        with direct.open_url(url, PROBE_S) as answer:
            return b"trefoil_" in answer.read()
    except (OSError, ValueError):
        return False
