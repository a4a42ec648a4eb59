"""CLOVER: configuration graphs, simulated annealing, by measuring on the system or on profiles.

Source: CLOVER (SC 23) sections 4.1 to 4.3 and 5.1; github.com/boringlee24/sc23-clover for the preset `artifact`.
Data: what candidates did when they were measured (or would do by their profile), intensity, objectives, devices.
Decision: which configurations to try, and the best of them: variants and MIG partitions. Every device stays awake.
Formulation: `graph.py`, `space.py`, `objective.py` (Eq. 1 to 7), `annealing.py`. A known graph is not measured again:
its joules are rescaled by the intensity of now, as long as the load is within `rate_tolerance` of what it was measured
at.
C_base: the objective's reference, else BASE by its profile at the same demand, else BASE measured first of all.
Several families explore side by side, each on its own pod.
Deviations: the first round starts from what runs, or from BASE, not blindly; Eq. 6 is fixed (`literal` = 1 restores
it); the space is standardised (`standardised` = 0: the fleet graph), see docs/policies.md for what that changes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from numpy.random import Generator

from controller.planners.clover.annealing import (
    Rules,
    Search,
    nearest,
    outcome_json,
    outcome_of,
    search_json,
    search_of,
)
from controller.planners.clover.graph import Graph
from controller.planners.clover.objective import Goal, Outcome
from controller.planners.clover.pods import Pod, assembled_plan, pods_of, unserved_families
from controller.planners.clover.profile_estimator import profile_estimator
from controller.planners.clover.settings import CloverSettings
from controller.planners.clover.space import Setup
from controller.planners.clover.surrogate import Surrogate
from controller.planners.columns import class_column
from controller.planners.planning_input import PlanningInput, read_view
from trefoil.core.brains import Candidate, Decision, Measurement, PlanView
from trefoil.core.demand import Measured
from trefoil.core.objective import ObjectiveMode
from trefoil.core.plan import Plan

OUTCOMES_MAX: Final = 2000  # outcomes remembered per family
CONTRADICTED: Final = frozenset({"slo", "accuracy"})  # triggers that say: what runs is not what was measured


@dataclass
class CloverPlanner:
    """Planner CLOVER; remembers what was measured. `random`: BLOVER. `refuses`: why a plan cannot be rolled out, "" =
    it can.
    """

    settings: CloverSettings = CloverSettings()
    refuses: Callable[[PlanView, Plan], str] = field(default=lambda _view, _plan: "")
    name: str = "clover"
    random: bool = False
    _known: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    _searches: dict[str, tuple[str, Search]] = field(default_factory=dict)

    # -------------------------------------------------------------------------------------------- on profiles

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan by one whole exploration on profiles; nothing is remembered.

        Raises:
            ProfileMissing: naming a class that has none.
        """
        settings = self.settings
        inputs = read_view(view, settings.rate_floor_per_s)
        rules = replace(self._rules(settings), limit_s=0.0)
        chosen = []
        for pod in self._pods(inputs, settings):
            look = profile_estimator(view.catalog, pod.task, pod.space, settings)
            known: dict[str, Outcome] = {}
            goal = goal_of(inputs, pod, known, settings)
            assert goal is not None, "BASE has a profile"
            search = Search(pod.current_setup(), rules.temperature, queue=[pod.current_setup()])
            while True:
                self._run_round(pod, search, known, goal, rules, settings, rng)
                if search.pending is None:
                    break
                known[search.pending.key] = look(search.pending)
            chosen.append((pod, search, goal, known))
        return round_decision(inputs, self.name, chosen, settings, self.refuses)

    # -------------------------------------------------------------------------------------------- by measuring

    def asks(self, view: PlanView) -> bool:
        """Whether to ask and tell: `measure_on` says so, or there is no profile to explore on."""
        return self.settings.measure_on == "system" or not view.catalog.rows

    def ask(self, view: PlanView, rng: Generator) -> Candidate | Decision:
        """Ask for the next configuration to measure, or the best one."""
        settings = self.settings
        inputs = read_view(view, settings.rate_floor_per_s, unprofiled=True)
        rules = self._rules(settings)
        chosen: list[tuple[Pod, Search, Goal | None, dict[str, Outcome]]] = []
        pods = self._pods(inputs, settings)
        self._searches = {f: kept for f, kept in self._searches.items() if f in {pod.family for pod in pods}}
        if bare := unserved_families(inputs, pods):
            return Decision(None, f"{self.name}: {bare}", math.inf, f"no_plan: {bare}")
        for pod in pods:
            search, known = self._round(inputs, pod, settings)
            goal = goal_of(inputs, pod, known, settings)
            self._run_round(pod, search, known, goal, rules, settings, rng)
            chosen.append((pod, search, goal, known))
        if not any(search.pending for _, search, _, _ in chosen):
            self._searches.clear()
            if any(goal is None for _, _, goal, _ in chosen):
                why = f"{self.name}: no joules were measured, so that nothing can be compared"
                return Decision(None, why, math.inf, "no_energy: nothing meters the devices")
            done = [(p, s, g, k) for p, s, g, k in chosen if g is not None]
            return round_decision(inputs, self.name, done, settings, self.refuses)
        return self._candidate(inputs, [(p, s) for p, s, _, _ in chosen], settings)

    def tell(self, candidate: Candidate, measurement: Measurement) -> None:
        """Tell what the candidate that was asked for did. Told twice, or of another candidate: the last one counts.

        Where it was left for the sake of some families, the others' graphs are still to be measured.
        """
        told = {m.family: m for m in measurement.measured}
        left = any(not math.isfinite(m.latency_ms_p95) for m in measurement.measured)
        for family, (size_key, search) in self._searches.items():
            if search.pending is None:
                continue
            search.spent_s += measurement.spent_s
            if left and family not in told:
                continue
            known, key = self._known.setdefault(family, {}), f"{size_key}|{search.pending.key}"
            known.pop(key, None)  # the newest stands last: the oldest are forgotten first
            known[key] = outcome_from(told.get(family), search.rate_per_s, candidate.plan.created_at_s, search.idle_w)
            search.measured += 1
            while len(known) > OUTCOMES_MAX:
                known.pop(next(iter(known)))

    # -------------------------------------------------------------------------------------------- memory

    def memory(self) -> Mapping[str, Any]:
        """Memory: what was measured, and the round that is under way."""
        return {
            "version": 1,
            "known": {f: {k: outcome_json(o) for k, o in known.items()} for f, known in self._known.items()},
            "searches": {f: [size, search_json(search)] for f, (size, search) in self._searches.items()},
        }

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Recall a memory and continue from it; what another version wrote is forgotten."""
        self._known, self._searches = {}, {}
        if memory.get("version") == 1:
            self._known = {f: {k: outcome_of(o) for k, o in known.items()} for f, known in memory["known"].items()}
            self._searches = {f: (size, search_of(s)) for f, (size, s) in memory["searches"].items()}

    # -------------------------------------------------------------------------------------------- inside

    def _rules(self, settings: CloverSettings) -> Rules:
        return Rules(
            settings.temperature,
            settings.cooling,
            settings.temperature_min,
            settings.patience,
            settings.limit_s,
            settings.measured_max,
            settings.first_accepted,
            self.random,
            settings.neighbours == "raw",
        )

    def _pods(self, inputs: PlanningInput, settings: CloverSettings) -> tuple[Pod, ...]:
        return pods_of(inputs, settings.standardised)

    def _known_at_load(self, pod: Pod, rate_per_s: float, settings: CloverSettings) -> dict[str, Outcome]:
        """What is known of this pod at this load, by graph."""
        prefix, tolerance = f"{pod.space.size_key}|", settings.rate_tolerance * rate_per_s
        return {
            key.removeprefix(prefix): outcome
            for key, outcome in self._known.get(pod.family, {}).items()
            if key.startswith(prefix) and abs(outcome.rate_per_s - rate_per_s) <= tolerance
        }

    def _round(self, inputs: PlanningInput, pod: Pod, settings: CloverSettings) -> tuple[Search, dict[str, Outcome]]:
        """The round under way, or a new one, and what is known; also a new one where the pod has changed size."""
        size_key, search = self._searches.get(pod.family, ("", None))
        if search is not None and size_key == pod.space.size_key:
            known = self._known_at_load(pod, search.rate_per_s, settings)
            if all(key in known for key in search.seen):
                return search, known
        rate, centre = pod.task.demand.rate_per_s, pod.current_setup()
        kept = {f"{pod.space.size_key}|{setup.key}" for setup in (centre, pod.base)}
        self._known[pod.family] = {
            key: outcome
            for key, outcome in self._known.get(pod.family, {}).items()
            # What was refused or left was not measured. In BLOVER's raw space nothing is recognised but what runs.
            if math.isfinite(outcome.p95_ms) and (key in kept or not self.random)
        }
        if inputs.view.trigger in CONTRADICTED:  # a sample of some hundred requests may have been lucky
            self._known[pod.family].pop(f"{pod.space.size_key}|{centre.key}", None)
        queue = [centre]
        if base_joules(inputs, pod, {}, settings) is None and pod.base != centre:
            queue.insert(0, pod.base)
        search = Search(centre, settings.temperature, queue=queue, rate_per_s=rate, idle_w=_idle_w(pod))
        self._searches[pod.family] = (pod.space.size_key, search)
        known = self._known_at_load(pod, rate, settings)
        if settings.warm and (goal := goal_of(inputs, pod, known, settings)) is not None:
            search.warm_start(pod.space, known, goal)
        return search, known

    def _run_round(
        self,
        pod: Pod,
        search: Search,
        known: dict[str, Outcome],
        goal: Goal | None,
        rules: Rules,
        settings: CloverSettings,
        rng: Generator,
    ) -> None:
        """Judge what is known until something has to be measured or the round ends."""
        guided = settings.neighbours == "guided" and goal is not None
        setups = {key: setup for key in known if guided and (setup := pod.space.named(key)) is not None}
        while True:
            kept = {s.graph: goal.feasible(known[key]) for key, s in setups.items() if goal}
            surrogate = (
                _surrogate(pod, goal, {s.graph: known[key] for key, s in setups.items()}) if goal and guided else None
            )
            setup = search.propose(pod.space, rules, kept, rng, surrogate)
            if setup is None or setup.key not in known:
                return
            if goal is None:
                search.pending, search.stopped = None, "BASE's joules could not be measured"
                return
            search.judge(setup, known, goal, rules, rng)

    def _candidate(
        self,
        inputs: PlanningInput,
        chosen: Sequence[tuple[Pod, Search]],
        settings: CloverSettings,
    ) -> Candidate:
        setups, words, seconds = [], [], 0.0
        for pod, search in chosen:
            setup = search.pending or search.best or search.centre
            setups.append((pod, setup, None))
            if search.pending is not None:
                words.append(f"{pod.family}: evaluation {search.evaluated + 1}, {setup.key}")
                needed = 1.5 * settings.requests_min / pod.task.mean_per_s + settings.measure_spare_s
                seconds = max(seconds, needed)
        why = f"{self.name} explores: {'; '.join(words)}"
        plan = assembled_plan(inputs, self.name, setups, settings, why, exploration=True)
        return Candidate(plan, why, seconds, settings.requests_min)


def round_decision(
    inputs: PlanningInput,
    name: str,
    chosen: Sequence[tuple[Pod, Search, Goal, Mapping[str, Outcome]]],
    settings: CloverSettings,
    refuses: Callable[[PlanView, Plan], str],
) -> Decision:
    """Decision of a round: the plan of what every family's search found best, or why there is none."""
    if not chosen:
        why = f"{name}: no family has an objective and devices"
        return Decision(None, why, math.inf, "no_plan: no family has an objective and devices")
    if bare := unserved_families(inputs, [pod for pod, _, _, _ in chosen]):
        return Decision(None, f"{name}: {bare}", math.inf, f"no_plan: {bare}")
    setups, words, short = [], [], []
    for pod, search, goal, known in chosen:
        setup, degraded = _best(pod, search, goal, known)
        if degraded:
            short.append(degraded)
        if setup is None:
            return Decision(None, f"{name}: {degraded}", math.inf, degraded)
        setups.append((pod, setup, known[setup.key]))
        words.append(explanation(pod, search, goal, setup, known))
    why = f"{name}: {'; '.join(words)}"
    plan = assembled_plan(inputs, name, setups, settings, why, "; ".join(short))
    if refusal := refuses(inputs.view, plan):
        return Decision(None, f"{name}: no rollout leads to {why}: {refusal}", math.inf, f"no_rollout: {refusal}")
    return Decision(plan, why, math.inf, "; ".join(short))


