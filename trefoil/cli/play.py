"""One run of the demo: a fresh cluster, a load, a recorder beside it, and the numbers that come of it."""

import asyncio
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from trefoil.cli import services
from trefoil.cli.launcher import Launcher, first_answer
from trefoil.cli.layout import Launch, resolve_path
from trefoil.cli.live import Device, Picture, View
from trefoil.cli.load_result import LoadResult
from trefoil.cli.loadgen import LEAD_S
from trefoil.cli.output import slices_text
from trefoil.cli.player import Played, Player, last_answer_s
from trefoil.cli.recorder import Change, Moment, Recorder, grams_by_second, power_by_second, stopped
from trefoil.cli.results import CAUSES, Event, Exploration, Series, Summary
from trefoil.cli.scenario import Scenario, Slo, measures
from trefoil.cli.system_client import SystemClient
from trefoil.core.accounting import account, per_request
from trefoil.core.carbon import CarbonReading
from trefoil.core.energy import EnergySample
from trefoil.core.errors import StartError
from trefoil.core.fleet import DeviceState
from trefoil.core.plan import RolloutState
from trefoil.runtime.clock import Clock

METADATA_TIMEOUT_S: Final = 5.0
METER_DEADLINE_S: Final = 4.0
SETTLE_DEADLINE_S: Final = 30.0
POLL_S: Final = 0.1
LEAD_S_MAX: Final = 240.0
OBJECTIVE_LEAD_S: Final = 1.0  # the objective is set again just before second 0: its accuracy window is the run


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs share."""

    scenario: Scenario
    out: Path
    view: View
    clock: Clock
    kill_now: Callable[[], bool]
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of services beside those that the scenario gives, by service."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run left."""

    summary: Summary
    series: Series
    batches: int
    overruns: int
    simulated: bool
    triton_version: str

    def to_json(self) -> dict[str, Any]:
        """The series, with the summary beside it."""
        return asdict(self.series)


async def measure(setup: Setup) -> float:
    """p95 of the rule's policy under the demo's load profile, compressed [ms]."""
    scenario, rule = setup.scenario, setup.scenario.slo_rule
    provisional = Slo(percentile=rule.percentile, latency_ms=rule.provisional_ms)
    folder = setup.out / "slo"
    async with _cluster(setup, rule.policy, provisional, folder) as launcher:
        launch = await _ready(setup, launcher, f"measuring the SLO with {rule.policy}")
        played = _played(scenario, scenario.load.points(rule.measure_s))
        player = Player(played, launch.addresses["inference"], folder, launch.launch_id, setup.clock)
        try:
            result = await player.result()
        finally:
            await player.stop()
    summary = result.summary(provisional.latency_ms, rule.percentile / 100)
    if summary.latency_ms_p95 is None or summary.failed:
        raise StartError(
            f"{summary.failed} of {summary.requests} requests failed ({dict(summary.failed_by_code)})",
            field="slo_rule",
            remedy=f"read the logs in {folder}/cluster/logs",
        )
    latencies = [r.latency_ms for r in result.records]
    return _percentile(latencies, rule.percentile)


async def play(setup: Setup, policy: str, slo: Slo, number: int) -> Run:
    """One policy, from a fresh cluster to its numbers; everything is taken down again."""
    scenario = setup.scenario
    folder = setup.out / policy
    async with _cluster(setup, policy, slo, folder) as launcher:
        launch = await _ready(setup, launcher, f"run {number} of {len(scenario.policies)}: {policy}")
        played = _played(scenario, scenario.load.points(scenario.duration_s))
        player, starts_at_s = await begin(setup, launcher, launch, played, folder)
        client, recorder = SystemClient(launch), Recorder(launch, setup.clock)
        watching: asyncio.Task[None] | None = None
        try:
            screen = _Screen(setup, policy, number, slo, starts_at_s, player, recorder)
            recorder.on_moment = screen.show
            watching = asyncio.create_task(recorder.run(), name="recorder")
            await _until(setup.clock, starts_at_s - OBJECTIVE_LEAD_S)
            await client.set_objective(await client.objective(launch.family))
            await _until(setup.clock, starts_at_s)
            before = await client.explain(launch.family)
            result = await player.result()
            after = await client.explain(launch.family)
            ends_at_s = last_answer_s(result)
            await recorder.metered_until(ends_at_s, METER_DEADLINE_S)
            await stopped(watching)
            return await _numbers(scenario, policy, slo, launch, recorder, result, (before, after))
        finally:
            if watching is not None and not watching.done():
                await stopped(watching)
            await player.stop()
            await recorder.close()
            await client.close()


