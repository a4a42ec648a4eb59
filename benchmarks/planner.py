"""`exact` from 1 to 100,000 GPUs: `make bench-planner` prints a table, writes out/bench/planner.json, and exits 1 where
an aim of `AIMS` or `DRAWN_AIMS` is missed. Seconds are of CPU.

Case A: one device type, one family, 4 clocks, an empty fleet, a floor of accuracy at every instant.
Case B: two device types, four families, 6 clocks, sleep, a price of accuracy and a floor; the fleet runs the plan of
three quarters of the load, so that every move has its price.
Demand is 0.6 of BASE's capacity on the same fleet, half of the GPUs of each type in B, shared by its families.
Drawn cases (`--drawn N`): 1 to 16 GPUs of one or two types, 1 to 8 families, SLOs of 1.2 to 10 service times, 1 to 6
clocks, with and without moves and a cap of watts, of which the distribution is printed.
Families and profiles are made up (`profile`), with A100 and H100 slices: service grows with work over SMs and clock,
energy follows `trefoil.core.power`.

points_s      operating points, cold: profile, SLO and pools to columns (remembered until one of them changes)
time_s        from the columns to counts: pruning, building, relaxing, solving
gap           (objective - proven bound) / objective of the whole model; sleep power, a constant, is in neither
objective_w   per GPU: baseline above sleep, active, price of accuracy and of moves over the horizon
mapping_s     counts to devices and the moves that this takes
assemble_s    the plan from that; check_s: `plan_check`; read_s: the view
blocked_ms    longest that a live controller's loop stands still in a decision: CPU of one turn of the loop from the
              planner's answer to the plan that is recorded, kept on disk and in force, or of one garbage collection;
              Redis takes what is encoded for it and answers at once
next_s        a decision: all but the operating points; first_s: with them
Every size runs in a separate process, so that peak_memory_mib is its own.
"""

import argparse
import asyncio
import gc
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import numpy as np
from numpy.random import default_rng

from controller.explore.core.exploration_state import ExplorationTotals
from controller.loop.core.control import ControlCore
from controller.loop.core.decision import ControlState
from controller.loop.core.saved_state import SavedState
from controller.loop.core_ports import Signals
from controller.loop.decision_records import DecisionRecords
from controller.loop.garbage import put_off_full_collections
from controller.loop.live_ports import LiveControlPorts
from controller.loop.planner_runner import PlannerRunner
from controller.observe.core.triggers import Trigger
from controller.planners.columns import class_column, columns
from controller.planners.exact.aim import nearly_free
from controller.planners.exact.milp import CpuLimitHit, Limits
from controller.planners.exact.model import Aim, Problem, capped_w, groups_of
from controller.planners.exact.placement import moves, place_clocked
from controller.planners.exact.search import solve
from controller.planners.plan_assembly import plan_of
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import PlanningInput, read_view
from controller.role.disk_store import DiskStore
from controller.settings import ControllerSettings
from trefoil.core.brains import Decision, PlanView
from trefoil.core.carbon import CarbonReading, Factors, Method, Series
from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.common import ProfileRow
from trefoil.core.demand import Demand
from trefoil.core.device_types import A100_40GB, H100_80GB
from trefoil.core.fleet import DeviceState, DeviceStatus, DeviceType, FleetState, NodeStatus, SliceState, SliceStatus
from trefoil.core.objective import Objective, ObjectiveMode
from trefoil.core.plan import InputStamp, Plan, RolloutState
from trefoil.core.plan_check import check
from trefoil.core.policies import POLICIES
from trefoil.core.power import active_w
from trefoil.runtime.clock import WallClock
from trefoil.runtime.fenced import Write, arguments
from trefoil.runtime.keys import Keys
from trefoil.runtime.telemetry import Metrics

