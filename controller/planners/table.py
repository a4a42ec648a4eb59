"""The one table of planners: what `Policy.planner` names. A planner of one's own is given as module:Class instead."""

from collections.abc import Callable, Mapping
from typing import Final

from controller.planners.assemble import DEFAULTS
from controller.planners.base import BasePlanner
from controller.planners.blover import blover
from controller.planners.clover import CONSTANTS as CLOVER
from controller.planners.clover import CloverPlanner
from controller.planners.co2opt import Co2OptPlanner
from controller.planners.exact import CONSTANTS as EXACT
from controller.planners.exact import ExactPlanner
from controller.planners.exact.planner import Refusal
from controller.planners.oracle import OraclePlanner
from controller.planners.static_mix import StaticMixPlanner
from controller.terms import impossible
from trefoil.core.brains import Planner
from trefoil.core.errors import NotFound

Constants = Mapping[str, float]

PLANNERS: Final[Mapping[str, Callable[[Constants, Refusal], Planner]]] = {
    "base": lambda constants, _refuses: BasePlanner(constants),
    "co2opt": lambda constants, _refuses: Co2OptPlanner(constants),
    "static_mix": StaticMixPlanner,
    "exact": ExactPlanner,
    "clover": CloverPlanner,
    "blover": blover,
    "oracle": OraclePlanner,
}


def make(name: str, values: Constants | None = None, refuses: Refusal = impossible) -> Planner:
    """The planner of that name, with a policy's constants and a rollout check.

    Raises:
        NotFound: naming those that exist.
    """
    if name not in PLANNERS:
        raise NotFound(f"unknown planner {name!r}", field="planner", value=name, remedy=f"one of {sorted(PLANNERS)}")
    return PLANNERS[name](values or {}, refuses)


def constants(name: str) -> Constants:
    """What a planner of that name reads, with its defaults."""
    if name in ("base", "co2opt"):
        return DEFAULTS
    return CLOVER if name in ("clover", "blover", "oracle") else EXACT
