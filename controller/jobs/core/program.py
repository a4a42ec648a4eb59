"""Program of jobs: how many items of each lot run in which slot, on which pool, for the fewest grams.

Source: ours. Data: jobs, slots, the time now. Result: device hours by lot, slot and pool; docs/jobs.md has formulas.
Formulation: a linear program, except that the devices woken now are whole numbers. Jobs that differ only in their
deadline are one lot. By each deadline at least the work of the lot that is due by then is done. Earliest deadline first
divides this work among the jobs. No work is done before it has arrived. A pool has the device seconds of its slot.
Awake devices add active joules only; devices woken for jobs also add idle and wake-up joules. Where not all work can be
in time, overdue device hours are minimised first, by priority, and grams after that.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from controller.planners.exact.milp import Limits, NothingFound, Program, Result
from trefoil.core.jobs.planned import DevicePool, ItemCost, PendingJob, Shortage, Slot
from trefoil.core.units import HOUR_S, grams

WAITING: Final = 5e-4  # grams saved for an hour's wait that are worth it, as a share: of equal hours the first is taken
WHOLE: Final = 1e-6  # of a device: what the solver may lack of a whole one
LIMITS: Final = Limits(nodes=500, gap=1e-6)
SLACKS: Final = ((0.0, 1e-8), (1e-7, 1e-7), (1e-6, 1e-6), (1e-5, 1e-5), (1e-4, 1e-4))
"""By which lateness may exceed its minimum while grams are minimised, as a share and in hours: each after the one
before, where the solver finds no point within it."""


@dataclass(frozen=True, slots=True)
class Lot:
    """Jobs alike but for their deadline, the earliest first. `device_s`: of an item, where it takes the least."""

    jobs: tuple[PendingJob, ...]
    options: tuple["Option", ...]
    device_s: float
    short_of: Shortage

    def due_h(self, at_s: float = math.inf) -> float:
        """Device hours due by a time."""
        return sum(job.items_left for job in self.jobs if job.complete_by_s <= at_s) * self.device_s / HOUR_S


@dataclass(frozen=True, slots=True)
class Option:
    """Option of a lot: a pool in a slot."""

    slot: Slot
    pool: DevicePool
    cost: ItemCost
    item_g: float
    """Grams of an item there, without its share of idle and wake-up joules."""

    @property
    def place(self) -> tuple[str, str, float]:
        """Zone, pool and start [UTC s]: what several lots share."""
        return self.slot.zone, self.pool.name, self.slot.carbon.starts_at_s

    @property
    def whole_g(self) -> float:
        """Grams of an item there that wakes its device for its time alone."""
        length_s = self.slot.carbon.ends_at_s - self.slot.carbon.starts_at_s
        added_j = self.pool.idle_w * self.cost.device_s + self.pool.wake_j * self.cost.device_s / length_s
        return self.item_g + grams(added_j, self.slot.carbon.p50_g_per_kwh, self.slot.pue)

    def done(self, at_s: float) -> float:
        """Share of the slot that lies before a time: items run evenly over it."""
        carbon = self.slot.carbon
        if at_s >= carbon.ends_at_s:
            return 1.0
        return max(0.0, (at_s - carbon.starts_at_s) / (carbon.ends_at_s - carbon.starts_at_s))


@dataclass(frozen=True, slots=True)
class Division:
    """Division of lots: items by lot and option."""

    lots: tuple[Lot, ...]
    items: tuple[tuple[float, ...], ...]
    added_g: dict[tuple[str, str, float], float]
    """Grams of idle and wake-up joules by place."""


def lots_of(jobs: Iterable[PendingJob], slots: Sequence[Slot]) -> tuple[Lot, ...]:
    """Lots of jobs with the options that each has; a job with a limit of grams is a lot by itself."""

    def alike(job: PendingJob) -> tuple[object, ...]:
        alone = job.job_id if math.isfinite(job.grams_left) else ""
        return (-job.priority, job.family, job.zones, job.transfer_j, job.accuracy_floor, alone)

    def in_order(job: PendingJob) -> tuple[object, ...]:
        return (*alike(job), job.complete_by_s, job.job_id)

    found = []
    for _, group in groupby(sorted((j for j in jobs if j.items_left > 0), key=in_order), key=alike):
        members = tuple(group)
        reachable = [slot for slot in slots if not members[0].zones or slot.zone in members[0].zones]
        options = tuple(option for slot in reachable for option in _options(members[0], slot))
        short_of = Shortage.NONE if options else Shortage.ACCURACY if reachable else Shortage.ZONE
        device_s = min((option.cost.device_s for option in options), default=1.0)
        found.append(Lot(members, options, device_s, short_of))
    return tuple(found)


def _options(job: PendingJob, slot: Slot) -> Iterable[Option]:
    moved_j = job.transfer_j if job.zones and slot.zone != job.zones[0] else 0.0
    for pool in slot.pools:
        fits = [c for c in pool.costs if c.family == job.family and c.accuracy >= job.accuracy_floor]
        if fits:
            cost = min(fits, key=lambda c: (c.active_j + pool.idle_w * c.device_s, c.device_s))
            yield Option(slot, pool, cost, grams(cost.active_j + moved_j, slot.carbon.p50_g_per_kwh, slot.pue))


class JobsProgram:
    """Linear program of some lots."""

    def __init__(self, lots: tuple[Lot, ...], now_s: float) -> None:
        self.lots, self._now_s = lots, now_s
        self._program = Program()
        self._runs: list[list[int]] = []
        self._later: dict[int, int] = {}
        self._awake: dict[tuple[str, str, float], int] = {}
        self._until_s = max((o.slot.carbon.ends_at_s for lot in lots for o in lot.options), default=now_s)
        for number, lot in enumerate(lots):
            self._add_runs(number, lot)
        self._add_pools()

    def in_time(self) -> Division | None:
        """Division of fewest grams with everything in time; None: there is none.

        Raises:
            CpuLimitHit, NothingFound: see `Program.solve`.
        """
        rows = len(self._program.low)
        for lot, runs in zip(self.lots, self._runs, strict=True):
            for at_s in sorted({job.complete_by_s for job in lot.jobs if job.complete_by_s <= self._until_s}):
                self._program.row(_done(lot, runs, at_s), low=lot.due_h(at_s))
        self._add_ends({})
        found = self._program.solve(LIMITS)
        self._cut(rows)
        return None if found is None else self._division(found)

    def least_late(self) -> Division:
        """Division of the fewest overdue device hours, and of those the one of fewest grams.

        Raises:
            CpuLimitHit, NothingFound: see `Program.solve`.
        """
        return self._division(self._least_late())

    def _add_runs(self, number: int, lot: Lot) -> None:
        """Variables of a lot: device hours (of the pool where an item takes the least) on each option."""
        hours = HOUR_S / lot.device_s
        self._runs.append(
            [self._program.variable(o.item_g * hours * self._patience(o), 0.0, lot.due_h()) for o in lot.options]
        )
        beyond_h = lot.due_h() - lot.due_h(self._until_s)
        if beyond_h > 0 and lot.options:  # after the last slot an hour is as expensive as the mean of those known
            mean_g = sum(option.whole_g for option in lot.options) / len(lot.options)
            self._later[number] = self._program.variable(mean_g * hours, 0.0, beyond_h)
        limit_g = lot.jobs[0].grams_left
        if math.isfinite(limit_g):
            terms = [(run, o.whole_g * hours) for run, o in zip(self._runs[-1], lot.options, strict=True)]
            self._program.row(terms, high=max(0.0, limit_g))

    def _patience(self, option: Option) -> float:
        return 1.0 + WAITING * max(0.0, option.slot.carbon.starts_at_s - self._now_s) / HOUR_S

    def _add_pools(self) -> None:
        """Rows of pools: device hours of a slot, and of devices woken for jobs their idle and wake-up grams."""
        users: dict[tuple[str, str, float], tuple[Option, list[tuple[int, float]]]] = {}
        for lot, runs in zip(self.lots, self._runs, strict=True):
            for run, option in zip(runs, lot.options, strict=True):
                users.setdefault(option.place, (option, []))[1].append((run, option.cost.device_s / lot.device_s))
        before: dict[tuple[str, str], int] = {}
        for place in sorted(users):
            option, terms = users[place]
            pool, carbon = option.pool, option.slot.carbon
            begun = carbon.starts_at_s <= self._now_s
            free_h = (pool.free_s if begun else pool.sure_s) / HOUR_S
            if not pool.idle_w and not pool.wake_j:
                self._program.row(terms, high=free_h)
                continue
            length_h = (carbon.ends_at_s - carbon.starts_at_s) / HOUR_S
            idle_g = grams(pool.idle_w * length_h * HOUR_S, carbon.p50_g_per_kwh, option.slot.pue)
            most = math.floor(free_h / length_h + WHOLE) if begun else free_h / length_h
            awake = self._program.variable(idle_g * self._patience(option), 0.0, most, integer=begun)
            wakes = self._program.variable(grams(pool.wake_j, carbon.p50_g_per_kwh, option.slot.pue), 0.0, math.inf)
            self._program.row([*terms, (awake, -length_h)], high=0.0)
            last = before.get(place[:2])
            self._program.row(
                [(awake, 1.0), (wakes, -1.0), *([(last, -1.0)] if last is not None else [])],
                high=pool.woken if last is None else 0.0,
            )
            self._awake[place] = before[place[:2]] = awake

    def _add_ends(self, unplaced: dict[int, int]) -> None:
        """All of a lot is done by the last slot's end, or left for later; `unplaced`: variables by lot for the rest."""
        for number, (lot, runs) in enumerate(zip(self.lots, self._runs, strict=True)):
            rest = [(of[number], 1.0) for of in (self._later, unplaced) if number in of]
            self._program.row([*((run, 1.0) for run in runs), *rest], low=lot.due_h(), high=lot.due_h())

    def _cut(self, rows: int) -> None:
        """Take back the rows after the first `rows`."""
        program = self._program
        del program.low[rows:], program.high[rows:], program.starts[rows + 1 :]
        del program.index[program.starts[-1] :], program.value[program.starts[-1] :]

    def _least_late(self) -> Result:
        """Fewest overdue device hours, of the highest priority first; then fewest grams."""
        program, cost = self._program, list(self._program.cost)
        overdue: dict[int, list[tuple[int, float]]] = {}  # by priority: variables, and the hours that each lasts
        unplaced = {}
        for number, (lot, runs) in enumerate(zip(self.lots, self._runs, strict=True)):
            due = {job.complete_by_s for job in lot.jobs if job.complete_by_s <= self._until_s}
            ends = {o.slot.carbon.ends_at_s for o in lot.options if due and o.slot.carbon.ends_at_s >= min(due)}
            times = sorted({*due, *ends})
            weights = overdue.setdefault(lot.jobs[0].priority, [])
            for at_s, next_s in zip(times, [*times, self._until_s][1:], strict=True):
                over = program.variable(0.0, 0.0, lot.due_h(at_s))
                program.row([*_done(lot, runs, at_s), (over, 1.0)], low=lot.due_h(at_s))
                weights.append((over, max(0.0, next_s - at_s) / HOUR_S))
            unplaced[number] = program.variable(0.0, 0.0, lot.due_h())
            weights.append((unplaced[number], 1.0 + (self._until_s - self._now_s) / HOUR_S))
        self._add_ends(unplaced)
        least_h: dict[int, float] = {}  # overdue of a priority, by its row
        for priority in sorted(overdue, reverse=True):
            program.cost = [0.0] * len(program.cost)
            for variable, hours in overdue[priority]:
                program.cost[variable] = hours
            overdue_h = self._solved(least_h).objective
            least_h[program.row(overdue[priority])] = overdue_h
        program.cost = cost + [0.0] * (len(program.cost) - len(cost))
        return self._solved(least_h)

    def _solved(self, most: Mapping[int, float]) -> Result:
        """Solve with rows of at most so much, or of as little more as the solver's tolerance asks for."""
        for share, slack_h in SLACKS:
            for row, high in most.items():
                self._program.high[row] = high * (1 + share) + slack_h
            found = self._program.solve(LIMITS)
            if found is not None:
                return found
        raise NothingFound(f"jobs: no point with {sum(most.values()):g} device hours overdue")

    def _division(self, found: Result) -> Division:
        items = tuple(
            tuple(max(0.0, found.values[run]) * HOUR_S / lot.device_s for run in runs)
            for lot, runs in zip(self.lots, self._runs, strict=True)
        )
        options = {option.place: option for lot in self.lots for option in lot.options}
        added: dict[tuple[str, str, float], float] = {}
        before: dict[tuple[str, str], float] = {}
        for place, variable in self._awake.items():
            awake = max(0.0, found.values[variable])
            option, pool = options[place], options[place].pool
            carbon = option.slot.carbon
            wakes = max(0.0, awake - before.get(place[:2], pool.woken))
            energy_j = awake * pool.idle_w * (carbon.ends_at_s - carbon.starts_at_s) + wakes * pool.wake_j
            added[place] = grams(energy_j, carbon.p50_g_per_kwh, option.slot.pue)
            before[place[:2]] = awake
        return Division(self.lots, items, added)


def _done(lot: Lot, runs: Sequence[int], at_s: float) -> list[tuple[int, float]]:
    """Terms of what is done of a lot by a time."""
    terms = [(run, option.done(at_s)) for run, option in zip(runs, lot.options, strict=True)]
    return [(run, share) for run, share in terms if share > 0]
