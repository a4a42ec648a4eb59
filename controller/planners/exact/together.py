"""Targets that families can reach together.

Source: DESIGN section 4, mode budget: a window's accuracy is owed over the window, and its price says what is worth
paying now. Every family's target (`aims.py`) comes from its own frontier, on which the others have no more than their
hard minimum; two families that want the most of it in the same clean hour may ask for more than the fleet has.
Data: a problem that no plan solves, and its aim. Decision: the targets of families in mode budget.
Formulation: the program with a price on what lacks of a target instead of the target; as high as the price of accuracy
itself, so that accuracy below a target counts twice. What that plan reaches are the targets; what lacks, the window's
budget owes later. Hard minima and the floors of other modes stay; where those cannot be met, `rescue.py` has the word.
Deviations: none.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from controller.planners.exact.aims import Wish, mode_of
from controller.planners.exact.milp import Limits
from controller.planners.exact.model import Aim, Problem
from controller.planners.exact.search import solve
from controller.planners.world import World
from trefoil.core.objective import ObjectiveMode

SLACK: Final = 1e-6  # of accuracy: below what the solver's tolerance moves


def movable(world: World, aim: Aim) -> frozenset[str]:
    """Families whose target is more than their hard minimum and owed over a window, not at this instant."""
    return frozenset(
        t.family
        for t in world.tasks
        if mode_of(t.objective) == ObjectiveMode.BUDGET
        and aim.target.get(t.family, 0.0) > t.objective.hard_min_accuracy
    )


def reachable(
    world: World, problem: Problem, aim: Aim, wishes: Mapping[str, Wish], constants: Mapping[str, float]
) -> tuple[Aim, dict[str, Wish]] | None:
    """The aim with targets that one plan meets, and why; None when no plan meets even what has to be met.

    Raises:
        WallLimitHit: see `Program.solve`.
    """
    families = movable(world, aim)
    if not families:
        return None
    priced = replace(aim, lack_j={f: aim.value_j.get(f, 0.0) for f in families})
    found = solve(problem, priced, Limits(int(constants["solver_nodes"]), constants["solver_gap"]))
    if found is None:
        return None
    targets, said = dict(aim.target), dict(wishes)
    for family in sorted(families):
        reached = found.accuracy[family] - SLACK
        if reached < targets[family]:
            targets[family] = reached
            said[family] = replace(
                wishes[family], target=reached, why=f"{wishes[family].why}; the fleet has {reached:.4f} for it"
            )
    return replace(aim, target=targets), said


def needed(world: World, aim: Aim) -> Aim:
    """The aim with nothing but what has to be met now: to serve comes before what a window is owed."""
    families = movable(world, aim)
    return replace(aim, target={f: target for f, target in aim.target.items() if f not in families})
