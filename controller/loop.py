"""The control loop live: every tick read what is new, let the core take its step, and carry out what it wants.

It goes on whatever is down: without Redis it neither decides nor acts and serving stays as it is; a silent node is left
alone; an old reading is carried; a planner that fails, or takes too long, leaves the last good plan in force.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import structlog

from controller import publish
from controller.act import Actor
from controller.authority import Authority
from controller.core.control import ControlCore, Kept
from controller.core.decide import Control
from controller.core.effects import (
    Announce,
    Count,
    Evaluated,
    OpenRecords,
    Recorded,
    Remember,
    Republish,
    Roll,
    Save,
    Say,
    Settle,
    Steps,
    Tell,
    Think,
    Viewed,
    Wake,
    WriteObjectives,
)
from controller.core.evaluations import Totals
from controller.core.exploration import TOTALS
from controller.core.observation import Observation
from controller.core.triggers import Trigger
from controller.disk import Disk
from controller.observe import Reader
from controller.perform import Signals, T, perform
from controller.records import Records
from controller.report import Accountant
from controller.settings import ControllerSettings
from controller.thinker import Thinker
from trefoil.core import errors
from trefoil.core.brains import PlanView
from trefoil.core.objective import ActMode, Objective, ObjectiveMode
from trefoil.core.plan import DecisionRecord, Plan
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Put
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics


def kept(disk: Disk, settings: ControllerSettings, objectives: Mapping[str, Objective]) -> Kept:
    """What the last controller on this disk has left; `objectives` are those to begin with."""
    saved, counts = disk.load_plain("control"), disk.load_plain("counts")
    control = Control(
        ActMode[saved.get("mode", settings.act_mode.name)],
        bool(saved.get("frozen", False)),
        bool(saved.get("pinned", False)),
    )
    return Kept(
        dict(objectives),
        list(disk.load_all("plans", Plan)),
        control,
        Totals(**disk.load_plain(TOTALS)),
        Counter(counts.get("replans", {})),
        Counter(counts.get("reconfigurations", {})),
    )


class Loop:
    """The core's shell on one event loop: every step, and every change by an operator, ends before the next begins."""

    def __init__(
        self,
        core: ControlCore,
        settings: ControllerSettings,
        state: State,
        authority: Authority,
        reader: Reader,
        actor: Actor,
        accountant: Accountant,
        thinker: Thinker,
        disk: Disk,
        metrics: Metrics,
        signals: Signals,
        clock: Clock,
    ) -> None:
        self.core, self.settings, self.actor, self.thinker = core, settings, actor, thinker
        self._state, self._authority, self._reader, self._accountant = state, authority, reader, accountant
        self._disk, self._metrics, self._clock, self._signals = disk, metrics, clock, signals
        self._log = structlog.get_logger()
        budgets = self.seen.windows.dump_budgets
        self.records = Records(settings, core.policy, state.keys, authority, disk, metrics, budgets)
        self._demand = publish.DemandSeries(state.keys, self.seen, authority, clock)
        self._receipts = publish.ReceiptSeries(settings, state.keys, accountant.receipts, authority, clock)
        self._lock = asyncio.Lock()
        self.seen.windows.load_budgets(disk.load_plain("budgets"), clock.now_s())
        disk.save_all("objectives", core.objectives.values())

    @property
    def seen(self) -> Observation:
        """What is observed."""
        return self.core.seen

    @property
    def changed(self) -> asyncio.Condition:
        """Notified when plan, rollout or mode has changed."""
        return self._signals.changed

    @property
    def clock(self) -> Clock:
        """What it goes by."""
        return self._clock

    def view(self) -> PlanView:
        """The view of this moment."""
        self.core.at.now_s, self.core.at.monotonic_s = self._clock.now_s(), self._clock.monotonic_s()
        return self.core.view()

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tick for ever."""
        while True:
            await self.tick()
            await self._signals.woken(self.settings.tick_s)

    async def tick(self) -> None:
        """One round. Public so that tests can drive it."""
        self.actor.check()
        inputs = self.seen.inputs
        was_down = inputs.down
        await self._reader.refresh()
        if inputs.down:
            if not was_down:
                self._log.warning("blind: nothing is decided, what runs goes on", why=inputs.down)
            return
        await self._accountant.refresh(sorted(self.core.objectives))
        for family, objective in self.core.objectives.items():
            if objective.mode == ObjectiveMode.BUDGET:
                self.seen.windows.open_budget(family, objective.window_s, self._clock.now_s())
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
        await self._perform(self.core.enter(self._authority.epoch))
        await self._demand.publish()
        await self._receipts.publish(self.core.current)
        await self._perform(self.core.step())

    async def stop(self) -> None:
        """End the rollout under way at a safe point; what it had begun goes on from there at the next start."""
        await self.actor.settle()

    # --- carrying out -------------------------------------------------------------------------------------------------

    async def _perform(self, steps: Steps[T]) -> T:
        return await perform(steps, self._carry_out, self.core.at, self._clock)

    async def _carry_out(self, effect: Any) -> Any:
        match effect:
            case Viewed(view):
                refused = self.seen.held(view.now_s).rung
                publish.gauge(self._metrics, view, self.core.control, self.actor.rollout, self.core.last, refused)
            case Think(view, seed, asks):
                return await self.thinker.think(view, seed, asks)
            case Tell(candidate, measurement):
                self.thinker.tell(candidate, measurement)
            case Remember():
                self.thinker.save()
            case OpenRecords(epoch):
                return self.records.newest(epoch)
            case Recorded():
                await self.records.write(effect)
            case WriteObjectives(objectives):
                await self._authority.write([Put(self._state.keys.objective(o.family), o) for o in objectives])
            case Roll(plan, why):
                await self.actor.begin(plan, why, self.view)
            case Settle():
                await self.actor.settle()
            case Republish(revision):
                await self.actor.republish(revision)
            case Save(name, value):
                self._disk.save(name, value)
            case Count(name, amount, labels, gauge):
                (self._metrics.set if gauge else self._metrics.inc)(name, amount, **labels)
            case Say(event, fields, level):
                (self._log.warning if level == "warning" else self._log.info)(event, **fields)
            case Evaluated():
                told = effect.told
                spent = {"spent_s": round(told.spent_s, 1), "spent_j": round(told.spent_j, 1)}
                self._log.info("evaluation", text=effect.text, **spent)
            case Wake():
                self._signals.wake()
            case Announce():
                self._signals.announce()
            case _:
                raise AssertionError(f"control wants {effect}, which nobody carries out")
        return None

    # --- what operators change (called by the service) ---------------------------------------------------------------

    async def operate(self, control: Control, plan: Plan | None = None, why: str = "") -> None:
        """Change mode, freeze or pin; `plan` is rolled out all the same. What is released is planned afresh."""
        async with self._lock:
            self._authority.demand()
            await self._perform(self.core.operate(control, plan, why))
        self._signals.announce()
        self._signals.wake()

    async def replan(self, trigger: Trigger) -> DecisionRecord:
        """Decide now, whatever the triggers say."""
        async with self._lock:
            self._authority.demand()
            await self._perform(self.core.replan(trigger))
            assert self.records.last is not None, "every decision is recorded"
            return self.records.last

    async def set_objective(self, objective: Objective) -> str:
        """Put an accepted objective in force; returns what of it cannot be met, "" for nothing."""
        async with self._lock:
            view = await self._perform(self.core.set_objective(objective))
        return await self._perform(self.core.foresee(view))
