"""How long a demo takes, by its scenario: for people who wait."""

import os
from typing import Final

from trefoil.cli.run.scenario import DemoScenario

AROUND_S: Final = 22.0
"""Of a run, beside load and warm-up: services start, the first plan is rolled out, all of it is stopped."""
SIMULATED_RATIO: Final = 0.03
"""CPU time of a simulated run in its length."""
PRICED_RUNS: Final = 2
"""Simulated runs a seed that price accuracy, beside those of the policies."""


def run_s(scenario: DemoScenario) -> float:
    """Time of one live run."""
    return AROUND_S + scenario.warmup_s + scenario.duration_s


def simulated_s(scenario: DemoScenario) -> float:
    """Time of all simulated runs."""
    if scenario.fleet.real:
        return 0.0
    runs = scenario.simulated_seeds * (len(scenario.policies) + PRICED_RUNS)
    return runs * SIMULATED_RATIO * scenario.duration_s / (os.cpu_count() or 1)


def total_s(scenario: DemoScenario) -> float:
    """Time of the whole demo."""
    rule = scenario.slo_rule
    measured_s = AROUND_S + scenario.warmup_s + rule.rounds * rule.measure_s if rule.factor else 0.0
    return measured_s + len(scenario.policies) * run_s(scenario) + simulated_s(scenario)


def left_s(scenario: DemoScenario, number: int, at_s: float) -> float:
    """Time that is left in second `at_s` of a run, counted from 1."""
    runs_s = (len(scenario.policies) - number) * run_s(scenario)
    return max(0.0, scenario.duration_s - at_s) + runs_s + simulated_s(scenario)
