"""The shared state without Redis: the same leases, fencing, streams, totals and hints inside one process.

A `MemoryStore` stands for the server, a `MemoryState` for one client of it. Values are kept as the bytes that Redis
would hold, so that what does not survive the codec does not survive here either. Nothing runs in the background: a key
whose time is over is dropped when it is looked at, on the store's own clock, which may be a simulated one.
"""

import asyncio
import contextlib
import math
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from trefoil.core import errors
from trefoil.core.common import Lease
from trefoil.runtime import codec, fenced
from trefoil.runtime.clock import Clock, WallClock
from trefoil.runtime.fenced import Append, Delete, Increment, Put, Write
from trefoil.runtime.store import ACK_TTL_S, LOADS_MAX, LOADS_TTL_S, POLL_S, WRITES_MAX, Store
from trefoil.runtime.telemetry import Metrics

HINTS_MAX: Final = 100_000  # waiting for one subscriber; more are dropped: hints may be lost, readers also poll
TOTAL_DIGITS: Final = 17  # after the point, as HINCRBYFLOAT writes a long double

T = TypeVar("T")
EntryId = tuple[int, int]  # (milliseconds, number within them)
Entry = tuple[EntryId, Mapping[str, bytes]]
Totals = dict[str, np.longdouble]


@dataclass(slots=True)
class Stream:
    """Entries by id, oldest first; the last id is remembered when they are gone."""

    entries: list[Entry] = field(default_factory=list)
    last: EntryId = (0, 0)


@dataclass(slots=True)
class _Key:
    value: bytes | Stream | Totals
    ends_s: float = math.inf


