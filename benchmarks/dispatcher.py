"""What the dispatcher costs beside direct Triton and the least that grpc.aio can do.

    cpu       h2load repeats one ModelInferRequest (closed loop); CPU time of the proxy's processes over the requests,
              in microseconds: `small` 64 B, `knobs` the same with knobs and a receipt asked for, `large` 600 kB, `huge`
              4.8 MB
    crowd     256 small requests in flight: requests/s, and resident memory after it
    added     open loop: Poisson arrivals at 400/s from tritonclient, latency from the intended send time; median
              through the proxy less median straight to Triton
    scale     small requests at 400/s a worker, by one worker and by two: CPU time a request, which forwarding would
              raise. In a closed loop two workers take more: a worker that is half idle writes and reads less at once
    router    one decision (arrival to credit given back) at 100 slices

Every figure is the median of the rounds; a round measures all peers one after another, so that whatever else the
machine does meets all of them, and every limit is a ratio of two figures of one run. `raw grpc.aio`
(benchmarks/raw_proxy.py) passes bytes on and decides nothing. Every request of a count is proven by Triton's own
statistics. Run: `make bench-dispatcher` (ARGS=--short: two rounds of a third). Prints tables, writes
out/bench/dispatcher.json, and exits with 1 when a limit is missed.
"""

import argparse
import asyncio
import os
import re
import shlex
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import tritonclient.grpc.aio as triton
from rich.console import Console
from rich.table import Table
from tritonclient.grpc import service_pb2 as pb

from benchmarks.dispatcher_peers import DISPATCHERS, RAY, Bench
from benchmarks.dispatcher_router import routers
from trefoil.cli.demo.results import git_commit, machine, write_json
from trefoil.core.errors import BinaryMissing
from trefoil.installation import CHECKOUT
from trefoil.runtime.clock import WallClock

OUT: Final = CHECKOUT / "out" / "bench"
PATH: Final = "/inference.GRPCInferenceService/ModelInfer"
RAW: Final = "raw grpc.aio"
CONNECTIONS: Final = 4
IN_FLIGHT: Final = 2  # of each connection
RATE_PER_S: Final = 400.0
OURS: Final = "dispatcher"
TWO: Final = "dispatcher, 2 workers"


@dataclass(frozen=True, slots=True)
class Shape:
    """A request that h2load repeats."""

    name: str
    model: str
    dims: tuple[int, ...]
    datatype: str
    knobs: bool
    requests: int


SHAPES: Final = (
    Shape("small", "small", (1, 8, 8), "UINT8", False, 3000),
    Shape("knobs", "small", (1, 8, 8), "UINT8", True, 3000),
    Shape("large", "large", (1, 3, 224, 224), "FP32", False, 1000),
    Shape("huge", "large", (8, 3, 224, 224), "FP32", False, 120),
)
CROWD_CONNECTIONS, CROWD_STREAMS, CROWD_REQUESTS = 8, 32, 6000
SCALE_CONNECTIONS: Final = 16
ROUTER_LIMIT_US: Final = 20.0


