"""Simulation: the controller's cores in simulated time; their ports answer at once.

Time moves from event to event: ticks, changes of an intensity, slices that become ready, ends of what a rollout waits
for. Nothing is decided here. What differs from live: deciding takes no time, nothing fails, the meter is never late.
"""

import json
import math
import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

import numpy as np

from controller.explore.core.exploration_state import Evaluation, ExplorationTotals
from controller.explore.core.ports import PlannerAnswer
from controller.loop.core.control import ControlCore
from controller.loop.core.decision import CANDIDATE, ControlState, Verdict, ask_planner, run_planner
from controller.loop.core.ports import TakenDecision
from controller.loop.core.saved_state import SavedState
from controller.loop.decision_records import decision_record
from controller.observe.core.observation import Observation
from controller.observe.core.triggers import Trigger
from controller.observe.forecast_model import open_network
from controller.planners.exact.milp import CpuLimitHit, NothingFound
from controller.planners.policy_parts import forecaster_of, shares_slices
from controller.planners.table import PLANNERS
from controller.rollout.core.executor import RolloutExecutor
from controller.rollout.core.path import FleetSnapshot, RolloutPath
from controller.rollout.core.ports import NullPorts
from controller.rollout.core.rollout_inputs import best_path
from controller.thresholds import CARBON_HISTORY_MAX
from dispatcher.routers import ROUTERS
from dispatcher.routing.core.routing_table import staged
from power_agent.clocks.core.slice_latencies import FIRST_TOKENS
from power_agent.governors import reads_latency
from trefoil.core.brains import Candidate, Measurement, PlanView
from trefoil.core.common import Revision
from trefoil.core.demand import LoadWindow, SliceLoad, TableAck
from trefoil.core.errors import SettingError
from trefoil.core.fleet import NodeStatus, SliceKey
from trefoil.core.objective import ActMode, Objective, ObjectiveMode
from trefoil.core.parts import Kind, as_live_planner, find
from trefoil.core.plan import DecisionRecord, NodePlan, Plan, Rollout, RolloutState, Route
from trefoil.core.units import MS_PER_S
from trefoil.runtime.keys import Keys
from trefoil.simulator.books.intervals import Interval, load_window
from trefoil.simulator.books.ledger import Ledger, SimulatedMeter
from trefoil.simulator.engines.engine import Engine, Flow, StreamTerms
from trefoil.simulator.engines.fluid import FluidEngine
from trefoil.simulator.engines.hardware import Hardware
from trefoil.simulator.engines.jobs import JobsEngine
from trefoil.simulator.engines.request_engine import RequestEngine
from trefoil.simulator.engines.shared_fluid import SharedFluidEngine
from trefoil.simulator.scenario.arrivals import ArrivalSource, ReplayedArrivals
from trefoil.simulator.scenario.carbon import ForecastFeed
from trefoil.simulator.scenario.inputs import Inputs, SimulatedSettings, length_confusion, settings_of

EPSILON_S: Final = 1e-9
EXPLORING_TICK_S: Final = 5.0  # at most, while candidates are measured
EPOCH: Final = 1


T = TypeVar("T")


class SimulatedClock:
    """Clock that stands at one time until it is set: UTC and monotonic [s] are the same."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def now_s(self) -> float:
        """The time [s]."""
        return self.at_s

    monotonic_s = now_s


def at_once(step: Coroutine[object, None, T]) -> T:
    """Result of a core's step whose ports all answer at once."""
    try:
        step.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a port waits")


@types.coroutine
def until_resumed() -> Generator[None, None, None]:
    """Leave a core's step here, until `send(None)` continues with it."""
    yield


