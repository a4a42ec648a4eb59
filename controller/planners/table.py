"""The one table of planners: what `Policy.planner` names. A planner of one's own is given as module:Class instead."""

from collections.abc import Callable, Mapping
from typing import Final

from controller.planners.base import BasePlanner
from controller.planners.co2opt import Co2OptPlanner
from controller.planners.exact import ExactPlanner
from controller.planners.exact.planner import Refusal
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
}


def make(name: str, constants: Constants | None = None, refuses: Refusal = impossible) -> Planner:
    """The planner of that name, with a policy's constants and a rollout check.

    Raises:
        NotFound: naming those that exist.
    """
    if name not in PLANNERS:
        raise NotFound(f"unknown planner {name!r}", field="planner", value=name, remedy=f"one of {sorted(PLANNERS)}")
    return PLANNERS[name](constants or {}, refuses)
