"""One model for both: the demo's scenario played live and simulated, side by side.

    demo          deploy/config/demo.toml under `exact`, every trigger on: joules per request within 10 %, p95 within
                  20 %
    carbon_only   only the carbon trigger on and the demand pinned, so that the noise of a load decides nothing: the
                  same plan digests in the same order, and the same two limits
    clover        the same system under `clover` for four minutes: two explorations of candidates that are deployed and
                  measured, live on Tritons; the first two limits (which candidates are tried follows what was measured)

Limits hold in both directions: the simulation may be neither more expensive or slower nor cheaper or faster than that.
The simulation is made from the same file (trefoil/simulator/scenario/demo.py). What a machine adds is measured live, by
what the dispatcher and the agent report, and handed to the simulation: transport around a request (`overhead_ms`,
`gap_ms`) and how long a Triton takes to start (`start_s`). They are measured on a separate run, with other arrivals,
and never on one that is judged. Of that run only its beginning is taken: when its first plan was made, and its feed up.

Run: `make bench-simulator`, or alone `python -m benchmarks.parity` (about nine minutes; `--short` about two). Prints a
table, writes out/bench/parity.json, and exits with 1 when a limit is missed.
"""

import argparse
import asyncio
import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from controller.loop.core.decision import CANDIDATE
from controller.loop.decision_records import stored_decisions
from controller.settings import Slo
from tests.support.ports import free_offset
from trefoil.cli.demo.live_view import PlainView
from trefoil.cli.demo.results import DemoSummary, git_commit, machine, write_json
from trefoil.cli.demo.run_policy import DemoContext, run_policy
from trefoil.cli.load.process import read_load_result, result_path
from trefoil.cli.load.result import LoadResult
from trefoil.cli.run.scenario import DemoScenario, load_system
from trefoil.cli.run.state_directory import StatePaths
from trefoil.core.brains import PlanView
from trefoil.core.demand import LoadWindow
from trefoil.core.errors import StateUnavailable
from trefoil.core.fleet import NodeStatus, SliceKey, SliceState
from trefoil.core.plan import DecisionRecord
from trefoil.core.queueing import service_time
from trefoil.installation import CHECKOUT
from trefoil.runtime import codec
from trefoil.runtime.clock import WallClock
from trefoil.runtime.repository import load_catalog
from trefoil.runtime.state import State
from trefoil.simulator.report.result import Result
from trefoil.simulator.scenario.demo import MeasuredDelays, Timeline, demo_scenario, simulate_demo

