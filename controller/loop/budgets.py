"""Commands on tenants' budgets, and what they answer."""

from collections.abc import Collection
from typing import Any

from controller.accounting.budgets import BudgetUse
from controller.accounting.core.budgets import accept_budget
from controller.loop.control_loop import ControlLoop
from controller.loop.declared import DeclaredSettings
from controller.role.by_command import KeptBudgets
from protos.controller.v1 import controller_pb2 as pb
from trefoil.core import errors
from trefoil.core.objective import Budget, BudgetKey, whose_budget
from trefoil.runtime import codec
from trefoil.runtime.given.catalog_files import CatalogFiles


class BudgetCommands:
    """Part of gRPC service `Controller`: budgets of tenants."""

    _loop: ControlLoop
    _files: CatalogFiles
    _declared: DeclaredSettings

    async def SetBudget(self, request: Any, context: Any) -> Any:
        """Set a budget, or go back to the settings'; answers what of it is spent."""
        self._declared.refuse("budgets")
        wanted: Budget = codec.from_proto(request.budget)
        await self._files.refresh_for([wanted.family] if wanted.family else [])
        stated = self._loop.settings.stated_budgets

        def change(kept: KeptBudgets) -> KeptBudgets:
            if request.reset:
                found = stated.get(wanted.key)
                if found is None and wanted.key not in {*kept.by_key, *kept.by_command}:
                    raise _unknown(wanted.key, [*kept.by_key, *stated])
                accepted = found and accept_budget(found, kept.by_key, self._files.catalog)
                return kept.after(wanted.key, accepted, by_command=False)
            accepted = accept_budget(wanted, kept.by_key, self._files.catalog, request.expected_number)
            return kept.after(wanted.key, accepted, by_command=True)

        await self._loop.change_budgets(change)
        use = next((_wire(one) for one in self._budget_uses() if one.budget.key == wanted.key), None)
        return pb.SetBudgetResponse(use=use)

    async def ClearBudget(self, request: Any, context: Any) -> Any:
        """Take a budget away."""
        self._declared.refuse("budgets")
        key, stated = (request.tenant, request.family), self._loop.settings.stated_budgets

        def change(kept: KeptBudgets) -> KeptBudgets:
            if key not in kept.by_key:
                raise _unknown(key, kept.by_key)
            return kept.after(key, None, by_command=key in stated)

        await self._loop.change_budgets(change)
        return pb.ClearBudgetResponse()

    async def GetBudgets(self, request: Any, context: Any) -> Any:
        """Every budget, with what of it is spent, and its rung."""
        return pb.GetBudgetsResponse(budgets=[_wire(one) for one in self._budget_uses()])

    def _budget_uses(self) -> list[BudgetUse]:
        return self._loop.budget_rungs.uses(self._loop.core.budgets.by_key)


def _unknown(key: BudgetKey, known: Collection[BudgetKey]) -> errors.NotFound:
    names = sorted({whose_budget(*one) for one in known})
    return errors.NotFound(
        "no such budget", field="tenant, family", value=whose_budget(*key),
        remedy=errors.one_of(names, whose_budget(*key), none="trefoil budget set"),
    )  # fmt: skip


def _wire(use: BudgetUse) -> Any:
    joules, co2 = use.costs or (None, None)
    rung: Any = int(use.rung)  # as the generated stubs take it
    found = pb.BudgetUse(budget=codec.to_proto(use.budget), grams=co2, joules=joules, rung=rung)
    found.free_at.FromSeconds(int(use.free_at_s))
    return found
