"""Inputs of a history: two nodes, one family, settings as of the whole systems; load and carbon drawn from the seed."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.planners.policy_parts import with_policy_parts
from controller.settings import RolloutSettings, TriggerSettings
from tests.support.cores.around import Exploring, Planning
from tests.support.planning import digits
from tests.support.virtual.planner import FAMILY
from trefoil.simulator.engines.engine import SliceService
from trefoil.simulator.scenario.arrivals import RecordedArrivals
from trefoil.simulator.scenario.carbon import intensity_of
from trefoil.simulator.scenario.inputs import Inputs, Provided, SimulatedSettings, prepare, settings_of
from trefoil.simulator.scenario.schema import Arrivals, Costs, FamilyObjective, Node, PolicyChoice, Scenario, Served

FAULTS_S: Final = (6.0, 20.0)  # between these, faults strike
QUIET_S: Final = 20.0  # after the last one, in which everything has to be well again
END_S: Final = FAULTS_S[1] + QUIET_S
DRAINS_S: Final = 3.0  # drain_timeout_s and ack_timeout_s
CARBON_S: Final = 3.0  # between readings
RATES_PER_S: Final = (2.0, 5.0, 9.0, 14.0)


@functools.cache
def prepared() -> tuple[Inputs, SimulatedSettings]:
    """What all histories have in common."""
    kind = "A100-SXM4-40GB"
    served = Served(
        name=FAMILY,
        repository=Path("unused"),
        arrivals=Arrivals(rate_per_s=6.0),
        objective=FamilyObjective(slo={"latency_ms": 400.0}),
    )
    scenario = Scenario(
        duration_s=END_S,
        series_s=END_S,
        warmup_s=0.0,
        nodes=tuple(Node(name=f"node{i}", devices=(kind, kind)) for i in range(2)),
        families=(served,),
        policy=PolicyChoice(name="exact"),
        costs=Costs(start_s=0.5, stop_s=0.1, mig_s=0.1),
    )
    given = Provided(
        catalog=digits(load_s=0.3),
        planner=Planning(),
        arrivals={FAMILY: np.array([0.5])},
        carbon={"demo": (3.0, (300.0,))},
    )
    inputs = prepare(scenario, given)
    settings = settings_of(inputs).model_copy(
        update={
            "node_stale_s": 3.0,
            "carbon_stale_intervals": 2.0,
            "demand_initial_per_s": {FAMILY: 6.0},
            "solve_timeout_s": 2.0,
            "triggers": TriggerSettings(load_hold_s=2.0, loss_hold_s=1.0),
            "rollout": RolloutSettings(
                ready_timeout_s=6.0, ack_timeout_s=DRAINS_S, drain_timeout_s=DRAINS_S, poll_s=0.25, retry_s=2.0
            ),
            "decisions_max": 50,
            "plans_kept": 3,
        }
    )
    return inputs, settings


@functools.cache
def true_services() -> dict[Any, SliceService]:
    """What the hardware of any history has found out of the truth, which is the same in all of them."""
    return {}


def drawn_inputs(common: Inputs, seed: int) -> Inputs:
    """Load and carbon of this seed: some change in the time of the faults."""
    rng = np.random.default_rng([seed, 9])
    starts_s, rate = [0.0], [6.0]
    for _ in range(int(rng.integers(0, 3))):
        starts_s.append(float(rng.uniform(*FAULTS_S)))
        rate.append(float(rng.choice(RATES_PER_S)))
    order = np.argsort(starts_s)
    ends_s = [*np.array(starts_s)[order][1:], END_S - 3.0]
    arrivals: list[float] = []
    for from_s, until_s, per_s in zip(np.array(starts_s)[order], ends_s, np.array(rate)[order], strict=True):
        count = rng.poisson(per_s * (until_s - from_s))
        arrivals += rng.uniform(from_s, until_s, count).tolist()
    values = [300.0] * 14
    for _ in range(int(rng.integers(1, 4))):
        step = int(rng.integers(int(FAULTS_S[0] / CARBON_S), int(FAULTS_S[1] / CARBON_S)))
        values[step:] = [float(rng.uniform(50.0, 500.0))] * (14 - step)
    carbon = {zone: intensity_of(zone, common.scenario.carbon, (CARBON_S, values)) for zone in common.carbon}
    scenario = common.scenario.model_copy(update={"seed": seed})
    planner = with_policy_parts(Exploring() if seed % 3 == 2 else Planning(), common.policy)
    recorded = {FAMILY: RecordedArrivals(np.sort(np.array(arrivals)))}
    return replace(common, scenario=scenario, arrivals=recorded, carbon=carbon, planner=planner)
