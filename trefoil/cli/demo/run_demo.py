"""`trefoil demo`: the same arrivals and carbon against each policy in turn, on fresh clusters, and what was saved.

The SLO is measured first: `slo_rule.factor` times the p95 of BASE under the demo's own load profile. The profile is
compressed into `measure_s`: mean and peak both occur, in the same proportion. The median of `rounds` measurements
counts. The SLO is printed and then fixed for every run. After the runs the same scenario is simulated under several
seeds (spread.py): one run is one draw. On this machine's CPUs nothing is simulated: without a meter there are no grams
whose spread could be shown.
"""

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from trefoil.cli.demo import report
from trefoil.cli.demo.live_view import PlainView, view_for
from trefoil.cli.demo.own_repository import with_own_repository
from trefoil.cli.demo.report import spread_lines
from trefoil.cli.demo.results import Report, made_by, spread_json, write_json
from trefoil.cli.demo.run_policy import DemoContext, PolicyRun, measure_p95_ms, run_policy
from trefoil.cli.demo.schedule import total_s
from trefoil.cli.demo.spread import judged_by_simulation, simulate_spread
from trefoil.cli.output import console, count_equal, respond, ticking
from trefoil.cli.run import services
from trefoil.cli.run.scenario import DemoScenario
from trefoil.cli.run.shutdown import EXIT_INTERRUPTED, ShutdownSignals, run_until_signal
from trefoil.comparison.comparison import Comparison, subject_of
from trefoil.comparison.report import comparison_tables
from trefoil.core.units import format_duration
from trefoil.runtime.clock import Clock, WallClock
from trefoil.simulator.report.result import json_safe

MODELS: Final = "models"  # folder of a separate repository


def run_demo(scenario: DemoScenario, out: Path, *, as_json: bool) -> int:
    """Run every policy and write the report; returns the exit code, 1 when the run it is about missed SLO or floor.

    On every way out nothing is left running.
    """
    clock = WallClock()
    started_at_s = clock.now_s()
    screen = console()
    outcomes: list[tuple[Report, Mapping[str, PolicyRun]]] = []
    if as_json:
        screen.quiet = True
    try:
        with view_for(screen) as view:
            code = run_until_signal(lambda signals: _run_policies(scenario, out, view, signals, clock, outcomes))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code or not outcomes:
        screen.print("interrupted; everything that was started has been stopped", highlight=False)
        return code
    found, runs = outcomes[0]
    report.write_report(out, found, {name: one.series for name, one in runs.items()})
    shown = [report.report_table(found)] if screen.is_terminal else report.report_lines(found)
    took_s = clock.now_s() - started_at_s
    written = f"report: {out / 'report.html'} and {out / 'report.json'} ({took_s:.0f} s)"
    respond(as_json, found.to_json(), *shown, written)
    return exit_code(found)


def simulate_only(scenario: DemoScenario, *, as_json: bool) -> None:
    """Simulate the demo under its seeds, by an SLO of the simulated policy that the rule names; nothing is started."""
    clock = WallClock()
    started_at_s = clock.monotonic_s()
    with ticking(quiet=as_json) as say, TemporaryDirectory() as folder:
        scenario = judged_by_simulation(with_own_repository(scenario, Path(folder) / MODELS))
        found = simulate_spread(scenario, scenario.slo, scenario.policies, 0, say)
    about = subject_of(scenario.policies)
    took_s = round(clock.monotonic_s() - started_at_s)
    document = {**made_by(), "took_s": took_s, **json_safe(spread_json(found, about))}
    respond(as_json, document, *comparison_tables(found), *spread_lines(found, about))


def exit_code(found: Report) -> int:
    """Exit code of a demo: 1 when the run that it is about missed its SLO or its floor."""
    return int(bool(found.missed))


