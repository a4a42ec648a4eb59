"""What a failed call says of its slice, and when a slice that is out is tried again."""

import pytest

from dispatcher.slice_health.core.ejection import (
    PROBE_FIRST_S,
    PROBE_MAX_S,
    Ejections,
    Failure,
    classify,
)
from tests.unit.dispatcher.worlds import key, node, status

# Texts as they were seen: grpcio 1.85, tritonserver 2.51.
TEXTS = [
    ("UNAVAILABLE", "failed to connect to all addresses; last error: ipv4:127.0.0.1:1: refused", "UNREACHABLE"),
    ("UNAVAILABLE", "Server exiting", "UNREACHABLE"),
    ("UNAVAILABLE", "Server not ready", "UNREACHABLE"),
    ("UNAVAILABLE", "GRPC server is shutting down and has stopped accepting new requests.", "UNREACHABLE"),
    ("UNAVAILABLE", "Request for unknown model: 'digits' has no available versions", "UNREACHABLE"),
    ("UNAVAILABLE", "Request for unknown model: 'digits' version 4 is not at ready state", "UNREACHABLE"),
    ("NOT_FOUND", "Request for unknown model: 'digits' is not found", "UNREACHABLE"),
    ("UNAVAILABLE", "Socket closed", "BROKEN"),
    ("UNAVAILABLE", "recvmsg:Connection reset by peer", "BROKEN"),
    ("UNAVAILABLE", "Cancelling all calls", "BROKEN"),
    ("INTERNAL", "Stub process 'digits_0_0' is not healthy.", "DEAD_STUB"),
    ("INTERNAL", "Failed to obtain the health mutex.", "DEAD_STUB"),
    ("UNAVAILABLE", "Exceeds maximum queue size", "OWN"),
    ("UNAVAILABLE", "Request timeout expired", "OWN"),
    ("INTERNAL", "in ensemble 'digits': a tensor went wrong", "OWN"),
    ("INVALID_ARGUMENT", "unexpected shape for input 'IMAGE'", "OWN"),
    ("DEADLINE_EXCEEDED", "Deadline Exceeded", "OWN"),
    ("CANCELLED", "Locally cancelled by application!", "OWN"),
    ("NOT_FOUND", "no such user", "OWN"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "details", "failure"), TEXTS)
def test_statuses_are_told_apart_by_what_they_say_of_the_slice(code, details, failure):
    assert classify(code, details) is Failure[failure]


def published(**changes):
    return [node([status(0, **changes), status(1)])]


def test_probes_back_off_to_a_bound():
    ejections = Ejections()
    ejections.on_nodes(published(), 0.0)
    assert ejections.eject(key(0), Failure.BROKEN, "gone", 0.0)
    assert ejections.due(PROBE_FIRST_S / 2) == {}
    at_s, gaps = 0.0, []
    for _ in range(9):
        nxt = ejections.next_probe_at_s()
        gaps.append(round(nxt - at_s, 6))
        at_s = nxt
        assert ejections.due(at_s) == {key(0): Failure.BROKEN}
        assert ejections.due(at_s) == {}, "due once, whatever the probe says"
    assert gaps[:4] == [0.1, 0.1, 0.2, 0.4]
    assert gaps == sorted(gaps)
    assert gaps[-1] == PROBE_MAX_S


@pytest.mark.parametrize("changes", [{"generation": 2}, {"since_s": 9.0}])
def test_a_slice_that_its_agent_publishes_anew_is_probed_at_once(changes):
    ejections = Ejections()
    ejections.on_nodes(published(), 0.0)
    ejections.eject(key(0), Failure.DEAD_STUB, "stub", 0.0)
    for _ in range(8):
        ejections.due(ejections.next_probe_at_s())
    now_s = ejections.next_probe_at_s() - 1.0
    ejections.on_nodes(published(), now_s)
    assert ejections.due(now_s) == {}, "the same status again says nothing"
    ejections.on_nodes(published(**changes), now_s)
    assert ejections.due(now_s) == {key(0): Failure.DEAD_STUB}
    assert key(0) in ejections, "published is not proven"


def test_a_dead_stub_stays_one_and_outranks_other_failures():
    ejections = Ejections()
    ejections.on_nodes(published(), 0.0)
    assert ejections.eject(key(0), Failure.BROKEN, "closed", 0.0)
    assert not ejections.eject(key(0), Failure.UNREACHABLE, "refused", 0.0)
    assert not ejections.eject(key(0), Failure.DEAD_STUB, "stub", 0.0)
    assert not ejections.eject(key(0), Failure.BROKEN, "closed", 0.0)
    assert ejections.due(1.0) == {key(0): Failure.DEAD_STUB}
    assert ejections.reasons() == {key(0): "ejected: stub"}


def test_readmitted_and_vanished_slices_are_forgotten():
    ejections = Ejections()
    ejections.on_nodes(published(), 0.0)
    ejections.eject(key(0), Failure.BROKEN, "closed", 0.0)
    ejections.eject(key(1), Failure.BROKEN, "closed", 0.0)
    assert ejections.readmit(key(0))
    assert not ejections.readmit(key(0))
    ejections.on_nodes([node([status(0)])], 1.0)
    assert ejections.reasons() == {}
    assert ejections.next_probe_at_s() is None
