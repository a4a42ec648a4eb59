"""What the monitor makes of a run: power and grams of what was metered, nothing invented, plans in words."""

import asyncio
from typing import Any

import pytest

from tests.support.stores import state_on
from tests.support.virtual.redis import Server
from trefoil.cli.demo import run_monitor
from trefoil.cli.demo.run_monitor import RunMonitor, cancel_and_wait, grams_by_second, plan_text, power_by_second
from trefoil.core.carbon import CarbonReading, Factors, Method, Series
from trefoil.core.common import Revision
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.fleet import DeviceState, Hosted, SliceKey
from trefoil.core.plan import DecisionRecord, NodePlan, PlannedDevice, PlannedSlice
from trefoil.runtime.clock import ManualClock

GPU = "node0/gpu0"
SERIES = Series("demo", Method.AVERAGE, Factors.LIFECYCLE)
KWH_J = 3.6e6


def sample(
    begin_s: float, end_s: float, joules: float, method: EnergyMethod = EnergyMethod.NVML_COUNTER
) -> EnergySample:
    return EnergySample(
        node="node0", device=GPU, starts_at_s=begin_s, ends_at_s=end_s, counter_j=joules, method=method, idle_j=joules
    )


def reading(at_s: float, intensity: float) -> CarbonReading:
    return CarbonReading(SERIES, observed_at_s=at_s, intensity_g_per_kwh=intensity)


def test_power_is_shared_by_the_seconds_that_a_sample_covers() -> None:
    watts = power_by_second([sample(100.5, 101.5, 60.0), sample(101.5, 102.5, 120.0)], 100.0, 4)
    assert watts == {GPU: [60.0, 90.0, 120.0, None]}


def test_a_second_without_a_sample_is_unknown_not_zero() -> None:
    assert power_by_second([sample(103.0, 104.0, 50.0)], 100.0, 4)[GPU] == [None, None, None, 50.0]


def test_without_a_meter_nothing_is_known() -> None:
    unmetered = [sample(100.0, 101.0, 0.0, EnergyMethod.NONE)]
    assert power_by_second(unmetered, 100.0, 2) == {GPU: [None, None]}
    assert grams_by_second(unmetered, [reading(90.0, 300.0)], 100.0, 2, 1.0) == [None, None]


def test_grams_follow_the_intensity_of_their_moment() -> None:
    samples = [sample(100.0, 101.0, KWH_J), sample(101.0, 102.0, KWH_J)]
    readings = [reading(90.0, 100.0), reading(101.0, 300.0)]
    assert grams_by_second(samples, readings, 100.0, 2, 1.5) == pytest.approx([150.0, 600.0])


def test_without_any_reading_grams_are_unknown() -> None:
    assert grams_by_second([sample(100.0, 101.0, 1.0)], [], 100.0, 1, 1.0) == [None]


def test_a_plan_in_words_counts_equal_slices_and_names_sleep() -> None:
    hosted = (Hosted("digits", "digits-m", 3, 0, 1, 1, 8),)
    slices = tuple(PlannedSlice(SliceKey(GPU, "1g.5gb", start, 1), hosted, 1) for start in (0, 1))
    devices = (
        PlannedDevice(GPU, DeviceState.AWAKE, slices),
        PlannedDevice("node0/gpu1", DeviceState.ASLEEP),
    )
    assert plan_text((NodePlan(node="node0", devices=devices),)) == "gpu0: 2x 1g.5gb digits-m; gpu1: asleep"


async def test_a_background_task_is_stopped_even_where_one_cancellation_is_swallowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_monitor, "CANCEL_AGAIN_S", 0.02)

    async def swallows_one() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(30)

    task = asyncio.create_task(swallows_one())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert task.cancelled()


async def test_the_failure_of_a_background_task_is_raised() -> None:
    async def fails() -> None:
        raise ValueError("it")

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="it"):
        await cancel_and_wait(task)


async def test_a_rollout_that_ended_between_two_looks_is_not_taken_for_superseded() -> None:
    clock = ManualClock(1000.0)
    state = state_on(Server(clock), "default", clock)
    lease = await state.acquire("controller", "test")
    assert lease is not None
    launch: Any = None  # only named by what this test does not ask
    monitor = RunMonitor(launch, clock, state)
    for number, before in enumerate(("unspecified", "done", "applying"), 1):
        record = DecisionRecord(
            f"1.{number}", Revision(1, number), "load", at_s=1000.0 + number, versions={"rollout_before": before}
        )
        await state.append(lease, state.keys.decisions(), record, 100)
    await monitor._follow_changes()
    assert [change.done_at_s for change in monitor.changes] == [1002.0, None, None]
