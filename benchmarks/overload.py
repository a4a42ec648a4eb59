"""Ten times what the slices can serve, for a minute: `python -m benchmarks.overload [--seconds 60] [--times 10]`.

A real dispatcher process, slices in separate processes that serve one request after another in a known time, and
clients that send at Poisson times whether or not they were answered. Printed: goodput over capacity, what was refused,
how fast and with which reason, the queue and the dispatcher's memory over time. Exit code 1 where a bound is broken.

A busy machine slows slices and clients too. So capacity is what the slices serve to its own clients, just before
and just after; and beside refusals stands what a ServerLive takes, which is answered without any decision.
"""

import argparse
import asyncio
import contextlib
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import psutil
from tritonclient.grpc import service_pb2 as pb

from protos.dispatcher.v1 import dispatcher_pb2
from tests.support.dispatching import Plane
from tests.support.fake_triton import FakeTritonProcess
from tests.support.redis_server import RedisServer
from tests.support.workers import METHOD, answered, dispatcher
from tests.support.workers import ask as request
from tests.unit.dispatcher.worlds import node, plan, route, status, target
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

FAMILY: Final = "digits"
VARIANT: Final = "digits-xs"
SLICES: Final = 4
SERVICE_MS: Final = 80.0
QUEUE_REQUESTS_MAX: Final = 64
CONNECTIONS: Final = 4
WARM_UP_S: Final = 2.0
DIRECT_S: Final = 2.0
LIVE_EVERY: Final = 10  # sends
LIVE: Final = "/inference.GRPCInferenceService/ServerLive"
GOODPUT_MIN: Final = 0.90
RSS_GROWTH_MAX: Final = 0.02
REFUSED_P99_MS_MAX: Final = 50.0
REFUSED_RATIO_MAX: Final = 3.0  # over ServerLive, where the machine is so busy that this is more