async def _run_policies(
    scenario: DemoScenario, out: Path, view: PlainView, signals: ShutdownSignals, clock: Clock,
    outcomes: list[tuple[Report, Mapping[str, PolicyRun]]],
) -> int:  # fmt: skip
    """Run every policy, and add the report and the runs to `outcomes`."""
    started = datetime.fromtimestamp(clock.now_s(), UTC).isoformat(timespec="seconds")
    out.mkdir(parents=True, exist_ok=True)
    for stale in ("report.json", "report.html"):  # an interrupted demo must not leave an older one's result
        (out / stale).unlink(missing_ok=True)
    scenario = with_own_repository(scenario, out / MODELS)
    planned = f"{len(scenario.policies)} runs of {scenario.duration_s:.0f} s, {', '.join(scenario.policies)}"
    view.say(f"{planned}: about {format_duration(total_s(scenario))} in all; the report will be {out / 'report.html'}")
    view.say(_announcement(scenario))
    context = DemoContext(scenario, out, view, clock, lambda: signals.kill_now)
    scenario = await _judged(context)
    context = replace(context, scenario=scenario)
    runs: dict[str, PolicyRun] = {}
    for number, policy in enumerate(scenario.policies, 1):
        runs[policy] = await run_policy(context, policy, scenario.slo, number)
        write_json(out / policy / "series.json", asdict(runs[policy].series))
    spread = None if scenario.fleet.real else await _simulate(context)
    outcomes.append((_report(scenario, runs, started, spread), runs))
    return 0


async def _simulate(context: DemoContext) -> Comparison:
    """The same scenario under other seeds, in a thread: an interrupt ends it after the simulation that it is in."""
    scenario = context.scenario
    context.view.say(f"simulating the same scenario under {scenario.simulated_seeds} seeds, this one first")
    unwanted = threading.Event()

    def go_on(_text: str) -> None:
        if unwanted.is_set():
            raise InterruptedError("the demo was interrupted")

    try:
        return await asyncio.to_thread(simulate_spread, scenario, scenario.slo, scenario.policies, 1, go_on)
    finally:
        unwanted.set()


async def _judged(context: DemoContext) -> DemoScenario:
    rule = context.scenario.slo_rule
    if not rule.factor:
        return context.scenario
    found = await measure_p95_ms(context)
    judged = context.scenario.judged(found)
    for name, p95_ms in found.items():
        context.view.say(
            f"SLO: {rule.factor:g} x {p95_ms:.1f} ms (p{rule.percentile:g} of {name} with {rule.policy} under the "
            f"demo's load profile, in {rule.measure_s:.0f} s, median of {rule.rounds}) = "
            f"{judged.slo_of(name).latency_ms:.0f} ms, fixed for all runs"
        )
    return judged


def _announcement(scenario: DemoScenario) -> str:
    carbon, kept = scenario.carbon, scenario.availability
    loads = "; ".join(
        f"{each.base_per_s:g} -> {each.peak_per_s:g} -> {each.base_per_s:g}" for each in scenario.loads.values()
    )
    best = services.served_family(scenario).best
    floor = scenario.accuracy.floors(best.accuracy)[0]
    devices = "this machine's CPUs" if scenario.fleet.real else f"SIMULATED {count_equal(scenario.fleet.devices)}"
    return (
        f"{devices}; real Triton and models; "
        f"{carbon.steps * carbon.step_h:.0f} h of carbon in {carbon.duration_s:.0f} s a run ({carbon.speedup:.0f} x); "
        f"load {loads} requests/s; "
        f"accuracy floor {floor:.4f} (best {best.accuracy:.4f}); "
        f"replicas {kept.replicas_min}, spread {kept.spread_min}"
        f"{'' if scenario.fleet.real else ', so that a GPU may sleep'}"
    )


def _report(scenario: DemoScenario, runs: Mapping[str, PolicyRun], started: str, spread: Comparison | None) -> Report:
    batches = sum(run.batches for run in runs.values())
    best = services.served_family(scenario).best.accuracy
    return Report(
        simulated=all(run.simulated for run in runs.values()),
        triton_version=next(iter(runs.values())).triton_version,
        gpus=scenario.fleet.devices,
        duration_s=scenario.duration_s,
        carbon_speedup=scenario.carbon.speedup,
        seed=scenario.seed,
        pad_overrun_ratio=sum(run.overruns for run in runs.values()) / batches if batches else None,
        accuracy_floor=scenario.accuracy.floors(best)[0],
        **made_by(),
        started_at=started,
        runs={name: run.summary for name, run in runs.items()},
        spread=spread,
    )
