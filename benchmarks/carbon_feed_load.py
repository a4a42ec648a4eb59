"""The load part of `make bench-carbon`: what clients of the feed see while many ask and many watch.

The real process (`python -m carbon_feed`) with a real Redis replays a trace in which a new reading comes every
`READING_S` seconds. h2load sends GetMany at a fixed rate over a few connections, open loop, while `STREAMS` Watch
streams are open, half of them told every reading and half of them changes of more than 5 %. Latencies are h2load's own,
one by one, from sending to the end of the answer. That each answer was one and no error is proven by the feed's own
count: gRPC says so in a trailer, at which h2load does not look.
"""

import asyncio
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import psutil

from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from protos.carbon_feed.v1 import carbon_feed_pb2_grpc as pb_grpc
from tests.support.ports import free_ports
from trefoil.cli.run.services import redis_binary
from trefoil.core.errors import BinaryMissing
from trefoil.runtime import rpc

RATE_PER_S: Final = 1000
STREAMS: Final = 200
RATE_MIN: Final = 0.98  # of the rate: h2load may fall behind on a busy machine
CHANNELS: Final = 8
CONNECTIONS: Final = 4
IN_FLIGHT: Final = 100  # of each connection: enough that none waits for another
WARM_UP_S: Final = 2
READING_S: Final = 5.0  # a live feed: 300 and more
STEP_S: Final = 1800
P99_LIMIT_MS: Final = 10.0
PATH: Final = "/trefoil.carbon_feed.v1.CarbonFeed/GetMany"
START_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """What h2load and the watchers saw."""

    rate_per_s: float
    requests: int
    refused: int
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    streams: int
    streams_lost: int
    announcements: int
    announcements_owed: int
    readings: int
    feed_cpu_ratio: float
    rss_mib: float
    load_average: float

    @property
    def passed(self) -> bool:
        """Done means: p99 within its limit, every request answered, no stream lost or left behind."""
        told = self.announcements >= self.announcements_owed and not self.streams_lost
        sent = self.rate_per_s >= RATE_MIN * RATE_PER_S
        return self.p99_ms <= P99_LIMIT_MS and not self.refused and told and sent


