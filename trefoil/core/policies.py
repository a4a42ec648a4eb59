"""The one table of policies. A row is added when its parts work; unknown names are refused by naming these.

Sources: base, co2opt, clover, blover, oracle: CLOVER. static_mix, exact: docs/policies.md.
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
        *(
            Policy(
                name,
                name,
                "last_max",
                ("start", "carbon", "load", "slo", "accuracy", "objective", "loss"),
                "fifo",
                "fifo",
                "any",
                "fixed",
            )
            for name in ("clover", "blover", "oracle")
        ),
    )
}

PRESETS: Final[Mapping[str, Mapping[str, float]]] = {
    "paper": {},  # the defaults: CLOVER's text, with Eq. 6 fixed
    "literal": {"literal": 1.0},  # Eq. 6 as printed, which rewards a violation where f < 0
    "artifact": {  # CLOVER's public code
        "literal": 1.0,
        "artifact": 1.0,
        "lambda": 0.1,
        "base_intensity": 250.0,
        "first_accepted": 1.0,
        "warm": 0.0,
        "guided": 0.0,
        "carbon_base_g_per_kwh": 250.0,  # its 5 % are of a fixed base: for the shell's triggers, not for the planner
        "limit_s": 0.0,
        "measured_max": 10.0,
        "requests_min": 1000.0,
        "rate_tolerance": 1e9,
    },
}
"""Constants that a policy's row takes instead of its own (`--preset`): for clover, blover, oracle."""


def policy(name: str) -> Policy:
    """The row of that name.

    Raises:
        NotFound: naming the rows that exist.
    """
    if name not in POLICIES:
        raise NotFound(f"unknown policy {name!r}", field="policy", value=name, remedy=f"one of {sorted(POLICIES)}")
    return POLICIES[name]
