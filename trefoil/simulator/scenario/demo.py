"""The live demo as a scenario of the simulator: made from the same settings, so that both can be held side by side.

Everything that decides is taken from deploy/config/demo.toml and from the defaults of the services that it starts: the
very arrivals (the same seed through the same generator), the same trace with the same clock, the same objective, the
controller's own periods. What a machine adds (time in processes, starting a Triton) stands in `MeasuredDelays`. It is
measured on the live system (benchmarks/parity.py prints what it finds). Nothing is fitted to make the two agree.

Left out on purpose: contention for the CPU among Tritons, services and load; jitter of processes and of Redis; the time
that deciding takes. Also left out: the warm-up batch of a slice; the error of the meter. See docs/simulator.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from controller.planners.policy_parts import presets_of
from controller.settings import ControllerSettings, ControlSettings, Slo
from trefoil.cli.load.arrivals import RateProfile
from trefoil.cli.run.scenario import DemoScenario as Demo
from trefoil.cli.run.services import profile_overrides
from trefoil.core.parts import Kind, Value
from trefoil.core.policies import preset_settings
from trefoil.installation import resolve_path
from trefoil.simulator.report.result import Result, result
from trefoil.simulator.scenario.inputs import Provided, prepare
from trefoil.simulator.scenario.schema import Scenario
from trefoil.simulator.simulation import Simulation

OBJECTIVE_LEAD_S: Final = 1.0  # as trefoil.cli.demo.run_policy: the objective is set again just before second 0
FEED_LEAD_S: Final = 2.0  # by then the feed that was started again, to begin its trace at second 0, is up


@dataclass(frozen=True, slots=True)
class MeasuredDelays:
    """Delays that the processes of the live system add, on the machine at hand."""

    overhead_ms: float = 2.0
    """Client to dispatcher and back."""
    gap_ms: float = 2.0
    """Dispatcher to slice and back: the slice is taken but does not compute."""
    start_s: float = 2.0
    """Start of a Triton, until its model loads."""
    ack_s: float = 0.6
    """Until every dispatcher routes by a new table."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times at which a live system was started, before second 0; all that it decides depends on them."""

    first_plan_s: float = -12.0
    feed_s: float = -17.0
    """From then on the feed counts its steps, holding the trace's first value."""


def demo_scenario(
    demo: Demo,
    policy: str,
    slo: Slo,
    delays: MeasuredDelays | None = None,
    timeline: Timeline | None = None,
    controller: Mapping[str, Any] | None = None,
) -> tuple[Scenario, Provided]:
    """Scenario and arrivals that correspond to one run of the demo.

    `controller`: settings of the live controller that differ from its defaults.
    """
    delays, timeline = delays or MeasuredDelays(), timeline or Timeline()
    judged = demo.model_copy(update={"slo": slo})
    live = ControllerSettings(**(controller or {}))
    values: dict[str, Any] = {
        "name": f"{demo.name}-{policy}",
        "seed": demo.seed,
        "duration_s": demo.duration_s,
        "warmup_s": -timeline.first_plan_s,
        "series_s": 1.0,
        "nodes": [{"name": demo.fleet.node, "zone": demo.carbon.zone, "devices": demo.fleet.devices}],
        "families": [_family(judged, family) for family in demo.loads],
        "carbon": {
            "zones": {demo.carbon.zone: {"trace": resolve_path(demo.carbon.trace) if demo.carbon.trace else None}},
            "step_h": demo.carbon.step_h,
            "speedup": demo.carbon.speedup,
            "forecast": "none",  # as trefoil.cli.demo.run_policy sets it: the trace is too short to learn one from
        },
        "policy": policy,
        **{kind.value: getattr(demo, kind) for kind in Kind},
        "parts": {**demo.parts, Kind.PLANNER: {**_preset(demo, policy), **demo.parts.get(Kind.PLANNER, {})}},
        "params": demo.params,
        "control": _control(demo, live),
        "costs": {
            "overhead_ms": delays.overhead_ms,
            "gap_ms": delays.gap_ms,
            "start_s": delays.start_s,
            "ack_s": delays.ack_s,
        },
    }
    return Scenario(**values), Provided(arrivals={family: arrivals_s(demo, family) for family in demo.loads})


def _preset(demo: Demo, policy: str) -> Mapping[str, Value]:
    """Settings of the demo's preset for a policy's planner; none where it does not take them."""
    row = demo.policy_row(policy)
    return preset_settings(row.planner, demo.preset) if demo.preset in presets_of(row) else {}


def _family(demo: Demo, family: str) -> dict[str, Any]:
    """What is served, asked for and wanted of a family."""
    override, slo, load = profile_overrides(demo).get(family), demo.slo_of(family), demo.loads[family]
    objective = {
        "type": demo.objective_type,
        "slo": slo.model_dump(),
        "accuracy": demo.accuracy.model_dump(),
        "window_s": demo.duration_s,
        "availability": demo.availability.model_dump(),
        "lambda_weight": demo.lambda_weight,
    }
    return {
        "name": family,
        "repository": demo.family.repository,
        "profile": override,
        "batch_delay_ms": 0.0 if demo.dynamic_batching else None,  # Triton's default, which the demo keeps
        "items": load.items_mean,
        "items_sd": load.items_sd,
        "arrivals": {"points": load.points(demo.duration_s)},
        "objective": objective,
    }


def _control(demo: Demo, live: ControllerSettings) -> dict[str, Any]:
    """The controller's own periods and thresholds."""
    return {name: getattr(live, name) for name in ControlSettings.model_fields} | {
        "pue": demo.pue,
        "move_horizon_s": demo.move_horizon_s,
        "demand_initial_per_s": demo.demands_initial_per_s,
    }


def arrivals_s(demo: Demo, family: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Arrival times of the demo's requests of a family [s]; the warm-up lies before second 0."""
    points = demo.loads[family].points(demo.duration_s)
    if demo.warmup_s > 0:
        points = ((0.0, points[0][1]), *((at_s + demo.warmup_s, rate) for at_s, rate in points))
    return RateProfile(points).times_s(demo.seeds[family]) - demo.warmup_s


def simulate_demo(scenario: Scenario, given: Provided, timeline: Timeline | None = None) -> Result:
    """Simulate one run of the demo: as live, the feed and the objective begin again just before what counts."""
    timeline, inputs = timeline or Timeline(), prepare(scenario, given)
    intensity = inputs.carbon[inputs.zone]
    played = intensity.played
    intensity.played = replace(played, starts_at_s=math.inf, created_at_s=timeline.feed_s)
    simulation = Simulation(inputs, keep_records=True)
    simulation.run(-FEED_LEAD_S)
    intensity.played = played
    simulation.restart_feed()
    simulation.run(-OBJECTIVE_LEAD_S)
    simulation.renew_objectives()
    simulation.run(simulation.end_s)
    return result(simulation)
