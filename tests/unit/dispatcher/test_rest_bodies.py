"""Bodies of REST requests: bounded in time, and counted in the bytes that a worker holds."""

import asyncio
import gzip
import zlib

import grpc
import pytest

from dispatcher.fronts.grpc.server import MESSAGE_S
from dispatcher.fronts.rest import compression
from dispatcher.fronts.rest.calls import HttpError, HttpRequest, Room, read_body, read_text
from dispatcher.request.admission import StatusError
from dispatcher.request.core.tenants import Tenant
from dispatcher.transport.h2 import Held
from tests.support.virtual.loop import virtual_loop

MOST = 64 * 2**20


class Sending:
    """Client that sends parts of a body, and the end only if `ends`."""

    def __init__(self, *parts: bytes, ends: bool = True, pause_s: float = 0.0) -> None:
        self.left, self._ends, self._pause_s = list(parts), ends, pause_s

    async def __call__(self):
        await asyncio.sleep(self._pause_s)
        if not self.left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self.left.pop(0), "more_body": bool(self.left) or not self._ends}


class Anyone:
    """Access control that admits all."""

    def admit(self, tenant: Tenant, count: int) -> None:
        """Admit."""


def asking(client: Sending, held: Held, **headers: str) -> HttpRequest:
    return HttpRequest("POST", "/", headers, client, None, room=Room(held))


def full(error: StatusError) -> bool:
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and "try again later" in error.details


@pytest.mark.parametrize("pause_s", [0.0, MESSAGE_S / 3])
def test_a_body_that_does_not_end_is_refused_after_a_minute(pause_s):
    with virtual_loop() as loop:
        client, since_s = Sending(*[b"x"] * 1000, ends=False, pause_s=pause_s), loop.time()
        with pytest.raises(HttpError, match="60 s") as refused:
            loop.run_until_complete(asyncio.wait_for(read_body(asking(client, Held()), MOST), 3600))
        assert loop.time() - since_s == pytest.approx(MESSAGE_S)
        assert (refused.value.status, refused.value.headers) == (408, ((b"connection", b"close"),))


async def test_a_body_is_counted_until_its_request_ends():
    held = Held(1000)
    ask = asking(Sending(b"ab", b"", b"c", b"d" * 997), held)
    assert await read_body(ask, MOST) == b"abc" + b"d" * 997
    assert held.bytes == 1000
    ask.room.free()
    assert held.bytes == 0


async def test_a_body_without_room_is_refused_and_read_to_its_end():
    held = Held(1000)
    held.bytes = 900  # of gRPC
    client = Sending(*[b"x" * 60] * 9)
    with pytest.raises(StatusError) as refused:
        await read_body(asking(client, held), MOST)
    assert full(refused.value)
    assert not client.left
    assert held.bytes == 900, "what is refused is not held"


async def test_a_body_that_is_too_large_is_not_held():
    held = Held()
    with pytest.raises(HttpError, match="at most"):
        await read_body(asking(Sending(b"x" * 60, b"x" * 60), held), 100)
    assert held.bytes == 0


async def test_a_decompressed_body_is_counted_part_by_part():
    held, bomb = Held(10 * 2**20), gzip.compress(bytes(50 * 2**20))
    ask = asking(Sending(bomb), held, **{"content-encoding": "gzip"})
    with pytest.raises(StatusError) as refused:
        await read_text(ask, Anyone(), Tenant("t"), MOST)
    assert full(refused.value)
    assert held.bytes <= held.bytes_max + compression.PART_BYTES + len(bomb)
    ask.room.free()
    assert held.bytes == 0


@pytest.mark.parametrize("size", [0, 1, compression.PART_BYTES, compression.PART_BYTES + 1, 9 * 2**20])
@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
async def test_a_decompressed_body_is_whole_and_counted_in_place_of_the_one_that_came(size, compress):
    held, plain = Held(), bytes(range(256)) * (size // 256) + bytes(size % 256)
    encoding = "gzip" if compress is gzip.compress else "deflate"
    ask = asking(Sending(compress(plain)), held, **{"content-encoding": encoding})
    assert await read_text(ask, Anyone(), Tenant("t"), size + 100) == plain
    assert held.bytes == size


async def test_a_decompressed_body_is_expanded_to_one_byte_more_than_its_limit():
    body = gzip.compress(bytes(9 * 2**20))
    assert len(await compression.decompress(body, "gzip", 5 * 2**20, Room(Held()).take)) == 5 * 2**20 + 1
