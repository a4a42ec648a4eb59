"""One run of the demo: a fresh cluster, a load, a monitor, and the resulting numbers."""

import asyncio
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from controller.planners.policy_parts import presets_of
from controller.settings import Slo
from power_agent.triton.client import TritonClient, TritonUnready
from trefoil.cli.demo.live_view import NO_PROGRESS, PlainView, RunStatus
from trefoil.cli.demo.results import CAUSES, DemoFamilySummary, DemoSeries, DemoSummary, Exploration, PlanEvent
from trefoil.cli.demo.run_monitor import (
    PlanChange,
    RunMonitor,
    Snapshot,
    cancel_and_wait,
    grams_by_second,
    power_by_second,
)
from trefoil.cli.load.generator import LEAD_S
from trefoil.cli.load.process import LoadPlan, LoadProcess, last_answer_at_s, merged
from trefoil.cli.load.result import OK, LoadResult
from trefoil.cli.output import slices_text
from trefoil.cli.run import services
from trefoil.cli.run.launcher import Launcher, first_answer
from trefoil.cli.run.scenario import PROVISIONAL_MS, DemoScenario, OfferedLoad
from trefoil.cli.run.state_directory import Launch
from trefoil.cli.system_client import SystemClient
from trefoil.core.accounting import account, per_request
from trefoil.core.carbon import CarbonReading
from trefoil.core.device_types import slice_cores
from trefoil.core.energy import EnergySample
from trefoil.core.errors import StartError
from trefoil.core.fleet import NodeStatus, SliceState
from trefoil.core.plan import RolloutState
from trefoil.runtime.clock import Clock
from trefoil.runtime.repository import family_folder

METER_DEADLINE_S: Final = 4.0
SETTLE_DEADLINE_S: Final = 30.0
POLL_S: Final = 0.1
LEAD_S_MAX: Final = 240.0
OBJECTIVE_LEAD_S: Final = 1.0  # the objective is set again just before second 0: its accuracy window is the run


@dataclass(frozen=True, slots=True)
class DemoContext:
    """Context that all runs of a demo share."""

    scenario: DemoScenario
    out: Path
    view: PlainView
    clock: Clock
    kill_now: Callable[[], bool]
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of services beside those that the scenario gives, by service."""


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """Result of one run."""

    summary: DemoSummary
    series: DemoSeries
    batches: int
    overruns: int
    simulated: bool
    triton_version: str


async def measure_p95_ms(context: DemoContext) -> dict[str, float]:
    """Measure each family's p95 [ms] under the SLO rule's policy and the demo's load profile, compressed, repeated.

    The median of the rounds: what disturbs this machine for a second is in one of them.

    Raises:
        StartError: requests failed.
    """
    scenario, rule = context.scenario, context.scenario.slo_rule
    provisional = Slo(percentile=rule.percentile, latency_ms=PROVISIONAL_MS)
    folder = context.out / "slo"
    async with _launcher_for(context, rule.policy, provisional, folder) as launcher:
        launch = await _wait_settled(context, launcher, f"measuring the SLO with {rule.policy}")
        plans = _load_plans(scenario, lambda load: repeated(load.points(rule.measure_s), rule.rounds))
        load_process = LoadProcess(plans, launch.addresses["inference"], folder, launch.launch_id, context.clock)
        try:
            results = await load_process.results()
        finally:
            await load_process.stop()
    summary = merged(results).summary(provisional.latency_ms, rule.percentile / 100)
    if summary.latency_ms_p95 is None or summary.failed:
        raise StartError(
            f"{summary.failed} of {summary.requests} requests failed ({dict(summary.failed_by_code)})",
            field="slo_rule",
            remedy=f"read the logs in {folder}/cluster/logs",
        )
    return {name: median_of_rounds(one, rule.measure_s, rule.percentile) for name, one in results.items()}


def repeated(points: tuple[tuple[float, float], ...], rounds: int) -> tuple[tuple[float, float], ...]:
    """The same load profile several times in turn; it ends at the rate that it begins with."""
    length_s = points[-1][0]
    later = ((at_s + n * length_s, rate) for n in range(1, rounds) for at_s, rate in points[1:])
    return (*points, *later)


def median_of_rounds(result: LoadResult, round_s: float, percentile: float) -> float:
    """Median of the rounds' percentiles of latency [ms]; a request counts in the round in which it was due."""
    rounds: dict[int, list[float]] = {}
    for record in result.records:
        rounds.setdefault(int(record.intended_s / round_s), []).append(record.latency_ms)
    return median(_percentile(latencies, percentile) for latencies in rounds.values())


