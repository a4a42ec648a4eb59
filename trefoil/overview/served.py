"""What was served of late against its promises."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trefoil.core.objective import Objective, ObjectiveMode, floor_missed

SHORTEST_FIRST: Final = "ssjf"
UTILISATION_MAX: Final = 0.95  # above it the queue ages what waits, and the law of classes says too much
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


def order_lines(found: Mapping[str, Any]) -> list[str]:
    """What serving the shortest answers first gains, a line for each generative family whose queue does so."""
    lines, window_s = list[str](), found["served"]["window_s"]
    for row in found["served"]["by_class"]:
        family, share, cv = row["family"], row["waited_share"], row["length_cv"]
        if found["queues"].get(family) != SHORTEST_FIRST or row["slo_class"] or share is None or cv is None:
            continue
        if not share:
            why = f"no answer of the last {window_s:.0f} s waited for a place: nothing is gained until requests queue"
            lines.append(f"shortest first for {family}: {why}")
            continue
        capacity_per_s, rate_per_s = found["capacity_per_s"].get(family, 0.0), row["rate_per_s"]
        if rate_per_s is None or not capacity_per_s:
            what = "its rate" if capacity_per_s else "its capacity"
            lines.append(f"shortest first for {family}: {what} is not known, nor what that saves")
            continue
        load = min(UTILISATION_MAX, rate_per_s / capacity_per_s)
        from trefoil.core.queueing import shortest_first  # brings numpy, which `trefoil status` does without

        lines.append(
            f"shortest first for {family}: {share:.1%} of the answers of the last {window_s:.0f} s waited for a place, "
            f"the mean wait of all was {row['wait_ms_mean']:.0f} ms; at {load:.0%} of capacity it saves at most "
            f"{1 - shortest_first(cv, load):.0%} of the wait, if lengths are predicted right"
        )
    return lines
