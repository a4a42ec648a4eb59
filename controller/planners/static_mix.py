"""STATIC_MIX: the least energy at a fixed mean accuracy; follows load, never carbon.

Source: DESIGN section 7: the fair opponent. Carbon-aware saving is what `exact` gains over this, and nothing else;
policy `static_miad` is the opponent of `exact_miad`, with its clocks and governor.
Data, decision, formulation: those of `exact` in instant mode with the objective's mean accuracy as the floor of every
instant. The intensity multiplies all of its joules alike, so that its argmin does not depend on carbon.
Deviations: none from `exact`: same capacity, same price of moves, same availability.
"""

from dataclasses import dataclass, replace

from numpy.random import Generator

from controller.planners.exact.planner import ExactPlanner, Refusal, any_rollout
from controller.planners.planner_settings import ExactSettings
from trefoil.core.brains import Decision, PlanView
from trefoil.core.objective import Objective, ObjectiveMode


def oblivious(objective: Objective) -> Objective:
    """The same objective, its mean accuracy held at every instant."""
    return replace(objective, mode=ObjectiveMode.INSTANT)


@dataclass(frozen=True, slots=True)
class StaticMixPlanner:
    """Planner STATIC_MIX. Stateless."""

    settings: ExactSettings = ExactSettings()
    refuses: Refusal = any_rollout

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan as `exact` does, blind to carbon."""
        return ExactPlanner(self.settings, self.refuses, "static_mix", oblivious).plan(view, rng)
