"""Saving of a running system, and when it is not a figure yet: too few requests, or a missed SLO or accuracy floor."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trefoil.core.objective import FamilyOutcome, Objective, ObjectiveMode, missed
from trefoil.overview.served import promises
from trefoil.overview.totals import REQUESTS_MIN, own_requests

COUNTED: Final = "requests:"  # of a variant, in the totals of an hour


def saving_withheld(
    totals: Mapping[str, Sequence[Mapping[str, float]]],
    served: Sequence[Mapping[str, Any]],
    objectives: Mapping[str, Objective],
    accuracies: Mapping[tuple[str, str], float],
) -> str:
    """Why no saving is shown; "" where it is. `totals`: of the saving's hours, by family; `served`: rows of the last
    minute, by family and class; `accuracies`: by family and variant, as far as they are known.

    A budget's floor binds a mean: that of the saving's hours, else of the last minute. Work is equal, as BASE is
    modelled on the same answers.
    """
    requests = sum(own_requests(hour) for hours in totals.values() for hour in hours)
    if requests < REQUESTS_MIN:
        return f"{round(REQUESTS_MIN - requests)} more requests are needed ({round(requests)} of {REQUESTS_MIN})"
    for row in served:
        objective = objectives.get(row["family"])
        if objective is None:
            continue
        whole = not row["slo_class"]
        mean = mean_accuracy(objective.family, totals.get(objective.family, ()), accuracies)
        accuracy = row["accuracy"] if objective.mode != ObjectiveMode.BUDGET or mean is None else mean
        name = row["family"] if whole else f"class {row['slo_class']} of {row['family']}"
        attained, floor = row["slo_attainment"], objective.min_accuracy
        outcome = FamilyOutcome(name, objective.slo_quantile, attained, floor, accuracy if whole else None)
        if why := missed([outcome]):
            return why
        if slow := promises(row, objective).slow:
            return f"{name} misses its {' and '.join(each.upper() for each in slow)}"
    return ""


def mean_accuracy(
    family: str, hours: Sequence[Mapping[str, float]], accuracies: Mapping[tuple[str, str], float]
) -> float | None:
    """Mean accuracy of a family's answers in these hours; None where there are none, or a variant's is not known."""
    answered: dict[str, float] = {}
    for hour in hours:
        for name, count in hour.items():
            if name.startswith(COUNTED):
                variant = name.removeprefix(COUNTED)
                answered[variant] = answered.get(variant, 0.0) + count
    total = sum(answered.values())
    if not total or any((family, variant) not in accuracies for variant in answered):
        return None
    return sum(count * accuracies[family, variant] for variant, count in answered.items()) / total