async def run_policy(context: DemoContext, policy: str, slo: Slo, number: int) -> PolicyRun:
    """Run one policy, from a fresh cluster to its numbers; everything is taken down again."""
    scenario = context.scenario
    folder = context.out / policy
    async with _launcher_for(context, policy, slo, folder) as launcher:
        launch = await _wait_settled(context, launcher, f"run {number} of {len(scenario.policies)}: {policy}")
        plans = _load_plans(scenario, lambda load: load.points(scenario.duration_s))
        load_process, starts_at_s = await start_load_and_trace(context, launcher, launch, plans, folder)
        client = SystemClient(launch)
        monitor = RunMonitor(launch, context.clock, client.state)
        watching: asyncio.Task[None] | None = None

        async def show(snapshot: Snapshot) -> None:
            at_s, grams = snapshot.at_s - starts_at_s, await monitor.grams_since(starts_at_s, scenario.pue)
            watts = [monitor.power_w(device.device) for node in snapshot.nodes for device in node.devices]
            offered_per_s, progress = load_process.rate_per_s(at_s), load_process.progress() or NO_PROGRESS
            about = (scenario, policy, number, slo, at_s, snapshot, offered_per_s, progress)
            context.view.show(RunStatus(*about, watts=watts, grams=grams))

        monitor.on_snapshot = show
        try:
            watching = asyncio.create_task(monitor.run(), name="monitor")
            await _sleep_until(context.clock, starts_at_s - OBJECTIVE_LEAD_S)
            for family in scenario.loads:
                await client.set_objective(await client.objective(family))
            await _sleep_until(context.clock, starts_at_s)
            before = await client.explain(launch.family)
            results = await load_process.results()
            after = await client.explain(launch.family)
            ends_at_s = last_answer_at_s(merged(results))
            await monitor.wait_metered_until(ends_at_s, METER_DEADLINE_S)
            await cancel_and_wait(watching)
            return await _run_result(scenario, policy, slo, launch, monitor, results, (before, after))
        finally:
            if watching is not None and not watching.done():
                await cancel_and_wait(watching)
            await load_process.stop()
            await client.close()


async def start_load_and_trace(
    context: DemoContext, launcher: Launcher, launch: Launch, plans: Sequence[LoadPlan], folder: Path
) -> tuple[LoadProcess, float]:
    """Start the load and, once its second 0 is known (UTC, the second value), the clock of the trace.

    Until the first step ends the trace's first value holds, and the feed may come that late. Where it comes later (a
    busy machine) both begin again, and the load waits.

    Raises:
        StartError: the feed takes minutes to start, or the load does not.
    """
    lead_s = LEAD_S
    while lead_s <= LEAD_S_MAX:
        load_process = LoadProcess(
            plans, launch.addresses["inference"], folder, launch.launch_id, context.clock, lead_s
        )
        try:
            starts_at_s = await load_process.started_at_s()
            asked_s = context.clock.now_s()
            await launcher.restart("carbon_feed", {"trace": {"starts_at_s": starts_at_s}})
        except BaseException:
            await load_process.stop()
            raise
        up_s = context.clock.now_s()
        if up_s < starts_at_s + context.scenario.carbon.step_s:
            return load_process, starts_at_s
        await load_process.stop()
        context.view.say(
            f"the carbon feed took {up_s - asked_s:.1f} s to start: the load begins again and waits for it"
        )
        lead_s = 2 * (up_s - asked_s)
    remedy = f"stop what else runs here, or read {launch.state_dir}/logs"
    raise StartError("too slow to start for a trace that begins with the load", field="carbon_feed", remedy=remedy)


