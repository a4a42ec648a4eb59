"""Margin on demand after SLO breaches: what was predicted to suffice did not."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from trefoil.core.brains import PlanView
from trefoil.core.demand import Measured, ScaleSignal
from trefoil.core.objective import Objective


@dataclass(slots=True)
class SloMargin:
    """Margin on the p90 demand of each family after SLO breaches, as a ratio: raised by `step` up to `limit`, worn off
    in `wear_s`."""

    step: float = 0.15
    limit: float = 0.6
    wear_s: float = 60.0
    by_family: dict[str, float] = field(default_factory=dict)
    _worn_at_s: float | None = None

    def raise_on_breach(self, view: PlanView, signals: Iterable[ScaleSignal] = ()) -> None:
        """Raise the margin of every family that misses its SLO now, or whose governors want capacity, by `step` up to
        `limit`.
        """
        wanted = {o.family: o for o in view.objectives}
        short = {m.family for m in view.measured if m.family in wanted and _missed(m, wanted[m.family])}
        for family in sorted(short | {family for signal in signals for family in signal.families}):
            self.by_family[family] = min(self.limit, self.by_family.get(family, 0.0) + self.step)

    def wear_off(self, view: PlanView) -> None:
        """Lower the margin of every family that meets its SLO, `limit` in `wear_s`."""
        passed_s = view.now_s - self._worn_at_s if self._worn_at_s is not None else 0.0
        self._worn_at_s = view.now_s
        wanted = {o.family: o for o in view.objectives}
        for measured in view.measured:
            boost, objective = self.by_family.get(measured.family, 0.0), wanted.get(measured.family)
            if boost and objective is not None and not _missed(measured, objective):
                self.by_family[measured.family] = max(0.0, boost - self.limit * max(0.0, passed_s) / self.wear_s)


def _missed(measured: Measured, objective: Objective) -> bool:
    return measured.slo_attainment < objective.slo_quantile or bool(measured.tokens.short_of(objective.token_slo))