SIZES: Final = (1, 2, 3, 4, 10, 16, 30, 100, 1_000, 10_000, 100_000)
GAP_MAX: Final = 0.01  # of any plan of up to so many GPUs:
PROVEN_GPUS: Final = 30
BLOCKED_MS_MAX: Final = 20.0
AIMS: Final = {("B", 16): {"next_s": 1.5}, ("B", 100_000): {"next_s": 6.0, "first_s": 12.0}}
DRAWN: Final = 200
DRAWN_AIMS: Final = {"median_s": 1.0, "worst_s": 2.5, "worst_gap": GAP_MAX}
PER_NODE: Final = 8
LOAD: Final = 0.6  # of BASE's capacity
HORIZON_S: Final = 3600.0
SETTINGS: Final = ExactSettings(clocks="planned")
REFERENCE_SMS: Final = 98
SCALING: Final = 0.8  # of a model's speed with SMs: doubling them is not twice as fast
MEMORY_BOUND: Final = 0.35  # share of a batch's time that no clock changes
FAMILIES: Final = {  # variant -> (ms of one request on all SMs of an A100, accuracy); made up
    "vision": {"s": (9.0, 0.778), "m": (13.0, 0.816), "l": (24.0, 0.834), "xl": (42.0, 0.844)},
    "text": {"s": (5.0, 0.80), "m": (8.0, 0.83), "l": (21.0, 0.86), "xl": (60.0, 0.88)},
    "detect": {"s": (7.0, 0.45), "m": (11.0, 0.49), "l": (16.0, 0.505), "xl": (28.0, 0.52)},
    "speech": {"s": (12.0, 0.90), "m": (18.0, 0.925), "l": (30.0, 0.94), "xl": (50.0, 0.955)},
}
SPEED: Final = {A100_40GB.name: 1.0, H100_80GB.name: 1.25}  # of one SM
CLOCKS: Final = {
    A100_40GB.name: (1410, 1305, 1200, 1095, 990, 780),
    H100_80GB.name: (1980, 1830, 1680, 1530, 1380, 1095),
}


Variants = Mapping[str, tuple[float, float]]  # name -> (ms of one request on all SMs of an A100, accuracy)


@dataclass(frozen=True, slots=True)
class Case:
    """What is planned: families, device types, clocks, and whether a plan is in force.

    `slo_times`: the latency objective over the service time of a family's largest variant on a whole A100. `cap_part`:
    a cap of the fleet's watts over what the plan without one takes; 0: none.
    """

    families: Mapping[str, Variants]
    types: tuple[DeviceType, ...]
    clocks: int
    moving: bool
    value_j: float
    slo_times: float = 3.0
    load: float = LOAD
    floor_part: float = 0.65  # from the least accurate variant to the most accurate one
    cap_part: float = 0.0


CASES: Final = {
    "A": Case({"vision": FAMILIES["vision"]}, (A100_40GB,), 4, False, 0.0),
    "B": Case(FAMILIES, (A100_40GB, H100_80GB), 6, True, 40.0),
}


def drawn_case(seed: int) -> tuple[Case, int]:
    """A case of a small fleet, drawn, and its number of GPUs."""
    rng = default_rng(seed)
    families = {}
    for number in range(int(rng.integers(1, 9))):
        variants, ms, lack = {}, float(rng.uniform(4.0, 15.0)), float(rng.uniform(0.1, 0.4))
        for size in ("s", "m", "l", "xl")[: int(rng.integers(2, 5))]:
            variants[size] = ms, 1.0 - lack
            ms, lack = ms * float(rng.uniform(1.3, 3.0)), lack * float(rng.uniform(0.6, 0.95))
        families[f"family{number}"] = variants
    types = ((A100_40GB,), (H100_80GB,), (A100_40GB, H100_80GB))[int(rng.integers(0, 3))]
    case = Case(
        families,
        types,
        int(rng.choice((1, 1, 3, 6))),
        bool(rng.integers(0, 2)),
        float(rng.choice((0.0, 10.0, 40.0, 200.0))),
        float(np.exp(rng.uniform(np.log(1.2), np.log(10.0)))),
        float(rng.uniform(0.2, 0.8)),
        float(rng.uniform(0.0, 0.95)),
        float(rng.choice((0.0, 0.0, 0.0, 1.02, 1.2))),
    )
    return case, int(rng.integers(len(types), 17))


