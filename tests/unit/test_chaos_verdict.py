"""What excuses a failed request in a chaos run, and what does not; when a fault counts as recovered from."""

from dataclasses import replace

import pytest
from tritonclient.grpc import service_pb2

from benchmarks.chaos_faults import Fault
from benchmarks.chaos_verdict import Logged, judge, recoveries
from benchmarks.echo_family import FAMILY, Requests, wrong
from benchmarks.echo_load import Record
from benchmarks.soak import Sample, verdict

KILLED = Fault("Triton killed", "SIGKILL to the Triton of s1", 10.0, 10.0, "s1")
STOPPED = Fault("Triton stopped", "SIGSTOP to the Triton of s2", 20.0, 23.0, "s2")
WORKER = Fault("worker killed", "SIGKILL to a worker", 30.0, 30.0, worker=True)
FAULTS = (KILLED, STOPPED, WORKER)


def traffic(until_s: float = 40.0, per_s: int = 100) -> list[Record]:
    """A request every hundredth of a second, each answered after 5 ms."""
    return [Record(n, n / per_s, n / per_s + 0.005, "OK") for n in range(1, int(until_s * per_s))]


def judged(*failed: Record, logged: dict[int, Logged] | None = None, executed: dict[int, int] | None = None):
    numbers = {record.nonce for record in failed}
    records = [record for record in traffic() if record.nonce not in numbers] + list(failed)
    return judge(records, FAULTS, logged or {}, executed or {record.nonce: 1 for record in records})


def test_what_was_in_flight_on_the_killed_triton_is_excused_once_the_dispatcher_says_so():
    lost = Record(999, 9.99, 10.01, "UNAVAILABLE", "Socket closed")
    on_it = {999: Logged("s1", "UNAVAILABLE", "Socket closed")}
    found = judged(lost, logged=on_it)
    assert (found.unexcused, found.failed, found.rows["Triton killed"].failed) == ([], 1, 1)
    assert found.broken == []
    assert judged(lost).unexcused, "nobody says where it was"
    assert judged(lost, logged={999: Logged("s2", "UNAVAILABLE", "")}).unexcused, "it was on another slice"
    assert judged(replace(lost, sent_s=10.4, done_s=10.5), logged=on_it).unexcused, "it was sent there afterwards"
    assert judged(replace(lost, done_s=9.995), logged=on_it).unexcused, "it failed before"


def test_a_stopped_triton_excuses_what_was_on_it_while_it_was_stopped_and_nothing_that_waited():
    held = Record(2100, 21.0, 36.0, "DEADLINE_EXCEEDED", "")
    assert judged(held, logged={2100: Logged("s2", "DEADLINE_EXCEEDED", "")}).unexcused == []
    assert judged(held, logged={2100: Logged("", "DEADLINE_EXCEEDED", "")}).unexcused, "it was on no slice"


def test_a_killed_worker_excuses_broken_connections_of_that_moment_only():
    cut = Record(3000, 29.99, 30.01, "UNAVAILABLE", "recvmsg:Connection reset by peer")
    assert judged(cut).unexcused == []
    assert judged(replace(cut, code="INTERNAL")).unexcused
    assert judged(replace(cut, sent_s=31.5, done_s=31.6)).unexcused


def test_another_ones_answer_and_a_second_execution_have_no_excuse():
    swapped = Record(1000, 9.995, 10.01, "WRONG ANSWER", "id 7 for 1000")
    assert judged(swapped, logged={1000: Logged("s1", "OK", "")}).broken[0].startswith("1 failed without")
    twice = judged(executed={record.nonce: 1 + (record.nonce == 5) for record in traffic()})
    assert (twice.executed_more, twice.broken) == (1, ["1 were executed more than 1 time"])
    never = judged(executed={record.nonce: 1 for record in traffic() if record.nonce != 6})
    assert never.answered_unexecuted == 1


def test_more_than_the_limit_is_broken_however_good_the_excuses():
    lost = [Record(n, 9.99, 10.01, "UNAVAILABLE") for n in (990, 991, 992)]
    found = judged(*lost, logged={record.nonce: Logged("s1", "UNAVAILABLE", "") for record in lost})
    assert found.unexcused == []
    assert found.broken == ["3 of 3999 failed, more than 0.05%"]


@pytest.mark.parametrize("slow_s", [0.0, 0.6, 3.0])
def test_recovery_is_when_requests_are_served_in_time_again(slow_s: float):
    stalled = [replace(r, done_s=r.done_s + 1.5) if 20.0 <= r.sent_s < 20.0 + slow_s else r for r in traffic()]
    assert recoveries(stalled, FAULTS) == [0.0, pytest.approx(slow_s, abs=0.25), 0.0]


def test_an_answer_is_known_by_its_id_its_payload_and_its_variant():
    requests = Requests(seed=1)
    payload = requests.payload(41)
    asked = service_pb2.ModelInferRequest.FromString(requests.message(41, payload))
    assert (asked.model_name, asked.id, asked.raw_input_contents[0]) == (FAMILY, "41", payload)
    answer = service_pb2.ModelInferResponse(id="41")
    for name, raw in (("ECHO", payload), ("VERSION", (2).to_bytes(8, "little") * 2)):
        answer.outputs.add(name=name, datatype="INT64", shape=[1, 2])
        answer.raw_output_contents.append(raw)
    answer.parameters["trefoil_variant"].string_param = "echo-2"
    assert wrong(answer, 41, payload) == ""
    assert "id" in wrong(answer, 42, payload)
    assert "payload" in wrong(answer, 41, requests.payload(41))
    answer.parameters["trefoil_variant"].string_param = "echo-3"
    assert "version" in wrong(answer, 41, payload)


def test_a_soak_counts_growth_after_the_warm_up_only():
    grown = [Sample(2.0 * n, 2**20 * (50 + min(n, 90)), 40, 1) for n in range(900)]
    assert verdict(grown, 30.0, 200.0, 1000, 0).broken == ()
    leaking = [replace(sample, descriptors=40 + n // 200) for n, sample in enumerate(grown)]
    assert verdict(leaking, 30.0, 200.0, 1000, 0).broken == ("3 more descriptors at the end",)
    growing = [replace(sample, rss_bytes=2**20 * (100 + n // 100)) for n, sample in enumerate(grown)]
    assert "memory grew by" in verdict(growing, 30.0, 200.0, 1000, 0).broken[0]
    assert verdict(grown, 30.0, 200.0, 1000, 2).broken == ("2 of 1000 requests failed",)