@dataclass(slots=True)
class Found:
    """Figures of one peer, one entry a round."""

    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    scale_us: list[float] = field(default_factory=list)
    per_s: dict[str, list[float]] = field(default_factory=dict)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    added_ms: list[float] = field(default_factory=list)
    crowd_per_s: list[float] = field(default_factory=list)
    crowd_mib: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One limit: a figure, and what it may be at most."""

    what: str
    value: float
    limit: float
    unit: str = "x"

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


def message(shape: Shape) -> bytes:
    """A ModelInferRequest."""
    request = pb.ModelInferRequest(model_name=shape.model, id="bench")
    request.inputs.add(name="IMAGE", datatype=shape.datatype, shape=shape.dims)
    size = 4 if shape.datatype == "FP32" else 1
    request.raw_input_contents.append(bytes(size * int(np.prod(shape.dims))))
    if shape.knobs:
        request.parameters["trefoil_class"].string_param = ""
        request.parameters["trefoil_slo_ms"].double_param = 200.0
        request.parameters["trefoil_min_accuracy"].double_param = 0.5
        request.parameters["trefoil_receipt"].bool_param = True
    return request.SerializeToString()


def framed(data: bytes) -> bytes:
    """As gRPC sends it: not compressed, its length, itself."""
    return struct.pack(">BI", 0, len(data)) + data


# --- measuring --------------------------------------------------------------------------------------------------------


async def h2load(
    target: str,
    body: Path,
    requests: int,
    connections: int = CONNECTIONS,
    streams: int = IN_FLIGHT,
    rate_per_s: float = 0.0,
) -> float:
    """Requests per second that came back; raises RuntimeError when one did not. `rate_per_s`: open loop, if above 0."""
    paced = (f"--rps={rate_per_s / connections}",) if rate_per_s else ()
    argv = (
        "h2load", f"-n{requests}", f"-c{connections}", f"-m{streams}", "-d", str(body), *paced,
        "-H", "content-type: application/grpc", "-H", "te: trailers", f"http://{target}{PATH}",
    )  # fmt: skip
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    out = (await process.communicate())[0].decode()
    done = re.search(r"(\d+) succeeded", out)
    rate = re.search(r"finished in [^,]+, ([\d.]+) req/s", out)
    if done is None or rate is None or int(done[1]) != requests:
        raise RuntimeError(f"h2load against {target}: {out}")
    return float(rate[1])


async def executed(client: Any, model: str) -> int:
    """Requests that Triton has answered so far, by its own count."""
    statistics = await client.get_inference_statistics(model)
    return sum(each.inference_stats.success.count for each in statistics.model_stats)


async def cpu_round(bench: Bench, shape: Shape, body: Path, found: Mapping[str, Found], short: bool) -> None:
    """One shape through every peer."""
    requests = shape.requests // (3 if short else 1)
    async with triton.InferenceServerClient(bench.triton) as client:
        for peer in bench.peers:
            if (shape.knobs and not peer.name.startswith(OURS)) or (peer.name == RAY and shape.name != "small"):
                continue  # Triton and plain proxies know no knobs; Ray Serve is asked the one thing
            before, warm = await executed(client, shape.model), 50 if shape.name != "huge" else 8
            await h2load(peer.target, body, warm)
            before = await counted(client, shape.model, before + warm)
            cpu_s = peer.cpu_s()
            per_s = await h2load(peer.target, body, requests)
            cpu_s = peer.cpu_s() - cpu_s
            answered = await counted(client, shape.model, before + requests) - before
            if answered != requests:
                raise RuntimeError(f"{peer.name}: Triton answered {answered} of {requests} requests ({shape.name})")
            found[peer.name].per_s.setdefault(shape.name, []).append(per_s)
            if peer.process is not None:
                found[peer.name].cpu_us.setdefault(shape.name, []).append(cpu_s / requests * 1e6)


async def crowd_round(bench: Bench, body: Path, found: Mapping[str, Found], short: bool) -> None:
    """Many at once, through the dispatcher and the raw proxy."""
    requests = CROWD_REQUESTS // (3 if short else 1)
    async with triton.InferenceServerClient(bench.triton) as client:
        for peer in bench.peers:
            if peer.name not in (OURS, RAW):
                continue
            before = await executed(client, "small")
            per_s = await h2load(peer.target, body, requests, CROWD_CONNECTIONS, CROWD_STREAMS)
            answered = await counted(client, "small", before + requests) - before
            if answered != requests:
                raise RuntimeError(f"{peer.name}: Triton answered {answered} of {requests} requests (256 in flight)")
            found[peer.name].crowd_per_s.append(per_s)
            found[peer.name].crowd_mib.append(peer.memory_bytes() / 2**20)


async def scale_round(bench: Bench, body: Path, found: Mapping[str, Found], short: bool) -> None:
    """The same rate a worker, by one and by two."""
    for peer in bench.peers:
        if (workers := DISPATCHERS.get(peer.name)) is None:
            continue
        rate_per_s = RATE_PER_S * workers
        requests = round(rate_per_s * (2.0 if short else 5.0))
        cpu_s = peer.cpu_s()
        await h2load(peer.target, body, requests, SCALE_CONNECTIONS, CROWD_STREAMS, rate_per_s)
        found[peer.name].scale_us.append((peer.cpu_s() - cpu_s) / requests * 1e6)


async def counted(client: Any, model: str, expected: int) -> int:
    """Triton counts shortly after it answers."""
    for _ in range(100):
        if (count := await executed(client, model)) >= expected:
            return count
        await asyncio.sleep(0.02)
    return count


async def open_loop(target: str, requests: int, seed: int) -> list[float]:
    """Latencies [ms] of Poisson arrivals, each from when it was to be sent."""
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / RATE_PER_S, requests)).tolist()
    tensor = triton.InferInput("IMAGE", [1, 8, 8], "UINT8")
    tensor.set_data_from_numpy(np.zeros((1, 8, 8), np.uint8))
    latencies: list[float] = []
    async with triton.InferenceServerClient(target) as client:
        for _ in range(20):
            await client.infer("small", [tensor])
        start_s = time.perf_counter()

        async def ask(at_s: float) -> None:
            await client.infer("small", [tensor])
            latencies.append((time.perf_counter() - start_s - at_s) * 1e3)

        async with asyncio.TaskGroup() as group:
            for at_s in due_s:
                if (wait_s := start_s + at_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(ask(at_s))
    return latencies


async def latency_round(bench: Bench, found: Mapping[str, Found], seed: int, short: bool) -> None:
    """The same arrivals through every peer."""
    requests = 400 if short else 1200
    direct_ms = 0.0
    for peer in bench.peers:
        if peer.name == RAY:  # it serves fewer than arrive
            continue
        latencies = await open_loop(peer.target, requests, seed)
        p50, p99 = (float(q) for q in np.quantile(latencies, (0.5, 0.99)))
        if peer.name == "direct":
            direct_ms = p50
        one = found[peer.name]
        one.p50_ms.append(p50)
        one.p99_ms.append(p99)
        one.added_ms.append(p50 - direct_ms)


# --- judging and showing ----------------------------------------------------------------------------------------------


def middle(values: Sequence[float]) -> float | None:
    """The median; None where nothing was measured."""
    return median(values) if values else None


def verdicts(found: Mapping[str, Found], decisions: Mapping[str, float]) -> list[Verdict]:
    """Every limit."""
    ours, raw = found[OURS], found[RAW]

    def ratio(what: str, mine: Sequence[float], theirs: Sequence[float], limit: float) -> Verdict:
        return Verdict(what, median(mine) / median(theirs), limit)

    judged = [
        *(
            ratio(f"CPU of {shape} / raw's", ours.cpu_us[shape], raw.cpu_us[shape], limit)
            for shape, limit in (("small", 0.45), ("large", 0.85), ("huge", 1.0))
        ),
        ratio("CPU of small at 400/s a worker, 2 workers / 1", found[TWO].scale_us, ours.scale_us, 1.2),
        ratio("added p50 at 400/s / raw's", ours.added_ms, raw.added_ms, 0.75),
        ratio("256 in flight: memory / raw's", ours.crowd_mib, raw.crowd_mib, 1.25),
    ]
    return judged + [Verdict(f"router {name}", value, ROUTER_LIMIT_US, "us") for name, value in decisions.items()]


Rows = list[tuple[str, ...]]


def cpu_rows(found: Mapping[str, Found]) -> Rows:
    """Heading and one row for each peer: CPU [us], and how many times that of the raw proxy."""
    rows: Rows = [("peer", *(word for shape in SHAPES for word in (f"{shape.name} us", "x raw")))]
    for name, one in found.items():
        cells = [name]
        for shape in SHAPES:
            cpu = middle(one.cpu_us.get(shape.name, ()))
            scale = median(found[RAW].cpu_us[_like(shape)])
            cells += [_show(cpu, 0), _show(cpu / scale if cpu is not None else None, 2)]
        rows.append(tuple(cells))
    return rows


def speed_rows(found: Mapping[str, Found]) -> Rows:
    """The same at a fixed rate, and what clients see: requests/s of eight in flight, latency at 400/s [ms]."""
    flow = ("small/s", "large/s", "256 in flight/s", "MiB then", "p50 ms", "p99 ms", "added ms")
    rows: Rows = [("peer", "small us at 400/s a worker", *flow)]
    for name, one in found.items():
        per_s = (_show(middle(one.per_s.get(shape, ())), 0) for shape in ("small", "large"))
        times = (_show(middle(values), 2) for values in (one.p50_ms, one.p99_ms, one.added_ms))
        crowd = (_show(middle(one.crowd_per_s), 0), _show(middle(one.crowd_mib), 0))
        rows.append((name, _show(middle(one.scale_us), 0), *per_s, *crowd, *times))
    return rows


def limit_rows(judged: Sequence[Verdict]) -> Rows:
    """The limits."""
    rows: Rows = [("limit", "measured", "at", "")]
    for each in judged:
        rows.append(
            (each.what, f"{each.value:.2f} {each.unit}", f"at most {each.limit:g}", "kept" if each.passed else "MISSED")
        )
    return rows


def table(rows: Rows) -> Table:
    """For a terminal."""
    shown = Table()
    for n, name in enumerate(rows[0]):
        shown.add_column(name, justify="right" if n else "left")
    for row in rows[1:]:
        shown.add_row(*row)
    return shown


def markdown(rows: Rows) -> str:
    """For benchmarks/RESULTS.md."""
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def _like(shape: Shape) -> str:
    """The shape without knobs, which alone plain proxies can be sent."""
    return "small" if shape.name == "knobs" else shape.name


def _show(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


async def measure(
    folder: Path, rounds: int, short: bool, say: Callable[[str], None], ray: Path | None = None
) -> dict[str, Found]:
    """All rounds; raises BinaryMissing, TimeoutError, RuntimeError."""
    bench = Bench(folder, ray=ray)
    try:
        await bench.start()
        found = {peer.name: Found() for peer in bench.peers}
        bodies = {}
        for shape in SHAPES:
            bodies[shape.name] = folder / f"{shape.name}.bin"
            bodies[shape.name].write_bytes(framed(message(shape)))
        await ready(bench)
        for turn in range(rounds):
            say(f"round {turn + 1} of {rounds}, load average {os.getloadavg()[0]:.1f}")
            for shape in SHAPES:
                await cpu_round(bench, shape, bodies[shape.name], found, short)
            await scale_round(bench, bodies["small"], found, short)
            await crowd_round(bench, bodies["small"], found, short)
            await latency_round(bench, found, turn, short)
    finally:
        await bench.close()
    return found


async def ready(bench: Bench) -> None:
    """Every peer answers, and with values."""
    for peer in bench.peers:
        async with asyncio.timeout(30.0), triton.InferenceServerClient(peer.target) as client:
            tensor = triton.InferInput("IMAGE", [1, 8, 8], "UINT8")
            tensor.set_data_from_numpy(np.zeros((1, 8, 8), np.uint8))
            while True:
                try:
                    answer = await client.infer("small", [tensor])
                    break
                except triton.InferenceServerException:
                    await asyncio.sleep(0.1)
            assert answer.as_numpy("PROBABILITIES").shape == (1, 10), peer.name


def main() -> int:
    """From the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="two rounds of a third of the requests")
    parser.add_argument("--rounds", type=int, help="how often everything is measured (5, short 2)")
    parser.add_argument("--ray", type=Path, metavar="PYTHON", help="of an environment with Ray Serve: a peer more")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    console = Console()
    if shutil.which("h2load") is None:
        console.print("bench-dispatcher needs h2load: apt-get install nghttp2-client")
        return 2
    rounds, began_s = arguments.rounds or (2 if arguments.short else 5), WallClock().monotonic_s()
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as folder:
        try:
            found = asyncio.run(measure(Path(folder), rounds, arguments.short, console.print, arguments.ray))
        except BinaryMissing as error:
            console.print(f"bench-dispatcher: {error}")
            return 2
    decisions = routers(rounds)
    judged = verdicts(found, decisions)
    shown = (cpu_rows(found), speed_rows(found), limit_rows(judged))
    for rows in shown:
        console.print(table(rows))
    document = {
        "command": shlex.join(["python", "-m", "benchmarks.dispatcher", *sys.argv[1:]]),
        "commit": git_commit(),
        "machine": machine(),
        "took_s": round(WallClock().monotonic_s() - began_s),
        "load_average": os.getloadavg(),
        "rounds": rounds,
        "peers": {name: asdict(one) for name, one in found.items()},
        "router_us": decisions,
        "limits": [{**asdict(each), "passed": each.passed} for each in judged],
    }
    write_json(arguments.out / "dispatcher.json", document)
    (arguments.out / "dispatcher.md").write_text("\n".join(markdown(rows) for rows in shown))
    return 0 if all(each.passed for each in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
