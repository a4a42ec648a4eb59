"""Table of governors: what `Policy.governor` and `PlannedDevice.governor` name, beside module:Class."""

from collections.abc import Mapping
from typing import Any, Final

from power_agent.governors.fixed import Fixed
from power_agent.governors.miad import Miad, MiadSettings
from trefoil.core.brains import Governor
from trefoil.core.parts import Kind, Part, Parts, Traits, Value, find

GOVERNORS: Final[Parts[Governor]] = {
    part.name: part
    for part in (
        Part(Kind.GOVERNOR, "fixed", Fixed),
        Part(Kind.GOVERNOR, "miad", Miad, settings=MiadSettings, traits=Traits(latency=True)),
    )
}
NONE_NAMED: Final = "fixed"
"""Of a device whose plan names none."""


def reads_latency(name: str) -> bool:
    """Whether a governor reads the latency of its stages, so that it must be counted."""
    return find(Kind.GOVERNOR, name or NONE_NAMED, GOVERNORS).traits.latency


def governor_of(name: str, settings: Mapping[str, Value]) -> Governor:
    """Make the governor of one device; "": the one of a device whose plan names none, which takes no settings.

    Raises:
        SettingError: one that is not there or cannot be made, or a setting that it has not.
    """
    part: Part[Any] = find(Kind.GOVERNOR, name or NONE_NAMED, GOVERNORS)
    governor: Governor = part.made(settings=part.settings_of(settings if name else {}))
    return governor
