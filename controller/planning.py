"""Which planner decides: the policy's, or one of the user's own given as module:Class."""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from controller.planners import table
from controller.terms import impossible
from trefoil.core.brains import Planner
from trefoil.core.errors import SettingError
from trefoil.core.policies import PRESETS, Policy


def planner_of(override: str, policy: Policy) -> Planner:
    """The planner, live and in a replay. One's own is made without arguments and must have `plan(view, rng)`.

    Raises:
        SettingError: a module or class that cannot be used.
    """
    return own(override) if override else table.make(policy.planner, policy.constants, impossible)


def with_preset(policy: Policy, preset: str) -> Policy:
    """The row with the constants of a preset."""
    return replace(policy, constants={**policy.constants, **PRESETS[preset]}) if preset else policy


def constants_of(override: str, policy: Policy) -> Mapping[str, float] | None:
    """The constants that an objective's `params` may override; None: a planner of one's own checks them itself."""
    if override:
        return None
    return {**table.constants(policy.planner), **policy.constants}


def own(path: str) -> Planner:
    """An instance of module:Class.

    Raises:
        SettingError: naming what is missing.
    """
    module_name, colon, class_name = path.partition(":")
    if not colon or not module_name or not class_name:
        raise SettingError("not module:Class", field="planner", value=path, remedy="write e.g. mine.planners:Greedy")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SettingError(
            f"cannot be imported ({error})", field="planner", value=path, remedy="install it, or set PYTHONPATH"
        ) from error
    made: Any = getattr(module, class_name, None)
    if made is None:
        raise SettingError(
            f"{module_name} has no {class_name}", field="planner", value=path, remedy="name a class of that module"
        )
    try:
        planner: Planner = made()
    except TypeError as error:
        raise SettingError(
            f"cannot be made without arguments ({error})", field="planner", value=path, remedy="give them defaults"
        ) from error
    if not callable(getattr(planner, "plan", None)):
        raise SettingError("has no method plan(view, rng)", field="planner", value=path, remedy="see core/brains.py")
    return planner
