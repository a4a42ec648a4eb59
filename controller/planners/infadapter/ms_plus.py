"""MS_PLUS: one variant, the best by InfAdapter's objective, on its least size.

Source: InfAdapter section 5, "enhanced version of Model-Switching [38] (MS+)": one variant and its cores are selected
"based on the same objective function we use for InfAdapter"; Model-Switching itself: Zhang et al., HotCloud 20.
Data, settings and presets: `infadapter`. Decision: of Eq. 1's solutions with a single variant the best one.
Deviations: none. Of several families each has its variant, one after the other, by the cores that are left.
"""

from dataclasses import dataclass, replace

from numpy.random import Generator

from controller.planners.infadapter.cpu_slices import Choice, CpuInput, InfAdapterSettings, decide, smallest_on_all
from controller.planners.infadapter.planner import Found, best_sizes, plan_sizes, short
from trefoil.core.brains import Decision, PlanView


@dataclass(frozen=True, slots=True)
class MsPlusPlanner:
    """Planner MS_PLUS. Pure: its state is the plan in force."""

    settings: InfAdapterSettings = InfAdapterSettings()

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan the best single variant for the forecast load."""
        return plan_sizes("ms_plus", view, rng, self.settings, _choose, single=True)


def _choose(cpu: CpuInput) -> Decision:
    room, chosen, values = cpu.room, list[Choice](), []
    for family, found in cpu.capacities.items():
        wanted = {family: cpu.wanted[family]}
        of_one = [best_sizes(room, {family: (one,)}, wanted, cpu.settings) for one in found]
        best: Found | None = max((f for f in of_one if f is not None), key=lambda f: f.value, default=None)
        if best is None:
            return decide(cpu, "ms_plus", smallest_on_all(cpu), "no variant carries the load", short(cpu))
        chosen += best.chosen
        values.append(f"Eq. 1 = {best.value:.4f} for {cpu.wanted[family]:.1f}/s of {family}")
        taken = {d: sum(c.cores for c in best.chosen if c.device == d) for d in room.cores}
        left = {d: cores - taken[d] for d, cores in room.cores.items()}
        room = replace(room, cores=left, budget=room.budget - sum(taken.values()))
    return decide(cpu, "ms_plus", chosen, "; ".join(values))
