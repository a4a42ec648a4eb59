"""Check of a policy: whether the parts that its row names can be run, before anything is.

What starts a system and what simulates one ask here; a service looks up its own parts only.
"""

from collections.abc import Mapping
from typing import Any, Final

from controller.forecasters.table import FORECASTERS
from controller.planners.table import PLANNERS
from dispatcher.queues import QUEUES
from dispatcher.routers import ROUTERS
from power_agent.governors import GOVERNORS
from trefoil.core.errors import SettingError
from trefoil.core.parts import Kind, Part, Parts, load_part
from trefoil.core.policies import Policy

TABLES: Final[Mapping[Kind, Parts[Any]]] = {
    Kind.PLANNER: PLANNERS,
    Kind.FORECASTER: FORECASTERS,
    Kind.ROUTER: ROUTERS,
    Kind.QUEUE: QUEUES,
    Kind.GOVERNOR: GOVERNORS,
}


def load_parts(row: Policy) -> dict[Kind, Part[Any]]:
    """Load the parts that a policy's row names; those of one's own are imported.

    Raises:
        SettingError: naming the first column that cannot be.
    """
    return {kind: load_part(kind, row.part(kind), TABLES[kind]) for kind in Kind}


def check_policy(row: Policy, *, fluid: bool = False, simulated: bool = False) -> Mapping[Kind, Part[Any]]:
    """Check a policy's row; the parts that it names, each of which can be made with the settings that the row gives it.

    Args:
        fluid: requests are simulated as a flow.
        simulated: it will be simulated and nothing else, so that a part may ask for the truth.

    Raises:
        SettingError: naming the first column or setting that cannot be.
    """
    unknown = sorted(set(row.settings) - set(Kind))
    if unknown:
        remedy = f"one of {', '.join(Kind)}"
        raise SettingError("there is no such kind of part", field="parts", value=unknown[0], remedy=remedy)
    found = load_parts(row)
    told = {"truth": lambda _family, _from_s, _until_s: 0.0} if simulated else {}
    for kind, part in found.items():
        settings = part.settings_of(row.settings.get(kind, {}))
        if kind in (Kind.PLANNER, Kind.FORECASTER, Kind.GOVERNOR):
            part.made(settings=settings, refuses=lambda _view, _plan: "", **told)
    router = found[Kind.ROUTER]
    if fluid and not router.traits.flow:
        flows = ", ".join(sorted(name for name, part in ROUTERS.items() if part.traits.flow))
        raise SettingError(
            "a flow has no requests to give it",
            field="router",
            value=router.name,
            remedy=f"set fidelity to request, or take one of {flows}",
        )
    return found
