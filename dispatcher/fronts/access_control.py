"""Lets callers in: by token, role and limit. The same for gRPC, streams, REST and the admin port.

Without a tenants file, and without a token, every caller may send every request, as on Triton. Files of tenants and
tokens are read again when they change; one that cannot be used leaves the last good one in force.
"""

import mmap
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote

import grpc
import structlog
from pydantic import Field, field_validator, model_validator

from dispatcher.request.admission import StatusError
from dispatcher.request.core import tenants
from dispatcher.request.core.tenants import (
    ADMIN,
    EVERYBODY,
    INFER,
    JOBS,
    LimitState,
    Tenant,
    Tenants,
    digest,
)
from dispatcher.settings import DispatcherSettings
from trefoil.core.errors import SettingError
from trefoil.runtime import config
from trefoil.runtime.clock import Clock
from trefoil.runtime.security.reread import Reread
from trefoil.runtime.security.secret_files import OVERLAP, FileSecret, accepted, read_secret_lines
from trefoil.runtime.telemetry import Metrics

LOG = structlog.get_logger()
TICK_S: Final = 1.0
TENANTS_MAX: Final = 100  # each is counted apart
NO_TOKEN: Final = "no valid token. Remedy: send 'authorization: Bearer <token>'"
JOBS_PATH: Final = "/trefoil.dispatcher.v1.Jobs/"
_FORMAT: Final = "d"


class TenantEntry(config.Settings):
    """One `[[tenant]]` of the tenants file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Stands in metrics, logs and reports."""
    token_sha256: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = Field((), max_length=OVERLAP)
    """SHA-256 of the token, in hexadecimal: printf %s "$TOKEN" | sha256sum; or a list of two while it is replaced."""
    token_env: str = ""
    """Or the environment variable that holds the token."""
    token_file: Path | None = None
    """Or the file that holds it; two lines while it is replaced."""
    roles: tuple[Literal["infer", "admin", "jobs"], ...] = (INFER,)
    """`infer`: inference and questions. `admin`: whatever changes something. `jobs`: only its own jobs, on the admin
    port; for a peer's zone."""
    rate_per_s: float = Field(0.0, ge=0)
    """Requests per second in the long run; 0 = no limit."""
    burst: float = Field(0.0, ge=0)
    """Requests that may come at once; 0 = those of one second, at least one."""
    bytes_per_s: float = Field(0.0, ge=0)
    """Bytes of requests per second; 0 = no limit."""
    burst_bytes: float = Field(0.0, ge=0)
    """Bytes that may come at once; 0 = those of one second."""
    weight: float = Field(1.0, ge=0.001, le=1000)
    """Share of slices and queue against that of other tenants, while requests of several wait."""

    @field_validator("token_sha256", mode="before")
    @classmethod
    def _one_or_two(cls, given: Any) -> Any:
        return ((given,) if given else ()) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one_token(self) -> "TenantEntry":
        if sum(map(bool, (self.token_sha256, self.token_env, self.token_file))) != 1:
            raise ValueError(f"tenant {self.name} needs one of token_sha256, token_env and token_file")
        return self

    def tenant(self) -> Tenant:
        """Convert the entry to the tenant that limits and roles are checked by."""
        return Tenant(
            name=self.name, roles=frozenset(self.roles), rate_per_s=self.rate_per_s,
            burst=self.burst or max(1.0, self.rate_per_s), bytes_per_s=self.bytes_per_s,
            burst_bytes=self.burst_bytes or self.bytes_per_s, weight=self.weight,
        )  # fmt: skip


class TenantsFile(config.Settings):
    """Schema of the tenants file."""

    tenant: tuple[TenantEntry, ...] = Field(min_length=1)


