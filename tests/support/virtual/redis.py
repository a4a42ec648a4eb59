"""Redis inside this process, at the level of its client: `State` itself runs on it, unchanged.

A `Server` stands for the Redis server, `server.client()` for one `redis.asyncio.Redis`. Values are the bytes that Redis
would hold; the two Lua scripts are those of trefoil/runtime/fenced.py, word for word in Python. Nothing runs in the
background: a key whose time is over is dropped when it is looked at.
Faults: `down` (refuses connections), `stopped` (what was sent is done later), `slow_s` (each call), `mute` (no answer
comes), `refuses` (every command, with this error), `refuses_writes`, `spoil()` (a key gets another value), `flush()`.
"""

import asyncio
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from redis import exceptions

from trefoil.core.common import Lease
from trefoil.core.errors import InvalidInput
from trefoil.runtime import codec, fenced
from trefoil.runtime.clock import Clock

WRONGTYPE: Final = "WRONGTYPE Operation against a key holding the wrong kind of value"
HINTS_MAX: Final = 100_000  # waiting for one subscriber; more are dropped: hints may be lost
FORMER_MAX: Final = 30

EntryId = tuple[int, int]  # (milliseconds, number within them)
Entry = tuple[EntryId, dict[bytes, bytes]]
Totals = dict[bytes, bytes]


@dataclass(slots=True)
class Stream:
    """Entries by id, oldest first; the last id is remembered when they are gone."""

    ids: list[EntryId] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    last: EntryId = (0, 0)


@dataclass(slots=True)
class _Key:
    value: "bytes | Stream | Totals | list[bytes]"
    ends_s: float = math.inf


