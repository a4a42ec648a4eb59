"""State in Redis: all reads and writes. Each key has one writer; one script fences the writes of a role.

All calls return within `timeout_s` or raise `StateUnavailable`, so serving never waits for Redis. Connecting is lazy: a
service starts and continues without Redis. An unreadable value counts as lost: readers leave it out, the log names it
once, and its writer writes it again (`renew`). Meaning of each key, and what happens if it is lost: docs/state.md.
"""

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

import redis.asyncio as redis
import structlog
from pydantic import SecretStr
from redis import exceptions

from trefoil.core import errors
from trefoil.core.common import Lease
from trefoil.runtime import codec, fenced, state_errors
from trefoil.runtime.clock import Clock, WallClock
from trefoil.runtime.fenced import Append, Delete, Put, SetFields, Write
from trefoil.runtime.keys import Keys, series_name
from trefoil.runtime.redis_client import make_client, read_hints
from trefoil.runtime.telemetry import Metrics

__all__ = [
    "ACK_TTL_S",
    "LEASE_TTL_S",
    "Append",
    "Delete",
    "Keys",
    "Put",
    "SetFields",
    "State",
    "Write",
    "entry_order",
    "series_name",
]

LEASE_TTL_S: Final = 5.0
TIMEOUT_S: Final = 1.0
POLL_S: Final = 1.0
WRITES_MAX: Final = 100_000
LOADS_MAX: Final = 1_200
LOADS_TTL_S: Final = 900.0
ACK_TTL_S: Final = 5.0
SIGNAL_TTL_S: Final = 3.0
REPAIR_S: Final = 2.0
TYPES_S: Final = 7200.0  # streams and hashes that are looked after: written so lately, as an hour's totals are
PAGES_MAX: Final = 20  # of unreadable entries in a row, that one read of a stream goes past
UNREADABLE_MAX: Final = 1_000
NEVER_ENDS: Final = -1  # PTTL of a key without one
_ENTRY_ID: Final = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
T = TypeVar("T")
Entries = list[tuple[Any, Mapping[bytes, bytes]]]


