"""After an SLO breach: plan for more than the demand, since what was predicted to suffice did not.

Data: measured attainment and the objective's quantile. State: a ratio per family.
Formulation: a breach adds `step` up to `limit`; while the SLO is met the ratio wears off, `limit` in `wear_s`:
short where a breach is a burst, long where the profile is too good, or each wearing off ends in the next breach.
Deviations: none.
"""

from dataclasses import dataclass, field

from trefoil.core.brains import PlanView


@dataclass(slots=True)
class Boosts:
    """By how much the p90 demand of each family is raised."""

    step: float
    limit: float
    wear_s: float = 60.0
    by_family: dict[str, float] = field(default_factory=dict)
    _worn_at_s: float | None = None

    def breach(self, view: PlanView) -> None:
        """Raise the boost of every family that misses its SLO now."""
        quantiles = {o.family: o.slo_quantile for o in view.objectives}
        for measured in view.measured:
            if measured.slo_attainment < quantiles.get(measured.family, 0.0):
                self.by_family[measured.family] = min(self.limit, self.by_family.get(measured.family, 0.0) + self.step)

    def wear(self, view: PlanView) -> None:
        """Lower the boost of every family that meets its SLO, by the time since the last call."""
        passed_s = view.now_s - self._worn_at_s if self._worn_at_s is not None else 0.0
        self._worn_at_s = view.now_s
        quantiles = {o.family: o.slo_quantile for o in view.objectives}
        for measured in view.measured:
            boost = self.by_family.get(measured.family, 0.0)
            if boost and measured.slo_attainment >= quantiles.get(measured.family, 1.0):
                self.by_family[measured.family] = max(0.0, boost - self.limit * max(0.0, passed_s) / self.wear_s)
