"""FIXED: the clock that the plan gives, for as long as it gives it.

Source: none: what every policy does that leaves clocks to its planner, or alone.
Data: the planned range. Decision: its upper end; 0 = unlocked, where the plan gives none. Never asks for a time.
Deviations: none.
"""

import math

from trefoil.core.brains import ClockDecision, GovernorView


class Fixed:
    """Governor that holds the clock of the plan; stateless."""

    def step(self, view: GovernorView) -> ClockDecision:
        """Decide for the upper end of the planned range."""
        high_mhz = view.range_mhz[1]
        why = f"the plan's {high_mhz} MHz" if high_mhz else "the plan gives no clock"
        return ClockDecision(high_mhz, why, math.inf, scale_out=False)
