"""Whatever Redis answers, under load: every error, one after the other.

Errors that a Redis can be made to give by its own commands come from the real one (OOM, MISCONF, READONLY, NOREPLICAS,
BUSY, NOPERM); the others (LOADING, NOAUTH, NOSCRIPT, CROSSSLOT, CLUSTERDOWN, garbage for an answer, silence) from a
relay that the services reach it by. What happens when keys are overwritten: tests/property/test_any_bytes_in_redis.py.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import redis.asyncio as redis

from benchmarks.chaos_rows import LASTS_S, SERVICES, Trouble
from benchmarks.echo_system import EchoSystem
from trefoil.cli.run.state_directory import write_private

GARBAGE: Final = bytes(range(128, 200))
STANDING_IN: Final = {
    "LOADING": b"-LOADING Redis is loading the dataset in memory\r\n",
    "NOAUTH": b"-NOAUTH Authentication required.\r\n",
    "NOSCRIPT": b"-NOSCRIPT No matching script. Please use EVAL.\r\n",
    "CROSSSLOT": b"-CROSSSLOT Keys in request don't hash to the same slot\r\n",
    "CLUSTERDOWN": b"-CLUSTERDOWN The cluster is down\r\n",
    "an error of no kind": b"-ERR something else\r\n",
    "garbage for an answer": b"\xff\xfe garbage\r\n",
    "no answer": b"",
}


def connect(system: EchoSystem) -> Any:
    """Connect to the system's Redis, past whatever stands in for it."""
    return system.client.state._client


async def config(system: EchoSystem, **values: str) -> None:
    """Set Redis' configuration."""
    for name, value in values.items():
        await connect(system).config_set(name.replace("_", "-"), value)


def configured(
    wrong: dict[str, str], right: dict[str, str]
) -> Callable[[EchoSystem], AbstractAsyncContextManager[None]]:
    """Trouble by configuration."""

    @asynccontextmanager
    async def make(system: EchoSystem) -> AsyncIterator[None]:
        await config(system, **wrong)
        try:
            yield
        finally:
            await config(system, **right)

    return make


@asynccontextmanager
async def misconf(system: EchoSystem) -> AsyncIterator[None]:
    """Its last save failed: no folder of that name can be replaced by a file. Redis 7 lets nobody set another name."""
    client = connect(system)
    before = {}
    for name in ("dir", "dbfilename", "save"):
        found = await client.execute_command("CONFIG", "GET", name)
        before[name] = (next(iter(found.values())) if isinstance(found, dict) else found[1]).decode()
    blocked = Path(before["dir"]) / before["dbfilename"]
    (blocked / "in the way").mkdir(parents=True)
    await config(system, save="3600 1", stop_writes_on_bgsave_error="yes")
    with suppress(redis.RedisError):
        await client.bgsave()
    try:
        yield
    finally:
        await config(system, save=before["save"])
        shutil.rmtree(blocked)


@asynccontextmanager
async def readonly(system: EchoSystem) -> AsyncIterator[None]:
    """It becomes a replica of nobody."""
    client = connect(system)
    await client.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        yield
    finally:
        await client.execute_command("REPLICAOF", "NO", "ONE")


@asynccontextmanager
async def busy(system: EchoSystem) -> AsyncIterator[None]:
    """A foreign script holds it, until it is killed."""
    client = connect(system)
    await config(system, lua_time_limit="100")
    running = asyncio.create_task(client.eval("while true do end", 0))
    try:
        yield
    finally:
        await client.script_kill()
        with suppress(redis.RedisError):
            await running
        await config(system, lua_time_limit="5000")


@asynccontextmanager
async def forbidden(system: EchoSystem) -> AsyncIterator[None]:
    """The services' user may not run scripts."""
    client = connect(system)
    await client.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")
    try:
        yield
    finally:
        await client.execute_command("ACL", "SETUSER", "default", "+@all")


class Relay:
    """Relay between the services and Redis: passes bytes on, or gives one answer to every command."""

    def __init__(self, launch_file: Path) -> None:
        self._launch_file = launch_file
        self.answer: bytes | None = None
        self.port = 0
        self._url_file = Path(tempfile.mkdtemp(prefix="trefoil-relay-")) / "redis_url"
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen on a free port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1")
        self.port = server.sockets[0].getsockname()[1]
        write_private(self._url_file, f"redis://127.0.0.1:{self.port}/0\n")

    @property
    def overrides(self) -> dict[str, dict[str, str]]:
        """Settings by which every service reaches Redis through this."""
        return {service: {"redis_url_file": str(self._url_file)} for service in SERVICES}

    @asynccontextmanager
    async def answering(self, answer: bytes) -> AsyncIterator[None]:
        """Break all connections, and give this answer from now on."""
        self.answer = answer
        self._break()
        try:
            yield
        finally:
            self.answer = None
            self._break()

    def _break(self) -> None:
        for writer in self._open:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, ValueError):
                await (self._pass(reader, writer) if self.answer is None else self._answer(reader, writer))
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            for _ in range(int(line[1:])):
                await reader.readexactly(int((await reader.readline())[1:]) + 2)
            writer.write(self.answer or b"")
            await writer.drain()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(json.loads(self._launch_file.read_text())["redis_url"])
        up_reader, up_writer = await asyncio.open_connection(url.hostname, url.port)
        up_writer.write(f"AUTH {url.password}\r\n".encode())
        await up_reader.readline()

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(2**16):
                target.write(data)
                await target.drain()

        ways = [asyncio.create_task(copy(reader, up_writer)), asyncio.create_task(copy(up_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            up_writer.close()


@asynccontextmanager
async def repeated(again: Callable[[], Awaitable[object]], every_s: float) -> AsyncIterator[None]:
    """Do it again and again meanwhile."""

    async def for_ever() -> None:
        while True:
            await again()
            await asyncio.sleep(every_s)

    task = asyncio.create_task(for_ever())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def garbled_hints(system: EchoSystem) -> AbstractAsyncContextManager[None]:
    """Messages that are not text, a hundred times a second."""
    client, channel = connect(system), system.client.state.keys.changed()
    return repeated(lambda: client.publish(channel, GARBAGE), 0.01)


def troubles(relay: Relay, lasts_s: float = LASTS_S) -> tuple[Trouble, ...]:
    """All troubles that Redis can make; the services reach it by this relay."""
    no_room = configured({"maxmemory": "1", "maxmemory_policy": "noeviction"}, {"maxmemory": "0"})
    no_replicas = configured({"min_replicas_to_write": "1"}, {"min_replicas_to_write": "0"})
    by_itself = {
        "OOM": no_room,
        "MISCONF": misconf,
        "READONLY": readonly,
        "NOREPLICAS": no_replicas,
        "BUSY": busy,
        "NOPERM": forbidden,
        "messages that are not text": garbled_hints,
    }
    found = [Trouble(name, make, lasts_s) for name, make in by_itself.items()]
    for name, answer in STANDING_IN.items():
        found.append(Trouble(name, lambda _, answer=answer: relay.answering(answer), lasts_s))  # type: ignore[misc]
    return tuple(found)
