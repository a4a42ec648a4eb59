"""The memory part of `make bench-carbon`: does the feed grow with what it reads?

The loop that serves (`carbon_feed.reading.loop.ZoneLoop`) with the shipped trace replayed forever, a new reading every
tick, on a clock that is moved, so that a million readings take minutes and not years. In the place of Redis stands the
same store inside this process, whose stream is bounded as Redis's is, so that it counts too. One watcher is told
everything, and every thousandth reading a client asks for a page of history and the ratio. Own forecasts are not
issued: so fast a replay is over before they are read. Resident memory is read at each tenth. The history holds so many
intervals; from the tenth after which it was full, memory may grow by less than 2 % to the end.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import structlog

from carbon_feed.history import recorder
from carbon_feed.providers import make_providers
from carbon_feed.reading.loop import ZoneLoop
from carbon_feed.serving.servicer import CarbonFeedServicer
from carbon_feed.settings import CarbonFeedSettings, TraceSettings
from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from tests.support.stores import state_on
from tests.support.virtual.redis import Server
from trefoil.runtime import state as state_module
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.telemetry import Metrics

TICK_S: Final = 0.25
STEP_S: Final = 1800.0
GROWTH_MAX: Final = 0.02
ASK_EVERY: Final = 1000
START_S: Final = 1_795_000_000.0
TENTHS: Final = 10
MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory after each tenth of the readings."""

    readings: int
    intervals_max: int
    intervals: int
    rss_mib: tuple[float, ...]
    told: int
    cpu_s: float

    @property
    def full_at(self) -> int:
        """The first tenth that began with a full history."""
        return min(TENTHS - 1, 1 + -(-self.intervals_max * TENTHS // self.readings))

    @property
    def growth(self) -> float:
        """From then to the end."""
        return self.rss_mib[-1] / self.rss_mib[self.full_at] - 1

    @property
    def passed(self) -> bool:
        """Done means: flat."""
        return self.growth <= GROWTH_MAX and self.intervals <= self.intervals_max and self.told > 0


def measure(readings: int, say: Callable[[str], None]) -> Memory:
    """One run. A short one has a shorter history, and its store a shorter list of writes: both are full early."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    state_module.WRITES_MAX = min(state_module.WRITES_MAX, readings // 10)  # type: ignore[misc]
    recorder.HISTORY_MAX = min(recorder.HISTORY_MAX, readings // 5)  # type: ignore[misc]
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as folder:
        settings = CarbonFeedSettings(
            state_dir=Path(folder),
            trace=TraceSettings(speedup=STEP_S / TICK_S, step_s=STEP_S, starts_at_s=START_S),
        )
        return asyncio.run(_measure(settings, readings, say))


async def _measure(settings: CarbonFeedSettings, readings: int, say: Callable[[str], None]) -> Memory:
    clock, metrics, process = ManualClock(START_S), Metrics("carbon_feed"), psutil.Process()
    state: Any = state_on(Server(clock), settings.cluster, clock, metrics)
    [provider] = make_providers(settings, clock.now_s())
    loop = ZoneLoop(settings, provider, state, clock, metrics)
    servicer = CarbonFeedServicer([loop], clock=clock)
    told = [0]
    started_s, rss = time.process_time(), [process.memory_info().rss / MIB]
    await loop.init()
    watching = asyncio.create_task(_watch(servicer, told))
    for count in range(1, readings + 1):
        clock.move(TICK_S)
        await loop.tick()
        await asyncio.sleep(0)
        if count % ASK_EVERY == 0:
            await servicer.GetHistory(pb.GetHistoryRequest(zone=settings.zone, limit=100), None)
            await servicer.GetRatio(pb.GetRatioRequest(zone=settings.zone, window="30d"), None)
        if count % (readings // TENTHS) == 0:
            rss.append(process.memory_info().rss / MIB)
            say(f"{count:,} readings: {rss[-1]:.1f} MiB, {len(loop.history):,} intervals")
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    cpu_s = time.process_time() - started_s
    return Memory(readings, recorder.HISTORY_MAX, len(loop.history), tuple(rss), told[0], cpu_s)


async def _watch(servicer: CarbonFeedServicer, told: list[int]) -> None:
    async for _ in servicer.WatchIntensity(pb.WatchIntensityRequest(zone="demo"), None):
        told[0] += 1


def rows(found: Memory) -> list[tuple[str, str, str]]:
    """For a terminal and for benchmarks/RESULTS.md: what, figure, limit."""
    at = ", ".join(f"{value:.0f}" for value in found.rss_mib)
    what = f"resident memory at each tenth of {found.readings:,} readings, history of {found.intervals_max:,} intervals"
    return [
        (what, f"{at} MiB", "-"),
        (f"growth since {found.full_at * 10} % of them", f"{found.growth:+.2%}", f"{GROWTH_MAX:.0%}"),
        ("CPU a reading", f"{found.cpu_s / found.readings * 1e6:.0f} us", "-"),
    ]
