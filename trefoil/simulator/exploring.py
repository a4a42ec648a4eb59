"""Exploration in simulated time: what controller/explore does live, around the same planner and the same measures.

ASK -> ROLL -> SETTLE -> MEASURE -> tell, ASK again; BACK after a candidate that had to be left. Every second, joule and
request out of the SLO between two tells is charged to the candidate in between. Differences: the meter is never late,
nothing is paused, no Redis is down.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

from controller import measuring
from controller.decide import as_live, ask
from controller.evaluations import (
    BROKEN_OFF,
    DECIDED,
    HALTED,
    INTERRUPTED,
    MEASURED,
    REFUSED,
    Evaluation,
    Exploration,
    Phase,
    Totals,
    good,
    refused,
)
from controller.settings import ExploreSettings
from controller.triggers import Trigger
from controller.windows import Windows
from trefoil.core.brains import Decision, Measurement, Planner, PlanView
from trefoil.core.demand import Measured
from trefoil.core.plan import Plan
from trefoil.simulator.books import Books


class Stage(Protocol):
    """What an exploration needs of the simulated controller."""

    now_s: float
    books: Books
    windows: Windows

    @property
    def current(self) -> Plan | None: ...
    def next_seed(self) -> int: ...
    def rolled(self) -> bool | None: ...  # None: under way; False: halted
    def deploy(self, plan: Plan) -> None: ...
    def conclude(
        self, view: PlanView, trigger: Trigger, decision: Decision, seed: int, explored: dict[str, Any] | None = None
    ) -> None: ...


@dataclass(slots=True)
class Explorer:
    """At most one exploration at a time, one step a tick."""

    planner: Planner
    settings: ExploreSettings
    totals: Totals
    run: Exploration | None = None
    _charged: tuple[float, float] = (0.0, 0.0)  # joules and grams of all families up to the last charge
    _settled: dict[str, tuple[float, float]] | None = None  # by family, when the measurement began

    def wants(self, view: PlanView) -> bool:
        """Whether the planner wants to measure on the system."""
        live = as_live(self.planner)
        return live is not None and live.asks(view)

    def begin(self, stage: Stage, view: PlanView, trigger: Trigger) -> None:
        """Start one, in place of one that may be under way."""
        before = stage.current
        if self.run is not None:
            before = good(self.run, view)
            self._close(stage, INTERRUPTED)
        now = stage.now_s
        self.run = Exploration(trigger, before, now, Phase.ASK, None, [], Totals(), now, now, now, now)
        stage.windows.hold_from_s = now
        self._charged = stage.books.spent()
        self.step(stage, view)

    def step(self, stage: Stage, view: PlanView) -> None:
        """One step."""
        run = self.run
        assert run is not None
        if run.phase == Phase.ASK:
            self._ask(stage, view)
        elif run.phase == Phase.BACK:
            if stage.rolled() is not None:
                run.phase = Phase.ASK
                self._ask(stage, view)
        elif (found := self._unbearable(stage, view))[0]:
            self._break_off(stage, view, BROKEN_OFF, *found)
        elif run.phase == Phase.ROLL:
            rolled = stage.rolled()
            if rolled:
                run.phase, run.settled_s = Phase.SETTLE, stage.now_s + self.settings.settle_s
            elif rolled is not None:
                self._break_off(stage, view, HALTED, "its rollout was halted")
        elif run.phase == Phase.SETTLE:
            self._settle(stage, view)
        else:
            self._measure(stage, view)
        if self.run is run and stage.now_s - run.began_s - run.waited_s > self.settings.exploration_max_s:
            self.stop(stage, view, f"it took more than exploration_max_s = {self.settings.exploration_max_s:g} s")

    def stop(self, stage: Stage, view: PlanView, why: str) -> None:
        """End it; a good plan is put in force."""
        if self.run is None:
            return
        kept = good(self.run, view) or stage.current
        on_trial = _on_trial(stage)
        self._close(stage, INTERRUPTED)
        if kept is not None and on_trial:
            stage.deploy(replace(kept, exploration=False, why=f"exploration ended, {why}; {kept.why}"))

    # --- steps ------------------------------------------------------------------------------------------------------

    def _ask(self, stage: Stage, view: PlanView) -> None:
        """Refused candidates cost no time: ask until one can be deployed, or the planner decides."""
        run = self.run
        assert run is not None
        while True:
            view = replace(view, trigger=run.trigger.cause)
            seed = stage.next_seed()
            step = ask(view, self.planner, seed)
            if isinstance(step, Decision):
                self._decided(stage, view, step, seed)
                return
            run.evaluations.append(Evaluation(len(run.evaluations) + 1, step))
            why, family = refused(view, step.plan)
            if not why or (view.current is None and step.plan.degraded):
                break
            self._tell(stage, view, REFUSED, why, blamed=family)
        run.phase, run.settled_s = Phase.ROLL, math.inf
        run.deployed = replace(step.plan, exploration=True, why=f"{run.trigger.cause}: {step.why}")
        stage.deploy(run.deployed)

    def _settle(self, stage: Stage, view: PlanView) -> None:
        run = self.run
        assert run is not None
        if stage.now_s < run.settled_s:
            return
        found = stage.windows.begun_since(run.windows_from_s)
        waits = sum(measuring.tally(found, o.family).backlog for o in view.objectives)
        borne = sum(d.rate_per_s * measuring.slo_s(view, d.family) for d in view.demand)
        if run.drains(waits, borne, stage.now_s, self.settings):
            return
        run.settled_s, run.phase = stage.now_s, Phase.MEASURE
        self._settled = stage.books.marks()

    def _measure(self, stage: Stage, view: PlanView) -> None:
        run = self.run
        assert run is not None
        found = stage.windows.begun_since(run.settled_s - 1e-6)
        tallies = {o.family: measuring.tally(found, o.family) for o in view.objectives}
        if not any(t.arrived for t in tallies.values()):
            run.waited_s += stage.now_s - run.settled_s
            run.settled_s = stage.now_s
            self._settled = stage.books.marks()
            return
        fewest = min(t.answered for t in tallies.values() if t.arrived)
        wanted = run.now.candidate
        if fewest < wanted.requests_min and stage.now_s - run.settled_s < wanted.measure_s:
            return
        assert self._settled is not None
        marks = stage.books.marks()
        joules = {f: marks[f][0] - self._settled[f][0] for f in marks}
        co2 = {f: marks[f][1] - self._settled[f][1] for f in marks}
        told = measuring.measured(view, stage.windows, found, measuring.Cost(joules, co2))
        self._tell(stage, view, MEASURED, "", told)
        run.phase = Phase.ASK
        self._ask(stage, view)

    def _unbearable(self, stage: Stage, view: PlanView) -> tuple[str, str]:
        """Why the candidate has to be left at once, and whose part of it; "" twice while it is bearable."""
        run = self.run
        assert run is not None
        if run.cold:
            return "", ""
        since = stage.windows.begun_since(run.windows_from_s - 1e-6)
        settled = stage.windows.begun_since(run.settled_s - 1e-6)
        return measuring.unbearable(view, run.now.candidate.plan, since, settled, self.settings)

    def _break_off(self, stage: Stage, view: PlanView, outcome: str, why: str, blamed: str = "") -> None:
        run = self.run
        assert run is not None
        self._tell(stage, view, outcome, why, blamed=blamed)
        back = good(run, view)
        if back is None:
            run.phase = Phase.ASK
            self._ask(stage, view)
            return
        run.phase = Phase.BACK
        stage.deploy(replace(back, exploration=True, why=f"back from a candidate: {why}; {back.why}"))

    # --- booking ----------------------------------------------------------------------------------------------------

    def _tell(
        self,
        stage: Stage,
        view: PlanView,
        outcome: str,
        why: str,
        told: tuple[Measured, ...] | None = None,
        blamed: str = "",
    ) -> None:
        """Charge everything since the last evaluation to this one, and tell the planner."""
        run, live = self.run, as_live(self.planner)
        assert run is not None
        assert live is not None
        spent_s, spent_j, violations = self._charge(stage, view)
        families = [blamed] if blamed else [o.family for o in view.objectives]
        results = measuring.lost(families) if told is None else told
        one = run.now
        one.outcome, one.why, one.told = outcome, why, Measurement(results, spent_s, spent_j, violations)
        self._count(outcome)
        live.tell(one.candidate, one.told)
        stage.books.evaluations.append(
            {
                "at_s": round(stage.now_s, 6),
                "trigger": run.trigger.cause,
                "outcome": outcome,
                "why": why or one.candidate.why,
                "spent_s": spent_s,
                "spent_j": spent_j,
                "violations": violations,
                "measured": {
                    m.family: {
                        "p95_ms": m.latency_ms_p95,
                        "attainment": m.slo_attainment,
                        "accuracy": m.accuracy,
                        "joules_per_request": m.joules_per_request,
                        "grams_per_request": m.grams_per_request,
                    }
                    for m in results
                },
            }
        )

    def _charge(self, stage: Stage, view: PlanView) -> tuple[float, float, int]:
        run = self.run
        assert run is not None
        found = stage.windows.begun_since(run.windows_from_s - 1e-6)
        violations = sum(measuring.tally(found, o.family).violations for o in view.objectives)
        spent = stage.books.spent()
        spent_s, spent_j = stage.now_s - run.charged_from_s, spent[0] - self._charged[0]
        for totals in (run.totals, self.totals):
            totals.charge(spent_s, spent_j, violations)
        run.charged_from_s = run.windows_from_s = stage.now_s
        stage.windows.hold_from_s = run.windows_from_s
        self._charged = spent
        return spent_s, spent_j, violations

    def _count(self, outcome: str) -> None:
        assert self.run is not None
        for totals in (self.run.totals, self.totals):
            totals.count(outcome)

    def _decided(self, stage: Stage, view: PlanView, decision: Decision, seed: int) -> None:
        run = self.run
        assert run is not None
        self._charge(stage, view)
        fallback = good(run, view) or stage.current
        on_trial = _on_trial(stage)
        if decision.plan is None and on_trial and fallback is not None:
            keeps = stage.current if not decision.degraded else fallback
            decision = replace(decision, plan=replace(keeps or fallback, degraded=decision.degraded))
        explored = run.totals.plain()
        self._close(stage, DECIDED)
        stage.conclude(view, run.trigger, decision, seed, explored)
        if _on_trial(stage) and fallback is not None:  # the planner's plan was refused
            stage.deploy(replace(fallback, exploration=False, why=f"{decision.why}; {fallback.why}"))

    def _close(self, stage: Stage, outcome: str) -> None:
        assert self.run is not None
        if self.run.evaluations and not self.run.now.outcome:
            self.run.now.outcome = outcome
        self.totals.explorations += 1
        self.run = None
        stage.windows.hold_from_s = math.inf


def _on_trial(stage: Stage) -> bool:
    """Whether what is deployed is a candidate."""
    return stage.current is not None and stage.current.exploration
