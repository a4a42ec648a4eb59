"""The control loop: every tick observe, ask the triggers, and when one fires decide, record and act.

It goes on whatever is down: without Redis it neither decides nor acts and serving stays as it is; a silent node is left
alone; an old reading is carried; a planner that fails, or takes too long, leaves the last good plan in force.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace

import structlog

from controller import publish
from controller.act import Actor
from controller.authority import Authority
from controller.boosts import Boosts
from controller.decide import CANDIDATE, DEGRADED, FAILED, Control, Verdict, judge
from controller.disk import Disk
from controller.explore import Explorer
from controller.observe import Observer
from controller.records import Records
from controller.report import Accountant
from controller.rolling import Rolling
from controller.settings import ControllerSettings
from controller.thinker import RETRY_S, Thinker, Thought
from controller.triggers import MadeFor, Memory, Trigger, evaluate, made_for
from trefoil.core import errors
from trefoil.core.brains import Decision, Planner, PlanView
from trefoil.core.common import Revision
from trefoil.core.objective import ActMode, Objective, ObjectiveMode
from trefoil.core.plan import DecisionRecord, Plan, RolloutState
from trefoil.core.policies import Policy
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Put
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics

URGENT = ("loss", "objective")  # what an exploration under way makes room for


class Loop:
    """All state of the controller, on one event loop."""

    def __init__(
        self,
        settings: ControllerSettings,
        policy: Policy,
        planner: Planner,
        state: State,
        authority: Authority,
        observer: Observer,
        actor: Actor,
        accountant: Accountant,
        disk: Disk,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.settings, self.policy = settings, policy
        self._state, self._authority, self.observer = state, authority, observer
        self.actor, self._accountant, self._disk, self._metrics, self._clock = actor, accountant, disk, metrics, clock
        self._log = structlog.get_logger()
        self.objectives: dict[str, Objective] = {o.family: o for o in disk.load_all("objectives", Objective)}
        plans = disk.load_all("plans", Plan)
        # A candidate that was being measured when the controller ended makes way for the plan before it.
        self.plans: list[Plan] = [p for p in plans if not p.exploration] or list(plans)
        saved = disk.load_plain("control")
        self.control = Control(
            ActMode[saved.get("mode", settings.act_mode.name)],
            bool(saved.get("frozen", False)),
            bool(saved.get("pinned", False)),
        )
        self.records = Records(settings, policy, state.keys, authority, disk, metrics, observer.windows.dump_budgets)
        self.thinker = Thinker(planner, settings.planner or policy.planner, disk, clock, settings.solve_timeout_s)
        self.explorer = Explorer(
            self, self.thinker, observer.windows, accountant, settings.explore, metrics, clock, disk
        )
        self.last: Verdict | None = None
        self.last_trigger: Trigger | None = None
        self._made_for: MadeFor | None = None
        self._memory = Memory()
        self._boosts = Boosts(settings.slo_boost_ratio, settings.slo_boost_max, settings.slo_boost_wear_s)
        self._forced: Trigger | None = None
        self._not_before_s = 0.0
        self._epoch = 0
        self._rolling = Rolling(actor, settings.rollout.retry_s, metrics, clock, self.view, self.wake)
        self._demand = publish.DemandSeries(state.keys, observer, authority, clock)
        self._receipts = publish.ReceiptSeries(settings, state.keys, accountant.receipts, authority, clock)
        self._started_at_s = clock.now_s()
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self.changed = asyncio.Condition()
        self.actor.on_change = self.announce
        self.actor.spent_j = lambda: accountant.unallocated_j
        observer.windows.load_budgets(disk.load_plain("budgets"), clock.now_s())

    @property
    def current(self) -> Plan | None:
        """The plan in force, complete."""
        return self.plans[-1] if self.plans else None

    def announce(self) -> None:
        """Tell watchers that plan, rollout or mode has changed."""
        asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def wake(self) -> None:
        """Tick now instead of at the next period."""
        self._wake.set()

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tick for ever."""
        while True:
            await self.tick()
            try:
                async with asyncio.timeout(self.settings.tick_s):
                    await self._wake.wait()
            except TimeoutError:
                pass  # the period is over: tick
            self._wake.clear()

    async def tick(self) -> None:
        """One round. Public so that tests can drive it."""
        self._rolling.check()
        was_down = self.observer.inputs.down
        await self.observer.refresh()
        if self.observer.inputs.down:
            if not was_down:
                self._log.warning("blind: nothing is decided, what runs goes on", why=self.observer.inputs.down)
            return
        await self._accountant.refresh(sorted(self.objectives))
        for family, objective in self.objectives.items():
            if objective.mode == ObjectiveMode.BUDGET:
                self.observer.windows.open_budget(family, objective.window_s, self._clock.now_s())
        if not self._authority.epoch:
            return
        async with self._lock:
            try:
                await self._control()
            except errors.Fenced as error:
                self._log.warning("no decision: the role was lost", error=str(error))
            except errors.StateUnavailable as error:
                self._log.warning("no decision: Redis is down", error=str(error))

    async def _control(self) -> None:
        if self._authority.epoch != self._epoch:
            await self._regain()
        await self._demand.publish()
        await self._receipts.publish(self.current)
        view = self.view()
        publish.gauge(self._metrics, view, self.control, self.actor.rollout, self.last, self.observer.held().rung)
        self._boosts.wear(view)
        if not self._may_plan(view):
            return
        trigger = self._forced
        if trigger is None and self.explorer.run is not None:
            await self._explore(view)
            return
        if trigger is None:
            trigger, self._memory = evaluate(
                view,
                self._made_for,
                self._memory,
                self.settings.thresholds,
                self.observer.allowed(self.policy.triggers),
                self.actor.rolling,
            )
        if trigger is not None:
            forced, self._forced = self._forced, None
            try:
                await self._decide(view, trigger)
            except (errors.Fenced, errors.StateUnavailable):
                self._forced = forced  # nothing is in force of it: it is still asked for
                raise
        elif self._rolling.retry_due and self.control.mode == ActMode.ACT and self.current is not None:
            await self._roll(self._renumbered(self.current), "retry of a halted rollout")

    async def _explore(self, view: PlanView) -> None:
        """The next step of the exploration under way, unless something makes it void."""
        trigger, self._memory = evaluate(
            view, self._made_for, self._memory, self.settings.thresholds, (), self.actor.rolling
        )
        if trigger is not None and trigger.cause in URGENT:
            await self._decide(view, trigger)
        else:
            await self.explorer.step(view)

    def view(self) -> PlanView:
        """The view of this moment."""
        grams = {family: self._accountant.grams_per_request(family) for family in self.objectives}
        return self.observer.view(self.objectives, self.current, self._boosts.by_family, grams)

    def _may_plan(self, view: PlanView) -> bool:
        """Nothing is planned before there is something to plan with."""
        if (
            self.control.mode == ActMode.OBSERVE
            or not self.objectives
            or self._clock.monotonic_s() < self._not_before_s
        ):
            return False
        if not any(n.node not in view.fleet.stale and n.devices for n in view.fleet.nodes):
            return False
        waited_s = view.now_s - self._started_at_s
        return self.observer.inputs.carbon is not None or waited_s >= self.settings.carbon.wait_s

    async def _regain(self) -> None:
        """Under a new epoch everything that readers need is written again, and the plan in force rolled out again."""
        self._epoch = self._authority.epoch
        self.records.open(self._epoch)
        await self._rolling.settle()
        if self.explorer.run is not None:
            self._forced = self.explorer.run.trigger
            self.explorer.drop("the role was lost")
            self.plans = [p for p in self.plans if not p.exploration] or self.plans
        await self._authority.write([Put(self._state.keys.objective(f), o) for f, o in self.objectives.items()])
        if self.current is None:
            return
        again = self._renumbered(self.current)
        self.plans[-1] = again
        await self.actor.republish(again.revision)
        if self.control.mode == ActMode.ACT:
            await self._roll(
                replace(again, revision=replace(again.revision, number=again.revision.number + 1)), "epoch"
            )

    # --- deciding -----------------------------------------------------------------------------------------------------

    async def _decide(self, view: PlanView, trigger: Trigger) -> None:
        if trigger.cause == "slo":
            self._boosts.breach(view)
            view = self.view()
        if self.explorer.run is not None and self.control.held:
            self.explorer.drop(self.control.held)
        self.last_trigger = trigger
        if not self.control.held and self.explorer.wants(view):
            if self.current is not None:
                self._made_for = made_for(view, self.current, math.inf)
            await self.explorer.begin(view, trigger)
            return
        view = replace(view, trigger=trigger.cause)
        await self._judge(view, view, trigger, await self.thinker.think(view, self.records.next_seed()))

    async def _judge(
        self,
        view: PlanView,
        judged: PlanView,
        trigger: Trigger,
        thought: Thought,
        decision: Decision | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """Record what was decided on `view`, and put it in force. `decision`: what the shell makes of the thought's."""
        verdict = judge(judged, trigger, decision or thought.decision, self.control)
        self.last = verdict
        plan, effect = verdict.plan, verdict.outcome
        if plan is not None:
            effect = self.records.count(trigger.cause, publish.moves(self.current, plan))
            plan = self._numbered(view, plan)
        if decision is not None:  # a replay compares with what the planner made
            verdict = replace(verdict, decision=thought.decision)
        await self.records.write(view, trigger, thought, verdict, effect, plan or self.current, versions)
        self._remember(view, verdict)  # not before: what could not be written has to trigger again
        if plan is not None:
            await self.put_in_force(plan)
        self.announce()

    def _numbered(self, view: PlanView, plan: Plan) -> Plan:
        """The plan with its number and where it comes from."""
        return replace(
            self._renumbered(plan),
            policy=self.policy.name,
            inputs=self.observer.stamps(),
            created_at_s=view.now_s,
            decision_id=self.records.id,
        )

    def _remember(self, view: PlanView, verdict: Verdict) -> None:
        """What the triggers compare with from now on, also when the plan was kept or only advised."""
        made = verdict.decision.plan if verdict.decision else None
        next_s = verdict.decision.next_tick_at_s if verdict.decision else view.now_s + RETRY_S
        plan = made or self.current
        if plan is None:
            self._not_before_s = self._clock.monotonic_s() + min(RETRY_S, 2.0)
            return
        if verdict.outcome in (FAILED, DEGRADED):
            next_s = min(next_s, view.now_s + RETRY_S)
        self._made_for = made_for(view, plan, next_s)

    # --- exploring (called by the explorer) ---------------------------------------------------------------------------

    def seed(self) -> int:
        """Of the next decision."""
        return self.records.next_seed()

    def rolled(self) -> tuple[RolloutState, str]:
        """Where the rollout of the plan in force stands, and why."""
        return self._rolling.state

    async def try_out(self, view: PlanView, trigger: Trigger, thought: Thought, refused: str) -> Plan:
        """Record a candidate; returns its plan, numbered. A refused one is not deployed."""
        step = thought.step
        why = f"{trigger.cause}: {trigger.why}; {step.why}" + (f"; refused: {refused}" if refused else "")
        assert step.plan is not None
        plan = self._numbered(view, replace(step.plan, exploration=True, why=why))
        moves = not refused and publish.moves(self.current, plan)
        effect = "refused" if refused else self.records.count(trigger.cause, moves, replans=False)
        verdict = Verdict(CANDIDATE, why, Decision(step.plan, why, math.inf))
        await self.records.write(view, trigger, thought, verdict, effect, self.current if refused else plan)
        return plan

    async def deploy(self, plan: Plan) -> None:
        """Put a plan in force in place of the candidate before it, and begin its rollout."""
        newer = self.current is None or self.current.revision < plan.revision
        plan = plan if newer and plan.revision.epoch == self._epoch else self._renumbered(plan)
        self._made_for = made_for(self.view(), plan, math.inf)
        await self.put_in_force(plan)
        self.announce()

    async def conclude(
        self, view: PlanView, trigger: Trigger, thought: Thought, decision: Decision, versions: Mapping[str, str]
    ) -> None:
        """Record a decision and put in force what it has become; a candidate that is deployed is no plan yet."""
        trial = self.current is not None and self.current.exploration
        if decision.plan is not None:
            decision = replace(decision, plan=replace(decision.plan, exploration=False))
        await self._judge(view, replace(view, current=None) if trial else view, trigger, thought, decision, versions)

    # --- acting -------------------------------------------------------------------------------------------------------

    async def put_in_force(self, plan: Plan) -> None:
        """The numbered plan becomes the plan in force and is rolled out."""
        kept = self.plans[:-1] if self.current is not None and self.current.exploration else self.plans
        self.plans = [*kept, plan][-self.settings.plans_kept :]
        self._disk.save_all("plans", self.plans)
        await self._roll(plan, plan.why)

    async def _roll(self, plan: Plan, why: str) -> None:
        self.plans[-1] = plan
        await self._rolling.begin(plan, why)

    async def stop(self) -> None:
        """End the rollout under way at a safe point; what it had begun goes on from there at the next start."""
        await self._rolling.settle()

    def _renumbered(self, plan: Plan) -> Plan:
        """The same plan under the next number of this epoch; numbers never go back, also across epochs."""
        number = self.current.revision.number if self.current else 0
        return replace(plan, revision=Revision(self._epoch, number + 1, 0))

    # --- what operators change (called by the service) ---------------------------------------------------------------

    async def operate(self, control: Control, plan: Plan | None = None, why: str = "") -> None:
        """Change mode, freeze or pin; `plan` is rolled out all the same. What is released is planned afresh."""
        async with self._lock:
            self._authority.demand()
            released = bool(self.control.held) and not control.held
            self.control = control
            self._disk.save("control", {"mode": control.mode.name, "frozen": control.frozen, "pinned": control.pinned})
            if plan is not None:
                view = self.view()
                self.explorer.drop(why or "another plan takes over")
                numbered = replace(self._renumbered(plan), why=why or plan.why, created_at_s=view.now_s)
                self._made_for = made_for(view, numbered, float("inf"))
                await self.put_in_force(numbered)
            elif control.held:
                await self.explorer.stop(self.view(), control.held)
            elif released:
                self._forced = Trigger("start", "the operator released the controller")
        self.announce()
        self.wake()

    async def replan(self, trigger: Trigger) -> DecisionRecord:
        """Decide now, whatever the triggers say."""
        async with self._lock:
            self._authority.demand()
            await self._decide(self.view(), trigger)
            assert self.records.last is not None, "every decision is recorded"
            return self.records.last

    async def set_objective(self, objective: Objective) -> str:
        """Put an accepted objective in force; returns what of it cannot be met, "" for nothing."""
        async with self._lock:
            await self._authority.write([Put(self._state.keys.objective(objective.family), objective)])
            self.objectives[objective.family] = objective
            self._disk.save_all("objectives", self.objectives.values())
            self.observer.windows.restart_budget(objective.family)
            view = replace(self.view(), trigger="objective")
        if not any(n.devices for n in view.fleet.nodes):
            return "not known yet: no node reports"
        self.wake()
        if self.explorer.wants(view):
            return ""  # what can be reached is measured next
        decision = (await self.thinker.think(view, self.settings.seed)).decision
        return decision.degraded or (decision.plan.degraded if decision.plan else "")
