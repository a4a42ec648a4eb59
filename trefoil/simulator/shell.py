"""The controller's cores in simulated time: their effects are carried out at once, on a plant and engines.

Time moves from event to event: ticks, changes of an intensity, slices that become ready, ends of what a rollout waits
for. Nothing is decided here. What differs from live: deciding takes no time, nothing fails, the meter is never late.
"""

import json
import math
from dataclasses import replace
from typing import Any, Final

from controller.core.control import ControlCore, SavedState
from controller.core.decide import CANDIDATE, ControlState, as_live_planner, ask_planner, run_planner
from controller.core.effects import (
    CallPlanner,
    CandidateEvaluated,
    CommandNode,
    CoreTime,
    FindPath,
    OpenRecords,
    PlannerAnswer,
    Publish,
    QueryAgents,
    RecordDecision,
    RefreshStatuses,
    StartRollout,
    Steps,
    StopRollout,
    TellPlanner,
    Viewed,
    Wait,
    WakeLoop,
)
from controller.core.evaluations import ExplorationTotals
from controller.core.observation import Observation
from controller.core.rolling import RolloutExecutor, find_path
from controller.core.rollout import RolloutPath
from controller.planners.table import PLANNERS
from controller.planning import forecaster_of
from controller.records import decision_record
from trefoil.core.brains import Planner, PlanView
from trefoil.core.demand import LoadCell, SliceLoad, TableAck
from trefoil.core.objective import ActMode, ObjectiveMode
from trefoil.core.parts import Kind, find
from trefoil.core.plan import DecisionRecord, Plan, RolloutState, Route
from trefoil.runtime.keys import Keys
from trefoil.simulator.books import Books
from trefoil.simulator.engines import engines_for
from trefoil.simulator.forecasts import Forecasts
from trefoil.simulator.inputs import Inputs
from trefoil.simulator.metered import Metered
from trefoil.simulator.plant import Plant
from trefoil.simulator.recall import Known, Recall
from trefoil.simulator.serving import Engine
from trefoil.simulator.settings import settings_of
from trefoil.simulator.steady import Steady

EPSILON_S: Final = 1e-9
EXPLORING_TICK_S: Final = 5.0  # at most, while candidates are measured
EPOCH: Final = 1


