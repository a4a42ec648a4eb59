"""Redis' client: options of its URL; over TLS the files that the URL names are shown as they are when it connects."""

import asyncio
import contextlib
import re
import ssl
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Authority, Pair
from trefoil.core.errors import SettingError, StateUnavailable
from trefoil.runtime.redis_client import make_client
from trefoil.runtime.state import State


class OneAnswer:
    """In the place of Redis: answers each connection once, and notes whose certificate was shown."""

    def __init__(self, authority: Authority) -> None:
        self.shown: list[str] = []
        pair = authority.service("redis")
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.certificate)
        self._context.load_cert_chain(pair.certificate, pair.key)
        self._context.verify_mode = ssl.CERT_REQUIRED

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0, ssl=self._context)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.shown.append(str(writer.get_extra_info("peercert")["serialNumber"]))
        while data := await reader.read(4096):
            writer.write(b"+PONG\r\n" * data.count(b"*"))
            if b"PING" in data:
                break
        writer.close()

    async def stop(self) -> None:
        self._server.close()
        await self._server.wait_closed()


def url(port: int, authority: Path, pair: Pair) -> str:
    return (
        f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority}&ssl_certfile={pair.certificate}&ssl_keyfile={pair.key}"
    )


def test_a_renewed_certificate_is_shown_at_the_next_connection(tmp_path: Path) -> None:
    async def play() -> list[str]:
        authority = Authority(tmp_path)
        redis, pair = OneAnswer(authority), authority.service("node0")
        state = State.connect(url(await redis.start(), authority.certificate, pair), "default", timeout_s=30.0)
        for renewed in (False, False, True):
            if renewed:
                authority.service("node1").copy_to(pair)
            while True:  # a connection that the other side has closed is noticed by its next use
                with contextlib.suppress(StateUnavailable):
                    await state.ping()
                    break
        await state.close()
        await redis.stop()
        return redis.shown

    shown = asyncio.run(play())
    assert shown[0] == shown[1] != shown[-1]


def test_a_redis_of_another_authority_is_none(tmp_path: Path) -> None:
    async def play() -> None:
        authority, other = Authority(tmp_path), Authority(tmp_path, "other")
        redis = OneAnswer(other)
        state = State.connect(url(await redis.start(), authority.certificate, authority.service("node0")), "default")
        try:
            with pytest.raises(StateUnavailable, match="certificate"):
                await state.ping()
        finally:
            await state.close()
            await redis.stop()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://h:1/0?timeout=5", "no connection has the option 'timeout'"),
        ("redis+sentinel://h:1/main?timeout=5", "no connection has the option 'timeout'"),
        ("redis://h:1/0?ssl_ca_certs=/ca.crt", "no connection has the option 'ssl_ca_certs'"),
        ("redis://h:1/0?protocol=9", "option 'protocol' is fixed"),
        ("redis://h:1/0?connection_class=x", "option 'connection_class' is fixed"),
        ("redis://h:1/0?max_connections=-1", '"max_connections" must be'),
        ("redis://h:1/0?encoding=none", "unknown encoding: none"),
        ("rediss://h:1/0?ssl_cert_reqs=some", "Invalid SSL Certificate Requirements"),
    ],
)
def test_a_url_with_an_option_that_no_connection_takes_is_refused(url, why):
    with pytest.raises(SettingError, match=f"^redis_url: .*{re.escape(why)}.*Remedy: "):
        make_client(url, 1.0)


def test_sentinels_may_have_ipv6_addresses():
    pool: Any = make_client("redis+sentinel://:secret@[::1]:5,[2001:db8::7],h:6/main/3", 1.0).connection_pool
    options = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(one["host"], one["port"]) for one in options] == [("::1", 5), ("2001:db8::7", 26379), ("h", 6)]
    assert (pool.service_name, pool.connection_kwargs["db"]) == ("main", 3)
