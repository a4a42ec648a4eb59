"""Shapes of the controller's state files, by name: what is read back has to be one of these (docs/state.md)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from controller.explore.core.exploration import TOTALS
from controller.explore.core.exploration_state import ExplorationTotals
from controller.role.by_command import BY_COMMAND, FLEET, TENANT_BUDGETS, ByCommand, KeptBudgets
from trefoil.core.errors import InvalidInput
from trefoil.core.objective import ActMode, Objective
from trefoil.core.outside.plausible import EPOCH_MAX, are_grams, hour_starts_s, is_sum
from trefoil.core.plan import NodePlan, Plan
from trefoil.runtime.state_files import as_epoch


@dataclass(frozen=True, slots=True)
class KeptEpoch:
    """Highest epoch that a disk knows; `taken_over`: written, number of the copies that were taken over last."""

    epoch: int
    taken_over: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        as_epoch(self.epoch)
        _require("taken_over", self.taken_over, len(self.taken_over) in (0, 2))


@dataclass(frozen=True, slots=True)
class KeptControl:
    """Mode and holds."""

    mode: ActMode
    frozen: bool
    pinned: bool


@dataclass(frozen=True, slots=True)
class KeptFleet:
    """Cap of the whole fleet; 0 = none."""

    max_watts: float

    def __post_init__(self) -> None:
        _require("max_watts", self.max_watts, 0 <= self.max_watts < math.inf)


@dataclass(frozen=True, slots=True)
class KeptCounts:
    """Counts by cause."""

    replans: Mapping[str, int] = field(default_factory=dict)
    reconfigurations: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = (*self.replans.values(), *self.reconfigurations.values())
        _require("counts", counts, all(0 <= count < EPOCH_MAX for count in counts))


@dataclass(frozen=True, slots=True)
class KeptBudget:
    """Budget of a family (controller/observe/core/load_windows.py): buckets of start, requests, sum of accuracy."""

    window_s: float
    buckets: tuple[tuple[float, float, float], ...]
    hours: tuple[tuple[int, int], ...] = ()
    first_hour: int | None = None

    def __post_init__(self) -> None:
        _require("window_s", self.window_s, 0 < self.window_s < math.inf)
        _require("buckets", self.buckets, all(math.isfinite(number) for row in self.buckets for number in row))


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """Memory of a planner, which judges by itself whether it can recall it."""

    planner: str
    memory: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class KeptBooks:
    """What is accounted: ids of energy streams, sums by hour, family and name, each device's last sample, and the
    epoch that was led under then."""

    ids: Mapping[str, str]
    hours: Mapping[str, Mapping[str, Mapping[str, float]]]
    told: Mapping[str, tuple[int, float]]
    epoch: int = 0

    def __post_init__(self) -> None:
        sums = (one for hour in self.hours.values() for family in hour.values() for one in family.items())
        _require("hours", "a sum", all(is_sum(name, number) for name, number in sums))
        books = [family for hour in self.hours.values() for family in hour.values()]
        for grams, joules in (("grams", "joules"), ("base_grams", "base_joules")):
            _require("hours", grams, all(are_grams(one.get(grams, 0.0), one.get(joules, 0.0)) for one in books))
        _require_hours(self.hours)
        _require("told", "an end", all(math.isfinite(end_s) for _, end_s in self.told.values()))


@dataclass(frozen=True, slots=True)
class KeptSpend:
    """Joules and grams of past hours, by hour, family and tenant."""

    hours: Mapping[str, Mapping[str, Mapping[str, tuple[float, float]]]]

    def __post_init__(self) -> None:
        costs = (one for hour in self.hours.values() for tenants in hour.values() for one in tenants.values())
        _require("hours", "a cost", all(math.isfinite(joules) and are_grams(grams, joules) for joules, grams in costs))
        _require_hours(self.hours)


SHAPES: Final[Mapping[str, Any]] = {
    "epoch": KeptEpoch,
    "led": KeptEpoch,
    "lost": Mapping[str, str],
    "accounting": KeptBooks,
    "spent": KeptSpend,
    "control": KeptControl,
    FLEET: KeptFleet,
    BY_COMMAND: ByCommand,
    TENANT_BUDGETS: KeptBudgets,
    "objectives": tuple[Objective, ...],
    "plans": tuple[Plan, ...],
    "published": Plan,
    "commanded": tuple[NodePlan, ...],
    "budgets": Mapping[str, KeptBudget],
    "counts": KeptCounts,
    TOTALS: ExplorationTotals,
    "planner_memory": KeptMemory,
}


def _require_hours(hours: Mapping[str, object]) -> None:
    _require("hours", list(hours), all(hour_starts_s(hour) is not None for hour in hours))


def _require(name: str, value: object, holds: bool) -> None:
    if not holds:
        raise InvalidInput("out of range", field=name, value=value)