@dataclass(slots=True)
class _Held:
    """What this process has written of a role that it holds."""

    lease_data: bytes = b""
    values: dict[str, bytes] = field(default_factory=dict)  # by key, of those that never expire
    types: dict[str, tuple[str, float]] = field(default_factory=dict)  # of streams and hashes, and when written last
    # Of these the ones that were deleted because they were overwritten: their writer must learn of it.
    deleted: set[str] = field(default_factory=set)
    attempts: dict[str, bytes] = field(default_factory=dict)  # with an unknown outcome
    repaired_s: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class State:
    """State in Redis, one connection pool; safe to share between tasks of one event loop.

    It remembers its own leases and the highest epochs that it ever saw.
    """

    def __init__(
        self, client: "redis.Redis", cluster: str, clock: Clock, timeout_s: float, metrics: Metrics | None = None
    ) -> None:
        self.keys = Keys(cluster)
        self._clock = clock
        self._metrics = metrics
        # By role: the epoch held and when it ends on our own monotonic clock, and the highest epoch ever seen.
        self._held_until_s: dict[tuple[str, int], float] = {}
        self._highest_epoch: dict[str, int] = {}
        self._held: dict[str, _Held] = {}
        self.unreadable: dict[str, str] = {}  # keys that could not be read when they were read last, and why
        self._read: dict[str, tuple[type, bytes, Any]] = {}  # what was last decoded, by key: most change seldom
        self.on_unreadable: Callable[[str, str], object] = _ignore
        """Gets each key that cannot be read, and why, once until it is read again."""
        self._log = structlog.get_logger()
        self._client: Any = client  # its stubs allow for decoded responses, which we do not ask for
        self._timeout_s = timeout_s
        self._write_script = client.register_script(fenced.WRITE_SCRIPT)
        self._lease_script = client.register_script(fenced.LEASE_SCRIPT)

    @classmethod
    def connect(
        cls,
        url: SecretStr | str,
        cluster: str,
        *,
        clock: Clock | None = None,
        timeout_s: float = TIMEOUT_S,
        metrics: Metrics | None = None,
    ) -> "State":
        """Connect, lazily: nothing is sent before the first call. `metrics` count leases, refusals and silences."""
        return cls(make_client(url, timeout_s), cluster, clock or WallClock(), timeout_s, metrics)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def ping(self) -> None:
        """Check that Redis answers; raises `StateUnavailable`."""
        async with self._guard():
            await self._client.ping()

    async def clock_offset_s(self) -> float:
        """Seconds by which `now_s` is ahead of Redis' own clock, negative: behind; as few as its answer's way allows.

        Raises:
            errors.StateUnavailable: Redis does not answer.
        """
        asked_s = self._clock.monotonic_s()
        async with self._guard():
            seconds, microseconds = await self._client.time()
        half_way_s = (self._clock.monotonic_s() - asked_s) / 2
        ahead_s = self._clock.now_s() - half_way_s - (seconds + microseconds / 1e6)
        return math.copysign(max(0.0, abs(ahead_s) - half_way_s), ahead_s) + 0.0  # never -0.0

    # Leases

    async def acquire(self, role: str, holder: str, ttl_s: float = LEASE_TTL_S, floor_epoch: int = 0) -> Lease | None:
        """Acquire a free role, under a higher epoch than Redis, `floor_epoch` or this process ever saw.

        None: it is held (also: by this process before it crashed, until that lease expires).
        """
        started_s = self._clock.monotonic_s()
        async with self._guard():
            stored = await self._epoch(role)
            epoch = state_errors.next_epoch(stored, floor_epoch, self._highest_epoch.get(role, 0))
            lease = Lease(role, holder, epoch, self._clock.now_s() + ttl_s)
            taken = await self._lease(lease, "acquire", ttl_s, stored)
        if taken != 1:
            return None
        self._highest_epoch[role] = lease.epoch
        self._held_until_s[role, lease.epoch] = started_s + ttl_s
        self._show_epoch(role, lease.epoch)
        return lease

    async def renew(self, lease: Lease, ttl_s: float = LEASE_TTL_S) -> bool:
        """Renew a role. False: it is lost (overtaken, expired, or Redis was emptied); acquire it again.

        Every REPAIR_S it also writes again this role's values that were overwritten or deleted.
        """
        started_s = self._clock.monotonic_s()
        if not self.holds(lease):
            self._of_role(lease.name).values.clear()  # another holder may have written since
            return False
        renewed = Lease(lease.name, lease.holder, lease.epoch, self._clock.now_s() + ttl_s)
        async with self._guard():
            kept = await self._lease(renewed, "renew", ttl_s) == 1
        if kept:
            self._held_until_s[lease.name, lease.epoch] = started_s + ttl_s
            await self._repair(lease)
        else:
            self._lose(lease)
        return kept

    async def release(self, lease: Lease) -> None:
        """Release a role at once, if it is still ours."""
        self._lose(lease)
        async with self._guard():
            await self._lease(lease, "release", LEASE_TTL_S)

    def holds(self, lease: Lease) -> bool:
        """True if the lease is alive on this process's own monotonic clock."""
        return self._clock.monotonic_s() < self._held_until_s.get((lease.name, lease.epoch), float("-inf"))

    async def holder(self, role: str) -> Lease | None:
        """Holder of a role now, as Redis knows; what stands for longer than any lease is none."""
        return await self.get(self.keys.lease(role), Lease, fenced.LEASE_MAX_S)

    async def epoch_of(self, role: str) -> int:
        """Highest epoch that a role was taken under, as Redis knows now; 0: it knows none."""
        async with self._guard():
            return state_errors.parse_epoch(await self._epoch(role))

    def _lose(self, lease: Lease) -> None:
        if self._held_until_s.pop((lease.name, lease.epoch), None) is not None:
            held = self._of_role(lease.name)
            held.values.clear()  # the next holder of the role writes its own values
            held.attempts.clear()
        self._show_epoch(lease.name, 0)

    def _of_role(self, role: str) -> _Held:
        return self._held.setdefault(role, _Held())

    def _show_epoch(self, role: str, epoch: int) -> None:
        if self._metrics is not None:
            self._metrics.set("trefoil_lease_epoch", epoch, role=role)

    # Fenced writes

    async def write(self, lease: Lease, writes: Iterable[Write]) -> list[str]:
        """Write operations of one role, all or nothing; returns the stream id of each Append, "" for the others.

        Raises:
            errors.Fenced: the lease ended, or another holder has overtaken it: nothing was written.
            errors.StateUnreadable: a stream or hash of the role was overwritten: it is deleted, and nothing
                was written; repeat, with everything that the key should hold.
            errors.StateUnavailable: Redis does not answer; whether it was written is not known.
        """
        operations = [fenced.encoded(write) for write in writes]
        values = {write.key: write.data for write in operations if isinstance(write, fenced.PutBytes)}
        held = self._of_role(lease.name)
        async with held.lock:  # one after the other, so that what was written last is known
            if not self.holds(lease):
                raise errors.Fenced(
                    f"the lease of {lease.name} (epoch {lease.epoch}) is not held any more",
                    remedy="acquire the role again, then repeat",
                )
            if lost := held.deleted.intersection(write.key for write in operations):
                held.deleted -= lost
                raise state_errors.unreadable(min(lost), "it was overwritten; it is deleted, and empty now")
            held.attempts |= values
            outcome, results = await self._fenced(lease, operations)
            if outcome == fenced.DONE:
                held.values |= values
                for operation in operations:
                    if isinstance(operation, Delete):
                        held.values.pop(operation.key, None)
                    elif isinstance(operation, Append | SetFields):
                        held.types[operation.key] = fenced.type_of(operation), self._clock.monotonic_s()
            for key in values:
                held.attempts.pop(key, None)
        if outcome == fenced.UNREADABLE:
            error = state_errors.unreadable(results[0], "not of the type that its writer writes; deleted")
            self._note(error)
            raise error
        if outcome == fenced.REFUSED:
            self._lose(lease)
            if self._metrics is not None:
                self._metrics.inc("trefoil_writes_fenced_total", role=lease.name)
            stored = results[0][: fenced.EPOCH_BYTES_MAX] or "none: Redis lost its data"
            raise errors.Fenced(
                f"write of {lease.name} with epoch {lease.epoch} refused, stored epoch is {stored}",
                remedy="acquire the role again, then repeat",
            )
        return list(results)

    async def put(self, lease: Lease, key: str, obj: Any, ttl_s: float | None = None) -> None:
        """Put by fenced SET; raises like `write`."""
        await self.write(lease, [Put(key, obj, ttl_s)])

    async def append(self, lease: Lease, key: str, obj: Any, maxlen: int, ttl_s: float | None = None) -> str:
        """Append by fenced XADD, returns the entry's id; raises like `write`."""
        return (await self.write(lease, [Append(key, obj, maxlen, ttl_s)]))[0]

    async def delete(self, lease: Lease, key: str) -> None:
        """Delete by fenced DEL; raises like `write`."""
        await self.write(lease, [Delete(key)])

    async def _repair(self, lease: Lease) -> None:
        """Write again this role's values that were overwritten or deleted."""
        held = self._of_role(lease.name)
        now_s = self._clock.monotonic_s()
        if now_s - held.repaired_s < REPAIR_S:
            return
        held.repaired_s = now_s
        try:
            async with held.lock:
                stored = await self._values(list(held.values))
                wrong = [key for key, data in stored.items() if data != held.values[key]]
                for key in [key for key in wrong if key in held.attempts and stored[key] == held.attempts[key]]:
                    held.values[key] = held.attempts.pop(key)
                    wrong.remove(key)
                held.types = {key: of for key, of in held.types.items() if now_s - of[1] < TYPES_S}
                types = await self._send(lambda pipeline: [pipeline.type(key) for key in held.types])
                found = zip(held.types.items(), map(_text, types), strict=True)
                foreign = [key for (key, (wanted, _)), kind in found if kind not in ("none", wanted)]
                if wrong or foreign:
                    puts = [fenced.PutBytes(key, held.values[key]) for key in wrong]
                    await self._fenced(lease, [*puts, *map(Delete, foreign)])
                held.deleted |= set(foreign)
        except errors.StateUnavailable as error:
            self._log.warning("what others may have overwritten is not looked at", error=str(error))
            return
        if wrong or foreign:
            self._log.warning("another process overwrote keys", written_again=wrong, deleted=foreign, role=lease.name)

    # The two scripts

    async def _epoch(self, role: str) -> bytes:
        key = self.keys.epoch(role)
        data = (await self._values([key], fenced.EPOCH_BYTES_MAX))[key]
        return data if isinstance(data, bytes) else b""

    async def _lease(self, lease: Lease, verb: str, ttl_s: float, expected: bytes = b"") -> int:
        keys = [self.keys.epoch(lease.name), self.keys.lease(lease.name)]
        held, data = self._of_role(lease.name), codec.encode(lease)
        lost = b"" if any(role == lease.name for role, _ in self._held_until_s) else held.lease_data
        parts: list[Any] = [verb, lease.epoch, data, fenced.milliseconds(ttl_s), expected, lost, lease.holder]
        done = int(await self._lease_script(keys=keys, args=parts))
        if done == 1:
            held.lease_data = data
        return done

    async def _fenced(self, lease: Lease, writes: Sequence[Write]) -> tuple[int, Sequence[str]]:
        keys = [self.keys.epoch(lease.name), self.keys.writes(lease.name), *(write.key for write in writes)]
        now_ms = fenced.milliseconds(self._clock.now_s())
        parts: list[Any] = [lease.epoch, now_ms, self.keys.changed(), WRITES_MAX]
        for operation in writes:
            kind, values = fenced.arguments(operation)
            parts += [kind, len(values), *values]
        async with self._guard():
            outcome, *results = await self._write_script(keys=keys, args=parts)
        return int(outcome), [_text(result) for result in results]

    # Unfenced writes: `load:*` and `ack:*` only, whose writer's id is new at each process start

    async def put_unfenced(self, key: str, obj: Any, ttl_s: float = ACK_TTL_S) -> None:
        """Put by SET a key that only this process can own."""
        self._assert_unfenced(key)
        data = codec.encode(obj)
        await self._send(
            lambda pipeline: (
                pipeline.set(key, data, px=fenced.milliseconds(ttl_s)),
                pipeline.publish(self.keys.changed(), key),
            )
        )

    async def append_unfenced(
        self, key: str, obj: Any, maxlen: int = LOADS_MAX, ttl_s: float | None = LOADS_TTL_S
    ) -> None:
        """Append by XADD to a stream that only this process can own; what else stands there is deleted first."""
        self._assert_unfenced(key)
        fields = {"d": codec.encode(obj)}

        def append(pipeline: Any) -> None:
            pipeline.xadd(key, fields, maxlen=maxlen, approximate=False)
            if ttl_s is not None:
                pipeline.pexpire(key, fenced.milliseconds(ttl_s))

        try:
            await self._send(append, key)
        except errors.StateUnreadable as error:
            self._note(error)
            await self._send(lambda pipeline: pipeline.delete(key))
            await self._send(append, key)

    async def delete_unfenced(self, *keys: str) -> None:
        """Delete by DEL keys that only this process can own, when it ends."""
        for key in keys:
            self._assert_unfenced(key)
        await self._send(
            lambda pipeline: [(pipeline.delete(key), pipeline.publish(self.keys.changed(), key)) for key in keys]
        )

    async def _send(self, commands: Callable[[Any], object], key: str = "") -> list[Any]:
        """Send commands in one pipeline; `key`: of the stream that they append to."""
        async with self._guard(), self._client.pipeline(transaction=False) as pipeline:
            commands(pipeline)
            results: list[Any] = await pipeline.execute(raise_on_error=False)
            for result in results:
                if isinstance(result, Exception):
                    if key and state_errors.is_spoilt(result):
                        raise state_errors.unreadable(key, str(result))
                    raise result
        return results

    def _assert_unfenced(self, key: str) -> None:
        allowed = (self.keys.load_prefix(), self.keys.ack_prefix())
        assert key.startswith(allowed), f"{key} has a leased writer: use write() with the lease"

    # Reads: what cannot be read is as if it were not there

    async def get(self, key: str, cls: type[T], ttl_s: float | None = None) -> T | None:
        """Get the value of a key; None when there is none, or none that can be read. `ttl_s`: as in `scan`."""
        return self._decoded(key, cls, (await self._values([key], ttl_s=ttl_s))[key])

    async def names(self, prefix: str) -> list[str]:
        """List all keys that begin so, sorted."""
        pattern = "".join(f"[{c}]" if c in "*?[" else "\\\\" if c == "\\" else c for c in prefix) + "*"
        async with self._guard():
            found = {key async for key in self._client.scan_iter(match=pattern, count=1000)}
        return sorted(_text(key) for key in found if _is_text(key))

    async def scan(self, prefix: str, cls: type[T], ttl_s: float | None = None) -> dict[str, T]:
        """Scan all values that can be read and whose key begins so, by full key. `ttl_s`: for how long their writer
        writes them; what stands for longer is none of them."""
        keys = await self.names(prefix)
        for known in (self.unreadable, self._read):
            for gone in [key for key in known.keys() - set(keys) if key.startswith(prefix)]:
                del known[gone]
        decoded = {key: self._decoded(key, cls, data) for key, data in (await self._values(keys, ttl_s=ttl_s)).items()}
        return {key: value for key, value in decoded.items() if value is not None}

    async def stream(self, key: str, cls: type[T], after_id: str = "0", count: int = 1000) -> list[tuple[str, T]]:
        """Read at most `count` entries of a stream after an id, oldest first; all of one that was begun again."""

        async def page(after: str, size: int) -> Entries:
            [entries] = await self._send(lambda pipeline: pipeline.xrange(key, f"({after}", "+", size), key)
            if not entries:
                [newest] = await self._send(lambda pipeline: pipeline.xrevrange(key, count=1), key)
                if newest and entry_order(newest[0][0]) < entry_order(after):
                    [entries] = await self._send(lambda pipeline: pipeline.xrange(key, "-", "+", size), key)
            return list(entries)

        return await self._readable(key, cls, page, after_id, count)

    async def tail(self, key: str, cls: type[T], count: int = 1) -> list[tuple[str, T]]:
        """Read the newest `count` entries of a stream, oldest first."""

        async def page(before: str, size: int) -> Entries:
            first = before if before == "+" else f"({before}"
            [entries] = await self._send(lambda pipeline: pipeline.xrevrange(key, max=first, count=size), key)
            return list(entries)

        return (await self._readable(key, cls, page, "+", count))[::-1]

    async def fields(self, key: str) -> dict[str, str]:
        """Read the fields of a hash."""
        try:
            [fields] = await self._send(lambda pipeline: pipeline.hgetall(key), key)
        except errors.StateUnreadable as error:
            self._note(error)
            return {}
        self.unreadable.pop(key, None)
        return {_text(name): _text(value) for name, value in fields.items() if _is_text(name) and _is_text(value)}

    async def totals(self, key: str) -> dict[str, float]:
        """Read the fields of a hash of totals; one that can be no sum is left out, and its key is named."""
        known, fields = self.unreadable.get(key), await self.fields(key)
        sums = {name: state_errors.parse_sum(name, text) for name, text in fields.items()}
        found = {name: value for name, value in sums.items() if value is not None}
        if wrong := sorted(fields.keys() - found.keys()):
            if known is not None:  # said already
                self.unreadable[key] = known
            self._note(state_errors.unreadable(key, f"{wrong[0]} = {fields[wrong[0]]:.40} is not a sum"))
        return found

    async def _values(
        self, keys: Sequence[str], size_max: int = state_errors.VALUE_MAX_BYTES, ttl_s: float | None = None
    ) -> dict[str, Any]:
        """Bytes of each key, at most `size_max + 1`; b"" of none; an exception where no text, or beyond `ttl_s`."""
        if not keys:
            return {}
        async with self._guard(), self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.getrange(key, 0, size_max)
            found: dict[str, Any] = dict(zip(keys, await pipeline.execute(raise_on_error=False), strict=True))
            for data in found.values():
                if isinstance(data, Exception) and state_errors.code_of(data) != state_errors.WRONGTYPE:
                    raise data
        if ttl_s is not None:
            left = await self._send(lambda pipeline: [pipeline.pttl(key) for key in keys])
            for key, left_ms in zip(keys, left, strict=True):
                if left_ms == NEVER_ENDS or left_ms > fenced.milliseconds(ttl_s):
                    found[key] = ValueError(f"it stands for more than the {ttl_s:g} s that it is written for")
        return found

    def _decoded(self, key: str, cls: type[T], data: Any) -> T | None:
        if isinstance(data, bytes) and not data:
            self.unreadable.pop(key, None)
            return None
        try:
            if isinstance(data, Exception):
                raise state_errors.unreadable(key, str(data))
            if self._read.get(key, ())[:2] != (cls, data):
                self._read[key] = cls, data, state_errors.decode_value(self.keys, key, cls, data)
        except errors.StateUnreadable as error:
            self._note(error)
            return None
        if self.unreadable.pop(key, None) is not None:
            self._log.info("key is read again", key=key)
        return cast(T, self._read[key][2])

    async def _readable(
        self, key: str, cls: type[T], page: Callable[[str, int], Awaitable[Entries]], at: str, count: int
    ) -> list[tuple[str, T]]:
        """Read pages until `count` entries are found that can be read, or the stream's end."""
        found: list[tuple[str, T]] = []
        bad: errors.StateUnreadable | None = None
        try:
            for _ in range(PAGES_MAX):
                size = count - len(found)
                entries = await page(at, size)
                for entry_id, fields in entries:
                    at = _text(entry_id)
                    try:
                        found.append((at, state_errors.decode_value(self.keys, key, cls, fields[b"d"])))
                    except (errors.StateUnreadable, KeyError) as error:
                        bad = state_errors.unreadable(key, f"entry {at} is none: {getattr(error, 'message', error)}")
                if len(entries) < size or len(found) == count:
                    break
        except errors.StateUnreadable as error:
            bad = error
        if bad is not None:
            self._note(bad)
        elif self.unreadable.pop(key, None) is not None:
            self._log.info("key is read again", key=key)
        return found

    def _note(self, error: errors.StateUnreadable) -> None:
        """Name a key that cannot be read, once."""
        if error.field not in self.unreadable:
            for forgotten in list(self.unreadable)[: max(0, len(self.unreadable) + 1 - UNREADABLE_MAX)]:
                del self.unreadable[forgotten]
            self._log.warning("key cannot be read; going on without it", why=str(error))
            self.on_unreadable(error.field, error.message)
            if self._metrics is not None:
                self._metrics.inc("trefoil_state_unreadable_total")
        self.unreadable[error.field] = str(error)

    async def raw(self, key: str, count: int) -> Any:
        """Read a key of any type as text, for people; of a stream the newest `count` entries."""
        async with self._guard():
            kind = _text(await self._client.type(key))
            if kind == "string":
                return _text(await self._client.get(key) or b"")
            if kind == "hash":
                return {_text(name): _text(value) for name, value in (await self._client.hgetall(key)).items()}
            if kind == "stream":
                entries = (await self._client.xrevrange(key, count=count))[::-1]
                return [{_text(name): _text(value) for name, value in fields.items()} for _, fields in entries]
        return f"({kind})"

    async def changes(self, poll_s: float = POLL_S) -> AsyncIterator[str | None]:
        """Watch full key names as they change, and None at least every `poll_s`: hints may be lost, readers also poll.

        Never raises for trouble with Redis: it ticks on and subscribes again.
        """
        while True:
            with contextlib.suppress(errors.StateUnavailable):  # counted; readers of the keys say why
                async for change in self._subscribed(poll_s):
                    yield change
            yield None
            await self._clock.sleep(poll_s)

    async def _subscribed(self, poll_s: float) -> AsyncIterator[str | None]:
        pubsub = self._client.pubsub()
        try:
            async with self._guard():
                await pubsub.subscribe(self.keys.changed())
            yield None  # whatever changed before we listened
            poll_at_s = self._clock.monotonic_s() + poll_s
            while True:
                wait_s = max(0.0, poll_at_s - self._clock.monotonic_s())
                async with self._guard(extra_s=wait_s):
                    changed = await read_hints(pubsub, wait_s)
                for key in filter(_is_text, changed):
                    yield _text(key)
                if self._clock.monotonic_s() >= poll_at_s:
                    yield None
                    poll_at_s = self._clock.monotonic_s() + poll_s
        finally:
            with contextlib.suppress(exceptions.RedisError, OSError):
                await pubsub.aclose()

    @contextlib.asynccontextmanager
    async def _guard(self, extra_s: float = 0.0) -> AsyncIterator[None]:
        """Bound the time of a call and turn whatever it fails by into `StateUnavailable`."""
        try:
            async with asyncio.timeout(self._timeout_s + extra_s):
                yield
        except exceptions.DataError:  # of ours: a bug
            raise
        except (exceptions.RedisError, TimeoutError, OSError) as error:
            if self._metrics is not None:
                self._metrics.inc("trefoil_state_errors_total")
            raise state_errors.translate(error, self._timeout_s) from error


def _ignore(key: str, why: str) -> None:
    """Default of `State.on_unreadable`: the log names the key."""


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def entry_order(entry_id: bytes | str) -> tuple[int, int]:
    """Order of a stream's ids: milliseconds, number within them; (0, 0) of what is not an id."""
    found = _ENTRY_ID.fullmatch(_text(entry_id))
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)
