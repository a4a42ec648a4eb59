"""Tritons in Docker containers: one per slice, with that slice's device or cores and nothing else of the machine.

They have a separate network, from which they answer and never ask (slice_network.py); their ports are published.

A container is found by its labels (cluster, node, tag), so it outlives the agent and is adopted by the next one. The
engine never restarts one by itself: the agent does, and it alone knows whether the slice still exists. Containers are
stopped where the engine stops, unless the engine runs with `live-restore`.
"""

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import docker.errors
import docker.types
import structlog

from power_agent.runtimes.base import RunningTriton
from power_agent.runtimes.confinement import make_readable
from power_agent.runtimes.docker_engine import (
    LABEL,
    Engine,
    TritonImage,
    find_image,
    object_name,
    refusal_error,
    wait_for_exit,
)
from power_agent.runtimes.gpu_access import GpuAccess
from power_agent.runtimes.slice_network import NOWHERE, SliceNetwork
from power_agent.settings import PowerAgentSettings
from power_agent.triton.installation import TritonInstall
from power_agent.triton.slice_launch import SliceLaunch
from trefoil.core.errors import StartError, Unavailable
from trefoil.runtime.clock import WallClock
from trefoil.runtime.files import rotate_log

# What the host's environment says of the host's file system means nothing in a container.
HOST_ONLY: Final = frozenset({"PATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR"})
ALIVE: Final = frozenset({"running", "paused", "restarting"})
NOBODY: Final = "65534:65534"
PIDS_MAX: Final = 4096
TMP_MIB: Final = 256
LOG_FILES: Final = 2
LAST_LINES: Final = 2000  # of a container's log, kept when the container goes
LOOK_PERIOD_S: Final = 300.0
LOOK_AGAIN_S: Final = 30.0  # where it was found wanting
KILLED_S: Final = 30.0  # SIGKILL of a process in an uninterruptible call takes as long as that call
SIGNALLED: Final = 128  # an engine reports an end by signal n as exit code 128 + n
MIB: Final = 2**20
NANO: Final = 1_000_000_000


