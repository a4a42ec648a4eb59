"""Control loop live: every tick read what is new, let the core take its step, and carry out its effects.

It goes on whatever is down: without Redis it neither decides nor acts and serving stays as it is; a silent node is left
alone; an old reading is carried; a planner that fails, or takes too long, leaves the last good plan in force.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import structlog

from controller.accounting.accountant import Accountant, ReceiptPublisher
from controller.accounting.core.modelled_base import ModelledBase
from controller.accounting.core.served import Served
from controller.explore.core.exploration import TOTALS
from controller.explore.core.exploration_state import ExplorationTotals
from controller.loop.core.control import ControlCore
from controller.loop.core.deciding import RETRY_S
from controller.loop.core.decision import ControlState, as_live_planner, ask_planner, run_planner
from controller.loop.core.effects import (
    CallPlanner,
    CandidateEvaluated,
    OpenRecords,
    PlannerAnswer,
    RecordDecision,
    Republish,
    RequireRoom,
    SavePlannerMemory,
    StartRollout,
    Steps,
    StopRollout,
    TellPlanner,
    UseView,
    WriteObjectives,
)
from controller.loop.core.loans import Loan
from controller.loop.core.saved_state import (
    BY_COMMAND,
    FLEET,
    NO_RESET,
    ByCommand,
    SavedState,
    by_command_of_old,
    overrides,
)
from controller.loop.core.triggers import Trigger
from controller.loop.decision_records import DecisionRecords
from controller.loop.disk_store import DiskStore
from controller.loop.effect_runner import Signals, T, perform_common, run_effects
from controller.loop.leadership import Leadership
from controller.observe.core.observation import Observation
from controller.observe.reader import DemandPublisher, ObservationReader, set_view_metrics
from controller.rollout.runner import RolloutRunner
from controller.settings import ControllerSettings
from trefoil.core import errors
from trefoil.core.brains import Candidate, Decision, Measurement, Planner, PlanView
from trefoil.core.errors import PlanError
from trefoil.core.objective import ActMode, Objective, ObjectiveMode
from trefoil.core.plan import DecisionRecord, Plan
from trefoil.core.plan_check import check_parts
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Put
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics


def load_by_command(disk: DiskStore, settings: ControllerSettings) -> ByCommand:
    """What stands by command on this disk; of what was lost nothing does."""
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


class PlannerRunner:
    """Runner of the planner, in a thread and within a wall limit. Its memory is saved on disk and recalled after a
    restart.
    """

    def __init__(self, planner: Planner, name: str, disk: DiskStore, clock: Clock, timeout_s: float) -> None:
        self.planner, self.live, self.name = planner, as_live_planner(planner), name
        self._disk, self._clock, self._timeout_s = disk, clock, timeout_s
        self._abandoned: asyncio.Future[Candidate | Decision] | None = None
        self._before = ""
        self._log = structlog.get_logger()
        saved = disk.load_plain(MEMORY)
        if self.live is not None and saved.get("planner") == name:
            self._recall(saved.get("memory", {}))

    async def call(self, view: PlanView, seed: int, asks: bool = False) -> PlannerAnswer:
        """Call the planner once. One that takes too long is abandoned: the answer is then to keep what runs."""
        if self._abandoned is not None:
            if not self._abandoned.done():
                return self._limit_hit(view, seed, "the planner is still busy with an abandoned decision")
            self._abandoned = None
            if self._before:  # what it did after it was abandoned is in no record
                self._recall(json.loads(self._before))
        self._before = self._memory()
        started_s = self._clock.monotonic_s()
        function = ask_planner if asks else run_planner
        future = asyncio.get_running_loop().run_in_executor(None, function, view, self.planner, seed)
        done, _ = await asyncio.wait((future,), timeout=self._timeout_s)
        solve_ms = (self._clock.monotonic_s() - started_s) * 1e3
        if done:
            return PlannerAnswer(future.result(), seed, solve_ms, False, self._before, asks)
        self._abandoned = future
        return self._limit_hit(
            view, seed, f"the planner took more than solve_timeout_s = {self._timeout_s:g} s", solve_ms
        )

    def tell(self, candidate: Candidate, measurement: Measurement) -> None:
        """Tell a planner that measures what came of its candidate, and save what it remembers."""
        assert self.live is not None
        self.live.tell(candidate, measurement)
        self.save()

    def save(self) -> None:
        """Save what the planner remembers now."""
        if self.live is not None:
            self._disk.save_later(MEMORY, {"planner": self.name, "memory": self.live.memory()})

    def _limit_hit(self, view: PlanView, seed: int, why: str, solve_ms: float = 0.0) -> PlannerAnswer:
        return PlannerAnswer(Decision(None, why, view.now_s + RETRY_S, why), seed, solve_ms, True, self._before)

    def _memory(self) -> str:
        if self.live is None:
            return ""
        return json.dumps(self.live.memory(), sort_keys=True, ensure_ascii=False)

    def _recall(self, memory: Mapping[str, Any]) -> None:
        assert self.live is not None
        try:
            self.live.recall(memory)
        except UNREADABLE as error:
            self._log.warning("the planner cannot recall what was saved; it begins anew", error=str(error))


class ControlLoop:
    """Control loop on asyncio: every step, and every change by an operator, ends before the next begins."""

    def __init__(
        self,
        core: ControlCore,
        settings: ControllerSettings,
        state: State,
        leadership: Leadership,
        reader: ObservationReader,
        rollout_runner: RolloutRunner,
        accountant: Accountant,
        planner_runner: PlannerRunner,
        disk: DiskStore,
        metrics: Metrics,
        signals: Signals,
        clock: Clock,
    ) -> None:
        self.core, self.settings = core, settings
        self.rollout_runner, self.planner_runner = rollout_runner, planner_runner
        self._state, self._leadership, self._reader, self._accountant = state, leadership, reader, accountant
        self._disk, self._metrics, self._clock, self._signals = disk, metrics, clock, signals
        self._log = structlog.get_logger()
        budgets = self.observation.windows.dump_budgets
        self.records = DecisionRecords(settings, core.policy, state.keys, leadership, disk, metrics, budgets)
        self._demand = DemandPublisher(state.keys, reader, leadership, clock)
        self._receipts = ReceiptPublisher(settings, state.keys, accountant.receipts, leadership, clock)
        self._lock = asyncio.Lock()
        self._commands = 0  # that wait for the lock or have it
        self.observation.windows.load_budgets(disk.load_plain("budgets"), clock.now_s())
        for name, value in core.kept_objectives().items() if core.objectives or core.stopped else ():
            disk.save_later(name, value)
        if differing := self.overrides():
            self._log.warning("commands win over the settings", differing=differing, remedy=BACK)

    @property
    def observation(self) -> Observation:
        """Observation that the core plans by."""
        return self.core.observation

    @property
    def changed(self) -> asyncio.Condition:
        """Condition that is notified when plan, rollout or mode has changed."""
        return self._signals.changed

    @property
    def clock(self) -> Clock:
        """Clock that the loop goes by."""
        return self._clock

    def view(self) -> PlanView:
        """View of this moment."""
        self.core.time.now_s, self.core.time.monotonic_s = self._clock.now_s(), self._clock.monotonic_s()
        return self.core.view()

    def overrides(self) -> list[str]:
        """What is in force and differs from the settings, a line for each field."""
        core, stopped = self.core, self.core.stopped
        return overrides(self.settings, {**core.objectives, **stopped}, core.control, core.max_watts, stopped)

    def in_use(self) -> set[str]:
        """Families that are in service, run or are to run."""
        core = self.core
        return {*core.objectives, *self.observation.hosted(core.current, self._clock.now_s())}

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the loop for ever, a tick a period or when woken."""
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
                self._log.warning("blind: nothing is decided, what runs goes on", why=inputs.down)
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
        await self._perform(self.core.enter_epoch(self._leadership.epoch))
        await self._demand.publish()
        await self._receipts.publish(self.core.current)
        await self._perform(self.core.step())
        await self._leadership.copy_files()

    async def stop(self) -> None:
        """Stop the rollout under way at a safe point; what it had begun goes on from there at the next start."""
        await self.rollout_runner.settle()

    # --- carrying out -------------------------------------------------------------------------------------------------

    async def _perform(self, steps: Steps[T]) -> T:
        return await run_effects(steps, self._carry_out, self.core.time, self._clock)

    async def _carry_out(self, effect: Any) -> Any:
        match effect:
            case UseView(view):
                refused = self.observation.plannable_carbon(view.now_s).rung
                aside = self.observation.inputs.set_aside.take_counts()
                set_view_metrics(
                    self._metrics, view, self.core.control, self.rollout_runner.rollout, self.core.last_verdict,
                    refused, aside,
                )  # fmt: skip
            case CallPlanner(view, seed, asks):
                return await self.planner_runner.call(view, seed, asks)
            case TellPlanner(candidate, measurement):
                self.planner_runner.tell(candidate, measurement)
            case SavePlannerMemory():
                self.planner_runner.save()
            case OpenRecords(epoch):
                return self.records.newest(epoch)
            case RequireRoom():
                self._disk.check()
            case RecordDecision():
                await self.records.write(effect)
            case WriteObjectives(objectives):
                await self._leadership.write([Put(self._state.keys.objective(o.family), o) for o in objectives])
            case StartRollout(plan, why):
                await self.rollout_runner.begin(plan, why, self.view)
            case StopRollout():
                await self.rollout_runner.settle()
            case Republish(revision):
                await self.rollout_runner.republish(revision)
            case CandidateEvaluated():
                measurement = effect.measurement
                spent = {"spent_s": round(measurement.spent_s, 1), "spent_j": round(measurement.spent_j, 1)}
                self._log.info("evaluation", text=effect.text, **spent)
            case _:
                perform_common(effect, self._disk, self._metrics, self._signals)
        return None

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
            await self._perform(self.core.operate(control, plan, why, mode_by_command))
            await self._leadership.copy_files()  # before it is answered: the next controller must know
        self._signals.announce()
        self._signals.wake()

    async def replan(self, trigger: Trigger) -> DecisionRecord:
        """Decide now for this trigger, whatever the others say; returns the record."""
        async with self._turn():
            self._leadership.require()
            await self._perform(self.core.replan(trigger))
            assert self.records.last is not None, "every decision is recorded"
            return self.records.last

    async def lend(self, loan: Loan, *, force: bool = False) -> None:
        """Lend a device, or renew its loan: `ControlCore.lend`, with what it raises."""
        async with self._turn():
            self._leadership.require()
            await self._perform(self.core.lend(loan, force=force))

    async def end_loan(self, device: str, holder: str) -> None:
        """End a loan: the next tick plans with the device again. One that has ended already is no error.

        Raises:
            errors.SettingError: it is lent to somebody else.
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

    async def set_objectives(
        self, objectives: Sequence[Objective], max_watts: float | None = None, reset: ByCommand = NO_RESET
    ) -> str:
        """Set accepted objectives in force: `ControlCore.set_objectives`, with what it raises; returns what cannot be
        met of them, "" for nothing.
        """
        async with self._turn():
            view = await self._perform(self.core.set_objectives(objectives, max_watts, reset))
        return await self._perform(self.core.unmet_objectives(view))

    async def set_service(self, family: str, *, serves: bool) -> str:
        """Take a family out of service, or bring it back: `ControlCore.set_service`, with what it raises; returns what
        cannot be met then.
        """
        async with self._turn():
            self._leadership.require()
            view = await self._perform(self.core.set_service(family, serves))
            await self._leadership.copy_files()
        self._signals.wake()
        return await self._perform(self.core.unmet_objectives(view)) if serves else ""


BACK: Final = (
    "go back by trefoil objective set --reset, objective fleet --reset, mode --reset, freeze --off, pin --off or "
    "family start"
)
COMMANDS_MAX: Final = 16
MEMORY: Final = "planner_memory"
UNREADABLE: Final = (errors.TrefoilError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
