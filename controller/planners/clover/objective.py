"""CLOVER's objective: Eq. 1 to 7.

Source: CLOVER section 4.1, Fig. 6 (where configuration B at 500 g/kWh is 2.2, not the 3.2 that is printed).
Data: joules per request, accuracy and tail latency of a configuration; intensity; lambda; C_base, A_base.
Formulation, in percent (so that the temperature of 1 has the paper's meaning):
  dA = (A - A_base) / A_base, dC = (C_base - E ci) / C_base, f = lambda dC + (1 - lambda) dA
  h = -f min(1, L_tail / L), P = exp(-(h' - h) / T).
Deviations: Eq. 6 multiplies f by a number below 1 when the SLA is violated. Where f < 0 that raises f: the worse the
violation, the better the score. Fixed by dividing a negative f instead; `literal` keeps the text's form. An accuracy
threshold (Fig. 14b) is punished in the same way, by the ratio of the loss that is allowed to the loss. PUE multiplies
C_base and E ci alike and cancels out.
"""

import math
from dataclasses import dataclass, field

from numpy.random import Generator

from trefoil.core.units import J_PER_KWH

ACCURACY_EPS = 1e-9


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a configuration. Refused or broken off: infinite latencies. Joules None: unmetered."""

    joules: float | None
    accuracy: float
    p95_ms: float
    p99_ms: float
    attainment: float
    rate_per_s: float
    at_s: float = field(default=0.0, compare=False)

    @property
    def failed(self) -> bool:
        """Whether nothing can be said of it but that it must not run."""
        return self.joules is None or not math.isfinite(self.p95_ms)


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal of a family now. `intensity` [g/kWh], `base_j` [J/request], `accuracy_min` 0: none."""

    weight: float
    intensity: float
    base_j: float
    base_intensity: float
    base_accuracy: float
    slo_ms: float
    quantile: float
    accuracy_min: float = 0.0
    literal: bool = False

    @property
    def base_g(self) -> float:
        """Carbon of BASE, C_base [g/request]."""
        return self.base_j * self.base_intensity / J_PER_KWH

    def gains(self, outcome: Outcome) -> tuple[float, float]:
        """Gains (dC, dA) [%] of Eq. 2 and 1."""
        assert outcome.joules is not None
        return self.deltas(outcome.joules, outcome.accuracy)

    def deltas(self, joules: float, accuracy: float) -> tuple[float, float]:
        """Gains (dC, dA) [%] of joules per request and an accuracy."""
        carbon = delta_carbon(joules * self.intensity / J_PER_KWH, self.base_g)
        return carbon, delta_accuracy(accuracy, self.base_accuracy)

    def value(self, outcome: Outcome) -> float:
        """Objective f of Eq. 3 [%]; minus infinity for what failed."""
        return -math.inf if outcome.failed else weighted(self.weight, *self.gains(outcome))

    def tail_ms(self, outcome: Outcome) -> float:
        """Tail latency that the SLO is about [ms]."""
        return outcome.p95_ms if self.quantile <= 0.95 else outcome.p99_ms

    def ratio(self, outcome: Outcome) -> float:
        """Ratio of SLO and threshold kept: 1 = both met; else how near it comes, in (0, 1)."""
        tail_ms = self.tail_ms(outcome)
        ratio = min(1.0, self.slo_ms / tail_ms) if tail_ms > 0 else 1.0
        if outcome.accuracy < self.accuracy_min - ACCURACY_EPS:
            allowed = max(ACCURACY_EPS, self.base_accuracy - self.accuracy_min)
            ratio *= min(1.0, allowed / max(ACCURACY_EPS, self.base_accuracy - outcome.accuracy))
        return ratio

    def feasible(self, outcome: Outcome) -> bool:
        """Whether an outcome is within the SLO and at or above the accuracy threshold."""
        return not outcome.failed and self.ratio(outcome) >= 1.0

    def score(self, outcome: Outcome) -> float:
        """Score h of Eq. 6: what annealing minimises."""
        if outcome.failed:
            return math.inf
        return annealing_energy(self.value(outcome), self.ratio(outcome), self.literal)


def delta_accuracy(accuracy: float, base: float) -> float:
    """Change of accuracy against BASE, Eq. 1 [%]."""
    return (accuracy - base) / base * 100.0


def delta_carbon(carbon: float, base: float) -> float:
    """Saving of carbon against BASE, Eq. 2 [%]; both in the same unit per request."""
    return (base - carbon) / base * 100.0


def weighted(weight: float, carbon: float, accuracy: float) -> float:
    """Objective f of Eq. 3 [%]."""
    return weight * carbon + (1.0 - weight) * accuracy


def annealing_energy(value: float, ratio: float, literal: bool = False) -> float:
    """Score h of Eq. 6 with ratio = min(1, L_tail / L); fixed for value < 0 unless `literal`."""
    assert 0 < ratio <= 1
    return -value / ratio if value < 0 and not literal else -value * ratio


def accepts(now: float, new: float, temperature: float, rng: Generator) -> bool:
    """Acceptance of Eq. 7: better always, worse with exp(-(h' - h) / T). Draws only where chance decides."""
    if new <= now:
        return True
    return math.isfinite(new) and bool(rng.random() < math.exp(-(new - now) / temperature))
