"""A planned power limit: chosen where a profile has rows at limits; simulated boards slow down as the plan expects."""

from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from controller.planners.exact import ExactPlanner
from controller.planners.planner_settings import ExactSettings
from controller.settings import ControlSettings, RelativeAccuracy
from trefoil.core import power
from trefoil.core.catalog import Catalog
from trefoil.core.common import ProfileRow
from trefoil.core.device_types import device_type
from trefoil.core.queueing import service_time
from trefoil.runtime.repository import load_family
from trefoil.simulator import Provided, Scenario
from trefoil.simulator.report.result import result
from trefoil.simulator.scenario.inputs import prepare
from trefoil.simulator.scenario.schema import Arrivals, Carbon, FamilyObjective, Node, Noise, Served, Zone
from trefoil.simulator.simulation import Simulation

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
BOARD = device_type("Tesla V100-SXM2-32GB")
FAMILY, RATE = "digits", 20.0
LIMITS_W = (150, 175, 200)
NO_LOCK, NO_LIMIT = "clock_lock: a guest", "power_limit: a guest"


@dataclass
class Guests:
    """`exact` on nodes that say what they cannot set."""

    missing: tuple[str, ...]
    clocks: str = "planned"

    def plan(self, view, rng):
        nodes = tuple(replace(node, missing=self.missing) for node in view.fleet.nodes)
        seen = replace(view, fleet=replace(view.fleet, nodes=nodes))
        return ExactPlanner(ExactSettings(clocks=self.clocks, tick_s=86_400.0)).plan(seen, rng)


def profiled(*limits_w: int) -> Catalog:
    """The family on the board without a limit, and under these as the board obeys them."""
    family, rows = load_family(REPOSITORY / FAMILY)
    free = [row for row in rows if row.device_type == BOARD.name]
    limited: list[ProfileRow] = []
    for _, same in groupby(free, lambda row: row.variant):
        alike = list(same)
        for watts in limits_w:
            limited += [replace(row, clock_mhz=-watts) for row in power.rows_at(BOARD, alike, -watts)]
    return Catalog((family,), (*free, *limited))


def run(planner: Guests, *limits_w: int, governor: dict[str, object] | None = None) -> Simulation:
    floors = RelativeAccuracy(below_best_pct=2.0, hard_below_best_pct=10.0)
    wanted = FamilyObjective(type="instant", slo={"latency_ms": 75.0}, accuracy=floors)
    asked = Scenario(
        duration_s=300.0,
        nodes=(Node(devices=(BOARD.name,) * 3),),
        families=(Served(name=FAMILY, repository=REPOSITORY, arrivals=Arrivals(rate_per_s=RATE), objective=wanted),),
        carbon=Carbon(zones={"demo": Zone(constant_g_per_kwh=200.0)}),
        noise=Noise(),
        control=ControlSettings(causes=()),
        **({"governor": "miad", "parts": {"governor": governor}} if governor is not None else {}),
    )
    times = np.arange(-60.0, asked.duration_s, 1 / RATE)
    given = Provided(arrivals={FAMILY: times}, catalog=profiled(*limits_w), truth=profiled(), planner=planner)
    shell = Simulation(prepare(asked, given))
    shell.run(shell.end_s)
    return shell


def limits_of(shell: Simulation) -> set[float]:
    planned = [d for node in shell.core.plans[-1].nodes for d in node.devices if d.slices]
    assert all(device.clock_max_mhz == 0 for device in planned)
    return {device.power_limit_w for device in planned}


@pytest.fixture(scope="module")
def limited() -> Simulation:
    return run(Guests((NO_LOCK,)), *LIMITS_W)


@pytest.fixture(scope="module")
def free() -> Simulation:
    return run(Guests((NO_LOCK, NO_LIMIT)), *LIMITS_W)


def test_a_limit_is_planned_where_the_profile_has_it_and_saves(limited, free):
    assert limits_of(limited) & set(LIMITS_W)
    assert limits_of(limited) <= {0.0, *LIMITS_W}
    assert limits_of(free) == {0.0}, "its nodes take none: planned around"
    assert limits_of(run(Guests((NO_LOCK,)))) == {0.0}, "nothing is known of limits"
    saved, spent = (sum(m.active_j for m in shell.hardware.devices.values()) for shell in (limited, free))
    assert saved < 0.95 * spent
    assert result(limited).summary.joules_per_request < result(free).summary.joules_per_request
    assert result(limited).summary.slo_attainment == 1.0


def test_a_board_under_a_limit_runs_as_it_was_planned(limited, free):
    for shell in (limited, free):
        planned = shell.core.plans[-1].expected[FAMILY]
        assert result(shell).summary.joules_per_request == pytest.approx(planned.joules_per_request, rel=0.02)
    held = [device for device in limited.hardware.devices.values() if device.wanted.power_limit_w]
    assert held
    for device in held:
        (one,) = device.slices.values()
        (hosted,) = one.part.hosted
        (row,) = (
            row
            for row in limited.inputs.estimate.catalog.rows
            if (row.variant, row.batch, row.clock_mhz) == (hosted.variant, 1, -device.wanted.power_limit_w)
        )
        service = limited.hardware.service(device, one.part.key, hosted)
        assert service.service.mean_ms == pytest.approx(service_time(row).mean_ms, rel=0.01)
        assert service.energy_j == pytest.approx(row.energy_active_j_per_batch, rel=0.01)
        assert 0 < device.clock_mhz < max(BOARD.clocks_mhz)


def test_every_joule_of_a_board_under_a_limit_is_booked_once_and_none_exceeds_it(limited):
    for device in limited.hardware.devices.values():
        assert device.counter_j == pytest.approx(device.active_j + device.idle_j + device.unallocated_j)
        most_w = device.wanted.power_limit_w or BOARD.max_w
        assert device.counter_j <= most_w * (60.0 + limited.end_s)


@pytest.mark.parametrize("statistic", ["mean", "slo"])
def test_miad_moves_a_limit_within_what_the_plan_gives_and_keeps_the_slo(statistic, free):
    shell = run(Guests((NO_LOCK,), "governed"), *LIMITS_W, governor={"statistic": statistic, "lever": "power_limit"})
    held = [device for device in shell.hardware.devices.values() if device.slices]
    assert any(0 < device.limit_w < BOARD.power_limit_max_w for device in held)
    assert all(device.wanted.clock_max_mhz == 0 for device in held)
    summary = result(shell).summary
    assert summary.slo_attainment >= 0.95
    assert summary.joules_per_request < result(free).summary.joules_per_request