class AccessControl:
    """Authentication, roles and rate limits of callers. A part of the service, on one event loop: `run` keeps the
    tenants current."""

    def __init__(self, settings: DispatcherSettings, clock: Clock, metrics: Metrics | None = None) -> None:
        """Raises `SettingError` for a tenants file that cannot be used."""
        self._path = settings.tenants_file
        self._limits = Limits(settings.state_dir / "dispatcher" / "limits")
        self._token = None if settings.front_open else settings.token
        self._proxies = tuple(ip_network(each) for each in settings.trusted_proxies)
        self._clock = clock
        self._metrics = metrics
        self._refused: Counter[tuple[str, str]] = Counter()
        self.open = settings.tenants_file is None and self._token is None
        self._watched: list[Path] = []
        self.files: Reread[Tenants] = Reread("tenants_file", self._read, lambda: self._watched)
        self._tenants = self.files.now

    def authenticate(self, authorization: str | bytes) -> Tenant:
        """Authenticate a caller by its `authorization` header ("" = none).

        Raises:
            StatusError: UNAUTHENTICATED.
        """
        if self.open:
            return EVERYBODY
        tenant = self._tenants.authenticate(authorization)
        if tenant is None:
            raise self._refusal("", grpc.StatusCode.UNAUTHENTICATED, NO_TOKEN)
        return tenant

    def authenticate_call(self, metadata: Any) -> Tenant:
        """Authenticate the caller of a gRPC method by its metadata; raises like `authenticate`."""
        return EVERYBODY if self.open else self.authenticate(dict(metadata or ()).get("authorization", ""))

    def admit(self, tenant: Tenant, size: int) -> None:
        """Book one inference request of that many bytes.

        Raises:
            StatusError: PERMISSION_DENIED without the role, RESOURCE_EXHAUSTED over a limit, with the time to wait.
        """
        self.require_role(tenant, INFER)
        if not (tenant.rate_per_s or tenant.bytes_per_s):
            return
        excess = tenants.admit(tenant, self._limits.state_of(tenant.name), size, self._clock.monotonic_s())
        if excess is not None:
            raise self._refusal(
                tenant.name, grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"tenant {tenant.name} may send {excess.limit:g} {excess.unit} per second. Remedy: "
                f"try again in {excess.wait_s:.3f} s",
                (("grpc-retry-pushback-ms", str(int(excess.wait_s * 1e3) + 1)),),
            )  # fmt: skip

    def names(self) -> set[str] | None:
        """Names of the tenants file; None: there is none."""
        return None if self._path is None else {tenant.name for tenant in self._tenants.all()}

    def weight(self, name: str) -> float:
        """Weight of a tenant by its name; of an unknown one 1."""
        return next((tenant.weight for tenant in self._tenants.all() if tenant.name == name), 1.0)

    def flow(self, tenant: Tenant, peer: str, metadata: Callable[[], Any]) -> tuple[str, str]:
        """What a caller shares a full queue as: its tenant, or its host where tenants are not known, and its
        connection. `peer` is the address that gRPC writes; of a trusted proxy the address that the proxy names counts,
        the last of `x-forwarded-for`. A host with IPv6 is a network of 64 bits: it gives itself the others."""
        host = peer.rpartition(":")[0]
        if not (self._proxies or host.startswith("ipv6")):
            return tenant.name or host, peer
        address = _address(host)
        if address is not None and any(address in network for network in self._proxies):
            named = str(dict(metadata() or ()).get("x-forwarded-for", "")).rpartition(",")[2].strip()
            if named:
                return tenant.name or _host(named, _address(named)), named
        return tenant.name or _host(host, address), peer

    def require_role(self, tenant: Tenant, role: str) -> None:
        """Check that a tenant has a role; raises StatusError: PERMISSION_DENIED."""
        if role not in tenant.roles:
            raise self._refusal(
                tenant.name, grpc.StatusCode.PERMISSION_DENIED,
                f"tenant {tenant.name} has no role '{role}'. Remedy: use a token of a tenant that has it",
            )  # fmt: skip

    def scope(self, metadata: Any) -> str:
        """Scope on the admin port: "control" with the admin role, the path of jobs' methods with the jobs role. It is
        "open" if no token is demanded, "denied" for a tenant without these roles, "" for an unknown caller."""
        if self.open:
            return "open"
        tenant = self._tenants.authenticate(dict(metadata or ()).get("authorization", ""))
        if tenant is None:
            return ""
        if ADMIN in tenant.roles:
            return "control"
        return JOBS_PATH if JOBS in tenant.roles else "denied"

    def only_own_jobs(self, metadata: Any) -> str:
        """Name of a caller that may see and change its own jobs alone; empty: all jobs."""
        tenant = None if self.open else self._tenants.authenticate(dict(metadata or ()).get("authorization", ""))
        return tenant.name if tenant is not None and ADMIN not in tenant.roles else ""

    async def init(self) -> None:
        """Nothing: what can fail has failed when it was made."""

    async def run(self) -> None:
        """Read the tenants file again when it changes, until cancelled."""
        while True:
            await self._clock.sleep(TICK_S)
            self.refresh()

    async def shutdown(self) -> None:
        """Count the last refusals in the metrics."""
        self._count()

    def refresh(self) -> None:
        """Read the token and the tenants file again if they changed; show what was refused."""
        self._count()
        self._tenants = self.files.now

    def _read(self) -> Tenants:
        own = {} if self._token is None else {digest(each): EVERYBODY for each in accepted(self._token)}
        self._watched = [self._token.path] if isinstance(self._token, FileSecret) else []
        if self._path is None:
            return Tenants(own)
        self._watched.append(self._path)
        entries = config.load(TenantsFile, self._path).tenant
        if len(entries) > TENANTS_MAX:
            raise SettingError(
                f"{len(entries)} tenants (in {self._path})", field="tenant",
                remedy=f"have at most {TENANTS_MAX} of them",
            )  # fmt: skip
        self._watched += [entry.token_file for entry in entries if entry.token_file]
        by_digest = dict(own)
        names = set()
        for entry in entries:
            keys = entry.token_sha256 or [digest(each) for each in _tokens(entry)]
            if entry.name in names or not by_digest.keys().isdisjoint(keys):
                raise SettingError(
                    f"a second tenant has this name or this token (in {self._path})", field="tenant",
                    value=entry.name, remedy="give each its own",
                )  # fmt: skip
            names.add(entry.name)
            by_digest |= dict.fromkeys(keys, entry.tenant())
        return Tenants(by_digest)

    def _refusal(self, tenant: str, code: grpc.StatusCode, details: str, trailers: Any = ()) -> StatusError:
        self._refused[tenant, code.name] += 1
        return StatusError(code, details, trailers)

    def _count(self) -> None:
        refused, self._refused = self._refused, Counter()
        if self._metrics is not None:
            for (tenant, code), count in refused.items():
                self._metrics.inc("trefoil_refused_requests_total", count, tenant=tenant, code=code)