@dataclass
class Overload:
    """What happened after the warm-up. Latencies in ms, memory in MB."""

    capacity_per_s: float = 0.0
    seconds: float = 0.0
    sent: int = 0
    answered: int = 0
    wrong: int = 0
    refused_ms: list[float] = field(default_factory=list)
    answered_ms: list[float] = field(default_factory=list)
    live_ms: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    waiting: list[int] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Answers over what the slices can serve."""
        return self.answered / self.seconds / self.capacity_per_s

    @property
    def rss_growth(self) -> float:
        """Memory of the last fifth over that of the second fifth, less 1; medians."""
        part = max(1, len(self.rss_mb) // 5)
        return float(np.median(self.rss_mb[-part:]) / np.median(self.rss_mb[part : 2 * part]) - 1)

    def broken(self) -> list[str]:
        """The bounds that did not hold."""
        full = f"queue {FAMILY} is full"
        said = (
            f"{full}: it holds {QUEUE_REQUESTS_MAX} requests, limit {QUEUE_REQUESTS_MAX}",
            f"{full}, and its client has most of what waits",  # of a connection that gave its place to another
        )
        limit_ms = max(REFUSED_P99_MS_MAX, REFUSED_RATIO_MAX * _p99(self.live_ms))
        held = {
            f"goodput {self.goodput:.3f} >= {GOODPUT_MIN}": self.goodput >= GOODPUT_MIN,
            f"{self.wrong} answers of another request": self.wrong == 0,
            f"refused for other reasons too: {dict(self.reasons)}": all(r.startswith(said) for r in self.reasons),
            f"refusals take p99 {_p99(self.refused_ms):.1f} ms <= {limit_ms:.1f} ms": (
                _p99(self.refused_ms) <= limit_ms
            ),
            f"{max(self.waiting)} wait, limit {QUEUE_REQUESTS_MAX}": max(self.waiting) <= QUEUE_REQUESTS_MAX,
            f"memory grew by {self.rss_growth:.1%} <= {RSS_GROWTH_MAX:.0%}": self.rss_growth <= RSS_GROWTH_MAX,
        }
        return [text for text, holds in held.items() if not holds]

    def lines(self) -> list[str]:
        """The figures, one a line."""
        answered, refused = np.array(self.answered_ms), np.array(self.refused_ms)
        return [
            f"offered   {self.sent / self.seconds:8.1f}/s for {self.seconds:.0f} s, "
            f"capacity {self.capacity_per_s:.1f}/s",
            f"answered  {self.answered / self.seconds:8.1f}/s: goodput {self.goodput:.3f} of capacity, "
            f"p50 {np.median(answered):.0f} ms, p99 {np.quantile(answered, 0.99):.0f} ms, {self.wrong} wrong",
            f"refused   {len(refused) / self.seconds:8.1f}/s: p50 {np.median(refused):.2f} ms, "
            f"p99 {_p99(self.refused_ms):.2f} ms (a ServerLive: p50 {np.median(self.live_ms):.2f} ms, "
            f"p99 {_p99(self.live_ms):.2f} ms)",
            *(f"          {count} x {reason}" for reason, count in self.reasons.most_common()),
            f"waiting   min {min(self.waiting)}, max {max(self.waiting)} (limit {QUEUE_REQUESTS_MAX})",
            f"memory    {self.rss_mb[0]:.1f} MB at first, {self.rss_mb[-1]:.1f} MB at last: {self.rss_growth:+.2%}",
        ]


def _p99(values_ms: list[float]) -> float:
    return float(np.quantile(values_ms, 0.99)) if values_ms else 0.0


async def run(
    redis_url: str, cluster: str, folder: Path, seconds: float, times: float = 10.0, service_ms: float = SERVICE_MS
) -> Overload:
    """Start dispatcher and slices, overload them, stop them. The slower the slices, the less the machine must do."""
    async with contextlib.AsyncExitStack() as stack:
        slices = [await stack.enter_async_context(FakeTritonProcess(latency_ms=service_ms)) for _ in range(SLICES)]
        targets = [each.target for each in slices]
        own = {"log_level": "error", "drain_s": 0.5}
        serving = await stack.enter_async_context(dispatcher(folder, redis_url, cluster, 1, "dispatcher", **own))
        state = State.connect(redis_url, cluster)
        stack.push_async_callback(state.close)
        plane = Plane(state)
        await plane.node(node([status(n, address, variant=VARIANT) for n, address in enumerate(targets)]))
        routed = [target(n, VARIANT, 1 / SLICES) for n in range(SLICES)]
        await plane.plan(plan([route(routed, requests_max=QUEUE_REQUESTS_MAX)], slo_ms=2000.0))
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(serving.inference, options=[("grpc.use_local_subchannel_pool", 1)])
            )
            for _ in range(CONNECTIONS)
        ]
        await _until_serving(channels[0])
        before_per_s = await _direct(targets)
        offered_per_s = times * SLICES * 1e3 / service_ms
        assert serving.process is not None
        found = await _load(channels, serving.admin(), serving.process.pid, seconds, offered_per_s)
        found.capacity_per_s = (before_per_s + await _direct(targets)) / 2
        return found


# --- the load ---------------------------------------------------------------------------------------------------------


async def _load(channels: list[Any], admin: Any, pid: int, seconds: float, offered_per_s: float) -> Overload:
    clock, rng, found = WallClock(), np.random.default_rng(5), Overload()
    calls = [channel.unary_unary(METHOD) for channel in channels]
    whole_s = WARM_UP_S + seconds
    live = channels[0].unary_unary(LIVE)
    gaps = rng.exponential(1 / offered_per_s, int(whole_s * offered_per_s))
    pending: set[asyncio.Task[None]] = set()
    began_s = clock.monotonic_s()
    watcher = asyncio.create_task(_watch(found, admin, pid, began_s + WARM_UP_S))
    for number, at_s in enumerate(np.cumsum(gaps)):
        if (early_s := began_s + float(at_s) - clock.monotonic_s()) > 0:
            await clock.sleep(early_s)
        task = asyncio.create_task(_ask(calls[number % len(calls)], number, found, began_s + WARM_UP_S))
        pending.add(task)
        task.add_done_callback(pending.discard)
        if number % LIVE_EVERY == 0:
            task = asyncio.create_task(_alive(live, found))
            pending.add(task)
            task.add_done_callback(pending.discard)
    found.seconds = clock.monotonic_s() - began_s - WARM_UP_S
    watcher.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher
    counted = found.answered  # what is answered after the last arrival is beyond the time that is measured
    await asyncio.gather(*pending)
    found.answered = counted
    return found


async def _ask(call: Any, number: int, found: Overload, counts_from_s: float) -> None:
    """Send a request and check its answer; what ends before `counts_from_s` is not counted."""
    clock, first = WallClock(), number % 10
    sent_s = clock.monotonic_s()
    code = ""
    try:
        answer = pb.ModelInferResponse.FromString(await call(request(first, str(number)).SerializeToString()))
    except grpc.aio.AioRpcError as error:
        code = f"{error.code().name}: {error.details()}" if error.code() is not _FULL else (error.details() or "")
    now_s = clock.monotonic_s()
    if sent_s >= counts_from_s:
        found.sent += 1
    if now_s < counts_from_s:
        return
    if code:
        found.refused_ms.append((now_s - sent_s) * 1e3)
        found.reasons[code] += 1
        return
    found.answered += 1
    found.answered_ms.append((now_s - sent_s) * 1e3)
    found.wrong += answered(answer) != (first, str(number))


async def _alive(call: Any, found: Overload) -> None:
    clock = WallClock()
    sent_s = clock.monotonic_s()
    await call(b"")
    found.live_ms.append((clock.monotonic_s() - sent_s) * 1e3)


async def _direct(targets: list[str]) -> float:
    """What the slices serve to its own clients, two at each [1/s]."""
    clock = WallClock()
    ends_s = clock.monotonic_s() + DIRECT_S

    async def client(target: str) -> int:
        async with grpc.aio.insecure_channel(target) as channel:
            call, count = channel.unary_unary(METHOD), 0
            while clock.monotonic_s() < ends_s:
                await call(request(0, "0").SerializeToString())
                count += 1
            return count

    began_s = clock.monotonic_s()
    counts = await asyncio.gather(*(client(target) for target in targets for _ in range(2)))
    return sum(counts) / (clock.monotonic_s() - began_s)


_FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


async def _watch(found: Overload, admin: Any, pid: int, counts_from_s: float) -> None:
    clock, asked = WallClock(), dispatcher_pb2.ExplainRequestRequest(family=FAMILY)
    while True:
        await clock.sleep(0.1)
        told = await admin.ExplainRequest(asked)
        if clock.monotonic_s() >= counts_from_s:
            found.waiting.append(told.waiting)
            found.rss_mb.append(psutil.Process(pid).memory_info().rss / 2**20)


async def _until_serving(channel: Any) -> None:
    """Wait until requests are answered."""
    call = channel.unary_unary(METHOD)
    async with asyncio.timeout(30.0):
        while True:
            try:
                await call(request(0, "0").SerializeToString(), wait_for_ready=True)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
            else:
                return


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=10.0)
    given = parser.parse_args()
    redis = RedisServer()
    try:
        with tempfile.TemporaryDirectory(prefix="trefoil-overload-") as name:
            found = asyncio.run(run(redis.url, "overload", Path(name), given.seconds, given.times))
    finally:
        redis.close()
    for line in found.lines():
        print(line)
    broken = found.broken()
    for line in broken:
        print(f"BROKEN: {line}")
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
