"""Tenants by token, and their limits. Pure: time comes as a number, secrets as digests.

A limit is one number: the time at which all that was admitted would be paid for at the tenant's rate. That is the
"theoretical arrival time" of the generic cell rate algorithm (ITU-T I.371). It may run ahead of now by the burst. One
number a limit is what lets the workers of a dispatcher share it without a lock: two that read it in the same
microsecond admit one request too many.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

INFER: Final = "infer"
ADMIN: Final = "admin"
JOBS: Final = "jobs"
ROLES: Final = (INFER, ADMIN)
REQUESTS, BYTES = 0, 1
LIMITS: Final = 2
"""LimitState a tenant has: one for requests, one for bytes."""
ROUNDING_S: Final = 1e-6
"""A request that is early by less is on time: sums of floats are not exact."""
DEBT_MAX_S: Final = 60.0
"""The longest that one request, however large, keeps its tenant from the next."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Rates of 0 = no limit. `burst` in requests, `burst_bytes` in bytes: what may come at once after a pause.
    `weight`: share of a full queue, against that of other tenants."""

    name: str = ""
    roles: frozenset[str] = frozenset(ROLES)
    rate_per_s: float = 0.0
    burst: float = 1.0
    bytes_per_s: float = 0.0
    burst_bytes: float = 0.0
    weight: float = 1.0


class LimitState(Protocol):
    """LIMITS numbers of a tenant: a list, or memory that processes share."""

    def __getitem__(self, index: int, /) -> float:
        """One of them."""
        ...

    def __setitem__(self, index: int, value: float, /) -> None:
        """Replace one."""
        ...


EVERYBODY: Final = Tenant()
"""Caller without configured tenants, or with the cluster's token: all roles, no limit."""


@dataclass(frozen=True, slots=True)
class LimitExceeded:
    """A request over its tenant's limit. `limit` is in `unit` per second; `wait_s` until it would be admitted."""

    limit: float
    unit: str
    wait_s: float


def digest(token: str | bytes) -> str:
    """What is stored and compared instead of a token: its SHA-256, in hexadecimal."""
    return hashlib.sha256(token.encode() if isinstance(token, str) else token).hexdigest()


class Tenants:
    """Tenants by the digest of their token. A look-up by digest tells nothing by its duration."""

    def __init__(self, by_digest: Mapping[str, Tenant]) -> None:
        self._by_digest = dict(by_digest)

    def authenticate(self, authorization: str | bytes) -> Tenant | None:
        """Tenant of this `authorization` header; None: unknown."""
        given = authorization.encode() if isinstance(authorization, str) else authorization
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            return None
        return self._by_digest.get(digest(token.strip()))

    def all(self) -> Iterable[Tenant]:
        """Every tenant once."""
        return dict.fromkeys(self._by_digest.values())


def admit(tenant: Tenant, paid_until_s: LimitState, size: int, now_s: float) -> LimitExceeded | None:
    """Book one request of `size` bytes, unless it is over a limit; then nothing is booked.

    `paid_until_s`: the tenant's LIMITS numbers, in seconds on the clock of `now_s`.
    """
    costs = (
        (REQUESTS, tenant.rate_per_s, 1.0, max(0.0, tenant.burst - 1), "requests"),
        (BYTES, tenant.bytes_per_s, float(size), tenant.burst_bytes, "bytes"),
    )
    booked = []
    for index, rate, cost, ahead, unit in costs:
        if not rate:
            continue
        tolerance_s = ahead / rate
        cost_s = cost / rate if index == REQUESTS else min(cost / rate, DEBT_MAX_S)
        longest_s = tolerance_s + max(1 / rate, DEBT_MAX_S)
        paid_s = paid_until_s[index]
        if not paid_s <= now_s + longest_s:  # written before this machine started again, or under another limit; NaN
            paid_s = now_s
        wait_s = paid_s - now_s - tolerance_s
        if wait_s > ROUNDING_S:
            return LimitExceeded(rate, unit, wait_s)
        booked.append((index, max(paid_s, now_s) + cost_s))
    for index, paid_s in booked:
        paid_until_s[index] = paid_s
    return None
