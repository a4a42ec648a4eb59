"""gRPC's framing: messages come back whole however they were cut, and what is wrong has a status and a bounded cost."""

import contextlib
import gzip
import itertools
import sys
import tracemalloc
import zlib

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.transport.core import grpc_framing as framing
from dispatcher.transport.core.grpc_framing import Compressed, FramingError, MessageReader

MESSAGES = st.lists(st.tuples(st.binary(max_size=300), st.booleans()), max_size=8)
COMPRESS = {"gzip": gzip.compress, "deflate": zlib.compress}


def framed(data: bytes, compressed: bool = False) -> bytes:
    return framing.PREFIX.pack(int(compressed), len(data)) + data


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(MESSAGES, st.lists(st.integers(0, 4000), max_size=40))
def test_messages_come_back_whole_wherever_their_bytes_are_cut(messages, cuts):
    reader = MessageReader(-1)
    whole = b"".join(framed(*message) for message in messages)
    found = [each for piece in pieces(whole, cuts) for each in reader.feed(piece)]
    assert found == [Compressed(data) if compressed else data for data, compressed in messages]
    assert not reader.unfinished
    assert reader.held_bytes == 0


@given(MESSAGES, st.integers(1, 400), st.lists(st.integers(0, 4000), max_size=10))
def test_a_reader_knows_how_much_of_a_message_it_holds(messages, missing, cuts):
    last = framed(b"x" * 400)
    whole = b"".join(framed(*message) for message in messages) + last[:-missing]
    reader = MessageReader(-1)
    found = [each for piece in pieces(whole, cuts) for each in reader.feed(piece)]
    assert len(found) == len(messages)
    held = len(last) - missing
    assert reader.unfinished == (held > 0)
    assert reader.held_bytes == (held - framing.PREFIX.size if held >= framing.PREFIX.size else held)


def test_a_piece_without_bytes_changes_nothing():
    reader = MessageReader(10)
    assert reader.feed(b"") == []
    assert not reader.unfinished
    assert reader.feed(framed(b"")) == [b""]