class MemoryStore:
    """All keys of all clusters. Every method is one step: nobody sees half of it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or WallClock()
        self._keys: dict[str, _Key] = {}
        self._subscribers: dict[str, list[asyncio.Queue[str]]] = {}

    def flush(self) -> None:
        """Lose everything, as a Redis that restarts without its file."""
        self._keys.clear()

    def ttl_s(self, key: str) -> float | None:
        """How long a key lives yet [s]; inf: for ever; None: it is not there."""
        found = self._alive(key)
        return None if found is None else found.ends_s - self._clock.monotonic_s()

    def value(self, key: str) -> bytes | Stream | Totals | None:
        """What a key of any kind holds."""
        found = self._alive(key)
        return None if found is None else found.value

    def names(self, prefix: str) -> list[str]:
        """All living keys that begin so, sorted."""
        return sorted(key for key in list(self._keys) if key.startswith(prefix) and self._alive(key) is not None)

    def delete(self, key: str) -> None:
        """Forget a key of any kind."""
        self._keys.pop(key, None)

    # Strings

    def set(self, key: str, value: bytes, ttl_ms: int = 0) -> None:
        """Replaces value and lifetime; `ttl_ms` 0 = for ever."""
        self._keys[key] = _Key(value, self._end(ttl_ms))

    def get(self, key: str) -> bytes | None:
        """The bytes of a key."""
        found = self.value(key)
        assert found is None or isinstance(found, bytes), f"{key} holds another kind of value"
        return found

    # Streams

    def append(self, key: str, fields: Mapping[str, bytes], maxlen: int, ttl_ms: int = 0) -> str:
        """Adds an entry under an id above all before it, drops the oldest beyond `maxlen`; returns the id."""
        if self._alive(key) is None:
            self._keys[key] = _Key(Stream())
        stream = self._keys[key].value
        assert isinstance(stream, Stream), f"{key} holds another kind of value"
        now = (int(self._clock.now_s() * 1000), 0)
        stream.last = now if now > stream.last else (stream.last[0], stream.last[1] + 1)
        stream.entries.append((stream.last, fields))
        del stream.entries[: max(0, len(stream.entries) - maxlen)]
        self._prolong(key, ttl_ms)
        return _id_text(stream.last)

    def entries(self, key: str) -> Sequence[Entry]:
        """All entries of a stream, oldest first."""
        found = self.value(key)
        assert found is None or isinstance(found, Stream), f"{key} holds another kind of value"
        return () if found is None else found.entries

    # Hashes of totals

    def increment(self, key: str, deltas: Mapping[str, float], ttl_ms: int = 0) -> None:
        """Adds in extended precision, as Redis does: a month of half-seconds must not drift."""
        if self._alive(key) is None:
            if not deltas:
                return
            self._keys[key] = _Key({})
        totals = self._keys[key].value
        assert isinstance(totals, dict), f"{key} holds another kind of value"
        for name, delta in deltas.items():
            total = totals.get(name, np.longdouble(0)) + np.longdouble(repr(float(delta)))
            totals[name] = np.longdouble(_total_text(total))
        self._prolong(key, ttl_ms)

    def totals(self, key: str) -> Totals:
        """The fields of a hash; empty when there is none."""
        found = self.value(key)
        assert found is None or isinstance(found, dict), f"{key} holds another kind of value"
        return found or {}

    # Hints

    def publish(self, channel: str, key: str) -> None:
        """Tell all who listen now."""
        for waiting in self._subscribers.get(channel, ()):
            with contextlib.suppress(asyncio.QueueFull):
                waiting.put_nowait(key)

    @contextlib.contextmanager
    def subscribed(self, channel: str) -> Iterator[asyncio.Queue[str]]:
        """A queue of the keys published meanwhile."""
        waiting: asyncio.Queue[str] = asyncio.Queue(HINTS_MAX)
        listeners = self._subscribers.setdefault(channel, [])
        listeners.append(waiting)
        try:
            yield waiting
        finally:
            listeners.remove(waiting)

    # Lifetimes

    def _alive(self, key: str) -> _Key | None:
        found = self._keys.get(key)
        if found is not None and self._clock.monotonic_s() >= found.ends_s:
            del self._keys[key]
            return None
        return found

    def _end(self, ttl_ms: int) -> float:
        return self._clock.monotonic_s() + ttl_ms / 1000 if ttl_ms else math.inf

    def _prolong(self, key: str, ttl_ms: int) -> None:
        if ttl_ms:
            self._keys[key].ends_s = self._end(ttl_ms)


class MemoryState(Store):
    """One client of a `MemoryStore`: what `State` is to Redis."""

    called = "the memory store"

    def __init__(
        self, store: MemoryStore, cluster: str, *, clock: Clock | None = None, metrics: Metrics | None = None
    ) -> None:
        super().__init__(cluster, clock or WallClock(), metrics)
        self._store = store

    async def close(self) -> None:
        """Nothing to let go of."""

    async def ping(self) -> None:
        """It always answers."""

    # What Store asks for: the two scripts of runtime/fenced.py, step by step

    def _guard(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def _epoch(self, role: str) -> str:
        return (self._store.get(self.keys.epoch(role)) or b"").decode()

    async def _lease(self, lease: Lease, verb: str, ttl_s: float, expected: str = "") -> int:
        epoch_key, lease_key = self.keys.epoch(lease.name), self.keys.lease(lease.name)
        stored = await self._epoch(lease.name)
        if verb == "acquire":
            if self._store.get(lease_key) is not None:
                return 0
            if stored != expected:
                return -1
            self._store.set(epoch_key, str(lease.epoch).encode())
        elif stored != str(lease.epoch):
            return 0
        if verb == "release":
            self._store.delete(lease_key)
        else:
            self._store.set(lease_key, codec.encode(lease), fenced.milliseconds(ttl_s))
        return 1

    async def _fenced(self, lease: Lease, writes: Sequence[Write]) -> tuple[bool, Sequence[str]]:
        prepared = [(write, fenced.arguments(write)[1]) for write in writes]  # fails before anything is written
        stored = await self._epoch(lease.name)
        if stored != str(lease.epoch):
            return False, [stored]
        at_ms = str(fenced.milliseconds(self._clock.now_s())).encode()
        results = []
        for write, values in prepared:
            results.append(self._apply(write, values))
            note = {"epoch": stored.encode(), "key": write.key.encode(), "at_ms": at_ms}
            self._store.append(self.keys.writes(lease.name), note, WRITES_MAX)
        return True, results

    def _apply(self, write: Write, values: Sequence[Any]) -> str:
        """One operation, with the arguments that WRITE_SCRIPT would get; returns an Append's id."""
        match write:
            case Put(key):
                self._store.set(key, values[0], values[1])
                self._store.publish(self.keys.changed(), key)
            case Append(key):
                return self._store.append(key, {"d": values[0]}, values[1], values[2])
            case Delete(key):
                self._store.delete(key)
                self._store.publish(self.keys.changed(), key)
            case Increment(key, deltas):
                self._store.increment(key, deltas, values[0])
        return ""

    # Unfenced writes

    async def put_unfenced(self, key: str, obj: Any, ttl_s: float = ACK_TTL_S) -> None:
        """SET of a key that only this process can own."""
        self._assert_unfenced(key)
        self._store.set(key, codec.encode(obj), fenced.milliseconds(ttl_s))
        self._store.publish(self.keys.changed(), key)

    async def append_unfenced(
        self, key: str, obj: Any, maxlen: int = LOADS_MAX, ttl_s: float | None = LOADS_TTL_S
    ) -> None:
        """XADD to a stream that only this process can own."""
        self._assert_unfenced(key)
        self._store.append(key, {"d": codec.encode(obj)}, maxlen, fenced.milliseconds(ttl_s))

    async def delete_unfenced(self, *keys: str) -> None:
        """DEL of keys that only this process can own, when it ends."""
        for key in keys:
            self._assert_unfenced(key)
        for key in keys:
            self._store.delete(key)
            self._store.publish(self.keys.changed(), key)

    # Reads

    async def get(self, key: str, cls: type[T]) -> T | None:
        """The value of a key, None when there is none."""
        data = self._store.get(key)
        return None if data is None else codec.decode(cls, data)

    async def names(self, prefix: str) -> list[str]:
        """All keys that begin so, sorted."""
        return self._store.names(prefix)

    async def scan(self, prefix: str, cls: type[T]) -> dict[str, T]:
        """All values whose key begins so, by full key. Like MGET, it passes over what is no string."""
        values = {key: self._store.value(key) for key in self._store.names(prefix)}
        return {key: codec.decode(cls, data) for key, data in values.items() if isinstance(data, bytes)}

    async def stream(self, key: str, cls: type[T], after_id: str = "0", count: int = 1000) -> list[tuple[str, T]]:
        """At most `count` entries after an id, oldest first."""
        entries = self._store.entries(key)
        first = bisect_right(entries, _id(after_id), key=lambda entry: entry[0])
        return _decoded(cls, entries[first : first + count])

    async def tail(self, key: str, cls: type[T], count: int = 1) -> list[tuple[str, T]]:
        """The newest `count` entries, oldest first."""
        entries = self._store.entries(key)
        return _decoded(cls, entries[max(0, len(entries) - count) :])

    async def totals(self, key: str) -> dict[str, float]:
        """The fields of a hash of totals."""
        return {name: float(_total_text(total)) for name, total in self._store.totals(key).items()}

    async def raw(self, key: str, count: int) -> Any:
        """A key of any type as text, for people; of a stream the newest `count` entries."""
        found = self._store.value(key)
        match found:
            case None:
                return "(none)"
            case bytes():
                return _readable(found)
            case Stream():
                newest = found.entries[max(0, len(found.entries) - count) :]
                return [{name: _readable(data) for name, data in fields.items()} for _, fields in newest]
        return {name: _total_text(total) for name, total in found.items()}

    # Hints

    async def changes(self, poll_s: float = POLL_S) -> AsyncIterator[str | None]:
        """Full key names as they change, and None at least every `poll_s`, on this client's clock."""
        with self._store.subscribed(self.keys.changed()) as waiting:
            yield None  # whatever changed before we listened
            tick = asyncio.ensure_future(self._clock.sleep(poll_s))
            hint = asyncio.ensure_future(waiting.get())
            try:
                while True:
                    await asyncio.wait((tick, hint), return_when=asyncio.FIRST_COMPLETED)
                    if hint.done():
                        changed, hint = hint.result(), asyncio.ensure_future(waiting.get())
                        yield changed
                    if tick.done():
                        tick = asyncio.ensure_future(self._clock.sleep(poll_s))
                        yield None
            finally:
                tick.cancel()
                hint.cancel()


def _id(text: str) -> EntryId:
    """An id as Redis reads it: the number within the millisecond may be missing.

    Raises:
        errors.InvalidInput: something else.
    """
    milliseconds, _, number = text.partition("-")
    try:
        return int(milliseconds), int(number or 0)
    except ValueError as error:
        raise errors.InvalidInput("is no id of a stream", field="after_id", value=text, remedy="e.g. 0") from error


def _id_text(entry_id: EntryId) -> str:
    return f"{entry_id[0]}-{entry_id[1]}"


def _decoded(cls: type[T], entries: Sequence[Entry]) -> list[tuple[str, T]]:
    return [(_id_text(entry_id), codec.decode(cls, fields["d"])) for entry_id, fields in entries]


def _readable(value: bytes) -> str:
    return value.decode(errors="replace")


def _total_text(total: np.longdouble) -> str:
    return str(np.format_float_positional(total, precision=TOTAL_DIGITS, unique=False, trim="-"))
