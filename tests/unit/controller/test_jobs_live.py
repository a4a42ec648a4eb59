"""Jobs planned live: the controller's planning and a dispatcher's seam, on one Redis, hour by hour."""

import asyncio
import dataclasses
import math

import pytest

from controller.jobs.core.hours import plan_hours
from controller.jobs.core.open_jobs import JOBS_MAX, pending_jobs
from controller.jobs.core.planning import plan_jobs
from controller.jobs.core.slots import load_ahead
from controller.jobs.planning_loop import PERIOD_S, JobsPlanning
from controller.observe.core.observation import LatestInputs
from dispatcher.jobs.core.job import Job
from dispatcher.jobs.core.planned_hours import STALE_S, may_start
from dispatcher.jobs.planned_hours import Left, PlannedHours
from tests.support.jobs import COST, hour
from tests.support.planning import NOW_S, SERIES
from tests.support.stores import state_on
from tests.support.virtual.redis import Server
from tests.unit.controller.test_jobs_slots import served
from trefoil.core.brains import BudgetState
from trefoil.core.carbon import CarbonBand, CarbonForecast
from trefoil.core.common import Lease, Revision
from trefoil.core.jobs.planned import DevicePool, ItemCost, OpenJob, OpenJobs, PendingJob, PlannedJobs, Slot
from trefoil.runtime import codec
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.telemetry import Metrics