def _launcher_for(context: DemoContext, policy: str, slo: Slo, folder: Path) -> Launcher:
    shutil.rmtree(folder / "cluster", ignore_errors=True)  # fresh: no plan, no objective, no journal of an earlier run
    folder.mkdir(parents=True, exist_ok=True)
    changes = {"policy": policy, "slo": slo, "window_s": context.scenario.duration_s}
    taken = presets_of(context.scenario.policy_row(policy))
    changes |= {} if context.scenario.preset in taken else {"preset": ""}
    system = context.scenario.model_copy(update=changes)
    # Until the run's second 0 the trace's first value holds: its clock is started when the load is. The trace is too
    # short to learn a forecast from before half of the run is over: all plan by what they have seen, all through it.
    waiting = {"carbon_feed": {"trace": {"starts_at_s": math.inf}, "outlook": {"model": "none"}}}
    overrides = {**context.overrides, **waiting}
    return Launcher(
        system,
        folder / "cluster",
        clock=context.clock,
        say=context.view.say,
        kill_now=context.kill_now,
        overrides=overrides,
    )


async def _wait_settled(context: DemoContext, launcher: Launcher, what: str) -> Launch:
    """Serving, and the first plan rolled out as a whole."""
    launch = launcher.launch
    assert launch is not None, "the launcher has started"
    answered_s = await first_answer(launcher, context.clock)
    assert answered_s is not None, "nothing stops a family here"
    async with SystemClient(launch) as client:
        give_up_s = context.clock.monotonic_s() + SETTLE_DEADLINE_S
        while (await client.plan()).rollout.state != RolloutState.DONE:
            if context.clock.monotonic_s() > give_up_s:
                unfinished = StartError(
                    "the first plan was not rolled out", field="controller", remedy=f"read {launch.state_dir}/logs"
                )
                raise launcher.paths.with_first_errors(unfinished, launch.started_at_s)
            await context.clock.sleep(POLL_S)
    context.view.say(f"{what}: first answer {answered_s:.1f} s after the start")
    return launch


def _load_plans(
    scenario: DemoScenario, points: Callable[[OfferedLoad], tuple[tuple[float, float], ...]]
) -> list[LoadPlan]:
    seeds = scenario.seeds
    return [
        LoadPlan(
            points(load),
            scenario.warmup_s,
            str(family_folder(scenario.family.repository, name) / "heldout.npz"),
            name,
            seeds[name],
            **load.model_dump(include={"permute_labels", "items_mean", "items_sd", "items_max"}),
            receipts=len(set(scenario.fleet.devices)) > 1,  # costs every request something: only where it tells
        )
        for name, load in scenario.loads.items()
    ]


async def _sleep_until(clock: Clock, at_s: float) -> None:
    await clock.sleep(max(0.0, at_s - clock.now_s()))


async def _run_result(
    scenario: DemoScenario,
    policy: str,
    slo: Slo,
    launch: Launch,
    monitor: RunMonitor,
    results: Mapping[str, LoadResult],
    explained: tuple[Any, Any],
) -> PolicyRun:
    from power_agent.devices.node_client import NodeClient

    samples, readings, result = await monitor.samples(), await monitor.readings(), merged(results)
    starts_at_s, ends_at_s = result.started_at_s, last_answer_at_s(result)
    load = result.summary(slo.latency_ms, slo.percentile / 100)
    judged = scenario.model_copy(update={"slo": slo})
    families = {name: _family_summary(judged, name, one) for name, one in results.items()}
    cost = account(samples, readings, starts_at_s, ends_at_s, scenario.pue)
    replans, reconfigurations = _counts_by_cause(explained)
    if load.accuracy is None or load.latency_ms_p95 is None:
        raise StartError("not one request was answered", field=policy, remedy=f"read {launch.state_dir}/logs")
    summary = DemoSummary(
        requests=load.requests,
        answered=load.answered,
        failed=load.failed,
        slo={"percentile": slo.percentile, "latency_ms": slo.latency_ms},
        latency_ms_p50=load.latency_ms_p50 or 0.0,
        latency_ms_p95=load.latency_ms_p95,
        latency_ms_p99=load.latency_ms_p99 or 0.0,
        slo_attainment=sum((one.slo_attainment or 0.0) * one.requests for one in families.values()) / load.requests,
        accuracy=load.accuracy,
        accuracy_profile=sum((f.accuracy_profile or 0.0) * f.answered for f in families.values()) / load.answered,
        joules_per_request=per_request(cost.counter_j, load.answered),
        grams_per_request=per_request(cost.grams, load.answered),
        idle_share=cost.idle_share,
        replans=replans,
        reconfigurations=reconfigurations,
        exploration=_exploration_cost(explained),
        families=families,
        failed_by_code=load.failed_by_code,
    )
    series = _series(scenario, policy, monitor, results, samples, readings)
    if any(series.cores):
        summary = replace(summary, core_s=sum(series.cores), mixes=mixes(series, scenario))
    batches = overruns = 0  # nothing is padded but on simulated slices
    if launch.node_socket:
        node = NodeClient(launch.node_socket)
        try:
            pace = await asyncio.to_thread(node.pace_summary)
            batches, overruns = pace.batches, pace.overruns
        finally:
            node.close()
    return PolicyRun(
        summary,
        series,
        batches,
        overruns,
        all(node.simulated for snapshot in monitor.snapshots[-1:] for node in snapshot.nodes),
        await _triton_version(monitor.snapshots, monitor.clock),
    )