@dataclass(slots=True)
class Watcher:
    """What one stream was told."""

    told: int = 0
    last: int = 0
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Feed:
    """A feed that runs."""

    address: str
    metrics: str
    process: psutil.Process

    def answered(self) -> dict[str, int]:
        """GetMany calls so far, by status code."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10) as page:
            text = page.read().decode()
        rows = re.findall(r'trefoil_rpc_requests_total{code="(\w+)",method="([^"]+)"[^}]*} ([\d.e+]+)', text)
        return {code: int(float(count)) for code, method, count in rows if method == PATH}

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def running(folder: Path, **settings: object) -> AsyncIterator[Feed]:
    """A Redis and a separate feed, gone at the end."""
    socket = folder / "redis.sock"
    address, metrics = (f"127.0.0.1:{port}" for port in free_ports(2))
    lines = {
        "redis_url": f"unix://{socket}",
        "cluster": "bench",
        "admin_address": address,
        "metrics_address": metrics,
        "state_dir": folder / "feed",
        "log_level": "warning",
        **settings,
    }
    feed_argv = [sys.executable, "-m", "carbon_feed"]
    feed_argv += [part for name, value in lines.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]
    redis_argv = [str(redis_binary()), "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
    redis = subprocess.Popen(redis_argv, stdout=subprocess.DEVNULL)
    process = subprocess.Popen(feed_argv)
    try:
        feed = Feed(address, metrics, psutil.Process(process.pid))
        async with rpc.channel(address) as channel:
            stub = pb_grpc.CarbonFeedStub(channel)
            zone = str(settings.get("zone", "demo"))
            await stub.GetMany(pb.GetManyRequest(zones=[zone]), timeout=START_S, wait_for_ready=True)
        yield feed
    finally:
        for one in (process, redis):
            one.terminate()
            one.wait(10)


async def measure(seconds: int, say: Callable[[str], None], streams: int = STREAMS) -> Load:
    """One run.

    Raises:
        errors.BinaryMissing: no h2load.
        RuntimeError: it did not do its work.
    """
    if shutil.which("h2load") is None:
        raise BinaryMissing("h2load is not on PATH", remedy="apt-get install nghttp2-client")
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as scratch:
        folder = Path(scratch)
        replay = {"trace__speedup": STEP_S / READING_S, "trace__step_s": STEP_S}
        async with running(folder, **replay) as feed, watching(feed, streams) as watchers:
            before, cpu_s, as_of = feed.answered(), feed.cpu_s(), max((w.last for w in watchers), default=0)
            started_s = asyncio.get_running_loop().time()
            latencies_ms = await h2load(feed.address, folder, seconds)
            took_s = asyncio.get_running_loop().time() - started_s
            cpu_s = feed.cpu_s() - cpu_s
            after = feed.answered()
            await asyncio.sleep(READING_S)  # what was announced last arrives
            counts = {code: after[code] - before.get(code, 0) for code in after}
            say(f"{len(latencies_ms)} latencies, {counts} by the feed's own count")
            if counts.get("OK", 0) < len(latencies_ms):
                raise RuntimeError(f"h2load counts {len(latencies_ms)} answers, the feed {counts}")
            readings = max((watcher.last for watcher in watchers), default=as_of) - as_of
            every = watchers[: streams // 2]
            quantiles = np.quantile(latencies_ms, [0.5, 0.99, 0.999, 1.0])
            return Load(
                len(latencies_ms) / seconds,
                len(latencies_ms),
                sum(count for code, count in counts.items() if code != "OK"),
                *(float(value) for value in quantiles),
                streams,
                sum(bool(watcher.lost) for watcher in watchers),
                sum(watcher.told for watcher in every),
                len(every) * max(0, readings - 1),
                readings,
                cpu_s / took_s,
                feed.process.memory_info().rss / 2**20,
                os.getloadavg()[0],
            )


async def h2load(address: str, folder: Path, seconds: int) -> list[float]:
    """Latencies [ms] of requests at a fixed rate.

    Raises:
        RuntimeError: one failed.
    """
    body, log = folder / "get.bin", folder / "latencies.tsv"
    data = pb.GetManyRequest(zones=["demo"]).SerializeToString()
    body.write_bytes(struct.pack(">BI", 0, len(data)) + data)
    argv = (
        "h2load", f"-c{CONNECTIONS}", f"-m{IN_FLIGHT}", f"--rps={RATE_PER_S // CONNECTIONS}", f"-D{seconds}",
        f"--warm-up-time={WARM_UP_S}", "-d", str(body), f"--log-file={log}",
        "-H", "content-type: application/grpc", "-H", "te: trailers", f"http://{address}{PATH}",
    )  # fmt: skip
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    out = (await process.communicate())[0].decode()
    done = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", out)
    rows = np.loadtxt(log, dtype=np.int64, ndmin=2)
    if done is None or any(int(count) for count in done.groups()[1:]) or (rows[:, 1] != 200).any():
        raise RuntimeError(f"h2load against {address}: {out}")
    return [float(took_us) / 1e3 for took_us in rows[:, 2]]


@asynccontextmanager
async def watching(feed: Feed, streams: int) -> AsyncIterator[list[Watcher]]:
    """Open streams, each of which has been told once; the first half is told everything."""
    watchers = [Watcher() for _ in range(streams)]
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(feed.address, options=options) for _ in range(CHANNELS)]
    stubs = [pb_grpc.CarbonFeedStub(channel) for channel in channels]
    tasks = [
        asyncio.create_task(_watch(stubs[i % CHANNELS], watcher, 0.0 if i < streams // 2 else 0.05))
        for i, watcher in enumerate(watchers)
    ]
    try:
        async with asyncio.timeout(START_S):
            while any(watcher.told == 0 and not watcher.lost for watcher in watchers):
                await asyncio.sleep(0.05)
        yield watchers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in channels:
            await channel.close()


async def _watch(stub: Any, watcher: Watcher, change_ratio: float) -> None:
    request = pb.WatchIntensityRequest(zone="demo", change_ratio=change_ratio)
    try:
        async for announced in stub.WatchIntensity(request):
            watcher.told += 1
            watcher.last = announced.reading.as_of
        watcher.lost = "ended"
    except grpc.aio.AioRpcError as error:
        watcher.lost = f"{error.code().name}: {error.details()}"


def rows(found: Load) -> list[tuple[str, str, str]]:
    """For a terminal and for benchmarks/RESULTS.md: what, figure, limit."""
    told = f"{found.announcements:,} of at least {found.announcements_owed:,}"
    return [
        ("GetMany, open loop", f"{found.rate_per_s:,.0f}/s, {found.requests:,} in all", f"{RATE_PER_S:,}/s"),
        ("refused or failed", f"{found.refused}", "0"),
        ("p50 / p99 / p99.9 / worst", " / ".join(_ms(found)), f"p99 {P99_LIMIT_MS:g} ms"),
        ("Watch streams open, lost", f"{found.streams}, {found.streams_lost}", f"{STREAMS}, 0"),
        (f"readings meanwhile, announcements to half of them ({told})", f"{found.readings}", "none left behind"),
        ("CPU of the feed, memory", f"{found.feed_cpu_ratio:.0%} of a core, {found.rss_mib:.0f} MiB", "-"),
    ]


def _ms(found: Load) -> list[str]:
    return [f"{value:.2f}" for value in (found.p50_ms, found.p99_ms, found.p999_ms, found.max_ms)]
