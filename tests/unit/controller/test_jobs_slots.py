"""Slots of jobs from a planner's view: carbon as forecast, and what requests leave over."""

import dataclasses

import numpy as np
import pytest

from controller.jobs.core.planning import plan_jobs
from controller.jobs.core.slots import FULL, LoadAhead, devices_needed, slots_of
from controller.planners.base import BasePlanner
from tests.support.planning import NOW_S, SERIES, applied, fleet, objective, view
from trefoil.core.carbon import CarbonBand, CarbonForecast
from trefoil.core.catalog import Catalog
from trefoil.core.device_types import A100_40GB
from trefoil.core.fleet import DeviceState
from trefoil.core.jobs.planned import DevicePool, PendingJob, Portion, Slot
from trefoil.core.plan import Expected
from trefoil.core.units import grams

HOUR = 3600.0
START_S = (NOW_S // HOUR + 1) * HOUR  # of the first whole hour: 800 s from now


def served(gpus=2, asleep=1, **changes):
    """View of GPUs that serve as BASE plans, `l` on one 7g slice each (25 ms), and of some that sleep.

    The planner is one that wakes devices for jobs.
    """
    empty = view(devices=fleet(gpus), **changes)
    plan = dataclasses.replace(BasePlanner().plan(empty, np.random.default_rng(1)).plan, planner="exact", expected={})
    awake, sleeping = applied(plan, empty.fleet), fleet(asleep, state=DeviceState.ASLEEP)
    nodes = tuple(dataclasses.replace(n, node="cold") for n in sleeping.nodes) if asleep else ()
    nodes = tuple(
        dataclasses.replace(
            n, devices=tuple(dataclasses.replace(d, device=f"cold/gpu{i}") for i, d in enumerate(n.devices))
        )
        for n in nodes
    )
    return dataclasses.replace(empty, fleet=dataclasses.replace(awake, nodes=(*awake.nodes, *nodes)), current=plan)


def with_another(before, family):
    """The fleet with one more family on every slice."""
    nodes = []
    for node in before.nodes:
        devices = []
        for device in node.devices:
            slices = tuple(
                dataclasses.replace(one, hosted=(*one.hosted, dataclasses.replace(one.hosted[0], family=family)))
                for one in device.slices
            )
            devices.append(dataclasses.replace(device, slices=slices))
        nodes.append(dataclasses.replace(node, devices=tuple(devices)))
    return dataclasses.replace(before, nodes=tuple(nodes))


def test_slices_that_stand_have_what_requests_leave_over():
    first, second = slots_of(served(rate=24.0), HOUR, START_S + HOUR)
    assert (first.carbon.starts_at_s, first.carbon.ends_at_s) == (NOW_S, START_S)
    assert (second.carbon.starts_at_s, second.carbon.ends_at_s) == (START_S, START_S + HOUR)
    awake = second.pools[0]
    assert (awake.idle_w, awake.wake_j) == (0.0, 0.0)
    assert awake.free_s == pytest.approx(2 * HOUR * (FULL - 24 * 0.025 / 2), rel=1e-2)
    assert awake.costs[0].device_s == pytest.approx(0.025, rel=1e-2)
    assert [cost.accuracy for cost in awake.costs] == [0.993]


def test_slices_that_jobs_alone_keep_awake_cost_their_idle_watts():
    """One of four GPUs carries the requests, three do once they rise."""
    known = served(gpus=4, asleep=0, rate=24.0)
    plan = dataclasses.replace(known.current, expected={"digits": Expected(capacity_per_s=120.0)})
    known = dataclasses.replace(known, current=plan)
    rising = [LoadAhead("digits", START_S + HOUR, START_S + 2 * HOUR, 70.0, 90.0)]
    slots = slots_of(known, HOUR, START_S + 2 * HOUR, rising)
    assert [[pool.woken for pool in slot.pools] for slot in slots] == [[0, 3], [0, 3], [0, 1]]
    needed, kept = slots[1].pools
    assert needed.free_s == pytest.approx(HOUR * (FULL - 24 * 0.025), rel=1e-2)
    assert (needed.idle_w, kept.idle_w) == (0.0, A100_40GB.idle_w - A100_40GB.sleep_w)
    assert (kept.wake_j, kept.free_s) == ((A100_40GB.wake_s + 2.5) * A100_40GB.idle_w, 3 * HOUR)
    later = slots[2].pools[0]
    assert later.free_s - later.sure_s == pytest.approx(HOUR * (90 - 70) * 0.025, rel=1e-2)
    work = [PendingJob("a", "digits", 200_000, START_S + HOUR, accuracy_floor=0.97)]
    found = plan_jobs(work, slots, NOW_S)
    active_g = grams(sum(one.items for one in found.portions) * kept.costs[0].active_j, 250.0, 1.0)
    idle_g = grams(kept.idle_w * 3 * (HOUR + 800), 250.0, 1.0)
    assert found.prospects[0].items_in_time == pytest.approx(200_000)
    assert 1.05 * active_g < found.grams <= 1.01 * (active_g + idle_g)
    assert devices_needed(slots, found.portions, NOW_S) in (2, 3, 4)


def test_a_planner_that_wakes_for_no_job_leaves_devices_asleep_out():
    known = served()
    known = dataclasses.replace(known, current=dataclasses.replace(known.current, planner="base"))
    assert [pool.name for pool in slots_of(known, HOUR, START_S + HOUR)[1].pools] == [
        "digits: l on 7g.40gb of A100-SXM4-40GB"
    ]


def test_devices_asleep_could_serve_any_variant_for_idle_watts():
    pool = slots_of(served(), HOUR, START_S + HOUR)[1].pools[1]
    assert pool.free_s == pool.sure_s == HOUR
    assert sorted(cost.accuracy for cost in pool.costs) == [0.886, 0.938, 0.960, 0.993]
    assert pool.idle_w == A100_40GB.idle_w - A100_40GB.sleep_w
    assert pool.wake_j == (A100_40GB.wake_s + 2.5) * A100_40GB.idle_w


def test_devices_that_wake_for_jobs_come_on_top_of_those_that_stand():
    """A 1g slice is a part of the device that stands: what is left of it is no device that has to wake."""
    stands = DevicePool("1g", 0.2 * HOUR, 0.2 * HOUR, (), total_s=0.9 * HOUR, part=1 / 8)
    slot = Slot("test", CarbonBand(0.0, HOUR), (stands, DevicePool("asleep", 3 * HOUR, 3 * HOUR, (), idle_w=20.0)))
    there, cold = (Portion("a", "test", pool, 0.0, HOUR, 1.0, 0.0, 0.2 * HOUR) for pool in ("1g", "asleep"))
    assert [devices_needed([slot], of, 0.0) for of in ([], [there], [there, cold])] == [1, 1, 2]


def test_load_to_come_takes_its_time_and_then_devices_asleep():
    rising = [LoadAhead("digits", START_S, START_S + HOUR, 70.0, 90.0)]
    first, second, third = slots_of(served(rate=24.0), HOUR, START_S + 2 * HOUR, rising)
    assert second.pools[0].free_s == pytest.approx(2 * HOUR * (FULL - 70 * 0.0125), rel=5e-2)
    assert (second.pools[1].free_s, second.pools[1].sure_s) == (HOUR, 0.0)
    assert third.pools[1].sure_s == HOUR
    assert first.pools[0].free_s / 800 == pytest.approx(third.pools[0].free_s / HOUR)


def test_carbon_is_the_reading_then_the_forecast_then_the_reading():
    bands = tuple(
        CarbonBand(START_S + i * HOUR / 2, START_S + (i + 1) * HOUR / 2, c - 20, c, c + 20)
        for i, c in enumerate((100, 200))
    )
    known = served(intensity=300.0, forecast=CarbonForecast(SERIES, "blend", NOW_S, bands))
    assert [slot.carbon.p50_g_per_kwh for slot in slots_of(known, HOUR, START_S + 2 * HOUR)] == [300.0, 150.0, 300.0]
    assert slots_of(known, HOUR, START_S + HOUR)[1].carbon.p90_g_per_kwh == 170.0


def test_what_jobs_cannot_use_is_left_out():
    silent = served()
    silent = dataclasses.replace(silent, fleet=dataclasses.replace(silent.fleet, stale=frozenset({"node0", "cold"})))
    assert slots_of(silent, HOUR, START_S)[0].pools == ()
    known = served(asleep=0)
    assert len(slots_of(known, HOUR, START_S)[0].pools) == 1
    only = known.catalog.families[0]
    both = (only, dataclasses.replace(only, name="figures"))
    rows = (*known.catalog.rows, *(dataclasses.replace(row, family="figures") for row in known.catalog.rows))
    shared = dataclasses.replace(
        known, catalog=Catalog(both, rows), current=None, objectives=(objective(), objective(family="figures")),
        fleet=with_another(known.fleet, "figures"),
    )  # fmt: skip
    assert slots_of(shared, HOUR, START_S)[0].pools == ()
    streams = dataclasses.replace(known.catalog, families=(dataclasses.replace(only, generative=True),))
    assert slots_of(dataclasses.replace(known, catalog=streams), HOUR, START_S)[0].pools == ()


def test_a_job_is_planned_from_a_view():
    bands = tuple(
        CarbonBand(START_S + i * HOUR, START_S + (i + 1) * HOUR, c, c, c) for i, c in enumerate((400, 90, 300))
    )
    known = served(intensity=300.0, forecast=CarbonForecast(SERIES, "blend", NOW_S, bands))
    slots = slots_of(known, HOUR, START_S + 3 * HOUR)
    plan = plan_jobs([PendingJob("a", "digits", 100_000, START_S + 3 * HOUR, accuracy_floor=0.97)], slots, NOW_S)
    assert {one.starts_at_s for one in plan.portions} == {START_S + HOUR}
    assert plan.prospects[0].items_late == plan.prospects[0].items_unplaced == 0
