"""Rungs of tenants' budgets, as the controller decided them: what a tenant's requests and jobs may have now.

Data: `TenantRungs`, which the controller publishes on each change and every 20 s, and the time it is from.
Decision: the rung of a tenant and a family: the highest of its budgets, of the tenant, the family, or both.
Formulation: rungs hold for KEEP_S after they were published, and each to the end of its budget's day: without a
    controller every tenant is served. Of what was published the newest counts, by epoch and time, while it holds.
    Unsigned, by epoch alone: the time may be forged, and the leader writes its own again within seconds.
Deviations: none.
"""

import math
from collections import Counter
from dataclasses import replace
from typing import Final

from trefoil.core.objective import BudgetKey, BudgetRung, TenantRung, TenantRungs, whose_budget
from trefoil.core.units import format_time

KEEP_S: Final = 60.0


class BudgetLadder:
    """Rungs in force. Times are of one clock [UTC s]."""

    def __init__(self) -> None:
        self._rungs: dict[BudgetKey, TenantRung] = {}
        self._ahead_s = 0.0  # of the controller's clock
        self._until_s = 0.0
        self._newest = (0, 0.0)
        self.refused: Counter[BudgetKey] = Counter()
        """Requests that were refused, by tenant and family."""

    def set(self, told: TenantRungs, own_s: float, *, signed: bool = True) -> None:
        """Go by these rungs. `own_s`: when they were published, by this clock. `signed`: by the controller."""
        newest = told.epoch, told.observed_at_s if signed else 0.0
        if newest < self._newest and own_s < self._until_s:
            return
        self._newest, self._until_s, self._ahead_s = newest, own_s + KEEP_S, told.observed_at_s - own_s
        self._rungs = {(one.tenant, one.family): one for one in told.rungs if one.rung}

    def find(self, tenant: str, family: str, now_s: float) -> TenantRung | None:
        """Rung of a tenant's requests to a family, with the lowest accuracy that its budgets allow; None: none."""
        if not self._rungs or now_s >= self._until_s:
            return None
        keys = ((tenant, family), (tenant, ""), ("", family)) if tenant else (("", family),)
        known = (self._rungs.get(key) for key in keys)
        found = [one for one in known if one is not None and now_s + self._ahead_s < one.free_at_s]
        if not found:
            return None
        highest = max(found, key=lambda one: (one.rung, one.free_at_s))
        least = [one.least_accuracy for one in found if one.rung >= BudgetRung.LOWER_ACCURACY and one.least_accuracy]
        return replace(highest, least_accuracy=min(least, default=0.0))

    def wait_s(self, rung: TenantRung, now_s: float) -> float:
        """Time until the budget of a rung is free again [s]."""
        return max(0.0, rung.free_at_s - self._ahead_s - now_s)

    def refusal(self, rung: TenantRung, now_s: float) -> str:
        """Why a request is refused, and when it will not be."""
        minutes = math.ceil(self.wait_s(rung, now_s) / 60)
        return (
            f"{whose(rung)} is spent. Remedy: try again at {format_time(rung.free_at_s)}, "
            f"in {minutes // 60} h {minutes % 60} min, or ask the operator for more"
        )


def jobs_wait(rung: TenantRung) -> str:
    """Why jobs of a tenant wait."""
    return f"{whose(rung)} is on rung {rung.rung.text}: jobs wait until {format_time(rung.free_at_s)}"


def whose(rung: TenantRung) -> str:
    """Which budget a rung is of, in words."""
    return f"the budget of {whose_budget(rung.tenant, rung.family)}, {rung.limits},"
