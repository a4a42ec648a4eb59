"""What the dispatcher costs beside direct Triton, plain nginx, plain HAProxy and the least that Python can do.

    cpu       h2load repeats one ModelInferRequest (closed loop); CPU time of the proxy's processes over the requests,
              in microseconds: `small` 64 B, `knobs` the same with knobs and a receipt asked for, `large` 600 kB
    added     open loop: Poisson arrivals at 400/s from tritonclient, latency from the intended send time; median
              through the proxy less median straight to Triton
    router    one decision (arrival to credit given back) at 100 slices

Every figure is the median of the rounds; a round measures all peers one after another, so that whatever else the
machine does meets all of them. `raw grpc.aio` (benchmarks/raw_proxy.py) passes bytes on and decides nothing: it is the
scale for a machine, and limits are held against it too: a limit L of a reference machine, on which raw takes R0, is
L x R / R0 on one on which it takes R. Every request of a count is proven by Triton's own statistics; a peer without its
binary is named and left out. Run: `make bench-dispatcher` (five minutes; ARGS=--short: one). Prints tables, writes
out/bench/dispatcher.json, and exits with 1 when a limit is missed on the machine's own scale.
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

from benchmarks.dispatcher_peers import Bench
from benchmarks.dispatcher_router import routers
from trefoil.cli.demo.results import git_commit, machine, write_json
from trefoil.cli.run.state_directory import CHECKOUT
from trefoil.core.errors import BinaryMissing

OUT: Final = CHECKOUT / "out" / "bench"
PATH: Final = "/inference.GRPCInferenceService/ModelInfer"
RAW: Final = "raw grpc.aio"
CONNECTIONS: Final = 4
IN_FLIGHT: Final = 2  # of each connection
PLAIN_TIMES: Final = 4  # as many requests: the kernel counts CPU time in steps of 10 ms
RATE_PER_S: Final = 400.0
OURS: Final = "dispatcher"


@dataclass(frozen=True, slots=True)
class Shape:
    """A request that h2load repeats. `limit_us` on a machine on which the raw proxy takes `raw_us`."""

    name: str
    model: str
    dims: tuple[int, ...]
    datatype: str
    knobs: bool
    requests: int
    limit_us: float
    raw_us: float


SHAPES: Final = (
    Shape("small", "small", (1, 8, 8), "UINT8", False, 3000, 350.0, 290.0),
    Shape("knobs", "small", (1, 8, 8), "UINT8", True, 3000, 420.0, 290.0),
    Shape("large", "large", (1, 3, 224, 224), "FP32", False, 1000, 1000.0, 800.0),
)
ADDED_LIMIT_MS: Final = 0.7
ADDED_RAW_MS: Final = 0.6
ROUTER_LIMIT_US: Final = 20.0


@dataclass(slots=True)
class Found:
    """Figures of one peer, one entry a round."""

    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    per_s: dict[str, list[float]] = field(default_factory=dict)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    added_ms: list[float] = field(default_factory=list)
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One limit of the dispatcher. `scaled` is the limit on this machine, by the raw proxy of the same run."""

    what: str
    value: float
    unit: str
    limit: float
    scaled: float

    @property
    def passed(self) -> bool:
        return self.value <= max(self.limit, self.scaled)


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


