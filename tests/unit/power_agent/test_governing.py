"""A device's governor: made by name, stepped when the plan changes and at its time, kept inside the plan's range."""

from dataclasses import replace

import pytest

from power_agent.clocks.core.clock_control import Ability, ClockRange
from power_agent.clocks.core.device_governor import DeviceGovernor, stages_of
from power_agent.governors import governor_of
from tests.support.clock_bench import GPU, Bench, clock_plan
from trefoil.core.brains import ClockDecision, GovernorView
from trefoil.core.errors import PlanError, SettingError
from trefoil.core.fleet import Hosted
from trefoil.core.plan import PlannedDevice, PlannedSlice

STAIRS = "tests.support.seam.governor:Stairs"
CLOCKS = tuple(range(210, 1411, 15))
ABILITY = Ability(GPU, "A100-SXM4-40GB", CLOCKS)


class Wild:
    """Wants what no device has."""

    def step(self, view: GovernorView) -> ClockDecision:
        return ClockDecision(5000 if view.now_s < 1 else 1, "wild", view.now_s + 1, scale_out=False)


def planned(low: int = 0, high: int = 0, governor: str = "") -> PlannedDevice:
    return PlannedDevice(GPU, clock_min_mhz=low, clock_max_mhz=high, governor=governor)


@pytest.mark.parametrize(
    ("low", "high", "locks"),
    [(0, 0, None), (0, 900, ClockRange(210, 900)), (600, 0, ClockRange(600, 1410)), (607, 907, ClockRange(600, 900))],
)
def test_fixed_and_a_plan_that_names_none_hold_the_plans_range(low, high, locks):
    for name in ("", "fixed"):
        one = DeviceGovernor("", {})
        assert one.range(planned(low, high, name), ABILITY, 0, True, 0.0) == locks
        assert one.next_s == float("inf")


def test_a_governor_is_stepped_when_the_plan_changes_and_at_its_time_and_not_between():
    one, plan = DeviceGovernor("", {"step_mhz": 300}), planned(0, 1200, STAIRS)
    ceilings = [one.range(plan, ABILITY, 0, True, t).max_mhz for t in (0.0, 0.5, 1.0, 1.9, 2.0)]
    assert ceilings == [1200, 1200, 900, 900, 600]
    assert one.range(replace(plan, clock_min_mhz=15), ABILITY, 0, True, 2.1).max_mhz == 300


def test_what_a_governor_wants_stays_inside_the_planned_range():
    one, plan = DeviceGovernor("tests.unit.power_agent.test_governing:Wild", {}), planned(600, 900, "fixed")
    assert one.range(plan, ABILITY, 0, True, 0.0) == ClockRange(600, 900)
    assert one.range(plan, ABILITY, 0, True, 1.5) == ClockRange(600, 600)


def test_a_device_that_cannot_lock_is_not_governed():
    one = DeviceGovernor(STAIRS, {})
    assert one.range(planned(), replace(ABILITY, cannot_lock="an old one"), 0, True, 0.0) is None
    assert one.decision is None


def test_a_governor_is_told_who_is_hosted():
    hosted = (Hosted("digits", "m", 1, 0, 1, 1, 1), Hosted("digits", "m", 1, 0, 1, 1, 1), Hosted("words", "s"))
    assert [(s.family, s.stage) for s in stages_of(replace(planned(), slices=(PlannedSlice(hosted=hosted),)))] == [
        ("digits", 0),
        ("words", 0),
    ]


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("turbo", {}, r"governor = 'turbo': no such governor. Remedy: one of fixed, or module:Class"),
        ("fixed", {"step_mhz": 3}, r"governor setting step_mhz = 3: fixed has no such setting"),
        ("nowhere:X", {}, r"governor = 'nowhere:X': cannot be imported"),
    ],
)
def test_an_unknown_governor_or_setting_is_refused(name, settings, says):
    with pytest.raises(SettingError, match=says):
        governor_of(name, settings)


async def test_the_keeper_locks_what_the_governor_wants_as_time_passes_and_refuses_one_that_is_not_there(tmp_path):
    bench = Bench(tmp_path)
    plan = clock_plan(max_mhz=1200)
    governed = replace(plan, devices=tuple(replace(d, governor=STAIRS) for d in plan.devices))
    await bench.start(governed)
    await bench.pass_s(0.0)
    assert bench.gpus.locked == (210, 1200)
    await bench.pass_s(1.1)
    assert bench.gpus.locked == (210, 1185)
    await bench.pass_s(1.1)
    assert bench.gpus.locked == (210, 1170)
    unknown = replace(plan, devices=tuple(replace(d, governor="turbo") for d in plan.devices))
    with pytest.raises(PlanError, match=r"device node0/gpu0: governor = 'turbo': no such governor. Remedy: one of"):
        bench.keeper.refuse(unknown)
    await bench.end()
    assert bench.gpus.locked is None