async def begin(setup: Setup, launcher: Launcher, launch: Launch, played: Played, folder: Path) -> tuple[Player, float]:
    """Start the load and, once its second 0 is known (UTC, the second value), the clock of the trace.

    Until the first step ends the trace's first value holds, and the feed may come that late. Where it comes later (a
    busy machine) both begin anew, and the load waits.

    Raises:
        StartError: the feed takes minutes to start, or the load does not.
    """
    lead_s = LEAD_S
    while lead_s <= LEAD_S_MAX:
        player = Player(played, launch.addresses["inference"], folder, launch.launch_id, setup.clock, lead_s)
        try:
            starts_at_s = await player.started_at_s()
            asked_s = setup.clock.now_s()
            await launcher.restart("carbon_feed", {"trace": {"starts_at_s": starts_at_s}})
        except BaseException:
            await player.stop()
            raise
        up_s = setup.clock.now_s()
        if up_s < starts_at_s + setup.scenario.carbon.step_s:
            return player, starts_at_s
        await player.stop()
        setup.view.say(f"the carbon feed took {up_s - asked_s:.1f} s to start: the load begins anew and waits for it")
        lead_s = 2 * (up_s - asked_s)
    remedy = f"stop what else runs here, or read {launch.state_dir}/logs"
    raise StartError("too slow to start for a trace that begins with the load", field="carbon_feed", remedy=remedy)


def _cluster(setup: Setup, policy: str, slo: Slo, folder: Path) -> Launcher:
    shutil.rmtree(folder / "cluster", ignore_errors=True)  # fresh: no plan, no objective, no journal of an earlier run
    folder.mkdir(parents=True, exist_ok=True)
    mine = {"policy": policy, "slo": slo, "window_s": setup.scenario.duration_s}
    mine |= {} if measures(setup.scenario.row(policy)) else {"preset": ""}
    system = setup.scenario.model_copy(update=mine)
    # Until the run's second 0 the trace's first value holds: its clock is started when the load is. The trace is too
    # short to learn a forecast from before half of the run is over: all plan by what they have seen, all through it.
    waiting = {"carbon_feed": {"trace": {"starts_at_s": math.inf}, "outlook": {"model": "none"}}}
    overrides = {**setup.overrides, **waiting}
    return Launcher(
        system, folder / "cluster", clock=setup.clock, say=setup.view.say, kill_now=setup.kill_now, overrides=overrides
    )


async def _ready(setup: Setup, launcher: Launcher, what: str) -> Launch:
    """Serving, and the first plan rolled out as a whole."""
    launch = launcher.launch
    assert launch is not None, "the launcher has started"
    answered_s = await first_answer(launcher, setup.clock)
    client = SystemClient(launch)
    try:
        give_up_s = setup.clock.monotonic_s() + SETTLE_DEADLINE_S
        while (await client.plan()).rollout.state != RolloutState.DONE:
            if setup.clock.monotonic_s() > give_up_s:
                raise StartError(
                    "the first plan was not rolled out", field="controller", remedy=f"read {launch.state_dir}/logs"
                )
            await setup.clock.sleep(POLL_S)
    finally:
        await client.close()
    setup.view.say(f"{what}: first answer {answered_s:.1f} s after the start")
    return launch


def _played(scenario: Scenario, points: tuple[tuple[float, float], ...]) -> Played:
    images = resolve_path(scenario.family.repository) / scenario.family.name / "heldout.npz"
    return Played(
        points, scenario.warmup_s, str(images), scenario.family.name, scenario.seed, scenario.load.permute_labels
    )


async def _until(clock: Clock, at_s: float) -> None:
    await clock.sleep(max(0.0, at_s - clock.now_s()))


