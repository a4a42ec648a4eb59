"""What proves a slice dead, what only raises a suspicion, and when what is out is tried again."""

import grpc
import pytest
from google.protobuf.message import DecodeError

from dispatcher.request.admission import StatusError
from dispatcher.service.ejector import proof_of
from dispatcher.slice_health.core.ejection import PROBE_FIRST_S, PROBE_MAX_S, Ejections, Failure
from dispatcher.slice_health.core.outliers import SliceEvidence
from dispatcher.slice_health.core.suspicion import PROBE_EVERY_S, Suspicions, probe_failure
from dispatcher.transport.calls import ConnectionDied, NotTaken
from tests.unit.dispatcher.worlds import key, node, status
from trefoil.core.errors import Unavailable

CODES = [code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
# Texts as they were seen: grpcio 1.85, tritonserver 2.51. A model may answer any of them.
TEXTS = [
    "failed to connect to all addresses; last error: ipv4:127.0.0.1:1: refused", "Server exiting", "Server not ready",
    "GRPC server is shutting down and has stopped accepting new requests.",
    "Request for unknown model: 'digits' has no available versions", "Socket closed",
    "Request for unknown model: 'digits' version 4 is not at ready state", "recvmsg:Connection reset by peer",
    "Request for unknown model: 'digits' is not found", "Cancelling all calls", "Exceeds maximum queue size",
    "Stub process 'digits_0_0' is not healthy.", "Failed to obtain the health mutex.", "Request timeout expired", "",
]  # fmt: skip
PLACE = (key(0), "digits")


def error(kind, code="UNAVAILABLE", details=""):
    return kind(grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


@pytest.mark.parametrize("details", TEXTS)
@pytest.mark.parametrize("code", CODES)
def test_no_answer_proves_anything_of_its_slice_whatever_it_says(code, details):
    assert proof_of(error(grpc.aio.AioRpcError, code, details)) is None
    assert proof_of(StatusError(grpc.StatusCode[code], details)) is None
    health = SliceEvidence(0.5, late_strikes=3, fault_strikes=2)
    for _ in range(9):
        health.on_status(PLACE, code, details)
    assert health.suspicions.due(0.0).keys() <= {PLACE}, "a probe at most"


def test_what_the_channel_saw_is_a_proof():
    assert proof_of(error(NotTaken)) is Failure.UNREACHABLE
    assert proof_of(error(ConnectionDied, details="Exceeds maximum queue size")) is Failure.BROKEN
    assert proof_of(Unavailable("its address is gone")) is Failure.UNREACHABLE
    assert proof_of(DecodeError("no message")) is None


@pytest.mark.parametrize(
    ("suspected", "code", "details", "failure"),
    [
        (None, "INTERNAL", "Stub process 'digits_0_0' is not healthy.", "DEAD_STUB"),
        (Failure.LATE, "INTERNAL", "Failed to obtain the health mutex.", "DEAD_STUB"),
        (None, "INTERNAL", "in ensemble 'digits': a tensor went wrong", None),
        (Failure.SICK, "INTERNAL", "in ensemble 'digits': a tensor went wrong", "SICK"),
        (Failure.SICK, "UNAVAILABLE", "not now", "SICK"),
        (Failure.SICK, "UNAVAILABLE", "Exceeds maximum queue size", None),
        (Failure.SICK, "INVALID_ARGUMENT", "zeros are refused", None),
        (None, "UNAVAILABLE", "Server exiting", None),
        (None, "DEADLINE_EXCEEDED", "", "STUCK"),
        (Failure.LATE, "DEADLINE_EXCEEDED", "", "LATE"),
    ],
)
def test_what_a_probe_proves(suspected, code, details, failure):
    assert probe_failure(suspected, code, details) is (Failure[failure] if failure else None)


def test_a_suspected_place_is_probed_at_a_bounded_rate_however_many_answers_suspect_it():
    suspicions, probes = Suspicions(), 0
    for tick in range(100):
        for _ in range(50):
            suspicions.suspect(PLACE, None, "it answered INTERNAL")
        probes += len(suspicions.due(tick * 0.1))
        suspicions.close(PLACE)
    assert probes <= 10.0 / PROBE_EVERY_S + 1


def test_one_probe_of_a_place_at_a_time_and_a_streak_is_not_forgotten_for_a_single_answer():
    suspicions = Suspicions()
    suspicions.suspect(PLACE, Failure.SICK, "8 in a row")
    suspicions.suspect(PLACE, None, "it answered INTERNAL")
    assert suspicions.due(0.0)[PLACE].failure is Failure.SICK
    suspicions.suspect(PLACE, None, "it answered INTERNAL")
    assert suspicions.due(9.0) == {}
    suspicions.close(PLACE)
    assert PLACE in suspicions.due(9.0)


def test_a_good_answer_after_the_suspicion_is_remembered():
    suspicions = Suspicions()
    suspicions.suspect(PLACE, None, "it answered INTERNAL")
    (probed,) = suspicions.due(0.0).values()
    suspicions.on_good_answer((key(0), "words"))
    assert not probed.answered, "another model's"
    suspicions.on_good_answer(PLACE)
    assert probed.answered


def published(**changes):
    return [node([status(0, **changes), status(1)])]


def test_probes_back_off_to_a_bound():
    ejections = Ejections()
    ejections.on_nodes(published(), 0.0)
    assert ejections.eject((key(0), ""), Failure.BROKEN, "gone", 0.0)
    assert ejections.due(PROBE_FIRST_S / 2) == {}
    at_s, gaps = 0.0, []
    for _ in range(9):
        nxt = ejections.next_probe_at_s()
        gaps.append(round(nxt - at_s, 6))
        at_s = nxt
        assert ejections.due(at_s) == {(key(0), ""): Failure.BROKEN}
        assert ejections.due(at_s) == {}, "due once, whatever the probe says"
    assert gaps[:4] == [0.1, 0.1, 0.2, 0.4]
    assert gaps == sorted(gaps)
    assert gaps[-1] == PROBE_MAX_S


@pytest.mark.parametrize("changes", [{"generation": 2}, {"since_s": 9.0}])
def test_a_slice_that_its_agent_publishes_anew_is_probed_at_once(changes):
    ejections = Ejections()
    ejections.on_nodes(published(), 0.0)
    ejections.eject((key(0), ""), Failure.DEAD_STUB, "stub", 0.0)
    for _ in range(8):
        ejections.due(ejections.next_probe_at_s())
    now_s = ejections.next_probe_at_s() - 1.0
    ejections.on_nodes(published(), now_s)
    assert ejections.due(now_s) == {}, "the same status again says nothing"
    ejections.on_nodes(published(**changes), now_s)
    assert ejections.due(now_s) == {(key(0), ""): Failure.DEAD_STUB}
    assert key(0) in ejections, "published is not proven"


def test_a_model_is_out_alone_or_with_its_slice():
    ejections = Ejections()
    ejections.on_nodes(published(), 0.0)
    assert ejections.eject(PLACE, Failure.STUCK, "silent", 0.0)
    assert not ejections.eject(PLACE, Failure.DEAD_STUB, "stub", 0.0), "out already; now it is known why"
    assert not ejections.eject(PLACE, Failure.SICK, "faults", 0.0)
    assert ejections.get(*PLACE).failure is Failure.DEAD_STUB
    assert not ejections.out(key(0), "words")
    assert not ejections.out(key(0))
    assert ejections.eject((key(0), ""), Failure.BROKEN, "closed", 0.0)
    assert not ejections.eject((key(0), "words"), Failure.UNREACHABLE, "not ready", 0.0), "out already, with its slice"
    assert ejections.out(key(0), "words")
    assert ejections.get(*PLACE).failure is Failure.BROKEN
    assert ejections.readmit((key(0), ""))
    assert ejections.reasons() == {PLACE: "ejected: stub", (key(0), "words"): "ejected: not ready"}
    assert ejections.due(1.0) == {PLACE: Failure.DEAD_STUB, (key(0), "words"): Failure.UNREACHABLE}


def test_readmitted_and_vanished_slices_are_forgotten():
    ejections = Ejections()
    ejections.on_nodes(published(), 0.0)
    ejections.eject((key(0), ""), Failure.BROKEN, "closed", 0.0)
    ejections.eject((key(1), ""), Failure.BROKEN, "closed", 0.0)
    assert ejections.readmit((key(0), ""))
    assert not ejections.readmit((key(0), ""))
    ejections.on_nodes([node([status(0)])], 1.0)
    assert ejections.reasons() == {}
    assert ejections.next_probe_at_s() is None
