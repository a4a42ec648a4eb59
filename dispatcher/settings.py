"""Settings of the dispatcher. Every bound has a name and a unit."""

from collections.abc import Mapping
from importlib.util import find_spec
from ipaddress import ip_network
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from pydantic import Field, field_validator, model_validator

from dispatcher.queues import QUEUES
from dispatcher.routers import ROUTERS
from trefoil.core.errors import SettingError
from trefoil.core.fleet import TRITON_NAME
from trefoil.core.parts import Kind, load_own_parts, load_part
from trefoil.engine_api import check_address
from trefoil.runtime.config import FIXED, NodeNameForm, ServiceSettings
from trefoil.runtime.security.other_zones import ServingZone, check_other_zones
from trefoil.runtime.security.tls import FIELDS, GRPC, Tls

FRONT_FIELDS: Final = ("front_tls_certificate", "front_tls_key", "front_client_ca")


class WorkerPlace(ServiceSettings):
    """Place of a worker among those of its dispatcher; set by their supervisor, not by a person."""

    inference_socket: int = Field(-1, ge=-1)
    """Descriptor of the inference port's listening socket, which workers share."""
    rest_socket: int = Field(-1, ge=-1)
    """Descriptor of the REST port's."""
    worker: int = Field(0, ge=0)
    """Number of this worker within its dispatcher."""
    dispatcher: str = ""
    """Name of the dispatcher that this worker belongs to; else a new one."""
    supervisor_pid: int = Field(0, ge=0)
    """The process with which this one ends."""