def mixes(series: DemoSeries, scenario: DemoScenario) -> dict[str, dict[str, float]]:
    """Shares of the answers by variant: before the first family's load rises, until it is down again, and after."""
    load, duration_s = scenario.load, scenario.duration_s
    up, down = round(load.peak_from * duration_s), round(load.peak_until * duration_s)
    found = {}
    for name, seconds in (("before", slice(0, up)), ("in", slice(up, down)), ("after", slice(down, None))):
        counts = {variant: sum(row[seconds]) for variant, row in series.answered_by_variant.items()}
        total = sum(counts.values()) or 1
        found[name] = {variant: count / total for variant, count in counts.items() if count}
    return found


def _family_summary(scenario: DemoScenario, name: str, result: LoadResult) -> DemoFamilySummary:
    slo, family = scenario.slo_of(name), services.served_family(scenario, name)
    load = result.summary(slo.latency_ms, slo.percentile / 100)
    accuracies = {variant.name: variant.accuracy for variant in family.variants}
    answered_by = [accuracies[record.variant] for record in result.records if record.code == OK]
    return DemoFamilySummary(
        requests=load.requests,
        answered=load.answered,
        failed=load.failed,
        schedule_digest=result.digest,
        slo_ms=slo.latency_ms,
        latency_ms_p95=load.latency_ms_p95 or 0.0,
        slo_attainment=load.slo_attainment if load.requests else None,
        accuracy=load.accuracy,
        accuracy_profile=fmean(answered_by) if answered_by else None,
        accuracy_floor=scenario.accuracy.floors(family.best.accuracy)[0],
        device_type_shares=device_type_shares(scenario, result),
        profile=services.served_profile(scenario, name),
    )


def device_type_shares(scenario: DemoScenario, result: LoadResult) -> dict[str, float]:
    """Share of the answers by the type of the device that gave them; nothing where the fleet has one type."""
    node, devices = scenario.fleet.node, scenario.fleet.devices
    types = {f"{node}-gpu{n}": kind for n, kind in enumerate(devices)}
    answered = (r.slice.rsplit("-", 2)[0] for r in result.records if r.code == OK)  # of NODE-gpuN-TYPE-START
    by = Counter(types.get(device, "") for device in answered)
    return {kind: by[kind] / by.total() for kind in sorted(set(devices))} if by and len(set(devices)) > 1 else {}


