"""Clock ranges of a plan, for governors: from the clock that carries the mean demand to the planned one or the top.

Data: a solution, whose clock of each device carries the high quantile of the demand within the SLO.
Decision: per device the lowest clock at which the same slices carry the mean of what the solution gives them.
Formulation: the lowest clock has to carry every class on devices of one type, zone and clock. A class needs a capacity
    there of at least its traffic times mean over high quantile. Slices that families share keep their clock, because
    the law of interference depends on both.
"""

from collections.abc import Mapping

from controller.planners.columns import ClassKey
from controller.planners.exact.model import Problem, Solution


def lowest_clocks(problem: Problem, solution: Solution, clocks: Mapping[str, int]) -> dict[str, int]:
    """Lowest clock of every device of free groups [MHz], 0 = the highest; `clocks`: the planned ones, as there."""
    found: dict[tuple[str, str, int], int] = {}
    lowest = {}
    for group in problem.groups:
        for device in () if group.must_stay else group.devices:
            key = (*group.place, clocks.get(device.name, 0))
            if key not in found:
                found[key] = _lowest(problem, solution, group.clocks, *key)
            lowest[device.name] = found[key]
    return lowest


def _lowest(
    problem: Problem, solution: Solution, offered: tuple[int, ...], device_type: str, zone: str, planned_mhz: int
) -> int:
    here = (device_type, zone, planned_mhz)
    classes = {k: n for k, n in solution.slices.items() if n and (k.device_type, k.zone, k.clock_mhz) == here}
    columns = {column.key: column for column in problem.columns}

    def carries(key: ClassKey, slices: int, clock_mhz: int) -> bool:
        column = columns.get(key._replace(clock_mhz=clock_mhz))
        mean_per_s = solution.traffic.get(key, 0.0) * problem.mean_share(key.family)
        return (
            column is not None
            and not key.beside
            and column.capacity_per_s(slices) * problem.scale.get(column.key, 1.0) >= mean_per_s
        )

    lower = sorted(mhz for mhz in offered if mhz > 0 and (not planned_mhz or mhz < planned_mhz))
    fits = (mhz for mhz in lower if all(carries(key, slices, mhz) for key, slices in classes.items()))
    return next(fits, planned_mhz)