@pytest.mark.parametrize("piece_bytes", [2, 16, 100])
def test_a_message_in_small_pieces_takes_little_more_memory_than_its_bytes(piece_bytes):
    size = 1 << 19
    reader = MessageReader(-1)
    tracemalloc.start()
    try:
        reader.feed(framing.PREFIX.pack(0, size))
        for n in range(size // piece_bytes - 1):
            reader.feed((n % 60_000).to_bytes(piece_bytes, "big"))
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reader.unfinished
    assert held_bytes < 2 * size


def test_the_begin_of_a_message_does_not_keep_a_large_piece_alive():
    data = framed(bytes(200_000)) + framed(bytes(100))[:20]
    reader = MessageReader(-1)
    references = sys.getrefcount(data)
    assert len(reader.feed(data)) == 1
    assert sys.getrefcount(data) == references


def test_a_prefix_that_is_none_is_refused_and_so_is_a_length_beyond_the_bound():
    with pytest.raises(FramingError, match="first byte of a message is 2") as refused:
        MessageReader(-1).feed(b"\x02\0\0\0\x01x")
    assert refused.value.code == "INTERNAL"
    with pytest.raises(FramingError, match=r"larger than max \(11 vs\. 10\)") as refused:
        MessageReader(10).feed(framed(bytes(11))[:5])
    assert refused.value.code == "RESOURCE_EXHAUSTED"
    assert MessageReader(10).feed(framed(bytes(10))) == [bytes(10)]


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_are_refused(data):
    reader = MessageReader(50)
    with contextlib.suppress(FramingError):
        messages = reader.feed(data)
        found = b"".join(framed(each) if isinstance(each, bytes) else framed(each.data, True) for each in messages)
        assert data.startswith(found)
        left = len(data) - len(found)
        assert left == reader.held_bytes or left == reader.held_bytes + framing.PREFIX.size


# Compression


@given(st.binary(max_size=3000), st.sampled_from(sorted(COMPRESS)))
def test_a_compressed_message_comes_back(data, encoding):
    packed = COMPRESS[encoding](data)
    assert framing.inflate(packed, encoding, -1) == data
    assert framing.inflate(packed, encoding, len(data)) == data


@pytest.mark.parametrize("encoding", sorted(COMPRESS))
def test_a_bomb_never_makes_more_than_the_bound(encoding):
    bound = 1 << 20
    bomb = COMPRESS[encoding](bytes(64 * bound))
    tracemalloc.start()
    try:
        with pytest.raises(FramingError, match="decompressed message larger than max") as refused:
            framing.inflate(bomb, encoding, bound)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.value.code == "RESOURCE_EXHAUSTED"
    assert peak_bytes < 3 * bound


@given(st.binary(min_size=1, max_size=500), st.sampled_from(sorted(COMPRESS)), st.integers(1, 400))
def test_compressed_data_that_is_cut_off_or_goes_on_is_refused(data, encoding, amount):
    packed = COMPRESS[encoding](data)
    for wrong in (packed[: -min(amount, len(packed))], packed + b"x" * amount):
        with pytest.raises(FramingError, match="cannot be decompressed") as refused:
            framing.inflate(wrong, encoding, 10_000)
        assert refused.value.code == "INTERNAL"


@given(st.binary(max_size=200), st.sampled_from(sorted(COMPRESS)), st.integers(-1, 300))
def test_any_bytes_are_decompressed_within_the_bound_or_refused(data, encoding, bound):
    with contextlib.suppress(FramingError):
        made = framing.inflate(data, encoding, bound)
        assert bound < 0 or len(made) <= bound


@pytest.mark.parametrize(
    ("encoding", "code"),
    [("", "INTERNAL"), ("identity", "INTERNAL"), ("snappy", "UNIMPLEMENTED"), ("GZIP", "UNIMPLEMENTED")],
)
def test_an_encoding_that_is_none_is_refused(encoding, code):
    with pytest.raises(FramingError) as refused:
        framing.inflate(gzip.compress(b"x"), encoding, 100)
    assert refused.value.code == code


# Deadlines


@given(st.floats(1e-4, 99_999_999))
def test_a_timeout_arrives_no_shorter_and_at_most_a_hundredth_longer(timeout_s):
    told = framing.encode_timeout(timeout_s)
    assert len(told) <= framing.TIMEOUT_DIGITS + 1
    heard_s = framing.parse_timeout(told)
    assert timeout_s * (1 - 1e-12) <= heard_s <= timeout_s * 1.01 + 1e-12


@given(st.floats(-1e9, 1e-4) | st.floats(1e8, 1e300))
def test_no_timeout_is_too_short_or_too_long_to_be_told(timeout_s):
    heard_s = framing.parse_timeout(framing.encode_timeout(timeout_s))
    assert heard_s >= min(timeout_s, 99999999 * 3600) * (1 - 1e-12) or timeout_s < 0
    assert heard_s >= 0


@pytest.mark.parametrize(
    ("told", "timeout_s"),
    [(b"1H", 3600), (b"2M", 120), (b"3S", 3), (b"4m", 0.004), (b"5u", 5e-6), (b"6n", 6e-9), (b"00000000S", 0)],
)
def test_every_unit_of_a_timeout_is_known(told, timeout_s):
    assert framing.parse_timeout(told) == pytest.approx(timeout_s)


@pytest.mark.parametrize("told", [b"", b"S", b"1", b"1s", b"-1S", b"1.5S", b" 1S", b"123456789S", b"nanS", b"\xb2S"])
def test_a_timeout_that_is_none_is_refused(told):
    with pytest.raises(FramingError, match="grpc-timeout is") as refused:
        framing.parse_timeout(told)
    assert refused.value.code == "INTERNAL"


# Details and metadata


@given(st.text())
def test_details_come_back(details):
    told = framing.encode_details(details)
    assert all(0x20 <= byte < 0x7F for byte in told)
    assert framing.decode_details(told) == details


def test_details_that_are_no_text_are_told_all_the_same():
    assert framing.decode_details(framing.encode_details("caf\udce9 \ud800")) == "caf? ?"
    assert framing.decode_details(b"%ff%e4%bd%a0%zz%") == "�你%zz%"


KEYS = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_.", min_size=1, max_size=20).filter(
    lambda key: not key.endswith("-bin") and key.encode() not in framing._NOT_METADATA
)
PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=40)


