"""State in Redis: every read, every write. One writer per key; a role's writes go through one script that fences them.

All calls answer within `timeout_s` or raise `StateUnavailable`: serving never waits for Redis. Connecting is lazy, so
a service starts, and goes on, without it. What each key means and what happens when it is lost: docs/state.md.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import redis.asyncio as redis
from pydantic import SecretStr
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from trefoil.core import errors
from trefoil.core.common import Lease
from trefoil.runtime import codec, fenced
from trefoil.runtime.clock import Clock, WallClock
from trefoil.runtime.fenced import Append, Delete, Increment, Put, Write
from trefoil.runtime.keys import Keys, series_name
from trefoil.runtime.telemetry import Metrics

__all__ = [
    "ACK_TTL_S",
    "LEASE_TTL_S",
    "Append",
    "Delete",
    "Increment",
    "Keys",
    "Put",
    "State",
    "Write",
    "series_name",
]

LEASE_TTL_S: Final = 5.0
TIMEOUT_S: Final = 1.0
POLL_S: Final = 1.0
WRITES_MAX: Final = 100_000
LOADS_MAX: Final = 1_200
LOADS_TTL_S: Final = 900.0
ACK_TTL_S: Final = 5.0

T = TypeVar("T")


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
        plain = url.get_secret_value() if isinstance(url, SecretStr) else url
        try:
            client = redis.Redis.from_url(
                plain,
                protocol=2,
                # _guard bounds every call. With a timeout of its own the client sends under asyncio.wait_for, which in
                # Python 3.11 can swallow a cancellation: the task then outlives its service's shutdown.
                socket_timeout=None,
                socket_connect_timeout=timeout_s,
                retry=Retry(
                    NoBackoff(), 0
                ),  # a write that timed out may have been done: repeating is the caller's choice
                health_check_interval=0,
            )
        except ValueError as error:
            raise errors.SettingError(
                f"{error}", field="redis_url", remedy="write redis://[:password@]host:port/0 or unix://path"
            ) from error
        return cls(client, cluster, clock or WallClock(), timeout_s, metrics)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def ping(self) -> None:
        """Check that Redis answers; raises `StateUnavailable`."""
        async with self._guard():
            await self._client.ping()

    # Leases

    async def acquire(self, role: str, holder: str, ttl_s: float = LEASE_TTL_S, floor_epoch: int = 0) -> Lease | None:
        """Acquire a role nobody holds, under a higher epoch than Redis, `floor_epoch` or this process ever saw.

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
        """Renew a role. False: it is lost (overtaken, expired, or Redis was emptied); acquire it again."""
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
        """Release a role at once, if it is still ours."""
        self._lose(lease)
        async with self._guard():
            await self._lease(lease, "release", LEASE_TTL_S)

    def holds(self, lease: Lease) -> bool:
        """True if the lease is alive on this process's own monotonic clock."""
        return self._clock.monotonic_s() < self._held_until_s.get((lease.name, lease.epoch), float("-inf"))

    async def holder(self, role: str) -> Lease | None:
        """Holder of a role now, as Redis knows."""
        return await self.get(self.keys.lease(role), Lease)

    def _lose(self, lease: Lease) -> None:
        self._held_until_s.pop((lease.name, lease.epoch), None)
        self._show_epoch(lease.name, 0)

    def _show_epoch(self, role: str, epoch: int) -> None:
        if self._metrics is not None:
            self._metrics.set("trefoil_lease_epoch", epoch, role=role)

    # Fenced writes

    async def write(self, lease: Lease, writes: Iterable[Write]) -> list[str]:
        """Write operations of one role, all or nothing; returns the stream id of each Append, "" for the others.

        Raises:
            errors.Fenced: the lease ended, or another holder has overtaken it: nothing was written.
            errors.StateUnavailable: Redis does not answer; whether it was written is not known.
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
            stored = results[0] or "none: Redis lost its data"
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

    async def increment(self, lease: Lease, key: str, deltas: Mapping[str, float], ttl_s: float | None = None) -> None:
        """Increment several fields by fenced HINCRBYFLOAT; raises like `write`."""
        await self.write(lease, [Increment(key, deltas, ttl_s)])

    # The two scripts

    async def _epoch(self, role: str) -> str:
        return _text(await self._client.get(self.keys.epoch(role)) or b"")

    async def _lease(self, lease: Lease, verb: str, ttl_s: float, expected: str = "") -> int:
        keys = [self.keys.epoch(lease.name), self.keys.lease(lease.name)]
        parts: list[Any] = [verb, lease.epoch, codec.encode(lease), fenced.milliseconds(ttl_s), expected]
        return int(await self._lease_script(keys=keys, args=parts))

    async def _fenced(self, lease: Lease, writes: Sequence[Write]) -> tuple[bool, Sequence[str]]:
        keys = [self.keys.epoch(lease.name), self.keys.writes(lease.name), *(write.key for write in writes)]
        now_ms = fenced.milliseconds(self._clock.now_s())
        parts: list[Any] = [lease.epoch, now_ms, self.keys.changed(), WRITES_MAX]
        for operation in writes:
            kind, values = fenced.arguments(operation)
            parts += [kind, len(values), *values]
        async with self._guard():
            done, *results = await self._write_script(keys=keys, args=parts)
        return done == 1, [_text(result) for result in results]

    # Unfenced writes: `load:*` and `ack:*` only, whose writer's id is new at each process start

    async def put_unfenced(self, key: str, obj: Any, ttl_s: float = ACK_TTL_S) -> None:
        """Put by SET a key that only this process can own."""
        self._assert_unfenced(key)
        async with self._guard(), self._client.pipeline(transaction=False) as pipeline:
            pipeline.set(key, codec.encode(obj), px=fenced.milliseconds(ttl_s))
            pipeline.publish(self.keys.changed(), key)
            await pipeline.execute()

    async def append_unfenced(
        self, key: str, obj: Any, maxlen: int = LOADS_MAX, ttl_s: float | None = LOADS_TTL_S
    ) -> None:
        """Append by XADD to a stream that only this process can own."""
        self._assert_unfenced(key)
        async with self._guard(), self._client.pipeline(transaction=False) as pipeline:
            pipeline.xadd(key, {"d": codec.encode(obj)}, maxlen=maxlen, approximate=False)
            if ttl_s is not None:
                pipeline.pexpire(key, fenced.milliseconds(ttl_s))
            await pipeline.execute()

    async def delete_unfenced(self, *keys: str) -> None:
        """Delete by DEL keys that only this process can own, when it ends."""
        for key in keys:
            self._assert_unfenced(key)
        async with self._guard(), self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.delete(key)
                pipeline.publish(self.keys.changed(), key)
            await pipeline.execute()

    def _assert_unfenced(self, key: str) -> None:
        allowed = (self.keys.load_prefix(), self.keys.ack_prefix())
        assert key.startswith(allowed), f"{key} has a leased writer: use write() with the lease"

    # Reads

    async def get(self, key: str, cls: type[T]) -> T | None:
        """Get the value of a key, None when there is none."""
        async with self._guard():
            data = await self._client.get(key)
        return None if data is None else codec.decode(cls, data)

    async def names(self, prefix: str) -> list[str]:
        """List all keys that begin so, sorted."""
        pattern = "".join(f"[{c}]" if c in "*?[" else "\\\\" if c == "\\" else c for c in prefix) + "*"
        async with self._guard():
            return sorted({_text(key) async for key in self._client.scan_iter(match=pattern, count=1000)})

    async def scan(self, prefix: str, cls: type[T]) -> dict[str, T]:
        """Scan all values whose key begins so, by full key."""
        keys = await self.names(prefix)
        if not keys:
            return {}
        async with self._guard():
            values = await self._client.mget(keys)
        return {key: codec.decode(cls, data) for key, data in zip(keys, values, strict=True) if data is not None}

    async def stream(self, key: str, cls: type[T], after_id: str = "0", count: int = 1000) -> list[tuple[str, T]]:
        """Read at most `count` entries of a stream after an id, oldest first."""
        async with self._guard():
            entries = await self._client.xrange(key, min=f"({after_id}", max="+", count=count)
        return _entries(cls, entries)

    async def tail(self, key: str, cls: type[T], count: int = 1) -> list[tuple[str, T]]:
        """Read the newest `count` entries of a stream, oldest first."""
        async with self._guard():
            entries = await self._client.xrevrange(key, count=count)
        return _entries(cls, entries[::-1])

    async def totals(self, key: str) -> dict[str, float]:
        """Read the fields of a hash of totals."""
        async with self._guard():
            fields = await self._client.hgetall(key)
        return {_text(name): float(value) for name, value in fields.items()}

    async def raw(self, key: str, count: int) -> Any:
        """Read a key of any type as text, for people; of a stream the newest `count` entries."""
        async with self._guard():
            kind = _text(await self._client.type(key))
            if kind == "string":
                return _readable(await self._client.get(key) or b"")
            if kind == "hash":
                return {_text(name): _readable(value) for name, value in (await self._client.hgetall(key)).items()}
            if kind == "stream":
                entries = (await self._client.xrevrange(key, count=count))[::-1]
                return [{_text(name): _readable(value) for name, value in fields.items()} for _, fields in entries]
        return f"({kind})"

    async def changes(self, poll_s: float = POLL_S) -> AsyncIterator[str | None]:
        """Watch full key names as they change, and None at least every `poll_s`: hints may be lost, readers also poll.

        Never raises for trouble with Redis: it ticks on and subscribes again.
        """
        while True:
            with contextlib.suppress(errors.StateUnavailable):
                async for change in self._subscribed(poll_s):
                    yield change
            yield None
            await self._clock.sleep(poll_s)

    async def _subscribed(self, poll_s: float) -> AsyncIterator[str | None]:
        pubsub = self._client.pubsub(ignore_subscribe_messages=True)
        try:
            async with self._guard():
                await pubsub.subscribe(self.keys.changed())
            yield None  # whatever changed before we listened
            poll_at_s = self._clock.monotonic_s() + poll_s
            while True:
                wait_s = max(0.0, poll_at_s - self._clock.monotonic_s())
                async with self._guard(extra_s=wait_s):
                    message = await pubsub.get_message(timeout=wait_s)
                if message is not None:
                    yield _text(message["data"])
                if self._clock.monotonic_s() >= poll_at_s:
                    yield None
                    poll_at_s = self._clock.monotonic_s() + poll_s
        finally:
            with contextlib.suppress(exceptions.RedisError, OSError):
                await pubsub.aclose()

    @contextlib.asynccontextmanager
    async def _guard(self, extra_s: float = 0.0) -> AsyncIterator[None]:
        """Bound the time of a call and turn connection trouble into `StateUnavailable`."""
        try:
            async with asyncio.timeout(self._timeout_s + extra_s):
                yield
        except (exceptions.ConnectionError, exceptions.TimeoutError, TimeoutError, OSError) as error:
            if self._metrics is not None:
                self._metrics.inc("trefoil_state_errors_total")
            # While connecting, redis-py wraps the refusal of a password into a plain ConnectionError.
            if "authentication" in str(error).lower() or "password" in str(error):
                raise errors.StateUnavailable(
                    f"Redis refuses the password ({error})", remedy="correct the password in redis_url"
                ) from error
            raise errors.StateUnavailable(
                f"Redis does not answer within {self._timeout_s:g} s ({error or type(error).__name__})",
                remedy="start Redis, or correct redis_url; until then the last values stay in use",
            ) from error
        except exceptions.ResponseError as error:
            if not str(error).startswith(("MISCONF", "OOM", "READONLY", "LOADING", "MASTERDOWN", "NOPERM")):
                raise
            raise errors.StateUnavailable(f"Redis refuses ({error})", remedy="mend the Redis server") from error


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _readable(value: bytes) -> str:
    return value.decode(errors="replace")


def _entries(cls: type[T], entries: Any) -> list[tuple[str, T]]:
    return [(_text(entry_id), codec.decode(cls, fields[b"d"])) for entry_id, fields in entries]
