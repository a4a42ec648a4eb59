"""Budgets of tenants as JSON values, and as lines of `trefoil status`."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from trefoil.core.objective import Budget, BudgetRung, whose_budget
from trefoil.runtime import codec

BUDGETS_UNKNOWN: Final = "budgets: unknown to this controller, which is older"


def budget_rows(uses: Iterable[Any]) -> list[dict[str, Any]]:
    """Rows of `BudgetUse` messages. `used`: part that is spent; None: nothing was metered."""
    found = []
    for use in uses:
        budget: Budget = codec.from_proto(use.budget)
        metered = use.HasField("joules")
        spent = {name: getattr(use, name) if metered else None for name in ("grams", "joules")}
        used = budget.used(use.joules, use.grams) if metered else None
        rung = BudgetRung(use.rung).text
        found.append(codec.to_plain(budget) | spent | {"used": used, "rung": rung, "free_at_s": use.free_at.seconds})
    return found


def budget_line(row: Mapping[str, Any]) -> str:
    """Budget in a line: what of it is spent, and its rung."""
    limits = Budget(grams_per_day=row["grams_per_day"], joules_per_day=row["joules_per_day"]).limits
    used = "nothing was metered" if row["used"] is None else f"{row['used']:.0%} spent"
    return f"budget of {whose_budget(row['tenant'], row['family'])}, {limits}: {used}, {row['rung']}"
