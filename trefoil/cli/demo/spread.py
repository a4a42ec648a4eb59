"""Spread of a demo's savings: its own scenario, compared under several seeds in simulated time.

One live run is one draw. Each seed here gives other arrivals; the first one is the seed of the live run, its simulated
twin. What a saving is stands in trefoil/comparison/comparison.py. Accuracy is here that of the variants that answered,
by family.toml: the mean that was planned for, without the luck of which image met which variant.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from controller.planners.planner_settings import ExactSettings
from controller.settings import Slo
from trefoil.cli.run.scenario import PROVISIONAL_MS, DemoScenario
from trefoil.comparison.comparison import Comparison, Saving
from trefoil.comparison.runs import Job, PlannedCase, play
from trefoil.comparison.saving import MARGIN, OBLIVIOUS, PRICE_STEP
from trefoil.reproduce.runs import StudyRun
from trefoil.simulator.scenario.demo import demo_scenario, simulate_demo


@dataclass(frozen=True, slots=True)
class DemoJob(Job):
    """Job of one run of the demo under the policy `row`; `scenario` is the demo's."""

    def play(self) -> StudyRun:
        """Simulate it, and say which arrivals it met."""
        demo = DemoScenario.model_validate_json(self.scenario)
        scenario, given = demo_scenario(demo, self.row, demo.slo)
        met = hashlib.sha256(b"".join(name.encode() + times.tobytes() for name, times in given.arrivals.items()))
        summary = json.loads(simulate_demo(scenario, given).to_json())["summary"]
        return StudyRun(self, {**summary, "arrivals": met.hexdigest()[:12]}, {})


def simulate_spread(
    scenario: DemoScenario, slo: Slo, names: Iterable[str], jobs: int, say: Callable[[str], None] = lambda _text: None
) -> Comparison:
    """Compare the policies under `simulated_seeds` seeds. `jobs`: runs side by side, 0: one per core."""
    seeds = tuple(range(scenario.seed, scenario.seed + scenario.simulated_seeds))
    demos = [scenario.model_copy(update={"slo": slo, "seed": seed}) for seed in seeds]
    pairs: tuple[tuple[Job, Job], ...] = ()
    # static_mix plans no CPUs, and pays for the accuracy of one family by its own parameters
    if (
        not (scenario.more_families or scenario.fleet.real)
        and scenario.params.keys() <= ExactSettings.model_fields.keys()
    ):
        params = {**scenario.params, MARGIN: scenario.params.get(MARGIN, 0.0) + PRICE_STEP}
        dear = [demo.model_copy(update={"params": params}) for demo in demos]
        pairs = tuple((_job(OBLIVIOUS, a), _job(OBLIVIOUS, b)) for a, b in zip(demos, dear, strict=True))
    rows = {name: tuple(_job(name, demo) for demo in demos) for name in names}
    cases = play([PlannedCase({}, rows, pairs, {})], jobs, say)
    return Comparison(scenario.name, scenario.duration_s, tuple(rows), seeds, cases)


def _job(name: str, demo: DemoScenario) -> DemoJob:
    return DemoJob(name, demo.model_dump_json())


def savings_of(found: Comparison, subject: str) -> dict[str, Saving]:
    """Saving of one policy against each other one."""
    (case,) = found.cases
    ours = case.row(subject)
    savings = {row.name: case.saving(ours, row) for row in case.rows}
    return {name: saving for name, saving in savings.items() if saving is not None}


def judged_by_simulation(scenario: DemoScenario) -> DemoScenario:
    """The scenario with SLOs by its rule, of the simulated policy that the rule names: where nothing runs live."""
    rule = scenario.slo_rule
    if not rule.factor:
        return scenario
    provisional = Slo(percentile=rule.percentile, latency_ms=PROVISIONAL_MS)
    given, arrivals = demo_scenario(scenario, rule.policy, provisional)
    families = simulate_demo(given, arrivals).summary.families
    return scenario.judged({name: found.p95_ms for name, found in families.items()})
