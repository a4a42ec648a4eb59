"""What was served of late against its promises."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trefoil.core.objective import Objective, ObjectiveMode, floor_missed

TOKEN_OBJECTIVES: Final = ("ttft", "tpot")


@dataclass(frozen=True, slots=True)
class Promises:
    """Promises of a row of an overview: `asked` is the share in the SLO, `floor` the accuracy; 0: none. `slow`: which
    objectives of tokens it misses."""

    asked: float = 0.0
    floor: float = 0.0
    late: bool = False
    inaccurate: bool = False
    slow: tuple[str, ...] = ()


def promises(row: Mapping[str, Any], objective: Objective | None) -> Promises:
    """Promises to a family or class, and which of them its row misses.

    A budget's floor binds the mean of a day or so: a minute alone cannot miss it.
    """
    if objective is None:
        return Promises()
    attained, accuracy = row["slo_attainment"], row["accuracy"]
    asked, floor = objective.slo_quantile, objective.min_accuracy
    late = attained is not None and attained < asked
    budget = objective.mode == ObjectiveMode.BUDGET
    inaccurate = not budget and accuracy is not None and floor_missed(accuracy, floor)
    tokens = row.get("tokens") or {}
    slow = tuple(
        name
        for name in TOKEN_OBJECTIVES
        if tokens.get(f"{name}_ms")
        and tokens[f"{name}_attainment"] is not None
        and tokens[f"{name}_attainment"] < tokens[f"{name}_quantile"]
    )
    return Promises(asked, floor, late, bool(floor) and inaccurate, slow)