class Simulation(NullPorts):
    """Simulation of one scenario: all of its state, and the ports of its cores.

    Output for logs, metrics, disks and Redis is dropped.
    """

    def __init__(self, inputs: Inputs, keep_records: bool = False, settings: SimulatedSettings | None = None) -> None:
        """`settings`: of the controller, instead of those that the scenario asks for."""
        scenario = inputs.scenario
        self.inputs, self.scenario, self.settings = inputs, scenario, settings or settings_of(inputs)
        self.now_s = -scenario.warmup_s
        self.clock = SimulatedClock(self.now_s)
        placed = inputs.devices, inputs.truth, inputs.items, scenario.costs
        self.hardware = Hardware(*placed, inputs.governed, inputs.latencies())
        self._reads_latency = reads_latency(scenario.governor or inputs.policy.governor)
        self.ledger = Ledger(inputs, self.now_s)
        self.meter = SimulatedMeter(self.ledger, self.hardware, self.settings.measure_s)
        acts, cap = ControlState(ActMode.ACT), self.settings.max_watts
        self._start_cores(SavedState(dict(inputs.objectives), [], acts, ExplorationTotals(), max_watts=cap))
        self.routes = {f: Route(f, "fifo", "fifo") for f in inputs.objectives}
        self.engines: tuple[Engine, ...] = engines_for(inputs, self.now_s)
        self.jobs = JobsEngine(inputs)
        self.records: list[DecisionRecord] = []
        self.keep_records = keep_records
        self._published: tuple[Route, ...] = ()
        self._rolling: Coroutine[object, None, None] | None = None
        self._rolling_due_s = math.inf
        self._moved = False  # whether the rollout has changed what serves and no engine knows it yet
        self._drained_s = -math.inf
        self._woken = False
        self._tick_at_s = self.now_s
        self._carbon_at_s = -math.inf
        self._reported: dict[str, list[Interval]] = {f: [] for f in inputs.objectives}  # since the last load window
        self._seq = 0
        self._viewed: PlanView | None = None
        self.forecasts = ForecastFeed(
            scenario.carbon.forecast, inputs.carbon[inputs.zone], scenario.carbon.ratio_after_h
        )
        self._read_carbon()
        self._set_routes()
        self._run_step(self.core.enter_epoch(EPOCH))

    def _start_cores(self, kept: SavedState, standing: tuple[Plan | None, Mapping[str, NodePlan]] = (None, {})) -> None:
        """A controller begins: by what is kept, and by what the one before it has published and commanded."""
        inputs, scenario, settings = self.inputs, self.scenario, self.settings
        truth = partial(_mean_per_s, inputs.arrivals)
        predictor = forecaster_of(inputs.policy, open_network=open_network, truth=truth)
        self.observation = Observation(settings, Keys("simulated"), inputs.estimate.catalog, predictor, self.now_s)
        self.rollouts = RolloutExecutor(settings.rollout, self.observation, self.meter, self.clock, self, *standing)
        triggers = scenario.control.causes
        row = inputs.policy if triggers is None else replace(inputs.policy, triggers=triggers)
        live, traits = as_live_planner(inputs.planner), find(Kind.PLANNER, row.planner, PLANNERS).traits
        self.core = ControlCore(
            settings, row, traits.tick_grace_s, live, self.observation, self.meter, self.rollouts, self.clock, kept,
            self,
        )  # fmt: skip

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def end_s(self) -> float:
        """Time at which the run is over [s]."""
        return self.scenario.span_s

    @property
    def rolling(self) -> bool:
        """True while a rollout is under way."""
        return self._rolling is not None

    def run(self, until_s: float) -> None:
        """Run to the first event at or after a time: where a caller pauses changes nothing."""
        until_s = min(until_s, self.end_s)
        while self.now_s < until_s - EPSILON_S:
            self._next_event()

    def _next_event(self) -> None:
        self._serve_until(min(self.end_s, self._next_s()))
        if self.hardware.advance(self.now_s + EPSILON_S):
            self._set_routes()
            self._continue_rollout()
        elif self.now_s >= self._rolling_due_s - EPSILON_S:
            self._continue_rollout()
        if self.now_s >= self._carbon_at_s - EPSILON_S:
            self._read_carbon()
        if self.jobs.admit(self.now_s):
            self._plan_jobs()
        if self.now_s >= self._tick_at_s - EPSILON_S:
            self._tick()

    def _next_s(self) -> float:
        zero = 0.0 if self.now_s < -EPSILON_S else math.inf  # what is counted begins there
        found = min(self._tick_at_s, self._carbon_at_s, self.hardware.next_s(), self._rolling_due_s, zero)
        return max(self.now_s, min(found, self.jobs.next_s(self.now_s)))

    def _plan_jobs(self) -> None:
        """Plan the hours of jobs; where the solver gives up, the last plan stays, as it does live."""
        with suppress(CpuLimitHit, NothingFound):
            self.observation.inputs.flexible = self.jobs.plan(self.view())

    def _serve_until(self, to_s: float) -> None:
        """Serve and draw until then; nothing else happens on the way."""
        dt_s = to_s - self.now_s
        if dt_s > 0:
            found = {family: one for engine in self.engines for family, one in engine.serve(to_s).items()}
            items = self.jobs.serve(self.now_s, to_s, found, self.hardware, self.ledger.intensity)
            drawn = self.hardware.book_energy(dt_s, {**found, **items})
            self.ledger.add(self.now_s, to_s, found, drawn, self.rolling, self.hardware.cores)
            for family, one in found.items():
                self._reported[family].append(one)
            if self._reads_latency:  # by a window that begins when a clock was changed, if it was
                latencies = self.hardware.latencies
                of = {f: one.slice_histograms(of_tokens=f in latencies.by_token) for f, one in found.items()}
                of |= {f + FIRST_TOKENS: one.first_tokens() for f, one in found.items()}
                answers = {(key, family): seen for family, by in of.items() for key, seen in by.items()}
                latencies.add(answers, self.now_s + EPSILON_S, to_s)
            for family, one in found.items():
                for (key, variant), seconds in one.computed_s.items():
                    self.observation.cpu.add(key, family, variant, seconds, one.starts_s, one.ends_s)
        self.now_s = self.clock.at_s = to_s

    def _read_carbon(self) -> None:
        """Readings of all zones; the next change is an event."""
        carbon = self.inputs.carbon
        readings = {zone: one.reading(self.now_s) for zone, one in carbon.items()}
        self.ledger.intensity = {zone: r.intensity_g_per_kwh for zone, r in readings.items()}
        main = self.inputs.zone
        seen = self.observation.inputs
        if seen.carbon is None:
            seen.carbon_history.extend(carbon[main].history(self.now_s, CARBON_HISTORY_MAX))
        elif readings[main].observed_at_s > max(seen.carbon.observed_at_s, -EPSILON_S):  # before, the first one is held
            seen.carbon_history.append(readings[main])
        seen.carbon, seen.carbon_forecast = readings[main], self.forecasts.at(self.now_s)
        seen.zones = tuple(r for zone, r in readings.items() if zone != main)
        if self.scenario.fidelity == "request":  # a flow is split by its plan alone
            for engine in self.engines:
                engine.on_carbon(self.forecasts.ratio(self.now_s), self.now_s)
        self._carbon_at_s = min(one.next_s(self.now_s + EPSILON_S) for one in carbon.values())

    def _tick(self) -> None:
        self._viewed = None
        self.observation.windows.add(self.load_window(), self.inputs.estimate.catalog)
        self.observation.windows.forget(self.now_s)
        for family, objective in self.core.objectives.items():
            if objective.mode == ObjectiveMode.BUDGET:
                if self.now_s <= EPSILON_S:  # a window holds what is counted, and nothing from before it
                    self.observation.windows.restart_budget(family)
                self.observation.windows.open_budget(family, objective.window_s, self.now_s)
        exploring = self.core.explorer
        if exploring.live is not None:
            self.meter.note(self.now_s)
        self._control()
        tick_s = self.settings.tick_s  # aligned, so that changes of the hour fall on a tick
        if exploring.run is not None:
            tick_s = min(tick_s, EXPLORING_TICK_S)
        self._tick_at_s = (math.floor(self.now_s / tick_s + 1e-6) + 1) * tick_s

    def load_window(self) -> LoadWindow:
        """Load window of what was served since the last one, as a dispatcher reports it."""
        self._seq += 1
        window = load_window(self._reported, self.inputs.items, self._seq, self.now_s)
        self._reported = {family: [] for family in self._reported}
        return window

    def _control(self) -> None:
        self.observation.inputs.nodes = self.hardware.nodes()
        self.observation.inputs.scale_signals = self.hardware.scale_signals()
        self._run_step(self.core.step())
        while self._woken and self.core.explorer.run is not None:  # the next candidate, at the same time
            self._run_step(self.core.step())

    def restart_feed(self) -> None:
        """Read intensities and their history again: what they are played from has changed."""
        self.observation.inputs.carbon = None
        self._read_carbon()

    def renew_objectives(self) -> None:
        """Set every objective again, as an operator does: its budget begins again, and the trigger `objective`
        fires."""
        known = self.core.objectives
        self.core.objectives = {f: replace(o, number=o.number + 1) for f, o in known.items()}
        for family in known:
            self.observation.windows.restart_budget(family)
        self._viewed = None

    def view(self) -> PlanView:
        """View of the planner: what it may know now."""
        self.observation.inputs.nodes = self.hardware.nodes()
        return self.core.view()

    def _view_of_rollout(self) -> PlanView:
        """A view as far as a rollout reads it: of fleet and plan. What requests say is counted once a tick."""
        known = self._viewed or self.core.view()
        self.observation.inputs.nodes = self.hardware.nodes()
        return replace(known, now_s=self.now_s, fleet=self.observation.fleet(self.now_s), current=self.core.current)

    # --- ports of control -------------------------------------------------------------------------------------------

    def _run_step(self, step: Coroutine[object, None, None]) -> None:
        self._woken = False
        at_once(step)

    def show(self, view: PlanView, control: ControlState, verdict: Verdict | None) -> None:
        self._viewed = view

    def require_room(self) -> None: ...

    async def think(self, view: PlanView, seed: int, *, ask: bool = False) -> PlannerAnswer:
        planner = self.inputs.planner
        if ask:
            return PlannerAnswer(ask_planner(view, planner, seed), seed, is_exploration=True)
        return PlannerAnswer(run_planner(view, planner, seed), seed)

    async def compute(self, function: Callable[[], T]) -> T:
        return function()

    def tell(self, candidate: Candidate, measurement: Measurement) -> None:
        live = self.core.explorer.live
        assert live is not None
        live.tell(candidate, measurement)

    def save_memory(self) -> None: ...

    def evaluated(self, trigger: Trigger, evaluation: Evaluation) -> None:
        self.ledger.evaluation(self.now_s, trigger, evaluation)

    def open_records(self, epoch: int) -> int:
        return 0

    async def record(self, taken: TakenDecision) -> None:
        explored = taken.versions.get("exploration")
        if taken.verdict.outcome != CANDIDATE:
            self.ledger.decision(taken, json.loads(explored) if explored is not None else None)
        if self.keep_records:
            name = self.scenario.planner or self.inputs.policy.planner
            self.records.append(decision_record(taken, name, self.inputs.policy.name))

    async def save_plans(self, plans: Sequence[Plan]) -> None: ...

    async def write_objectives(self, objectives: tuple[Objective, ...]) -> None: ...

    async def roll(self, plan: Plan, why: str, view: Callable[[], PlanView]) -> None:
        await self.stop_rollout()
        self._rolling = self.rollouts.begin(plan, self._view_of_rollout)
        self._continue_rollout()

    async def stop_rollout(self) -> None:
        if self._rolling is not None:  # nothing here has to be waited for to leave
            self.rollouts.supersede()
            self._continue_rollout()
        assert self._rolling is None

    async def republish(self, revision: Revision) -> None: ...

    def wake(self) -> None:
        self._woken = True

    # --- ports of a rollout -----------------------------------------------------------------------------------------

    def _continue_rollout(self) -> None:
        """Take every step of the rollout that can be taken now."""
        self._moved = False
        if self._rolling is None:
            return
        self._rolling_due_s = math.inf
        try:
            self._rolling.send(None)
        except StopIteration:
            self._rolling = None
            self.ledger.halted += self.rollouts.rollout.state == RolloutState.HALTED
        if self._moved:
            self._set_routes()

    async def wait(self, until_s: float) -> None:
        """Until then; sooner, if something becomes ready."""
        self._rolling_due_s = min(until_s, self._drained_s if self.now_s < self._drained_s - EPSILON_S else math.inf)
        await until_resumed()

    async def query_agents(self, nodes: Mapping[str, NodeStatus]) -> None:
        self._observe()

    async def refresh_statuses(self) -> None:
        self._observe()

    async def publish(
        self, *, plan: Plan | None = None, rollout: Rollout | None = None, node: NodePlan | None = None,
        drained: frozenset[SliceKey] = frozenset(),
    ) -> None:  # fmt: skip
        if plan is None:
            return
        now_s = self.now_s + EPSILON_S
        self._published, self._moved = plan.routes, True
        self.hardware.undrain({t.slice for r in plan.routes for t in r.targets if not t.draining}, now_s)
        self._set_routes()
        if drained:
            self.hardware.drain(drained, now_s)
            self._drained_s = now_s + self.hardware.drained_s(drained)
            loads = tuple(SliceLoad(key, in_flight=1) for key in sorted(drained))
            self.observation.inputs.acks = (TableAck("simulated", 0, plan.revision, loads),)

    async def command(self, status: NodeStatus, plan: NodePlan) -> bool:
        """What begins now and takes its time is over at the event of then."""
        self._moved = True
        self.hardware.command({device.device: device for device in plan.devices}, self.now_s + EPSILON_S)
        return True

    def ended(self) -> None: ...  # seen at the next tick

    def find_path(self, view: PlanView, snapshot: FleetSnapshot, plan: Plan) -> RolloutPath:
        return best_path(view, snapshot, plan)

    def _observe(self) -> None:
        """Nodes as they are; one dispatcher, which has each table at once, and drains as long as the hardware says."""
        inputs = self.observation.inputs
        inputs.nodes = self.hardware.nodes()
        if self.now_s >= self._drained_s - EPSILON_S:
            inputs.acks = ()

    def _set_routes(self) -> None:
        """Give every engine its routes and what serves.

        Raises:
            SettingError: a family is split, and its engine plays families whole.
        """
        routes = {route.family: route for route in self._published}
        for engine in self.engines:
            wanted = [routes.get(family, self.routes[family]) for family in engine.families]
            by_model = {route.family: route for route in staged(wanted)}
            if len(by_model) > len(wanted) and not engine.plays_stages:
                remedy = "play it request by request, under a policy whose planner shares slices, e.g. muserve"
                raise SettingError(
                    "plays families whole here, and a plan splits one", field="fidelity", value=self.scenario.fidelity,
                    remedy=remedy,
                )  # fmt: skip
            services = [self.hardware.services(family) for family in engine.families]
            engine.set_routes(
                self.now_s, by_model, {model: known for each in services for model, known in each.items()}
            )
        self._moved = False


