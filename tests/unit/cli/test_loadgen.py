"""The load generator against an endpoint in the same process: what it counts, and that it never waits."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trefoil.cli.load import generator
from trefoil.cli.load.arrivals import ArrivalTrace, RateProfile
from trefoil.cli.load.generator import LoadSpec, run_load
from trefoil.cli.load.process import LoadPlan
from trefoil.cli.load.result import LoadResult, Progress, Record
from trefoil.core.errors import InvalidInput, Unavailable
from trefoil.runtime.clock import ManualClock

IMAGES = 50


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Images whose first pixel is their own label."""
    pixels = np.zeros((IMAGES, 8, 8), np.uint8)
    labels = np.arange(IMAGES) % 10
    pixels[:, 0, 0] = labels
    path = tmp_path / "heldout.npz"
    np.savez(path, images=pixels, labels=labels.astype(np.uint8))
    return path


@dataclass
class Endpoint(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers with the first pixel, after `delay_s`; `misbehave` may change or refuse the answer to request n."""

    delay_s: float = 0.0
    held: asyncio.Event | None = None  # until it is set, nothing is answered
    misbehave: Callable[[int, service_pb2.ModelInferResponse], grpc.StatusCode | None] | None = None
    seen: list[service_pb2.ModelInferRequest] = field(default_factory=list)
    port: int = 0

    async def ModelInfer(self, request, context):
        number = len(self.seen)
        self.seen.append(request)
        await asyncio.sleep(self.delay_s)
        if self.held is not None:
            await self.held.wait()
        pixels = np.frombuffer(request.raw_input_contents[0], np.uint8).reshape(list(request.inputs[0].shape))
        reply = service_pb2.ModelInferResponse(model_name="digits", model_version="1", id=request.id)
        reply.outputs.add(name="PROBABILITIES", datatype="FP32", shape=[len(pixels), 10])
        reply.raw_output_contents.append(np.eye(10, dtype="<f4")[pixels[:, 0, 0]].tobytes())
        reply.parameters["trefoil_variant"].string_param = "digits-l" if number % 4 else "digits-s"
        if "trefoil_receipt" in request.parameters:
            reply.parameters["trefoil_slice"].string_param = f"node0-gpu{number % 2}-whole-0"
        refused = self.misbehave(number, reply) if self.misbehave else None
        if refused is not None:
            await context.abort(refused, "misbehaves")
        return reply


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    servicer = Endpoint()
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    servicer.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer
    await server.stop(None)


def spec(images: Path, rate_per_s: float = 100.0, duration_s: float = 0.5, **more: object) -> LoadSpec:
    return LoadSpec(RateProfile.constant(rate_per_s, duration_s), images, **more)


async def play(load: LoadSpec, endpoint: Endpoint, **more: object) -> LoadResult:
    return await run_load(load, f"127.0.0.1:{endpoint.port}", **more)


async def test_every_answer_is_checked_and_the_shares_are_those_of_the_answers(images, endpoint):
    result = await play(spec(images), endpoint)
    summary = result.summary(slo_ms=5000)
    assert summary.requests == summary.answered == len(endpoint.seen) > 20
    assert (summary.failed, summary.accuracy, summary.slo_attainment) == (0, 1.0, 1.0)
    assert summary.variant_shares["digits-s"] == pytest.approx(0.25, abs=0.03)
    assert sum(summary.variant_shares.values()) == pytest.approx(1.0)
    assert len({request.id for request in endpoint.seen}) == len(endpoint.seen)


async def test_two_runs_of_a_seed_send_the_same_images_at_the_same_times(images, endpoint):
    one = await play(spec(images, batch_sizes=(1, 3)), endpoint)
    sent = [bytes(r.raw_input_contents[0]) for r in sorted(endpoint.seen, key=lambda r: int(r.id.split("-")[1]))]
    endpoint.seen.clear()
    two = await play(spec(images, batch_sizes=(1, 3)), endpoint)
    again = [bytes(r.raw_input_contents[0]) for r in sorted(endpoint.seen, key=lambda r: int(r.id.split("-")[1]))]
    assert one.digest == two.digest
    assert sent == again
    assert {len(pixels) for pixels in sent} == {64, 192}
    assert [r.intended_s for r in one.records] == [r.intended_s for r in two.records]
    assert one.summary(1000).accuracy == 1.0


async def test_the_load_of_a_demo_sends_batches_and_learns_which_slice_answered(images, endpoint):
    points = ((0.0, 100.0), (0.5, 100.0))
    plan = LoadPlan(points, 0.0, str(images), "digits", 3, False, 3.0, 2.0, 8, receipts=True)
    result = await play(plan.spec(), endpoint)
    assert {record.slice for record in result.records} == {"node0-gpu0-whole-0", "node0-gpu1-whole-0"}
    rows = [request.inputs[0].shape[0] for request in endpoint.seen]
    assert set(rows) <= set(range(1, 9))
    assert len(set(rows)) > 4
    assert [(r.items, r.correct) for r in sorted(result.records, key=lambda r: r.items)] == [
        (n, n) for n in sorted(rows)
    ]

    def one_row_is_wrong(number, reply):
        shape = reply.outputs[0].shape
        scores = np.frombuffer(reply.raw_output_contents[0], "<f4").reshape(list(shape)).copy()
        scores[-1] = np.roll(scores[-1], 1)
        reply.raw_output_contents[0] = scores.tobytes()

    endpoint.misbehave = one_row_is_wrong
    endpoint.seen.clear()
    result = await play(replace(plan, receipts=False).spec(), endpoint)
    assert not any("trefoil_receipt" in request.parameters for request in endpoint.seen), "none where none is needed"
    assert all(record.correct == record.items - 1 for record in result.records), "each row has its label"


async def test_permuted_labels_bring_the_accuracy_down_to_chance(images, endpoint):
    result = await play(spec(images, 600, 1.0, permute_labels=True), endpoint)
    assert result.summary(1000).accuracy == pytest.approx(0.10, abs=0.12)  # 50 images only


async def test_failures_are_counted_by_code_and_are_misses_and_are_not_retried(images, endpoint):
    def misbehave(number, reply):
        if number % 10 == 0:
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        if number % 10 == 1:
            return grpc.StatusCode.UNAVAILABLE
        if number % 10 == 2:
            reply.raw_output_contents[0] = b""  # what a wrong numpy does, with status OK
        if number % 10 == 3:
            reply.id = "somebody else's"
        return None

    endpoint.misbehave = misbehave
    result = await play(spec(images, 200), endpoint)
    summary = result.summary(slo_ms=5000)
    assert len(endpoint.seen) == summary.requests
    assert set(summary.failed_by_code) == {"RESOURCE_EXHAUSTED", "UNAVAILABLE", "BAD_ANSWER"}
    assert sum(summary.failed_by_code.values()) == summary.failed
    assert summary.slo_attainment == pytest.approx(summary.answered / summary.requests)
    assert summary.accuracy == 1.0


async def test_a_slow_server_slows_no_arrival_and_its_deadline_is_kept(images, endpoint):
    endpoint.delay_s = 60.0
    result = await play(spec(images, 100, 0.5, deadline_s=3.0), endpoint)
    assert result.summary(100).failed_by_code == {"DEADLINE_EXCEEDED": len(result.records)}
    assert len(endpoint.seen) == len(result.records)  # all were sent although none was answered
    assert all(2900 < r.latency_ms < 30_000 for r in result.records)


async def test_latency_counts_from_the_intended_time_and_not_from_the_sending(images, endpoint):
    """A generator that is blocked sends late; the requests due meanwhile waited, and their latency says so."""
    blocked = asyncio.get_running_loop()

    def block(progress: Progress) -> None:
        if not endpoint.delay_s:
            endpoint.delay_s = 1e-4
            import time

            time.sleep(0.4)

    result = await play(spec(images, 100, 1.0), endpoint, on_progress=block)
    assert blocked.is_running()
    late = [r for r in result.records if r.sent_late_ms > 100]
    assert len(late) > 10
    assert all(r.latency_ms >= r.sent_late_ms for r in late)
    assert result.summary(100).sent_late_ms_p99 > 200


async def test_the_generator_is_bounded_and_says_what_it_did_not_send(images, endpoint):
    due = len((await play(spec(images, 200, 0.3), endpoint)).records)
    endpoint.seen.clear()
    endpoint.held = held = asyncio.Event()

    def let_go(progress: Progress) -> None:
        if progress.requests == due:
            held.set()

    result = await play(spec(images, 200, 0.3, in_flight_max=5), endpoint, on_progress=let_go)
    summary = result.summary(1000)
    assert summary.answered == 5
    assert summary.failed_by_code == {"NOT_SENT": summary.requests - 5}
    assert len(endpoint.seen) == 5


async def test_stopping_early_returns_what_was_sent(images, endpoint):
    stop = asyncio.Event()
    result = await play(spec(images, 100, 60.0), endpoint, stop=stop, on_progress=lambda p: p.requests and stop.set())
    assert result.stopped_early
    assert 0 < len(result.records) < 1000
    assert result.summary(1000).failed == 0


async def test_cancelling_leaves_nothing_running(images, endpoint):
    endpoint.delay_s = 30
    task = asyncio.create_task(play(spec(images, 100, 60.0, deadline_s=60), endpoint))
    while not endpoint.seen:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_progress_is_reported_to_the_end_and_its_errors_are_not_swallowed(images, endpoint, monkeypatch):
    monkeypatch.setattr(generator, "PROGRESS_S", 0.05)  # many, so that a moment's standstill leaves enough
    reports: list[Progress] = []
    result = await play(spec(images, 100, 1.2), endpoint, on_progress=reports.append)
    assert len(reports) >= 3
    assert reports[-1].answered == len(result.records)
    assert reports[-1].in_flight == 0
    assert reports[-1].accuracy == 1.0
    assert reports[-1].latency_ms_p95 is not None
    assert [r.elapsed_s for r in reports] == sorted(r.elapsed_s for r in reports)

    def broken(progress: Progress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await play(spec(images, 100, 0.7), endpoint, on_progress=broken)


async def test_nothing_listening_is_said_at_once(images):
    with pytest.raises(Unavailable, match=r"target = '127\.0\.0\.1:1': nothing answers.*trefoil up"):
        await run_load(spec(images, connect_timeout_s=0.3), "127.0.0.1:1")


async def test_a_bad_trace_sends_nothing(images, endpoint, tmp_path):
    (tmp_path / "gap.csv").write_text("second,requests\n0,5\n2,5\n")
    with pytest.raises(InvalidInput, match="gap"):
        await play(replace(spec(images), arrivals=ArrivalTrace(tmp_path / "gap.csv")), endpoint)
    assert endpoint.seen == []


async def test_parameters_reach_the_endpoint(images, endpoint):
    await play(spec(images, 50, 0.2, parameters={"trefoil_class": "gold", "trefoil_min_accuracy": 0.9}), endpoint)
    parameters = endpoint.seen[0].parameters
    assert parameters["trefoil_class"].string_param == "gold"
    assert parameters["trefoil_min_accuracy"].double_param == 0.9


def record(intended_s: float, latency_ms: float, code: str = "OK", variant: str = "a") -> Record:
    return Record(intended_s, 0.0, latency_ms, code, 1, int(code == "OK"), variant if code == "OK" else "")


RESULT = LoadResult(
    (record(0.1, 10), record(0.9, 90), record(1.5, 20, variant="b"), record(1.6, 5, "UNAVAILABLE")), 1e9, 3.0, 1, "d"
)


def test_the_series_counts_requests_in_the_second_they_were_due():
    series = RESULT.series()
    assert series.offered_per_s == [2, 2, 0]
    assert series.answered_per_s == [2, 1, 0]
    assert series.failed_per_s == [0, 1, 0]
    assert series.latency_ms_p95 == [pytest.approx(86.0), pytest.approx(20.0), None]
    assert series.answered_by_variant == {"a": [2, 0, 0], "b": [0, 1, 0]}


def test_what_is_written_is_the_same_numbers_as_json(tmp_path):
    RESULT.write(tmp_path / "deep" / "load.json", slo_ms=50)
    read = json.loads((tmp_path / "deep" / "load.json").read_text())
    assert read["summary"]["slo_attainment"] == 0.5
    assert read["summary"]["latency_ms_p50"] == 20.0
    assert read["records"]["code"] == ["OK", "OK", "OK", "UNAVAILABLE"]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["load.json"]


def test_a_load_without_answers_has_nulls_and_not_zeros():
    summary = LoadResult((record(0.1, 5, "UNAVAILABLE"),), 1e9, 1.0, 1, "d").summary(50)
    assert (summary.latency_ms_p95, summary.accuracy, summary.slo_attainment) == (None, None, 0.0)


async def test_a_load_that_waits_says_from_the_start_when_it_will_begin(images, endpoint):
    seen: list[tuple[float, Progress]] = []
    clock = ManualClock(1000.0)
    playing = asyncio.create_task(
        play(
            spec(images, 100, 0.3), endpoint, lead_s=1.2, clock=clock,
            on_progress=lambda progress: seen.append((clock.now_s(), progress)),
        )
    )  # fmt: skip
    while not playing.done():
        await clock.advance(0.05)
        await asyncio.sleep(0.001)
    result = await playing
    at_s, first = seen[0]
    assert first.elapsed_s == pytest.approx(-0.7)
    assert (first.requests, first.answered) == (0, 0)
    assert at_s - first.elapsed_s == pytest.approx(result.started_at_s)
    assert result.summary(5000).answered == len(result.records) > 0