class Server:
    """All keys. Every method is one step: nobody sees half of it.

    `on_write(kind, key, value, epoch, process)` is told of what the write script did, `on_lease(verb, key, epoch, done,
    process)` of what the lease script did.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._keys: dict[str, _Key] = {}
        self._subscribers: dict[str, list[_Inbox]] = {}
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self.down = False
        self.stopped = False
        self.mute = False
        self.refuses = ""
        self.refuses_writes = ""
        self.refusal: Callable[[int], str] = _no_refusal
        """Error that a command is answered with, by its number; "": none."""
        self.commands = 0
        self.slow_s = 0.0
        self._former: dict[str, deque[bytes]] = {}
        self.on_write: Callable[[str, str, bytes, int, Any], None] = _unheard
        self.on_lease: Callable[[str, str, int, int, Any], None] = _unheard

    def client(self, process: Any = None) -> "Client":
        """What `redis.asyncio.Redis.from_url` gives; of a process that can be killed."""
        return Client(self, process)

    # Faults

    def flush(self) -> None:
        """Lose everything, as a Redis that restarts without its file."""
        self._keys.clear()

    def fall(self) -> None:
        """Down: connections break, and no new one is accepted."""
        self.down = True
        for inboxes in self._subscribers.values():
            for inbox in inboxes:
                inbox.broken = True
                inbox.wake()
        self._subscribers.clear()
        for _, answer in self._waiting:
            if not answer.done():
                answer.set_exception(exceptions.ConnectionError("Connection closed by server."))
        self._waiting.clear()

    def rise(self) -> None:
        """Up again, with its data."""
        self.down = False

    def spoil(self, key: str, value: Any) -> None:
        """Write over a key as somebody does who is none of us: bytes, a list, a Stream; None deletes it."""
        self.delete(key)
        if value is not None:
            self._keys[key] = _Key(value)

    def former(self, key: str) -> bytes | None:
        """What a key held before the value that it was last set to."""
        return next(reversed(self.formers(key)), None)

    def formers(self, key: str) -> Sequence[bytes]:
        """What a key has held before, oldest first."""
        return self._former.get(key, ())

    def go_on(self) -> None:
        """After `stopped`: everything that was sent meanwhile is done now."""
        self.stopped = False
        while self._waiting:
            command, answer = self._waiting.popleft()
            try:
                result = command()
            except exceptions.ResponseError as error:
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(result)

    async def serve(self, command: Callable[[], Any], process: Any = None) -> Any:
        """One round trip."""
        if process is not None and process.dead:
            raise asyncio.CancelledError
        if self.down:
            await asyncio.sleep(0)
            raise exceptions.ConnectionError("Error 111 connecting to redis. Connection refused.")
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
            if self.down:
                raise exceptions.ConnectionError("Connection closed by server.")
        if self.stopped:
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._waiting.append((command, answer))
            return await answer
        self.commands += 1
        if refusal := self.refuses or self.refusal(self.commands):
            await asyncio.sleep(0)
            raise (exceptions.BusyLoadingError if refusal.startswith("LOADING") else exceptions.ResponseError)(refusal)
        result = command()
        if self.mute:
            await asyncio.sleep(0)
            raise exceptions.ConnectionError("Connection closed by server.")
        await asyncio.sleep(0)
        return result

    # Commands

    def value(self, key: str) -> "bytes | Stream | Totals | list[bytes] | None":
        """What a key of any kind holds."""
        found = self._keys.get(key)
        if found is None:
            return None
        if found.ends_s < math.inf and self._clock.now_s() >= found.ends_s:
            del self._keys[key]
            return None
        return found.value

    def now_s(self) -> float:
        """Time of its own clock."""
        return self._clock.now_s()

    def ttl_s(self, key: str) -> float | None:
        """How long a key lives yet [s]; inf: forever; None: it is not there."""
        if self.value(key) is None:
            return None
        return self._keys[key].ends_s - self._clock.now_s()

    def names(self, prefix: str = "") -> list[str]:
        """All living keys that begin so, sorted."""
        return sorted(key for key in list(self._keys) if key.startswith(prefix) and self.value(key) is not None)

    def get(self, key: str) -> bytes | None:
        """GET."""
        found = self.value(key)
        if found is not None and not isinstance(found, bytes):
            raise exceptions.ResponseError(WRONGTYPE)
        return found

    def set(self, key: str, value: bytes, ttl_ms: int = 0) -> None:
        """SET; `ttl_ms` 0 = forever."""
        if isinstance(before := self.value(key), bytes) and before != value:
            self._former.setdefault(key, deque(maxlen=FORMER_MAX)).append(before)
        self._keys[key] = _Key(value, self._end(ttl_ms))

    def delete(self, key: str) -> None:
        """DEL."""
        self._keys.pop(key, None)

    def expire(self, key: str, ttl_ms: int) -> None:
        """PEXPIRE."""
        if self.value(key) is not None:
            self._keys[key].ends_s = self._end(ttl_ms)

    def append(self, key: str, fields: dict[bytes, bytes], maxlen: int) -> str:
        """XADD: an entry under an id above all before it; the oldest beyond `maxlen` go."""
        stream = self.value(key)
        if stream is None:
            stream = Stream()
            self._keys[key] = _Key(stream)
        if not isinstance(stream, Stream):
            raise exceptions.ResponseError(WRONGTYPE)
        now = (int(self._clock.now_s() * 1000), 0)
        stream.last = now if now > stream.last else (stream.last[0], stream.last[1] + 1)
        stream.ids.append(stream.last)
        stream.entries.append((stream.last, fields))
        over = len(stream.entries) - maxlen
        if over > 0:
            del stream.entries[:over], stream.ids[:over]
        return _id_text(stream.last)

    def stream(self, key: str) -> Stream:
        """The stream at a key; an empty one where there is none."""
        found = self.value(key)
        if found is None:
            return Stream()
        if not isinstance(found, Stream):
            raise exceptions.ResponseError(WRONGTYPE)
        return found

    def type(self, key: str) -> str:
        """TYPE; whatever no service writes is a list."""
        found = self.value(key)
        kinds = {bytes: "string", Stream: "stream", dict: "hash"}
        return "none" if found is None else kinds.get(type(found), "list")

    def totals(self, key: str) -> Totals:
        """HGETALL."""
        found = self.value(key)
        if found is not None and not isinstance(found, dict):
            raise exceptions.ResponseError(WRONGTYPE)
        return dict(found or {})

    def set_totals(self, key: str, fields: Totals) -> None:
        """HSET."""
        self._keys.setdefault(key, _Key({}))
        self._keys[key].value = self.totals(key) | fields

    def publish(self, channel: str, key: str) -> None:
        """PUBLISH."""
        self.publish_bytes(channel, key.encode())

    def publish_bytes(self, channel: str, data: bytes) -> None:
        """PUBLISH of what may be no text."""
        for inbox in self._subscribers.get(channel, ()):
            inbox.put(data)

    def subscribe(self, channel: str, inbox: "_Inbox") -> None:
        """SUBSCRIBE."""
        self._subscribers.setdefault(channel, []).append(inbox)

    def unsubscribe(self, inbox: "_Inbox") -> None:
        """A connection that is closed."""
        for inboxes in self._subscribers.values():
            if inbox in inboxes:
                inboxes.remove(inbox)

    # The two scripts of runtime/fenced.py

    def run_script(self, text: str, keys: Sequence[str], args: Sequence[bytes], who: Any = None) -> Any:
        """EVALSHA of a script that this knows."""
        if text == fenced.WRITE_SCRIPT:
            return self._write(keys, args, who)
        assert text == fenced.LEASE_SCRIPT, "a script that nobody has put into Python yet"
        return self._lease(keys, args, who)

    def _refuse(self) -> None:
        if self.refuses_writes:
            raise exceptions.ResponseError(self.refuses_writes)

    def _text(self, key: str) -> bytes | None:
        found = self.value(key)
        return found if isinstance(found, bytes) else None

    def _write(self, keys: Sequence[str], args: Sequence[bytes], who: Any) -> list[Any]:
        epoch = self._text(keys[0])
        if epoch != args[0]:
            return [0, epoch or b""]
        operations = list(_operations(keys[2:], args[4:]))
        wanted = {"append": "stream", "fields": "hash", "replace": "hash"}
        spoilt = [
            key for key, kind, _ in operations if self.type(key) not in ("none", wanted.get(kind, self.type(key)))
        ]
        self._refuse()
        for key in spoilt:
            self.delete(key)
            self.publish(args[2].decode(), key)
        if spoilt:
            return [2, *(key.encode() for key in spoilt)]
        results: list[Any] = [1]
        for key, kind, given in operations:
            results.append(self._operation(kind, key, given, args[2].decode()).encode())
            self.on_write(kind, key, given[0] if kind in ("set", "append") else b"", int(args[0]), who)
            note = {b"epoch": args[0], b"key": key.encode(), b"at_ms": args[1]}
            if self.type(keys[1]) not in ("none", "stream"):
                self.delete(keys[1])
            self.append(keys[1], note, int(args[3]))
        return results

    def _operation(self, kind: str, key: str, given: Sequence[bytes], channel: str) -> str:
        result = ""
        if kind == "set":
            self.set(key, given[0], int(given[1]))
            self.publish(channel, key)
        elif kind == "append":
            result = self.append(key, {b"d": given[0]}, int(given[1]))
            if given[2] != b"0":
                self.expire(key, int(given[2]))
        elif kind == "delete":
            self.delete(key)
            self.publish(channel, key)
        elif kind in ("fields", "replace"):
            if kind == "replace":
                self.delete(key)
            self.set_totals(key, dict(zip(given[1::2], given[2::2], strict=True)))
            if given[0] != b"0":
                self.expire(key, int(given[0]))
        else:
            raise exceptions.ResponseError(f"unknown kind {kind}")
        return result

    def _lease(self, keys: Sequence[str], args: Sequence[bytes], who: Any) -> int:
        self._refuse()
        done = self._leased(keys, args)
        self.on_lease(args[0].decode(), keys[1], int(args[1]), done, who)
        return done

    def _leased(self, keys: Sequence[str], args: Sequence[bytes]) -> int:
        verb, stored, lease = args[0], self._text(keys[0]), self._text(keys[1])
        held = lease if (self.ttl_s(keys[1]) or 0.0) <= fenced.LEASE_MAX_S else None
        if verb == b"acquire":
            if held is not None and held != args[5]:
                return 0
            if (stored or b"")[: fenced.EPOCH_BYTES_MAX + 1] != args[4]:
                return -1
            self.set(keys[0], args[1])
            self.set(keys[1], args[2], int(args[3]))
            return 1
        if stored != args[1]:
            return 0
        if held is not None and not _names(held, args[6]):
            return 0
        if verb == b"renew":
            self.set(keys[1], args[2], int(args[3]))
        else:
            self.delete(keys[1])
        return 1

    def _end(self, ttl_ms: int) -> float:
        return self._clock.now_s() + ttl_ms / 1000 if ttl_ms else math.inf


def _names(lease: bytes, holder: bytes) -> bool:
    try:
        return bool(codec.decode(Lease, lease).holder.encode() == holder)
    except InvalidInput:
        return False


class Client:
    """The methods of `redis.asyncio.Redis` that `State` calls."""

    def __init__(self, server: Server, process: Any = None) -> None:
        self._server, self._process = server, process

    async def _do(self, command: Callable[[], Any]) -> Any:
        return await self._server.serve(command, self._process)

    def register_script(self, text: str) -> Callable[..., Any]:
        async def script(keys: Sequence[str], args: Sequence[Any]) -> Any:
            return await self._do(lambda: self._server.run_script(text, keys, [_bytes(a) for a in args], self._process))

        return script

    def pipeline(self, transaction: bool = True) -> "Pipeline":
        return Pipeline(self)

    def pubsub(self, ignore_subscribe_messages: bool = False) -> "PubSub":
        return PubSub(self)

    async def aclose(self) -> None:
        pass

    async def ping(self) -> bool:
        await self._do(lambda: None)
        return True

    async def time(self) -> tuple[int, int]:
        now_us: int = await self._do(lambda: round(self._server.now_s() * 1e6))
        return divmod(now_us, 10**6)

    async def get(self, key: str) -> bytes | None:
        found: bytes | None = await self._do(lambda: self._server.get(key))
        return found

    async def scan_iter(self, match: str, count: int) -> AsyncIterator[bytes]:
        prefix = _prefix(match)
        for name in await self._do(lambda: self._server.names(prefix)):
            yield name.encode()

    async def xrevrange(self, key: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return _shown(await self._do(lambda: self._server.stream(key).entries[::-1][:count]))

    async def hgetall(self, key: str) -> Mapping[bytes, bytes]:
        fields: Mapping[bytes, bytes] = await self._do(lambda: self._server.totals(key))
        return fields

    async def type(self, key: str) -> bytes:
        kind: str = await self._do(lambda: self._server.type(key))
        return kind.encode()


class Pipeline:
    """Commands that are sent together."""

    def __init__(self, client: Client) -> None:
        self._client, self._server = client, client._server
        self._commands: list[Callable[[], Any]] = []

    async def __aenter__(self) -> "Pipeline":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands.clear()

    def _write(self, command: Callable[[], Any]) -> None:
        def unless_refused() -> Any:
            self._server._refuse()
            return command()

        self._commands.append(unless_refused)

    def set(self, key: str, value: bytes, px: int = 0) -> None:
        self._write(lambda: self._server.set(key, value, px))

    def publish(self, channel: str, key: str) -> None:
        self._commands.append(lambda: self._server.publish(channel, key))

    def delete(self, key: str) -> None:
        self._commands.append(lambda: self._server.delete(key))

    def pttl(self, key: str) -> None:
        def left() -> int:
            left_s = self._server.ttl_s(key)
            return -2 if left_s is None else -1 if left_s == math.inf else round(left_s * 1000)

        self._commands.append(left)

    def pexpire(self, key: str, ttl_ms: int) -> None:
        self._write(lambda: self._server.expire(key, ttl_ms))

    def xadd(self, key: str, fields: Mapping[str, bytes], maxlen: int, approximate: bool) -> None:
        given = {name.encode(): value for name, value in fields.items()}
        self._write(lambda: self._server.append(key, given, maxlen))

    def getrange(self, key: str, start: int, end: int) -> None:
        self._commands.append(lambda: (self._server.get(key) or b"")[start : end + 1])

    def type(self, key: str) -> None:
        self._commands.append(lambda: self._server.type(key).encode())

    def hgetall(self, key: str) -> None:
        self._commands.append(lambda: self._server.totals(key))

    def xrange(self, key: str, min: str, max: str, count: int) -> None:
        assert max == "+", "only what State asks for"

        def read() -> Any:
            stream = self._server.stream(key)
            first = 0 if min == "-" else bisect_right(stream.ids, _id(min.removeprefix("(")))
            return _shown(stream.entries[first : first + count])

        self._commands.append(read)

    def xrevrange(self, key: str, max: str = "+", count: int = 1) -> None:
        def read() -> Any:
            stream = self._server.stream(key)
            end = len(stream.ids) if max == "+" else bisect_left(stream.ids, _id(max.removeprefix("(")))
            return _shown(stream.entries[:end][::-1][:count])

        self._commands.append(read)

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands = tuple(self._commands)

        def run() -> list[Any]:
            done: list[Any] = []
            for command in commands:
                try:
                    done.append(command())
                except exceptions.ResponseError as error:
                    if raise_on_error:
                        raise
                    done.append(error)
            return done

        done: list[Any] = await self._client._do(run)
        return done


class _Inbox:
    """Messages for one subscriber."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.broken = False
        self.waiter: asyncio.Future[None] | None = None

    def put(self, data: bytes) -> None:
        if len(self.messages) < HINTS_MAX:
            self.messages.append(data)
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class PubSub:
    """A connection that listens."""

    def __init__(self, client: Client) -> None:
        self._client, self._server = client, client._server
        self._inbox = _Inbox()

    async def subscribe(self, channel: str) -> None:
        await self._client._do(lambda: self._server.subscribe(channel, self._inbox))

    async def get_message(self, timeout: float) -> Mapping[str, Any] | None:
        inbox = self._inbox
        if not inbox.messages and not inbox.broken and timeout > 0:
            inbox.waiter = asyncio.get_running_loop().create_future()
            timer = asyncio.get_running_loop().call_later(timeout, inbox.wake)
            try:
                await inbox.waiter
            finally:
                timer.cancel()
                inbox.waiter = None
        if inbox.broken:
            raise exceptions.ConnectionError("Connection closed by server.")
        return {"type": "message", "data": inbox.messages.popleft()} if inbox.messages else None

    async def aclose(self) -> None:
        self._server.unsubscribe(self._inbox)