def _mean_per_s(arrivals: Mapping[str, ArrivalSource], family: str, from_s: float, until_s: float) -> float:
    """The true load of a family, for an all-knowing forecaster."""
    return arrivals[family].mean_per_s(from_s, until_s)


def engines_for(inputs: Inputs, now_s: float) -> tuple[Engine, ...]:
    """Engines of all families, which stand in order; their draws depend on the seed and their place alone."""
    scenario = inputs.scenario
    chosen, queue, overhead_ms = scenario.router, scenario.queue, scenario.costs.overhead_ms
    flows = {family: _flow(inputs, family) for family in sorted(inputs.objectives)}
    batches = any(flow.batch_delay_s is not None for flow in flows.values())
    shares, slower = batches or shares_slices(inputs.policy), scenario.costs.interference
    if scenario.fidelity == "fluid" and shares:
        return (SharedFluidEngine(flows, overhead_ms, now_s, chosen, slower),)
    if scenario.fidelity == "fluid":
        gap_scv = {served.name: served.arrivals.gap_scv for served in scenario.families}
        return tuple(FluidEngine(f, flow, overhead_ms, now_s, gap_scv[f], chosen) for f, flow in flows.items())
    router, keeps = chosen or inputs.policy.router, scenario.exact_quantiles
    grouped = find(Kind.ROUTER, router, ROUTERS).traits.group
    if grouped or shares:
        rng = _engine_rng(inputs, 0)
        if grouped:  # it has one router and queue from the start, before any plan names them
            chosen, queue = router, queue or inputs.policy.queue
        return (RequestEngine(flows, rng, overhead_ms, now_s, chosen, queue, keeps, shares, grouped, slower),)
    return tuple(
        RequestEngine({family: flow}, _engine_rng(inputs, place), overhead_ms, now_s, chosen, queue, keeps)
        for place, (family, flow) in enumerate(flows.items())
    )


def _flow(inputs: Inputs, family: str) -> Flow:
    served = next(one for one in inputs.scenario.families if one.name == family)
    largest = max((row.batch for row in inputs.truth.catalog.rows if row.family == family), default=1)
    delay_s = None if served.batch_delay_ms is None else served.batch_delay_ms / MS_PER_S
    slo_ms = inputs.objectives[family].slo_ms
    generative = any(one.name == family and one.generative for one in inputs.truth.catalog.families)
    confusion = length_confusion(served) if generative else None
    token_slo, known = inputs.objectives[family].token_slo, inputs.truth.catalog.family(family)
    source, steps = inputs.arrivals[family], known.tokens_mean + 1
    steps = float(source.steps.mean()) if isinstance(source, ReplayedArrivals) else steps
    streams = StreamTerms(steps, token_slo) if token_slo else None
    return Flow(source, slo_ms, served.items, served.items_sd, largest, delay_s, confusion, streams)


def _engine_rng(inputs: Inputs, place: int) -> np.random.Generator:
    return np.random.default_rng([inputs.scenario.seed, 0x5E21, place])
