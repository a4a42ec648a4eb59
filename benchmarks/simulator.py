"""How fast the simulator is on one core, and how much memory it needs: `make bench-simulator`.

    decision  CPU time of `on_arrival` (and of `on_done`) of every router, 14 slices, two credits each
    engine    requests per second of CPU time through the request-level engine, 14 slices at 0.6 of their capacity
    shared    the same of two families on three slices, one of them shared, with and without batches
    memory    peak memory of 48 h at 500 requests/s, 14 slices (a fiftieth of it; the whole with --full)
    year      a year on ten GPUs in steps of five minutes under `exact`, as a flow (--short: a month of it)
    parity    simulated against live, by benchmarks/parity.py: about nine minutes (--short: its short case)

Prints a table, writes out/bench/simulator.json, and exits with 1 when a limit is broken. Memory and year run in
separate processes. CPU time, the best of several rounds: a busy machine matters little, its clock does.
"""

import argparse
import importlib
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from dispatcher.queues import QUEUES
from dispatcher.queues.fair import FairQueue
from dispatcher.routers import ROUTERS
from trefoil.core.brains import Outcome, Pick, Ticket
from trefoil.core.fleet import SliceKey
from trefoil.core.interference import INTERFERENCE
from trefoil.core.plan import Route, RouteTarget
from trefoil.core.queueing import ServiceTime
from trefoil.simulator.engines.engine import Flow, OperatingPoint, SliceService
from trefoil.simulator.engines.request_engine import RequestEngine
from trefoil.simulator.scenario.arrivals import ArrivalSource, ArrivalStream, Rate

ROOT: Final = Path(__file__).resolve().parents[1]
DATA: Final = Path(os.environ.get("TREFOIL_DATA", ROOT / ".." / "shared" / "data"))
YEAR: Final = "em_US-CAL-CISO_2022_hourly.csv"  # of DATA/carbon: the year's intensities, where it is
YEAR_COLUMN: Final = "Carbon Intensity gCO₂eq/kWh (LCA)"
OUT: Final = ROOT / "out" / "bench" / "simulator.json"
SEED: Final = 20261121
SLICES: Final = 14
LOAD: Final = 0.6
SERVICE: Final = ServiceTime(20.0, 0.1)
GAP_MS: Final = 2.0
ROUNDS: Final = 7
REQUESTS: Final = 40_000  # a round
DAYS_S: Final = 48 * 3600.0
RATE_PER_S: Final = 500.0
BLOCK_S: Final = 300.0
PART: Final = 50  # of the 48 hours, without --full
DONE: Final = Outcome("OK", 20.0, 20.0, 0, True)