def profile(kind: DeviceType, family: str, variants: Variants, clocks: int) -> list[ProfileRow]:
    """Made-up rows of one family on every slice type of a device type, at its highest clocks."""
    rows = []
    for variant, (whole_ms, _) in variants.items():
        for shape in kind.slice_types:
            for clock in CLOCKS[kind.name][:clocks]:
                width = (shape.sm_count / REFERENCE_SMS) ** SCALING * SPEED[kind.name]
                slowed = MEMORY_BOUND + (1 - MEMORY_BOUND) * max(CLOCKS[kind.name]) / clock
                mean_ms = 1.0 + whole_ms / width * slowed
                watts = active_w(kind, shape.name, clock)
                quantiles = (mean_ms * 0.9992, mean_ms * 1.0836, mean_ms * 1.12)
                rows.append(
                    ProfileRow(
                        kind.name, shape.name, family, variant, 0, 1, clock, (), *quantiles,
                        1000.0 / mean_ms, mean_ms / 1000.0 * watts, watts, 900,
                    )
                )  # fmt: skip
    return rows


def catalog_of(case: Case) -> Catalog:
    """Families and rows of a case."""
    families = tuple(
        Family(
            name,
            "top1",
            tuple(
                Variant(v, i, accuracy, "made up", 600 + 400 * i, 3.0, 10**9, "CC0-1.0")
                for i, (v, (_, accuracy)) in enumerate(variants.items(), 1)
            ),
            {"": (case.slo_times * max(ms for ms, _ in variants.values()), 0.95)},
        )
        for name, variants in case.families.items()
    )
    rows = (profile(k, name, variants, case.clocks) for k in case.types for name, variants in case.families.items())
    return Catalog(families, tuple(row for some in rows for row in some))


def _between(low: float, high: float, part: float) -> float:
    return low + part * (high - low)


def view_of(case: Case, gpus: int, load: float) -> PlanView:
    """An empty fleet under a share of BASE's capacity."""
    nodes = []
    for first in range(0, gpus, PER_NODE):
        name = f"node{first // PER_NODE}"
        kinds = [case.types[i % len(case.types)] for i in range(first, min(gpus, first + PER_NODE))]
        devices = (DeviceStatus(f"{name}/gpu{i}", k, DeviceState.AWAKE, mig_current=True) for i, k in enumerate(kinds))
        nodes.append(NodeStatus(node=name, devices=tuple(devices)))
    catalog = catalog_of(case)
    wanted = tuple(
        Objective(
            family=f.name,
            mode=ObjectiveMode.INSTANT,
            min_accuracy=(1 - case.floor_part) * min(v.accuracy for v in f.variants)
            + case.floor_part * f.best.accuracy,
            replicas_min=1,
            spread_min=1,
            pue=1.0,
        )
        for f in catalog.families
    )
    reading = CarbonReading(Series("made-up", Method.AVERAGE, Factors.DIRECT), 0.0, 3600.0, 250.0)
    bare = PlanView(
        0.0, FleetState(tuple(nodes)), catalog, wanted, (), reading, None, (), None, "bench", HORIZON_S, 1.0
    )
    world = read_view(bare, 1.0, clocks=True)
    demand = []
    for task in world.tasks:
        rate = 0.0
        for kind in case.types:
            column = class_column(
                catalog, task, kind, kind.slice_types[-1].name, catalog.family(task.family).best.name, 1, SETTINGS
            )
            if column is None:
                continue
            number = sum(1 for d in world.devices if d.type is kind)
            rate += number * column.capacity_per_s(1) / len(case.families)
        demand.append(Demand(task.family, "", load * rate, 1.1 * load * rate))
    return replace(bare, demand=tuple(demand))


