"""How a container gets its GPU: by NVIDIA's runtime, by a device request, or by CDI, each asked of the engine first.

A CDI specification is a file that lists devices. One written a minute ago does not know a MIG instance made a second
ago, and no service of NVIDIA's writes it again then. So it is written again before such an instance is handed out. Not
seen on hardware: tried on an engine that only speaks as one with NVIDIA's toolkit does.
"""

import shlex
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import docker.types
import structlog

from power_agent.runtimes.docker_engine import Engine, failure_of
from trefoil.core.errors import StartError

Method = Literal["runtime", "request", "cdi", "none"]
RUNTIME: Final = "nvidia"
KIND: Final = "nvidia.com/gpu"
CAPABILITIES: Final = ("compute", "utility")
REFRESH_TIMEOUT_S: Final = 60.0
TOOLKIT: Final = (
    "install nvidia-container-toolkit, then: nvidia-ctk runtime configure --runtime=docker && systemctl restart "
    "docker; or set docker_gpu=none where GPUs are simulated"
)


class GpuAccess:
    """Access of containers to GPUs, by one method. Thread-safe."""

    def __init__(self, engine: Engine, method: Method, refresh: str) -> None:
        """refresh: command that writes the CDI specification again; empty: another process does."""
        self._engine, self._method, self._refresh = engine, method, refresh
        self._lock = threading.Lock()

    def check(self) -> Mapping[str, Any]:
        """Check that the engine can hand out GPUs this way; returns what it tells of itself.

        Raises:
            StartError: it cannot: field, value and remedy.
            Unavailable: no engine.
        """
        info = self._engine.info()
        if (refusal := refusal_of(self._method, info)) is not None:
            raise refusal
        return info

    def prepare(self, uuid: str) -> None:
        """Make sure that the engine can hand out this device now.

        Raises:
            StartError: it cannot: field, value and remedy.
            Unavailable: no engine.
        """
        info = self.check()
        if self._method not in ("cdi", "request"):
            return
        folders = [Path(folder) for folder in info.get("CDISpecDirs") or ()]
        with self._lock:
            found = specifications(folders)
            if self._method == "request" and not found:
                return  # an engine that asks NVIDIA's hook, and that knows every instance
            if any(uuid in text for text in found):
                return
            structlog.get_logger().info("writing the CDI specification again", for_device=uuid, command=self._refresh)
            why = self._written() if self._refresh else "docker_cdi_refresh is empty"
            if not any(uuid in text for text in specifications(folders)):
                where = ", ".join(map(str, folders))
                raise refused(
                    self._method,
                    f"no CDI specification in {where} has {KIND}={uuid} ({why or 'it was written again'})",
                    f"run `{self._refresh or 'nvidia-ctk cdi generate'}` as root, let docker_cdi_refresh do it, or set "
                    "docker_gpu=runtime",
                )

    def _written(self) -> str:
        why = failure_of(shlex.split(self._refresh), REFRESH_TIMEOUT_S)
        return why and f"{self._refresh}: {why}"

    def host_config(self, uuid: str) -> dict[str, Any]:
        """Host configuration of a container for one device: a MIG instance (MIG-...) or a whole GPU (GPU-...)."""
        match self._method:
            case "runtime":
                return {"runtime": RUNTIME}
            case "request":
                request = docker.types.DeviceRequest(
                    driver=RUNTIME, device_ids=[uuid], capabilities=[["gpu", *CAPABILITIES]]
                )
                return {"device_requests": [request]}
            case "cdi":
                return {"device_requests": [docker.types.DeviceRequest(driver="cdi", device_ids=[f"{KIND}={uuid}"])]}
        return {}

    def environment(self, uuid: str) -> dict[str, str]:
        """Environment of a container by which NVIDIA's runtime and hook know what to hand out; "" is not a device.

        Images ask for all GPUs by default, and an engine whose default runtime is NVIDIA's would obey.
        """
        if not uuid or self._method not in ("runtime", "request"):
            return {"NVIDIA_VISIBLE_DEVICES": "void"}
        return {"NVIDIA_VISIBLE_DEVICES": uuid, "NVIDIA_DRIVER_CAPABILITIES": ",".join(CAPABILITIES)}


def refusal_of(method: Method, info: Mapping[str, Any]) -> StartError | None:
    """Refusal of GPUs by this method: field, value and remedy; None where the engine can. `info`: what it tells of
    itself, which is silent about NVIDIA's hook (`request`).
    """
    if method == "runtime" and RUNTIME not in (info.get("Runtimes") or {}):
        return refused(method, f"the engine has no runtime {RUNTIME}", TOOLKIT)
    if method == "cdi" and not info.get("CDISpecDirs"):
        return refused(
            method,
            f"the engine (Docker {info.get('ServerVersion')}) hands out no CDI devices",
            'take Docker 28.3 or newer, or 25 with "features": {"cdi": true} in /etc/docker/daemon.json; '
            "or set docker_gpu=runtime",
        )
    return None


def refused(method: Method, message: str, remedy: str) -> StartError:
    """Error of a method that hands out no GPU."""
    return StartError(message, field="docker_gpu", value=method, remedy=remedy)


def specifications(folders: list[Path]) -> list[str]:
    """Texts of the CDI specifications of NVIDIA's GPUs in these folders, JSON or YAML."""
    files = [path for folder in folders for path in sorted(folder.glob("*")) if path.suffix in (".json", ".yaml")]
    texts = [path.read_text(errors="replace") for path in files]
    return [text for text in texts if KIND in text]