async def _numbers(
    scenario: Scenario,
    policy: str,
    slo: Slo,
    launch: Launch,
    recorder: Recorder,
    result: LoadResult,
    explained: tuple[Any, Any],
) -> Run:
    from power_agent.devices.node_client import NodeClient

    samples, readings = await recorder.samples(), await recorder.readings()
    starts_at_s, ends_at_s = result.started_at_s, last_answer_s(result)
    load = result.summary(slo.latency_ms, slo.percentile / 100)
    cost = account(samples, readings, starts_at_s, ends_at_s, scenario.pue)
    replans, reconfigurations = _causes(explained)
    if load.accuracy is None or load.latency_ms_p95 is None:
        raise StartError("not one request was answered", field=policy, remedy=f"read {launch.state_dir}/logs")
    summary = Summary(
        requests=load.requests,
        answered=load.answered,
        failed=load.failed,
        slo={"percentile": slo.percentile, "latency_ms": slo.latency_ms},
        latency_ms_p50=load.latency_ms_p50 or 0.0,
        latency_ms_p95=load.latency_ms_p95,
        latency_ms_p99=load.latency_ms_p99 or 0.0,
        slo_attainment=load.slo_attainment,
        accuracy=load.accuracy,
        joules_per_request=per_request(cost.counter_j, load.answered),
        grams_per_request=per_request(cost.grams, load.answered),
        idle_share=cost.idle_share,
        replans=replans,
        reconfigurations=reconfigurations,
        exploration=_explored(explained),
    )
    node = NodeClient(launch.node_socket)
    try:
        pace = await asyncio.to_thread(node.pace_summary)
    finally:
        node.close()
    return Run(
        summary,
        _series(scenario, policy, recorder, result, samples, readings),
        pace.batches,
        pace.overruns,
        all(node.simulated for moment in recorder.moments[-1:] for node in moment.nodes),
        await _triton_version(recorder.moments),
    )


def _causes(explained: tuple[Any, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """How often since the run began, by cause; the four causes are always named."""

    def since(field: str) -> dict[str, int]:
        before, after = (dict(getattr(answer, field)) for answer in explained)
        names = [*CAUSES, *sorted(set(after) - set(CAUSES))]
        counts = {name: int(after.get(name, 0)) - int(before.get(name, 0)) for name in names}
        return {name: count for name, count in counts.items() if count or name in CAUSES}

    return since("replans_by_cause"), since("reconfigurations_by_cause")


def _explored(explained: tuple[Any, Any]) -> Exploration | None:
    """What exploring has cost since the run began; None when the policy does not explore."""
    before, after = (answer.exploration for answer in explained)
    if not explained[1].HasField("exploration"):
        return None
    return Exploration(**{n: getattr(after, n) - getattr(before, n) for n in Exploration.__dataclass_fields__})


def _series(
    scenario: Scenario,
    policy: str,
    recorder: Recorder,
    result: LoadResult,
    samples: list[EnergySample],
    readings: list[CarbonReading],
) -> Series:
    load = result.series()
    seconds, begin_s = len(load.t_s), result.started_at_s
    seen = _by_second(recorder.moments, begin_s, seconds)
    devices = sorted({d.device for m in recorder.moments for node in m.nodes for d in node.devices})
    order = [variant.name for variant in services.served_family(scenario).by_accuracy()]
    status = {name: [_device(moment, name) for moment in seen] for name in devices}
    return Series(
        policy=policy,
        t_s=load.t_s,
        intensity_g_per_kwh=[m.carbon.intensity_g_per_kwh if m and m.carbon else None for m in seen],
        offered_per_s=[float(count) for count in load.offered_per_s],
        answered_per_s=[float(count) for count in load.answered_per_s],
        latency_ms_p95=load.latency_ms_p95,
        power_w=power_by_second(samples, begin_s, seconds),
        device_state={name: [d.state.name if d else "" for d in row] for name, row in status.items()},
        clock_mhz={name: [d.clock_mhz if d else None for d in row] for name, row in status.items()},
        slices={name: [slices_text(d) if d else "" for d in row] for name, row in status.items()},
        answered_by_variant={v: load.answered_by_variant.get(v, [0] * seconds) for v in order},
        grams=grams_by_second(samples, readings, begin_s, seconds, scenario.pue),
        events=[_event(c, result) for c in recorder.changes if 0 <= c.started_at_s - begin_s < seconds],
    )


def _by_second(moments: list[Moment], begin_s: float, seconds: int) -> list[Moment | None]:
    """The last moment seen in each second; the one before it where none was."""
    rows: list[Moment | None] = [None] * seconds
    for moment in moments:
        second = int(moment.at_s - begin_s)
        if moment.at_s >= begin_s and second < seconds:
            rows[second] = moment
    for second in range(1, seconds):
        rows[second] = rows[second] or rows[second - 1]
    return rows


def _device(moment: Moment | None, name: str) -> Any:
    nodes = moment.nodes if moment else ()
    return next((device for node in nodes for device in node.devices if device.device == name), None)


def _event(change: Change, result: LoadResult) -> Event:
    begin_s = result.started_at_s
    at_s = change.started_at_s - begin_s
    done_s = result.duration_s if change.done_at_s is None else change.done_at_s - begin_s
    answered = sum(
        1 for r in result.records if r.code == "OK" and at_s <= r.intended_s + r.latency_ms / 1e3 <= max(done_s, at_s)
    )
    return Event(
        at_s=round(at_s, 2),
        took_s=None if change.done_at_s is None else round(done_s - at_s, 2),
        cause=change.decision.trigger,
        why=change.decision.why,
        plan=change.runs,
        answered=answered,
        reconfigured=change.moved,
    )


async def _triton_version(moments: list[Moment]) -> str:
    for moment in reversed(moments):
        for node in moment.nodes:
            for device in node.devices:
                for slice_ in device.slices:
                    if slice_.grpc_target:
                        return await _server_version(slice_.grpc_target)
    return "unknown"


async def _server_version(target: str) -> str:
    """Version of a Triton, asked of itself; `unknown` when it does not answer."""
    async with triton.InferenceServerClient(target) as client:
        try:
            metadata = await client.get_server_metadata(client_timeout=METADATA_TIMEOUT_S)
        except InferenceServerException:
            return "unknown"
        return str(metadata.version)


def _percentile(values: list[float], percentile: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percentile / 100))]


