"""A planned clock: the simulated slices slow down and save as the plan expects, and as the simulated driver has it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from controller.settings import ControlSettings, FixedDemand, RelativeAccuracy
from trefoil.core import power
from trefoil.core.catalog import Catalog
from trefoil.core.device_types import A100_40GB
from trefoil.core.fleet import Hosted
from trefoil.runtime.repository import load_family
from trefoil.simulated_node.pace_file import family_crc32
from trefoil.simulated_node.workload import Workload
from trefoil.simulator import Provided, Scenario
from trefoil.simulator.engines.hardware import true_service
from trefoil.simulator.report.result import result
from trefoil.simulator.scenario.inputs import prepare
from trefoil.simulator.scenario.schema import (
    Arrivals,
    Carbon,
    FamilyObjective,
    Node,
    Noise,
    Served,
    Zone,
)
from trefoil.simulator.simulation import Simulation

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
FLOORS = RelativeAccuracy(below_best_pct=2.0, hard_below_best_pct=10.0)
FAMILY, BATCH, RATE = "efficientnet", 8, 2.0


def scenario(clocks: str, slo_ms: float) -> Scenario:
    """One steady flow on two GPUs, planned once."""
    wanted = FamilyObjective(type="instant", slo={"latency_ms": slo_ms}, accuracy=FLOORS)
    arrivals = Arrivals(rate_per_s=RATE)
    return Scenario(
        duration_s=600.0,
        nodes=(Node(devices=(A100_40GB.name,) * 2),),
        families=(Served(name=FAMILY, repository=REPOSITORY, items=BATCH, arrivals=arrivals, objective=wanted),),
        carbon=Carbon(zones={"demo": Zone(constant_g_per_kwh=200.0)}),
        noise=Noise(),
        policy="exact",
        parts={"planner": {"clocks": clocks, "tick_s": 86_400.0}},
        control=ControlSettings(causes=()),
    )


def run(clocks: str, slo_ms: float = 1300.0):
    asked = scenario(clocks, slo_ms)
    times = np.arange(-60.0, asked.duration_s, 1 / RATE)  # whenever the planner looks, it sees this rate
    shell = Simulation(prepare(asked, Provided(arrivals={FAMILY: times})))
    shell.run(shell.end_s)
    return shell, result(shell).summary


@pytest.fixture(scope="module")
def slow():
    return run("planned")


@pytest.fixture(scope="module")
def fast():
    return run("highest")


def clock_of(shell: Simulation) -> int:
    (clock,) = {m.clock_mhz for m in shell.hardware.devices.values() if m.slices}
    return clock


def test_what_is_measured_is_what_was_planned(slow, fast):
    for shell, summary in (slow, fast):
        planned = shell.core.plans[-1].expected[FAMILY]
        assert summary.joules_per_request == pytest.approx(planned.joules_per_request, rel=0.01)
        # Arrivals are even here, not by chance: nobody waits longer than planned.
        assert summary.p95_ms <= planned.latency_ms_p95 * 1.01
        assert summary.accuracy == pytest.approx(planned.accuracy, abs=1e-3)
    shell, summary = slow  # a pool so large that a request hardly ever waits: its service time is what is left
    assert summary.p95_ms == pytest.approx(shell.core.plans[-1].expected[FAMILY].latency_ms_p95, rel=0.01)


def test_a_lower_clock_is_slower_and_cheaper(slow, fast):
    assert 0 < clock_of(slow[0]) < max(A100_40GB.clocks_mhz)
    assert clock_of(fast[0]) == 0
    assert slow[1].p50_ms > 1.1 * fast[1].p50_ms
    active = [sum(m.active_j for m in shell.hardware.devices.values()) for shell, _ in (slow, fast)]
    assert active[0] < 0.95 * active[1]
    assert slow[1].joules_per_request < fast[1].joules_per_request


@pytest.mark.parametrize("clock_mhz", [0, 735, 1005, 1410, 900, 1200])
def test_the_simulator_and_the_simulated_driver_have_one_law(clock_mhz, slow):
    whole = slow[0].inputs.truth.catalog
    catalog = Catalog(whole.families, tuple(r for r in whole.rows if r.batch == BATCH))
    at = clock_mhz or max(A100_40GB.clocks_mhz)
    driver = Workload(A100_40GB, catalog)
    for shape in ("1g.5gb", "4g.20gb"):
        loaded = driver.versions(shape, at)
        for variant in catalog.family(FAMILY).variants:
            hosted = Hosted(FAMILY, variant.name, variant.version, 0, 1, 1, BATCH)
            truth = true_service(catalog, A100_40GB, shape, hosted, BATCH, 0.0, clock_mhz)
            (point,) = loaded[family_crc32(FAMILY), variant.version].operations
            assert truth.service.mean_ms == pytest.approx(point.service_ms_mean)
            full_w = power.active_w(A100_40GB, shape, at, point.density)
            assert truth.energy_j == pytest.approx(full_w * point.service_ms_mean / 1e3)


def governed(
    sensitivity: float, governor: str = "miad", fidelity: str = "request", rate_per_s: float = 15.0, **more: object
) -> Simulation:
    """`base`, one digits-l on each of two whole GPUs, at a load at which hardly anybody waits."""
    family, rows = load_family(REPOSITORY / "digits")
    catalog = Catalog((family,), tuple(replace(row, clock_sensitivity=sensitivity) for row in rows))
    wanted = FamilyObjective(type="instant", slo={"latency_ms": 75.0}, accuracy=FLOORS)
    served = Served(name="digits", repository=REPOSITORY, arrivals=Arrivals(rate_per_s=rate_per_s), objective=wanted)
    asked = Scenario(
        duration_s=120.0,
        fidelity=fidelity,
        nodes=(Node(devices=(A100_40GB.name,) * 2),),
        families=(served,),
        carbon=Carbon(zones={"demo": Zone(constant_g_per_kwh=200.0)}),
        noise=Noise(),
        **{"policy": "base", "governor": governor, **more},
    )
    shell = Simulation(prepare(asked, Provided(catalog=catalog)))
    shell.run(shell.end_s)
    return shell


@pytest.mark.parametrize("fidelity", ["request", "fluid"])
def test_the_agents_governor_settles_in_simulations_where_the_law_lets_it(fidelity):
    fixed = governed(1.0, "fixed", fidelity)
    low, half, high = (governed(sensitivity, fidelity=fidelity) for sensitivity in (0.0, 0.5, 1.0))
    assert {m.clock_mhz for m in low.hardware.devices.values()} == {210}, "nothing follows the clock: the floor"
    assert result(low).summary.slo_attainment == result(fixed).summary.slo_attainment == 1.0, "without a miss"
    clocks = [max(m.clock_mhz for m in shell.hardware.devices.values()) for shell in (low, half, high)]
    assert 210 == clocks[0] < clocks[1] < clocks[2] < 1410
    spent = [result(shell).summary.joules_per_request for shell in (low, half, high, fixed)]
    assert spent == sorted(spent)
    assert spent[0] < 0.85 * spent[-1]
    for shell in (half, high):
        assert result(shell).summary.p50_ms < 75.0 * 0.97, "in the mean there is slack left"


def test_a_governor_that_cannot_go_higher_has_the_controller_plan_for_more():
    fixed = {"digits": FixedDemand(rate_per_s=25.0, rate_p90_per_s=30.0)}
    told = ControlSettings(demand_fixed=fixed, causes=("scale",))
    chosen = {"policy": "exact", "governor": "miad", "parts": {"planner": {"tick_s": 86_400.0}}}
    for rate, causes in ((20.0, {"start"}), (110.0, {"start", "scale"})):
        shell = governed(1.0, **chosen, control=told, rate_per_s=rate)
        assert result(shell).summary.causes.keys() == causes
    assert shell.core.slo_margin.by_family["digits"] > 0
    before, *_, after = (plan.expected["digits"].capacity_per_s for plan in shell.core.plans)  # in one step or more
    assert 30.0 <= before < after
    assert after >= 30.0 * (1 + shell.core.slo_margin.step)
