"""What every policy of the table keeps: at 0.3, 0.6 and 0.9 of the load that it says it carries, its SLO.

Steady Poisson arrivals, its own control loop, simulated request by request. Rows of policies that cannot say why.
"""

import math

import pytest

from trefoil.comparison.comparison import Row, Run
from trefoil.comparison.report import missed_text
from trefoil.core.policies import POLICIES
from trefoil.installation import CHECKOUT, MODELS
from trefoil.simulator import Scenario
from trefoil.simulator.run import simulate
from trefoil.simulator.scenario.inputs import prepare
from trefoil.simulator.scenario.schema import Arrivals, Carbon, FamilyObjective, Node, Served, Zone
from trefoil.simulator.simulation import Simulation

SHARES = (0.3, 0.6, 0.9)
QUANTILE = 0.95
WARMUP_S, COUNTED_S = 30.0, 60.0
LOW_PER_S, HIGH_PER_S, STEPS = 2.0, 300.0, 7  # of the search for the load
A100 = "A100-SXM4-40GB"
FLEETS = {  # SLO of each family [ms], and the devices
    "mig": ({"digits": 150.0}, (A100, A100)),
    "batches": ({"digits": 150.0}, (A100, A100)),  # requests that wait are joined
    "shared": ({"digits": 150.0, "efficientnet": 510.3}, (A100, A100, A100)),
    "tiers": ({"digits": 200.0}, ("Tesla T4", "Tesla V100-SXM2-32GB")),
    "cpus": ({"resnets": 200.0}, ("cpu:8",)),
}
TIERED = ("paired", "lowenergy", "highperf")
SAYS_NOTHING = ("clover", "blover")  # before it has measured: the load is BASE's
ON_CPUS = ("infadapter", "ms_plus", "vpa_plus", "fixed_size")


def fleet_of(policy: str) -> str:
    planner = POLICIES[policy].planner
    return "tiers" if planner in TIERED else "cpus" if planner in ON_CPUS else "mig"


def scenario(policy: str, fleet: str, rate_per_s: float, seed: int, **control: object) -> Scenario:
    """The policy under steady Poisson arrivals, as many of each family."""
    families, devices = FLEETS[fleet]
    return Scenario(
        seed=seed,
        duration_s=COUNTED_S,
        warmup_s=WARMUP_S,
        nodes=(Node(devices=devices),),
        families=tuple(
            Served(
                name=family,
                repository=MODELS,
                arrivals=Arrivals(rate_per_s=rate_per_s),
                objective=FamilyObjective(
                    type="instant",
                    slo={"percentile": 100 * QUANTILE, "latency_ms": slo_ms},
                    accuracy={"below_best_pct": 2.0},
                ),
                batch_delay_ms=0.0 if fleet == "batches" else None,
            )
            for family, slo_ms in families.items()
        ),
        carbon=Carbon(zones={"demo": Zone(constant_g_per_kwh=200.0)}),
        policy=policy,
        control={"demand_initial_per_s": dict.fromkeys(families, rate_per_s), **control},
    )


def says_it_carries(policy: str, fleet: str, rate_per_s: float) -> bool:
    """Whether the first plan for a demand says that it carries it, and lacks nothing."""
    families = FLEETS[fleet][0]
    fixed = {family: {"rate_per_s": rate_per_s, "rate_p90_per_s": rate_per_s} for family in families}
    shell = Simulation(prepare(scenario(policy, fleet, rate_per_s, 1, demand_fixed=fixed)))
    shell.run(1.0 - WARMUP_S)
    plan = shell.core.current
    if plan is None or plan.degraded or set(plan.expected) != set(families):
        return False
    return all(expected.capacity_per_s >= 0.999 * rate_per_s for expected in plan.expected.values())


def load_of(policy: str, fleet: str) -> float:
    """The largest load that a policy says it carries [1/s], by bisection."""
    low, high = LOW_PER_S, HIGH_PER_S
    assert says_it_carries(policy, fleet, low)
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if says_it_carries(policy, fleet, middle) else (low, middle)
    return low


def missed(policy: str, fleet: str, load: float) -> list[float]:
    """Shares of a load at which fewer answers of a family are in time than the SLO wants, by more than chance."""
    found = []
    for share in SHARES:
        for one in simulate(scenario(policy, fleet, share * load, 7)).summary.families.values():
            error = 3 * math.sqrt(QUANTILE * (1 - QUANTILE) / one.arrived)
            if one.slo_attainment < QUANTILE - error:
                found.append(share)
    return found


def kept() -> list[object]:
    """Policies that keep their SLO; ORACLE looks at 1,282 graphs for each load."""
    names = [name for name, row in POLICIES.items() if not row.misses]
    return [pytest.param(name, marks=pytest.mark.long) if name == "oracle" else name for name in names]


@pytest.mark.parametrize("policy", kept())
def test_a_policy_keeps_its_slo_at_the_loads_that_it_says_it_carries(policy):
    fleet = fleet_of(policy)
    assert missed(policy, fleet, load_of("base" if policy in SAYS_NOTHING else policy, fleet)) == []


@pytest.mark.parametrize("policy", ["base", "exact", "wattwiser", "uniform", "alpaserve"])
def test_where_requests_are_joined_a_policy_carries_more_and_keeps_its_slo(policy):
    load = load_of(policy, "batches")
    assert load > load_of(policy, "mig")
    assert missed(policy, "batches", load) == []


@pytest.mark.parametrize("policy", ["wattwiser", "sharing_aware", "packed_uniform", "alpaserve"])
def test_families_that_share_a_gpu_keep_their_slos(policy):
    assert missed(policy, "shared", load_of(policy, "shared")) == []


@pytest.mark.parametrize("policy", [name for name, row in POLICIES.items() if row.misses])
def test_a_policy_whose_row_says_that_it_misses_its_slo_does_and_docs_and_comparisons_say_why(policy):
    fleet = fleet_of(policy)
    assert missed(policy, fleet, load_of(policy, fleet))
    why = POLICIES[policy].misses
    assert why in (CHECKOUT / "docs" / "policies.md").read_text()
    asked = {"slo_quantile": 0.95, "floor": 0.9, "arrived": 9, "answered": 9}
    digits = {"slo_attainment": 0.5, "accuracy": 1.0, **asked}
    late = Run(policy, 1, "", {"families": {"digits": digits}, "slo_missed": True, "floor_missed": False})
    assert missed_text(Row(policy, (late,))) == f"SLO: {why}"