@given(st.lists(st.tuples(KEYS, PRINTABLE) | st.tuples(KEYS.map(lambda key: f"{key}-bin"), st.binary(max_size=60))))
def test_metadata_comes_back(pairs):
    headers = framing.encode_metadata(pairs)
    assert all(b"=" not in value for key, value in headers if key.endswith(b"-bin"))
    assert framing.decode_metadata(headers) == tuple(pairs)


@given(st.lists(st.tuples(st.binary(max_size=12), st.binary(max_size=20)), max_size=6))
def test_any_headers_are_read_as_metadata(headers):
    for key, value in framing.decode_metadata([*headers, (b"x-bin", b"\xff"), (b"y", b"\xff")]):
        assert isinstance(value, bytes if key.endswith("-bin") else str)


def test_what_grpc_uses_itself_is_no_metadata_and_values_in_one_line_are_several():
    headers = [
        (b":path", b"/a"),
        (b"te", b"trailers"),
        (b"grpc-timeout", b"1S"),
        (b"a-bin", b"eA,eQ==,!,z"),
        (b"b", b"1,2"),
    ]
    assert framing.decode_metadata(headers) == (("a-bin", b"x"), ("a-bin", b"y"), ("b", "1,2"))
    assert framing.encode_metadata([("Upper", 7), ("t-bin", "text")]) == [(b"upper", b"7"), (b"t-bin", b"dGV4dA")]


# Statuses


def test_statuses_have_the_numbers_of_grpc():
    numbers = {code.name: code.value[0] for code in grpc.StatusCode}
    assert {name: number for number, name in enumerate(framing.STATUS_NAMES)} == numbers


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (b"400", "INTERNAL"), (b"401", "UNAUTHENTICATED"), (b"403", "PERMISSION_DENIED"), (b"404", "UNIMPLEMENTED"),
        (b"429", "UNAVAILABLE"), (b"502", "UNAVAILABLE"), (b"503", "UNAVAILABLE"), (b"504", "UNAVAILABLE"),
        (b"500", "UNKNOWN"), (b"200", "UNKNOWN"), (b"", "UNKNOWN"), (b"99999999", "UNKNOWN"), (b"x", "UNKNOWN"),
    ],
)  # fmt: skip
def test_an_answer_of_http_alone_has_a_status(status, code):
    assert framing.status_of_http(status)[0] == code
    assert framing.status_of_trailers({b":status": status})[0] == code


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ({b"grpc-status": b"0"}, ("OK", "")),
        ({b"grpc-status": b"5", b"grpc-message": b"no %E2%9C%93"}, ("NOT_FOUND", "no ✓")),
        ({b"grpc-status": b"16", b":status": b"502"}, ("UNAUTHENTICATED", "")),
        ({}, ("UNKNOWN", "the answer ended without a grpc-status")),
        ({b"grpc-status": b"17"}, ("UNKNOWN", "grpc-status is '17', which is not a status")),
        ({b"grpc-status": b"-1"}, ("UNKNOWN", "grpc-status is '-1', which is not a status")),
        ({b"grpc-status": b""}, ("UNKNOWN", "grpc-status is '', which is not a status")),
        ({b"grpc-status": b"9" * 5000}, ("UNKNOWN", f"grpc-status is '{'9' * 32}', which is not a status")),
    ],
)
def test_trailers_have_a_status_whatever_they_say(told, status):
    assert framing.status_of_trailers(told) == status


@pytest.mark.parametrize(
    ("error_code", "code"),
    [(0, "INTERNAL"), (2, "INTERNAL"), (7, "UNAVAILABLE"), (8, "CANCELLED"), (11, "RESOURCE_EXHAUSTED"),
     (12, "PERMISSION_DENIED"), (99, "INTERNAL")],
)  # fmt: skip
def test_a_reset_has_a_status(error_code, code):
    assert framing.status_of_reset(error_code)[0] == code


def test_only_a_stream_that_was_refused_says_that_nothing_was_done():
    said = {code for code in range(14) if "shutting down" in framing.status_of_reset(code)[1]}
    assert said == {7}
