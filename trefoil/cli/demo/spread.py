"""Spread of a demo's savings: its own scenario, simulated under several seeds, and the price of accuracy in it.

One live run is one draw. Each seed here gives other arrivals; the first one is the seed of the live run, its simulated
twin. Two runs seldom end at the same mean accuracy, and accuracy costs grams, so that savings are compared at the
accuracy of the run they are of: the other run's grams are corrected by `price_g` per unit of accuracy, which is what
`static_mix` pays for PRICE_STEP more of it, in the mean of all seeds; of several families, or with parameters that it
has not, there is no price. Accuracy is here that of the variants that answered, by family.toml: the mean that was
planned for, without the luck of which image met which variant.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from controller.planners.planner_settings import ExactSettings
from controller.settings import Slo
from trefoil.cli.run.scenario import DemoScenario
from trefoil.comparison.saving import (
    MARGIN,
    OBLIVIOUS,
    PRICE_STEP,
    RunOutcome,
    price_g,
    saving_pct,
    summary,
    what_missed,
)
from trefoil.core.objective import floor_missed
from trefoil.simulator.scenario.demo import demo_scenario, simulate_demo


@dataclass(frozen=True, slots=True)
class SeedRuns:
    """Runs of every policy under one seed."""

    seed: int
    runs: Mapping[str, RunOutcome]


@dataclass(frozen=True, slots=True)
class Spread:
    """Spread over seeds, the live run's own first. `price_g`: grams per request and unit of accuracy."""

    slo_ms: float
    price_g: float
    seeds: tuple[SeedRuns, ...]

    def savings_pct(self, subject: str, against: str) -> list[float]:
        """Savings at equal accuracy of each seed [%]."""
        return [saving_pct(one.runs[subject], one.runs[against], self.price_g) for one in self.seeds]

    def missed(self, subject: str, floor: float) -> list[int]:
        """Seeds under which a policy missed the floor."""
        return [one.seed for one in self.seeds if floor_missed(one.runs[subject].accuracy, floor)]

    def missed_in_mean(self, subject: str, floor: float, slo_quantile: float) -> str:
        """What a policy missed in the mean of the seeds, which makes no saving; "" if nothing."""
        runs = [one.runs[subject] for one in self.seeds]
        attained, accuracy = fmean(run.slo_attainment for run in runs), fmean(run.accuracy for run in runs)
        return what_missed(attained < slo_quantile, floor_missed(accuracy, floor))

    def to_json(self, subject: str, floor: float, slo_quantile: float) -> dict[str, Any]:
        """JSON values of it: each seed with its savings, and their mean, deviation and ends by opponent, unless the
        mean missed what was asked for."""
        others = [name for name in self.seeds[0].runs if name != subject]
        found = {name: self.savings_pct(subject, name) for name in others}
        missed = self.missed_in_mean(subject, floor, slo_quantile)
        return {
            "basis": "simulated",
            "slo_ms": self.slo_ms,
            "price_mg_per_accuracy": 1e3 * self.price_g,
            "missed": missed,
            "saving_pct": {name: None if missed else summary(values) for name, values in found.items()},
            "missed_floor_seeds": self.missed(subject, floor),
            "seeds": [
                {
                    "seed": one.seed,
                    "saving_pct": {name: found[name][n] for name in others},
                    "runs": {name: asdict(run) for name, run in one.runs.items()},
                }
                for n, one in enumerate(self.seeds)
            ],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Spread":
        """Spread that `to_json` wrote."""
        seeds = [SeedRuns(s["seed"], {n: RunOutcome(**r) for n, r in s["runs"].items()}) for s in values["seeds"]]
        return cls(values["slo_ms"], values["price_mg_per_accuracy"] / 1e3, tuple(seeds))


def simulate_spread(
    scenario: DemoScenario, slo: Slo, names: Iterable[str], wanted: Callable[[], bool] = lambda: True
) -> Spread | None:
    """Simulate the policies under `simulated_seeds` seeds; None once nobody wants it any more."""
    priced = not (scenario.more_families or scenario.fleet.real)  # static_mix plans no CPUs
    priced &= scenario.params.keys() <= ExactSettings.model_fields.keys()
    seeds, pairs, asked = [], [], dict.fromkeys((*names, OBLIVIOUS) if priced else names)
    for seed in range(scenario.seed, scenario.seed + scenario.simulated_seeds):
        drawn = scenario.model_copy(update={"seed": seed})
        runs: dict[str, RunOutcome] = {}
        for name in asked:
            if not wanted():
                return None
            runs[name] = _simulated(drawn, name, slo)
        seeds.append(SeedRuns(seed, {name: runs[name] for name in names}))
        if not priced:
            continue
        margin = scenario.params.get(MARGIN, 0.0) + PRICE_STEP
        drawn = drawn.model_copy(update={"params": {**scenario.params, MARGIN: margin}})
        pairs.append((runs[OBLIVIOUS], _simulated(drawn, OBLIVIOUS, slo)))
    return Spread(slo.latency_ms, price_g(pairs) or 0.0, tuple(seeds))


def judged_by_simulation(scenario: DemoScenario) -> DemoScenario:
    """The scenario with SLOs by its rule, of the simulated policy that the rule names: where nothing runs live."""
    rule = scenario.slo_rule
    if not rule.factor:
        return scenario
    provisional = Slo(percentile=rule.percentile, latency_ms=rule.provisional_ms)
    given, arrivals = demo_scenario(scenario, rule.policy, provisional)
    families = simulate_demo(given, arrivals).summary.families
    return scenario.judged({name: found.p95_ms for name, found in families.items()})


def _simulated(scenario: DemoScenario, policy: str, slo: Slo) -> RunOutcome:
    found = simulate_demo(*demo_scenario(scenario, policy, slo)).summary
    return RunOutcome(found.grams_per_request, found.joules_per_request, found.accuracy, found.slo_attainment)
