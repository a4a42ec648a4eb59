"""Exploration on the running system: ask for a candidate, deploy it, measure it, tell, until the planner has decided.

Source: CLOVER section 4.3 (candidates are evaluated on the live system); what protects serving meanwhile is ours.
Phases: ASK -> DEPLOY -> ROLL (the ordinary rollout) -> SETTLE -> MEASURE -> METER -> tell the planner, ASK again.
SETTLE waits until earlier load windows have run out and queued requests have drained. MEASURE ends at `requests_min`
answers of every family that gets requests, or after `measure_s`. METER waits until the energy of that interval is
known. BACK follows a candidate that had to be left, and restores the plan before it.
A candidate is not deployed if it cannot carry the load, or if every rollout to it falls below what the load needs. The
planner gets such a candidate back as a violation. The queue's room is bounded from the first step of a rollout on, p95
and backlog once the rollout has settled. Beyond a bound, the explorer leaves the candidate and reports a violation. A
step takes one tick; nothing here waits.
Whatever ends an exploration (freeze, pin, mode, objective, loss, a lost lease) leaves a good plan in force. It is the
plan before, or one measured within the SLO where the plan before no longer suits.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from controller.explore.core import candidate_measurement
from controller.explore.core.exploration_state import (
    BROKEN_OFF,
    DECIDED,
    HALTED,
    INTERRUPTED,
    MEASURED,
    REFUSED,
    Evaluation,
    Exploration,
    ExplorationTotals,
    Phase,
    deployment_refusal_by_family,
    fallback_plan,
    text,
    unplanned_slices_stand,
)
from controller.explore.core.ports import Control, ExplorationPorts, PlannerAnswer
from controller.observe.core.load_windows import LoadWindows
from controller.observe.core.triggers import Trigger
from controller.rollout.core.executor import FINAL_STATES
from controller.rollout.core.ports import CoreClock
from controller.settings import ExploreSettings
from trefoil.core.brains import Decision, LivePlanner, Measurement, PlanView
from trefoil.core.demand import Measured
from trefoil.core.fleet import DeviceState
from trefoil.core.plan import Plan, RolloutState

TOTALS: Final = "explorations"
METER_WAIT_S: Final = 4.0  # for energy samples of the interval measured; later ones make joules and grams unknown
PAUSE_S: Final = 5.0  # a longer gap between two looks (Redis was down) begins the measurement of the candidate again
IDLE_S: Final = 5.0  # without any arrival, before this counts as a time without load

RolloutOutcome = tuple[RolloutState, str]
"""Where the rollout of the plan in force stands, and why."""


class Meter(Protocol):
    """Meter of energy, grams and their cost over intervals."""

    def grams_per_request(self, families: Iterable[str], now_s: float) -> dict[str, float | None]:
        """Grams per request of each family over the measuring window; None: not measured."""

    def metered_until_s(self, devices: Sequence[str]) -> float:
        """Time up to which all of these devices have been metered."""

    def cost(self, families: Sequence[str], starts_s: float, ends_s: float, pue: float) -> candidate_measurement.Cost:
        """Cost of an interval, by family."""

    def hold(self, from_s: float) -> None:
        """Retain what tells the cost from a time on; inf: nothing."""


class Explorer:
    """Explorer of candidates on the running system: at most one exploration, one step a tick."""

    def __init__(
        self,
        live: LivePlanner | None,
        windows: LoadWindows,
        meter: Meter,
        settings: ExploreSettings,
        clock: CoreClock,
        totals: ExplorationTotals,
        ports: ExplorationPorts,
        control: Control,
    ) -> None:
        self.live, self._windows, self._meter, self._settings = live, windows, meter, settings
        self._clock, self.ports, self._control = clock, ports, control
        self.run: Exploration | None = None
        self.totals = totals
        self._current: Plan | None = None  # the plan in force
        self.last = ""

    # --- begin and end ------------------------------------------------------------------------------------------------

    def wants_to_explore(self, view: PlanView) -> bool:
        """Whether the planner wants to measure on the system."""
        return self.live is not None and bool(view.objectives) and self.live.asks(view)

    async def begin(self, view: PlanView, trigger: Trigger, current: Plan | None, rollout: RolloutOutcome) -> None:
        """Begin an exploration, in place of one under way. `current`: the plan in force."""
        before = current
        if self.run is not None:
            before = fallback_plan(self.run, view)
            self._close(INTERRUPTED, f"interrupted by {trigger.cause}: {trigger.why}")
        now_s = self._clock.now_s()
        self.run = Exploration(
            trigger, before, now_s, Phase.ASK, None, [], ExplorationTotals(), now_s, now_s, now_s, now_s
        )
        self._retain_from(now_s)
        self.run.totals.explorations, self.totals.explorations = 1, self.totals.explorations + 1
        self.ports.save_later(TOTALS, self.totals.plain())
        self.ports.gauge("trefoil_exploring", 1)
        self.ports.log("exploration", trigger=trigger.cause, why=trigger.why)
        await self.step(view, current, rollout)

    def abandon(self, why: str) -> None:
        """Abandon the exploration; what is deployed is the caller's (another plan takes over, or the role was lost)."""
        if self.run is not None:
            self._close(INTERRUPTED, why)

    async def stop(self, view: PlanView, why: str, current: Plan | None) -> None:
        """Stop the exploration and put a good plan in force."""
        self._current = current
        await self._stop(view, why)

    async def _stop(self, view: PlanView, why: str) -> None:
        if self.run is None:
            return
        kept = fallback_plan(self.run, view) or self._current
        self._close(INTERRUPTED, why)
        if kept is not None and self._candidate_deployed:
            await self._deploy_plan(replace(kept, exploration=False, why=f"exploration ended, {why}; {kept.why}"))

    # --- steps --------------------------------------------------------------------------------------------------------

    async def step(self, view: PlanView, current: Plan | None, rollout: RolloutOutcome) -> None:
        """Step of an exploration. A longer pause between two of them begins a measurement again."""
        run, self._current = self.run, current
        assert run is not None
        now_s = self._clock.now_s()
        paused = now_s - run.seen_s > PAUSE_S
        run.seen_s = now_s
        if run.phase in (Phase.SETTLE, Phase.MEASURE, Phase.METER) and paused:
            self._settle(now_s)
        if run.phase == Phase.ASK:
            await self._ask(view, rollout)
        elif run.phase == Phase.DEPLOY:
            await self._deploy()
        elif run.phase == Phase.BACK:
            self._returned(rollout)
        elif (found := self._break_off_reason(view))[0]:
            await self._break_off(view, BROKEN_OFF, *found)
        elif run.phase == Phase.ROLL:
            await self._await_rollout(view, rollout)
        elif run.phase == Phase.SETTLE:
            self._await_settled(view)
        elif run.phase == Phase.MEASURE:
            self._measure(view)
        elif run.phase == Phase.METER:
            self._await_meter(view)
        if self.run is run and now_s - run.began_s - run.waited_s > self._settings.exploration_max_s:
            why = f"it took more than exploration_max_s = {self._settings.exploration_max_s:g} s"
            await self._stop(view, why)

    async def _deploy_plan(self, plan: Plan) -> None:
        self._current = await self._control.deploy(plan)

    async def _ask(self, view: PlanView, rollout: RolloutOutcome) -> None:
        run = self.run
        assert run is not None
        # A way is found from what stands: in the middle of a rollout, for long enough, that is nothing to judge by.
        patient = self._clock.now_s() - run.charged_from_s < self._settings.settle_max_s
        if patient and (rollout[0] == RolloutState.APPLYING or unplanned_slices_stand(view)):
            return
        view = replace(view, trigger=run.trigger.cause)
        self.ports.require_room()
        answer = await self.ports.think(view, self._control.next_seed(), ask=True)
        if isinstance(answer.step, Decision):
            await self._decided(view, answer)
            return
        candidate = answer.step
        one = Evaluation(len(run.evaluations) + 1, candidate)
        run.evaluations.append(one)
        plan = candidate.plan
        why, family = await self.ports.compute(lambda: deployment_refusal_by_family(view, plan))
        if why and (view.current is not None or not candidate.plan.degraded):
            self._tell(view, REFUSED, why, blamed=family)
            run.phase = Phase.ASK
        else:
            why, run.phase = "", Phase.DEPLOY
        run.deployed = None
        run.deployed = await self._control.record_candidate(view, run.trigger, answer, why)
        if why:
            self.ports.wake()
        else:
            await self._deploy()

    async def _deploy(self) -> None:
        run = self.run
        assert run is not None
        if run.deployed is None:  # its record could not be written: Redis was down
            run.deployed = replace(run.now.candidate.plan, exploration=True)
        run.phase, run.settled_s = Phase.ROLL, math.inf
        await self._deploy_plan(run.deployed)

    async def _await_rollout(self, view: PlanView, rollout: RolloutOutcome) -> None:
        state, why = rollout
        if state == RolloutState.DONE:
            self._settle(self._clock.now_s())
        elif state in FINAL_STATES:
            await self._break_off(view, HALTED, f"its rollout was {state.name.lower()}: {why}")

    def _settle(self, now_s: float) -> None:
        assert self.run is not None
        self.run.phase, self.run.settled_s = Phase.SETTLE, now_s + self._settings.settle_s

    def _await_settled(self, view: PlanView) -> None:
        run = self.run
        assert run is not None
        now_s = self._clock.now_s()
        if now_s < run.settled_s:
            return
        found = self._windows.begun_since(run.windows_from_s)
        waits = sum(candidate_measurement.tally(found, o.family).backlog for o in view.objectives)
        borne = sum(d.rate_per_s * candidate_measurement.slo_s(view, d.family) for d in view.demand)
        if run.drains(waits, borne, now_s, self._settings):
            return
        run.settled_s = now_s
        run.phase = Phase.MEASURE

    def _measure(self, view: PlanView) -> None:
        run = self.run
        assert run is not None
        found = self._windows.begun_since(run.settled_s)
        tallies = {o.family: candidate_measurement.tally(found, o.family) for o in view.objectives}
        now_s = self._clock.now_s()
        if not any(t.arrived for t in tallies.values()):  # nothing to measure yet: this is not time of the candidate
            if now_s - run.settled_s > IDLE_S:  # windows come later than what they tell of
                run.waited_s += now_s - run.settled_s
                run.settled_s = now_s
            return
        asked = [t.answered for t in tallies.values() if t.arrived]
        if min(asked) >= run.now.candidate.requests_min or now_s - run.settled_s >= run.now.candidate.measure_s:
            run.found, run.phase = found, Phase.METER
            self._await_meter(view)

    def _await_meter(self, view: PlanView) -> None:
        run = self.run
        assert run is not None
        starts_s, ends_s = candidate_measurement.covered_span(run.found)
        known = self._meter.metered_until_s(_devices(view)) >= ends_s
        if not known and self._clock.now_s() < ends_s + METER_WAIT_S:
            return
        paid = self._cost(view, starts_s, ends_s) if known else candidate_measurement.Cost(None, None)
        measured = candidate_measurement.measured(view, self._windows, run.found, paid)
        self._tell(view, MEASURED, "", measured, ends_s)
        run.phase = Phase.ASK
        self.ports.wake()

    # --- leaving a candidate ------------------------------------------------------------------------------------------

    def _break_off_reason(self, view: PlanView) -> tuple[str, str]:
        """Why the candidate has to be left at once, and whose part of it; "" twice while it is bearable."""
        run = self.run
        assert run is not None
        if run.cold:
            return "", ""
        since = self._windows.begun_since(run.windows_from_s)
        settled = self._windows.begun_since(run.settled_s)
        measuring = run.phase in (Phase.MEASURE, Phase.METER)
        plan = run.now.candidate.plan
        return candidate_measurement.break_off_reason(
            view, plan, since, settled, self._settings.p95_ratio_max, measuring
        )

    async def _break_off(self, view: PlanView, outcome: str, why: str, blamed: str = "") -> None:
        run = self.run
        assert run is not None
        self._tell(view, outcome, why, blamed=blamed)
        back = fallback_plan(run, view)
        if back is None:
            run.phase = Phase.ASK  # there is nothing to go back to: the next candidate
            return
        run.phase = Phase.BACK
        await self._deploy_plan(replace(back, exploration=True, why=f"back from a candidate: {why}; {back.why}"))

    def _returned(self, rollout: RolloutOutcome) -> None:
        assert self.run is not None
        state, why = rollout
        if state == RolloutState.DONE:
            self.run.phase = Phase.ASK
            self.ports.wake()
        elif state in FINAL_STATES:  # the loop continues to try
            self.run.phase = Phase.ASK
            self.ports.log("the way back halted", warning=True, why=why)

    # --- booking ------------------------------------------------------------------------------------------------------

    def _tell(
        self,
        view: PlanView,
        outcome: str,
        why: str,
        measured: tuple[Measured, ...] | None = None,
        until_s: float | None = None,
        blamed: str = "",
    ) -> None:
        """Charge everything since the last evaluation to this one, and tell the planner."""
        run = self.run
        assert run is not None
        spent = self._charge(view, self._clock.now_s() if until_s is None else until_s)
        families = [blamed] if blamed else [o.family for o in view.objectives]
        results = candidate_measurement.failed_measurements(families) if measured is None else measured
        one = run.now
        one.outcome, one.why, one.measurement = outcome, why, Measurement(results, *spent)
        self._count(outcome)
        self.ports.tell(one.candidate, one.measurement)
        self.ports.evaluated(run.trigger, one)

    def _charge(self, view: PlanView, until_s: float) -> tuple[float, float, int]:
        """(seconds, joules, requests out of the SLO) since the last time; what is reported later is charged later."""
        run = self.run
        assert run is not None
        found = [w for w in self._windows.begun_since(run.windows_from_s) if w.ends_at_s <= until_s]
        violations = sum(candidate_measurement.tally(found, o.family).violations for o in view.objectives)
        metered_s = min(until_s, self._meter.metered_until_s(_devices(view)))
        spent_j = self._cost(view, run.metered_from_s, metered_s).total_j
        spent_s = max(0.0, until_s - run.charged_from_s)
        for totals in (run.totals, self.totals):
            totals.charge(spent_s, spent_j, violations)
        self.ports.count("trefoil_exploration_seconds_total", spent_s)
        self.ports.count("trefoil_exploration_joules_total", spent_j)
        self.ports.count("trefoil_exploration_violations_total", violations)
        run.charged_from_s = max(run.charged_from_s, until_s)
        run.windows_from_s = max(run.windows_from_s, candidate_measurement.covered_span(found)[1])
        run.metered_from_s = max(run.metered_from_s, metered_s)
        self._windows.hold_from_s = run.windows_from_s
        self._meter.hold(run.metered_from_s)
        return spent_s, spent_j, violations

    def _count(self, outcome: str) -> None:
        assert self.run is not None
        for totals in (self.run.totals, self.totals):
            totals.count(outcome)
        self.ports.count("trefoil_evaluations_total", outcome=outcome)

    def _cost(self, view: PlanView, starts_s: float, ends_s: float) -> candidate_measurement.Cost:
        return self._meter.cost([o.family for o in view.objectives], starts_s, ends_s, view.pue)

    async def _decided(self, view: PlanView, answer: PlannerAnswer) -> None:
        run = self.run
        assert run is not None
        self._charge(view, self._clock.now_s())
        decision, fallback = answer.decision, fallback_plan(run, view) or self._current
        if decision.plan is None and self._candidate_deployed and fallback is not None:
            # What runs is a candidate: it becomes the plan, unless there is a reason to go back to a good one.
            keeps = self._current if not decision.degraded else fallback
            decision = replace(decision, plan=replace(keeps or fallback, degraded=decision.degraded))
        self._close(DECIDED, decision.why)
        totals = json.dumps(run.totals.plain())
        versions = {"exploration": totals}
        self._current = await self._control.conclude(view, run.trigger, answer, decision, versions)
        if self._candidate_deployed and fallback is not None:  # the planner's plan was refused
            await self._deploy_plan(replace(fallback, exploration=False, why=f"{decision.why}; {fallback.why}"))

    @property
    def _candidate_deployed(self) -> bool:
        """Whether what is deployed is a candidate."""
        return self._current is not None and self._current.exploration

    def _close(self, outcome: str, why: str) -> None:
        run = self.run
        assert run is not None
        if run.evaluations and not run.now.outcome:
            run.now.outcome, run.now.why = INTERRUPTED, why
            self._count(INTERRUPTED)
        self.last = text(run, f"{outcome}: {why}")
        self.run = None
        self._retain_from(math.inf)
        self.ports.save_memory()
        self.ports.save_later(TOTALS, self.totals.plain())
        self.ports.gauge("trefoil_exploring", 0)
        self.ports.count("trefoil_explorations_total", outcome=outcome)
        self.ports.log("exploration ended", outcome=outcome, why=why, **run.totals.plain())

    def _retain_from(self, from_s: float) -> None:
        self._windows.hold_from_s = from_s
        self._meter.hold(from_s)

    def text(self) -> str:
        """Exploration under way, or the last one, in words; "" when there never was one."""
        return self.last if self.run is None else text(self.run)


def _devices(view: PlanView) -> list[str]:
    """Devices that a meter can reach."""
    return [d.device for n in view.fleet.nodes for d in n.devices if d.state != DeviceState.LOST]
