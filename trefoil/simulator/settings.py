"""The live controller's settings, as a scenario asks for them."""

from typing import Final

from controller.core.windows import WindowSettings
from controller.settings import CarbonSettings, ControllerSettings, RolloutSettings
from trefoil.simulator.inputs import Inputs

NEVER_STALE_S: Final = 1e18


class SimulatedSettings(ControllerSettings):
    """The controller's settings; load windows are as wide as the tick."""

    bin_s: float = 0.5
    keep_s: float = 60.0

    @property
    def windows(self) -> WindowSettings:
        return WindowSettings(self.bin_s, self.keep_s, self.measure_s, max(2.0, 4 * self.bin_s))


def settings_of(inputs: Inputs) -> SimulatedSettings:
    """The controller's settings as a scenario asks for them."""
    scenario, control = inputs.scenario, inputs.scenario.control
    tick = scenario.tick_s
    measure_s = control.measure_s or max(10.0, tick)
    initial = {
        family: max(source.mean_per_s(-scenario.warmup_s, max(600.0, tick)), 1e-6)
        for family, source in inputs.arrivals.items()
    }
    return SimulatedSettings(
        policy=inputs.policy.name,
        bin_s=tick,
        keep_s=max(60.0 if tick <= 1 else 0.0, 3 * tick, measure_s),
        tick_s=tick,
        tick_min_s=control.tick_min_s,
        seed=scenario.seed,
        pue=scenario.costs.pue,
        smooth_s=control.smooth_s or max(4.0, tick),
        lookback_s=control.lookback_s or max(6.0, tick),
        slope_s=control.slope_s or max(5.0, 3 * tick),
        measure_s=measure_s,
        move_horizon_s=control.move_horizon_s,
        node_stale_s=NEVER_STALE_S,
        carbon_stale_intervals=NEVER_STALE_S,
        demand_initial_per_s=initial | control.demand_initial_per_s,
        demand_initial_hold_s=control.demand_initial_hold_s,
        demand_fixed=control.demand_fixed,
        start_s=scenario.costs.start_s if control.start_s is None else control.start_s,
        slo_boost_ratio=control.slo_boost_ratio,
        slo_boost_max=control.slo_boost_max,
        slo_boost_wear_s=control.slo_boost_wear_s,
        triggers=control.triggers,
        explore=scenario.explore,
        carbon=CarbonSettings(zone=inputs.zone, method=scenario.carbon.method, factors=scenario.carbon.factors),
        rollout=RolloutSettings(retry_s=control.retry_s),
    )
