"""Control loop as a pure core: it decides by itself (`DecidingCore`), and operators change what it decides by.

Each command is saved before it is in force: what cannot be kept is refused, and nothing has changed.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from controller.loop.core.deciding import DecidingCore
from controller.loop.core.decision import ControlState
from controller.loop.core.loans import Loan, refuse_loan
from controller.observe.core.plannable import check_obeyed
from controller.observe.core.triggers import OPERATOR, Trigger, plan_basis
from controller.planners.fleet_power import check_power
from controller.role.by_command import BY_COMMAND, FLEET, NO_RESET, TENANT_BUDGETS, ByCommand, KeptBudgets
from trefoil.core import errors
from trefoil.core.brains import PlanView
from trefoil.core.objective import ActMode, Objective
from trefoil.core.plan import Plan


@dataclass(frozen=True, slots=True)
class Change:
    """Change of what is wanted: accepted objectives, the fleet's watt cap [W] (0: none), which families are stopped,
    the mode, all budgets; None: unchanged. `reset`: which of them are the settings', and no command's."""

    objectives: Sequence[Objective] = ()
    max_watts: float | None = None
    reset: ByCommand = NO_RESET
    stopped: Collection[str] | None = None
    mode: ActMode | None = None
    budgets: KeptBudgets | None = None


class ControlCore(DecidingCore):
    """State machine of the control loop, with what operators change."""

    async def operate(
        self, control: ControlState, plan: Plan | None = None, why: str = "", mode_by_command: bool | None = None
    ) -> None:
        """Change mode, freeze or pin; `plan` is rolled out all the same. What is released is planned afresh.

        `mode_by_command`: whether the mode wins over the settings from now on; None: as before.

        Raises:
            errors.DiskUnavailable: it cannot be kept; nothing is changed.
        """
        marks = self.by_command if mode_by_command is None else replace(self.by_command, mode=mode_by_command)
        held = {"control": control.plain(), BY_COMMAND: marks}
        if plan is not None:
            view = self.view()
            numbered = replace(self._renumbered(plan), why=why or plan.why, created_at_s=view.now_s)
            plans = self._plans_with(numbered)
            self.ports.save(held | {"plans": plans})
            self.control, self.plans, self.by_command = control, plans, marks
            self.explorer.abandon(why or "another plan takes over")
            self.plan_basis = plan_basis(view, numbered, math.inf)
            await self._roll(numbered, numbered.why)
            return
        self.ports.save(held)
        self.by_command = marks
        await self._enter(control)

    async def _enter(self, control: ControlState) -> None:
        """Go by this mode, freeze and pin, which are kept already."""
        before, self.control = self.control, control
        if control.hold_reason:
            await self.explorer.stop(self.view(), control.hold_reason, self.current)
        elif before.hold_reason:
            self.pending_trigger = Trigger("start", "the operator released the controller")

    async def replan(self, trigger: Trigger) -> None:
        """Decide now for this trigger, whatever the others say."""
        await self._decide(self.view(), trigger)

    async def lend(self, loan: Loan, *, force: bool = False) -> None:
        """Lend a device: others are planned around it, and it holds what the loan says. Asked again, it is renewed.

        Raises:
            errors.SettingError: plans are not carried out now, or the device is lent to another holder.
            errors.Unavailable: without it objectives would be missed (not asked with `force`), or no plan has it.
            errors.DiskUnavailable, errors.Fenced, errors.StateUnavailable: nothing has changed.
        """
        before = self.loans.lent.get(loan.device)
        if before is not None and (before.holder, before.planned) == (loan.holder, loan.planned):
            self.loans.lent[loan.device] = loan
            return
        held = self.control.hold_reason or ("" if self.explorer.live is None else f"{self.policy.name} measures")
        refuse_loan(loan, before, held)
        self.loans.lent[loan.device] = loan
        kept = False
        try:
            if before is None and not force:
                missed = await self._missed(self.view())
                if missed:
                    raise errors.Unavailable(
                        f"the others would miss their objectives without it: {missed}", field="device",
                        value=loan.device, remedy="wait for less load, or take it anyway (--replace)",
                    )  # fmt: skip
            await self._decide(self.view(), Trigger(OPERATOR, f"{loan.device} is lent to {loan.holder}"))
            kept = self.current is not None and loan.planned in [d for n in self.current.nodes for d in n.devices]
            if not kept:
                why = self.last_verdict.why if self.last_verdict is not None else ""
                raise errors.Unavailable(f"no plan has it: {why}", field="device", value=loan.device)
        finally:
            if not kept:
                self.loans.lent.pop(loan.device)
                if before is not None:
                    self.loans.lent[loan.device] = before

    async def _missed(self, view: PlanView) -> str:
        """What of the objectives a plan on this view would miss, in words; "" for nothing."""
        decision = (await self.ports.think(view, self.settings.seed)).decision
        if decision.plan is not None:
            try:
                check_power(view, decision.plan)
                check_obeyed(view, decision.plan)
            except errors.PlanError as error:
                return str(error)
        return decision.degraded or (decision.plan.degraded if decision.plan else "")

    async def set_objectives(self, change: Change) -> PlanView:
        """Put a change in force, all or nothing; returns the view that it is judged on.

        Raises:
            errors.DiskUnavailable, errors.Fenced, errors.StateUnavailable: it is not in force.
        """
        cap = self.max_watts if change.max_watts is None else change.max_watts
        wanted = {objective.family: objective for objective in change.objectives}
        known = {**self.objectives, **self.stopped, **wanted}
        out = {*(self.stopped if change.stopped is None else change.stopped)}
        marks = self.by_command.after(wanted, change.max_watts is not None, change.reset)
        marks = replace(marks, stopped=tuple(sorted(out)))
        held: dict[str, Any] = {"objectives": list(known.values()), FLEET: {"max_watts": cap}}
        control = self.control if change.mode is None else replace(self.control, mode=change.mode)
        if change.mode is not None:
            marks, held["control"] = replace(marks, mode=not change.reset.mode), control.plain()
        if change.budgets is not None:
            held[TENANT_BUDGETS] = change.budgets
        self.ports.save(held | {BY_COMMAND: marks})
        back = [known[family] for family in sorted(self.stopped.keys() - wanted.keys() - out)]
        try:
            await self.ports.write_objectives((*change.objectives, *back))
        except (errors.Fenced, errors.StateUnavailable):
            before = {"control": self.control.plain(), TENANT_BUDGETS: self.budgets}
            for name, value in {**self.kept_objectives(), **before}.items():
                if name in held or name == BY_COMMAND:
                    self.ports.save_later(name, value)
            raise
        self.max_watts, self.by_command = cap, marks
        self.budgets = self.budgets if change.budgets is None else change.budgets
        self.stopped = {name: one for name, one in known.items() if name in out}
        self.objectives = {name: one for name, one in known.items() if name not in out}
        if change.mode is not None:
            await self._enter(control)
        for family in wanted:
            self.observation.windows.restart_budget(family)
        return replace(self.view(), trigger="objective")

    async def set_service(self, family: str, serves: bool) -> PlanView:
        """Take a family out of service, or bring it back; returns the view that is planned on from now on.

        Raises:
            errors.NotFound: it has no objective.
            errors.DiskUnavailable, errors.Fenced, errors.StateUnavailable: nothing has changed.
        """
        known = {**self.objectives, **self.stopped}
        if family not in known:
            raise errors.NotFound(
                "no objective of this family", field="family", value=family, remedy=errors.one_of(sorted(known), family)
            )
        if (family in self.objectives) != serves:
            stopped = self.stopped.keys() ^ {family}
            marks = replace(self.by_command, stopped=tuple(sorted(stopped)))
            self.ports.save({BY_COMMAND: marks})
            if serves:
                try:
                    await self.ports.write_objectives((known[family],))
                except (errors.Fenced, errors.StateUnavailable):
                    self.ports.save_later(BY_COMMAND, self.by_command)
                    raise
            self.by_command = marks
            self.stopped = {name: one for name, one in known.items() if name in stopped}
            self.objectives = {name: one for name, one in known.items() if name not in stopped}
        return replace(self.view(), trigger="objective")

    def change_budgets(self, change: Callable[[KeptBudgets], KeptBudgets]) -> None:
        """Change tenants' budgets, which no plan depends on.

        Raises:
            errors.DiskUnavailable: nothing has changed. And what `change` raises.
        """
        kept = change(self.budgets)
        if kept != self.budgets:
            self.ports.save({TENANT_BUDGETS: kept})
            self.budgets = kept

    def kept_objectives(self) -> dict[str, Any]:
        """What is kept of the objectives in force, by the names of the files."""
        objectives, fleet = [*self.objectives.values(), *self.stopped.values()], {"max_watts": self.max_watts}
        return {BY_COMMAND: self.by_command, "objectives": objectives, FLEET: fleet}

    async def unmet_objectives(self, view: PlanView) -> str:
        """Objectives that cannot be met, in words; "" for none."""
        if not any(n.devices for n in view.fleet.nodes):
            return "not known yet: no node reports"
        self.ports.wake()
        if not self.objectives:
            return ""
        if self.explorer.wants_to_explore(view):
            return ""  # what can be reached is measured next
        return await self._missed(view)
