"""200 clients that never read, or that send a byte a second: what everybody else notices of them.

`python -m benchmarks.slow_clients [--clients 200] [--seconds 15] [--rounds 3]`. A real dispatcher process before slices
in processes of their own; Poisson arrivals whose answers are checked, in turn alone and beside either kind of client
(benchmarks/hostile.py, a process of its own). Printed: p50 and p99 of everybody else, medians of the rounds, and the
dispatcher's memory. Exit code 1 where p99 is more than twice that of the rounds alone, memory grows by more than
GROWTH_MB_MAX, or an answer fails.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc
import numpy as np

from benchmarks.overload import (
    FAMILY,
    INFER,
    SLICES,
    Overload,
    ask,
    dispatcher_process,
    publish,
    redis_process,
    resident_mb,
    slice_process,
    until_serving,
)
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

SERVICE_MS: Final = 5.0
RATE_PER_S: Final = 150.0
ALONE, KINDS = "alone", ("dribble only", "never read")
P99_RATIO_MAX: Final = 2.0
GROWTH_MB_MAX: Final = 64.0
"""For 200 connections whose answers nobody reads: 0.3 MB each is far more than one should cost."""


async def _round(channel: Any, seconds: float, rng: np.random.Generator) -> Overload:
    clock, found = WallClock(), Overload()
    call = channel.unary_unary(INFER)
    began_s = clock.monotonic_s()
    async with asyncio.TaskGroup() as group:
        for number, at_s in enumerate(np.cumsum(rng.exponential(1 / RATE_PER_S, int(seconds * RATE_PER_S)))):
            await clock.sleep(max(0.0, began_s + float(at_s) - clock.monotonic_s()))
            group.create_task(ask(call, number, found, began_s))
    return found


@contextlib.asynccontextmanager
async def _attack(kind: str, address: str, clients: int) -> Any:
    if kind == ALONE:
        yield
        return
    at = {"inference": address, "model": FAMILY, "clients": str(clients)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.hostile", kind, json.dumps(at), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        await asyncio.sleep(5.0)  # all of them are there
        yield
    finally:
        process.terminate()
        await process.communicate()


async def measure(redis_url: str, folder: Path, clients: int, seconds: float, rounds: int) -> list[str]:
    """Print the figures; the bounds that did not hold."""
    found: dict[str, list[Overload]] = defaultdict(list)
    memory_mb: dict[str, list[float]] = defaultdict(list)
    rng = np.random.default_rng(7)
    async with contextlib.AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(slice_process(SERVICE_MS)) for _ in range(SLICES)]
        ports = await stack.enter_async_context(dispatcher_process(redis_url, "slow-clients", folder))
        state = State.connect(redis_url, "slow-clients")
        stack.push_async_callback(state.close)
        await publish(state, targets)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(ports.inference))
        await until_serving(channel)
        await _round(channel, 5.0, rng)  # warm
        for _ in range(rounds):
            for kind in (ALONE, *KINDS):
                async with _attack(kind, ports.inference, clients):
                    before_mb = resident_mb(ports.pid)
                    found[kind].append(await _round(channel, seconds, rng))
                    memory_mb[kind].append(resident_mb(ports.pid))
                print(f"{kind:14} memory {before_mb:.0f} to {memory_mb[kind][-1]:.0f} MB", flush=True)
                await asyncio.sleep(1.0)
    broken = []
    p99_ms = {kind: median(float(np.quantile(one.answered_ms, 0.99)) for one in each) for kind, each in found.items()}
    for kind, each in found.items():
        p50_ms = median(float(np.median(one.answered_ms)) for one in each)
        failed = sum(len(one.refused_ms) + one.wrong for one in each)
        ratio, grown_mb = p99_ms[kind] / p99_ms[ALONE], max(memory_mb[kind]) - memory_mb[ALONE][0]
        said = (
            f"{kind:14} p50 {p50_ms:.1f} ms, p99 {p99_ms[kind]:.1f} ms ({ratio:.2f} times alone), {failed} of "
            f"{sum(len(one.answered_ms) for one in each) + failed} failed, memory {grown_mb:+.0f} MB"
        )
        print(said)
        if failed or ratio > P99_RATIO_MAX or grown_mb > GROWTH_MB_MAX:
            broken.append(said)
    return broken


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"{given.clients} clients of either kind")
    with tempfile.TemporaryDirectory(prefix="trefoil-slow-") as name, redis_process(Path(name)) as redis_url:
        broken = asyncio.run(measure(redis_url, Path(name), given.clients, given.seconds, given.rounds))
    for line in broken:
        print(f"BROKEN: {line}")
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