class Limits:
    """Shared limit states of `tenants.admit`: one small file a tenant, which all workers of a dispatcher map into
    memory.

    The monotonic clock is the machine's, so that they read each other's times rightly.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, LimitState] = {}

    def state_of(self, tenant: str) -> LimitState:
        """Writable limit state of a tenant. Where no file can be had, this worker counts alone, and says so."""
        known = self._known.get(tenant)
        if known is None:
            known = self._known[tenant] = self._mapped(tenant)
        return known

    def _mapped(self, tenant: str) -> LimitState:
        size = tenants.LIMITS * 8
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._folder / tenant, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if os.fstat(descriptor).st_size != size:
                    os.ftruncate(descriptor, size)
                return memoryview(mmap.mmap(descriptor, size)).cast(_FORMAT)
            finally:
                os.close(descriptor)
        except OSError as error:
            LOG.warning("workers cannot share a tenant's limit: each allows all of it", tenant=tenant, why=str(error))
            return [0.0] * tenants.LIMITS


def _tokens(entry: TenantEntry) -> Sequence[str]:
    if entry.token_file is not None:
        return read_secret_lines(entry.token_file, "token_file", OVERLAP)
    token = os.environ.get(entry.token_env, "")
    if not token:
        remedy = f"give tenant {entry.name} a token"
        raise SettingError("holds no token", field="token_env", value=entry.token_env, remedy=remedy)
    return (token,)


@lru_cache(maxsize=4096)
def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Address that a proxy or gRPC writes; None: it is none."""
    try:
        found = ip_address(unquote(text.removeprefix("ipv4:").removeprefix("ipv6:")).strip("[]").partition("%")[0])
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


def _host(text: str, address: IPv4Address | IPv6Address | None) -> str:
    if not isinstance(address, IPv6Address) or address.is_loopback:
        return text
    return f"ipv6:{IPv6Network((int(address) >> 64 << 64, 64))}"
