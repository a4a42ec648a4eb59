"""Rungs of tenants' budgets, decided here alone from the books and published to the dispatchers.

A dispatcher obeys what was published last for a minute (dispatcher/service/core/tenant_rungs.py): a controller that is
lost refuses no request.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from controller.accounting.accountant import Accountant
from controller.accounting.core.budgets import Costs, HourSpend, day_of, free_at_s, rung_of, spent, used_of
from controller.accounting.receipt_publisher import REPEAT_S
from controller.role.leadership import Leadership
from trefoil.core.objective import Budget, BudgetKey, BudgetRung, TenantRung, TenantRungs, zone_of
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Put
from trefoil.runtime.keys import Keys
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.telemetry import Metrics

LOOK_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class BudgetUse:
    """What of a budget is spent, and its rung. `costs` None: nothing was metered; `free_at_s`: its next day begins."""

    budget: Budget
    costs: Costs | None
    rung: BudgetRung
    free_at_s: float


class BudgetRungs:
    """Rungs of all budgets; what they are is published when one changes, and repeated. Belongs to one event loop."""

    def __init__(
        self,
        keys: Keys,
        accountant: Accountant,
        leadership: Leadership,
        plan_keys: PlanKeys,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._keys, self._accountant, self._leadership = keys, accountant, leadership
        self._plan_keys, self._metrics, self._clock = plan_keys, metrics, clock
        self._reached: dict[tuple[BudgetKey, int, object], BudgetRung] = {}  # by budget, its number and day
        self._shown: set[BudgetKey] = set()
        self._published = TenantRungs()
        self._looked_s = -math.inf

    def uses(self, budgets: Mapping[BudgetKey, Budget]) -> list[BudgetUse]:
        """What of each budget is spent, and its rung, by tenant and family."""
        hours = self._accountant.spent() if budgets else {}
        return [self._use(budgets[key], hours) for key in sorted(budgets)]

    def _use(self, budget: Budget, hours: Mapping[str, HourSpend]) -> BudgetUse:
        now_s, zone = self._clock.now_s(), zone_of(budget.time_zone)
        costs = spent(budget, hours, now_s)
        before = self._reached.get((budget.key, budget.number, day_of(now_s, zone)), BudgetRung.WITHIN)
        return BudgetUse(budget, costs, rung_of(used_of(budget, costs), before), free_at_s(now_s, zone))

    async def publish(self, budgets: Mapping[BudgetKey, Budget]) -> None:
        """Decide and publish the rungs if it is time to, or if a budget has changed. A leader without budgets publishes
        once that there are none: State repairs the key only where this leader has written it.

        Raises:
            errors.Fenced, errors.StateUnavailable: they are not published; dispatchers continue by the last ones.
        """
        now_s, last, epoch = self._clock.now_s(), self._published, self._leadership.epoch
        if now_s - self._looked_s < LOOK_S or not (budgets or self._shown or last.rungs or last.epoch != epoch):
            return
        self._looked_s, uses = now_s, self.uses(budgets)
        self._reached = {
            (use.budget.key, use.budget.number, day_of(now_s, zone_of(use.budget.time_zone))): use.rung for use in uses
        }
        self._show(uses)
        rungs = tuple(
            TenantRung(*use.budget.key, use.rung, use.budget.limits, use.budget.least_accuracy, use.free_at_s)
            for use in uses
            if use.rung
        )
        if (rungs, epoch) != (last.rungs, last.epoch) or (rungs and now_s - last.observed_at_s >= REPEAT_S):
            told = self._plan_keys.sign_rungs(TenantRungs(rungs, epoch, now_s))
            await self._leadership.write([Put(self._keys.tenant_rungs(), told)])
            self._published = replace(told, signature="")

    def _show(self, uses: list[BudgetUse]) -> None:
        for key in self._shown - {use.budget.key for use in uses}:
            for name in ("trefoil_budget_rung", "trefoil_budget_used_ratio"):
                self._metrics.drop(name, *key)
        self._shown = {use.budget.key for use in uses}
        for use in uses:
            labels = {"tenant": use.budget.tenant, "family": use.budget.family}
            self._metrics.set("trefoil_budget_rung", use.rung, **labels)
            self._metrics.set("trefoil_budget_used_ratio", used_of(use.budget, use.costs), **labels)
