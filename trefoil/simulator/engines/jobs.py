"""Jobs in simulated time: their items fill what requests leave over, when the plan lets them.

Data: the scenario's jobs; per interval, what requests computed on each slice. Result: joules of items by slice.
Model: the controller's core plans hours (`controller/jobs/core/hours.py`) when a job comes or ends and when an hour
    begins. The dispatcher's core says how many items may start (`dispatcher/jobs/core/planned_hours.py`). They run in
    batches of the largest profiled size, on READY slices of their family and of the variants that are planned. Slices
    with the fewest joules come first, and jobs of the highest priority and earliest deadline. Items and requests
    together take at most `FULL` of a slice's time.
Deviations: items do not delay requests. Live the plan is made each minute, too.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from controller.jobs.core.hours import SLOT_S, plan_hours, zone_slots
from controller.jobs.core.rules import RULES
from controller.jobs.core.slots import FULL
from dispatcher.jobs.core.planned_hours import may_start, planned_variants
from trefoil.core.brains import PlanView
from trefoil.core.common import Revision
from trefoil.core.fleet import DeviceKind, SliceKey, SliceState
from trefoil.core.jobs.planned import FlexibleDemand, OpenJob, OpenJobs, PlannedJob
from trefoil.core.units import HOUR_S, MS_PER_S, grams
from trefoil.simulator.books.intervals import JOBS, Interval
from trefoil.simulator.engines.hardware import Hardware
from trefoil.simulator.scenario.inputs import Inputs
from trefoil.simulator.scenario.schema import SimulatedJobs

FOLDER: Final = "jobs"
CRUMB: Final = 1e-6  # items
EPSILON_S: Final = 1e-9


@dataclass(slots=True)
class JobRun:
    """One job while it is played. Grams: of its items' active joules, as their receipts have it."""

    id: str
    terms: SimulatedJobs
    items: float
    arrives_s: float
    complete_by_s: float
    left: float
    late_items: float = 0.0
    """Answered after the deadline."""
    failed: float = 0.0
    """Refused, because its grams were spent."""
    grams: float = 0.0
    ended_s: float = math.nan

    @property
    def turn(self) -> tuple[int, float, str]:
        """Its turn among the jobs that wait."""
        return -self.terms.priority, self.complete_by_s, self.id

    @property
    def late(self) -> bool:
        """Whether it ended, or is not ended, after its deadline."""
        return not self.ended_s <= self.complete_by_s + EPSILON_S


@dataclass(slots=True)
class _Room:
    """Seconds of a slice that requests leave over in an interval, and what an item takes there."""

    key: SliceKey
    variant: str
    accuracy: float
    item_s: float
    item_j: float
    item_g: float
    free_s: float
    left_s: float


