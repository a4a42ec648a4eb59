"""Simulations give forecasters the past that live ones have; policies need not know which one forecasts."""

import pytest

from trefoil.simulator.scenario.inputs import prepare
from trefoil.simulator.scenario.schema import Scenario
from trefoil.simulator.simulation import Simulation

TEN_MINUTES_S = 600.0


def simulated(forecaster, planner="exact", **parts) -> Simulation:
    """Twelve minutes: a spike in the last of them."""
    scenario = Scenario(
        seed=3,
        duration_s=720.0,
        warmup_s=0.0,
        step_s=1.0,
        fidelity="fluid",
        nodes=({"devices": ["A100-SXM4-40GB"]},),
        families=(
            {
                "name": "digits",
                "arrivals": {"points": [(0.0, 20.0), (650.0, 20.0), (652.0, 60.0), (720.0, 60.0)]},
                "objective": {"slo": {"latency_ms": 200.0}, "accuracy": {"floor": 0.95}},
            },
        ),
        carbon={"zones": {"demo": {"constant_g_per_kwh": 200.0}}},
        policy=planner,
        forecaster=forecaster,
        parts={"forecaster": parts},
    )
    return Simulation(prepare(scenario))


def forecast(shell: Simulation):
    return shell.observation.forecasts["digits"]


@pytest.mark.parametrize("planner", ["exact", "base"])
def test_lstm_forecasts_once_ten_minutes_are_there_under_every_planner(planner):
    shell = simulated("lstm", planner)
    shell.run(TEN_MINUTES_S - 20)
    assert forecast(shell).model == "last_max"
    assert "lstm needs 600 s of history" in forecast(shell).fallback_reason
    shell.run(TEN_MINUTES_S + 30)
    assert (forecast(shell).model, forecast(shell).fallback_reason) == ("lstm", "")
    assert 15 <= forecast(shell).max_per_s <= 40


def test_oracle_plans_for_a_spike_before_it_is_there():
    shell = simulated("oracle")
    shell.run(580.0)
    assert forecast(shell).max_per_s == pytest.approx(20.0)
    shell.run(600.0)
    assert forecast(shell).max_per_s == pytest.approx(60.0, rel=0.01)
