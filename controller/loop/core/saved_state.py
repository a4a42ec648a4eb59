"""State of control that outlives a controller: what operators have commanded, and where that differs from the settings.

A command wins over the settings until it is reset. What no command has changed follows the settings at each start.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Final

from controller.accounting.core.budgets import accept_budget
from controller.explore.core.exploration_state import ExplorationTotals
from controller.loop.core.decision import ControlState
from controller.loop.core.objectives import with_defaults
from controller.role.by_command import NO_BUDGETS, NO_RESET, ByCommand, KeptBudgets
from controller.settings import ControllerSettings
from trefoil.core.catalog import Catalog
from trefoil.core.errors import InvalidInput, SettingError
from trefoil.core.objective import SETTING_NAMES, Budget, Objective, whose_budget
from trefoil.core.plan import Plan

NOT_COMPARED: Final = ("family", "number", "params")
NONE: Final = "none"
STOPPED: Final = "out of service by command"


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
    budgets: KeptBudgets = NO_BUDGETS


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
    said = {one.family: with_defaults(one.stated(), settings.pue) for one in settings.objectives}
    lines = [f"{name}: in force, not in the settings" for name in sorted(objectives.keys() - said.keys() - {*stopped})]
    pairs = differences(objectives, said)
    pairs += [
        ("max_watts", max_watts or None, settings.max_watts or None),
        ("mode", control.mode, settings.act_mode),
        ("frozen", control.frozen, False),
        ("pinned", control.pinned, False),
    ]
    lines += [f"{name}: {STOPPED}; back by {start_command(name)}" for name in sorted(stopped)]
    return lines + [
        f"{name} = {setting_text(value)} by command, {setting_text(wanted)} in the settings"
        for name, value, wanted in pairs
        if value != wanted
    ]


def differences(now: Mapping[str, Objective], wanted: Mapping[str, Objective]) -> list[tuple[str, Any, Any]]:
    """Fields that differ of families that are in both, in the words of settings files, each with both values."""
    pairs = [
        (f"{name}.{SETTING_NAMES.get(key, key)}", *(_as_setting(key, one.get(key)) for one in (values, others)))
        for name in sorted(now.keys() & wanted.keys())
        for values, others in ((_values(now[name]), _values(wanted[name])),)
        for key in {**values, **others}
    ]
    return [(name, value, other) for name, value, other in pairs if value != other]


def settled_budgets(settings: ControllerSettings, kept: KeptBudgets, catalog: Catalog) -> KeptBudgets:
    """Budgets of the settings, with the next number where they have changed, and what commands have changed.

    Raises:
        SettingError: a budget of the settings cannot be.
    """
    marks, stored = () if settings.declared else kept.by_command, kept.by_key
    found = {key: one for key, one in stored.items() if key in marks}
    for position, wanted in enumerate(settings.stated_budgets.values()):
        try:
            accepted = accept_budget(wanted, found, catalog)
        except InvalidInput as error:
            raise SettingError(str(error), field=f"budgets[{position}]") from error
        if wanted.key not in marks:
            before = stored.get(wanted.key, Budget())
            same = replace(accepted, number=before.number) == before
            found[wanted.key] = before if same else replace(accepted, number=before.number + 1)
    return KeptBudgets(tuple(found[key] for key in sorted(found)), marks)


def budget_differences(now: KeptBudgets, wanted: KeptBudgets) -> list[tuple[str, str, str]]:
    """Budgets that differ, each with both values in words."""
    keys = sorted(now.by_key.keys() | wanted.by_key.keys())
    before, after = ([one.by_key[key].text if key in one.by_key else NONE for key in keys] for one in (now, wanted))
    names = [f"budget of {whose_budget(*key)}" for key in keys]
    return [pair for pair in zip(names, before, after, strict=True) if pair[1] != pair[2]]


def budget_overrides(settings: ControllerSettings, kept: KeptBudgets) -> list[str]:
    """Budgets that commands have changed, a line for each with both values."""
    now, then = ({key: one.text for key, one in each.items()} for each in (kept.by_key, settings.stated_budgets))
    pairs = [(key, now.get(key, NONE), then.get(key, NONE)) for key in kept.by_command]
    return [
        f"budget of {whose_budget(*key)} = {value} by command, {wanted} in the settings"
        for key, value, wanted in pairs
        if value != wanted
    ]


def start_command(family: str) -> str:
    """Command that brings a family back that is stopped."""
    return f"trefoil family start {family}"


def _values(objective: Objective) -> dict[str, Any]:
    found = {each.name: getattr(objective, each.name) for each in fields(objective) if each.name not in NOT_COMPARED}
    return found | {f"params.{name}": value for name, value in sorted(objective.params.items())}


def _as_setting(name: str, value: Any) -> Any:
    return round(100 * value, 10) if name.endswith("_quantile") and value is not None else value


def setting_text(value: Any) -> str:
    """Value of a setting, in words."""
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
