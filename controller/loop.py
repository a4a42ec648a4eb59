"""The control loop: every tick observe, ask the triggers, and when one fires decide, record and act.

It goes on whatever is down: without Redis it neither decides nor acts and serving stays as it is; a silent node is left
alone; an old reading is carried; a planner that fails, or takes too long, leaves the last good plan in force.
"""

import asyncio
from collections import Counter
from dataclasses import replace

import structlog

from controller import publish
from controller.act import Actor
from controller.authority import Authority
from controller.boosts import Boosts
from controller.decide import ADVISED, DEGRADED, FAILED, NEW, Control, Verdict, judge, think
from controller.disk import Disk
from controller.observe import Observer
from controller.report import Accountant
from controller.settings import ControllerSettings
from controller.terms import best_way, early
from controller.triggers import MadeFor, Memory, Trigger, evaluate, made_for
from trefoil.core import errors
from trefoil.core.brains import Decision, Planner, PlanView
from trefoil.core.common import Revision
from trefoil.core.objective import ActMode, Objective, ObjectiveMode
from trefoil.core.plan import DecisionRecord, Plan, RolloutState
from trefoil.core.policies import Policy
from trefoil.runtime import codec
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Append, Put
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics

RETRY_S = 10.0  # after a decision that found no plan


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
        self.settings, self.policy, self.planner = settings, policy, planner
        self._state, self._authority, self.observer = state, authority, observer
        self.actor, self._accountant, self._disk, self._metrics, self._clock = actor, accountant, disk, metrics, clock
        self._log = structlog.get_logger()
        self.objectives: dict[str, Objective] = {o.family: o for o in disk.load_all("objectives", Objective)}
        self.plans: list[Plan] = list(disk.load_all("plans", Plan))
        saved = disk.load_plain("control")
        self.control = Control(
            ActMode[saved.get("mode", settings.act_mode.name)],
            bool(saved.get("frozen", False)),
            bool(saved.get("pinned", False)),
        )
        counts = disk.load_plain("counts")
        self.causes: Counter[str] = Counter(counts.get("replans", {}))
        self.reconfigurations: Counter[str] = Counter(counts.get("reconfigurations", {}))
        self.last: Verdict | None = None
        self.last_trigger: Trigger | None = None
        self._made_for: MadeFor | None = None
        self._memory = Memory()
        self._boosts = Boosts(settings.slo_boost_ratio, settings.slo_boost_max)
        self._forced: Trigger | None = None
        self._not_before_s = 0.0
        self._epoch = 0
        self._count = 0
        self._rolling: asyncio.Task[None] | None = None
        self._retry_at_s: float | None = None
        self._demand_at_s = 0.0
        self._started_at_s = clock.now_s()
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._abandoned: asyncio.Future[Decision] | None = None
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
        if self._rolling is not None and self._rolling.done():
            self._rolling.result()  # a bug in the rollout ends the process
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
        await self._publish_demand()
        view = self.view()
        publish.gauge(self._metrics, view, self.control, self.actor.rollout, self.last)
        self._boosts.wear(view)
        if not self._may_plan(view):
            return
        trigger = self._forced
        if trigger is None:
            trigger, self._memory = evaluate(
                view,
                self._made_for,
                self._memory,
                self.settings.thresholds,
                self.policy.triggers,
                self.actor.rolling,
            )
        if trigger is not None:
            self._forced = None
            await self._decide(view, trigger)
        elif self._retry_at_s is not None and self._clock.monotonic_s() >= self._retry_at_s:
            await self._retry()

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
        await self._settle()
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

    async def _decide(self, view: PlanView, trigger: Trigger) -> DecisionRecord:
        if trigger.cause == "slo":
            self._boosts.breach(view)
            view = self.view()
        view = replace(view, trigger=trigger.cause)
        seed = self._next_seed()
        started_s = self._clock.monotonic_s()
        decision, hit = await self._think(view, seed)
        solve_ms = (self._clock.monotonic_s() - started_s) * 1e3
        verdict = judge(view, trigger, decision, self.control)
        self.last, self.last_trigger = verdict, trigger
        self._remember(view, verdict)
        plan, effect = verdict.plan, verdict.outcome
        record_id = f"{self._epoch}.{self._count:06d}"
        if plan is not None:
            moves = publish.moves(self.current, plan)
            effect = "reconfigure" if moves else "reroute"
            self.causes[trigger.cause] += 1
            self.reconfigurations[trigger.cause] += moves
            plan = replace(
                self._renumbered(plan),
                policy=self.policy.name,
                inputs=self.observer.stamps(),
                created_at_s=view.now_s,
                decision_id=record_id,
            )
            self._metrics.inc("trefoil_replans_total", cause=trigger.cause)
            if moves:
                self._metrics.inc("trefoil_reconfigurations_total", cause=trigger.cause)
        revision = plan.revision if plan else self.current.revision if self.current else Revision()
        versions = publish.versions(self.settings.planner or self.policy.planner, verdict, effect)
        record = DecisionRecord(
            id=record_id, revision=revision, trigger=trigger.cause, policy=self.policy.name,
            view_json=codec.to_json(view), seed=seed, why=verdict.why, versions=versions,
            at_s=view.now_s, solve_ms=solve_ms, wall_limit_hit=hit,
        )  # fmt: skip
        await self._record(record, verdict)
        if plan is not None:
            await self.put_in_force(plan)
        self.announce()
        return record

    async def _think(self, view: PlanView, seed: int) -> tuple[Decision, bool]:
        """The planner in a thread of its own, abandoned after the wall limit."""
        if self._abandoned is not None and not self._abandoned.done():
            why = "the planner is still busy with an abandoned decision"
            return Decision(None, why, view.now_s + RETRY_S, why), True
        self._abandoned = None
        future = asyncio.get_running_loop().run_in_executor(None, think, view, self.planner, seed)
        done, _ = await asyncio.wait((future,), timeout=self.settings.solve_timeout_s)
        if done:
            return future.result(), False
        self._abandoned = future
        why = f"the planner took more than solve_timeout_s = {self.settings.solve_timeout_s:g} s"
        return Decision(None, why, view.now_s + RETRY_S, why), True

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

    async def _record(self, record: DecisionRecord, verdict: Verdict) -> None:
        made = verdict.decision.plan if verdict.decision else None
        await asyncio.to_thread(self._disk.save_decision, record, made)
        self._disk.save("budgets", self.observer.windows.dump_budgets())
        self._disk.save("counts", {"replans": self.causes, "reconfigurations": self.reconfigurations})
        outcome = NEW if verdict.outcome == ADVISED else verdict.outcome
        self._metrics.inc("trefoil_decisions_total", trigger=record.trigger, outcome=outcome)
        self._metrics.observe("trefoil_solve_duration_seconds", record.solve_ms / 1e3, planner=self.policy.planner)
        self._log.info(
            "decision", id=record.id, trigger=record.trigger, outcome=verdict.outcome,
            effect=record.versions["effect"], rung=verdict.rung, solve_ms=round(record.solve_ms, 1), why=verdict.why,
        )  # fmt: skip
        await self._authority.write([Append(self._state.keys.decisions(), record, self.settings.decisions_max)])

    # --- acting -------------------------------------------------------------------------------------------------------

    async def put_in_force(self, plan: Plan) -> None:
        """The numbered plan becomes the plan in force and is rolled out."""
        self.plans = [*self.plans, plan][-self.settings.plans_kept :]
        self._disk.save_all("plans", self.plans)
        await self._roll(plan, plan.why)

    async def _roll(self, plan: Plan, why: str) -> None:
        await self._settle()
        self._retry_at_s = None
        self.plans[-1] = plan
        self._log.info("roll out", revision=str(plan.revision), why=why)
        self._rolling = asyncio.create_task(self._run_rollout(plan), name="rollout")

    async def _run_rollout(self, plan: Plan) -> None:
        started_s = self._clock.monotonic_s()
        view = self.view()
        try:
            ended = await self.actor.roll(
                plan,
                lambda stands, target: best_way(view, stands, target),
                lambda stands, target: early(view, stands, target),
            )
        except errors.Fenced as error:
            self._log.warning("rollout ended: the role was lost", error=str(error))
            return
        if ended.state == RolloutState.HALTED:
            self._retry_at_s = self._clock.monotonic_s() + self.settings.rollout.retry_s
        if ended.state == RolloutState.DONE:
            self._metrics.observe("trefoil_rollout_duration_seconds", self._clock.monotonic_s() - started_s)
        self.wake()

    async def _retry(self) -> None:
        """Try a halted rollout again: the load may have fallen, an agent may be back."""
        if self.control.mode == ActMode.ACT and self.current is not None:
            await self._roll(self._renumbered(self.current), "retry of a halted rollout")

    async def stop(self) -> None:
        """End the rollout under way at a safe point; what it had begun goes on from there at the next start."""
        await self._settle()

    async def _settle(self) -> None:
        """End the rollout under way where that is safe."""
        if self._rolling is not None:
            self.actor.supersede()
            await self._rolling
            self._rolling = None

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
                numbered = replace(self._renumbered(plan), why=why or plan.why, created_at_s=view.now_s)
                self._made_for = made_for(view, numbered, float("inf"))
                await self.put_in_force(numbered)
            elif released:
                self._forced = Trigger("start", "the operator released the controller")
        self.announce()
        self.wake()

    async def replan(self, trigger: Trigger) -> DecisionRecord:
        """Decide now, whatever the triggers say."""
        async with self._lock:
            self._authority.demand()
            return await self._decide(self.view(), trigger)

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
        decision, _ = await self._think(view, self.settings.seed)
        self.wake()
        return decision.degraded or (decision.plan.degraded if decision.plan else "")

    # --- small parts --------------------------------------------------------------------------------------------------

    def _next_seed(self) -> int:
        if self._count == 0:
            ids = [i.split(".")[1] for i in self._disk.decision_ids() if i.startswith(f"{self._epoch}.")]
            self._count = max((int(i) for i in ids), default=0)
        self._count += 1
        return self.settings.seed * 1_000_003 + self._count

    async def _publish_demand(self) -> None:
        """Arrivals per second and forecast of each family, once a second."""
        now_s = self._clock.now_s()
        if now_s - self._demand_at_s >= 1.0:
            self._demand_at_s = now_s
            writes = publish.demand(self._state.keys, self.observer, now_s)
            if writes:
                await self._authority.write(writes)
