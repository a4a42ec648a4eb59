"""Nothing is lost: requests under way while everything around them is killed, stopped, emptied and rebuilt.

The whole system runs as `trefoil up` starts it: real Redis, controller, power agent on a simulated node with a real
Triton per slice, dispatcher. Clients send 200,000 requests, open loop, retries off, each with a separate payload
that its answer must repeat. Meanwhile, at random times and in a random order by seed, variants swap, slices are
repartitioned, a Triton is SIGKILLed or SIGSTOPped, Redis is restarted or flushed, and controller, power agent, carbon
feed or a dispatcher worker is killed. Limits (benchmarks/chaos_verdict.py):

    failed         only requests that were in flight on what was hurt, and at most 0.05 % of all
    executed       no request more than once: it is retried only if its slice certainly never took it
    answered       none with another one's result
    recovery       2 s from each fault until requests are served again at the usual rate

Run: `make chaos` (about ten minutes; `--requests 6000` half a minute). Prints a table by kind of fault, writes
out/bench/chaos.json, keeps the logs in out/bench/chaos, and exits with 1 when a limit is broken.

`--rows`: instead, a table of disks that are full or read-only, model files that change, services that do not stay up
(needs root; a quarter of an hour).
`--redis`: instead, every error of Redis, each for 20 s under 100 requests/s (benchmarks/chaos_redis.py): no request may
fail, no process end, decisions are back 5 s after it, and the joules that are booked are those of the driver's
counters. Seven minutes; `--lasts 5 --only OOM` one trouble, shorter.
"""

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks import chaos_disk, chaos_redis, chaos_up
from benchmarks.chaos_faults import Fault, Faults
from benchmarks.chaos_redis import Relay
from benchmarks.chaos_rows import LASTS_S, RATE_PER_S, Row, run_rows
from benchmarks.chaos_rows import table as rows_table
from benchmarks.chaos_verdict import SLOW_S, Logged, Verdict, judge
from benchmarks.echo_family import executions
from benchmarks.echo_load import EchoLoad
from benchmarks.echo_system import Arrangement, EchoSystem, running
from trefoil.cli.demo.results import git_commit, machine, write_json
from trefoil.core.errors import StartError
from trefoil.installation import CHECKOUT

OUT: Final = CHECKOUT / "out" / "bench"
SEED: Final = 20261121
DEADLINE_S: Final = 15.0  # of a request: longer than any stop, so that only what is lost fails
QUIET_S: Final = 3.0  # before the first fault and after the last
RETRY_S: Final = 0.5
RECOVERED_MAX_S: Final = 5.0
STARTED_MAX_S: Final = 35.0  # of rows in which services end: they are started again after at most 30 s
JOULES_ERROR_MAX: Final = 0.01


@dataclass(frozen=True, slots=True)
class Size:
    """How much, how fast, how often."""

    requests: int = 200_000
    rate_per_s: float = 320.0
    gap_s: tuple[float, float] = (3.0, 9.0)
    workers: int = 2
    seed: int = SEED
    kinds: tuple[str, ...] = ()  # of faults; none: all
    slow_s: float = SLOW_S


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that came of a run."""

    size: Size
    verdict: Verdict
    faults: list[Fault]
    took_s: float
    p50_ms: float
    p99_ms: float
    sent_late_s_max: float


async def chaos(size: Size, folder: Path, say: Callable[[str], None] = lambda _: None) -> Found:
    """One run, from nothing to its verdict."""
    arrangement = Arrangement()
    async with running(folder, arrangement, workers=size.workers, say=say) as system:
        load = EchoLoad(system.target, size.rate_per_s, size.requests, size.seed, DEADLINE_S)
        faults = Faults(system, arrangement, size.rate_per_s, size.seed)
        began_s = system.clock.monotonic_s()
        loading = asyncio.create_task(load.run(), name="load")
        striking = asyncio.create_task(_strike(system, faults, load, size, say), name="strike")
        try:
            await asyncio.wait((loading, striking), return_when=asyncio.FIRST_EXCEPTION)
            for task in (striking, loading):
                if task.done():
                    task.result()  # raises what went wrong
        finally:
            load.stop.set()
            striking.cancel()
            with suppress(asyncio.CancelledError):
                await striking
            await faults.settle()
            await loading
        took_s = system.clock.monotonic_s() - began_s
        logged = failures(system.log("dispatcher"))
    verdict = judge(load.records, faults.done, logged, executions(system.repository), size.slow_s)
    latencies = sorted(record.latency_s for record in load.records)
    p50_ms, p99_ms = (1e3 * latencies[int(q * (len(latencies) - 1))] for q in (0.5, 0.99))
    return Found(size, verdict, faults.done, took_s, p50_ms, p99_ms, load.late_s_max)


async def _strike(system: EchoSystem, faults: Faults, load: EchoLoad, size: Size, say: Callable[[str], None]) -> None:
    """Until the load is nearly over."""
    await system.clock.sleep(QUIET_S)
    order = faults.order(size.kinds or faults.kinds)
    waiting: list[str] = []
    while (left_s := (size.requests - load.sent) / size.rate_per_s) >= QUIET_S + size.gap_s[0]:
        if system.launcher.failure:
            raise StartError(system.launcher.failure)
        waiting += [] if len(waiting) > 3 else [next(order)]
        pause_s = RETRY_S
        for kind in waiting:
            fault = await faults.strike(kind)
            if fault is not None:  # else there is nothing that could be hurt now: later
                waiting.remove(kind)
                pause_s = faults.gap_s(*size.gap_s)
                say(f"{load.sent:7d} sent, {load.failed} failed, {load.in_flight} in flight: {fault.what}")
                break
        await system.clock.sleep(min(pause_s, max(RETRY_S, left_s - QUIET_S)))


async def redis_rows(
    lasts_s: float, wanted: Callable[[str], bool], folder: Path, say: Callable[[str], None]
) -> tuple[list[Row], float]:
    """Rows of what Redis answers; see `run_rows`."""
    relay = Relay(folder / "cluster" / "run" / "launch.json")
    await relay.start()
    return await run_rows(chaos_redis.troubles(relay, lasts_s), folder, wanted, say, relay.overrides)


async def other_rows(
    wanted: Callable[[str], bool], folder: Path, say: Callable[[str], None]
) -> tuple[list[Row], float]:
    """Rows of disks, model files and services that do not stay up; see `run_rows`."""
    shutil.rmtree(folder, ignore_errors=True)
    with chaos_disk.small_disks(folder):
        sources = (chaos_disk, chaos_up)
        return await run_rows([one for each in sources for one in each.troubles()], folder, wanted, say)


def failures(log: str) -> dict[int, Logged]:
    """Failed requests by nonce, from the dispatcher's log."""
    found = {}
    for line in log.splitlines():
        if '"request failed"' not in line:
            continue
        try:
            entry: Mapping[str, Any] = json.loads(line)
        except json.JSONDecodeError:  # two workers wrote at once; who failed then has no excuse
            continue
        nonce = str(entry["request_id"])
        if nonce.isdigit():
            found[int(nonce)] = Logged(entry["slice"], entry["code"], entry["details"])
    return found