def _best(pod: Pod, search: Search, goal: Goal, known: Mapping[str, Outcome]) -> tuple[Setup | None, str]:
    """The best of a round; where nothing meets the objective, what comes nearest, and the words for it."""
    if search.best is not None and goal.feasible(known[search.best.key]):
        return search.best, ""
    found = nearest(known, search.seen, goal)
    if found is None:
        return None, f"failed: none of {search.evaluated} configurations of {pod.family} could be measured"
    outcome = known[found.key]
    return found, (
        f"slo_missed: no configuration of {pod.family} that was tried keeps {goal.slo_ms:g} ms and accuracy "
        f"{goal.accuracy_min:.4f}; the nearest has {goal.tail_ms(outcome):.0f} ms and {outcome.accuracy:.4f}"
    )


def outcome_from(measured: Measured | None, rate_per_s: float, at_s: float, idle_w: float = 0.0) -> Outcome:
    """Outcome of a measurement; nothing answered, or refused: a failure.

    Joules are brought to the load of the round: some hundred requests may come in 7 % more or less time than they take
    on average, and what idles does so all that time. Otherwise the luckiest gap between requests would look best.
    """
    if measured is None or not math.isfinite(measured.latency_ms_p95):
        return Outcome(None, 0.0, math.inf, math.inf, 0.0, rate_per_s, at_s)
    joules = measured.joules_per_request
    if joules is not None and measured.rate_per_s > 0 and rate_per_s > 0:
        joules = max(0.0, joules + idle_w / rate_per_s - idle_w / measured.rate_per_s)
    return Outcome(
        joules,
        measured.accuracy,
        measured.latency_ms_p95,
        measured.latency_ms_p99,
        measured.slo_attainment,
        rate_per_s,
        at_s,
    )