class JobsEngine:
    """Engine of all jobs of a run."""

    def __init__(self, inputs: Inputs) -> None:
        scenario = inputs.scenario
        self._pue, self.rule = scenario.control.pue, scenario.jobs_rule
        self._plan_by = RULES[scenario.jobs_rule]()
        self.runs = sorted(_runs(inputs), key=lambda run: run.arrives_s)
        self._coming = list(self.runs)
        self._open: list[JobRun] = []
        self._hours: dict[str, PlannedJob] = {}
        self._until_s = 0.0
        self._slot = -1
        self._pace: dict[str, float] = {}  # items/s of a family's last interval with open jobs
        self._changed = False  # whether a job has come or ended since the last plan

    def next_s(self, now_s: float) -> float:
        """Time of the next event: a job comes, an hour begins, a deadline passes."""
        coming_s = self._coming[0].arrives_s if self._coming else math.inf
        if not self._open:
            return now_s if self._changed else coming_s
        hour_s = (math.floor(now_s / SLOT_S + EPSILON_S) + 1) * SLOT_S
        due_s = [run.complete_by_s for run in self._open if run.complete_by_s > now_s + EPSILON_S]
        return now_s if self._changed else min(coming_s, hour_s, *due_s)

    def admit(self, now_s: float) -> bool:
        """Admit jobs that have come; whether hours are to be planned now."""
        while self._coming and self._coming[0].arrives_s <= now_s + EPSILON_S:
            self._open.append(self._coming.pop(0))
            self._changed = True
        return self._changed or (bool(self._open) and self._slot != _slot(now_s))

    def plan(self, view: PlanView) -> tuple[FlexibleDemand, ...]:
        """Plan the hours of the open jobs; what the planner of slices is to know.

        Between two hours a simple rule plans new jobs only: it would give the others their part of the hour again.

        Raises:
            CpuLimitHit, NothingFound: the solver gave up; the last plan stays, as it does live.
        """
        self._changed, begun, self._slot = False, self._slot != _slot(view.now_s), _slot(view.now_s)
        told = tuple(
            OpenJob(
                run.id, run.terms.family, math.ceil(run.left - CRUMB), run.complete_by_s, run.terms.priority,
                run.terms.min_accuracy, bounded=run.terms.grams_max > 0,
                grams_left=max(0.0, run.terms.grams_max - run.grams),
            )
            for run in self._open
        )  # fmt: skip
        plan, flexible, wrong, _ = plan_hours(
            zone_slots(view, 0.0), [OpenJobs(FOLDER, 1, told)], view.now_s, Revision(), self._plan_by
        )
        assert not wrong, wrong
        fresh = {one.job_id.removeprefix(f"{FOLDER}/"): one for one in plan.jobs}
        self._hours = fresh if begun or self.rule == "planned" else {**fresh, **self._hours}
        self._until_s = plan.until_s
        return flexible

    def serve(
        self, from_s: float, to_s: float, served: Mapping[str, Interval], hardware: Hardware,
        intensity: Mapping[str, float],
    ) -> Mapping[str, Interval]:  # fmt: skip
        """Run items in an interval in which requests were served so; their joules by slice, under `JOBS`."""
        if not self._open:
            return {}
        work = Interval(from_s, to_s)
        rooms = sorted(self._rooms(to_s - from_s, served, hardware, intensity), key=lambda r: (r[1].item_j, r[1].key))
        for run in sorted(self._open, key=lambda one: one.turn):
            fits = [r for family, r in rooms if family == run.terms.family and r.accuracy >= run.terms.min_accuracy]
            self._run(run, fits, work)
        return {JOBS: work} if work.joules else {}

    def _run(self, run: JobRun, rooms: list[_Room], work: Interval) -> None:
        may, left, length_s = self._may_start(run, work.starts_s), run.left, work.ends_s - work.starts_s
        self._pace[run.terms.family] = sum(room.left_s / room.item_s for room in rooms) / length_s
        if math.isfinite(may) and (planned := planned_variants(self._hours.get(run.id), work.starts_s)):
            rooms = [room for room in rooms if room.variant in planned]
        ends_s = work.starts_s
        for room in rooms:
            items = min(may, run.left, room.left_s / room.item_s)
            if run.terms.grams_max and room.item_g:
                items = min(items, max(0.0, run.terms.grams_max - run.grams) / room.item_g)
            if items > 0:
                room.left_s -= items * room.item_s
                run.left, may, run.grams = run.left - items, may - items, run.grams + items * room.item_g
                work.joules[room.key] = work.joules.get(room.key, 0.0) + items * room.item_j
                ends_s = max(ends_s, work.starts_s + length_s * (1.0 - room.left_s / room.free_s))
        if work.starts_s >= run.complete_by_s - EPSILON_S:
            run.late_items += left - run.left
        spent = run.terms.grams_max and run.grams >= run.terms.grams_max * (1.0 - CRUMB)
        if spent or run.left <= CRUMB:
            run.failed, run.left, run.ended_s = (run.left if spent and run.left > CRUMB else 0.0), 0.0, ends_s
            self._open.remove(run)
            self._hours.pop(run.id, None)
            self._changed = True

    def _may_start(self, run: JobRun, now_s: float) -> float:
        """Items that may start now: of a job that runs at once all, as live without a plan."""
        if self.rule == "at_once":
            return math.inf
        pace, waiting = self._pace.get(run.terms.family, 0.0), math.ceil(run.left - CRUMB)
        items, planned = math.ceil(run.items), self._hours.get(run.id)
        return may_start(planned, self._until_s, items, waiting, run.complete_by_s, now_s, pace)[0]

    def _rooms(
        self, length_s: float, served: Mapping[str, Interval], hardware: Hardware, intensity: Mapping[str, float]
    ) -> Iterator[tuple[str, _Room]]:
        """Slices that may run items, each with its family."""
        for device in hardware.devices.values():
            for key, one in device.slices.items() if device.type.kind != DeviceKind.CPU else ():
                if one.state != SliceState.READY or len(one.part.hosted) != 1:
                    continue
                (hosted,) = one.part.hosted
                service = hardware.service(device, key, hosted)
                point = service.points[-1]
                joules = served[hosted.family].joules.get(key, 0.0) if hosted.family in served else 0.0
                busy_s = joules / service.energy_j * service.service.mean_ms / MS_PER_S if joules else 0.0
                item_s = point.mean_ms / MS_PER_S / point.items
                free_s = max(0.0, FULL * length_s - busy_s)
                item_j = point.active_w * item_s
                item_g = grams(item_j * device.factor, intensity[device.place.zone], self._pue)
                if free_s > 0:
                    room = _Room(key, hosted.variant, service.accuracy, item_s, item_j, item_g, free_s, free_s)
                    yield hosted.family, room


def _slot(now_s: float) -> int:
    return math.floor(now_s / SLOT_S + EPSILON_S)


def _runs(inputs: Inputs) -> Iterator[JobRun]:
    """Jobs of a scenario that have items."""
    scenario = inputs.scenario
    rows = {one.name: one.items for one in scenario.families}
    for number, terms in enumerate(scenario.jobs):
        for count, at_s in enumerate(terms.arrivals_s(scenario.span_s)):
            until_s = at_s + terms.every_h * HOUR_S if terms.every_h else scenario.span_s
            per_s = inputs.arrivals[terms.family].mean_per_s(at_s, until_s) * rows[terms.family]
            items = float(terms.items or round(terms.share * per_s * (until_s - at_s)))
            if items:
                yield JobRun(f"{number}-{count}", terms, items, at_s, at_s + terms.complete_by_h * HOUR_S, items)
