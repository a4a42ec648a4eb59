"""The controller's shell in simulated time: what controller/loop does live, around the same brains, without asyncio.

Same: observer and load windows, triggers, planners, judgement, rollout steps, boosts, budgets. Different: time moves
from event to event; the hardware is `plant`, the requests are `serving`; deciding takes no time. Events are ticks,
changes of an intensity, slices that become ready, steps of a rollout.
"""

import math
from collections import Counter
from dataclasses import replace
from typing import Any, Final

from controller import publish
from controller.boosts import Boosts
from controller.decide import DEGRADED, FAILED, Control, Verdict, as_live, judge, think
from controller.evaluations import Totals
from controller.forecasters.table import forecaster
from controller.observe import Observer
from controller.rollout import Way
from controller.terms import best_way, early, standing
from controller.triggers import ALWAYS, MadeFor, Memory, Trigger, evaluate, made_for
from controller.windows import Windows
from trefoil.core.brains import Decision, Planner, PlanView
from trefoil.core.common import Revision
from trefoil.core.demand import LoadCell
from trefoil.core.objective import ActMode, ObjectiveMode
from trefoil.core.plan import DecisionRecord, NodePlan, Plan, Route
from trefoil.runtime import codec
from trefoil.simulator.books import Books
from trefoil.simulator.engines import engines_for
from trefoil.simulator.exploring import Explorer
from trefoil.simulator.forecasts import Forecasts
from trefoil.simulator.inputs import Inputs
from trefoil.simulator.memory_state import MemoryState, MemoryStore
from trefoil.simulator.plant import Plant
from trefoil.simulator.recall import Known, Recall
from trefoil.simulator.rollouts import Rolling
from trefoil.simulator.serving import Engine
from trefoil.simulator.steady import Steady
from trefoil.simulator.told import SimulatedClock, settings_of

RETRY_S: Final = 10.0  # as controller.loop.RETRY_S
EPSILON_S: Final = 1e-9
EXPLORING_TICK_S: Final = 5.0  # at most, while candidates are measured
URGENT: Final = ("loss", "objective")  # as controller.loop: what an exploration makes room for


