"""What every shared state offers, wherever it is kept: leases, fenced writes, reads and hints.

`runtime/state.py` keeps it in Redis, `simulator/memory_state.py` in this process. The rules of leases and of fencing
are here once, so that both keep them; tests/contract/test_state_contract.py holds both to the same behaviour.
"""

import abc
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeVar

from trefoil.core import errors
from trefoil.core.common import Lease
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Append, Delete, Increment, Put, Write
from trefoil.runtime.keys import Keys
from trefoil.runtime.telemetry import Metrics

LEASE_TTL_S: Final = 5.0
TIMEOUT_S: Final = 1.0
POLL_S: Final = 1.0
WRITES_MAX: Final = 100_000
LOADS_MAX: Final = 1_200
LOADS_TTL_S: Final = 900.0
ACK_TTL_S: Final = 5.0

T = TypeVar("T")


class Store(abc.ABC):
    """One client of the shared state. It remembers its own leases and the highest epochs that it ever saw."""

    called: ClassVar[str] = "the store"  # in errors

    def __init__(self, cluster: str, clock: Clock, metrics: Metrics | None = None) -> None:
        self.keys = Keys(cluster)
        self._clock = clock
        self._metrics = metrics
        # By role: the epoch held and when it ends on our own monotonic clock, and the highest epoch ever seen.
        self._held_until_s: dict[tuple[str, int], float] = {}
        self._highest_epoch: dict[str, int] = {}

    # Leases

    async def acquire(self, role: str, holder: str, ttl_s: float = LEASE_TTL_S, floor_epoch: int = 0) -> Lease | None:
        """Take a role nobody holds, under a higher epoch than the store, `floor_epoch` or this process ever saw.

        None: somebody holds it (also: this process did before it crashed, until that lease expires).
        """
        started_s = self._clock.monotonic_s()
        async with self._guard():
            stored = await self._epoch(role)
            epoch = max(int(stored or 0), floor_epoch, self._highest_epoch.get(role, 0)) + 1
            lease = Lease(role, holder, epoch, self._clock.now_s() + ttl_s)
            taken = await self._lease(lease, "acquire", ttl_s, stored)
        if taken != 1:
            return None
        self._highest_epoch[role] = epoch
        self._held_until_s[role, epoch] = started_s + ttl_s
        self._show_epoch(role, epoch)
        return lease

    async def renew(self, lease: Lease, ttl_s: float = LEASE_TTL_S) -> bool:
        """Hold on to a role. False: it is lost (overtaken, expired, or the store was emptied); acquire it again."""
        started_s = self._clock.monotonic_s()
        if not self.holds(lease):
            return False
        renewed = Lease(lease.name, lease.holder, lease.epoch, self._clock.now_s() + ttl_s)
        async with self._guard():
            kept = await self._lease(renewed, "renew", ttl_s) == 1
        if kept:
            self._held_until_s[lease.name, lease.epoch] = started_s + ttl_s
        else:
            self._lose(lease)
        return kept

    async def release(self, lease: Lease) -> None:
        """Give a role back at once, if it is still ours."""
        self._lose(lease)
        async with self._guard():
            await self._lease(lease, "release", LEASE_TTL_S)

    def holds(self, lease: Lease) -> bool:
        """Whether the lease is alive on this process's own monotonic clock."""
        return self._clock.monotonic_s() < self._held_until_s.get((lease.name, lease.epoch), float("-inf"))

    async def holder(self, role: str) -> Lease | None:
        """Who holds a role now, as the store knows."""
        return await self.get(self.keys.lease(role), Lease)

    def _lose(self, lease: Lease) -> None:
        self._held_until_s.pop((lease.name, lease.epoch), None)
        self._show_epoch(lease.name, 0)

    def _show_epoch(self, role: str, epoch: int) -> None:
        if self._metrics is not None:
            self._metrics.set("trefoil_lease_epoch", epoch, role=role)

    # Fenced writes

    async def write(self, lease: Lease, writes: Iterable[Write]) -> list[str]:
        """Several writes of one role, all or nothing; returns the stream id of each Append, "" for the others.

        Raises:
            errors.Fenced: the lease ended, or another holder has overtaken it: nothing was written.
            errors.StateUnavailable: the store does not answer; whether it was written is not known.
        """
        operations = list(writes)
        if not self.holds(lease):
            raise errors.Fenced(
                f"the lease of {lease.name} (epoch {lease.epoch}) is not held any more",
                remedy="acquire the role again, then repeat",
            )
        done, results = await self._fenced(lease, operations)
        if not done:
            self._lose(lease)
            if self._metrics is not None:
                self._metrics.inc("trefoil_writes_fenced_total", role=lease.name)
            stored = results[0] or f"none: {self.called} lost its data"
            raise errors.Fenced(
                f"write of {lease.name} with epoch {lease.epoch} refused, stored epoch is {stored}",
                remedy="acquire the role again, then repeat",
            )
        return list(results)

    async def put(self, lease: Lease, key: str, obj: Any, ttl_s: float | None = None) -> None:
        """Fenced SET; raises like `write`."""
        await self.write(lease, [Put(key, obj, ttl_s)])

    async def append(self, lease: Lease, key: str, obj: Any, maxlen: int, ttl_s: float | None = None) -> str:
        """Fenced XADD, returns the entry's id; raises like `write`."""
        return (await self.write(lease, [Append(key, obj, maxlen, ttl_s)]))[0]

    async def delete(self, lease: Lease, key: str) -> None:
        """Fenced DEL; raises like `write`."""
        await self.write(lease, [Delete(key)])

    async def increment(self, lease: Lease, key: str, deltas: Mapping[str, float], ttl_s: float | None = None) -> None:
        """Fenced HINCRBYFLOAT of several fields; raises like `write`."""
        await self.write(lease, [Increment(key, deltas, ttl_s)])

    # Unfenced writes: `load:*` and `ack:*` only, whose writer's id is new at each process start

    @abc.abstractmethod
    async def put_unfenced(self, key: str, obj: Any, ttl_s: float = ACK_TTL_S) -> None:
        """SET of a key that only this process can own."""

    @abc.abstractmethod
    async def append_unfenced(
        self, key: str, obj: Any, maxlen: int = LOADS_MAX, ttl_s: float | None = LOADS_TTL_S
    ) -> None:
        """XADD to a stream that only this process can own."""

    @abc.abstractmethod
    async def delete_unfenced(self, *keys: str) -> None:
        """DEL of keys that only this process can own, when it ends."""

    def _assert_unfenced(self, key: str) -> None:
        allowed = (self.keys.load_prefix(), self.keys.ack_prefix())
        assert key.startswith(allowed), f"{key} has a leased writer: use write() with the lease"

    # Reads

    @abc.abstractmethod
    async def get(self, key: str, cls: type[T]) -> T | None:
        """The value of a key, None when there is none."""

    @abc.abstractmethod
    async def names(self, prefix: str) -> list[str]:
        """All keys that begin so, sorted."""

    @abc.abstractmethod
    async def scan(self, prefix: str, cls: type[T]) -> dict[str, T]:
        """All values whose key begins so, by full key."""

    @abc.abstractmethod
    async def stream(self, key: str, cls: type[T], after_id: str = "0", count: int = 1000) -> list[tuple[str, T]]:
        """At most `count` entries after an id, oldest first."""

    @abc.abstractmethod
    async def tail(self, key: str, cls: type[T], count: int = 1) -> list[tuple[str, T]]:
        """The newest `count` entries, oldest first."""

    @abc.abstractmethod
    async def totals(self, key: str) -> dict[str, float]:
        """The fields of a hash of totals."""

    @abc.abstractmethod
    async def raw(self, key: str, count: int) -> Any:
        """A key of any type as text, for people; of a stream the newest `count` entries."""

    @abc.abstractmethod
    def changes(self, poll_s: float = POLL_S) -> AsyncIterator[str | None]:
        """Full key names as they change, and None at least every `poll_s`: hints may be lost, so readers also poll.

        Never raises for trouble with the store: it ticks on and subscribes again.
        """

    @abc.abstractmethod
    async def ping(self) -> None:
        """Raises `StateUnavailable` unless the store answers."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of the store."""

    # What a store must bring; called under `_guard`, `_fenced` guards itself

    @abc.abstractmethod
    def _guard(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Bounds the time of a call and turns connection trouble into `StateUnavailable`."""

    @abc.abstractmethod
    async def _epoch(self, role: str) -> str:
        """The epoch stored for a role, "" for none."""

    @abc.abstractmethod
    async def _lease(self, lease: Lease, verb: str, ttl_s: float, expected: str = "") -> int:
        """In one step: take (if free and the epoch is still `expected`), renew or release. 1 = done."""

    @abc.abstractmethod
    async def _fenced(self, lease: Lease, writes: Sequence[Write]) -> tuple[bool, Sequence[str]]:
        """In one step: every write, if the stored epoch is the lease's, with the id of each Append.

        Else nothing is written, and the second value holds the stored epoch ("" for none).
        """