OUT: Final = CHECKOUT / "out" / "bench"
DEMO: Final = CHECKOUT / "deploy" / "config" / "demo.toml"
JOULES_RATIO_MAX: Final = 0.10
P95_RATIO_MAX: Final = 0.20
WATCH_S: Final = 0.25
PINNED: Final = {"rate_per_s": 40.0, "rate_p90_per_s": 45.0}
SLO: Final = Slo(percentile=95.0, latency_ms=75.0)


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. `settings` change the demo's scenario, `controller` the live controller's defaults."""

    name: str
    same_plans: bool
    policy: str = "exact"
    settings: Mapping[str, Any] = field(default_factory=dict)
    controller: Mapping[str, Any] = field(default_factory=dict)


CARBON_ONLY: Final = Case(
    "carbon_only",
    same_plans=True,
    settings={"objective_type": "lambda", "lambda_weight": 0.3},
    controller={"causes": ["carbon"], "demand_fixed": {"digits": PINNED}},
)
CLOVER: Final = Case(
    "clover",
    same_plans=False,
    policy="clover",
    settings={"carbon.steps": 4, "carbon.step_s": 60.0, "load.peak_per_s": 40.0, "load.base_per_s": 26.0},
)
CASES: Final = (Case("demo", same_plans=False), CARBON_ONLY, CLOVER)
SHORT: Final = {"carbon.steps": 6, "carbon.step_s": 6.0, "warmup_s": 3.0, "load.ramp_s": 3.0}
CALIBRATION: Final = Case("calibration", same_plans=False, settings={**SHORT, "seed": 7})
"""Gives the delays that all others are simulated with; it is compared with nothing."""


@dataclass(frozen=True, slots=True)
class Side:
    """One run, live or simulated. `plans`: digest of each plan decided on in turn, the first one of the run before
    second 0; candidates that are deployed to be measured are none.
    """

    requests: int
    answered: int
    joules_per_request: float
    grams_per_request: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    slo_attainment: float
    accuracy: float
    idle_share: float
    replans: Mapping[str, int]
    plans: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """Both sides of a case, and what was found."""

    case: str
    command: str
    live: Side
    simulated: Side
    delays: MeasuredDelays
    """Those it was simulated with, of the calibration."""
    own_delays: MeasuredDelays
    """Those of the judged run itself, for comparison; nothing is simulated with them."""
    timeline: Timeline
    joules_ratio: float
    """Simulated over live, less 1."""
    p95_ratio: float
    same_plans: bool
    must_have_same_plans: bool

    @property
    def passed(self) -> bool:
        """Every limit is kept."""
        near = abs(self.joules_ratio) <= JOULES_RATIO_MAX and abs(self.p95_ratio) <= P95_RATIO_MAX
        return near and (self.same_plans or not self.must_have_same_plans)


# --- live -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Watched:
    """What the services of a live run said of themselves."""

    windows: dict[str, LoadWindow] = field(default_factory=dict)
    states: dict[tuple[SliceKey, int], dict[SliceState, float]] = field(default_factory=dict)
    """When a creation of a slice entered a state [UTC s]."""
    variants: dict[tuple[SliceKey, int], str] = field(default_factory=dict)

    def look(self, nodes: Iterable[NodeStatus]) -> None:
        """Note when slices entered their states."""
        for slice_ in (s for node in nodes for device in node.devices for s in device.slices):
            if slice_.key is not None and slice_.hosted:
                index = slice_.key, slice_.generation
                self.states.setdefault(index, {}).setdefault(slice_.state, slice_.since_s)
                self.variants.setdefault(index, slice_.hosted[0].variant)


async def watch(folder: Path, watched: Watched) -> None:
    """Read until cancelled; the system may not be there yet, or not any more."""
    clock, state = WallClock(), None
    after: dict[str, str] = {}
    try:
        while True:
            launch = StatePaths(folder.resolve()).read_launch() if state is None else None
            if launch is not None:
                state = State.connect(launch.redis_url, launch.cluster)
            if state is not None:
                with suppress(StateUnavailable):
                    watched.look((await state.scan(state.keys.node_prefix(), NodeStatus)).values())
                    for key in await state.names(state.keys.load_prefix()):
                        for entry_id, window in await state.stream(key, LoadWindow, after.get(key, "0")):
                            after[key] = entry_id
                            watched.windows[f"{key} {entry_id}"] = window
            await clock.sleep(WATCH_S)
    finally:
        if state is not None:
            await state.close()


async def play_live(
    case: Case, demo: DemoScenario, out: Path, console: Console
) -> tuple[Side, MeasuredDelays, Timeline]:
    """One run of the demo on a fresh system."""
    view = PlainView(console, every_s=math.inf)
    out.mkdir(parents=True, exist_ok=True)
    setup = DemoContext(demo, out, view, WallClock(), lambda: False, {"controller": case.controller})
    watched = Watched()
    watching = asyncio.create_task(watch(out / case.policy / "cluster", watched))
    try:
        run = await run_policy(setup, case.policy, SLO, 1)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    found = [record for record, _ in stored_decisions(out / case.policy / "cluster" / "controller" / "decisions")]
    client = read_load_result(result_path(out / case.policy, demo.family.name))
    zero_s = client.started_at_s + demo.warmup_s
    counted = [
        r for r in found if r.at_s < zero_s + demo.duration_s
    ]  # a step that begins with the end is not a part of it
    first = codec.from_json(PlanView, found[0].view_json)
    timeline = Timeline(found[0].at_s - zero_s, first.carbon.starts_at_s - zero_s)
    return _live_side(run.summary, counted), measured_delays(demo, client, watched), timeline


def measured_delays(demo: DemoScenario, client: LoadResult, watched: Watched) -> MeasuredDelays:
    """Transport and starts, as client, dispatcher and agent saw them; what nobody saw keeps its default.

    gap       what a slice was taken for beyond the mean service time of its profile, in windows in which it never had
              two requests: none waited there
    overhead  the client's mean latency beyond the dispatcher's
    start     median time from STARTING to READY, less the load time of the variant that stands in family.toml
    """
    default, catalog = MeasuredDelays(), load_catalog(demo.family.repository)
    rows = {(r.device_type, r.slice_type, r.variant): service_time(r).mean_ms for r in catalog.rows if r.batch == 1}
    beyond_ms = total_ms = 0.0
    alone = answered = 0
    for cell in (cell for window in watched.windows.values() for cell in window.cells):
        key, count = cell.key.slice, cell.service.total
        if key is None or not count:
            continue
        total_ms += cell.latency.sum_ms
        answered += count
        if cell.in_flight_max == 1:
            kind = demo.fleet.devices[int(key.device.rpartition("gpu")[2])]
            beyond_ms += cell.service.sum_ms - count * rows[kind, key.slice_type, cell.key.variant]
            alone += count
    client_ms = [r.latency_ms for r in client.records if r.code == "OK"]
    loads = {v.name: v.load_s for v in catalog.family(demo.family.name).variants}
    starts = [
        states[SliceState.READY] - states[SliceState.STARTING] - loads[watched.variants[index]]
        for index, states in watched.states.items()
        if {SliceState.STARTING, SliceState.READY} <= states.keys()
    ]
    return replace(
        default,
        overhead_ms=max(0.0, fmean(client_ms) - total_ms / answered) if answered else default.overhead_ms,
        gap_ms=max(0.0, beyond_ms / alone) if alone else default.gap_ms,
        start_s=max(0.0, median(starts)) if starts else default.start_s,
    )


def _live_side(summary: DemoSummary, found: Sequence[DecisionRecord]) -> Side:
    assert summary.joules_per_request is not None, "the demo meters"
    assert summary.grams_per_request is not None
    assert summary.idle_share is not None
    return Side(
        requests=summary.requests,
        answered=summary.answered,
        joules_per_request=summary.joules_per_request,
        grams_per_request=summary.grams_per_request,
        p50_ms=summary.latency_ms_p50,
        p95_ms=summary.latency_ms_p95,
        p99_ms=summary.latency_ms_p99,
        slo_attainment=summary.slo_attainment,
        accuracy=summary.accuracy,
        idle_share=summary.idle_share,
        replans={cause: count for cause, count in summary.replans.items() if count},
        plans=in_turn(r.versions["plan"] for r in found if r.versions["outcome"] != CANDIDATE),
    )


# --- simulated --------------------------------------------------------------------------------------------------------


def simulated_side(found: Result) -> Side:
    """The same figures of a simulation."""
    s = found.summary
    return Side(
        requests=s.arrived,
        answered=s.answered,
        joules_per_request=s.joules_per_request,
        grams_per_request=s.grams_per_request,
        p50_ms=s.p50_ms,
        p95_ms=s.p95_ms,
        p99_ms=s.p99_ms,
        slo_attainment=s.slo_attainment,
        accuracy=s.accuracy,
        idle_share=s.idle_share,
        replans=s.causes,
        plans=in_turn(str(decision["plan"]) for decision in found.decisions if decision["at_s"] < s.duration_s),
    )


def in_turn(digests: Iterable[str]) -> tuple[str, ...]:
    """Each plan once, as long as it stayed; decisions without a plan kept the one before."""
    turns: list[str] = []
    for digest in digests:
        if digest and (not turns or turns[-1] != digest):
            turns.append(digest)
    return tuple(turns)


# --- both -------------------------------------------------------------------------------------------------------------


def scenario_of(case: Case, short: bool) -> DemoScenario:
    """Scenario of a case, on free ports."""
    demo = load_system(DEMO, DemoScenario, {**case.settings, **(SHORT if short else {})})
    return demo.model_copy(update={"port_offset": free_offset(len(demo.fleet.devices))})


async def calibrate(out: Path, console: Console) -> MeasuredDelays:
    """Measure what this machine adds, on a live run that is not judged."""
    return (await play_live(CALIBRATION, scenario_of(CALIBRATION, short=True), out / CALIBRATION.name, console))[1]


async def compare(case: Case, delays: MeasuredDelays, out: Path, console: Console, short: bool = False) -> Compared:
    """Play a case live, simulate it with the delays of another run, and hold both side by side."""
    demo = scenario_of(case, short)
    live, measured, timeline = await play_live(case, demo, out / case.name, console)
    scenario, given = demo_scenario(demo, case.policy, SLO, delays, timeline, case.controller)
    simulated = simulated_side(simulate_demo(scenario, given, timeline))
    return Compared(
        case=case.name,
        command=shlex.join(["python", "-m", "benchmarks.parity", *sys.argv[1:]]),
        live=live,
        simulated=simulated,
        delays=delays,
        own_delays=measured,
        timeline=timeline,
        joules_ratio=simulated.joules_per_request / live.joules_per_request - 1,
        p95_ratio=simulated.p95_ms / live.p95_ms - 1,
        same_plans=live.plans == simulated.plans,
        must_have_same_plans=case.same_plans,
    )


def table(found: Sequence[Compared]) -> Table:
    """Both sides of every case, for people."""
    shown = Table(title="live and simulated", title_justify="left")
    for name in (
        "case",
        "side",
        "requests",
        "J/request",
        "mg/request",
        "p50 ms",
        "p95 ms",
        "in SLO",
        "accuracy",
        "plans",
    ):
        shown.add_column(name, justify="left" if name in ("case", "side", "plans") else "right")
    for one in found:
        for name, side in (("live", one.live), ("simulated", one.simulated)):
            shown.add_row(
                one.case, name, f"{side.answered:,}", f"{side.joules_per_request:.3f}",
                f"{1e3 * side.grams_per_request:.4f}", f"{side.p50_ms:.1f}", f"{side.p95_ms:.1f}",
                f"{side.slo_attainment:.1%}", f"{side.accuracy:.4f}", " ".join(p[:4] for p in side.plans),
            )  # fmt: skip
        plans = "same plans" if one.same_plans else "OTHER PLANS"
        shown.add_row(
            "", "difference", "", f"{one.joules_ratio:+.1%}", "", "", f"{one.p95_ratio:+.1%}", "", "",
            f"{plans}; {'passed' if one.passed else 'FAILED'}", end_section=True,
        )  # fmt: skip
    return shown


def run(out: Path = OUT, *, short: bool = False, console: Console | None = None) -> list[Compared]:
    """All cases (in short: the one that compares plans); prints the table and writes parity.json."""
    screen = console or Console()
    cases = (CARBON_ONLY,) if short else CASES
    delays = asyncio.run(calibrate(out / "parity", screen))
    found = [asyncio.run(compare(case, delays, out / "parity", screen, short=short)) for case in cases]
    screen.print(table(found))
    screen.print(f"measured on a run of its own: {delays}", highlight=False)
    for one in found:
        screen.print(f"{one.case}: its own, unused: {one.own_delays}", highlight=False)
    document = {
        "simulated_gpus": True,
        "commit": git_commit(),
        "machine": machine(),
        "limits": {"joules": JOULES_RATIO_MAX, "p95": P95_RATIO_MAX},
        "cases": [{**asdict(one), "passed": one.passed} for one in found],
    }
    write_json(out / "parity.json", document)
    return found


def main() -> int:
    """From the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="one case of 36 seconds, after as long a calibration")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    return 0 if all(one.passed for one in run(arguments.out, short=arguments.short)) else 1


if __name__ == "__main__":
    sys.exit(main())
