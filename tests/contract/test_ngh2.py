"""What dispatcher/transport/h2.py relies on in ngh2, which is young and may change: each held by itself."""

import struct

import ngh2
import pytest

REQUEST = (
    (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/s/m"), (b":authority", b"a"), (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)  # fmt: skip
OK = ((b":status", b"200"), (b"content-type", b"application/grpc"))
WINDOW = 1 << 20


class Pair:
    """A client and a server whose bytes reach each other at once."""

    def __init__(self, **server) -> None:
        self.client = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(auto_window_update=False))
        self.server = ngh2.Connection(ngh2.Role.SERVER, ngh2.Configuration(auto_window_update=False, **server))
        for end in (self.client, self.server):
            end.initiate_connection({3: 100, 4: WINDOW, 5: WINDOW, 6: 65_536})
            end.set_local_window_size(1 << 24)
        self.seen = {self.client: [], self.server: []}
        self.talk()

    def talk(self) -> None:
        """Until both have said all."""
        said = True
        while said:
            said = False
            for one, other in ((self.client, self.server), (self.server, self.client)):
                if data := one.data_to_send():
                    other.receive_data(memoryview(data))
                    said = True
                self.seen[other] += other.events() if data else []

    def took(self, end, kind):
        """Events of a kind that an end has seen, and forget them."""
        found = [event for event in self.seen[end] if type(event) is kind]
        self.seen[end] = [event for event in self.seen[end] if type(event) is not kind]
        return found


def test_a_call_goes_there_and_back_in_parts_with_trailers():
    pair = Pair()
    stream = pair.client.send_request(REQUEST)
    pair.client.send_data(stream, b"head")
    pair.client.send_data(stream, b"x" * 100_000, end_stream=True)
    pair.talk()
    (request,) = pair.took(pair.server, ngh2.RequestReceived)
    assert (request.stream_id, dict(request.headers)[b":path"], request.end_stream) == (stream, b"/s/m", False)
    parts = pair.took(pair.server, ngh2.DataReceived)
    assert b"".join(part.data for part in parts) == b"head" + b"x" * 100_000
    assert all(type(part.data) is bytes for part in parts)
    assert [part.end_stream for part in parts] == [False] * (len(parts) - 1) + [True]
    pair.server.send_response(stream, OK)
    pair.server.send_data(stream, b"answer")
    pair.server.send_trailers(stream, ((b"grpc-status", b"0"),))
    pair.talk()
    assert [dict(e.headers)[b":status"] for e in pair.took(pair.client, ngh2.ResponseReceived)] == [b"200"]
    assert [e.data for e in pair.took(pair.client, ngh2.DataReceived)] == [b"answer"]
    assert [e.headers for e in pair.took(pair.client, ngh2.TrailersReceived)] == [((b"grpc-status", b"0"),)]
    assert [e.error_code for e in pair.took(pair.client, ngh2.StreamClosed)] == [0]
    pair.server.acknowledge_received_data(100_004, stream)
    pair.talk()
    assert pair.server.queued_body_size() == 0


def test_an_answer_of_headers_alone_ends_its_stream():
    pair = Pair()
    stream = pair.client.send_request(REQUEST, end_stream=True)
    pair.talk()
    pair.server.send_response(stream, (*OK, (b"grpc-status", b"5")), end_stream=True)
    pair.talk()
    (answer,) = pair.took(pair.client, ngh2.ResponseReceived)
    assert answer.end_stream
    assert dict(answer.headers)[b"grpc-status"] == b"5"


def test_nobody_sends_more_than_has_been_taken():
    pair = Pair()
    stream = pair.client.send_request(REQUEST)
    pair.client.send_data(stream, b"x" * (WINDOW + 500_000), end_stream=True)
    pair.talk()
    assert sum(len(part.data) for part in pair.took(pair.server, ngh2.DataReceived)) == WINDOW
    assert pair.client.queued_body_size() == pair.client.queued_body_size(stream) == 500_000
    pair.server.acknowledge_received_data(WINDOW, stream)
    pair.talk()
    assert sum(len(part.data) for part in pair.took(pair.server, ngh2.DataReceived)) == 500_000
    assert pair.client.queued_body_size() == 0


def test_what_a_stream_had_can_be_taken_after_its_end():
    pair = Pair()
    stream = pair.client.send_request(REQUEST)
    pair.client.send_data(stream, b"x" * 1000)
    pair.talk()
    pair.client.reset_stream(stream, 8)
    pair.talk()
    assert [event.error_code for event in pair.took(pair.server, ngh2.StreamClosed)] == [8]
    pair.server.acknowledge_received_data(1000, stream)
    for late in (lambda: pair.server.send_response(stream, OK), lambda: pair.server.send_trailers(stream, ())):
        with pytest.raises(ngh2.NGH2Error):
            late()


def test_what_came_of_a_frame_is_forgotten_when_its_stream_is_reset_before_its_end():
    """Why a reset waits for that end. Fails once ngh2 counts it: then resets need wait no more."""
    pair = Pair()
    window = pair.server.local_window_size
    for _ in range(20):
        stream = pair.client.send_request(REQUEST)
        pair.talk()
        pair.server.receive_data(memoryview(struct.pack(">IBI", 500_000 << 8, 0, stream) + bytes(400_000)))
        pair.server.reset_stream(stream, 0)
        pair.server.receive_data(memoryview(bytes(100_000)))
        pair.talk()
        assert not pair.took(pair.server, ngh2.DataReceived)
    assert pair.server.local_window_size == window - 20 * 500_000


def test_pieces_end_where_the_next_frame_would_not_fit():
    pair = Pair()
    stream = pair.client.send_request(REQUEST)
    pair.client.send_data(stream, b"x" * 900_000, end_stream=True)
    sizes = []
    while data := pair.client.data_to_send(256 * 1024):
        sizes.append(len(data))
    assert max(sizes) <= 256 * 1024
    assert all(size > (256 - 32) * 1024 for size in sizes[:-1]), "h2.ALL_WRITTEN_BYTES"
    assert sum(sizes) > 900_000


def test_a_notice_loses_nothing_and_the_end_comes_with_the_last_stream():
    pair = Pair()
    stream = pair.client.send_request(REQUEST, end_stream=True)
    pair.talk()
    pair.server.send_shutdown_notice()
    pair.talk()
    (notice,) = pair.took(pair.client, ngh2.GoAwayReceived)
    assert notice.last_stream_id == 2**31 - 1
    pair.server.send_goaway(0)
    pair.talk()
    (last,) = pair.took(pair.client, ngh2.GoAwayReceived)
    assert last.last_stream_id == stream
    assert pair.server.want_read
    pair.server.send_response(stream, (*OK, (b"grpc-status", b"0")), end_stream=True)
    pair.talk()
    assert not pair.server.want_read
    assert not pair.server.want_write


def test_pings_are_answered():
    pair = Pair()
    pair.client.ping(b"trefoil!")
    pair.talk()
    assert len(pair.took(pair.client, ngh2.PingAcknowledged)) == 1


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nno!!"]
)
def test_bytes_that_are_no_http2_are_an_error_of_its_own(data):
    server = ngh2.Connection(ngh2.Role.SERVER, ngh2.Configuration())
    server.initiate_connection({})
    with pytest.raises(ngh2.NGH2Error):
        server.receive_data(data + bytes(64))


def test_cancel_storms_have_a_limit():
    pair = Pair(stream_reset_rate_limit=(50, 1))

    def storm():
        for _ in range(200):
            stream = pair.client.send_request(REQUEST)
            pair.talk()
            pair.client.reset_stream(stream, 8)
            pair.talk()

    with pytest.raises(ngh2.NGH2Error):
        storm()


def test_endless_headers_have_a_limit():
    pair = Pair(max_inbound_header_list_size=4096)
    stream = pair.client.send_request((*REQUEST, *((b"x-%d" % n, b"v" * 100) for n in range(200))), end_stream=True)
    try:
        pair.talk()
    except ngh2.NGH2Error:
        return  # the whole connection
    assert not pair.took(pair.server, ngh2.RequestReceived)
    assert [event.stream_id for event in pair.took(pair.client, ngh2.StreamClosed)] == [stream]