HOUR = 3600.0
BEGIN_S = (NOW_S // HOUR + 1) * HOUR
DAY = [400.0] * 6 + [300.0] * 4 + [60.0] * 5 + [350.0] * 33
CLEAN = range(10, 15)
FOLDER = "f0"
UNSIGNED = PlanKeys("default")


class Leader:
    """`Leadership` of a controller that leads for as long as the test wants."""

    def __init__(self, state, lease: Lease) -> None:
        self.state, self.lease, self.epoch = state, lease, lease.epoch

    async def write(self, writes) -> None:
        await self.state.write(self.lease, writes)


class World:
    """A controller that plans jobs and a worker that has them; its slices carry `per_s` items beside requests."""

    def __init__(self, per_s: float = 60.0, rate: float = 24.0, keys: PlanKeys = UNSIGNED) -> None:
        self.clock = ManualClock(BEGIN_S)
        self.server = Server(self.clock)
        self.per_s, self.rate, self.keys = per_s, rate, keys
        self.left: dict[str, int] = {}
        self.jobs: dict[str, Job] = {}
        self.items: dict[str, int] = {}
        self.ran: dict[str, list[tuple[float, int]]] = {}
        self.ended_s: dict[str, float] = {}
        self.planning_on = True

    async def begin(self) -> "World":
        self.state = state_on(self.server, "default", self.clock)
        lease = await self.state.acquire("controller", "c", ttl_s=1e7)
        self.owner = await self.state.acquire(f"jobs:{FOLDER}", "w", ttl_s=1e7)
        self.inputs, self.metrics = LatestInputs(), Metrics("controller")
        self.planning = JobsPlanning(
            self.state, Leader(self.state, lease), self.view, self.inputs, self.keys, self.metrics, self.clock
        )
        self.hours = PlannedHours(self.state, self.clock, self.keys.verify_jobs)
        self.hours.folder = FOLDER
        self.hours.note_pace("digits", self.per_s)
        return self

    def view(self):
        bands = tuple(
            CarbonBand(BEGIN_S + n * HOUR, BEGIN_S + (n + 1) * HOUR, c - 20, c, c + 20) for n, c in enumerate(DAY)
        )
        now = DAY[min(len(DAY) - 1, int((self.clock.now_s() - BEGIN_S) // HOUR))]
        found = served(
            rate=self.rate, intensity=now, forecast=CarbonForecast(SERIES, "blend", self.clock.now_s(), bands)
        )
        return dataclasses.replace(found, now_s=self.clock.now_s())

    def submit(self, name: str, items: int, by_h: float, **more) -> None:
        self.jobs[name] = Job(name, "digits", BEGIN_S + by_h * HOUR, **more)
        self.left[name] = self.items[name] = items
        self.ran[name] = []

    async def play(self, until_h: float, step_s: float = 1800.0) -> None:
        """Run step by step: plan, read, start what may start, tell."""
        while self.clock.now_s() < BEGIN_S + until_h * HOUR:
            open_now = [Left(self.jobs[name], left, 0.0) for name, left in self.left.items() if left]
            await self.hours.write(self.owner, open_now)
            if self.planning_on:
                await self.planning.step()
            await self.hours.read()
            capacity = round(self.per_s * step_s)
            for job, left, *_ in sorted(open_now, key=lambda one: one[0].turn):
                room, _ = self.hours.may_start(job, self.items[job.id], left)
                count = min(left, capacity, int(min(room, left)))
                if count:
                    self.ran[job.id].append((self.clock.now_s(), count))
                    self.left[job.id], capacity = left - count, capacity - count
                    if count == left:
                        self.ended_s[job.id] = self.clock.now_s() + step_s
            self.clock.move(step_s)

    def in_hours(self, name: str, hours) -> float:
        """Share of a job's items that ran in these hours."""
        inside = sum(count for at_s, count in self.ran[name] if int((at_s - BEGIN_S) // HOUR) in hours)
        return inside / self.items[name]

    @property
    def late(self) -> list[str]:
        return [name for name, job in self.jobs.items() if self.ended_s.get(name, math.inf) > job.complete_by_s]

    async def plan(self) -> PlannedJobs:
        found = await self.state.get(self.state.keys.jobs_plan(), PlannedJobs)
        assert found is not None
        return found


async def test_a_day_runs_in_its_clean_hours_and_nothing_is_late() -> None:
    world = await World().begin()
    world.submit("day", 400_000, by_h=24)
    world.submit("morning", 60_000, by_h=4)
    world.submit("noon", 100_000, by_h=14)
    await world.play(24.0)
    assert world.late == []
    assert world.in_hours("day", CLEAN) == pytest.approx(1.0)
    assert world.in_hours("noon", CLEAN) == pytest.approx(1.0)
    assert world.in_hours("morning", range(4)) == 1.0, "its deadline comes before the clean hours"


async def test_what_is_promised_is_said_at_once_with_what_it_saves() -> None:
    world = await World().begin()
    world.submit("day", 400_000, by_h=24)
    await world.play(1 / 60)
    (day,) = (await world.plan()).jobs
    assert day.reason == "will finish at 1970-01-13 03:00Z"
    assert day.in_time
    assert {int((one.starts_at_s - BEGIN_S) // HOUR) for one in day.hours} <= set(CLEAN)
    assert sum(one.items for one in day.hours) == pytest.approx(400_000)
    assert day.grams < 0.25 * day.at_once_grams
    assert day.grams < day.evenly_grams < day.at_once_grams
    world.submit("never", 2_000_000, by_h=3)
    await world.play(1.0)
    never = next(one for one in (await world.plan()).jobs if one.job_id == "f0/never")
    assert not never.in_time
    assert "items cannot be done by 1970-01-12 17:00Z; they finish at" in never.reason
    samples = [s for family in world.metrics.collect() for s in family.samples if s.name == "trefoil_jobs_planned"]
    assert {s.labels["state"]: s.value for s in samples}["in_danger"] == 1.0


@pytest.mark.parametrize("lost_h", [0.0, 5.0, 12.0])
async def test_a_controller_that_dies_makes_nothing_late(lost_h: float) -> None:
    world = await World().begin()
    world.submit("day", 400_000, by_h=24)
    await world.play(lost_h)
    world.planning_on = False
    await world.play(24.0)
    assert world.late == []
    if lost_h < min(CLEAN):
        assert world.ended_s["day"] < BEGIN_S + (lost_h + 2.5) * HOUR, "without a plan it runs at once"


async def test_an_emptied_redis_and_a_stray_plan_make_nothing_late() -> None:
    world = await World().begin()
    world.submit("day", 400_000, by_h=16)
    await world.play(1.0)
    key = world.state.keys.jobs_plan()
    held = await world.plan()
    for stray in (b"\xff", b"", None):
        world.server.spoil(key, stray)
        await world.play((world.clock.now_s() - BEGIN_S) / HOUR + 0.5)
    for job in held.jobs:  # a plan from nowhere, of a far epoch, that holds everything forever
        never = dataclasses.replace(job, hours=(), items_left=10**9)
        forged = dataclasses.replace(held, revision=dataclasses.replace(held.revision, epoch=10**9), jobs=(never,))
        world.server.spoil(key, codec.encode(forged))
    world.planning_on = False
    await world.play(16.0)
    assert world.late == []


async def test_a_leader_without_jobs_puts_a_forged_plan_right_and_takes_back_no_plan_before_jobs_are_told() -> None:
    world = await World().begin()
    key, lease = world.state.keys.jobs_plan(), world.planning._leadership.lease
    held = PlannedJobs(Revision(lease.epoch, 9), BEGIN_S, BEGIN_S + 24 * HOUR)
    world.server.spoil(key, codec.encode(held))
    for _ in range(3):
        await world.planning.step()
        assert await world.plan() == held, "Redis may have lost open jobs"
        world.clock.move(PERIOD_S / 2 - 1.0)
    await world.clock.advance(PERIOD_S)
    await world.planning.step()
    true = await world.plan()
    assert (true.revision, true.jobs) == (Revision(lease.epoch, 1), ())
    world.server.spoil(key, codec.encode(dataclasses.replace(held, revision=Revision(10**11, 1))))
    await world.clock.advance(5.0)
    await world.state.renew(lease, 1e7)
    assert await world.plan() == true
    for _ in range(3):
        await world.clock.advance(HOUR)
        await world.planning.step()
    assert await world.plan() == true, "it is written once"


async def test_only_a_plan_that_the_controller_signed_holds_a_job_back() -> None:
    keys = PlanKeys("default", ["k" * 64])
    for signed in (
        lambda forged: dataclasses.replace(forged, signature=""),
        lambda forged: forged,  # with the signature of the plan that it was made from
        PlanKeys("default", ["l" * 64]).sign_jobs,
        PlanKeys("other", ["k" * 64]).sign_jobs,
    ):
        world = await World(keys=keys).begin()
        world.submit("day", 400_000, by_h=24)
        await world.play(1 / 60, step_s=60.0)
        held, (day,) = await world.plan(), (await world.plan()).jobs
        assert world.hours.of("day") == day
        keys.verify_jobs(held)
        at_once = dataclasses.replace(day, hours=(), items_left=0)
        forged = dataclasses.replace(held, revision=dataclasses.replace(held.revision, number=9), jobs=(at_once,))
        world.server.spoil(world.state.keys.jobs_plan(), codec.encode(signed(forged)))
        world.planning_on = False
        await world.play(2 / 60, step_s=60.0)
        assert world.hours.of("day") == day, "the last one stays"
        await world.clock.advance(STALE_S)
        await world.hours.read()
        assert world.hours.of("day") is None, "until it is stale"


async def test_slices_slower_than_the_plan_thinks_begin_in_time() -> None:
    """Beside requests items get a tenth of what the profile promises; the measured pace comes before the plan."""
    world = await World(per_s=6.0).begin()
    world.submit("day", 300_000, by_h=23)
    await world.play(24.0)
    assert world.late == []


async def test_the_planner_of_slices_is_told_what_jobs_need_awake_and_wakes_where_time_is_short() -> None:
    world = await World().begin()
    world.submit("day", 400_000, by_h=24)
    await world.play(0.5)
    assert world.inputs.flexible == (), "nothing of it runs in the first hour"
    await world.play(10.5)
    (demand,) = world.inputs.flexible
    assert (demand.family, demand.devices) == ("digits", 2), "the two that run"
    world.submit("soon", 400_000, by_h=12.5, min_accuracy=0.99)
    await world.play(11.5)
    assert world.inputs.flexible[0].devices == 3, "and the one asleep"
    world.planning_on = False
    await world.play(12.0)
    await world.planning.step()
    world.planning._leadership.epoch = 0
    await world.planning.step()
    assert world.inputs.flexible == (), "another controller leads"


async def test_one_bad_record_harms_no_other() -> None:
    world = await World().begin()
    good = OpenJob("good", "digits", 1000, BEGIN_S + 20 * HOUR)
    bad = [
        dataclasses.replace(good, job_id="none", items_left=0),
        dataclasses.replace(good, job_id="endless", items_left=2**63),
        dataclasses.replace(good, job_id="ages", complete_by_s=9e10),
        dataclasses.replace(good, job_id="floor", min_accuracy=1.5),
        dataclasses.replace(good, job_id="grams", bounded=True, grams_left=-1.0),
        dataclasses.replace(good, job_id="zones", zones=tuple(map(str, range(33)))),
        dataclasses.replace(good, job_id="a/b"),
        dataclasses.replace(good, job_id=""),
        good,
    ]
    elsewhere = [
        dataclasses.replace(good, job_id="family", family="nothing"),
        dataclasses.replace(good, job_id="zone", zones=("elsewhere",)),
    ]
    key = world.state.keys.jobs_open(FOLDER)
    told = OpenJobs(FOLDER, world.owner.epoch, (good, *bad, *elsewhere))
    await world.state.put(world.owner, key, told, 60.0)
    await world.planning.step()
    assert [one.job_id for one in (await world.plan()).jobs] == ["f0/good"]
    (line,) = world.inputs.set_aside.lines(world.clock.now_s())
    assert line.startswith(f"{key}: 9 set aside")


async def test_records_of_a_writer_that_was_overtaken_are_not_planned() -> None:
    world = await World().begin()
    key = world.state.keys.jobs_open(FOLDER)
    job = OpenJob("a", "digits", 1000, BEGIN_S + 20 * HOUR)
    world.server.set(key, codec.encode(OpenJobs(FOLDER, world.owner.epoch + 1, (job,))), 60_000)
    await world.planning.step()
    assert await world.state.get(world.state.keys.jobs_plan(), PlannedJobs) is None


async def test_a_worker_that_takes_the_jobs_over_tells_them_at_once_under_its_epoch() -> None:
    world = await World().begin()
    job = [Left(Job("a", "digits", BEGIN_S + 20 * HOUR), 1000, 0.0)]
    await world.hours.write(world.owner, job)
    await world.state.release(world.owner)
    again = await world.state.acquire(f"jobs:{FOLDER}", "w2", ttl_s=1e7)
    await world.hours.write(again, job)
    told = await world.state.get(world.state.keys.jobs_open(FOLDER), OpenJobs)
    assert told.epoch == again.epoch > world.owner.epoch
    await world.planning.step()
    assert [one.job_id for one in (await world.plan()).jobs] == ["f0/a"]


def test_of_too_many_jobs_the_earliest_deadlines_are_planned() -> None:
    jobs = tuple(OpenJob(f"j{n}", "digits", 10, BEGIN_S + (n + 1) * 60.0) for n in range(JOBS_MAX + 50))
    found, wrong = pending_jobs([OpenJobs(FOLDER, 1, jobs[::-1])], {"digits"}, "test", BEGIN_S, {})
    assert [job.job_id for job in found] == [f"{FOLDER}/j{n}" for n in range(JOBS_MAX)]
    assert not wrong


def test_the_load_of_an_hour_is_that_of_a_day_ago_and_its_peak_may_come_sooner_or_later() -> None:
    day = tuple(3600.0 * n for n in range(24))
    view = dataclasses.replace(served(), budgets=(BudgetState("digits", 1.0, 1.0, 1, 1.0, day),))
    first, second = load_ahead(view, view.now_s + 1.5 * HOUR)[:2]
    hour = int(view.now_s // HOUR + 1) % 24
    assert (first.mean_per_s, first.p90_per_s) == (hour, hour + 1)
    assert second.starts_at_s == first.ends_at_s
    assert load_ahead(served(), view.now_s + HOUR) == (), "no whole day is known"


async def test_the_planning_goes_on_after_trouble_and_is_beside_the_loop(monkeypatch) -> None:
    world = await World().begin()
    world.submit("day", 1000, by_h=24)
    calls = []

    def broken():
        calls.append(world.clock.monotonic_s())
        raise ZeroDivisionError

    key, found = world.state.keys.jobs_plan(), None
    world.planning._view = broken
    await world.hours.write(world.owner, [Left(world.jobs["day"], 1000, 0.0)])
    task = asyncio.create_task(world.planning.run())
    async with asyncio.timeout(30):
        while found is None:
            await asyncio.sleep(0)
            if calls:
                world.planning._view = world.view
                await world.clock.advance(10.0)
                await world.hours.write(world.owner, [Left(world.jobs["day"], 1000, 0.0)])
            found = await world.state.get(key, PlannedJobs)
    task.cancel()
    assert len(calls) == 1
    assert world.clock.monotonic_s() >= PERIOD_S, "what failed is not tried each second"


def test_what_waking_does_in_time_is_promised_and_runs_at_once() -> None:
    """Ten device hours in two hours: one device is awake, nine sleep."""
    slots = [hour(n, 100.0, asleep=9.0, wake_j=1000.0) for n in range(6)]

    def told(device_hours: int):
        open_jobs = OpenJobs(FOLDER, 1, (OpenJob("work", "digits", 36_000 * device_hours, 2 * HOUR),))
        written, _, _, _ = plan_hours(slots, [open_jobs], 0.0, Revision())
        return written.jobs[0]

    work = told(10)
    assert (work.in_time, work.at_once, work.reason) == (True, True, "will finish at 1970-01-01 02:00Z")
    assert work.finishes_at_s == 2 * HOUR
    assert work.grams == pytest.approx(plan_jobs([PendingJob("a", "digits", 360_000, 2 * HOUR)], slots, 0.0).grams)
    assert may_start(work, 6 * HOUR, 360_000, 360_000, 2 * HOUR, 0.0, per_s=100.0)[0] == math.inf
    little, endless = told(1), told(21)
    assert (little.in_time, little.at_once) == (True, False), "the device that is awake has the time"
    assert (endless.in_time, endless.at_once) == (False, True)
    assert "36,000 of 756,000 items cannot be done by 1970-01-01 02:00Z" in endless.reason


def test_each_family_is_told_the_devices_that_are_its_own() -> None:
    """In an hour six device hours of letters, whose device is full, and one of digits, whose device is half free."""
    letters = ItemCost("letters", device_s=0.1, active_j=10.0, accuracy=0.9)
    band = CarbonBand(0.0, HOUR, 80.0, 100.0, 120.0)
    served = DevicePool("awake", 0.5 * HOUR, 0.5 * HOUR, (COST,), total_s=0.9 * HOUR)
    full = DevicePool("full", 0.0, 0.0, (letters,), total_s=0.9 * HOUR)
    cold = DevicePool("asleep", 9 * HOUR, 9 * HOUR, (COST, letters), idle_w=30.0)
    jobs = OpenJob("d", "digits", 36_000, HOUR), OpenJob("l", "letters", 216_000, HOUR)
    slots = [Slot("here", band, (served, full, cold))]
    _, flexible, _, _ = plan_hours(slots, [OpenJobs(FOLDER, 1, jobs)], 0.0, Revision())
    assert [(one.family, one.devices, one.own_devices) for one in flexible] == [("digits", 9, 2), ("letters", 9, 7)]
