"""The year part of `make bench-carbon`: a year of half hours through the real service and Redis, none of them missing.

The process (`python -m carbon_feed`) replays a made-up file of half-hourly values, each of which tells its place in the
year, so fast that the year takes `PLAY_S`; it reads, publishes and records every half hour as it does at any other
speed. What is checked stands in Redis and in the feed: each half hour once, in order, with its own value and interval.
"""

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.carbon_feed_load import running
from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from protos.carbon_feed.v1 import carbon_feed_pb2_grpc as pb_grpc
from trefoil.core import errors
from trefoil.core.carbon import CarbonReading, Factors, Method, Series
from trefoil.runtime import rpc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

STEP_S: Final = 1800
DAY: Final = 86_400 // STEP_S
PLAY_S: Final = 45.0  # of a year: the rest of the limit is for a machine that is busy
LIMIT_S: Final = 60.0
BEGIN_S: Final = 3.0  # the process is up by then; a later one writes at once what has begun
SERIES: Final = Series("year", Method.AVERAGE, Factors.LIFECYCLE)


@dataclass(frozen=True, slots=True)
class Year:
    """What became of the half hours."""

    half_hours: int
    recorded: int
    wrong: int
    """Out of place, of another value, or without joining the one before."""
    served: int
    """Intervals that the feed itself knows."""
    wall_s: float
    """From the first one to the last one in Redis."""
    cpu_s: float
    """Of the feed."""
    limit_s: float

    @property
    def passed(self) -> bool:
        whole = self.half_hours == self.recorded == self.served
        return whole and not self.wrong and self.wall_s <= self.limit_s


def value(index: int) -> float:
    """Of a half hour [g/kWh]: tells it from its neighbours, and from those a day or a week off."""
    return 50.0 + (index * 37) % 900 + (index // 900) / 100


def write_trace(path: Path, half_hours: int) -> None:
    """The file."""
    rows = "\n".join(f"{index / 2},{value(index)}" for index in range(half_hours))
    path.write_text(f"# licence: made up\nhour,carbon_intensity_g_per_kwh\n{rows}\n", encoding="utf-8")


async def measure(days: int, play_s: float, say: Callable[[str], None], limit_s: float = LIMIT_S) -> Year:
    """Play so many days in so many seconds."""
    count, clock = days * DAY, WallClock()
    with tempfile.TemporaryDirectory(prefix="trefoil-year-") as folder:
        trace = Path(folder) / "year.csv"
        write_trace(trace, count)
        begin_s = round(clock.now_s() + BEGIN_S, 3)
        played = {"trace__path": trace, "trace__starts_at_s": begin_s}  # then again: a feed that is late has a reading
        wanted = {"zone": "year", "provider": "trace", "trace__speedup": count * STEP_S / play_s, **played}
        async with running(Path(folder), **wanted) as feed:
            state = State.connect(f"unix://{folder}/redis.sock", "bench", timeout_s=30.0)
            try:
                last_s = begin_s + play_s * (count - 1) / count
                wall_s = await _until_played(state, clock, begin_s, begin_s + 3 * play_s + 30.0, last_s)
                cpu_s = feed.cpu_s()
                recorded = (await _recorded(state))[:count]
            finally:
                await state.close()
            async with rpc.channel(feed.address) as channel:
                stub = pb_grpc.CarbonFeedStub(channel)
                health = (await stub.GetZoneHealth(pb.GetZoneHealthRequest(zone="year"), timeout=30)).zones[0]
        wrong = sum(not _right(recorded, index, begin_s, play_s / count) for index in range(len(recorded)))
        say(f"{len(recorded)} of {count} half hours in {wall_s:.1f} s, {cpu_s:.1f} s of CPU, {wrong} wrong")
        served = min(count, health.history_intervals)
        return Year(count, len(recorded), wrong, served, wall_s, cpu_s, limit_s)


def rows(found: Year) -> list[tuple[str, str, str]]:
    """For a table."""
    return [
        ("half hours in carbon:history", f"{found.recorded} of {found.half_hours}, {found.wrong} wrong", "all"),
        ("half hours in the feed", str(found.served), "all"),
        ("time", f"{found.wall_s:.1f} s", f"{found.limit_s:g} s"),
        ("CPU of the feed", f"{found.cpu_s:.1f} s, {found.cpu_s / max(1, found.recorded) * 1e3:.2f} ms each", ""),
    ]


async def _until_played(state: State, clock: WallClock, begin_s: float, end_s: float, last_s: float) -> float:
    """Seconds from the start of the trace until its last half hour stood in Redis, or until patience ended."""
    key = state.keys.carbon_history(SERIES)
    while clock.now_s() < end_s:
        try:
            newest = await state.tail(key, CarbonReading, 1)
        except errors.StateUnavailable:  # it is being started
            newest = []
        if newest and newest[0][1].starts_at_s >= last_s - 1e-4:
            return clock.now_s() - begin_s
        await asyncio.sleep(0.05)
    return clock.now_s() - begin_s


async def _recorded(state: State) -> list[CarbonReading]:
    key, found, after = state.keys.carbon_history(SERIES), [], "0"
    while page := await state.stream(key, CarbonReading, after, 1000):
        found += [reading for _, reading in page]
        after = page[-1][0]
    return found


def _right(recorded: list[CarbonReading], index: int, begin_s: float, wall_s: float) -> bool:
    reading = recorded[index]
    joins = not index or abs(recorded[index - 1].ends_at_s - reading.starts_at_s) < 1e-4
    in_place = abs(reading.starts_at_s - begin_s - index * wall_s) < wall_s / 10 + 1e-4
    return joins and in_place and reading.intensity_g_per_kwh == value(index)
