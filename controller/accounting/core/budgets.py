"""Budgets of tenants: whether one is acceptable, what of it is spent, and the rung that follows.

Data: books by hour and family, as reports read them; budgets.
Decision: the rung of each budget.
Formulation: spend = sum over the hours of a day, joules (or grams) of a family x the tenant's share of that hour
    (`trefoil.core.accounting.tenant_shares`). used = the largest of spend / limit. A rung is reached where used is at
    least its BEGINS. One that was reached stays until used is BACK below its beginning, or until the next day: a share
    of an hour falls while others ask. An hour of UTC belongs to the day in which it begins in the budget's time zone.
Deviations: none.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import date, datetime, tzinfo
from typing import Final

from trefoil.core.accounting import tenant_shares
from trefoil.core.catalog import Catalog
from trefoil.core.errors import InvalidInput, StaleRevision, one_of
from trefoil.core.objective import Budget, BudgetKey, BudgetRung, whose_budget, zone_of
from trefoil.core.outside.plausible import hour_starts_s
from trefoil.core.outside.ranges import complaint
from trefoil.core.units import HOUR_S

BEGINS: Final[Mapping[BudgetRung, float]] = {
    BudgetRung.JOBS_WAIT: 0.8,
    BudgetRung.LOWER_ACCURACY: 0.9,
    BudgetRung.REFUSED: 1.0,
}
"""Part of a budget that is spent where a rung begins."""
BACK: Final = 0.05
DAY_HOURS_MAX: Final = 26  # of the longest day, with the hour under way
BUDGETS_MAX: Final = 1000
TENANT: Final = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

Costs = tuple[float, float]
"""Joules and grams."""
HourSpend = Mapping[str, Mapping[str, Costs]]
"""Costs of an hour by family and tenant."""


def hour_spend(families: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Costs]]:
    """Costs of an hour by family and tenant, from its sums by family; those of no request have a part as well. A family
    that was not metered is left out."""
    return {
        family: {
            tenant: (sums["joules"] * share, sums.get("grams", 0.0) * share)
            for tenant, share in tenant_shares(sums).items()
        }
        for family, sums in families.items()
        if "joules" in sums
    }


def _day_of(hour_s: float, zone: tzinfo) -> date:
    return datetime.fromtimestamp(hour_s, zone).date()


def day_of(now_s: float, zone: tzinfo) -> date:
    """Day that the hour under way belongs to."""
    return _day_of(now_s // HOUR_S * HOUR_S, zone)


def free_at_s(now_s: float, zone: tzinfo) -> float:
    """When the next day begins, at a whole hour of UTC [s]."""
    today, hour_s = day_of(now_s, zone), now_s // HOUR_S * HOUR_S
    while _day_of(hour_s, zone) <= today:
        hour_s += HOUR_S
    return hour_s


def spent(budget: Budget, hours: Mapping[str, HourSpend], now_s: float) -> Costs | None:
    """Costs of the day so far that count towards a budget; None: nothing of it was metered."""
    zone = zone_of(budget.time_zone)
    today, joules, co2, metered = day_of(now_s, zone), 0.0, 0.0, False
    for hour, families in hours.items():
        starts_s = hour_starts_s(hour)
        if starts_s is None or _day_of(starts_s, zone) != today:
            continue
        for family, tenants in families.items():
            if budget.family in ("", family):
                metered = True
                for tenant, costs in tenants.items():
                    if budget.tenant in ("", tenant):
                        joules, co2 = joules + costs[0], co2 + costs[1]
    return (joules, co2) if metered else None


def used_of(budget: Budget, costs: Costs | None) -> float:
    """Part of a budget that is spent; 0 where nothing was metered."""
    return budget.used(*costs) if costs is not None else 0.0


def rung_of(used: float, before: BudgetRung) -> BudgetRung:
    """Rung of a budget of which a part is spent. `before`: the rung that it was on in this day."""
    reached = max((rung for rung, begins in BEGINS.items() if used >= begins), default=BudgetRung.WITHIN)
    left = max((rung for rung, begins in BEGINS.items() if used >= begins - BACK), default=BudgetRung.WITHIN)
    return max(reached, min(before, left))


def accept_budget(
    wanted: Budget, stored: Mapping[BudgetKey, Budget], catalog: Catalog, expected_number: int = 0
) -> Budget:
    """Accept a budget: with the next number.

    Raises:
        InvalidInput: naming field, value and remedy.
        StaleRevision: another command has changed it since.
    """
    number = stored[wanted.key].number if wanted.key in stored else 0
    if expected_number and expected_number != number:
        raise StaleRevision(
            f"the stored budget of {whose_budget(*wanted.key)} has number {number}, not {expected_number}",
            remedy="read it again, then repeat",
        )
    if not number and len(stored) >= BUDGETS_MAX:
        remedy = "take one away: trefoil budget clear"
        raise InvalidInput(f"{BUDGETS_MAX} budgets are the most", field="tenant", value=wanted.tenant, remedy=remedy)
    if not (wanted.tenant or wanted.family):
        raise InvalidInput("neither tenant nor family", field="tenant", value="", remedy="name one of the two, or both")
    if wanted.tenant and not TENANT.fullmatch(wanted.tenant):
        remedy = "write its name of the dispatchers' tenants_file: letters, digits, . _ -, at most 63"
        raise InvalidInput("cannot be a tenant's name", field="tenant", value=wanted.tenant, remedy=remedy)
    known = [family.name for family in catalog.families]
    if wanted.family and wanted.family not in known:
        raise InvalidInput(
            "no such family in the model repository", field="family", value=wanted.family,
            remedy=one_of(known, wanted.family),
        )  # fmt: skip
    _check_numbers(wanted)
    zone_of(wanted.time_zone)
    return replace(wanted, number=number + 1, time_zone=wanted.time_zone or "UTC")


def _check_numbers(wanted: Budget) -> None:
    limits = {"grams_per_day": wanted.grams_per_day, "joules_per_day": wanted.joules_per_day}
    for name, value in limits.items():
        if not value >= 0:
            raise InvalidInput("must be above 0", field=name, value=value, remedy="set it, or leave it out for none")
        if why := complaint(name, value):
            raise InvalidInput(why, field=name, value=value, remedy="correct it")
    if not any(limits.values()):
        remedy = "set it, or joules_per_day; `trefoil budget clear` takes a budget away"
        raise InvalidInput("must be above 0", field="grams_per_day", value=0, remedy=remedy)
    if not 0 <= wanted.least_accuracy <= 1:
        raise InvalidInput(
            "must be a fraction", field="least_accuracy", value=wanted.least_accuracy, remedy="write e.g. 0.9 for 90 %"
        )