class DockerRuntime:
    """Runtime of Tritons in Docker containers, as the agent's settings say. Thread-safe."""

    name = "docker"

    def __init__(self, engine: Engine, settings: PowerAgentSettings) -> None:
        self._engine, self._settings = engine, settings
        self._gpus = GpuAccess(engine, settings.docker_gpu, settings.docker_cdi_refresh)
        self._network = SliceNetwork(engine, settings.cluster, settings.node)
        self._clock, self._not_isolated, self._looks_again_s = WallClock(), "", 0.0
        self._image: TritonImage | None = None
        self._lock = threading.Lock()
        # container id -> (its summary, what inspect said then)
        self._inspections: dict[str, tuple[str, dict[str, Any]]] = {}
        self._log = structlog.get_logger()
        if settings.docker_gpu == "none":
            self._log.warning("containers get no GPU", docker_gpu="none", why="right only where GPUs are simulated")

    def image(self) -> TritonImage:
        """Triton image, looked into at the first call.

        Raises:
            StartError, BinaryMissing: it is not there, or holds no Triton that could serve.
            Unavailable: no engine.
        """
        with self._lock:
            if self._image is None:
                settings = self._settings
                labels = {f"{LABEL}cluster": settings.cluster, f"{LABEL}looks": settings.node}
                self._image = find_image(self._engine, settings.docker_image, pull=settings.docker_pull, labels=labels)
                self._log.info("image", name=self._image.name, id=self._image.id, backends=self._image.backends)
            return self._image

    def install(self) -> TritonInstall:
        """Triton installation of the image, as paths in a container. Raises as `image` does."""
        return self.image().install(sees_gpus=self._settings.docker_gpu != "none")

    def start(self, tag: str, launch: SliceLaunch, log_path: Path) -> RunningTriton:
        """See Runtime. Another command under a live tag is refused. `log_path` gets the last lines when it has ended.

        Raises:
            StartError: the image, the device or a folder is missing, or the tag runs something else.
            Unavailable: no engine.
        """
        image = self.image()
        configuration = self._configuration(tag, launch, image)
        command = configuration_digest(configuration)
        found = self._find(tag)
        if found is not None and found["State"]["Status"] in ALIVE:
            if found["Config"]["Labels"].get(f"{LABEL}command") == command:
                return running_triton(tag, found)
            raise StartError(
                f"container {found['Id'][:12]} runs another command under that tag",
                field="tag",
                value=tag,
                remedy="stop it first",
            )
        if launch.gpu_uuid:
            self._gpus.prepare(launch.gpu_uuid)
        self._network.ensure()
        if found is not None:
            self._remove(found)
        make_readable(launch.repository)
        labels = {**configuration.pop("labels"), f"{LABEL}command": command, f"{LABEL}log": str(log_path)}
        container = self._create(tag, {**configuration, "labels": labels})
        try:
            self._engine.call(f"starting {tag}", lambda api: api.start(container))
            self._looks_again_s = 0.0  # there is one more to be reached
            return running_triton(tag, self._inspect(container))
        except (StartError, docker.errors.NotFound) as error:
            self._engine.call(f"removing {tag}", lambda api: api.remove_container(container, v=True, force=True))
            if isinstance(error, StartError):
                raise
            raise refusal_error(f"starting {tag}", error) from error  # removed meanwhile, or it lacks its program

    def list(self) -> Sequence[RunningTriton]:
        """See Runtime. Every container with this node's labels."""
        described = {one["Id"]: one for one in map(self._inspect_cached, self._containers()) if one is not None}
        self._inspections = {container: seen for container, seen in self._inspections.items() if container in described}
        return tuple(running_triton(one["Config"]["Labels"][f"{LABEL}tag"], one) for one in described.values())

    def stop(self, tag: str, kill_after_s: float) -> None:
        """See Runtime; no-op when unknown. The end of a container's first process is the end of all in it.

        Raises:
            Unavailable: no engine, or SIGKILL did not end it.
        """
        found = self._find(tag)
        if found is None or found["State"]["Status"] not in ALIVE:
            return
        self._kill(found["Id"], "SIGTERM")
        if self._ended(found["Id"], kill_after_s):
            return
        self._log.warning("container did not end in time: killed", tag=tag, id=found["Id"][:12], after_s=kill_after_s)
        self._kill(found["Id"], "SIGKILL")
        if not self._ended(found["Id"], KILLED_S):
            raise Unavailable(
                f"container {found['Id'][:12]} of {tag} did not end within {KILLED_S:g} s of SIGKILL",
                remedy="look for a process in state D (`ps`), usually in the GPU's driver",
            )

    def forget(self, tag: str) -> None:
        """See Runtime; a live one is refused.

        Raises:
            StartError: it is alive.
            Unavailable: no engine.
        """
        found = self._find(tag)
        if found is None:
            return
        if found["State"]["Status"] in ALIVE:
            raise StartError(f"container {found['Id'][:12]} is alive", field="tag", value=tag, remedy="stop it first")
        self._remove(found)

    def missing(self, *, gpus: bool) -> Mapping[str, str]:
        """See Runtime. Looks again after each start, and every few minutes, since packet filters come and go.

        Raises:
            Unavailable: no engine.
        """
        if self._image is None:
            return {}  # nothing can be started, and why is known
        found = {}
        if self._clock.monotonic_s() >= self._looks_again_s:
            self._not_isolated = self._network.examine(self._image.id, self._user)
            pause_s = LOOK_AGAIN_S if self._not_isolated else LOOK_PERIOD_S
            self._looks_again_s = self._clock.monotonic_s() + pause_s
        if self._not_isolated:
            found["isolate"] = self._not_isolated
        try:
            if gpus:
                self._gpus.check()
        except StartError as error:
            found["gpu_access"] = str(error)
        return found

    # --- what is asked of the engine ---------------------------------------------------------------------------------

    def _labels(self) -> dict[str, str]:
        return {f"{LABEL}cluster": self._settings.cluster, f"{LABEL}node": self._settings.node}

    def _containers(self, **labels: str) -> Sequence[Mapping[str, Any]]:
        wanted = self._labels() | {f"{LABEL}{name}": value for name, value in labels.items()}
        filters = {"label": [f"{name}={value}" for name, value in wanted.items()]}
        found: Sequence[Mapping[str, Any]] = self._engine.query(
            "listing containers", lambda api: api.containers(all=True, filters=filters)
        )
        return [one for one in found if f"{LABEL}tag" in one["Labels"] and one["State"] != "removing"]

    def _find(self, tag: str) -> dict[str, Any] | None:
        for one in self._containers(tag=tag):
            try:
                return self._inspect(one["Id"])
            except docker.errors.NotFound:
                continue  # it went meanwhile
        return None

    def _inspect(self, container: str) -> dict[str, Any]:
        return dict(self._engine.query("looking at a container", lambda api: api.inspect_container(container)))

    def _inspect_cached(self, summary: Mapping[str, Any]) -> dict[str, Any] | None:
        """What inspect says; asked again only when the engine's summary reads differently.

        The summary tells since when it is up ("Up 3 minutes (healthy)"), so a container that was restarted reads
        differently. Without this, polling 56 containers twice a second would keep the engine busy.
        """
        reads = f"{summary['State']} {summary['Status']}"
        seen = self._inspections.get(summary["Id"])
        if seen is not None and seen[0] == reads:
            return seen[1]
        try:
            described = self._inspect(summary["Id"])
        except docker.errors.NotFound:
            return None
        self._inspections[summary["Id"]] = (reads, described)
        return described

    def _create(self, tag: str, configuration: Mapping[str, Any], *, again: bool = True) -> str:
        try:
            made = self._engine.call(f"creating {tag}", lambda api: create_container(api, configuration))
        except docker.errors.NotFound as error:
            with self._lock:
                self._image = None  # removed since we looked into it, and perhaps there is a new one of that name
            if not again:
                raise StartError(f"image {self._settings.docker_image} vanished", field="docker_image") from error
            return self._create(tag, {**configuration, "image": self.image().id}, again=False)
        return str(made["Id"])

    def _kill(self, container: str, signal: str) -> None:
        try:
            self._engine.call(f"{signal} to {container[:12]}", lambda api: api.kill(container, signal))
        except (docker.errors.NotFound, StartError) as error:
            # The engine refuses for one that has just ended; one that is still there is noticed by the wait.
            self._log.info("no signal sent", container=container[:12], signal=signal, why=str(error))

    def _ended(self, container: str, within_s: float) -> bool:
        if within_s <= 0:
            return False
        try:
            return self._engine.call("waiting", lambda api: wait_for_exit(api, container, within_s)) is not None
        except docker.errors.NotFound:
            return True

    def _remove(self, found: Mapping[str, Any]) -> None:
        log_path = Path(found["Config"]["Labels"].get(f"{LABEL}log", ""))
        try:
            if log_path.name:
                said = self._engine.call("reading its log", lambda api: api.logs(found["Id"], tail=LAST_LINES))
                log_path.parent.mkdir(parents=True, exist_ok=True)
                with log_path.open("ab") as file:
                    file.write(said)
                rotate_log(log_path, self._settings.triton_log_mib * MIB)
        except (docker.errors.NotFound, StartError, OSError) as error:
            self._log.warning("the log of a container is lost", container=found["Id"][:12], why=str(error))
        try:
            self._engine.call("removing a container", lambda api: api.remove_container(found["Id"], v=True, force=True))
        except docker.errors.NotFound:
            return  # another process was faster

    @property
    def _user(self) -> str:
        return self._settings.docker_user or own_user()

    # --- a container -------------------------------------------------------------------------------------------------

    def _configuration(self, tag: str, launch: SliceLaunch, image: TritonImage) -> dict[str, Any]:
        """Arguments of the create call; its digest tells whether two starts mean the same container."""
        settings = self._settings
        with_gpu = bool(launch.gpu_uuid) and settings.docker_gpu != "none"
        environment = {name: value for name, value in launch.env.items() if name not in HOST_ONLY}
        return {
            "name": object_name(settings.cluster, settings.node, tag),
            "image": image.id,
            "command": list(launch.argv),
            "environment": environment | self._gpus.environment(launch.gpu_uuid),
            "working_dir": str(launch.cwd),
            "user": self._user,
            "stop_signal": "SIGTERM",
            "ports": list(launch.ports),
            "labels": {**self._labels(), f"{LABEL}tag": tag, f"{LABEL}image": settings.docker_image},
            "host": {
                "network_mode": self._network.name,
                "port_bindings": {port: (listen, port) for port, listen in launch.ports.items()},
                "dns": [NOWHERE],  # names would be a way out: the engine asks other servers on behalf of a container
                "mounts": mounts(launch),
                "restart_policy": {"Name": "no"},
                "log_config": docker.types.LogConfig(
                    type="json-file", config={"max-size": f"{settings.triton_log_mib}m", "max-file": str(LOG_FILES)}
                ),
                "read_only": True,
                "tmpfs": {"/tmp": f"size={TMP_MIB}m,mode=1777"},
                "shm_size": settings.docker_shm_mib * MIB,
                "ipc_mode": "private",
                "cap_drop": ["ALL"],
                "security_opt": ["no-new-privileges:true"],
                "pids_limit": PIDS_MAX,
                # CUDA pins host memory. Without a GPU there is nothing to pin, and not every engine may raise it.
                "ulimits": [docker.types.Ulimit(name="memlock", soft=-1, hard=-1)] if with_gpu else None,
                **(self._gpus.host_config(launch.gpu_uuid) if with_gpu else {}),
                "cpuset_cpus": None if launch.cpu_cores is None else ",".join(map(str, launch.cpu_cores)),
                "nano_cpus": None if launch.cpu_quota is None else round(launch.cpu_quota * NANO),
            },
        }


