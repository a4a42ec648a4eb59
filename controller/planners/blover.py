"""BLOVER: CLOVER without its graph: random search in the original problem space.

Source: CLOVER (SC 23) section 5.1: "all of CLOVER's design principles except the graph-based optimization"; scheme
`rand` of its artifact.
Data, decision: those of `clover`.
Formulation: a partition x_p and a variant per slice x_v are drawn at random. The best configuration that keeps the SLO
stays. Objective, limits and measurements are CLOVER's; the search has no centre and no temperature.
Deviations: none. The search does not recognise what an earlier round measured, except for the configuration that runs.
A point of the raw space hardly ever comes again.
"""

from collections.abc import Callable

from controller.planners.clover.planner import CloverPlanner
from controller.planners.clover.settings import CloverSettings
from trefoil.core.brains import PlanView
from trefoil.core.plan import Plan


def blover(settings: CloverSettings, refuses: Callable[[PlanView, Plan], str]) -> CloverPlanner:
    """BLOVER, with a policy's settings and a rollout check."""
    return CloverPlanner(settings, refuses, "blover", random=True)
