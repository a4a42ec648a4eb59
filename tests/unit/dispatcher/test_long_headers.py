"""Header values of more than 64 KiB from a slice: its connection stays, and with it what is in flight there."""

import asyncio

import grpc
import ngh2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.transport.core.long_headers import BLOCK_MAX, HELD_MAX, SHORT_BYTES, VALUE_MAX, LongHeaders, shorten
from dispatcher.transport.h2_channel import H2Channel
from tests.support import h2_ends
from tests.support.h2_ends import CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS

PADDED, PRIORITY = 8, 32
PATIENCE_S = 10.0
OK = b"\x88"  # :status 200, of the static table
LONG = b"x" * (VALUE_MAX + 1)


def frame(kind: int, flags: int, payload: bytes, stream_id: int = 1) -> bytes:
    return h2_ends.frame(kind, flags, stream_id, payload)


def string(value: bytes, coded: bool = False) -> bytes:
    """A string of HPACK; `coded`: says that it is in Huffman's code."""
    made, rest = bytearray(), len(value)
    if rest < 0x7F:
        return bytes((rest | 0x80 * coded,)) + value
    made.append(0x7F | 0x80 * coded)
    rest -= 0x7F
    while rest >= 0x80:
        made.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes((*made, rest)) + value


def field(name: bytes, value: bytes, form: int = 0, coded: bool = False) -> bytes:
    return bytes((form,)) + string(name) + string(value, coded)


def passed(data: bytes, pieces: list[int] | None = None) -> bytes:
    """What comes through, of data that is read in pieces of these lengths and a rest."""
    headers, made, at = LongHeaders(), b"", 0
    for size in (*(pieces or ()), len(data)):
        made += b"".join(bytes(part) for part in headers.passed(memoryview(data[at : at + size])))
        at += size
    return made


def read_by_libnghttp2(data: bytes) -> list:
    """Headers and trailers as a client reads them that has asked once on stream 1."""
    client = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(max_inbound_header_list_size=65_536))
    client.initiate_connection({5: 1 << 20})
    request = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", b"/a")]
    client.send_request(request, end_stream=True)
    client.data_to_send(1 << 20)
    client.receive_data(frame(4, 0, b"", 0) + frame(4, 1, b"", 0) + data)
    return [e for e in client.events() if type(e) in (ngh2.ResponseReceived, ngh2.TrailersReceived)]


async def fail(data: bytes, context) -> None:
    await context.abort(grpc.StatusCode.INTERNAL, data[:1].decode("latin-1") * int(data[1:]))


async def fail_late(data: bytes, context):
    yield b"first"
    await fail(data, context)


async def wait(data: bytes, context) -> bytes:
    await asyncio.sleep(0.3)
    return b"served"


@pytest.fixture
async def channel():
    server = grpc.aio.server()
    handlers = {
        "Fail": grpc.unary_unary_rpc_method_handler(fail),
        "FailLate": grpc.unary_stream_rpc_method_handler(fail_late),
        "Wait": grpc.unary_unary_rpc_method_handler(wait),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    made = H2Channel(f"127.0.0.1:{port}")
    yield made
    await made.close()
    await server.stop(None)


async def read_all(channel: H2Channel, text: bytes) -> None:
    async for _ in channel.stream("/test.Service/FailLate", (text,), PATIENCE_S):
        pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text", [b"x65536", b"x65537", b"x200000", b"x1000000", b"\xe930000", b"x6000000", b"\xe94000000"], ids=repr
)
async def test_a_long_error_text_fails_its_own_call_only(channel, text, stream):
    other = asyncio.create_task(channel.unary("/test.Service/Wait", (b"",), PATIENCE_S))
    await asyncio.sleep(0.05)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (read_all(channel, text) if stream else channel.unary("/test.Service/Fail", (text,), PATIENCE_S))
    assert caught.type is grpc.aio.AioRpcError  # the server's answer, which proves nothing against its slice
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details().startswith(text[:1].decode("latin-1") * 2000)
    assert (await other)[0] == b"served"


@pytest.mark.parametrize("form", [0x00, 0x10, 0x40], ids=["plain", "never indexed", "indexed"])
@pytest.mark.parametrize("frames", ["one", "many", "padded", "priority"])
def test_libnghttp2_reads_what_a_long_value_becomes(form, frames):
    before, after = field(b"a", b"1", 0x40), field(b"b", b"2")
    block = before + field(b"grpc-message", LONG, form) + after
    if frames == "many":
        parts = [block[at : at + 16_384] for at in range(0, len(block), 16_384)]
        trailers = frame(HEADERS, END_STREAM, parts[0])
        trailers += b"".join(frame(CONTINUATION, END_HEADERS * (p is parts[-1]), p) for p in parts[1:])
    elif frames == "padded":
        trailers = frame(HEADERS, END_STREAM | END_HEADERS | PADDED, b"\x03" + block + b"\x00" * 3)
    elif frames == "priority":
        trailers = frame(HEADERS, END_STREAM | END_HEADERS | PRIORITY, b"\x00\x00\x00\x00\x10" + block)
    else:
        trailers = frame(HEADERS, END_STREAM | END_HEADERS, block)
    response, end = read_by_libnghttp2(passed(frame(HEADERS, END_HEADERS, OK) + trailers))
    assert list(response.headers) == [(b":status", b"200")]
    assert list(end.headers) == [(b"a", b"1"), (b"grpc-message", LONG[:SHORT_BYTES] + b"..."), (b"b", b"2")]