def problem_of(case: Case, world: PlanningInput) -> tuple[Problem, Aim]:
    """The program of a view, with the price of accuracy, at least that of `nearly_free`, and the floors of its case."""
    found = tuple(c for t in world.tasks for c in columns(world.view.catalog, t, world.devices, SETTINGS))
    problem = Problem(groups_of(world.devices, found), found, world.tasks, HORIZON_S if case.moving else 0.0)
    floors = {t.family: t.objective.min_accuracy for t in world.tasks}
    prices = nearly_free(problem, floors, SETTINGS)
    return problem, Aim({family: max(case.value_j, price_j) for family, price_j in prices.items()}, floors)


def posed(case: Case, gpus: int) -> tuple[Problem, Aim]:
    """The program of a case in its state: what runs, and its cap of watts."""
    view = view_of(case, gpus, case.load)
    if case.moving:
        before = read_view(view_of(case, gpus, 0.75 * case.load), 1.0, clocks=True)
        plan = assembled(before, *problem_of(case, before))
        view = view if plan is None else in_force(view, plan)
    problem, aim = problem_of(case, read_view(view, 1.0, clocks=True))
    free = solve(problem, aim, Limits(SETTINGS.solver_nodes, SETTINGS.solver_gap)) if case.cap_part else None
    return (problem if free is None else replace(problem, max_watts=case.cap_part * capped_w(problem, free))), aim


def assembled(world: PlanningInput, problem: Problem, aim: Aim) -> Plan | None:
    """A whole plan, for the next view to start from; None: there is none."""
    solution = solve(problem, aim, Limits(SETTINGS.solver_nodes, SETTINGS.solver_gap))
    if solution is None:
        return None
    hosted, clocks = place_clocked(problem, solution)
    return plan_of(
        world, "exact", hosted, solution.traffic, problem.columns, SETTINGS, {}, "bench", solution.gap, clocks=clocks
    )


def in_force(view: PlanView, plan: Plan) -> PlanView:
    """The view after a plan was rolled out."""
    planned = {d.device: d for n in plan.nodes for d in n.devices}
    nodes = tuple(
        replace(
            node,
            devices=tuple(
                replace(
                    d,
                    state=planned[d.device].target,
                    slices=tuple(
                        SliceStatus(key=s.key, state=SliceState.READY, hosted=s.hosted)
                        for s in planned[d.device].slices
                    ),
                )
                for d in node.devices
            ),
        )
        for node in view.fleet.nodes
    )
    return replace(view, fleet=FleetState(nodes), current=plan)


