"""Factory of the runtime that a node's settings ask for, and of the Triton installation that it starts."""

import hashlib
import os
import socket
from pathlib import Path
from typing import Final

import structlog

from power_agent.devices.gpus import boot_id
from power_agent.devices.node_client import NodeClient, peer_pid
from power_agent.runtimes.base import Runtime
from power_agent.runtimes.cgroup import find_cgroups
from power_agent.runtimes.confinement import Confinement, find_confinement
from power_agent.runtimes.docker import DockerRuntime
from power_agent.runtimes.docker_engine import Engine
from power_agent.runtimes.kubernetes import KubernetesRuntime
from power_agent.runtimes.kubernetes_api import ApiServer
from power_agent.runtimes.process import ProcessRuntime
from power_agent.runtimes.simulated_node import NodeRuntime, SplitRuntime
from power_agent.settings import PowerAgentSettings
from power_agent.triton.installation import TritonInstall, find_triton, prepare_triton, with_backend
from trefoil.core.errors import SettingError
from trefoil.runtime.clock import WallClock
from trefoil.runtime.rpc import is_loopback


def build_runtime(settings: PowerAgentSettings, client: NodeClient | None) -> Runtime:
    """Build the runtime that `settings.runtime` names; `client` is that of the simulated node, if there is one.

    Raises:
        SettingError: it needs something that the settings do not give.
    """
    match settings.runtime_name:
        case "node":
            if client is None:
                remedy = "set node_socket to that of a simulated node, or runtime to process or docker"
                raise SettingError("no simulated node is named", field="runtime", value="node", remedy=remedy)
            confinement = confine(settings)
            node = NodeRuntime(client, confinement)
            return SplitRuntime(node, build_process_runtime(settings, confinement)) if settings.cpu == "serve" else node
        case "docker":
            if not settings.docker_image:
                remedy = "set docker_image to an image with a tritonserver, or runtime to process"
                raise SettingError("no image is named", field="runtime", value="docker", remedy=remedy)
            return DockerRuntime(Engine(settings.docker_url), settings)
        case "kubernetes":
            return build_kubernetes_runtime(settings)
        case _:
            return build_process_runtime(settings, confine(settings))


def build_kubernetes_runtime(settings: PowerAgentSettings) -> KubernetesRuntime:
    """Build the runtime of pods.

    Raises:
        SettingError: it needs something that the settings do not give, or cannot do what they ask for.
    """
    for field, what in (("kubernetes_image", "an image with a tritonserver"), ("kubernetes_pod", "this agent's pod")):
        if not getattr(settings, field):
            remedy = f"set it to {what}, as the chart does; or set runtime to process"
            raise SettingError("missing", field=field, value="", remedy=remedy)
    if settings.cpu == "serve":
        remedy = "set runtime to process, or cpu to meter"
        raise SettingError(
            "a pod cannot be pinned to the cores of a slice of CPUs", field="cpu", value="serve", remedy=remedy
        )
    return KubernetesRuntime(ApiServer(settings.kubernetes_url, settings.kubernetes_account), settings)


SHARED: Final = (
    "not isolated from each other: models of all slices run as one user, in the container of the simulated node. "
    "Remedy: none, it holds nothing but them"
)


def confine(settings: PowerAgentSettings) -> Confinement:
    """Confinement of Tritons that are processes of this host, or of a simulated node's container.

    Raises:
        SettingError: it is demanded and cannot be had, or what is not isolated would be reached from other machines.
    """
    if settings.triton_user != "own" and settings.node_socket and is_in_another_container(settings.node_socket):
        return Confinement(missing=SHARED)
    confinement = find_confinement(settings.triton_user, settings.triton_uid_base, settings.state_dir)
    for field, address in (("admin_address", settings.admin_address), ("triton_listen", f"{settings.triton_listen}:0")):
        if confinement.missing and not is_loopback(address):
            why, _, remedy = confinement.missing.partition(". Remedy: ")
            raise SettingError(
                f"{why}, and others reach it",
                field=field,
                value=getattr(settings, field),
                remedy=f"{remedy}; or listen on 127.0.0.1",
            )
    return confinement


def is_in_another_container(node_socket: Path) -> bool:
    """Whether the simulated node that listens there is in another PID namespace than this process: then its Tritons see
    none of what the agent has."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(node_socket))
        except OSError:
            return False  # no process listens: the caller that waits for the node reports it
        return peer_pid(connection) == 0


def build_process_runtime(settings: PowerAgentSettings, confinement: Confinement) -> ProcessRuntime:
    """Build the runtime of host processes. Says once what the host's control groups cannot do."""
    # Several agents of one host (tests, two clusters) must not share groups: their slices have the same names.
    name = hashlib.sha256(os.fsencode(settings.state_dir.absolute())).hexdigest()[:8]
    cgroups = find_cgroups(name, settings.cgroup_parent)
    for controller, why in cgroups.missing.items():
        structlog.get_logger().info("no control groups", controller=controller, why=why)
    owner = f"{settings.cluster}/{settings.node}"
    folder, log_mib = settings.state_dir / "runtime", settings.triton_log_mib
    return ProcessRuntime(folder, cgroups, WallClock(), boot_id(), confinement, owner=owner, log_mib=log_mib)


def missing_resources(runtime: Runtime) -> dict[str, str]:
    """Resources that CPU slices cannot have by this runtime: name -> why and remedy."""
    return runtime.missing_resources if isinstance(runtime, ProcessRuntime | SplitRuntime) else {}


def install_triton(settings: PowerAgentSettings, runtime: Runtime) -> TritonInstall:
    """Installation of the tritonserver that a runtime starts, made usable. Blocking.

    Raises:
        StartError: naming what is missing and what brings it.
        Unavailable: the Docker engine does not answer.
    """
    wanted, simulated = settings.triton_backend, settings.runtime_name == "node"
    if isinstance(runtime, DockerRuntime | KubernetesRuntime):
        return with_backend(runtime.install(), wanted, simulated=simulated)
    install = with_backend(
        find_triton(settings.triton_binary, settings.triton_environment), wanted, simulated=simulated
    )
    prepare_triton(install)
    return install
