"""ORACLE: the best standardised configuration, found by looking at all of them, in no time.

Source: CLOVER (SC 23) section 5.1: exhaustive offline profiling, the same mix and partition on every GPU.
Data: the profile (or measured outcomes, by family and graph), intensity, objective.
Decision: the graph of one device with the largest f (Eq. 3) among those that keep SLO and accuracy threshold.
Formulation: `clover/profile_estimator.py` serves every graph (1,282 for four variants on an A100) once per load, all of
them on the same requests. Intensity only rescales the joules.
Deviations: on several device types the search goes through one type at a time, the others unchanged, until nothing gets
better: exhaustive in each, not in their product. Optimisation time is not charged, as in the paper.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from numpy.random import Generator

from controller.planners.clover.annealing import Search, nearest
from controller.planners.clover.graph import Graph
from controller.planners.clover.objective import Goal, Outcome
from controller.planners.clover.planner import goal_of, round_decision
from controller.planners.clover.pods import Pod, pods_of
from controller.planners.clover.profile_estimator import ProfileEstimator, profile_estimator
from controller.planners.clover.settings import CloverSettings
from controller.planners.clover.space import Setup
from controller.planners.planning_input import read_view
from trefoil.core.brains import Decision, PlanView
from trefoil.core.errors import ProfileMissing
from trefoil.core.plan import Plan


@dataclass
class OraclePlanner:
    """Planner ORACLE. `given`: outcomes by family and `Setup.key` instead of the profile's. Keeps what it served."""

    settings: CloverSettings = CloverSettings()
    refuses: Callable[[PlanView, Plan], str] = field(default=lambda _view, _plan: "")
    given: Mapping[str, Mapping[str, Outcome]] = field(default_factory=dict)
    _served: dict[str, tuple[ProfileEstimator, dict[str, Outcome]]] = field(default_factory=dict)

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan the best standardised configuration for this intensity.

        Raises:
            ProfileMissing: naming a class without profile, or the graph that was not given.
        """
        settings = self.settings
        inputs = read_view(view, settings.rate_floor_per_s, unprofiled=bool(self.given))
        chosen = []
        for pod in pods_of(inputs, standardised=True):
            search = Search(pod.base, 0.0, stopped="all of them were looked at")
            if pod.family in self.given:
                look = self._given(pod)
                known = dict(self.given[pod.family])
            else:
                profile = profile_estimator(view.catalog, pod.task, pod.space, settings)
                last = self._served.get(pod.family)
                known = last[1] if last is not None and last[0] == profile else {}
                self._served[pod.family] = (profile, known)
                look = profile.many
            goal = goal_of(inputs, pod, known, settings)
            assert goal is not None, "the profile says what BASE takes"
            _exhaust(pod, search, goal, known, look)
            chosen.append((pod, search, goal, known))
        decision = round_decision(inputs, "oracle", chosen, settings, self.refuses)
        ends_at_s = view.carbon.ends_at_s
        at_s = ends_at_s if ends_at_s > view.now_s else view.now_s + settings.tick_s
        return Decision(decision.plan, decision.why, at_s, decision.degraded)

    def _given(self, pod: Pod) -> Callable[[Sequence[Setup]], list[Outcome]]:
        def look(setups: Sequence[Setup]) -> list[Outcome]:
            raise ProfileMissing(
                f"no outcome is given for {setups[0].key}", field=f"family {pod.family}", remedy="measure every graph"
            )

        return look


def _exhaust(
    pod: Pod,
    search: Search,
    goal: Goal,
    known: dict[str, Outcome],
    look: Callable[[Sequence[Setup]], list[Outcome]],
) -> None:
    """Look at everything; `search.best` and what was seen hold the result."""
    now, value = pod.base, -math.inf
    improved = True
    while improved:
        improved = False
        for kind, _ in pod.space.kinds:
            setups = [_with(now, part, kind.name) for part in pod.space.units(kind)]
            new = [s for s in setups if s.key not in known]
            known.update(zip((s.key for s in new), look(new) if new else [], strict=True))
            search.seen.update((s.key, s) for s in setups)
            feasible = [s for s in setups if goal.feasible(known[s.key])]
            best = max(feasible, key=lambda s: (goal.value(known[s.key]), s.key), default=None)
            if best is not None and goal.value(known[best.key]) > value:
                now, value, search.best = best, goal.value(known[best.key]), best
                improved = len(pod.space.kinds) > 1
        if search.best is None and (closest := nearest(known, search.seen, goal)) is not None and closest != now:
            now, improved = closest, len(pod.space.kinds) > 1
    search.evaluated = len(search.seen)
    search.violating = sum(not goal.feasible(known[key]) for key in search.seen)


def _with(setup: Setup, part: Setup, kind_name: str) -> Setup:
    """The setup with another graph on the devices of one type."""
    if all(c.device_type == kind_name for c, _ in setup.layouts):
        return part
    layouts = tuple(part.layouts[0] if c.device_type == kind_name else (c, n) for c, n in setup.layouts)
    others = Graph.from_weights({e: n for e, n in setup.graph.weights if e[1] != kind_name})
    return Setup(layouts, others + part.graph)