class _Screen:
    """Turns what the recorder sees into what a person sees."""

    def __init__(
        self, setup: Setup, policy: str, number: int, slo: Slo, starts_at_s: float, player: Player, recorder: Recorder
    ) -> None:
        self._setup, self._policy, self._number, self._slo = setup, policy, number, slo
        self._starts_at_s, self._player, self._recorder = starts_at_s, player, recorder

    async def show(self, moment: Moment) -> None:
        progress = self._player.progress()
        scenario = self._setup.scenario
        at_s = moment.at_s - self._starts_at_s
        devices = [device for node in moment.nodes for device in node.devices]
        grams = await self._recorder.grams_since(self._starts_at_s, scenario.pue)
        watts = [self._recorder.power_w(device.device) for device in devices]
        self._setup.view.show(
            Picture(
                run=self._policy,
                number=self._number,
                count=len(scenario.policies),
                at_s=at_s,
                duration_s=scenario.duration_s,
                intensity_g_per_kwh=moment.carbon.intensity_g_per_kwh if moment.carbon else None,
                offered_per_s=self._player.played.rate_per_s(at_s),
                answered_per_s=progress.answered_per_s if progress else 0.0,
                answered=progress.answered if progress else 0,
                failed=progress.failed if progress else 0,
                latency_ms_p95=progress.latency_ms_p95 if progress else None,
                slo_ms=self._slo.latency_ms,
                percentile=self._slo.percentile,
                power_w=sum(known) if len(known := [w for w in watts if w is not None]) == len(watts) else None,
                grams=grams,
                revision=f"{moment.plan.revision.epoch}.{moment.plan.revision.number}" if moment.plan else "",
                why=moment.plan.why if moment.plan else "",
                rollout=moment.rollout.state.name.lower() if moment.rollout else "",
                devices=[
                    Device(
                        d.device.split("/")[-1],
                        d.state.name.lower(),
                        "asleep" if d.state is DeviceState.ASLEEP else slices_text(d),
                        d.clock_mhz,
                        power_w,
                    )
                    for d, power_w in zip(devices, watts, strict=True)
                ],
            )
        )