def measure(name: str, gpus: int) -> dict[str, Any]:
    """One row of the table."""
    case, took = CASES[name], {}
    view = view_of(case, gpus, LOAD)
    pauses = collection_times()
    clock = time.process_time()

    def lap(what: str) -> None:
        nonlocal clock
        took[what] = time.process_time() - clock
        clock = time.process_time()

    world = read_view(view, 1.0, clocks=True)
    clock = time.process_time()
    problem, aim = problem_of(case, world)
    lap("points_s")
    if case.moving:
        before = read_view(view_of(case, gpus, 0.75 * LOAD), 1.0, clocks=True)
        plan = assembled(before, *problem_of(case, before))
        view = view if plan is None else in_force(view, plan)
    clock = time.process_time()
    world = read_view(view, 1.0, clocks=True)
    lap("read_s")
    problem, aim = problem_of(case, world)
    solution = solve(problem, aim, Limits(SETTINGS.solver_nodes, SETTINGS.solver_gap))
    lap("time_s")
    if solution is None:
        return {"case": name, "gpus": gpus, **took, "objective_w": None}
    hosted, clocks = place_clocked(problem, solution)
    needed = moves(problem, hosted)
    lap("mapping_s")
    plan = plan_of(world, "exact", hosted, solution.traffic, problem.columns, SETTINGS, {}, "", clocks=clocks)
    lap("assemble_s")
    check(plan, view.fleet, view.catalog)
    lap("check_s")
    took["next_s"] = sum(took.values()) - took["points_s"]
    took["first_s"] = took["next_s"] + took["points_s"]
    blocked_s = max(longest_turn_s(view, plan), *pauses, 0.0)
    return {
        "case": name,
        "gpus": gpus,
        **took,
        "gap": solution.gap,
        "blocked_ms": 1e3 * blocked_s,
        "objective_w": solution.objective / gpus,
        "awake": sum(n for _, _, n in solution.layouts),
        "classes": len(solution.slices),
        "moves": needed.loads + needed.wakes,
        "columns": len(problem.columns),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


class _Around:
    """What a decision reads and asks for beyond its view, planner, disk and records."""

    inputs = SimpleNamespace(scale_signals=())
    windows, rolling, outcome, retry_at_s = None, False, (RolloutState.DONE, ""), None

    def __init__(self, view: PlanView, answer: Decision) -> None:
        self._view, self._answer = view, answer

    def view(self, *_: object) -> PlanView:
        return self._view

    def plan(self, _view: PlanView, _rng: np.random.Generator) -> Decision:
        return self._answer

    def grams_per_request(self, *_: object) -> dict[str, float]:
        return {}

    def input_stamps(self, now_s: float) -> tuple[InputStamp, ...]:
        return tuple(InputStamp(node.node, now_s) for node in self._view.fleet.nodes)

    async def write(self, writes: Sequence[Write]) -> None:
        for one in writes:
            arguments(one)

    async def begin(self, *_: object) -> None: ...


def longest_turn_s(view: PlanView, plan: Plan) -> float:
    """Longest turn of the loop of a controller, CPU of its thread, while it decides on a view and the planner answers
    `plan`."""
    around: Any = _Around(view, Decision(plan, "bench", HORIZON_S))
    longest_s, run = 0.0, asyncio.Handle._run

    def timed(turn: asyncio.Handle) -> None:
        nonlocal longest_s
        began_s = time.thread_time()
        run(turn)
        longest_s = max(longest_s, time.thread_time() - began_s)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(asyncio.Handle, "_run", timed):
        settings, row = ControllerSettings(), POLICIES["exact"]
        clock, keys, metrics, disk = WallClock(), Keys("bench"), Metrics("controller"), DiskStore(Path(folder), 10)
        runner = PlannerRunner(around, row.planner, disk, clock, HORIZON_S)
        records = DecisionRecords(settings, row, keys, around, disk, metrics, dict)
        ports = LiveControlPorts(disk, metrics, Signals(), keys, around, around, runner, records, around)
        wanted = {objective.family: objective for objective in view.objectives}
        kept = SavedState(wanted, [view.current] if view.current else [], ControlState(), ExplorationTotals())
        core = ControlCore(settings, row, 0.0, None, around, around, around, clock, kept, ports)
        asyncio.run(core.replan(Trigger("tick", "bench")))
        assert core.plans[-1].nodes == plan.nodes, core.last_verdict
    return longest_s


def collection_times() -> list[float]:
    """Seconds of CPU of each garbage collection from now on; what is there already is never looked through again, and
    full collections are put off, as in a controller."""
    gc.collect()
    gc.freeze()
    put_off_full_collections()
    found, began_s = [], 0.0

    def seen(phase: str, _info: Mapping[str, int]) -> None:
        nonlocal began_s
        if phase == "start":
            began_s = time.thread_time()
        else:
            found.append(time.thread_time() - began_s)

    gc.callbacks.append(seen)
    return found


COLUMNS: Final = (
    *("case", "gpus", "points_s", "time_s", "gap", "objective_w", "awake", "classes", "columns", "moves"),
    *("mapping_s", "assemble_s", "check_s", "blocked_ms", "read_s", "next_s", "first_s", "peak_memory_mib"),
)


def missed(rows: Sequence[Mapping[str, Any]], drawn: Mapping[str, Any] | None) -> list[str]:
    """Aims that are missed, in words."""
    found = []
    for row in rows:
        name = f"{row['case']} on {row['gpus']} GPUs"
        if row["objective_w"] is None:
            found.append(f"{name}: no plan")
            continue
        if row["gpus"] <= PROVEN_GPUS and row["gap"] > GAP_MAX:
            found.append(f"{name}: gap {row['gap']:.2%} for {GAP_MAX:.0%}")
        if row.get("blocked_ms", 0.0) > BLOCKED_MS_MAX:  # rows that were kept before it was measured have none
            found.append(f"{name}: the loop stands still for {row['blocked_ms']:.0f} ms for {BLOCKED_MS_MAX:g}")
        for what, most in AIMS.get((row["case"], row["gpus"]), {}).items():
            if row[what] > most:
                found.append(f"{name}: {what} {row[what]:.1f} for {most:g}")
    for what, most in DRAWN_AIMS.items() if drawn else ():
        if drawn and drawn[what] > most:
            found.append(f"drawn cases: {what} {drawn[what]:.3g} for {most:g}")
    return found


def play_drawn(number: int) -> dict[str, Any]:
    """Distribution of the first so many drawn cases."""
    rows: list[dict[str, Any]] = []
    times: list[float] = []
    gaps: list[float] = []
    for seed in range(number):
        case, gpus = drawn_case(seed)
        problem, aim = posed(case, gpus)
        began_s = time.process_time()
        found = solve(problem, aim, Limits(SETTINGS.solver_nodes, SETTINGS.solver_gap))
        took_s = time.process_time() - began_s
        times.append(took_s)
        gaps.append(found.gap if found else 0.0)
        objective_w = found.objective if found else None
        rows.append({"seed": seed, "gpus": gpus, "time_s": took_s, "gap": gaps[-1], "objective_w": objective_w})
    times.sort()
    gaps.sort()
    return {
        "cases": number,
        "without_plan": sum(row["objective_w"] is None for row in rows),
        "median_s": times[number // 2],
        "p95_s": times[int(0.95 * number)],
        "worst_s": times[-1],
        "slower_than_aim": sum(t > DRAWN_AIMS["worst_s"] for t in times),
        "worst_gap": gaps[-1],
        "wider_than_aim": sum(gap > GAP_MAX for gap in gaps),
        "rows": rows,
    }


def commit() -> str:
    """The commit that is measured."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    """All rows, each in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), help="only this case")
    parser.add_argument("--gpus", type=int, help="only this size")
    parser.add_argument("--drawn", type=int, default=DRAWN, help="so many drawn cases; 0: none")
    parser.add_argument("--one", action="store_true", help="measure here and print one JSON row")
    parser.add_argument("--out", type=Path, default=Path("out/bench/planner.json"))
    args = parser.parse_args()
    if args.one:
        try:
            row = measure(args.case, args.gpus)
        except CpuLimitHit as hit:
            row = {"case": args.case, "gpus": args.gpus, "objective_w": None, "stopped": str(hit)}
        print(json.dumps(row))
        return
    rows, began_s = [], WallClock().monotonic_s()
    print(" ".join(f"{c:>11}" for c in COLUMNS))
    for name in [args.case] if args.case else sorted(CASES):
        for gpus in [args.gpus] if args.gpus else SIZES:
            command = [sys.executable, "-m", "benchmarks.planner", "--one", "--case", name, "--gpus", str(gpus)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            rows.append(json.loads(done.stdout.splitlines()[-1]))  # logs come before it
            print(" ".join(f"{_cell(rows[-1].get(c))}" for c in COLUMNS), rows[-1].get("stopped", ""), flush=True)
    drawn = play_drawn(args.drawn) if args.drawn else None
    if drawn is not None:
        print("drawn cases: " + ", ".join(f"{k} {_cell(v).strip()}" for k, v in drawn.items() if k != "rows"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    machine = f"{platform.machine()}, {platform.python_version()}"
    stamp = {"command": "make bench-planner", "commit": commit(), "machine": machine, "data": "made-up profiles"}
    took = {"took_s": round(WallClock().monotonic_s() - began_s)}
    args.out.write_text(json.dumps({**stamp, **took, "load": LOAD, "rows": rows, "drawn": drawn}, indent=2) + "\n")
    print(f"written to {args.out}")
    if found := missed(rows, drawn):
        raise SystemExit("missed: " + "; ".join(found))


def _cell(value: object) -> str:
    return f"{value:11.4g}" if isinstance(value, float) else f"{value!s:>11}"


if __name__ == "__main__":
    main()
