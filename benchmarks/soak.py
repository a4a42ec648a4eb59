"""Half an hour at 70 % load: does the dispatcher grow?

The whole system as in `make chaos`, untouched: the load is 70 % of what the slices can answer. Memory (resident, of
all processes of the dispatcher) and open file descriptors are read every few seconds. After a warm-up, in which
buffers, tables and Python's own arenas reach their size, memory may grow by less than 2 % to the end, by the medians of
the first and the last fifth of the samples; descriptors may not grow at all. The load comes in equal parts over
connections that stay, and over one that is opened again every second, as clients come and go.

Run: `make soak` (`--minutes 1` for a look). Prints both, writes out/bench/soak.json, exits with 1 when a limit is
broken or a request failed.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

import psutil
from rich.console import Console

from benchmarks.echo_family import executions
from benchmarks.echo_load import OK, EchoLoad
from benchmarks.echo_system import SMALL, Arrangement, EchoSystem, running
from trefoil.cli.demo.results import git_commit, machine, write_json
from trefoil.installation import CHECKOUT

OUT: Final = CHECKOUT / "out" / "bench"
LOAD: Final = 0.7
GROWTH_MAX: Final = 0.02
WARM_UP: Final = 0.1  # of the whole time, at least and at most so many seconds:
WARM_UP_S: Final = (10.0, 180.0)
SAMPLE_S: Final = 2.0
DEADLINE_S: Final = 15.0
MIB: Final = 2**20
ARRANGEMENT: Final = Arrangement(layouts=(SMALL,))  # what grows does so with requests, not with slices


@dataclass(frozen=True, slots=True)
class Sample:
    """Of all processes of the dispatcher."""

    at_s: float
    rss_bytes: int
    descriptors: int
    processes: int


@dataclass(frozen=True, slots=True)
class Found:
    """What a soak came to."""

    minutes: float
    rate_per_s: float
    requests: int
    failed: int
    rss_first_mib: float
    rss_last_mib: float
    rss_growth: float
    descriptors_first: int
    descriptors_last: int
    broken: tuple[str, ...]


async def soak(minutes: float, folder: Path, workers: int = 1, say: Callable[[str], None] = lambda _: None) -> Found:
    """One run, from nothing to its verdict."""
    rate_per_s = LOAD * ARRANGEMENT.capacity_per_s
    samples: list[Sample] = []
    async with running(folder, ARRANGEMENT, workers=workers, say=say) as system:
        requests = int(rate_per_s * minutes * 60)
        load = EchoLoad(system.target, rate_per_s, requests, 1, DEADLINE_S, keep=False, passing=True)
        loading = asyncio.create_task(load.run(), name="load")
        watching = asyncio.create_task(_watch(system, samples, load, say), name="watch")
        try:
            await loading
        finally:
            load.stop.set()
            for task in (watching, loading):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        noted = len(executions(system.repository))
    failed = [record for record in load.records if record.code != OK]
    for record in failed[:10]:
        say(f"{record.code} {record.details}")
    found = verdict(samples, minutes, rate_per_s, load.sent, len(failed))
    assert noted >= load.sent - len(failed), f"{load.sent} sent, {noted} executed"
    return found


async def _watch(system: EchoSystem, samples: list[Sample], load: EchoLoad, say: Callable[[str], None]) -> None:
    while True:
        main = system.dispatcher()
        processes = [main, *main.children(recursive=True)]
        rss = descriptors = 0
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                rss += process.memory_info().rss
                descriptors += process.num_fds()
        samples.append(Sample(system.clock.monotonic_s(), rss, descriptors, len(processes)))
        if len(samples) % 30 == 1:
            say(f"{load.sent:8d} sent, {rss / MIB:.1f} MiB, {descriptors} descriptors")
        await system.clock.sleep(SAMPLE_S)


def verdict(samples: Sequence[Sample], minutes: float, rate_per_s: float, requests: int, failed: int) -> Found:
    """Memory by medians of the first and last fifth after the warm-up, descriptors by the least of each: connections
    of passing clients come and go, a leak stays."""
    warm_s = min(max(WARM_UP * minutes * 60, WARM_UP_S[0]), WARM_UP_S[1])
    warm = [sample for sample in samples if sample.at_s - samples[0].at_s >= warm_s]
    fifth = max(1, len(warm) // 5)
    first, last = warm[:fifth], warm[-fifth:]
    rss_first, rss_last = (median(sample.rss_bytes for sample in part) / MIB for part in (first, last))
    open_first, open_last = (min(sample.descriptors for sample in part) for part in (first, last))
    growth = rss_last / rss_first - 1
    broken = []
    if growth >= GROWTH_MAX:
        broken.append(f"memory grew by {growth:.2%}, limit {GROWTH_MAX:.0%}")
    if open_last > open_first:
        broken.append(f"{open_last - open_first} more descriptors at the end")
    if failed:
        broken.append(f"{failed} of {requests} requests failed")
    return Found(
        minutes, rate_per_s, requests, failed, rss_first, rss_last, growth, open_first, open_last, tuple(broken)
    )


def main(argv: list[str] | None = None) -> int:
    """`make soak`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=1, help="dispatcher processes")
    given = parser.parse_args(argv)
    found = asyncio.run(soak(given.minutes, OUT / "soak", given.workers, lambda line: print(line, flush=True)))
    out = Console(width=120)
    out.print(
        f"{found.requests} requests in {found.minutes:g} minutes at {found.rate_per_s:.0f}/s ({LOAD:.0%}), "
        f"{found.failed} failed\n"
        f"memory {found.rss_first_mib:.1f} -> {found.rss_last_mib:.1f} MiB ({found.rss_growth:+.2%}), "
        f"descriptors {found.descriptors_first} -> {found.descriptors_last}",
        highlight=False,
    )
    for line in found.broken:
        out.print(f"BROKEN: {line}", highlight=False)
    values = {
        "command": f"make soak ARGS='{' '.join(argv or sys.argv[1:])}'",
        "commit": git_commit(),
        "machine": machine(),
    }
    write_json(OUT / "soak.json", values | asdict(found))
    return 1 if found.broken else 0


if __name__ == "__main__":
    sys.exit(main())