def create_container(api: docker.APIClient, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Create a container; the configuration as `DockerRuntime` digests it."""
    host = api.create_host_config(**configuration["host"])
    rest = {name: value for name, value in configuration.items() if name != "host"}
    return dict(api.create_container(**rest, host_config=host))


def mounts(launch: SliceLaunch) -> list[docker.types.Mount]:
    """Mounts of the slice's repository, the shared one its links lead to, and its files, at their paths outside;
    read-only.

    The shared one may itself be one of links to families that lie elsewhere.
    """
    families = (entry.resolve() for entry in sorted(launch.source.glob("*")) if entry.is_symlink())
    own = (launch.repository.absolute(), launch.repository.resolve(), launch.source.resolve(), *launch.files)
    folders = dict.fromkeys((*own, *families))
    return [docker.types.Mount(str(folder), str(folder), type="bind", read_only=True) for folder in folders]


def own_user() -> str:
    """User and group of the agent, or `nobody` where the agent is root."""
    return f"{os.getuid()}:{os.getgid()}" if os.getuid() else NOBODY


def configuration_digest(configuration: Mapping[str, Any]) -> str:
    """Digest of a configuration: the same for two that are the same."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()[:16]


def running_triton(tag: str, described: Mapping[str, Any]) -> RunningTriton:
    """State of a Triton from what inspect says of its container."""
    state, container = described["State"], str(described["Id"])[:12]
    configured = described.get("Config") or {}
    labels = configured.get("Labels") or {}
    environment = dict(str(pair).partition("=")[::2] for pair in configured.get("Env") or ())
    alive = state["Status"] in ALIVE
    started = str(state["StartedAt"])
    return RunningTriton(
        tag=tag,
        id=container,
        incarnation=f"{container}-{started}",
        alive=alive,
        exit_code=None if alive or state["Status"] == "created" else exit_code(int(state["ExitCode"])),
        started_at_s=datetime.fromisoformat(started).timestamp() if not started.startswith("0001-") else 0.0,
        owner="/".join(str(labels.get(f"{LABEL}{name}", "")) for name in ("cluster", "node")),
        argv=tuple(map(str, configured.get("Cmd") or ())),
        gpu_uuid=environment.get("CUDA_VISIBLE_DEVICES", ""),
    )


def exit_code(reported: int) -> int:
    """Exit code; negative: the signal that ended it."""
    return SIGNALLED - reported if reported > SIGNALLED else reported
