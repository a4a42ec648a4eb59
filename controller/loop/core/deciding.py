"""Control loop as a pure core: evaluate the triggers, and when one fires plan, judge, record, and roll out.

Source: DESIGN section 1 (the control loop is a brain), section 5 (modes of operation). It continues whatever is
down: what cannot be recorded is not put in force and triggers again; a planner that fails leaves the last good plan.
A planner that decides each second is recorded where it says something new (`_is_news`): ours.
Data: what is observed (`Observation`), what energy cost (`Meter`), where the rollout stands (`RolloutStatus`).
Decision: calls of `ControlPorts`, in order.
The shell ends one step before it begins the next.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from controller.explore.core.exploration import Explorer, Meter, RolloutOutcome
from controller.explore.core.ports import PlannerAnswer
from controller.loop.core.decision import (
    ADVISED,
    CANDIDATE,
    DEGRADED,
    FAILED,
    NEW,
    UNCHANGED,
    Verdict,
    judge,
    reconfigures,
)
from controller.loop.core.loans import Loans
from controller.loop.core.ports import ControlPorts, TakenDecision
from controller.loop.core.saved_state import SavedState
from controller.loop.core.slo_margin import SloMargin
from controller.observe.core.observation import Observation
from controller.observe.core.plannable import refused_slices
from controller.observe.core.triggers import (
    HoldTimers,
    PlanBasis,
    Trigger,
    evaluate_triggers,
    plan_basis,
)
from controller.rollout.core.ports import CoreClock
from controller.settings import ControllerSettings
from trefoil.core import errors
from trefoil.core.brains import Decision, LivePlanner, PlanView
from trefoil.core.common import Revision
from trefoil.core.objective import ActMode
from trefoil.core.plan import Plan
from trefoil.core.policies import Policy

URGENT: Final = ("loss", "objective")  # what an exploration under way makes room for
RETRY_S: Final = 10.0  # after a decision that found no plan
FIRST_RETRY_S: Final = 2.0  # the same while nothing is in force
SOON_S: Final = 2.0  # a planner that asks to be run again within this decides by the second


class RolloutStatus(Protocol):
    """Status of the newest rollout, as control sees it."""

    @property
    def outcome(self) -> RolloutOutcome:
        """State of the newest rollout and its reason; APPLYING while it is under way."""

    @property
    def rolling(self) -> bool:
        """Whether a rollout has begun and has not ended."""

    @property
    def retry_at_s(self) -> float | None:
        """When a halted rollout is tried again, monotonic; None: it was not halted."""


class DecidingCore:
    """State machine of the control loop, without what operators change: plans, triggers, exploration."""

    def __init__(
        self,
        settings: ControllerSettings,
        policy: Policy,
        tick_grace_s: float,
        live: LivePlanner | None,
        observation: Observation,
        meter: Meter,
        rollouts: RolloutStatus,
        clock: CoreClock,
        saved: SavedState,
        ports: ControlPorts,
    ) -> None:
        self.settings, self.policy, self.observation = settings, policy, observation
        self.clock, self.ports = clock, ports
        self._thresholds = replace(settings.thresholds, tick_grace_s=tick_grace_s)
        self._meter, self._rollouts = meter, rollouts
        self.objectives = saved.objectives
        self.max_watts = saved.max_watts  # of the fleet's planned power; 0 = no cap
        self.by_command, self.stopped, self.budgets = saved.by_command, saved.stopped, saved.budgets
        # A candidate that was being measured when the controller ended makes way for the plan before it.
        self.plans = [p for p in saved.plans if not p.exploration] or list(saved.plans)
        self.control = saved.control
        self.causes, self.reconfigurations = saved.causes, saved.reconfigurations
        self.explorer = Explorer(live, observation.windows, meter, settings.explore, clock, saved.totals, ports, self)
        self.slo_margin = SloMargin(wear_s=settings.slo_boost_wear_s)
        self.loans = Loans()
        self.last_verdict: Verdict | None = None
        self.last_trigger: Trigger | None = None
        self.plan_basis: PlanBasis | None = None
        self.timers = HoldTimers()
        self.decision_number = 0  # within the epoch
        self.not_before_s = -math.inf
        self.pending_trigger: Trigger | None = None
        self._epoch = 0
        self._entered = self._rolls_again = False
        self.started_at_s = clock.now_s()

    @property
    def current(self) -> Plan | None:
        """Plan in force, complete; None before the first."""
        return self.plans[-1] if self.plans else None

    @property
    def decision_id(self) -> str:
        """Id of the decision that is being taken: epoch.number."""
        return f"{self._epoch}.{self.decision_number:06d}"

    def view(self) -> PlanView:
        """View of this moment for planner and triggers."""
        grams = self._meter.grams_per_request(self.objectives, self.clock.now_s())
        margins = self.slo_margin.by_family
        found = self.observation.view(self.objectives, self.current, margins, grams, self.clock.now_s())
        found = replace(found, max_watts=self.max_watts) if self.max_watts else found
        return self.loans.seen(found, self.observation.catalog) if self.loans.lent else found

    # --- a step -------------------------------------------------------------------------------------------------------

    async def enter_epoch(self, epoch: int) -> None:
        """Enter a new epoch: rewrite what readers need, and roll the plan in force out again, once its nodes are seen.

        To be run before each step: what could not be done yet is done then.
        """
        if epoch == self._epoch and self._entered:
            await self._roll_again()
            return
        self._epoch, self._entered = epoch, False
        self.decision_number = self.ports.open_records(epoch)
        await self.ports.stop_rollout()
        if self.explorer.run is not None:
            self.pending_trigger = self.explorer.run.trigger
            self.explorer.abandon("the role was lost")
            self.plans = [p for p in self.plans if not p.exploration] or self.plans
        await self.ports.write_objectives(tuple(self.objectives.values()))
        if self.current is not None:
            again = self._renumbered(self.current)
            self.plans[-1] = again
            await self.ports.republish(again.revision)
        self._entered = True  # not before: what could not be written is written at the next tick
        self._rolls_again = True
        await self._roll_again()

    async def _roll_again(self) -> None:
        if not self._rolls_again or self.observation.awaits_nodes(self.current, self.clock.now_s()):
            return
        self._rolls_again = False
        if self.current is not None and self.control.mode == ActMode.ACT:
            await self._roll(self._renumbered(self.current), "epoch")

    async def step(self) -> None:
        """Step of control under the epoch entered: triggers, decision, exploration, retries."""
        if self.loans.lent:
            for loan in self.loans.expire(self.observation.fleet(self.clock.now_s()), self.clock.monotonic_s()):
                self.ports.log("loan ended", warning=True, device=loan.device, holder=loan.holder)
        view = self.view()
        self.ports.show(view, self.control, self.last_verdict)
        self.slo_margin.wear_off(view)
        if not self._may_plan(view):
            return
        trigger = self.pending_trigger
        if trigger is None and self.explorer.run is not None:
            await self._explore(view)
            return
        if trigger is None:
            trigger = self._fires(view, self.observation.allowed_triggers(self.policy.triggers, self.clock.now_s()))
        if trigger is not None:
            forced, self.pending_trigger = self.pending_trigger, None
            try:
                await self._decide(view, trigger)
            except (errors.Fenced, errors.StateUnavailable, errors.DiskUnavailable):
                self.pending_trigger = forced  # nothing is in force of it: it is still asked for
                raise
        elif (
            self._rollouts.retry_at_s is not None
            and self.clock.monotonic_s() >= self._rollouts.retry_at_s
            and self.control.mode == ActMode.ACT
            and self.current is not None
            and not refused_slices(view.fleet, self.current)  # of a pinned plan: until the reason is gone
        ):
            await self._roll(self._renumbered(self.current), "retry of a halted rollout")

    def _fires(self, view: PlanView, allowed: Sequence[str]) -> Trigger | None:
        trigger, self.timers = evaluate_triggers(
            view,
            self.plan_basis,
            self.timers,
            self._thresholds,
            allowed,
            self._rollouts.rolling,
            self.observation.inputs.scale_signals,
        )
        return trigger

    async def _explore(self, view: PlanView) -> None:
        """The next step of the exploration under way, unless something makes it void."""
        trigger = self._fires(view, ())
        if trigger is not None and trigger.cause in URGENT:
            await self._decide(view, trigger)
        else:
            await self.explorer.step(view, self.current, self._rollouts.outcome)

    def _may_plan(self, view: PlanView) -> bool:
        """Nothing is planned before there is something to plan with."""
        if self.control.mode == ActMode.OBSERVE or self.clock.monotonic_s() < self.not_before_s:
            return False
        if not self.objectives and not (self.stopped and self.current is not None and self.current.routes):
            return False
        if not any(n.node not in view.fleet.stale and n.devices for n in view.fleet.nodes):
            return False
        if self.observation.awaits_nodes(self.current, view.now_s):
            return False
        waited_s = view.now_s - self.started_at_s
        return self.observation.inputs.carbon is not None or waited_s >= self.settings.carbon.wait_s

    # --- deciding -----------------------------------------------------------------------------------------------------

    async def _decide(self, view: PlanView, trigger: Trigger) -> None:
        self.ports.require_room()
        if trigger.cause in ("slo", "scale"):
            self.slo_margin.raise_on_breach(view, self.observation.inputs.scale_signals)
            view = self.view()
        if self.explorer.run is not None and (self.control.hold_reason or not view.objectives):
            self.explorer.abandon(self.control.hold_reason or "no family is in service")
        self.last_trigger = trigger
        if not self.control.hold_reason and self.explorer.wants_to_explore(view):
            if self.current is not None:
                self.plan_basis = plan_basis(view, self.current, math.inf)
            rollout = self._rollouts.outcome
            await self.explorer.begin(view, trigger, self.current, rollout)
            return
        view = replace(view, trigger=trigger.cause)
        answer = await self.ports.think(view, self.next_seed())
        await self._judge(view, view, trigger, answer)

    async def _judge(
        self,
        view: PlanView,
        judged: PlanView,
        trigger: Trigger,
        answer: PlannerAnswer,
        decision: Decision | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """Judge and record the planner's answer for `view`, and put its plan in force. `decision`: replaces the
        answer's own, as an exploration concludes it."""
        wanted = decision or answer.decision
        judgement = verdict = await self.ports.compute(lambda: self._verdict(judged, trigger, wanted))
        if decision is None and not await self.ports.compute(lambda: self._is_news(view, trigger, judgement)):
            await self._set_basis(view, verdict)
            return
        plan, effect, before = verdict.plan, verdict.outcome, self.current
        if (planned := plan) is not None:
            effect = self._count(trigger.cause, await self.ports.compute(lambda: reconfigures(before, planned)))
            plan = self._numbered(view, planned)
        verdict = replace(verdict, decision=answer.decision)  # a replay compares with what the planner made
        await self._record(view, trigger, answer, verdict, effect, plan or self.current, versions)
        plans = self._plans_with(plan) if plan is not None else self.plans
        if plan is not None:
            await self.ports.save_plans(plans)
        self.last_verdict = judgement
        await self._set_basis(view, verdict)  # not before: what could not be written has to trigger again
        self.plans = plans
        if plan is not None:
            await self._roll(plan, plan.why)

    def _verdict(self, view: PlanView, trigger: Trigger, wanted: Decision) -> Verdict:
        if wanted.plan is not None:
            wanted = replace(wanted, plan=self.loans.with_lent(wanted.plan, view.fleet))
        return judge(view, trigger, wanted, self.control)

    def _is_news(self, view: PlanView, trigger: Trigger, verdict: Verdict) -> bool:
        """Whether a decision is recorded and put in force.

        A decision that is taken each second is skipped if it only repeats the last one. It is also skipped if it
        changes shares alone while a rollout is under way: the rollout continues, and shares wait for its end.
        """
        last, made, outcome = self.last_verdict, verdict.decision, verdict.outcome
        if trigger.cause != "tick" or last is None or made is None or made.next_tick_at_s > view.now_s + SOON_S:
            return True
        if outcome == UNCHANGED:
            return last.outcome in (DEGRADED, FAILED) or bool(verdict.degraded) != bool(last.degraded)
        if outcome == ADVISED and verdict.advised is not None:
            return last.advised is None or reconfigures(last.advised, verdict.advised)
        if outcome == NEW and verdict.plan is not None:
            return not self._rollouts.rolling or reconfigures(self.current, verdict.plan)
        return outcome != last.outcome

    async def _record(
        self,
        view: PlanView,
        trigger: Trigger,
        answer: PlannerAnswer,
        verdict: Verdict,
        effect: str,
        plan: Plan | None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        before = self._rollouts.outcome[0].name.lower()  # one under way is superseded by a new one
        given = {"rollout_before": before, **(versions or {})}
        counts = dict(self.causes), dict(self.reconfigurations)
        taken = TakenDecision(self.decision_id, view, trigger, answer, verdict, effect, plan, given, *counts)
        await self.ports.record(taken)

    def next_seed(self) -> int:
        """Of a new decision; `decision_id` is its id from now on."""
        self.decision_number += 1
        return self.settings.seed * 1_000_003 + self.decision_number

    def _count(self, cause: str, moves_: bool, replans: bool = True) -> str:
        """Count a plan that is put in force; returns its effect. A candidate moves things and is not a replan."""
        if replans:
            self.causes[cause] += 1
            self.ports.count("trefoil_replans_total", cause=cause)
        if moves_:
            self.reconfigurations[cause] += 1
            self.ports.count("trefoil_reconfigurations_total", cause=cause)
        return "reconfigure" if moves_ else "reroute"

    def _numbered(self, view: PlanView, plan: Plan) -> Plan:
        """The plan with its number and where it comes from."""
        return replace(
            self._renumbered(plan),
            policy=self.policy.name,
            inputs=self.observation.input_stamps(self.clock.now_s()),
            created_at_s=view.now_s,
            decision_id=self.decision_id,
        )

    async def _set_basis(self, view: PlanView, verdict: Verdict) -> None:
        """What the triggers compare with from now on, also when the plan was kept or only advised."""
        made = verdict.decision.plan if verdict.decision else None
        next_s = verdict.decision.next_tick_at_s if verdict.decision else view.now_s + RETRY_S
        plan = made or self.current
        if plan is None:
            self.not_before_s = self.clock.monotonic_s() + FIRST_RETRY_S
            return
        if verdict.outcome in (FAILED, DEGRADED):
            next_s = min(next_s, view.now_s + RETRY_S)
        else:
            next_s = max(next_s, view.now_s + self.settings.tick_min_s) if self.settings.tick_min_s else next_s
        self.plan_basis = await self.ports.compute(lambda: plan_basis(view, plan, next_s))

    # --- exploring ----------------------------------------------------------------------------------------------------

    async def record_candidate(self, view: PlanView, trigger: Trigger, answer: PlannerAnswer, refusal: str) -> Plan:
        """Record a candidate; its plan, numbered. A refused one is not deployed."""
        step = answer.step
        why = f"{trigger.cause}: {trigger.why}; {step.why}" + (f"; refused: {refusal}" if refusal else "")
        assert step.plan is not None
        plan = self._numbered(view, replace(step.plan, exploration=True, why=why))
        effect = "refused"
        if not refusal:
            effect = self._count(trigger.cause, reconfigures(self.current, plan), replans=False)
        verdict = Verdict(CANDIDATE, why, Decision(step.plan, why, math.inf))
        led_to = self.current if refusal else plan
        await self._record(view, trigger, answer, verdict, effect, led_to)
        return plan

    async def deploy(self, plan: Plan) -> Plan:
        """Put a plan in force in place of the candidate before it, and begin its rollout.

        The disk need not have it: the next controller goes back to the plan before the exploration.
        """
        newer = self.current is None or self.current.revision < plan.revision
        plan = plan if newer and plan.revision.epoch == self._epoch else self._renumbered(plan)
        self.plan_basis = plan_basis(self.view(), plan, math.inf)
        self.plans = self._plans_with(plan)
        self.ports.save_later("plans", self.plans)
        await self._roll(plan, plan.why)
        return plan

    async def conclude(
        self, view: PlanView, trigger: Trigger, answer: PlannerAnswer, decision: Decision, versions: Mapping[str, str]
    ) -> Plan | None:
        """Record a decision and put in force what it has become; a candidate that is deployed is not a plan yet."""
        trial = self.current is not None and self.current.exploration
        if decision.plan is not None:
            decision = replace(decision, plan=replace(decision.plan, exploration=False))
        judged = replace(view, current=None) if trial else view
        try:
            await self._judge(view, judged, trigger, answer, decision, versions)
        except (errors.Fenced, errors.StateUnavailable, errors.DiskUnavailable):
            self.pending_trigger = trigger  # the exploration is over: what it was for is still asked for
            raise
        return self.current

    # --- acting -------------------------------------------------------------------------------------------------------

    def _plans_with(self, plan: Plan) -> list[Plan]:
        """The plans that are kept when the numbered one becomes the plan in force."""
        saved = self.plans[:-1] if self.current is not None and self.current.exploration else self.plans
        return [*saved, plan][-self.settings.plans_kept :]

    async def _roll(self, plan: Plan, why: str) -> None:
        self.plans[-1], self._rolls_again = plan, False
        await self.ports.roll(plan, why, self.view)

    def _renumbered(self, plan: Plan) -> Plan:
        """The same plan under the next number of this epoch; numbers never go back, also across epochs."""
        number = self.current.revision.number if self.current else 0
        return replace(plan, revision=Revision(self._epoch, number + 1, 0))
