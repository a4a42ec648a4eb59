"""State of control that outlives a controller: what operators have commanded, and where that differs from the settings.

A command wins over the settings until it is reset. What no command has changed follows the settings at each start.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Final

from controller.explore.core.exploration_state import ExplorationTotals
from controller.loop.core.decision import ControlState
from controller.loop.core.objectives import with_defaults
from controller.settings import ControllerSettings
from trefoil.core.objective import Objective
from trefoil.core.plan import Plan

FLEET: Final = "fleet_objective"  # under which the watt cap is saved
BY_COMMAND: Final = "by_command"
NOT_COMPARED: Final = ("family", "number", "params")
NONE: Final = "none"
STOPPED: Final = "out of service by command"


@dataclass(frozen=True, slots=True)
class ByCommand:
    """What stands by an operator's command: objectives of families, the mode, the fleet's watt cap, and which families
    are stopped: their objectives are kept, and out of service."""

    families: tuple[str, ...] = ()
    mode: bool = False
    max_watts: bool = False
    stopped: tuple[str, ...] = ()

    def after(self, families: Collection[str], max_watts: bool, reset: "ByCommand") -> "ByCommand":
        """What stands by command after a command for these; `reset` goes back to the settings."""
        commanded = {*self.families, *families} - {*reset.families}
        cap = (self.max_watts or max_watts) and not reset.max_watts
        return replace(self, families=tuple(sorted(commanded)), max_watts=cap)


NO_RESET: Final = ByCommand()


@dataclass(slots=True)
class SavedState:
    """State of control that outlives a controller on its disk."""

    objectives: dict[str, Objective]
    plans: list[Plan]
    control: ControlState
    totals: ExplorationTotals
    causes: Counter[str] = field(default_factory=Counter)
    reconfigurations: Counter[str] = field(default_factory=Counter)
    max_watts: float = 0.0
    by_command: ByCommand = NO_RESET
    stopped: dict[str, Objective] = field(default_factory=dict)


def by_command_of_old(
    stored: Iterable[Objective], settings: ControllerSettings, control: bool, fleet: bool
) -> ByCommand:
    """What stands by command on a disk that does not tell, of an older Trefoil or with a file lost: all that a command
    may have written. So no family goes out of service for that."""
    said = {one.family for one in settings.objectives}
    families = (o.family for o in stored if o.number > 1 or o.family not in said)
    return ByCommand(tuple(sorted(families)), control, fleet)


def overrides(
    settings: ControllerSettings,
    objectives: Mapping[str, Objective],
    control: ControlState,
    max_watts: float,
    stopped: Collection[str] = (),
) -> list[str]:
    """What is in force and differs from the settings, a line for each field with both values, and what is stopped."""
    said = {one.family: with_defaults(one.objective(), settings.pue) for one in settings.objectives}
    lines = [f"{name}: in force, not in the settings" for name in sorted(objectives.keys() - said.keys() - {*stopped})]
    pairs = [
        (f"{name}.{key}", values.get(key), wanted.get(key))
        for name in sorted(objectives.keys() & said.keys())
        for values, wanted in ((_values(objectives[name]), _values(said[name])),)
        for key in {**values, **wanted}
    ]
    pairs += [
        ("max_watts", max_watts or None, settings.max_watts or None),
        ("mode", control.mode, settings.act_mode),
        ("frozen", control.frozen, False),
        ("pinned", control.pinned, False),
    ]
    lines += [f"{name}: {STOPPED}; back by {start_command(name)}" for name in sorted(stopped)]
    return lines + [
        f"{name} = {_text(value)} by command, {_text(wanted)} in the settings"
        for name, value, wanted in pairs
        if value != wanted
    ]


def start_command(family: str) -> str:
    """Command that brings a family back that is stopped."""
    return f"trefoil family start {family}"


def _values(objective: Objective) -> dict[str, Any]:
    found = {each.name: getattr(objective, each.name) for each in fields(objective) if each.name not in NOT_COMPARED}
    return found | {f"params.{name}": value for name, value in sorted(objective.params.items())}


def _text(value: Any) -> str:
    match value:
        case None | ():
            return NONE
        case bool():
            return str(value).lower()
        case Enum():
            return value.name.lower()
        case float():
            return f"{value:.15g}"
        case tuple():
            return ", ".join(value)
        case _:
            return str(value)
