"""What stands by an operator's command, and no longer by the settings."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from trefoil.core.objective import Budget, BudgetKey, zone_of

FLEET: Final = "fleet_objective"  # under which the watt cap is saved
BY_COMMAND: Final = "by_command"
TENANT_BUDGETS: Final = "tenant_budgets"


@dataclass(frozen=True, slots=True)
class ByCommand:
    """What stands by an operator's command: objectives of families, the mode, the fleet's watt cap, and which families
    are stopped: their objectives are kept, and out of service."""

    families: tuple[str, ...] = ()
    mode: bool = False
    max_watts: bool = False
    stopped: tuple[str, ...] = ()

    def after(self, families: Collection[str], max_watts: bool, reset: "ByCommand") -> "ByCommand":
        """What stands by command after a command for these; `reset` goes back to the settings."""
        commanded = {*self.families, *families} - {*reset.families}
        cap = (self.max_watts or max_watts) and not reset.max_watts
        return replace(self, families=tuple(sorted(commanded)), max_watts=cap)


NO_RESET: Final = ByCommand()


@dataclass(frozen=True, slots=True)
class KeptBudgets:
    """Budgets in force, and those that stand by command; one of these that is not in force was cleared by command."""

    budgets: tuple[Budget, ...] = ()
    by_command: tuple[BudgetKey, ...] = ()

    def __post_init__(self) -> None:
        for one in self.budgets:
            zone_of(one.time_zone)  # of a file that was changed by hand

    @property
    def by_key(self) -> dict[BudgetKey, Budget]:
        """Budgets by tenant and family."""
        return {one.key: one for one in self.budgets}

    def after(self, key: BudgetKey, budget: Budget | None, *, by_command: bool) -> "KeptBudgets":
        """What is kept once a budget is replaced; None: cleared. `by_command`: whether it wins over the settings."""
        found = {name: one for name, one in self.by_key.items() if name != key}
        if budget is not None:
            found[key] = budget
        marks = {*self.by_command} - {key} | ({key} if by_command else set())
        return KeptBudgets(tuple(found[name] for name in sorted(found)), tuple(sorted(marks)))


NO_BUDGETS: Final = KeptBudgets()
