"""Settings of `python -m power_agent`."""

import re
from collections.abc import Mapping
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from power_agent.governors import GOVERNORS
from trefoil.core.parts import Kind, Value, load_own_parts, load_part
from trefoil.runtime.config import FIXED, ServiceSettings
from trefoil.runtime.fenced import LEASE_MAX_S


class PowerAgentSettings(ServiceSettings):
    """Settings of the power agent, which governs the GPUs of one node: MIG instances, Tritons, energy."""

    REMOVED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "clock_lease_ttl_max_s", "drain_poll_s", "idle_kill_after_s", "in_use_backoff_s", "power_poll_s",
            "probe_timeout_s", "ring_s", "stop_kill_after_s", "swap_timeout_s",
        ),
        FIXED,
    )  # fmt: skip

    admin_address: str = "127.0.0.1:8103"
    metrics_address: str = "127.0.0.1:8113"
    advertise_host: str = ""
    """Name or address by which controller and dispatchers reach this node; published with the ports of agent and
    Tritons. Empty: the addresses that they listen on."""
    triton_listen: str = "127.0.0.1"
    """IPv4 address that Tritons listen on; 0.0.0.0: every one of this node."""
    node: str = Field(default="node0", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of this node; devices are `<node>/gpu<index>`."""
    zone: str = ""
    """Grid zone that this node draws from."""
    site: str = ""
    """Name of the place, for reports."""
    node_socket: Path | None = None
    """Socket of a simulated node, whose process owns driver and Tritons. None: the hardware of this host."""
    model_repository: Path = Path("model_repository")
    """Families: one folder each, one numbered folder per variant."""
    triton_binary: Path | None = None
    """None: look in `triton_environment`, then on PATH."""
    triton_environment: Path | None = None
    """Virtual environment with Triton's Python side (numpy < 2, onnxruntime)."""
    triton_port_base: int = Field(default=8200, ge=1024, le=65000)
    """gRPC port of slice start s on GPU g: base + 16 g + 2 s; of a CPU slice that begins at tenth t of a core: base +
    256 + 2 t. The metrics are one above."""
    triton_tls_certificate: Path | None = None
    """PEM chain that Tritons show where tls_ca is set; it names `tritons.<node>`. A Triton reads it at its start."""
    triton_tls_key: Path | None = None
    """Its PEM key, which models can read."""
    meter: Literal["nvml", "none"] = "nvml"
    """none: joules and grams are unknown, and say so."""
    sample_period_s: float = Field(default=1.0, ge=0.2, le=10.0)
    """One EnergySample per device each period."""
    starts_parallel: int = Field(default=2, ge=1)
    """Tritons that may start at once: a start keeps a core busy."""
    ready_timeout_s: float = Field(default=30.0, gt=0)
    """How long a Triton may take until it answers an inference; where three times the `load_s` of what it hosts is
    more, that."""
    drain_timeout_s: float = Field(default=30.0, gt=0)
    """After this a slice is stopped whatever is in flight on it."""
    in_use_retries_max: int = Field(default=7, ge=0)
    """A driver says IN_USE for a while after the last process of an instance is gone."""
    retry_backoff_max_s: float = Field(default=15.0, gt=0)
    """Longest pause between two tries to start a slice that fails again and again."""
    health_poll_s: float = Field(default=0.5, gt=0)
    """How often Tritons are asked whether they are ready."""
    quiet_probe_s: float = Field(default=8.0, gt=0)
    """A slice without any success for so long gets a real inference: readiness does not show a dead python stub."""
    drift_poll_s: float = Field(default=5.0, gt=0)
    """How often the driver's listing is compared with what the agent made."""
    reset_poll_s: float = Field(default=30.0, gt=0)
    """How often a GPU that waits for a reset is looked at; each look has it open for about a second."""
    mig_mode: Literal["keep", "enable"] = "keep"
    """enable: switch MIG mode on where a GPU has it, is empty and has it off; it is never switched off."""
    plan_key_file: Path | None = None
    """File with the keys by which plans in Redis are signed, one a line, at most two: the first is the controller's.
    None: plans that were decided while no agent was here are read from a Redis on loopback, or with `insecure`."""
    lease_ttl_s: float = Field(default=3.0, gt=1.0, le=LEASE_MAX_S)
    """Time to live of the lease of the node's role, and the longest gap in its heartbeat."""
    driver_marker_path: Path | None = None
    """File that changes with each load of the driver; None: `driver_load_id` beside the socket, or NVIDIA's module."""
    stop_slices_on_exit: bool = False
    """Stop all Tritons at SIGTERM: `trefoil down`. Otherwise they go on serving, to be adopted by the next agent."""

    # what runs Tritons
    runtime: Literal["auto", "node", "process", "docker"] = "auto"
    """auto: node on a simulated node, else docker where an image is named, else process."""
    triton_user: Literal["auto", "own", "same"] = "auto"
    """As whom Tritons run that are processes: own: a user for each slice, which needs root; same: the agent's own user,
    so that models can do what the agent can, and is not isolated; auto: own where that can be had."""
    triton_uid_base: int = Field(default=2_000_000_000, ge=1, le=2_146_000_000)
    """User and group of a slice's Triton: this plus the slice's gRPC port. Where another process has that user, the
    same plus 65,536, up to 15 times. No person or service may have one of these users."""
    triton_log_mib: int = Field(default=16, ge=1)
    """Size at which a Triton's log is rotated, while it is written [MiB]; two files of that size stay of each slice."""
    cgroup_parent: Path | None = None
    """Folder of cgroup v2 for the groups of CPU slices; None: below the agent's own. See docs/howto/gpu-node.md."""
    triton_backend: Literal["auto", "python", "onnxruntime"] = "auto"
    """What executes models. auto: onnxruntime where Triton has it, except on a simulated node; else python."""
    docker_image: str = ""
    """Image with a tritonserver, for the runtime docker."""
    docker_url: str = ""
    """Address of the Docker engine; empty: DOCKER_HOST, else its usual socket."""
    docker_pull: bool = False
    """Pull an image that is not there; NVIDIA's takes minutes."""
    docker_gpu: Literal["runtime", "request", "cdi", "none"] = "runtime"
    """How a container gets its GPU: by NVIDIA's runtime, by a device request (as `--gpus`), by CDI; none where GPUs are
    simulated. See docs/howto/gpu-node.md."""
    docker_cdi_refresh: str = (
        "nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml --device-name-strategy=index "
        "--device-name-strategy=uuid"
    )
    """Command that writes NVIDIA's CDI specification anew, run where it lacks a new MIG instance; empty: never."""
    docker_user: str = ""
    """User of containers, uid:gid; empty: the agent's own, or nobody where the agent is root."""
    docker_shm_mib: int = Field(default=256, ge=16)
    """Shared memory of a container; the python backend passes tensors through it."""

    # clocks
    governor: str = ""
    """Of every device instead of the one that its plan names: one of the table, or one's own as module:Class."""
    own_parts: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Governors of one's own that plans may name, as module:Class in own_parts.governor, imported at the start. A plan
    that names another module is refused, and nothing of it is imported."""
    parts: dict[str, dict[str, Value]] = Field(default_factory=dict)
    """Settings of the governor by their names, e.g. parts.governor.step_mhz."""

    # CPUs and sensors
    cpu: Literal["off", "meter", "serve", "auto"] = "auto"
    """meter: count what the CPU packages draw; serve: let plans put slices on them too; auto: meter where RAPL can be
    read, off on a simulated node."""
    powercap_root: Path = Path("/sys/class/powercap")
    """Where the kernel shows RAPL."""
    dcgm_exporter_url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """Metrics page of a dcgm-exporter that collects at least every 2 s (`--collect-interval 1000`), as in
    http://127.0.0.1:9400/metrics; empty: activity from GPM or Triton."""

    # what measures energy, and how it is split between slices
    attribution: Literal["auto", "triton", "gpm", "dcgm"] = "auto"
    """By whose activity a device's energy is split; auto: DCGM, else GPM, else Triton's compute seconds. What has no
    fresh value for every slice of an interval gives way to Triton for that interval."""
    learn_baseline: bool = True
    """Measure the idle power at each clock when nothing is done; false: the device type's figure."""

    @model_validator(mode="after")
    def _load_parts(self) -> Self:
        load_own_parts(self.own_parts, {Kind.GOVERNOR: GOVERNORS})
        if self.governor:
            load_part(Kind.GOVERNOR, self.governor, GOVERNORS)
        return self

    @field_validator("advertise_host")
    @classmethod
    def _host(cls, value: str) -> str:
        try:
            found = ip_address(value.strip("[]"))
        except ValueError:
            if value and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", value):
                raise ValueError("is no host name or IP address; write one, without a port") from None
            return value
        return f"[{found}]" if found.version == 6 else str(found)

    @field_validator("triton_listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        try:
            return str(IPv4Address(value))
        except ValueError:
            raise ValueError("is no IPv4 address; write one of this node, or 0.0.0.0 for all") from None

    @field_validator("parts")
    @classmethod
    def _kinds(cls, value: dict[str, dict[str, Value]]) -> dict[str, dict[str, Value]]:
        for kind in value:
            if kind != Kind.GOVERNOR:
                raise ValueError(f"the power agent has no part {kind!r}; use {Kind.GOVERNOR}")
        return value

    @property
    def agent_target(self) -> str:
        """Address at which others reach the agent, as it is published."""
        if not self.advertise_host or self.admin_address.startswith("unix:"):
            return self.admin_address
        return f"{self.advertise_host}:{self.admin_address.rpartition(':')[2]}"

    @property
    def driver_marker(self) -> Path:
        """File that changes with each load of the driver."""
        if self.driver_marker_path is not None:
            return self.driver_marker_path
        return self.node_socket.parent / "driver_load_id" if self.node_socket else Path("/sys/module/nvidia")

    @property
    def runtime_name(self) -> str:
        """Name of the runtime in use."""
        if self.runtime != "auto":
            return self.runtime
        return "node" if self.node_socket else "docker" if self.docker_image else "process"