@dataclass(frozen=True, slots=True)
class Size:
    """How much of it."""

    full: bool = False
    short: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `limit` is what it must not exceed (`at_least`: must reach); None: for information."""

    part: str
    what: str
    value: float
    unit: str
    limit: float | None = None
    at_least: bool = False

    @property
    def kept(self) -> bool:
        """Whether the limit is kept."""
        return self.limit is None or (self.value >= self.limit if self.at_least else self.value <= self.limit)


def route(router: str, classes: int, credits: int) -> Route:
    """14 slices of equal weight in so many classes."""
    targets = tuple(
        RouteTarget(SliceKey(f"node0/gpu{n // 7}", "1g.5gb", n % 7, 1), f"v{n % classes}", 0, 1 / SLICES, credits)
        for n in range(SLICES)
    )
    return Route("bench", router, "fifo", targets, 100_000, 0)


def ticket(id_: int) -> Ticket:
    """A request that nothing is asked of."""
    return Ticket(id_, "bench", "", "", 1, 64, float(id_), None, 0.0, 0, "", False, False, None)


def decision(_size: Size) -> list[Row]:
    """Every router of the table, with one class and with several."""
    rows = []
    for name in sorted(ROUTERS):
        for classes in (1, 4, 14) if name == "weighted" else (1,):
            arrival_us, done_us = _decide(name, classes)
            what = f"{name}, {classes} classes" if classes > 1 else name
            rows.append(Row("decision", what, arrival_us, "us", 2.5 if name in ("fifo", "weighted") else None))
            rows.append(Row("decision", f"{what}: on_done", done_us, "us"))
    return rows


def _decide(name: str, classes: int) -> tuple[float, float]:
    router = ROUTERS[name].make("bench", FairQueue("bench", partial(QUEUES["fifo"].make, "bench")))
    router.on_table(route(name, classes, 2), 0.0)
    tickets = [ticket(n) for n in range(6_000)]
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        spent_ns = [0, 0]
        for at in range(0, len(tickets), SLICES):
            some = tickets[at : at + SLICES]
            t0 = time.thread_time_ns()
            picks: list[Pick | None] = [router.on_arrival(each, 0.0) for each in some]
            t1 = time.thread_time_ns()
            for each, pick in zip(some, picks, strict=True):
                assert pick is not None, "28 credits hold 14 requests"
                router.on_done(each, pick, DONE, 0.0)
            spent_ns[0] += t1 - t0
            spent_ns[1] += time.thread_time_ns() - t1
        best = [min(b, ns / 1e3 / len(tickets)) for b, ns in zip(best, spent_ns, strict=True)]
    return best[0], best[1]


def engine(_size: Size) -> list[Row]:
    """The request-level engine with every router."""
    rows = []
    for name in sorted(ROUTERS):
        for classes in (1, 2, 4) if name == "weighted" else (1,):
            what = f"{name}, {classes} classes" if classes > 1 else name
            limit = 300_000.0 if name in ("fifo", "weighted") else None
            rows.append(Row("engine", what, _serve(name, classes), "requests/s", limit, at_least=True))
    return rows


def services(table: Route) -> dict[SliceKey, SliceService]:
    """All alike."""
    return {t.slice: SliceService(SERVICE, 0.9, 1.0, t.variant, "bench", GAP_MS) for t in table.targets}


def _serve(name: str, classes: int) -> float:
    table = route(name, classes, 2)
    rate = LOAD * SLICES / SERVICE.mean_ms * 1e3
    source = ArrivalStream(Rate(np.zeros(1), np.full(1, rate)), 1.0, np.random.default_rng(SEED))
    made = RequestEngine({"bench": Flow(source, 50.0)}, np.random.default_rng(SEED))
    made.set_routes(0.0, {"bench": table}, {"bench": services(table)})
    best, until_s = 0.0, 0.0
    for _ in range(ROUNDS):
        until_s += REQUESTS / rate
        started_s = time.thread_time()
        window = made.windows({"bench": source.until(until_s)}, until_s)["bench"]
        best = max(best, window.answered / (time.thread_time() - started_s))
    return best


def shared(_size: Size) -> list[Row]:
    """Two families that share a slice, five sixths of whose requests go to separate slices."""
    found = {"batches of up to 16": 0.0, "no batches": None}
    limits = {"batches of up to 16": 150_000.0, "no batches": None}
    return [Row("shared", f"two families, {what}", _share(delay_s), "requests/s", limits[what], at_least=True)
            for what, delay_s in found.items()]  # fmt: skip


def _share(batch_delay_s: float | None) -> float:
    points = tuple(OperatingPoint(n, 4.0 + 0.5 * n, 0.1, 100.0, 0.6) for n in (1, 2, 4, 8, 16))
    keys = [SliceKey(f"node0/gpu{n}", "7g.40gb", 0, 8) for n in range(3)]
    own = {"a": keys[0], "b": keys[2]}
    routes, found = {}, {}
    for family, mine in own.items():
        targets = tuple(RouteTarget(k, f"{family}-l", 0, w, 48) for k, w in ((mine, 5 / 6), (keys[1], 1 / 6)))
        routes[family] = Route(family, "weighted", "fifo", targets, 100_000, 0)
        one = SliceService(ServiceTime(points[0].mean_ms, 0.1), 0.9, 1.0, f"{family}-l", family, GAP_MS, points)
        found[family] = dict.fromkeys((mine, keys[1]), one)
    rate = 1200.0 if batch_delay_s is not None else 150.0
    sources = {
        f: ArrivalStream(Rate(np.zeros(1), np.full(1, rate)), 1.0, np.random.default_rng(n)) for n, f in enumerate(own)
    }
    flows = {family: Flow(source, 50.0, batch_delay_s=batch_delay_s) for family, source in sources.items()}
    made = RequestEngine(flows, np.random.default_rng(SEED), shares=True, interference=INTERFERENCE)
    made.set_routes(0.0, routes, found)
    best, until_s = 0.0, 0.0
    for _ in range(ROUNDS):
        until_s += REQUESTS / 2 / rate
        started_s = time.thread_time()
        windows = made.windows({family: source.until(until_s) for family, source in sources.items()}, until_s)
        best = max(best, sum(one.answered for one in windows.values()) / (time.thread_time() - started_s))
    return best


def memory(size: Size) -> list[Row]:
    """A process that does nothing else: block by block, as the shell serves."""
    found = _apart("memory", size)
    what = "48 h x 500/s" if size.full else f"48 h x 500/s, the first {DAYS_S / 3600 / PART:.2g} h"
    return [
        Row("memory", what, found["peak_mib"], "MiB", 2048.0),
        Row("memory", "of that, before the first request", found["before_mib"], "MiB"),
        Row("memory", "of that, gained in the second half", found["gained_mib"], "MiB"),
        Row("memory", "requests", found["requests"], "requests"),
        Row("memory", "with arrivals and histograms", found["per_s"], "requests/s"),
    ]


def _memory(size: Size) -> dict[str, float]:
    table = route("weighted", 2, 2)
    rate = Rate(np.zeros(1), np.full(1, RATE_PER_S))
    source: ArrivalSource = ArrivalStream(rate, 1.0, np.random.default_rng(SEED))
    made = RequestEngine({"bench": Flow(source, 100.0)}, np.random.default_rng(SEED), 2.0, 0.0)
    made.set_routes(0.0, {"bench": table}, {"bench": services(table)})
    end_s = DAYS_S if size.full else DAYS_S / PART
    edges = np.append(np.arange(BLOCK_S, end_s, BLOCK_S), end_s).tolist()
    peaks, started_s = [_peak_mib()], time.thread_time()
    whole = made.serve(edges[0])["bench"]
    for until_s in edges[1:]:
        whole.add(made.serve(until_s)["bench"])
        peaks.append(_peak_mib())
    spent_s = time.thread_time() - started_s
    gained_mib = peaks[-1] - peaks[len(peaks) // 2]
    return {
        "peak_mib": peaks[-1],
        "before_mib": peaks[0],
        "gained_mib": gained_mib,
        "requests": float(whole.arrived),
        "per_s": whole.arrived / spent_s,
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def year(size: Size) -> list[Row]:
    """The committed scenario, with the intensities of a real year where there are any."""
    found = _apart("year", size)
    what = "a month of ten GPUs, times twelve" if size.short else "a year of ten GPUs under exact"
    what += ", real carbon" if found["real"] else ", synthetic carbon"
    return [
        Row("year", what, found["spent_s"], "s", 60.0),
        Row("year", "decisions of it", found["decisions"], "decisions"),
        Row("year", "new plans of it", found["replans"], "plans"),
    ]


def _year(size: Size) -> dict[str, float]:
    from trefoil.simulator import Scenario, simulate

    hours = 730.0 if size.short else 8760.0
    started_s = time.process_time()
    trace = DATA / "carbon" / YEAR
    given: dict[str, Any] = {"hours": hours}
    if trace.exists():
        given |= {"carbon.zones.grid.trace": str(trace), "carbon.zones.grid.value_column": YEAR_COLUMN}
    scenario = Scenario.load(ROOT / "benchmarks" / "scenarios" / "year_fluid.toml", given)
    summary = simulate(scenario).summary
    spent_s = (time.process_time() - started_s) * 8760.0 / hours
    decided, plans = float(summary.decisions), float(summary.replans)
    return {"spent_s": spent_s, "decisions": decided, "replans": plans, "real": float(trace.exists())}


def parity(size: Size) -> list[Row]:
    """Simulated over live, less 1; whether plans are the same where they must be."""
    if importlib.util.find_spec("benchmarks.parity") is None:
        return []
    limits = importlib.import_module("benchmarks.parity")
    rows = []
    for one in limits.run(OUT.parent, short=size.short):
        rows.append(
            Row("parity", f"{one.case}: joules per request", abs(one.joules_ratio), "", limits.JOULES_RATIO_MAX)
        )
        rows.append(Row("parity", f"{one.case}: p95", abs(one.p95_ratio), "", limits.P95_RATIO_MAX))
        same = 1.0 if one.must_have_same_plans else None
        rows.append(Row("parity", f"{one.case}: same plans in order", float(one.same_plans), "", same, at_least=True))
    return rows


PARTS: Final[Mapping[str, Callable[[Size], list[Row]]]] = {
    "decision": decision,
    "engine": engine,
    "shared": shared,
    "memory": memory,
    "year": year,
    "parity": parity,
}
APART: Final[Mapping[str, Callable[[Size], dict[str, float]]]] = {"memory": _memory, "year": _year}


def _flags(size: Size) -> list[str]:
    return [f"--{name}" for name, is_set in asdict(size).items() if is_set]


def _apart(name: str, size: Size) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.simulator", "--apart", name, *_flags(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def stamp(size: Size) -> dict[str, Any]:
    """Where the numbers are from."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "command": " ".join(["python -m benchmarks.simulator", *_flags(size)]),
        "commit": commit.stdout.strip() or "unknown",
        "seed": SEED,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "data": "synthetic",
        "basis": "measured (CPU time of this machine)",
    }


def main() -> None:
    """All parts, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all of the 48 hours (five minutes more)")
    parser.add_argument("--short", action="store_true", help="a month for the year, and parity's short case")
    parser.add_argument("--only", choices=sorted(PARTS), help="only this part")
    parser.add_argument("--apart", choices=sorted(APART), help="measure here and print one JSON document")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    size = Size(args.full, args.short)
    if args.apart:
        print(json.dumps(APART[args.apart](size)))
        return
    rows: list[Row] = []
    for name in [args.only] if args.only else PARTS:
        for row in PARTS[name](size):
            rows.append(row)
            bound = "" if row.limit is None else f"{'>=' if row.at_least else '<='} {row.limit:g}"
            verdict = "" if row.limit is None else "ok" if row.kept else "BROKEN"
            print(f"{row.part:<10} {row.what:<44} {row.value:>12,.5g} {row.unit:<11} {bound:<10} {verdict}", flush=True)
    if args.only:  # a part alone does not replace the whole
        args.out = args.out.with_stem(f"{args.out.stem}_{args.only}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    body = {**stamp(size), "rows": [{**asdict(row), "kept": row.kept} for row in rows]}
    args.out.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    print(f"written to {args.out}")
    if not all(row.kept for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