class DispatcherSettings(WorkerPlace):
    """Settings of `python -m dispatcher`, with their units and bounds."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "transport": "remove it: gRPC is served by libnghttp2 alone",
        **dict.fromkeys(
            (
                "attempts_max", "cancel_grace_s", "connection_age_grace_s", "connection_streams_max", "hang_probe_s",
                "header_bytes_max", "jobs_results_max", "length_wait_s", "log_every_requests", "message_s",
                "probe_timeout_s", "receipts_stale_s", "resets_per_s", "retry_burst", "stale_probe_failures",
                "tenants_max", "windows_pending_max",
            ),
            FIXED,
        ),
    }  # fmt: skip

    admin_address: str = "127.0.0.1:8104"
    metrics_address: str = "127.0.0.1:8114"
    inference_address: str = "127.0.0.1:8001"
    """host:port that clients talk KServe v2 to."""
    rest_address: str = ""
    """host:port of KServe v2 and OpenAI's API over HTTP/1.1 (Triton's own is 8000); empty = none."""
    rest_json_bytes_max: int = Field(-1, ge=-1)
    """Largest JSON part of a REST request; -1 = message_bytes_max. Parts from 64 KiB are read in separate processes,
    about 40 ms a MiB."""
    rest_json_memory_bytes_max: int = Field(2**30, ge=2**26)
    """Memory of each of these processes; JSON takes up to 30 times its bytes."""
    front_tls_certificate: Path | None = None
    """PEM chain of the inference and REST ports; without it they take tls_certificate."""
    front_tls_key: Path | None = None
    """PEM key of the inference and REST ports."""
    front_client_ca: Path | None = None
    """PEM of the authorities of client certificates (mTLS); none = no client certificate."""
    tenants_file: Path | None = None
    """TOML of tenants with tokens, roles and limits."""
    front_open: bool = False
    """The inference and REST ports need no token; not with tenants_file."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of proxies whose `x-forwarded-for` names the client."""
    workers: int = Field(1, ge=1, le=64)
    """Processes that share the ports; each takes about 90 MiB and about 2,500 small requests a second."""
    peer_address: str = ""
    """host:port of worker 0 for dispatchers on other hosts (worker i: port + i); empty = a Unix socket."""
    peer_name: str = ""
    """Whom the certificates of other dispatchers have to name; empty = the host of their peer_address."""
    connection_age_max_s: float = Field(0.0, ge=0)
    """Age at which client connections are asked to reconnect; 0 = never."""
    router: str = ""
    """Router instead of the plan's: a name, or module:Class."""
    queue: str = ""
    """Queue instead of the plan's: a name, or module:Class."""
    own_parts: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Your routers and queues (module:Class, by kind) that plans may name; imported at the start."""
    lengths_folder: Path = Path("model_repository/pydoc/lengths-tiny")
    """Predictor of answer lengths for queue `ssjf`: a folder of `trefoil lengths train`; the default predicts `pydoc`.
    Families without one are served first come, first served."""
    engine_key_files: dict[str, Path] = Field(default_factory=dict)
    """Files with the API keys of adopted engines, by their base URLs as the agents' settings have them; read again when
    they change."""
    message_bytes_max: int = Field(64 * 2**20, ge=-1)
    """Largest request, decompressed or as JSON; -1 = no limit."""
    held_bytes_max: int = Field(2**30, ge=1)
    """Requests and unread answers that a worker holds. Beyond it requests are refused; answers may take half."""
    connection_unread_bytes_max: int = Field(256 * 2**20, ge=1)
    """Answers that one connection has not read, beyond which its requests are refused."""
    head_bytes_max: int = Field(16 * 2**20, ge=1)
    """Largest part of a request without its raw_input_contents; parsed it takes up to ten times that."""
    window_s: float = Field(0.5, gt=0)
    """How often a load window is flushed."""
    triton_tls_name: NodeNameForm = TRITON_NAME
    """Name that the certificate of a node's Tritons must have; {node} is the node's. Equal for agents and
    dispatchers."""
    plan_key_file: Path | None = None
    """File with the routes keys that verify plans, one a line, at most two (docs/howto/secrets.md). None: unsigned
    plans are obeyed from a Redis on loopback, or with `insecure`."""
    ack_s: float = Field(1.0, gt=0)
    """How often the table is acknowledged, beyond every change of it."""
    no_slice_wait_s: float = Field(20.0, ge=0)
    """How long requests wait for a family that lost its last live slice."""
    hang_quiet_s: float = Field(0.4, gt=0)
    """A slice that answers no request of a model for this long is probed."""
    idle_probe_s: float = Field(2.0, ge=0)
    """Interval of probes of slices without requests; 0 = never."""
    hung_fail_s: float = Field(10.0, gt=0)
    """How long requests wait on a hung slice before they fail."""
    late_strikes: int = Field(3, ge=1)
    """Deadlines in a row that pass on a slice before it is probed as late."""
    fault_strikes: int = Field(8, ge=1)
    """Server errors in a row on a slice before a failing probe ejects it as sick."""
    deadline_s: float = Field(0.0, ge=0)
    """Deadline of requests that name none, for families without one in `deadlines_s`; 0 = none."""
    deadlines_s: dict[str, float] = Field(default_factory=dict)
    """Deadline of requests that name none, by family."""
    retry_ratio: float = Field(0.1, ge=0, le=1)
    """Budget of retries, as a share of arriving requests."""
    node_stale_s: float = Field(5.0, gt=0)
    """Past this age of a node's status its slices are probed from here."""
    stale_probe_s: float = Field(2.0, gt=0)
    """How often slices of a node with a stale status are probed."""
    drain_s: float = Field(1.0, ge=0)
    """How long it serves, not ready, after SIGTERM; longer than a load balancer's checks."""
    stop_grace_s: float = Field(3.0, ge=0)
    """How long requests in flight may take after that."""
    stream_requests_max: int = Field(128, ge=1)
    """Requests of one client stream at once; the next wait."""
    sequences_max: int = Field(10_000, ge=1)
    """Open sequences of one family."""
    sequence_requests_max: int = Field(128, ge=1)
    """Requests of one sequence that wait for each other."""
    classes_max: int = Field(16, ge=1)
    """Values of trefoil_class that are counted apart; the rest is "other"."""
    jobs_dir: Path | None = None
    """Folder of jobs with items and results; dispatchers that share it take jobs over. None: `jobs` in `state_dir`."""
    jobs_items_max: int = Field(1_000_000, ge=1)
    """Items of one job."""
    jobs_bytes_max: int = Field(4 * 2**30, ge=1)
    """Items of one job, in bytes; also all files of one tenant for batches."""
    jobs_tenant_max: int = Field(20, ge=1)
    """Jobs of one tenant that have not ended. Jobs with kept results, and files for batches: ten times as many."""
    jobs_keep_s: float = Field(7 * 86_400.0, gt=0)
    """How long the results of a job stay after it ended, and files for batches after they came."""
    other_zones: tuple[ServingZone, ...] = ()
    """Dispatchers of other zones, which run items of jobs that name these zones."""
    transfer_j_per_mb: float = Field(216.0, ge=0)
    """Joules that move a megabyte to another zone or back. Default: 0.06 kWh/GB, fixed-line networks of 2015, about
    halved every two years since (Aslan et al. 2018, doi:10.1111/jiec.12630): an upper bound."""
    otel_endpoint: str = ""
    """http(s)://host:port of an OpenTelemetry collector (OTLP over gRPC); empty = no spans. Needs trefoil[otel]."""
    log_failures_per_s: float = Field(5.0, ge=0)
    """Failed requests are all counted, and logged up to this rate."""

    def front(self) -> "DispatcherSettings":
        """Settings with the TLS files of clients' ports in the place of the admin port's."""
        own: dict[str, Any] = {"tls_ca": self.front_client_ca}
        if self.front_open:
            own["token"] = None
        if self.front_tls_certificate is not None or self.front_tls_key is not None:
            own |= {"tls_certificate": self.front_tls_certificate, "tls_key": self.front_tls_key}
        return self.model_copy(update=own)

    def front_tls(self, *protocols: str) -> Tls | None:
        """TLS of clients' ports, whose clients' certificates are another authority's than its own; None: clear text.

        Raises:
            SettingError: its certificates cannot be used.
        """
        own = self.front_tls_certificate is not None or self.front_tls_key is not None
        fields = FRONT_FIELDS if own else (FIELDS[0], FIELDS[1], FRONT_FIELDS[2])
        front = self.front()
        if front.tls_certificate is None and front.tls_key is None:
            return None
        files = (front.tls_certificate, front.tls_key, front.tls_ca)
        return Tls(*files, fields=fields, signed=False, alpn=protocols or GRPC)

    @model_validator(mode="after")
    def _open_or_not(self) -> Self:
        if self.front_open and self.tenants_file is not None:
            remedy = "drop one of the two"
            raise SettingError("tenants_file already names the callers", field="front_open", value=True, remedy=remedy)
        return self

    @property
    def authenticates(self) -> bool:
        """Whether clients' ports know their callers otherwise than by `token`."""
        return self.tenants_file is not None or self.front_client_ca is not None

    @field_validator("engine_key_files")
    @classmethod
    def _of_engines(cls, value: dict[str, Path]) -> dict[str, Path]:
        return {check_address(base, "engine_key_files"): path for base, path in value.items()}

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            ip_network(each)
        return value

    @model_validator(mode="after")
    def _other_zones(self) -> Self:
        check_other_zones(self.other_zones)
        return self

    @model_validator(mode="after")
    def _load_parts(self) -> Self:
        load_own_parts(self.own_parts, {Kind.ROUTER: ROUTERS, Kind.QUEUE: QUEUES})
        if self.router:
            load_part(Kind.ROUTER, self.router, ROUTERS)
        if self.queue:
            load_part(Kind.QUEUE, self.queue, QUEUES)
        return self

    @field_validator("otel_endpoint")
    @classmethod
    def _traceable(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("no address of a collector; write http://host:4317, or https")
        if value and not _installed("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"):
            raise ValueError("OpenTelemetry is not installed; pip install 'trefoil[otel]', or leave it empty")
        return value

    @field_validator("message_bytes_max")
    @classmethod
    def _room_for_a_request(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 refuses every request; write -1 for no limit")
        return value


def _installed(*modules: str) -> bool:
    try:
        return all(find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:  # not even the package that it would be in
        return False