class Shell:
    """One simulation: all of its state."""

    def __init__(self, inputs: Inputs, keep_records: bool = False) -> None:
        scenario = inputs.scenario
        self.inputs, self.scenario, self.settings = inputs, scenario, settings_of(inputs)
        self._thresholds = self.settings.thresholds
        self.now_s = -scenario.warmup_s
        self.clock = SimulatedClock(self.now_s)
        self.plant = Plant(inputs.devices, inputs.truth, inputs.items, scenario.costs)
        self.books = Books(inputs, self.now_s)
        # The observer reads no Redis here: only the names of keys, which stand in a plan's input stamps.
        state = MemoryState(MemoryStore(self.clock), "simulated", clock=self.clock)
        predictor = forecaster(inputs.policy.forecaster, self.settings.forecast)
        self.observer = Observer(self.settings, state, inputs.estimate.catalog, predictor, self.clock)
        self.windows: Windows = self.observer.windows
        self.observer.inputs.carbon_history = type(self.observer.inputs.carbon_history)(
            maxlen=scenario.control.history_max
        )
        self.routes = {f: Route(f, "fifo", "fifo") for f in inputs.objectives}
        self.engines: tuple[Engine, ...] = engines_for(inputs, self.now_s)
        self.plans: list[Plan] = []
        self.commanded: dict[str, NodePlan] = {}
        self.published: tuple[Route, ...] = ()
        self.control = Control(ActMode.ACT, False, False)
        self.rolling: Rolling | None = None
        self.records: list[DecisionRecord] = []
        self.keep_records = keep_records
        self.allowed = inputs.policy.triggers if scenario.policy.triggers is None else scenario.policy.triggers
        self.made_for: MadeFor | None = None
        self.memory = Memory()
        self.boosts = Boosts(self.settings.slo_boost_ratio, self.settings.slo_boost_max, self.settings.slo_boost_wear_s)
        self.causes: Counter[str] = Counter()
        self.decided = 0
        self.explorer = Explorer(inputs.planner, scenario.explore, Totals())
        self.reconfigurations = 0
        self._number = 0
        self._not_before_s = -math.inf
        self._retry_at_s = math.inf
        self._tick_at_s = self.now_s
        self._carbon_at_s = -math.inf
        self.steady = Steady({f: [] for f in inputs.objectives})
        self._seq = 0
        self._viewed: PlanView | None = None
        stateless = scenario.fidelity == "fluid" and as_live(inputs.planner) is None
        stateless = stateless and all(o.mode != ObjectiveMode.BUDGET for o in inputs.objectives.values())
        self.recall = Recall(self.settings.seed) if stateless else None
        self._recalled: Known | None = None
        self._still = 0
        self._last_seen: tuple[Any, ...] = ()
        self.forecasts = Forecasts(scenario.carbon.forecast, inputs.carbon[inputs.zone])
        self._read_carbon()
        self._offer()

    def __getstate__(self) -> dict[str, Any]:
        """All but the planner, which is made anew: what it remembers goes along."""
        live = as_live(self.inputs.planner)
        memory = live.memory() if live is not None else None
        explorer = replace(self.explorer, planner=None)  # type: ignore[arg-type]
        recall = Recall(self.settings.seed) if self.recall is not None else None
        return {**self.__dict__, "recall": recall, "explorer": explorer, "_remembered": memory}

    def resume(self, planner: Planner) -> None:
        """Go on with a planner like the one of before."""
        memory = self.__dict__.pop("_remembered")
        live = as_live(planner)
        if live is not None and memory is not None:
            live.recall(memory)
        self.inputs.planner = self.explorer.planner = planner

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def end_s(self) -> float:
        """When the run is over."""
        return self.scenario.span_s

    def run(self, until_s: float) -> None:
        """Go on to the first event at or after a time: where a caller pauses changes nothing."""
        until_s = min(until_s, self.end_s)
        while self.now_s < until_s - EPSILON_S:
            self._forward(min(self.end_s, self._next_s()))
            if self.plant.advance(self.now_s + EPSILON_S):
                self._changed()
            self._roll_on()
            if self.now_s >= self._carbon_at_s - EPSILON_S:
                self._read_carbon()
            if self.now_s >= self._tick_at_s - EPSILON_S:
                self._tick()

    def _next_s(self) -> float:
        due = self.rolling.next_s() if self.rolling else math.inf
        zero = 0.0 if self.now_s < -EPSILON_S else math.inf  # what is counted begins there
        return max(self.now_s, min(self._tick_at_s, self._carbon_at_s, self.plant.next_s(), due, zero))

    def _forward(self, to_s: float) -> None:
        """Serve and draw until then; nothing else happens on the way."""
        dt_s = to_s - self.now_s
        if dt_s > 0:
            found = {family: one for engine in self.engines for family, one in engine.serve(to_s).items()}
            drawn = self.plant.spend(dt_s, self.steady.work(found))
            self.books.add(self.now_s, to_s, found, drawn, self.rolling is not None)
            self.steady.add(found)
        self.now_s = self.clock.at_s = to_s

    def _read_carbon(self) -> None:
        """Readings of all zones; the next change is an event."""
        carbon = self.inputs.carbon
        readings = {zone: one.reading(self.now_s) for zone, one in carbon.items()}
        self.books.intensity = {zone: r.intensity_g_per_kwh for zone, r in readings.items()}
        main = self.inputs.zone
        seen = self.observer.inputs
        if seen.carbon is None:
            seen.carbon_history.extend(carbon[main].history(self.now_s, self.scenario.control.history_max))
        elif readings[main].observed_at_s > max(seen.carbon.observed_at_s, -EPSILON_S):  # before, the first one is held
            seen.carbon_history.append(readings[main])
        seen.carbon, seen.carbon_forecast = readings[main], self.forecasts.at(self.now_s)
        self.zones = tuple(r for zone, r in readings.items() if zone != main)
        self._carbon_at_s = min(one.next_s(self.now_s + EPSILON_S) for one in carbon.values())

    def _tick(self) -> None:
        self._seq += 1
        self._viewed = None
        window = self.steady.window(self.inputs.items, self._seq, self.now_s)
        self.windows.add(window, self.inputs.estimate.catalog)
        self.windows.forget(self.now_s)
        for family, objective in self.inputs.objectives.items():
            if objective.mode == ObjectiveMode.BUDGET:
                self.windows.open_budget(family, objective.window_s, self.now_s)
        if not self._quiet(window.cells):
            self._control()
        tick_s = self.settings.tick_s  # aligned, so that changes of the hour fall on a tick
        if self.explorer.run is not None:
            tick_s = min(tick_s, EXPLORING_TICK_S)
        self._tick_at_s = (math.floor(self.now_s / tick_s + 1e-6) + 1) * tick_s

    def _quiet(self, cells: tuple[LoadCell, ...]) -> bool:
        """Whether no trigger can fire, because all that it would see is what it saw for as long as it looks back."""
        state = (cells, self.plant.nodes(), self.zones, self.observer.inputs.carbon)
        self._still = self._still + 1 if state == self._last_seen else 0
        self._last_seen = state
        if self._still * self.settings.tick_s <= self.settings.keep_s or self.made_for is None:
            return False
        held = any(name.startswith((*ALWAYS, *self.allowed)) for name in self.memory.since_s)
        if self.rolling or self.explorer.run or held or any(self.boosts.by_family.values()):
            return False
        rested_s = self.made_for.at_s + self.settings.triggers.slo_rest_s + self.settings.tick_s
        held_s = -self.scenario.warmup_s + self.settings.demand_initial_hold_s + self.settings.tick_s
        due_s = min(self.made_for.next_tick_at_s, self._retry_at_s)
        return max(rested_s, held_s, self._not_before_s) < self.now_s < due_s

    def restart_feed(self) -> None:
        """Read intensities and their history anew: what they are played from has changed."""
        self.observer.inputs.carbon = None
        self._read_carbon()

    def renew_objectives(self) -> None:
        """Set every objective again, as an operator does: its budget begins anew, and the trigger `objective` fires."""
        known = self.inputs.objectives
        self.inputs.objectives = {f: replace(o, number=o.number + 1) for f, o in known.items()}
        for family in known:
            self.windows.restart_budget(family)
        self._viewed = None

    # --- deciding ---------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Plan | None:
        """The plan in force."""
        return self.plans[-1] if self.plans else None

    def view(self) -> PlanView:
        """What the planner may know now."""
        self.observer.inputs.nodes = self.plant.nodes()
        grams = self.books.grams_per_request(self.settings.measure_s)
        view = self.observer.view(self.inputs.objectives, self.current, self.boosts.by_family, grams)
        self._viewed = replace(view, zones=self.zones) if self.zones else view
        return self._viewed

    def _view_of_rollout(self) -> PlanView:
        """A view as far as a rollout reads it: of fleet and plan. What requests say is counted once a tick."""
        known = self._viewed or self.view()
        self.observer.inputs.nodes = self.plant.nodes()
        return replace(known, now_s=self.now_s, fleet=self.observer.fleet(), current=self.current)

    def _control(self) -> None:
        view = self.view()
        self.boosts.wear(view)
        if self.now_s < self._not_before_s:
            return
        exploring = self.explorer.run is not None
        allowed, rolling = () if exploring else self.allowed, self.rolling is not None
        trigger, self.memory = evaluate(view, self.made_for, self.memory, self._thresholds, allowed, rolling)
        if trigger is not None and (not exploring or trigger.cause in URGENT):
            self._decide(view, trigger)
        elif exploring:
            self.explorer.step(self, view)
        elif self.now_s >= self._retry_at_s and self.current is not None:
            self._roll(self._renumbered(self.current))

    def _decide(self, view: PlanView, trigger: Trigger) -> None:
        if trigger.cause == "slo":
            self.boosts.breach(view)
            view = self.view()
        if self.explorer.wants(view):
            if self.current is not None:
                self.made_for = made_for(view, self.current, math.inf)
            self.explorer.begin(self, view, trigger)
            return
        view = replace(view, trigger=trigger.cause)
        seed = self.next_seed()
        if self.recall is None:
            self.conclude(view, trigger, think(view, self.inputs.planner, seed), seed)
            return
        told, known = self.recall.think(view, self.inputs.planner)
        decision = replace(known.decision, next_tick_at_s=known.decision.next_tick_at_s + self.now_s)
        self._recalled = known if self.rolling is None else None
        self.conclude(view, trigger, decision, known.seed, told=told)
        self._recalled = None

    def next_seed(self) -> int:
        """Of the next decision."""
        self.decided += 1
        return self.settings.seed * 1_000_003 + self.decided

    def conclude(
        self,
        view: PlanView,
        trigger: Trigger,
        decision: Decision,
        seed: int,
        explored: dict[str, Any] | None = None,
        told: PlanView | None = None,
    ) -> None:
        """Judge a decision, note it, and roll out what comes of it. A candidate that is deployed is no plan yet."""
        judged = view
        if explored is not None and self.current is not None and self.current.exploration:
            judged = replace(view, current=None)
        if explored is not None and decision.plan is not None:
            decision = replace(decision, plan=replace(decision.plan, exploration=False))
        verdict = judge(judged, trigger, decision, self.control)
        self._remember(view, verdict)
        plan, effect, record_id = verdict.plan, verdict.outcome, f"1.{self.decided:06d}"
        if plan is not None:
            moves = publish.moves(self.current, plan)
            effect = "reconfigure" if moves else "reroute"
            self.causes[trigger.cause] += 1
            self.reconfigurations += moves
            plan = self._renumbered(plan)
            plan = replace(plan, policy=self.inputs.policy.name, created_at_s=self.now_s, decision_id=record_id)
        self.books.decision(self.now_s, trigger, verdict, effect, explored)
        if self.keep_records:
            name = self.scenario.policy.planner or self.inputs.policy.planner
            record = DecisionRecord(
                record_id, plan.revision if plan else Revision(), trigger.cause, self.inputs.policy.name,
                codec.to_json(told or view), seed, verdict.why, publish.versions(name, verdict, effect), view.now_s,
            )  # fmt: skip
            self.records.append(record)
        if plan is not None:
            self.put_in_force(plan)

    def _remember(self, view: PlanView, verdict: Verdict) -> None:
        """As controller.loop does: what the triggers compare with from now on."""
        made = verdict.decision.plan if verdict.decision else None
        next_s = verdict.decision.next_tick_at_s if verdict.decision else view.now_s + RETRY_S
        plan = made or self.current
        if plan is None:
            self._not_before_s = self.now_s + min(RETRY_S, 2.0)
            return
        if verdict.outcome in (FAILED, DEGRADED):
            next_s = min(next_s, view.now_s + RETRY_S)
        else:
            next_s = max(next_s, view.now_s + self.scenario.control.tick_min_s)
        self.made_for = made_for(view, plan, next_s)

    def deploy(self, plan: Plan) -> None:
        """Put a plan in force in place of the candidate before it."""
        plan = self._renumbered(plan)
        self.made_for = made_for(self.view(), plan, math.inf)
        self.reconfigurations += publish.moves(self.current, plan)
        self.put_in_force(plan)

    def rolled(self) -> bool | None:
        """How the last rollout ended; None: it is under way."""
        return None if self.rolling is not None else self._retry_at_s == math.inf

    # --- acting -----------------------------------------------------------------------------------------------------

    def put_in_force(self, plan: Plan) -> None:
        """The plan becomes the plan in force and is rolled out."""
        self.plans = [plan]
        self._roll(plan)

    def _renumbered(self, plan: Plan) -> Plan:
        self._number += 1
        return replace(plan, revision=Revision(1, self._number, 0))

    def _roll(self, plan: Plan) -> None:
        self.plans[-1] = plan
        self._retry_at_s = math.inf
        known = self._recalled.way if self._recalled else None
        way = known or self._way(plan)
        if self._recalled:
            self._recalled.way = way
        if way.halted:
            self.rolling = None
            self._retry_at_s = self.now_s + self.settings.rollout.retry_s
            self.books.halted += 1
            return
        timeout_s = self.settings.rollout.ready_timeout_s
        self.rolling = Rolling(plan, way, self._publish, self.plant.drained_s, self.now_s, timeout_s)
        self._roll_on()

    def _way(self, plan: Plan) -> Way:
        view = self._view_of_rollout()
        return best_way(view, standing(view.fleet, self.commanded, self.published), plan)

    def _roll_on(self) -> None:
        rolling = self.rolling
        if rolling is None:
            return
        before = rolling.index, rolling.phase
        rolling.advance(self.plant, self.now_s + EPSILON_S)
        if (rolling.index, rolling.phase) != before:
            self.commanded = {node.node: node for node in rolling.target.nodes}  # for what agents cannot report
            self._offer()
        if rolling.done:
            self.rolling = None
            if rolling.halted:
                self._retry_at_s = self.now_s + self.settings.rollout.retry_s
                self.books.halted += 1

    def _publish(self, routes: tuple[Route, ...]) -> None:
        self.published = routes
        self._offer()

    def _changed(self) -> None:
        """Something became ready: it may help while the rest is still on its way."""
        rolling = self.rolling
        if rolling is not None and not rolling.done:
            view = self._view_of_rollout()
            routes = early(view, standing(view.fleet, self.commanded, self.published), rolling.target)
            if routes is not None:
                self.published = routes
        self._offer()

    def _offer(self) -> None:
        """Give every engine its routes and what serves."""
        routes = {route.family: route for route in self.published}
        for engine in self.engines:
            wanted = {family: routes.get(family, self.routes[family]) for family in engine.families}
            engine.retable(self.now_s, wanted, {family: self.plant.services(family) for family in engine.families})
