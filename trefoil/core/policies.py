"""The one table of policies. A row is added when its parts work; unknown names are refused by naming these.

Sources: base, co2opt: CLOVER section 5.1. static_mix, exact: docs/policies.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from trefoil.core.errors import NotFound


@dataclass(frozen=True, slots=True)
class Policy:
    """Which parts decide. `constants` are the policy's defaults; `Objective.params` overrides them by name."""

    name: str
    planner: str
    forecaster: str
    triggers: tuple[str, ...]
    router: str
    queue: str
    lane: str
    governor: str
    constants: Mapping[str, float] = field(default_factory=dict)


POLICIES: Final[Mapping[str, Policy]] = {
    row.name: row
    for row in (
        Policy("base", "base", "last_max", ("start", "objective", "loss"), "weighted", "fifo", "any", "fixed"),
        Policy("co2opt", "co2opt", "last_max", ("start", "objective", "loss"), "weighted", "fifo", "any", "fixed"),
        Policy(
            "static_mix",
            "static_mix",
            "last_max",
            ("start", "load", "slo", "objective", "loss"),
            "weighted",
            "fifo",
            "any",
            "fixed",
        ),
        Policy(
            "exact",
            "exact",
            "last_max",
            ("start", "carbon", "load", "slo", "objective", "loss"),
            "weighted",
            "fifo",
            "any",
            "fixed",
        ),
    )
}


def policy(name: str) -> Policy:
    """The row of that name.

    Raises:
        NotFound: naming the rows that exist.
    """
    if name not in POLICIES:
        raise NotFound(f"unknown policy {name!r}", field="policy", value=name, remedy=f"one of {sorted(POLICIES)}")
    return POLICIES[name]