def _surrogate(pod: Pod, goal: Goal, known: Mapping[Graph, Outcome]) -> Surrogate:
    return Surrogate(pod.space, goal, _idle_w(pod), pod.task.mean_per_s, known)


def _idle_w(pod: Pod) -> float:
    """Of all devices of the pod."""
    return sum(kind.idle_w * n for kind, n in pod.space.kinds)


def base_joules(
    inputs: PlanningInput, pod: Pod, known: Mapping[str, Outcome], settings: CloverSettings
) -> float | None:
    """Joules per request of BASE at this demand: as the objective says, by its profile, or as measured."""
    given = pod.task.objective.base_j_per_request
    if given > 0:
        return given
    active = 0.0
    graph = pod.space.deployed(pod.base).graph
    for (variant, name, shape), n in graph.weights:
        kind = next(k for k, _ in pod.space.kinds if k.name == name)
        column = class_column(inputs.known, pod.task, kind, shape, variant, 1, settings)
        if column is None:
            outcome = known.get(pod.base.key)
            return outcome.joules if outcome is not None else None
        active += column.energy_j * n / graph.instances
    return _idle_w(pod) / pod.task.mean_per_s + active


def goal_of(inputs: PlanningInput, pod: Pod, known: Mapping[str, Outcome], settings: CloverSettings) -> Goal | None:
    """Goal that is optimised now; None when C_base is not known (yet)."""
    objective = pod.task.objective
    base_j = base_joules(inputs, pod, known, settings)
    if not base_j:
        return None
    best = inputs.view.catalog.family(pod.family).best
    floor = max(objective.min_accuracy, objective.hard_min_accuracy)
    floor += settings.of(objective).accuracy_margin if floor else 0.0
    loss = settings.of(objective).accuracy_loss_max_pct
    if loss > 0:
        floor = max(floor, best.accuracy * (1 - loss / 100))
    chosen = objective.mode == ObjectiveMode.LAMBDA
    weight = objective.lambda_weight if chosen else settings.of(objective).lambda_weight
    return Goal(
        weight=weight,
        intensity=sum(inputs.intensity(d.zone) for d in pod.devices) / len(pod.devices),
        base_j=base_j,
        base_intensity=objective.base_intensity_g_per_kwh or settings.base_intensity_g_per_kwh,
        base_accuracy=best.accuracy,
        slo_ms=objective.slo_ms,
        quantile=objective.slo_quantile,
        accuracy_min=floor,
        literal=settings.literal,
    )


def setup_text(setup: Setup) -> str:
    """Setup in words: `4xb3 on 1g.5gb + 3xb1 on 2g.10gb`."""
    return " + ".join(f"{n}x{variant} on {shape}" for (variant, _, shape), n in setup.graph.weights)


def explanation(pod: Pod, search: Search, goal: Goal, setup: Setup, known: Mapping[str, Outcome]) -> str:
    """Reason for a setup: what was found, after how much looking, and why it stopped."""
    outcome = known[setup.key]
    carbon, accuracy = goal.gains(outcome)
    each = f" per device ({pod.space.devices} devices)" if pod.space.standardised else ""
    return (
        f"{pod.family}: {setup_text(setup)}{each}: f {goal.value(outcome):.3f} at lambda {goal.weight:g} and "
        f"{goal.intensity:.0f} g/kWh (carbon {carbon:+.1f} % less than BASE, accuracy {accuracy:+.2f} %), "
        f"{outcome.joules:.2f} J a request, p95 {outcome.p95_ms:.0f} ms; {search.evaluated} evaluations, "
        f"{search.measured} measured, {search.violating} against the objective; stopped: {search.stopped}"
    )