def show(found: Found) -> None:
    """The table, and what was broken."""
    out, verdict = Console(width=120), found.verdict
    table = Table(title=f"{verdict.requests} requests at {found.size.rate_per_s:g}/s, seed {found.size.seed}")
    for name in ("fault", "times", "failed", "most at once", "recovery s, median", "recovery s, worst"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for kind, row in sorted(verdict.rows.items()):
        times = sorted(row.recovery_s)
        cells = (row.faults, row.failed, row.failed_max, f"{times[len(times) // 2]:.2f}", f"{row.recovery_s_max:.2f}")
        table.add_row(kind, *(str(cell) for cell in cells))
    out.print(table)
    out.print(
        f"failed {verdict.failed} ({verdict.failed / verdict.requests:.4%}), {verdict.failed_executed} executed; "
        f"executed more than once {verdict.executed_more}; another's answer {verdict.wrong}; "
        f"answered after more than {found.size.slow_s:g} s {verdict.slow}"
    )
    out.print(
        f"p50 {found.p50_ms:.1f} ms, p99 {found.p99_ms:.1f} ms; {found.took_s:.0f} s; "
        f"sent at most {1e3 * found.sent_late_s_max:.0f} ms late"
    )
    for line in verdict.unexcused[:20]:
        out.print(f"  {line}", highlight=False)
    for line in verdict.broken:
        out.print(f"BROKEN: {line}", highlight=False)


def _judge_rows(name: str, rows: list[Row], error_ratio: float, recovered_max_s: float) -> int:
    out = Console(width=140)
    out.print(rows_table(f"{name}, under {RATE_PER_S:g} requests/s", rows))
    out.print(f"joules booked against counted: {error_ratio:+.2%}")
    values = {"commit": git_commit(), "machine": machine(), "joules_error_ratio": error_ratio}
    write_json(OUT / f"chaos-{name}.json", values | {"rows": [asdict(row) for row in rows]})
    broken = [
        f"{row.what}: {row.broken or row.codes or row.ended or f'back after {row.recovered_s} s'}"
        for row in rows
        if not row.clean or (row.recovered_s or 0.0) > recovered_max_s
    ]
    broken += ["joules"] if abs(error_ratio) > JOULES_ERROR_MAX else []
    for what in broken:
        out.print(f"BROKEN: {what}", highlight=False)
    return 1 if broken else 0


def main(argv: list[str] | None = None) -> int:
    """`make chaos`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Size()
    parser.add_argument("--requests", type=int, default=default.requests)
    parser.add_argument("--rate", type=float, default=default.rate_per_s, help="requests per second")
    parser.add_argument(
        "--gap", type=float, nargs=2, default=default.gap_s, help="seconds between faults, least and most"
    )
    parser.add_argument("--workers", type=int, default=default.workers, help="dispatcher processes")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--kind", action="append", default=[], help="only faults of this kind, e.g. 'Triton killed'")
    parser.add_argument("--redis", action="store_true", help="instead: whatever Redis answers")
    parser.add_argument("--rows", action="store_true", help="instead: disks, model files, services")
    parser.add_argument("--lasts", type=float, default=LASTS_S, help="seconds of each row of --redis")
    parser.add_argument("--only", default="", help="only rows whose name has this in it")
    given = parser.parse_args(argv)
    if given.redis or given.rows:

        def wanted(what: str) -> bool:
            return given.only in what

        def say(line: str) -> None:
            print(line, flush=True)

        if given.redis:
            made = asyncio.run(redis_rows(given.lasts, wanted, OUT / "chaos-redis", say))
            return _judge_rows("redis", *made, RECOVERED_MAX_S)
        return _judge_rows("rows", *asyncio.run(other_rows(wanted, OUT / "chaos-rows", say)), STARTED_MAX_S)
    size = Size(given.requests, given.rate, tuple(given.gap), given.workers, given.seed, tuple(given.kind))
    found = asyncio.run(chaos(size, OUT / "chaos", say=lambda line: print(line, flush=True)))
    show(found)
    values = {
        "command": f"make chaos ARGS='{' '.join(argv or sys.argv[1:])}'",
        "commit": git_commit(),
        "machine": machine(),
    }
    write_json(OUT / "chaos.json", values | asdict(found))
    return 1 if found.verdict.broken else 0


if __name__ == "__main__":
    sys.exit(main())
