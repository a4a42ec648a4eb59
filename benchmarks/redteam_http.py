"""Attacks on the REST port by bytes: bodies that are requests, framings that contradict, heads without an end.

A request that is in the body of another carries a nonce that only it has: the model's notes tell whether it was
executed. Meanwhile other clients are served on the same port's dispatcher.
"""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from random import Random
from typing import Final

from benchmarks.chaos_rows import Trouble
from benchmarks.echo_family import FAMILY, executions
from benchmarks.echo_system import EchoSystem
from tests.support.http_streams import HONOURED_OFFERS, cut, draw_stream, h11_reads

LASTS_S: Final = 15.0
ANSWER_S: Final = 10.0
PATH: Final = f"/v2/models/{FAMILY}/infer".encode()
STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")
NONCES: Final = itertools.count(2**40)
"""Of requests sent here; those of other clients are small."""
CONTRADICTIONS: Final = (
    (b"Content-Length: %(size)d", b"Transfer-Encoding: chunked"),
    (b"Transfer-Encoding: chunked", b"Content-Length: %(size)d"),
    (b"Content-Length: 0", b"Content-Length: %(size)d"), (b"Content-Length: 0, %(size)d",),
    (b"Content-Length: +%(size)d",),
    (b"Content-Length: 0x%(size)x",), (b"Content-Length : 0", b"Content-Length: %(size)d"),
    (b"Transfer-Encoding: xchunked",),
    (b"Transfer-Encoding: chunked, identity",), (b"Transfer-Encoding: gzip, chunked",),
    (b"Transfer-Encoding:\r\n chunked",),
    (b"Transfer-Encoding: chunked", b"Transfer-Encoding: cow"),
    (b"Transfer-Encoding : chunked", b"Content-Length: 0"),
    (b"X: a\nContent-Length: 0",), (b"X: a\rContent-Length: 0",), (b"X: \0", b"Content-Length: 0"),
    (b"Host: y", b"Content-Length: 0"),
    (b"Content-Length: 18446744073709551616",), (b"Expect: 200-ok", b"Content-Length: %(size)d"),
)  # fmt: skip
ENDLESS: Final = (
    b"X: ", b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"Transfer-Encoding: chunked\r\n\r\n1;x=",
)  # fmt: skip
FRONT_LEFT: Final = (
    b"CONNECT x:80 HTTP/1.1",
    b"PRI * HTTP/2.0",
    b"POST %s HTTP/2.0" % PATH,
    b"POST %s HTTP/0.9" % PATH,
)

Play = Callable[[EchoSystem, list[str]], Awaitable[None]]


def troubles() -> tuple[Trouble, ...]:
    """Attacks on the running system."""
    attacks: dict[str, Play] = {
        "REST: upgrade offers are ignored, bodies are whole, what follows is served": _honoured,
        "REST: requests in bodies of upgrade offers": _offers,
        "REST: requests behind framings that contradict, CONNECT, HTTP/2": _contradictions,
        "REST: drawn streams, right and wrong, with requests in their bodies": _drawn,
        "REST: heads, trailers and chunk extensions without an end": _endless,
    }
    return tuple(Trouble(what, partial(_attacked, attack=attack), LASTS_S) for what, attack in attacks.items())


@asynccontextmanager
async def _attacked(system: EchoSystem, attack: Play) -> AsyncIterator[None]:
    """Play an attack again and again; raises AssertionError with what broke."""
    broken: list[str] = []
    plays, over = 0, asyncio.Event()

    async def play() -> None:
        nonlocal plays
        while not over.is_set():
            await attack(system, broken)
            plays += 1

    playing = asyncio.create_task(play(), name="attack")
    try:
        yield
    finally:
        over.set()
        await playing
    assert plays, "the attack was not played once"
    assert not broken, f"{len(broken)} of {plays} plays: {broken[0]}"


