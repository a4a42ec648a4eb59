"""Which planner and forecaster decide: those of the policy's row, or other ones by name or as module:Class."""

from collections.abc import Mapping
from dataclasses import replace

from controller.core.terms import impossible
from controller.forecasters.table import FORECASTERS
from controller.planners.stamped import refusal, stamped
from controller.planners.table import PLANNERS
from controller.settings import ControllerSettings
from trefoil.core.brains import Forecaster, Planner
from trefoil.core.parts import Kind, find
from trefoil.core.policies import PRESETS, Policy, chosen, policy


def planner_of(override: str, row: Policy) -> Planner:
    """The planner, live, simulated and in a replay: its plans bear the router, queue and governor of the row.

    Raises:
        SettingError: a planner that is not there or cannot be made, or a setting that it has not.
    """
    row = chosen(row, {Kind.PLANNER: override}, {})
    part = find(Kind.PLANNER, row.planner, PLANNERS)
    settings = part.settings_of(row.settings.get(Kind.PLANNER, {}))
    return stamped(part.made(constants=row.constants, settings=settings, refuses=refusal(impossible, row)), row)


def forecaster_of(settings: ControllerSettings, row: Policy) -> Forecaster:
    """The forecaster. The controller's own settings hold for one that has settings of these names; over them goes what
    the row says, which holds what `parts.forecaster` says.

    Raises:
        SettingError: a forecaster that is not there or cannot be made, or a setting that it has not.
    """
    part = find(Kind.FORECASTER, row.forecaster, FORECASTERS)
    flat = {name: getattr(settings, name) for name in settings.model_fields_set & part.settings.model_fields.keys()}
    return part.made(settings=part.settings_of({**flat, **row.settings.get(Kind.FORECASTER, {})}))


def with_preset(row: Policy, preset: str) -> Policy:
    """The row with the constants of a preset."""
    return replace(row, constants={**row.constants, **PRESETS[preset]}) if preset else row


def row_of(settings: ControllerSettings) -> Policy:
    """The row that the controller's settings make of their policy's.

    Raises:
        NotFound, SettingError: no such policy.
    """
    row = with_preset(policy(settings.policy), settings.preset)
    row = chosen(row, {Kind.PLANNER: settings.planner, Kind.FORECASTER: settings.forecaster}, settings.parts)
    return row if settings.causes is None else replace(row, triggers=settings.causes)


def constants_of(override: str, row: Policy) -> Mapping[str, float] | None:
    """The constants that an objective's `params` may override; None: a planner of one's own checks them itself."""
    known = find(Kind.PLANNER, override or row.planner, PLANNERS).constants
    return None if known is None else {**known, **row.constants}