class Shell:
    """One simulation: all of its state."""

    def __init__(self, inputs: Inputs, keep_records: bool = False) -> None:
        scenario = inputs.scenario
        self.inputs, self.scenario, self.settings = inputs, scenario, settings_of(inputs)
        self.now_s = -scenario.warmup_s
        self.at = CoreTime(self.now_s, self.now_s)
        self.plant = Plant(inputs.devices, inputs.truth, inputs.items, scenario.costs, inputs.governed)
        self.books = Books(inputs, self.now_s)
        self.meter = Metered(self.books, self.plant, self.settings.measure_s)
        predictor = forecaster_of(self.settings, inputs.policy)
        self.seen = Observation(self.settings, Keys("simulated"), inputs.estimate.catalog, predictor, self.now_s)
        self.seen.inputs.carbon_history = type(self.seen.inputs.carbon_history)(maxlen=scenario.control.history_max)
        self.rollouts = RolloutExecutor(self.settings.rollout, self.seen, self.meter, self.at)
        triggers = scenario.policy.triggers
        row = inputs.policy if triggers is None else replace(inputs.policy, triggers=triggers)
        live, traits = as_live_planner(inputs.planner), find(Kind.PLANNER, row.planner, PLANNERS).traits
        kept = SavedState(dict(inputs.objectives), [], ControlState(ActMode.ACT), ExplorationTotals())
        self.core = ControlCore(
            self.settings, row, traits.tick_grace_s, live, self.seen, self.meter, self.rollouts, self.at, kept
        )
        self.routes = {f: Route(f, "fifo", "fifo") for f in inputs.objectives}
        self.engines: tuple[Engine, ...] = engines_for(inputs, self.now_s)
        self.records: list[DecisionRecord] = []
        self.keep_records = keep_records
        self._published: tuple[Route, ...] = ()
        self._rolling: Steps[None] | None = None
        self._rolling_due_s = math.inf
        self._drained_s = -math.inf
        self._woken = False
        self._tick_at_s = self.now_s
        self._carbon_at_s = -math.inf
        self.steady = Steady({f: [] for f in inputs.objectives})
        self._seq = 0
        self._viewed: PlanView | None = None
        stateless = scenario.fidelity == "fluid" and live is None
        stateless = stateless and all(o.mode != ObjectiveMode.BUDGET for o in inputs.objectives.values())
        self.recall = Recall(self.settings.seed) if stateless else None
        self._told: PlanView | None = None
        self._recalled: Known | None = None
        self._still = 0
        self._last_seen: tuple[Any, ...] = ()
        self.forecasts = Forecasts(scenario.carbon.forecast, inputs.carbon[inputs.zone])
        self._read_carbon()
        self._offer()
        self._perform(self.core.enter_epoch(EPOCH))

    def __getstate__(self) -> dict[str, Any]:
        """All but the planner, which is made anew: what it remembers goes along."""
        assert self._rolling is None, "a rollout under way cannot be saved: rest first"
        live = as_live_planner(self.inputs.planner)
        memory = live.memory() if live is not None else None
        recall = Recall(self.settings.seed) if self.recall is not None else None
        return {**self.__dict__, "recall": recall, "_remembered": memory}

    def resume(self, planner: Planner) -> None:
        """Go on with a planner like the one of before."""
        memory = self.__dict__.pop("_remembered")
        live = as_live_planner(planner)
        if live is not None and memory is not None:
            live.recall(memory)
        self.inputs.planner, self.core.explorer.live = planner, live

    def rest(self) -> None:
        """Go on until no rollout is under way."""
        while self._rolling is not None and self.now_s < self.end_s - EPSILON_S:
            self._event()

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def end_s(self) -> float:
        """When the run is over."""
        return self.scenario.span_s

    @property
    def rolling(self) -> bool:
        """Whether a rollout is under way."""
        return self._rolling is not None

    def run(self, until_s: float) -> None:
        """Go on to the first event at or after a time: where a caller pauses changes nothing."""
        until_s = min(until_s, self.end_s)
        while self.now_s < until_s - EPSILON_S:
            self._event()

    def _event(self) -> None:
        self._forward(min(self.end_s, self._next_s()))
        if self.plant.advance(self.now_s + EPSILON_S):
            self._offer()
            self._roll_on()
        elif self.now_s >= self._rolling_due_s - EPSILON_S:
            self._roll_on()
        if self.now_s >= self._carbon_at_s - EPSILON_S:
            self._read_carbon()
        if self.now_s >= self._tick_at_s - EPSILON_S:
            self._tick()

    def _next_s(self) -> float:
        zero = 0.0 if self.now_s < -EPSILON_S else math.inf  # what is counted begins there
        found = min(self._tick_at_s, self._carbon_at_s, self.plant.next_s(), self._rolling_due_s, zero)
        return max(self.now_s, found)

    def _forward(self, to_s: float) -> None:
        """Serve and draw until then; nothing else happens on the way."""
        dt_s = to_s - self.now_s
        if dt_s > 0:
            found = {family: one for engine in self.engines for family, one in engine.serve(to_s).items()}
            drawn = self.plant.spend(dt_s, self.steady.work(found))
            self.books.add(self.now_s, to_s, found, drawn, self.rolling)
            self.steady.add(found)
        self.now_s = self.at.now_s = self.at.monotonic_s = to_s

    def _read_carbon(self) -> None:
        """Readings of all zones; the next change is an event."""
        carbon = self.inputs.carbon
        readings = {zone: one.reading(self.now_s) for zone, one in carbon.items()}
        self.books.intensity = {zone: r.intensity_g_per_kwh for zone, r in readings.items()}
        main = self.inputs.zone
        seen = self.seen.inputs
        if seen.carbon is None:
            seen.carbon_history.extend(carbon[main].history(self.now_s, self.scenario.control.history_max))
        elif readings[main].observed_at_s > max(seen.carbon.observed_at_s, -EPSILON_S):  # before, the first one is held
            seen.carbon_history.append(readings[main])
        seen.carbon, seen.carbon_forecast = readings[main], self.forecasts.at(self.now_s)
        seen.zones = tuple(r for zone, r in readings.items() if zone != main)
        if self.scenario.fidelity == "request":  # a flow is split by its plan alone
            for engine in self.engines:
                engine.on_carbon(self.forecasts.ratio(self.now_s), self.now_s)
        self._carbon_at_s = min(one.next_s(self.now_s + EPSILON_S) for one in carbon.values())

    def _tick(self) -> None:
        self._seq += 1
        self._viewed = None
        window = self.steady.window(self.inputs.items, self._seq, self.now_s)
        self.seen.windows.add(window, self.inputs.estimate.catalog)
        self.seen.windows.forget(self.now_s)
        for family, objective in self.core.objectives.items():
            if objective.mode == ObjectiveMode.BUDGET:
                self.seen.windows.open_budget(family, objective.window_s, self.now_s)
        exploring = self.core.explorer
        if exploring.live is not None:
            self.meter.note(self.now_s)
        if not self._quiet(window.cells):
            self._control()
        tick_s = self.settings.tick_s  # aligned, so that changes of the hour fall on a tick
        if exploring.run is not None:
            tick_s = min(tick_s, EXPLORING_TICK_S)
        self._tick_at_s = (math.floor(self.now_s / tick_s + 1e-6) + 1) * tick_s

    def _quiet(self, cells: tuple[LoadCell, ...]) -> bool:
        """Whether a step of the core changes nothing, because all that it would see is what it saw for long."""
        seen = self.seen.inputs
        state = (cells, self.plant.nodes(), seen.zones, seen.carbon)
        self._still = self._still + 1 if state == self._last_seen else 0
        self._last_seen = state
        return self.core.step_is_idle(self._still * self.settings.tick_s, self.settings.keep_s)

    def _control(self) -> None:
        self.seen.inputs.nodes = self.plant.nodes()
        self._perform(self.core.step())
        while self._woken and self.core.explorer.run is not None:  # the next candidate, at the same time
            self._perform(self.core.step())

    def restart_feed(self) -> None:
        """Read intensities and their history anew: what they are played from has changed."""
        self.seen.inputs.carbon = None
        self._read_carbon()

    def renew_objectives(self) -> None:
        """Set every objective again, as an operator does: its budget begins anew, and the trigger `objective` fires."""
        known = self.core.objectives
        self.core.objectives = {f: replace(o, number=o.number + 1) for f, o in known.items()}
        for family in known:
            self.seen.windows.restart_budget(family)
        self._viewed = None

    def view(self) -> PlanView:
        """What the planner may know now."""
        self.seen.inputs.nodes = self.plant.nodes()
        return self.core.view()

    def _view_of_rollout(self) -> PlanView:
        """A view as far as a rollout reads it: of fleet and plan. What requests say is counted once a tick."""
        known = self._viewed or self.core.view()
        self.seen.inputs.nodes = self.plant.nodes()
        return replace(known, now_s=self.now_s, fleet=self.seen.fleet(self.now_s), current=self.core.current)

    # --- effects of control -----------------------------------------------------------------------------------------

    def _perform(self, steps: Steps[None]) -> None:
        self._woken = False
        answer = None
        try:
            while True:
                answer = self._carry_out(steps.send(answer))
        except StopIteration:
            self._told = self._recalled = None

    def _carry_out(self, effect: Any) -> Any:
        match effect:
            case Viewed(view):
                self._viewed = view
            case CallPlanner(view, seed, asks):
                return self._think(view, seed, asks)
            case TellPlanner(candidate, measurement):
                live = self.core.explorer.live
                assert live is not None
                live.tell(candidate, measurement)
            case RecordDecision():
                self._record(effect)
            case CandidateEvaluated():
                self.books.evaluation(effect)
            case StartRollout(plan):
                self._roll(plan)
            case StopRollout():
                self._settle()
            case OpenRecords():
                return 0
            case WakeLoop():
                self._woken = True
        return None  # the rest is for logs, metrics, disks and Redis, which nobody has here

    def _think(self, view: PlanView, seed: int, asks: bool) -> PlannerAnswer:
        planner = self.inputs.planner
        if asks:
            return PlannerAnswer(ask_planner(view, planner, seed), seed, asked=True)
        if self.recall is None:
            return PlannerAnswer(run_planner(view, planner, seed), seed)
        self._told, known = self.recall.think(view, planner)
        self._recalled = known if self._rolling is None else None
        return PlannerAnswer(
            replace(known.decision, next_tick_at_s=known.decision.next_tick_at_s + self.now_s), known.seed
        )

    def _record(self, kept: RecordDecision) -> None:
        explored = kept.versions.get("exploration")
        if kept.verdict.outcome != CANDIDATE:
            self.books.decision(kept, json.loads(explored) if explored is not None else None)
        if self.keep_records:
            name = self.scenario.policy.planner or self.inputs.policy.planner
            record = decision_record(replace(kept, view=self._told or kept.view), name, self.inputs.policy.name)
            self.records.append(replace(record, at_s=kept.view.now_s))

    # --- effects of a rollout ---------------------------------------------------------------------------------------

    def _roll(self, plan: Plan) -> None:
        self._settle()
        self._rolling = self.rollouts.begin(plan, self._view_of_rollout)
        self._roll_on()

    def _settle(self) -> None:
        """End the rollout under way where that is safe: at once, since nothing here has to be waited for to leave."""
        if self._rolling is not None:
            self.rollouts.supersede()
            self._roll_on()
        assert self._rolling is None

    def _roll_on(self) -> None:
        """Take every step of the rollout that can be taken now."""
        answer: Any = None
        steps, moved = self._rolling, False
        now_s = self.now_s + EPSILON_S  # what begins now and takes a time is over at the event of that time
        if steps is None:
            return
        self._rolling_due_s = math.inf
        try:
            while True:
                effect = steps.send(answer)
                answer = None
                match effect:
                    case RefreshStatuses():
                        self._look()
                    case Wait(until_s):
                        drained_s = self._drained_s if self.now_s < self._drained_s - EPSILON_S else math.inf
                        self._rolling_due_s = min(until_s, drained_s)
                        break
                    case Publish():
                        moved = True
                        self._publish(effect, now_s)
                    case CommandNode(_, node):
                        moved = answer = True
                        self.plant.command({device.device: device for device in node.devices}, now_s)
                    case QueryAgents():
                        self._look()
                    case FindPath():
                        answer = self._find_way(effect)
        except StopIteration:
            self._rolling = None
            self.books.halted += self.rollouts.rollout.state == RolloutState.HALTED
        if moved:
            self._offer()

    def _look(self) -> None:
        """Nodes as they are; one dispatcher, which has each table at once, and drains as long as the plant says."""
        inputs = self.seen.inputs
        inputs.nodes = self.plant.nodes()
        if self.now_s >= self._drained_s - EPSILON_S:
            inputs.acks = ()

    def _publish(self, wanted: Publish, now_s: float) -> None:
        plan = wanted.plan
        if plan is None:
            return
        self._published = plan.routes
        self.plant.undrain({t.slice for r in plan.routes for t in r.targets if not t.draining}, now_s)
        self._offer()
        if wanted.drained:
            self.plant.drain(wanted.drained, now_s)
            self._drained_s = now_s + self.plant.drained_s(wanted.drained)
            loads = tuple(SliceLoad(key, in_flight=1) for key in sorted(wanted.drained))
            self.seen.inputs.acks = (TableAck("simulated", 0, plan.revision, loads),)

    def _find_way(self, asked: FindPath) -> RolloutPath:
        known = self._recalled
        way = known.way if known is not None and known.way is not None else find_path(asked)
        if known is not None:
            known.way = way
        return way

    def _offer(self) -> None:
        """Give every engine its routes and what serves."""
        routes = {route.family: route for route in self._published}
        for engine in self.engines:
            wanted = {family: routes.get(family, self.routes[family]) for family in engine.families}
            engine.retable(self.now_s, wanted, {family: self.plant.services(family) for family in engine.families})
