"""Examination of a node: all that the doctor looks at, by the settings of an agent that need not run. Reads only."""

import asyncio
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from power_agent.devices.gpus import driver_load_id
from power_agent.devices.inventory import Inventory
from power_agent.devices.nvml_shim import install_simulated_node
from power_agent.doctor import host
from power_agent.doctor.findings import Finding, Verdict, of_reason, unknown, works
from power_agent.doctor.gpus import check_gpus
from power_agent.doctor.hardware_report import cpu_report
from power_agent.doctor.kubernetes import check_rivals
from power_agent.runtimes.confinement import find_confinement
from power_agent.runtimes.docker_engine import Engine
from power_agent.runtimes.kubernetes_api import ApiServer
from power_agent.settings import PowerAgentSettings
from power_agent.triton.installation import find_triton
from power_agent.watch.capabilities import effective_root, mig_device
from trefoil.core.errors import BinaryMissing, SettingError
from trefoil.runtime.clock import WallClock
from trefoil.runtime.config import masked

ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True)
class Examination:
    """What the doctor found, and what the driver tells of its GPUs, for bug reports (None: it does not answer)."""

    findings: tuple[Finding, ...]
    hardware: Mapping[str, Any] | None
    simulated: bool
    settings: Mapping[str, Any]  # without secrets

    @property
    def healthy(self) -> bool:
        """Whether nothing was found that does not work."""
        return all(one.verdict != Verdict.BROKEN for one in self.findings)

    def document(self) -> dict[str, Any]:
        """JSON document of the examination."""
        return {
            "simulated": self.simulated,
            "versions": {"python": platform.python_version(), "kernel": platform.release()},
            "settings": self.settings,
            "healthy": self.healthy,
            "findings": [asdict(one) for one in self.findings],
            "hardware": self.hardware,
        }


def examine(settings: PowerAgentSettings, root: Path = ROOT) -> Examination:
    """Examine this machine, or the simulated node of the settings. Blocking for a second or two.

    Raises:
        TrefoilError: the simulated node does not answer.
    """
    clock = WallClock()
    client = install_simulated_node(settings.node_socket) if settings.node_socket else None
    rights = ("", "") if client else (effective_root(root / "proc"), mig_device(root / "proc", root / "dev"))
    inventory = Inventory(settings.node, None if client else root / "proc")
    cpu_serves = settings.cpu == "serve"
    found, report = check_gpus(inventory, root, clock.block, rights, cpu_serves=cpu_serves)
    gpus = 0 if report is None else len(report["devices"])
    hardware = report
    if client is not None:
        client.close()
    else:
        hardware = {
            **(report or {}),
            "driver_load_id": driver_load_id(settings.driver_marker),
            "cpu": cpu_report(settings.node, settings.powercap_root, clock),
        }
        found += host.check_device_files(root) if gpus else []
        found += check_rivals(settings.node, _node_reader(settings), root)
    found += host.check_containers(settings, Engine(settings.docker_url).info, root, gpus)
    found += [_triton(settings), _isolation(settings), host.check_cgroups(settings, root)]
    found += host.check_permissions(settings, rights, gpus)
    found += [asyncio.run(host.check_time(settings, clock)), *host.check_ports(settings, gpus)]
    return Examination(tuple(found), hardware, client is not None, masked(settings))


def _node_reader(settings: PowerAgentSettings) -> Callable[[], Mapping[str, Any]] | None:
    """Reader of this node from the API server; None where this process is not an agent's pod with the right to."""
    if settings.runtime_name != "kubernetes":
        return None

    def read() -> Mapping[str, Any]:
        api = ApiServer(settings.kubernetes_url, settings.kubernetes_account)
        try:
            found: Mapping[str, Any] = api.call("looking at this node", "GET", f"/api/v1/nodes/{settings.node}").json()
            return found
        finally:
            api.close()

    return read


def _triton(settings: PowerAgentSettings) -> Finding:
    if settings.runtime_name != "process":
        return works("Triton", f"not needed on this host: runtime = {settings.runtime_name}")
    try:
        return works("Triton", str(find_triton(settings.triton_binary, settings.triton_environment).binary))
    except BinaryMissing as error:
        return of_reason("Triton", error, "")


def _isolation(settings: PowerAgentSettings) -> Finding:
    if settings.runtime_name == "docker":
        seen = "an agent that runs tries it from a container: `cannot: isolate` of trefoil node show"
        return unknown("isolation", seen)
    if settings.runtime_name == "kubernetes":
        return unknown("isolation", "of pods: by the chart's NetworkPolicy, where the cluster's network enforces it")
    try:
        why = find_confinement(settings.triton_user, settings.triton_uid_base, settings.state_dir).missing
    except SettingError as error:
        why = str(error)
    return of_reason("isolation", why, f"each slice has a user of its own, from {settings.triton_uid_base} on")