async def h2load(target: str, body: Path, requests: int) -> float:
    """Requests per second that came back; raises RuntimeError when one did not."""
    argv = (
        "h2load", f"-n{requests}", f"-c{CONNECTIONS}", f"-m{IN_FLIGHT}", "-d", str(body),
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
            if peer.missing or (shape.knobs and not peer.name.startswith(OURS)):
                continue  # Triton and plain proxies know no knobs
            await h2load(peer.target, body, 50)
            before = await executed(client, shape.model)
            count = requests * (PLAIN_TIMES if peer.name in ("nginx", "haproxy") else 1)
            cpu_s = peer.cpu_s()
            per_s = await h2load(peer.target, body, count)
            cpu_s = peer.cpu_s() - cpu_s
            answered = await counted(client, shape.model, before + count) - before
            if answered != count:
                raise RuntimeError(f"{peer.name}: Triton answered {answered} of {count} requests ({shape.name})")
            found[peer.name].per_s.setdefault(shape.name, []).append(per_s)
            if peer.process is not None:
                found[peer.name].cpu_us.setdefault(shape.name, []).append(cpu_s / count * 1e6)


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
        if peer.missing:
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
    """Every limit, for one worker."""
    ours, raw = found[f"{OURS}, k = 1"], found[RAW]
    judged = []
    for shape in SHAPES:
        scale = median(raw.cpu_us[_like(shape)]) / shape.raw_us
        value = median(ours.cpu_us[shape.name])
        judged.append(Verdict(f"CPU of {shape.name}", value, "us", shape.limit_us, shape.limit_us * scale))
    scale = median(raw.added_ms) / ADDED_RAW_MS
    judged.append(
        Verdict("added p50 at 400/s", median(ours.added_ms), "ms", ADDED_LIMIT_MS, ADDED_LIMIT_MS * max(1.0, scale))
    )
    for name, value in decisions.items():
        judged.append(Verdict(f"router {name}", value, "us", ROUTER_LIMIT_US, ROUTER_LIMIT_US))
    return judged


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
    """The same for what clients see: requests/s of eight in flight, latency at 400/s [ms]."""
    rows: Rows = [("peer", "small/s", "large/s", "p50 ms", "p99 ms", "added ms")]
    for name, one in found.items():
        if one.missing:
            rows.append((f"{name}: {one.missing}", *("-",) * 5))
            continue
        per_s = (_show(middle(one.per_s.get(shape, ())), 0) for shape in ("small", "large"))
        times = (_show(middle(values), 2) for values in (one.p50_ms, one.p99_ms, one.added_ms))
        rows.append((name, *per_s, *times))
    return rows


def limit_rows(judged: Sequence[Verdict]) -> Rows:
    """The limits, each on the reference machine and on this one."""
    rows: Rows = [("one worker", "measured", "limit", "limit here", "")]
    for each in judged:
        digits = 2 if each.limit < 100 else 0
        said = "kept" if each.value <= each.limit else "kept on this machine's scale" if each.passed else "MISSED"
        value = f"{each.value:.{digits}f} {each.unit}"
        rows.append((each.what, value, f"{each.limit:g}", f"{each.scaled:.{digits}f}", said))
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


async def measure(folder: Path, rounds: int, short: bool, say: Callable[[str], None]) -> dict[str, Found]:
    """All rounds; raises BinaryMissing, TimeoutError, RuntimeError."""
    bench = Bench(folder)
    try:
        await bench.start()
        found = {peer.name: Found(missing=peer.missing) for peer in bench.peers}
        bodies = {}
        for shape in SHAPES:
            bodies[shape.name] = folder / f"{shape.name}.bin"
            bodies[shape.name].write_bytes(framed(message(shape)))
        await ready(bench)
        for turn in range(rounds):
            say(f"round {turn + 1} of {rounds}, load average {os.getloadavg()[0]:.1f}")
            for shape in SHAPES:
                await cpu_round(bench, shape, bodies[shape.name], found, short)
            await latency_round(bench, found, turn, short)
    finally:
        await bench.close()
    return found


async def ready(bench: Bench) -> None:
    """Every peer answers, and with values."""
    for peer in (peer for peer in bench.peers if not peer.missing):
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
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    console = Console()
    if shutil.which("h2load") is None:
        console.print("bench-dispatcher needs h2load: apt-get install nghttp2-client")
        return 2
    rounds = arguments.rounds or (2 if arguments.short else 5)
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as folder:
        try:
            found = asyncio.run(measure(Path(folder), rounds, arguments.short, console.print))
        except BinaryMissing as error:
            console.print(f"bench-dispatcher: {error}")
            return 2
    decisions = routers(rounds)
    judged = verdicts(found, decisions)
    shown = (cpu_rows(found), speed_rows(found), limit_rows(judged))
    for rows in shown:
        console.print(table(rows))
    raw_us = median(found[RAW].cpu_us["small"])
    console.print(f"raw grpc.aio takes {raw_us:.0f} us here, 290 us on the reference machine: x {raw_us / 290:.2f}")
    document = {
        "command": shlex.join(["python", "-m", "benchmarks.dispatcher", *sys.argv[1:]]),
        "commit": git_commit(),
        "machine": machine(),
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