def test_a_long_value_in_huffmans_code_becomes_a_text_that_says_so():
    block = field(b"grpc-message", b"\xf3" * (VALUE_MAX * 5 // 8 + 1), coded=True) + field(b"b", b"2")
    data = passed(frame(HEADERS, END_HEADERS, OK) + frame(HEADERS, END_STREAM | END_HEADERS, block))
    _, end = read_by_libnghttp2(data)
    (_, text), last = end.headers
    assert text.startswith(b"(more than 64 KiB of text")
    assert last == (b"b", b"2")
    assert len(text) > 4096  # a field as large as the table empties it, here and at the server


@pytest.mark.parametrize("cut", [1, 10, 70, -1])
def test_a_block_that_ends_within_a_field_is_left_to_libnghttp2(cut):
    block = field(b"a", b"1" * 70) + field(b"grpc-message", LONG)
    with pytest.raises(IndexError):
        shorten(block[:cut])
    data = frame(HEADERS, END_HEADERS, block[:cut])
    assert passed(data) == data


@pytest.mark.parametrize("size", [10, 200_000], ids=["one frame", "a block that is not held"])
def test_an_integer_without_end_is_left_to_libnghttp2(size):
    block = b"\x00\x7f" + b"\xff" * size + b"\x01" + b"a" * 9
    with pytest.raises(IndexError, match="too long"):
        shorten(block)
    data = frame(HEADERS, 0, block) + frame(CONTINUATION, END_HEADERS, b"\xff" * size)
    assert passed(data)[9:].startswith(block)
    assert not read_by_libnghttp2(passed(data))


def test_a_block_without_end_is_not_held_for_ever():
    endless = frame(HEADERS, 0, b"") + frame(CONTINUATION, 0, b"\x00" * 60_000) * (BLOCK_MAX // 60_000 + 9)
    headers = LongHeaders()
    pieces = [endless[at : at + 200_000] for at in range(0, len(endless), 200_000)]
    read = b"".join(bytes(part) for piece in pieces for part in headers.passed(memoryview(piece)))
    assert b"".join(headers.passed(memoryview(b"more"))) == b"more"
    with pytest.raises(ngh2.ProtocolError):
        read_by_libnghttp2(read)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("size", [1000, 16_384, 200_000])
@pytest.mark.parametrize("padding", [b"", b"p"])
def test_of_a_value_of_any_length_the_same_stays_and_little_is_held(coded, size, padding):
    before, after = field(b"a", b"1" * 300, 0x40), field(b"b", b"2")
    text = (b"\xf3" if coded else b"x") * (4 * HELD_MAX)
    block = before + field(b"grpc-message", text, coded=coded) + after
    parts = [block[at : at + size] for at in range(0, len(block), size)]
    first = bytes((len(padding),)) + parts[0] + padding if padding else parts[0]
    data = frame(HEADERS, END_HEADERS, OK) + frame(HEADERS, END_STREAM | (PADDED if padding else 0), first)
    data += b"".join(frame(CONTINUATION, END_HEADERS * (p is parts[-1]), p) for p in parts[1:])
    headers, read = LongHeaders(), b""
    for at in range(0, len(data), 50_000):
        read += b"".join(bytes(part) for part in headers.passed(memoryview(data[at : at + 50_000])))
        assert len(headers._held) <= HELD_MAX
    _, end = read_by_libnghttp2(read)
    (_, one), (_, message), (_, two) = end.headers
    assert (one, two) == (b"1" * 300, b"2")
    assert message.startswith(b"(more than 64 KiB" if coded else b"x" * SHORT_BYTES)
    assert len(message) == SHORT_BYTES + 3


FRAMES = st.lists(
    st.one_of(
        st.builds(frame, st.sampled_from([DATA, 4, 6, 8]), st.just(0), st.binary(max_size=60)),
        st.builds(frame, st.just(HEADERS), st.just(END_HEADERS), st.binary(max_size=60)),
        st.builds(lambda a, b: frame(HEADERS, 0, a) + frame(CONTINUATION, END_HEADERS, b), st.binary(), st.binary()),
        st.just(frame(HEADERS, END_HEADERS, field(b"grpc-message", LONG))),
    ),
    max_size=6,
)


@given(FRAMES, st.lists(st.integers(0, 80), max_size=20), st.integers(0, 70_000))
def test_how_the_bytes_are_cut_changes_nothing(frames, pieces, large):
    data = b"".join(frames)
    whole = passed(data)
    assert passed(data, [*pieces, large]) == whole
    if not any(len(each) > VALUE_MAX for each in frames):
        assert whole == data
    assert len(whole) <= sum(min(len(each), SHORT_BYTES + 100) for each in frames)
