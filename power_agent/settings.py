"""Settings of `python -m power_agent`."""

import re
from collections.abc import Mapping
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from power_agent.governors import GOVERNORS
from trefoil.core.fleet import TRITON_NAME
from trefoil.core.parts import Kind, Value, load_own_parts, load_part
from trefoil.engine_api import check_address, check_triton_address
from trefoil.runtime.config import FIXED, NodeNameForm, ServiceSettings, Settings
from trefoil.runtime.fenced import LEASE_MAX_S


class EngineSettings(Settings):
    """Engine that already runs on GPUs of this node and speaks OpenAI's API or Triton's: adopted, never started."""

    family: str
    """Family that it serves, as `trefoil family engine` wrote it."""
    variant: str
    """Variant that it serves."""
    api: Literal["openai", "triton"] = "openai"
    """What it speaks; triton: gRPC in clear text, of a Triton that serves the variant by a model of its repository."""
    address: str
    """Base URL of its clients, at which the dispatchers reach it too, as http://127.0.0.1:8000/v1; of a Triton
    host:port."""
    devices: tuple[str, ...] = Field(min_length=1)
    """GPUs that it computes on, as gpu0; outside MIG mode. Nothing else is planned there."""
    key_file: Path | None = None
    """File with its API key, one line, which others may not read; read again when it changes. The dispatchers need it
    too: engine_key_files."""
    wake: tuple[str, ...] = ()
    """Command that wakes it; empty: it is never put to sleep. Run again after a failure."""
    sleep: tuple[str, ...] = ()
    """Command that puts it to sleep, once it is drained and no plan wants it. Run again after a failure."""
    command_timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """How long either command, and the first token after it, may take."""

    @field_validator("devices")
    @classmethod
    def _gpus(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not re.fullmatch(r"gpu[0-9]{1,3}", name):
                raise ValueError(f"{name!r} is not a GPU of this node; write gpu0")
        return value

    @field_validator("address")
    @classmethod
    def _reached(cls, value: str, info: ValidationInfo) -> str:
        return (check_triton_address if info.data.get("api") == "triton" else check_address)(value, "engines.address")

    @model_validator(mode="after")
    def _both(self) -> Self:
        if self.key_file and self.api == "triton":
            raise ValueError("key_file is for OpenAI's API; a Triton takes no key; leave it out")
        if bool(self.wake) != bool(self.sleep):
            raise ValueError("wake and sleep belong together; give both, or neither")
        if self.sleep and len(self.devices) > 1:
            raise ValueError("an engine on several devices is not put to sleep; leave wake and sleep out")
        return self


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
    """Name or address at which controller and dispatchers reach this node. Empty: the listening addresses."""
    triton_listen: str = "127.0.0.1"
    """IPv4 address that Tritons listen on; 0.0.0.0: every one of this node."""
    node: str = Field(default="node0", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of this node; devices are `<node>/gpu<index>`."""
    zone: str = ""
    """Grid zone that this node draws from."""
    site: str = ""
    """Name of the place, for reports."""
    node_socket: Path | None = None
    """Socket of a simulated node. None: the hardware of this host."""
    model_repository: Path = Path("model_repository")
    """Families: one folder each, one numbered folder per variant."""
    triton_binary: Path | None = None
    """None: look in `triton_environment`, then on PATH."""
    triton_environment: Path | None = None
    """Virtual environment with Triton's Python side (numpy < 2, onnxruntime)."""
    triton_port_base: int = Field(default=8200, ge=1024, le=65000)
    """gRPC port of slice start s on GPU g: base + 16 g + 2 s; on CPUs, tenth t of a core: base + 256 + 2 t. Metrics:
    one above."""
    triton_tls_certificate: Path | None = None
    """PEM chain of Tritons, which names `tritons.<node>`; read at a Triton's start."""
    triton_tls_key: Path | None = None
    """Its PEM key, which models can read."""
    meter: Literal["nvml", "none"] = "nvml"
    """none: joules and grams are unknown, and say so."""
    sample_period_s: float = Field(default=1.0, ge=0.2, le=10.0)
    """One EnergySample per device each period."""
    starts_parallel: int = Field(default=2, ge=1)
    """Tritons that may start at once: a start keeps a core busy."""
    ready_timeout_s: float = Field(default=30.0, gt=0)
    """How long a Triton may take until it answers; at least three times its `load_s`."""
    drain_timeout_s: float = Field(default=30.0, gt=0)
    """After this a slice is stopped whatever is in flight on it."""
    in_use_retries_max: int = Field(default=7, ge=0)
    """A driver says IN_USE for a while after the last process of an instance is gone."""
    retry_backoff_max_s: float = Field(default=15.0, gt=0)
    """Longest pause between two tries to start a slice that fails again and again."""
    health_poll_s: float = Field(default=0.5, gt=0)
    """How often Tritons are asked whether they are ready."""
    quiet_probe_s: float = Field(default=8.0, gt=0)
    """A slice without success for this long is probed by an inference."""
    drift_poll_s: float = Field(default=5.0, gt=0)
    """How often the driver's listing is compared with what the agent made."""
    reset_poll_s: float = Field(default=30.0, gt=0)
    """Interval of looks at a GPU that waits for a reset."""
    mig_mode: Literal["keep", "enable"] = "keep"
    """enable: switch MIG mode on for empty GPUs; it is never switched off."""
    agent_tls_name: NodeNameForm = "{node}"
    """Name that the certificate of a power agent must have (subjectAltName); {node} is the node's. Equal for controller
    and agents."""
    triton_tls_name: NodeNameForm = TRITON_NAME
    """Name that the certificate of a node's Tritons must have; {node} is the node's. Equal for agents and
    dispatchers."""
    plan_key_file: Path | None = None
    """File with the keys that sign plans, one a line, at most two. None: unsigned plans are read from a Redis on
    loopback, or with `insecure`."""
    lease_ttl_s: float = Field(default=3.0, gt=1.0, le=LEASE_MAX_S)
    """Time to live of the lease of the node's role."""
    driver_marker_path: Path | None = None
    """File that changes with each load of the driver; None: the simulated node's, or NVIDIA's module."""
    stop_slices_on_exit: bool = False
    """Stop all Tritons at SIGTERM; else the next agent adopts them."""

    # what runs Tritons
    runtime: Literal["auto", "node", "process", "docker", "kubernetes"] = "auto"
    """auto: node on a simulated node, else docker where an image is named, else process."""
    triton_user: Literal["auto", "own", "same"] = "auto"
    """User of Tritons that are processes. own: one for each slice, needs root; same: the agent's, not isolated; auto:
    own if possible."""
    triton_uid_base: int = Field(default=2_000_000_000, ge=1, le=2_146_000_000)
    """User and group of a slice's Triton: this plus its gRPC port; if taken, plus 65,536, up to 15 times. Keep these
    ids free."""
    triton_log_mib: int = Field(default=16, ge=1)
    """Size at which a Triton's log is rotated [MiB]; two files stay."""
    cgroup_parent: Path | None = None
    """Folder of cgroup v2 for CPU slices; None: below the agent's (docs/howto/gpu-node.md)."""
    triton_backend: Literal["auto", "python", "onnxruntime"] = "auto"
    """What executes models. auto: onnxruntime where Triton has it, except on a simulated node; else python."""
    docker_image: str = ""
    """Image with a tritonserver, for the runtime docker."""
    docker_url: str = ""
    """Address of the Docker engine; empty: DOCKER_HOST, else its usual socket."""
    docker_pull: bool = False
    """Pull an image that is not there; NVIDIA's takes minutes."""
    docker_gpu: Literal["runtime", "request", "cdi", "none"] = "runtime"
    """How a container gets its GPU: NVIDIA's runtime, a device request (`--gpus`), CDI, or none where simulated
    (docs/howto/gpu-node.md)."""
    docker_cdi_refresh: str = (
        "nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml --device-name-strategy=index "
        "--device-name-strategy=uuid"
    )
    """Command that renews NVIDIA's CDI specification for a new MIG instance; empty: never."""
    docker_user: str = ""
    """User of containers, uid:gid; empty: the agent's, or `nobody` where the agent is root."""
    docker_shm_mib: int = Field(default=256, ge=16)
    """Shared memory of a container; the python backend passes tensors through it."""

    # Tritons in pods (docs/howto/kubernetes.md)
    kubernetes_image: str = ""
    """Image with a tritonserver, for the runtime kubernetes."""
    kubernetes_backends: tuple[Literal["onnxruntime", "python", "tensorrt", "vllm", "tensorrtllm"], ...] = (
        "onnxruntime",
        "python",
    )
    """Backends of that image."""
    kubernetes_models: str = Field(default="", pattern=r"^(|/.+|[a-z0-9][a-z0-9.-]*)$")
    """Models for pods: a PersistentVolumeClaim, or a folder of the node; empty: the node's `model_repository`."""
    kubernetes_runtime_class: str = "nvidia"
    """RuntimeClass of pods with a GPU; empty: the cluster's default."""
    kubernetes_priority_class: str = ""
    """PriorityClass of pods; empty: the cluster's default."""
    kubernetes_service_account: str = "default"
    """ServiceAccount of pods, which names their image pull secrets; pods get no token."""
    kubernetes_resources: dict[str, dict[str, str | float]] = Field(
        default={"requests": {"cpu": "500m", "memory": "2Gi"}}
    )
    """Requests and limits of a pod, as Kubernetes writes them."""
    kubernetes_shm_mib: int = Field(default=256, ge=16)
    """Shared memory of a pod; it counts as the pod's memory."""
    kubernetes_start_s: float = Field(default=300.0, gt=0)
    """Upper bound on the wait for a pod to run, the pull of its image included."""
    kubernetes_pod: str = ""
    """Name of the agent's own pod."""
    kubernetes_url: str = ""
    """Address of the API server; empty: as the pod's environment names it."""
    kubernetes_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Folder with token, ca.crt and namespace of the agent's ServiceAccount."""

    # engines that already run
    engines: tuple[EngineSettings, ...] = ()
    """Engines that already run on this node."""

    # clocks
    governor: str = ""
    """Governor of every device instead of its plan's: a name, or module:Class."""
    own_parts: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Your governors (module:Class in own_parts.governor) that plans may name; imported at the start."""
    parts: dict[str, dict[str, Value]] = Field(default_factory=dict)
    """Settings of the governor by their names, e.g. parts.governor.step_mhz."""

    # CPUs and sensors
    cpu: Literal["off", "meter", "serve", "auto"] = "auto"
    """meter: count joules of CPU packages; serve: also slices; auto: meter if RAPL can be read."""
    powercap_root: Path = Path("/sys/class/powercap")
    """Where the kernel shows RAPL."""
    dcgm_exporter_url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """Metrics page of a dcgm-exporter (`--collect-interval 1000`), as http://127.0.0.1:9400/metrics; empty: GPM or
    Triton."""

    # what measures energy, and how it is split between slices
    attribution: Literal["auto", "triton", "gpm", "dcgm"] = "auto"
    """Activity that splits a device's energy; auto: DCGM, else GPM, else Triton's compute seconds."""
    learn_baseline: bool = True
    """Measure the idle power at each clock when nothing is done; false: the device type's figure."""

    @model_validator(mode="after")
    def _load_parts(self) -> Self:
        load_own_parts(self.own_parts, {Kind.GOVERNOR: GOVERNORS})
        if self.governor:
            load_part(Kind.GOVERNOR, self.governor, GOVERNORS)
        return self

    @field_validator("engines")
    @classmethod
    def _claims(cls, value: tuple[EngineSettings, ...]) -> tuple[EngineSettings, ...]:
        claimed: dict[str, str] = {}
        for engine in value:
            name = f"{engine.family}/{engine.variant}"
            for device in engine.devices:
                if device in claimed:
                    raise ValueError(f"{device} is claimed by {claimed[device]} and {name}; leave it to one of them")
                claimed[device] = name
        return value

    @field_validator("advertise_host")
    @classmethod
    def _host(cls, value: str) -> str:
        try:
            found = ip_address(value.strip("[]"))
        except ValueError:
            if value and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", value):
                raise ValueError("is not a host name or IP address; write one, without a port") from None
            return value
        return f"[{found}]" if found.version == 6 else str(found)

    @field_validator("triton_listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        try:
            return str(IPv4Address(value))
        except ValueError:
            raise ValueError("is not an IPv4 address; write one of this node, or 0.0.0.0 for all") from None

    @field_validator("parts")
    @classmethod
    def _kinds(cls, value: dict[str, dict[str, Value]]) -> dict[str, dict[str, Value]]:
        for kind in value:
            if kind != Kind.GOVERNOR:
                raise ValueError(f"the power agent has no part {kind!r}; use {Kind.GOVERNOR}")
        return value

    def engine_on(self, device: str) -> EngineSettings | None:
        """Engine that already runs on a device; None: there is none."""
        name = device.rpartition("/")[2]
        return next((engine for engine in self.engines if name in engine.devices), None)

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
