"""Simulated annealing over configuration graphs, or random search: one optimisation round of one family.

Source: CLOVER section 4.2; its artifact for what the text leaves open.
Data: the space, the configuration that is deployed (the centre), outcomes as they come in, the goal of that moment.
Decision: which configuration to look at next, when to stop, which was best.
Formulation: the centre is looked at first; then a neighbour is drawn, judged by h (Eq. 6) and, by Eq. 7, becomes the
new centre; T falls from 1 by 0.05 a step to 0.1 and starts again in every round. Stop: no better configuration in 5
evaluations in a row, 5 minutes of measuring, `measured_max` new measurements (the artifact's 10), or nothing left.
Better counts only what keeps SLO and threshold; until one is found, patience ends no round, as in the artifact.
Deviations: scores are recomputed from outcomes at every step, as intensity may change while a round runs. `random`
(BLOVER) draws from the raw space and has no centre; everything else is the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from numpy.random import Generator

from controller.planners.clover.graph import Graph
from controller.planners.clover.objective import Goal, Outcome, accepts
from controller.planners.clover.space import TRIES, Setup, Space
from controller.planners.clover.surrogate import Surrogate
from trefoil.core.fleet import Configuration


@dataclass(frozen=True, slots=True)
class Rules:
    """Schedule of annealing and limits of a round. Zero switches a limit off."""

    temperature: float = 1.0
    cooling: float = 0.05
    temperature_min: float = 0.1
    patience: int = 5
    limit_s: float = 300.0
    measured_max: int = 0
    first_accepted: bool = False
    random: bool = False
    raw: bool = True
    """Neighbours come from raw draws."""


@dataclass
class Search:
    """State of one round. `pending` has been proposed and not judged yet."""

    centre: Setup
    temperature: float
    best: Setup | None = None
    queue: list[Setup] = field(default_factory=list)
    pending: Setup | None = None
    seen: dict[str, Setup] = field(default_factory=dict)
    idle: int = 0
    evaluated: int = 0
    measured: int = 0
    violating: int = 0
    spent_s: float = 0.0
    rate_per_s: float = 0.0
    """The load that the round is about: what is measured in it is remembered for this load."""
    idle_w: float = 0.0
    """Of all devices of the pod."""
    stopped: str = ""
    moved: bool = False
    """Whether a neighbour has become the centre yet."""

    def warm_start(self, space: Space, known: Mapping[str, Outcome], goal: Goal) -> None:
        """Start at the best of all that is known, by the goal of now, if that is better than what is deployed."""
        named = ((goal.value(outcome), space.named(key)) for key, outcome in known.items() if goal.feasible(outcome))
        found = max(((value, s.key, s) for value, s in named if s is not None), default=None, key=lambda item: item[:2])
        if found is not None:
            self.best = found[2]
            if not (mine := known.get(self.centre.key)) or goal.score(mine) > -found[0]:
                self.queue.append(found[2])
                self.centre = found[2]

    def propose(
        self,
        space: Space,
        rules: Rules,
        slo_kept: Mapping[Graph, bool],
        rng: Generator,
        surrogate: Surrogate | None = None,
    ) -> Setup | None:
        """Next setup to look at; None: the round is over, see `stopped`. The last two: see `Space.neighbour`."""
        if self.pending is not None:
            return self.pending
        if self.queue and not self._out_of_time(rules):
            self.pending = self.queue[0]
            return self.pending
        if not self.stopped:
            self.stopped = self._stop(rules)
        if not self.stopped:
            drawn = (
                space.random(rng)
                if rules.random
                else space.neighbour(self.centre, rng, self.seen, rules.raw, slo_kept, surrogate)
            )
            if drawn is None:
                self.stopped = "no neighbour is left"
            self.pending = drawn
        return self.pending

    def judge(self, setup: Setup, known: Mapping[str, Outcome], goal: Goal, rules: Rules, rng: Generator) -> None:
        """Judge what a proposal did (Eq. 6, 7); `known` has its outcome and that of the centre."""
        self.pending = None
        self.seen[setup.key] = setup
        outcome = known[setup.key]
        feasible = goal.feasible(outcome)
        better = feasible and (self.best is None or goal.value(outcome) > goal.value(known[self.best.key]))
        if better:
            self.best = setup
        if self.queue and setup == self.queue[0]:  # the references that a round begins with
            self.queue.pop(0)
            return
        self.evaluated += 1
        self.violating += not feasible
        self.idle = 0 if better else self.idle + 1
        centre = known.get(self.centre.key)
        fresh = centre is None or (rules.first_accepted and not self.moved)
        if fresh or accepts(goal.score(known[self.centre.key]), goal.score(outcome), self.temperature, rng):
            self.centre, self.moved = setup, True
        self.temperature = max(rules.temperature_min, self.temperature - rules.cooling)

    def _out_of_time(self, rules: Rules) -> bool:
        return 0 < rules.limit_s <= self.spent_s

    def _stop(self, rules: Rules) -> str:
        if self._out_of_time(rules):
            return f"{self.spent_s:.0f} s of measuring"
        if self.best is not None and self.idle >= rules.patience:
            return f"no better configuration in {self.idle} evaluations"
        if self.best is not None and 0 < rules.measured_max <= self.measured:
            return f"{self.measured} configurations measured"
        return "too many evaluations" if self.evaluated >= TRIES else ""


def nearest(known: Mapping[str, Outcome], seen: Mapping[str, Setup], goal: Goal) -> Setup | None:
    """Nearest setup to SLO and threshold where nothing keeps them; None: everything failed."""
    found = [(goal.ratio(known[key]), goal.value(known[key]), key) for key in seen if not known[key].failed]
    return seen[max(found)[2]] if found else None


# ---------------------------------------------------------------------------------------------------------- as JSON

_PLAIN: Final = [
    "temperature",
    "idle",
    "evaluated",
    "measured",
    "violating",
    "spent_s",
    "rate_per_s",
    "idle_w",
    "stopped",
    "moved",
]


def setup_json(setup: Setup | None) -> dict[str, Any] | None:
    """JSON of a setup: lists, strings and integers only."""
    if setup is None:
        return None
    return {
        "layouts": [[c.device_type, [list(s) for s in c.slices], n] for c, n in setup.layouts],
        "weights": [[*edge, n] for edge, n in setup.graph.weights],
    }


def setup_of(value: Mapping[str, Any] | None) -> Setup | None:
    """Setup of its JSON: the inverse of `setup_json`."""
    if value is None:
        return None
    layouts = tuple(
        (Configuration(kind, tuple((name, int(k)) for name, k in slices)), int(n))
        for kind, slices, n in value["layouts"]
    )
    return Setup(layouts, Graph.from_weights({(v, kind, shape): int(n) for v, kind, shape, n in value["weights"]}))


def search_json(search: Search) -> dict[str, Any]:
    """JSON of a round, all of it."""
    return {
        "centre": setup_json(search.centre),
        "best": setup_json(search.best),
        "pending": setup_json(search.pending),
        "queue": [setup_json(s) for s in search.queue],
        "seen": [setup_json(s) for s in search.seen.values()],
        **{name: getattr(search, name) for name in _PLAIN},
    }


def search_of(value: Mapping[str, Any]) -> Search:
    """Round of its JSON: the inverse of `search_json`."""
    centre = setup_of(value["centre"])
    assert centre is not None
    queue, seen = ([s for s in map(setup_of, value[name]) if s is not None] for name in ("queue", "seen"))
    return Search(
        centre=centre,
        best=setup_of(value["best"]),
        pending=setup_of(value["pending"]),
        queue=queue,
        seen={setup.key: setup for setup in seen},
        **{name: value[name] for name in _PLAIN if name in value},
    )


def outcome_json(outcome: Outcome) -> list[float | None]:
    """JSON of an outcome; infinite latencies become None."""
    latencies = [ms if math.isfinite(ms) else None for ms in (outcome.p95_ms, outcome.p99_ms)]
    return [outcome.joules, outcome.accuracy, *latencies, outcome.attainment, outcome.rate_per_s, outcome.at_s]


def outcome_of(value: Sequence[float | None]) -> Outcome:
    """Outcome of its JSON: the inverse of `outcome_json`."""
    joules, accuracy, p95_ms, p99_ms, attainment, rate, at_s = value
    assert accuracy is not None
    assert attainment is not None
    assert rate is not None
    tails = [math.inf if ms is None else ms for ms in (p95_ms, p99_ms)]
    return Outcome(joules, accuracy, tails[0], tails[1], attainment, rate, at_s or 0.0)
