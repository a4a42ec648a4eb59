"""The unmodified perf_analyzer against a dispatcher in front of two real Tritons: it runs to its end, and what it wrote
agrees with what we say of ourselves."""

import asyncio
import json
import re

import pytest
import tritonclient.grpc.aio as triton

from tests.support.perf_analyzer import PerfAnalyzer, Report, perf_analyzer

pytestmark = [pytest.mark.integration, pytest.mark.slow]
MODELS = ("scores", "accumulator", "repeat")
COUNTS = ("success", "queue", "compute_input", "compute_infer", "compute_output")
COLUMNS = {
    "Inferences/Second", "Client Send", "Network+Server Send/Recv", "Server Queue", "Server Compute Input",
    "Server Compute Infer", "Server Compute Output", "Client Recv", "p50 latency", "p99 latency",
}  # fmt: skip


@pytest.fixture(scope="module")
def analyzer() -> PerfAnalyzer:
    return perf_analyzer()


class Measured:
    """A dispatcher, measured by perf_analyzer and by its own ModelStatistics."""

    def __init__(self, analyzer: PerfAnalyzer, running) -> None:
        self._analyzer, self.running = analyzer, running

    async def run(self, model: str, *options: str) -> tuple[Report, int]:
        """The report, and how many requests we count, which is in every part the same."""
        before = await self.counts(model)
        report = await asyncio.to_thread(self._analyzer.run, self.running.address, model, *options)
        after = await self.counts(model)
        grown = {after[name] - before[name] for name in COUNTS}
        assert len(grown) == 1
        assert after["fail"] == before["fail"]
        for row in report.rows:
            assert set(row) >= COLUMNS, row
            assert float(row["Inferences/Second"]) > 0
            assert 0 < int(row["p50 latency"]) <= int(row["p99 latency"])
            assert int(row["Server Compute Infer"]) > 0, "its windows show our statistics"
        return report, grown.pop()

    async def counts(self, model: str) -> dict[str, int]:
        async with triton.InferenceServerClient(self.running.address) as client:
            (stats,) = (await client.get_inference_statistics(model)).model_stats
        assert int(stats.version) == 1
        return {name: getattr(stats.inference_stats, name).count for name in (*COUNTS, "fail")}


@pytest.fixture
def measured(analyzer, world) -> Measured:
    return Measured(analyzer, world.running)


def seen(report: Report) -> list[int]:
    """Requests that perf_analyzer counted in its windows, for each load."""
    return [int(count) for count in re.findall(r"Request count: (\d+)", report.output)]


async def test_concurrency(measured):
    report, counted = await measured.run("scores", "--concurrency-range", "4", "--request-count", "400")
    assert 400 <= seen(report)[0] <= counted
    assert set(measured.running.local.accounting.load.totals["scores"].by_variant) == {"v3", "v5"}


async def test_a_range_of_loads_in_windows_until_they_are_stable(measured):
    windows = ("-p", "300", "-r", "10", "--stability-percentage", "999")
    report, counted = await measured.run("scores", "--concurrency-range", "1:3:2", *windows)
    assert sorted(row["Concurrency"] for row in report.rows) == ["1", "3"]  # it lists them by what they brought
    assert 0 < sum(seen(report)) <= counted


async def test_poisson_request_rate(measured):
    rate = ("--request-rate-range", "80", "--request-distribution", "poisson")
    report, counted = await measured.run("scores", *rate, "--request-count", "320")  # four seconds: one may be lost
    (row,) = report.rows
    assert row["Request Rate"] == "80"
    assert 320 <= seen(report)[0] <= counted
    assert float(row["Inferences/Second"]) == pytest.approx(80, rel=0.5)


async def test_streaming(measured):
    stream = ("--streaming", "--async", "--concurrency-range", "3")
    report, counted = await measured.run("scores", *stream, "--request-count", "400")
    assert 400 <= seen(report)[0] <= counted


async def test_decoupled_streaming(measured, tmp_path):
    """Three answers to each request, which counts once."""
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"data": [{"COUNT": [3], "DELAY_MS": [1]}]}))
    stream = ("--streaming", "--async", "--concurrency-range", "2", "--input-data", str(data))
    report, counted = await measured.run("repeat", *stream, "--request-count", "60")
    assert 60 <= seen(report)[0] <= counted
    assert re.search(r"Response Throughput: [1-9]", report.output)


async def test_sequences(measured):
    lengths = ("--concurrency-range", "3", "--sequence-length", "8", "--sequence-id-range", "1000:2000")
    report, counted = await measured.run("accumulator", *lengths, "--request-count", "300")
    assert 300 <= seen(report)[0] <= counted
    assert re.search(r"Sequence count: [1-9]", report.output)
    served = measured.running.local.accounting.load.totals["accumulator"].by_variant
    assert set(served) == {"v3", "v5"}


async def test_sequences_on_one_stream(measured):
    lengths = ("--streaming", "--async", "--concurrency-range", "3", "--sequence-length", "8")
    report, counted = await measured.run("accumulator", *lengths, "--request-count", "300")
    assert 300 <= seen(report)[0] <= counted