def _counts_by_cause(explained: tuple[Any, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """How often since the run began, by cause; the four causes are always named."""

    def since(field: str) -> dict[str, int]:
        before, after = (dict(getattr(answer, field)) for answer in explained)
        names = [*CAUSES, *sorted(set(after) - set(CAUSES))]
        counts = {name: int(after.get(name, 0)) - int(before.get(name, 0)) for name in names}
        return {name: count for name, count in counts.items() if count or name in CAUSES}

    return since("replans_by_cause"), since("reconfigurations_by_cause")


def _exploration_cost(explained: tuple[Any, Any]) -> Exploration | None:
    """What exploring has cost since the run began; None when the policy does not explore."""
    before, after = (answer.exploration for answer in explained)
    if not explained[1].HasField("exploration"):
        return None
    return Exploration(**{n: getattr(after, n) - getattr(before, n) for n in Exploration.__dataclass_fields__})


def _series(
    scenario: DemoScenario,
    policy: str,
    monitor: RunMonitor,
    results: Mapping[str, LoadResult],
    samples: list[EnergySample],
    readings: list[CarbonReading],
) -> DemoSeries:
    result = merged(results)
    load = result.series()
    seconds, begin_s = len(load.t_s), result.started_at_s
    seen = _snapshot_by_second(monitor.snapshots, begin_s, seconds)
    devices = sorted({d.device for m in monitor.snapshots for node in m.nodes for d in node.devices})
    order = [variant.name for name in results for variant in services.served_family(scenario, name).by_accuracy()]
    status = {name: [_device(snapshot, name) for snapshot in seen] for name in devices}
    return DemoSeries(
        policy=policy,
        t_s=load.t_s,
        intensity_g_per_kwh=[m.carbon.intensity_g_per_kwh if m and m.carbon else None for m in seen],
        offered_per_s=[float(count) for count in load.offered_per_s],
        answered_per_s=[float(count) for count in load.answered_per_s],
        latency_ms_p95={name: one.series().latency_ms_p95 for name, one in results.items()},
        power_w=power_by_second(samples, begin_s, seconds),
        device_state={name: [d.state.name if d else "" for d in row] for name, row in status.items()},
        clock_mhz={name: [d.clock_mhz if d else None for d in row] for name, row in status.items()},
        slices={name: [slices_text(d) if d else "" for d in row] for name, row in status.items()},
        answered_by_variant={v: load.answered_by_variant.get(v, [0] * seconds) for v in order},
        grams=grams_by_second(samples, readings, begin_s, seconds, scenario.pue),
        cores=[sum(map(_cores, m.nodes)) if m else 0.0 for m in seen],
        events=plan_events(monitor.changes, result, seconds),
    )


def _snapshot_by_second(snapshots: list[Snapshot], begin_s: float, seconds: int) -> list[Snapshot | None]:
    """The last snapshot seen in each second; the one before it where none was."""
    rows: list[Snapshot | None] = [None] * seconds
    for snapshot in snapshots:
        second = int(snapshot.at_s - begin_s)
        if snapshot.at_s >= begin_s and second < seconds:
            rows[second] = snapshot
    for second in range(1, seconds):
        rows[second] = rows[second] or rows[second - 1]
    return rows


def _device(snapshot: Snapshot | None, name: str) -> Any:
    nodes = snapshot.nodes if snapshot else ()
    return next((device for node in nodes for device in node.devices if device.device == name), None)


def _cores(node: NodeStatus) -> float:
    standing = (part for device in node.devices for part in device.slices if part.state is not SliceState.GONE)
    return sum(slice_cores(part.key.slice_type) for part in standing)


def plan_events(changes: Sequence[PlanChange], result: LoadResult, seconds: int) -> list[PlanEvent]:
    """Changes of plan that began in the seconds of a run. One that had not ended when the next came is superseded."""
    return [
        _event(change, after, result)
        for change, after in zip_longest(changes, changes[1:])
        if 0 <= change.started_at_s - result.started_at_s < seconds
    ]


def _event(change: PlanChange, after: PlanChange | None, result: LoadResult) -> PlanEvent:
    begin_s = result.started_at_s
    at_s = change.started_at_s - begin_s
    superseded = change.done_at_s is None and after is not None
    ends_at_s = after.started_at_s if superseded and after is not None else change.done_at_s
    done_s = result.duration_s if ends_at_s is None else ends_at_s - begin_s
    answered = sum(
        1 for r in result.records if r.code == "OK" and at_s <= r.intended_s + r.latency_ms / 1e3 <= max(done_s, at_s)
    )
    return PlanEvent(
        at_s=round(at_s, 2),
        took_s=None if change.done_at_s is None else round(done_s - at_s, 2),
        cause=change.decision.trigger,
        why=change.decision.why,
        plan=change.slices_text,
        answered=answered,
        reconfigured=change.reconfigured,
        superseded=superseded,
    )


async def _triton_version(snapshots: list[Snapshot], clock: Clock) -> str:
    """Version of a Triton, asked of the one that was seen last; `unknown` when it does not answer."""
    devices = (device for snapshot in reversed(snapshots) for node in snapshot.nodes for device in node.devices)
    target = next((one.grpc_target for device in devices for one in device.slices if one.grpc_target), "")
    if not target:
        return "unknown"
    client = TritonClient(target, "", Path(), clock)
    try:
        return await client.version()
    except TritonUnready:
        return "unknown"
    finally:
        await client.close()


def _percentile(values: list[float], percentile: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percentile / 100))]
