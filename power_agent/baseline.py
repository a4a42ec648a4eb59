"""The power of a device that serves and has nothing to do, learned while it has nothing to do.

CONTRACTS: baseline power is the measured minimum at that clock. Data: quiet intervals, in which every slice served, no
counter and no sensor showed any work, and the clock stood still. Their mean power over at least QUIET_S is a
measurement (one interval alone may hold a batch that Triton has not counted yet); the lowest one at each clock stands.
Until a clock has one, and where a measurement is absurd, the device type's idle power scaled to that clock stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

QUIET_S: Final = 5.0
PLAUSIBLE: Final = (0.2, 2.0)  # of the device type's: outside it something else was at work


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was learned [W by MHz], and the quiet stretch that is not long enough yet."""

    learned: tuple[tuple[int, float], ...] = ()
    quiet_s: float = 0.0
    quiet_j: float = 0.0
    clock_mhz: int = 0

    def watts(self, clock_mhz: float, fallback_w: float) -> float:
        """At that clock; between two clocks (it changed meanwhile) nothing was measured."""
        return next((watts for clock, watts in self.learned if clock == clock_mhz), fallback_w)

    def quiet(self, clock_mhz: int, length_s: float, joules: float, typical_w: float) -> "Baseline":
        """After an interval in which nothing was done."""
        known = clock_mhz == self.clock_mhz
        total_s = length_s + (self.quiet_s if known else 0.0)
        total_j = joules + (self.quiet_j if known else 0.0)
        if total_s < QUIET_S:
            return replace(self, quiet_s=total_s, quiet_j=total_j, clock_mhz=clock_mhz)
        return Baseline(_lowest(self.learned, clock_mhz, total_j / total_s, typical_w), clock_mhz=clock_mhz)

    def busy(self) -> "Baseline":
        """After any other interval."""
        return replace(self, quiet_s=0.0, quiet_j=0.0) if self.quiet_s else self


def _lowest(
    learned: Sequence[tuple[int, float]], clock_mhz: int, watts: float, typical_w: float
) -> tuple[tuple[int, float], ...]:
    if not PLAUSIBLE[0] * typical_w <= watts <= PLAUSIBLE[1] * typical_w:
        return tuple(learned)
    by_clock = dict(learned)
    by_clock[clock_mhz] = min(watts, by_clock.get(clock_mhz, watts))
    return tuple(sorted(by_clock.items()))
