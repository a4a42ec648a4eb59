"""VPA_PLUS: one variant, on as many cores as Kubernetes' Vertical Pod Autoscaler recommends.

Source: InfAdapter section 5, VPA+: the recommender of kubernetes/autoscaler (pkg/recommender/logic: target =
90th percentile of the CPU use x 1.15), a new container before the old one goes, and no lower bound.
Data: the history of the variant's use (`PlanView.cpu_histories`: `trefoil/core/cpus/use.py`). Decision, every `tick_s`:
cores = percentile x margin, in steps of `core_step` upwards, from the smallest size that meets the SLO to the budget.
Settings: `version` of the variant (0: the most accurate), `initial_cores` while nothing was used yet (0: the budget).
Deviations: requests and use are of slices, not of containers; memory is not planned. Of preset `artifact` only the
least cores count. Several families share the budget evenly; of several devices the one with the most cores is taken.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from numpy.random import Generator
from pydantic import Field

from controller.planners.infadapter.capacity import Capacity
from controller.planners.infadapter.cpu_slices import (
    Choice,
    CpuInput,
    InfAdapterSettings,
    decide,
    read_cpus,
    refused,
    still_coming,
)
from trefoil.core.brains import Decision, PlanView
from trefoil.core.errors import CatalogError, InvalidInput


class VpaSettings(InfAdapterSettings):
    """Settings of VPA+ and of a fixed size."""

    REMOVED: ClassVar = {**InfAdapterSettings.REMOVED, "percentile": "call it quantile"}

    version: int = Field(default=0, ge=0)
    """Variant by its version; 0: the most accurate."""
    initial_cores: float = Field(default=0.0, ge=0)
    """Cores until the use is known; 0: the budget."""
    quantile: float = Field(default=0.9, gt=0, le=1)
    """Share of the use that the recommendation covers."""
    margin: float = Field(default=0.15, ge=0)
    """Share by which the recommendation exceeds that use."""


@dataclass(frozen=True, slots=True)
class VpaPlusPlanner:
    """Planner VPA_PLUS. Pure: the history is in the view."""

    settings: VpaSettings = VpaSettings()
    name: str = "vpa_plus"

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan the recommended size of one variant of each family."""
        settings = self.settings.of_all(sorted(view.objectives, key=lambda o: o.family))
        try:
            if coming := still_coming(view):
                return Decision(None, f"{self.name}: {coming}", view.now_s + settings.tick_s)
            cpu, chosen, words = read_cpus(view, settings), [], []
            device = max(cpu.room.cores, key=lambda name: (cpu.room.cores[name], name))
            most = min(cpu.room.budget, cpu.room.cores[device]) / max(1, len(cpu.capacities))
            for family, found in cpu.capacities.items():
                one = variant_of(found, settings.version)
                cores, why = self._cores(view, settings, cpu, family, one, most)
                chosen.append(Choice(device, family, one.variant.name, cores, cpu.wanted[family]))
                words.append(f"{family}: {why}")
            short = "; ".join(filter(None, (_short(cpu, choice) for choice in chosen)))
            return decide(cpu, self.name, chosen, "; ".join(words), short)
        except (InvalidInput, CatalogError) as error:
            return refused(self.name, error, view, settings)

    def _cores(
        self, view: PlanView, settings: VpaSettings, cpu: CpuInput, family: str, one: Capacity, most: float
    ) -> tuple[float, str]:
        step = cpu.room.step
        history = next((h for h in view.cpu_histories if (h.family, h.variant) == (family, one.variant.name)), None)
        wanted, why = settings.initial_cores or most, "no use is known yet"
        if self.name == "fixed_size":
            why = "a fixed size"
        elif history is not None and history.weights:
            used = history.percentile(settings.quantile)
            wanted = used * (1 + settings.margin)
            why = f"{settings.quantile:.0%} of the use is below {used:.2f} cores, {wanted:.2f} recommended"
        smallest = step * math.ceil(max(one.least, step) / step - 1e-9) if math.isfinite(one.least) else math.inf
        if smallest > most + 1e-9:
            raise InvalidInput(
                f"{one.variant.name} meets its SLO from {one.least:.2f} cores on", field="budget_cores", value=most,
                remedy="more cores, a smaller variant (version), or a later SLO",
            )  # fmt: skip
        units = math.ceil(max(wanted, smallest) / step - 1e-9)
        return min(units, math.floor(most / step + 1e-9)) * step, why


def variant_of(found: tuple[Capacity, ...], version: int) -> Capacity:
    """Variant by its version; 0: the most accurate.

    Raises:
        InvalidInput: there is none, or it has no profile.
    """
    if not version:
        return found[-1]
    for one in found:
        if one.variant.version == version:
            return one
    known = ", ".join(f"{one.variant.version} ({one.variant.name})" for one in found)
    raise InvalidInput("no such variant has a CPU profile", field="version", value=version, remedy=f"one of {known}")


def _short(cpu: CpuInput, one: Choice) -> str:
    known = next(c for c in cpu.capacities[one.family] if c.variant.name == one.variant)
    carried, wanted = known.per_s(one.cores), cpu.wanted[one.family]
    if carried >= wanted:
        return ""
    return f"short_of_capacity: {one.variant} carries {carried:.1f}/s on {one.cores:g} cores, {wanted:.1f}/s asked"
