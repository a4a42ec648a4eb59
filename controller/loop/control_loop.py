"""Control loop live: every tick read what is new, and let the core take its step.

The loop continues whatever is down. Without Redis it neither decides nor acts, and serving continues unchanged. It
leaves a silent node alone. It continues with an old reading. If a planner fails or takes too long, the last good plan
stays in force.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import structlog

from controller.accounting.accountant import Accountant
from controller.accounting.budgets import BudgetRungs
from controller.accounting.core.modelled_base import ModelledBase
from controller.accounting.core.served import Served
from controller.accounting.receipt_publisher import ReceiptPublisher
from controller.explore.core.exploration import TOTALS
from controller.explore.core.exploration_state import ExplorationTotals
from controller.loop.core.control import Change, ControlCore
from controller.loop.core.decision import ControlState
from controller.loop.core.loans import Loan
from controller.loop.core.saved_state import SavedState, budget_overrides, by_command_of_old, overrides
from controller.loop.core_ports import Signals
from controller.loop.demand_publisher import DemandPublisher
from controller.loop.live_ports import LiveControlPorts
from controller.observe.core.observation import Observation
from controller.observe.core.triggers import Trigger
from controller.observe.reader import ObservationReader
from controller.role.by_command import BY_COMMAND, FLEET, NO_RESET, TENANT_BUDGETS, ByCommand, KeptBudgets
from controller.role.disk_store import DiskStore
from controller.role.leadership import Leadership
from controller.settings import ControllerSettings
from trefoil.core import errors
from trefoil.core.brains import PlanView
from trefoil.core.errors import PlanError
from trefoil.core.objective import ActMode, Objective, ObjectiveMode
from trefoil.core.plan import DecisionRecord, Plan
from trefoil.core.plan_check import check_parts
from trefoil.runtime.clock import Clock
from trefoil.runtime.state import State


def load_by_command(disk: DiskStore, settings: ControllerSettings) -> ByCommand:
    """What stands by command on this disk; of what was lost nothing does, nor where the settings declare it."""
    if settings.declared:
        return NO_RESET
    stored, control, fleet = disk.load_all("objectives", Objective), disk.load_plain("control"), disk.load_plain(FLEET)
    found = disk.load(BY_COMMAND, ByCommand) or by_command_of_old(stored, settings, bool(control), bool(fleet))
    families, stopped = (
        tuple(sorted({o.family for o in stored}.intersection(marked))) for marked in (found.families, found.stopped)
    )
    return ByCommand(families, found.mode and bool(control), found.max_watts and bool(fleet), stopped)


def load_saved_state(disk: DiskStore, settings: ControllerSettings, objectives: Mapping[str, Objective]) -> SavedState:
    """Load what the last controller on this disk has left; `objectives` are those to begin with."""
    saved, counts = disk.load_plain("control"), disk.load_plain("counts")
    by_command = load_by_command(disk, settings)
    control = ControlState(
        ActMode[saved["mode"]] if by_command.mode else settings.act_mode,
        bool(saved.get("frozen", False)),
        bool(saved.get("pinned", False)),
    )
    plans = list(disk.load_all("plans", Plan))
    known = [plan for plan in plans if _has_known_parts(plan)]
    if known[-1:] != plans[-1:]:  # an older plan is in force, which no operator pinned
        control = replace(control, pinned=False)
    stopped = {name: one for name, one in objectives.items() if name in by_command.stopped}
    return SavedState(
        {name: one for name, one in objectives.items() if name not in stopped},
        known,
        control,
        disk.load(TOTALS, ExplorationTotals) or ExplorationTotals(),
        Counter(counts.get("replans", {})),
        Counter(counts.get("reconfigurations", {})),
        float(disk.load_plain(FLEET)["max_watts"]) if by_command.max_watts else settings.max_watts,
        by_command,
        stopped,
    )


def _has_known_parts(plan: Plan) -> bool:
    try:
        check_parts(plan)
    except PlanError as error:
        structlog.get_logger().warning("a stored plan is not used", plan=str(plan.revision), why=str(error))
        return False
    return True


class ControlLoop:
    """Control loop on asyncio: every step, and every change by an operator, ends before the next begins."""

    def __init__(
        self,
        core: ControlCore,
        ports: LiveControlPorts,
        settings: ControllerSettings,
        state: State,
        leadership: Leadership,
        reader: ObservationReader,
        accountant: Accountant,
        budget_rungs: BudgetRungs,
        disk: DiskStore,
        signals: Signals,
        clock: Clock,
    ) -> None:
        self.core, self.settings = core, settings
        self.rollout_runner, self.records = ports.rollout_runner, ports.records
        self._state, self._leadership, self._reader, self._accountant = state, leadership, reader, accountant
        self._clock, self._signals, self.budget_rungs = clock, signals, budget_rungs
        self._log = structlog.get_logger()
        self._demand = DemandPublisher(state.keys, reader, leadership, clock)
        self._receipts = ReceiptPublisher(settings, state.keys, accountant.receipts, leadership, clock)
        self._lock = asyncio.Lock()
        self._commands = 0  # that wait for the lock or have it
        self.observation.windows.load_budgets(disk.load_plain("budgets"), clock.now_s())
        for name, value in core.kept_objectives().items() if core.objectives or core.stopped else ():
            disk.save_later(name, value)
        if core.budgets != (disk.load(TENANT_BUDGETS, KeptBudgets) or KeptBudgets()):
            disk.save_later(TENANT_BUDGETS, core.budgets)
        if differing := self.overrides():
            self._log.warning("commands win over the settings", differing=differing, remedy=BACK)

    @property
    def observation(self) -> Observation:
        """Observation that the core plans by."""
        return self.core.observation

    @property
    def clock(self) -> Clock:
        """Clock that the loop goes by."""
        return self._clock

    def view(self) -> PlanView:
        """View of this moment."""
        return self.core.view()

    def overrides(self) -> list[str]:
        """What is in force and differs from the settings, a line for each field."""
        core, stopped = self.core, self.core.stopped
        found = overrides(self.settings, {**core.objectives, **stopped}, core.control, core.max_watts, stopped)
        return found + budget_overrides(self.settings, core.budgets)

    def in_use(self) -> set[str]:
        """Families that are in service, run or are to run."""
        core = self.core
        return {*core.objectives, *self.observation.hosted(core.current, self._clock.now_s())}

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the loop forever, a tick a period or when woken."""
        while True:
            await self.tick()
            await self._signals.woken(self.settings.tick_s)

    async def tick(self) -> None:
        """Tick once: read, book energy, and take a step of control. Public so that tests can drive it."""
        self.rollout_runner.check()
        inputs = self.observation.inputs
        was_down = inputs.down
        await self._reader.refresh()
        if inputs.down:
            if not was_down:
                self._log.warning("no state: nothing is decided, the running plan stays", why=inputs.down)
            return
        await self._accountant.refresh(sorted(self.core.objectives), self.core.loans.lent)
        for family, objective in self.core.objectives.items():
            if objective.mode == ObjectiveMode.BUDGET:
                self.observation.windows.open_budget(family, objective.window_s, self._clock.now_s())
        if not self._leadership.epoch:
            return
        async with self._lock:
            try:
                await self._control()
            except errors.Fenced as error:
                self._log.warning("no decision: the role was lost", error=str(error))
            except errors.StateUnavailable as error:
                self._log.warning("no decision: Redis is down", error=str(error))
            except errors.DiskUnavailable:
                return  # said once by the store, and by Explain and the metric for as long as it lasts

    async def _control(self) -> None:
        await self.core.enter_epoch(self._leadership.epoch)
        await self._demand.publish()
        await self._receipts.publish(self.core.current)
        await self.budget_rungs.publish(self.core.budgets.by_key)
        await self.core.step()
        await self._leadership.copy_files()

    async def stop(self) -> None:
        """Stop the rollout under way at a safe point; what it had begun continues from there at the next start."""
        await self.rollout_runner.settle()

    # --- what operators change (called by the service) ---------------------------------------------------------------

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """An operator's turn; raises errors.Unavailable when too many wait for theirs: each may take a decision."""
        if self._commands >= COMMANDS_MAX:
            raise errors.Unavailable(
                f"{self._commands} commands wait already", remedy="wait for one's answer, then send"
            )
        self._commands += 1
        try:
            async with self._lock:
                yield
        finally:
            self._commands -= 1

    async def operate(
        self, control: ControlState, plan: Plan | None = None, why: str = "", mode_by_command: bool | None = None
    ) -> None:
        """Change mode, freeze or pin: `ControlCore.operate`, with what it raises."""
        async with self._turn():
            self._leadership.require()
            await self.core.operate(control, plan, why, mode_by_command)
            await self._leadership.copy_files()  # before it is answered: the next controller must know
        self._signals.wake()

    async def replan(self, trigger: Trigger) -> DecisionRecord:
        """Decide now for this trigger, whatever the others say; returns the record."""
        async with self._turn():
            self._leadership.require()
            await self.core.replan(trigger)
            assert self.records.last is not None, "every decision is recorded"
            return self.records.last

    async def lend(self, loan: Loan, *, force: bool = False) -> None:
        """Lend a device, or renew its loan: `ControlCore.lend`, with what it raises."""
        async with self._turn():
            self._leadership.require()
            await self.core.lend(loan, force=force)

    async def end_loan(self, device: str, holder: str) -> None:
        """End a loan: the next tick plans with the device again. One that has ended already is not an error.

        Raises:
            errors.SettingError: it is lent to another holder.
        """
        async with self._turn():
            self._leadership.require()
            loan = self.core.loans.lent.get(device)
            if loan is not None and loan.holder != holder:
                raise errors.SettingError(
                    f"lent to {loan.holder}, not to {holder}", field="device", value=device, remedy="leave it to them"
                )
            self.core.loans.end(device)
        self._signals.wake()

    async def decision(self, name: str) -> tuple[DecisionRecord, Plan | None] | None:
        """Decision by id, as `DecisionRecords.find`."""
        return await self.records.find(name, self._state)

    def served(self) -> tuple[float, list[Served], ModelledBase]:
        """What was served of late, over how many seconds, and the model of BASE that totals go by."""
        return *self._accountant.served(self.core.objectives, self._clock.now_s()), self._accountant.base

    def not_believed(self) -> list[str]:
        """What was read of late and is not gone by, a line each: values, and the clock of this machine."""
        fault = self._accountant.clock_fault()
        return [*self.observation.inputs.set_aside.lines(self._clock.now_s()), *([fault] if fault else [])]

    async def set_objectives(self, make: Callable[[], Change | None]) -> str:
        """Put a change in force: `ControlCore.set_objectives`, with what it raises; returns what cannot be met of it,
        "" for nothing. `make` is called once nothing else can change what it reads; None: nothing changes.
        """
        async with self._turn():
            if (change := make()) is None:
                return ""
            view = await self.core.set_objectives(change)
        return await self.core.unmet_objectives(view)

    async def change_budgets(self, change: Callable[[KeptBudgets], KeptBudgets]) -> None:
        """Change tenants' budgets: `ControlCore.change_budgets`, with what it raises."""
        async with self._turn():
            self._leadership.require()
            self.core.change_budgets(change)
            await self._leadership.copy_files()  # before it is answered: the next controller must know
        self._signals.wake()

    async def set_service(self, family: str, *, serves: bool) -> str:
        """Take a family out of service, or bring it back: `ControlCore.set_service`, with what it raises; returns what
        cannot be met then.
        """
        async with self._turn():
            self._leadership.require()
            view = await self.core.set_service(family, serves)
            await self._leadership.copy_files()
        self._signals.wake()
        return await self.core.unmet_objectives(view) if serves else ""


BACK: Final = (
    "go back by trefoil objective set --reset, objective fleet --reset, budget set --reset, mode --reset, "
    "freeze --off, pin --off or family start"
)
COMMANDS_MAX: Final = 16