def request(*headers: bytes, nonce: int, path: bytes = PATH) -> bytes:
    """Inference request of a nonce, with its body."""
    inputs = [{"name": "PAYLOAD", "datatype": "INT64", "shape": [1, 2], "data": [nonce, 7]}]
    body = json.dumps({"inputs": inputs}).encode()
    lines = [b"POST %s HTTP/1.1" % path, b"Host: x", *headers, b"Content-Length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


async def statuses(system: EchoSystem, *pieces: bytes, wait_s: float = ANSWER_S) -> list[int]:
    """Statuses of all answers to what is sent on one connection, until the server closes it, or for so long."""
    host, _, port = system.launch.addresses["rest"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        with suppress(ConnectionError):  # refused meanwhile
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        answered = b""
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(wait_s):
                while data := await reader.read(2**16):
                    answered += data
        return [int(status) for status in STATUS.findall(answered)]
    finally:
        writer.close()


async def _honoured(system: EchoSystem, broken: list[str]) -> None:
    for offer in HONOURED_OFFERS:
        first, second, last = next(NONCES), next(NONCES), next(NONCES)
        stream = request(*offer, nonce=first) + request(*offer, nonce=second)
        got = await statuses(system, stream, request(b"Connection: close", nonce=last))
        ran = executions(system.repository)
        if got != [200] * 3 or [ran[nonce] for nonce in (first, second, last)] != [1, 1, 1]:
            broken.append(f"{offer}: answered {got}")


async def _offers(system: EchoSystem, broken: list[str]) -> None:
    for offer in HONOURED_OFFERS:
        hidden, last = next(NONCES), next(NONCES)
        body = request(nonce=hidden)
        for framing, content in (
            (b"Content-Length: %d" % len(body), body),
            (b"Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)),
        ):
            head = b"\r\n".join((b"POST %s HTTP/1.1" % PATH, b"Host: x", *offer, framing, b"", b""))
            got = await statuses(system, head + content, request(b"Connection: close", nonce=last))
            if got != [400, 200] or executions(system.repository)[hidden]:
                broken.append(
                    f"{offer} {framing!r}: answered {got}, hidden request: {executions(system.repository)[hidden]}"
                )


async def _contradictions(system: EchoSystem, broken: list[str]) -> None:
    heads = [(b"POST %s HTTP/1.1" % PATH, b"Host: x", *lines) for lines in CONTRADICTIONS]
    heads += [(line, b"Host: x", b"Content-Length: 0") for line in FRONT_LEFT]
    for lines in heads:
        hidden = next(NONCES)
        body = request(nonce=hidden)
        head = b"\r\n".join((*lines, b"", b"")).replace(b"%(size)d", b"%d" % len(body))
        got = await statuses(system, head.replace(b"%(size)x", b"%x" % len(body)) + body)
        if len(got) != 1 or got[0] not in (400, 417, 501, 505) or executions(system.repository)[hidden]:
            broken.append(f"{lines}: answered {got}, hidden request: {executions(system.repository)[hidden]}")


async def _drawn(system: EchoSystem, broken: list[str]) -> None:
    for _ in range(10):
        hidden = next(NONCES)
        random = Random(hidden)
        stream = draw_stream(random, request(nonce=hidden)) + b"\0"  # the end of what can be read
        allowed = sum(target == PATH for _, target, _ in h11_reads(stream).requests)
        await statuses(system, *cut(random, stream), wait_s=1.0)  # what is not whole has no answer
        if (ran := executions(system.repository)[hidden]) > allowed:
            broken.append(f"{stream!r}: the hidden request ran {ran} times")


async def _endless(system: EchoSystem, broken: list[str]) -> None:
    for begin in ENDLESS:
        head = b"POST %s HTTP/1.1\r\nHost: x\r\n" % PATH + begin
        got = await statuses(system, head, *[b"a" * 4096] * 256)
        if got not in ([431], []):  # [] = reset while more was sent
            broken.append(f"{begin!r}: answered {got}")
