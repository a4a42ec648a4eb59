"""A key that was removed or renamed is refused with what to write instead."""

from copy import deepcopy

import pytest

from carbon_feed.settings import CarbonFeedSettings
from controller.planners.planner_settings import PlannerSettings
from controller.planners.table import PLANNERS
from controller.settings import ControllerSettings
from dispatcher.settings import DispatcherSettings
from power_agent.settings import PowerAgentSettings
from trefoil.cli.run.scenario import System
from trefoil.core.errors import SettingError
from trefoil.core.parts import Kind, load_part
from trefoil.runtime import config
from trefoil.simulator.scenario.schema import Scenario

SCENARIO = {"hours": 1.0, "families": [{"name": "digits", "arrivals": {"rate_per_s": 1.0}}]}
OBJECTIVE = {"family": "digits", "slo": {"latency_ms": 80.0}}
GIVEN = {
    Scenario: SCENARIO,
    ControllerSettings: {"objectives": [OBJECTIVE]},
    System: {"more_families": [{"name": "resnets"}]},
}
OLD = [
    (DispatcherSettings, "retry_burst", config.FIXED),
    (DispatcherSettings, "cancel_grace_s", config.FIXED),
    (PowerAgentSettings, "power_poll_s", config.FIXED),
    (CarbonFeedSettings, "polling.hard_ttl_s", config.FIXED),
    (CarbonFeedSettings, "watchers_max", config.FIXED),
    (CarbonFeedSettings, "history_max", config.FIXED),
    (ControllerSettings, "slope_s", "set parts.forecaster.slope_s"),
    (ControllerSettings, "slope_sigmas", config.FIXED),
    (ControllerSettings, "triggers.load_sigmas", config.FIXED),
    (ControllerSettings, "rollout.refusal_retry_s", config.FIXED),
    (ControllerSettings, "slo_boost_max", config.FIXED),
    (ControllerSettings, "receipts.memory_s", config.FIXED),
    (ControllerSettings, "explore.pause_s", config.FIXED),
    (ControllerSettings, "carbon.history_max", config.FIXED),
    (ControllerSettings, "objectives.0.slo_quantile", "set slo.percentile"),
    (ControllerSettings, "objectives.0.mode", "set type"),
    (System, "objective_mode", "set objective_type"),
    (Scenario, "families.0.objective.mode", "set type"),
    (ControllerSettings, "objectives.0.pue", "set pue of the controller"),
    (System, "more_families.0.latency_ms", "set slo.latency_ms"),
    (Scenario, "families.0.objective.below_best_pct", "set accuracy.below_best_pct"),
    (Scenario, "carbon.zones.demo.column", "set value_column"),
    (Scenario, "costs.pue", "set control.pue"),
    (Scenario, "costs.mig_s", config.FIXED),
    (Scenario, "explore.settle_s", "set control.explore"),
    (Scenario, "policy.triggers", "set control.causes"),
    (Scenario, "policy.name", "set policy"),
    (Scenario, "policy.parts.planner.tick_s", "set parts"),
    (Scenario, "control.retry_s", "control.rollout.retry_s"),
    (Scenario, "control.smooth_s", "set parts.forecaster.smooth_s"),
]


@pytest.mark.parametrize(("settings", "key", "remedy"), OLD)
def test_an_old_key_is_refused_with_the_new_ones_name(settings, key, remedy):
    with pytest.raises(SettingError) as refused:
        config.load(settings, overrides={**deepcopy(GIVEN.get(settings, {})), key: "7"})
    assert remedy in refused.value.remedy


def test_an_old_key_is_named_before_the_new_one_that_it_lacks():
    with pytest.raises(SettingError, match=r"slo_ms: unknown setting .*Remedy: set slo.latency_ms"):
        ControllerSettings(objectives=({"family": "digits", "slo_ms": 80.0},))


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_refuses_what_planners_had_with_what_to_write_instead(planner):
    part = load_part(Kind.PLANNER, planner, PLANNERS)
    for key, remedy in PlannerSettings.REMOVED.items():
        with pytest.raises(SettingError) as refused:
            part.settings_of({key: 1.0})
        assert refused.value.remedy == remedy