def _shown(entries: Sequence[Entry]) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Entries as a client gets them."""
    return [(_id_text(entry_id).encode(), fields) for entry_id, fields in entries]


def _operations(keys: Sequence[str], args: Sequence[bytes]) -> Iterator[tuple[str, str, Sequence[bytes]]]:
    """Key, kind and arguments of each operation of the write script."""
    at = 0
    for key in keys:
        count = int(args[at + 1])
        yield key, args[at].decode(), args[at + 2 : at + 2 + count]
        at += 2 + count


def _no_refusal(_number: int) -> str:
    return ""


def _unheard(*_: object) -> None:
    """Where nobody listens."""


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return repr(value).encode() if isinstance(value, float) else str(value).encode()


def _prefix(pattern: str) -> str:
    """The prefix that a pattern of `State.names` stands for."""
    assert pattern.endswith("*"), pattern
    for quoted, plain in (("[*]", "*"), ("[?]", "?"), ("[[]", "["), ("\\\\", "\\")):
        pattern = pattern[:-1].replace(quoted, plain) + "*"
    return pattern[:-1]


def _id(text: str) -> EntryId:
    milliseconds, _, number = text.partition("-")
    try:
        return int(milliseconds), int(number or 0)
    except ValueError as error:
        raise exceptions.ResponseError("Invalid stream ID specified as stream command argument") from error


def _id_text(entry_id: EntryId) -> str:
    return f"{entry_id[0]}-{entry_id[1]}"
