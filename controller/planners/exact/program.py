"""Mixed-integer program of a plan's counts.

Source: DESIGN section 4. Data, aim and answer: `model.py`. A place is a device type in a zone; a slot is a slice type
of a place at a clock.
Decision: y[g, c, f] devices of group g in configuration c at clock f. x[k, t] slices of class k = (family, place, slice
type, variant, clock) in pool tier t. r[k] traffic [1/s].
Formulation (watts, weighed with the carbon of their zone):
  min baseline and sleep power + sum(energy_k * r_k + running_k * x_k)
  + moves / H + value * sum((best - accuracy_k) * r_k)   so that:
  sum_k x[k] <= sum_gcf y * count(c, s) per slot; sum_cf y <= devices of g, the rest sleep. Classes that share slices
    have as many of them, and count once.
  n_t b[k, t] <= x[k, t] <= (n_t+1 - 1) b[k, t]; sum_t b[k, t] <= 1.
  r_k <= sum_t slope_kt * x[k, t] - less_kt * b[k, t].
    (A tier of one number of slices is its b alone: x = n_t b, r_k <= min(capacity, demand) b.)
  sum_k r_k = demand per family at its high quantile (energy and accuracy count at the mean).
  Where the fleet has a cap: baseline and sleep power + sum(alone_k * r_k) <= cap, at the mean (all r_k in a shortage).
  sum (accuracy_k - hard minimum) r_k >= 0; where asked: sum (accuracy_k - target) r_k >= 0, or >= -lack at a price.
  sum x >= replicas, sum y >= spread, sum y >= awake_min; sum y = devices awake per place, whole.
  What whole slices imply and fractions do not: a family has a class as accurate as its floor. It has two, unless one
    that accurate serves all of its demand.
  moves: slices started, models loaded, devices woken beyond what runs now, each with its joules.
`value` is the price of accuracy [J per request and unit of accuracy]: intensity multiplies every joule alike, so all
modes reduce to it: budget: price / intensity; instant: 0 with a target; lambda: CLOVER Eq. 3 (`value_lambda`).
Left out because they cannot change the optimum: configurations that offer no more than another one of what any column
uses; slices beyond those that serve all of a family's demand.
Deviations: moves are counted per class, a lower bound of what the physical mapping then needs.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, NamedTuple

from controller.planners.columns import ClassKey, Column
from controller.planners.exact.milp import Program
from controller.planners.exact.model import Aim, Group, Problem, awake_w, layouts_of, request_j, wake_j
from controller.planners.planning_input import Task
from trefoil.core.fleet import Configuration

TIE_J: Final = 1e-6  # equal plans: fewer slices
NEAR: Final = 1e-6  # of accuracy and of demand: more than the solver's tolerance lets through
INFINITE: Final = float("inf")
COVER_DEVICES: Final = 3  # beyond them the rows cost the solver more than they prove
SHORTAGE_J: Final = 1e6  # a request that nothing can serve in time outweighs every joule

Place = tuple[str, str]  # device type, zone
Slot = tuple[str, str, str, int]  # device type, zone, slice type, clock
Terms = Sequence[tuple[int, float]]  # of a row: variable, coefficient


def place_of(key: ClassKey) -> Place:
    """Where slices of a class can be."""
    return key.device_type, key.zone


def slot_of(key: ClassKey) -> Slot:
    """Slot of a class: which slices it can have."""
    return key.device_type, key.zone, key.slice_type, key.clock_mhz


@dataclass(frozen=True, slots=True)
class Shape:
    """What may differ between two programs of one problem.

    `best_rate`: every slice counts at the rate of the largest pool that there can be, and counts may be fractions: a
    relaxation, whose optimum bounds the problem's from below. `columns`, `layouts`, `counts`: a restriction to these
    classes, (group, configuration, clock), and pool tiers between (lowest, highest) numbers of slices, whose optimum
    bounds from above. `tight`: with what whole slices and devices imply and fractions do not; expensive in a small
    program.
    """

    best_rate: bool = False
    tight: bool = False
    columns: Collection[ClassKey] | None = None
    layouts: Collection[tuple[int, Configuration, int]] | None = None
    counts: Mapping[ClassKey, tuple[int, int]] = field(default_factory=dict)


class Part(NamedTuple):
    """Part of a class: a variable, and what one of it is in slices and in capacity [1/s]."""

    variable: int
    slices: float
    rate_per_s: float


class Tier(NamedTuple):
    """Tier of a class' pool: its choice (0 or 1), its number of slices if that may vary, and its largest capacity."""

    chosen: int
    slices: int | None
    least: int
    most: int
    capacity_per_s: float


@dataclass(slots=True)
class Builder:
    """A `Program`, and which of its variables mean what."""

    problem: Problem
    aim: Aim
    shape: Shape = field(default_factory=Shape)
    program: Program = field(default_factory=Program)
    columns: list[Column] = field(default_factory=list)
    layouts: list[tuple[int, Configuration, int, int]] = field(default_factory=list)  # group, option, clock, variable
    counts: dict[ClassKey, list[Part]] = field(default_factory=dict)
    fixed: dict[ClassKey, int] = field(default_factory=dict)  # slices of devices that stay as they are
    traffic: dict[ClassKey, int] = field(default_factory=dict)
    needs: dict[int, tuple[ClassKey, float]] = field(default_factory=dict)  # choice -> traffic that fewer do not serve
    short: dict[str, int] = field(default_factory=dict)
    tiers: dict[ClassKey, list[Tier]] = field(default_factory=dict)
    awake: dict[Place, int] = field(default_factory=dict)  # place -> variable, if the shape is tight
    _slots: dict[Slot, list[tuple[int, float]]] = field(default_factory=dict)  # what offers slices of a slot
    _free: dict[Slot, int] = field(default_factory=dict)  # slices that a slot can have at most
    _hosted: Counter[ClassKey] = field(default_factory=Counter)
    _tasks: dict[str, Task] = field(default_factory=dict)
    _best: dict[str, float] = field(default_factory=dict)

    def build(self) -> "Builder":
        """Build the program: variables, constraints, objective."""
        only = self.shape.columns
        self.columns = [
            c for c in self.problem.columns if only is None or any(k in only for k in (c.key, *c.key.partners))
        ]
        self._tasks = {t.family: t for t in self.problem.tasks}
        for column in self.problem.columns:
            self._best[column.family] = max(self._best.get(column.family, 0.0), column.accuracy)
        shapes: dict[Slot, int] = dict.fromkeys((slot_of(c.key) for c in self.columns), 0)
        for index, group in enumerate(self.problem.groups):
            self._stay(group) if group.must_stay else self._devices(index, group, shapes)
        if self.shape.tight:
            self._awake()
        for column in self.columns:
            self._class(column)
        self._fit()
        self._share()
        for task in self.problem.tasks:
            self._family(task)
        if self.problem.awake_min > 1:
            self._spread(self.problem.awake_min)
        if self.problem.max_watts < INFINITE:
            self._cap()
        if self.aim.moves and self.problem.horizon_s > 0:
            self._moves()
        return self

    def whole(
        self, layouts: Mapping[tuple[int, Configuration, int], int], slices: Mapping[ClassKey, int]
    ) -> dict[int, float]:
        """Integer variables of a plan that are not 0: devices by (group, configuration, clock), slices by class."""
        found: dict[int, float] = defaultdict(float)
        for group, option, clock, variable in self.layouts:
            number = layouts.get((group, option, clock), 0) if option.slices else 0
            found[variable] += number
            if number and self.awake:
                found[self.awake[self.problem.groups[group].place]] += number
        for key, number in slices.items():
            for tier in self.tiers[key]:
                if tier.least <= number <= tier.most:
                    found[tier.chosen] = 1.0
                    if tier.slices is not None:
                        found[tier.slices] = float(number)
        return found

    def _stay(self, group: Group) -> None:
        """Devices that stay as they are: constants, but for the traffic that they get."""
        awake = sum(n for _, n in layouts_of(group))
        cost = awake * awake_w(group.type, group.clocks[0]) * self.problem.weight(group.zone)
        self.program.variable(cost, 1.0, 1.0)
        for key, number in group.hosts:  # a hosted model without a column cannot be used
            self._hosted[key] += number

    def _devices(self, index: int, group: Group, shapes: Mapping[Slot, int]) -> None:
        number = group.number
        variables = []
        for clock in group.clocks:
            slots = [s.name for s in group.type.slice_types if (*group.place, s.name, clock) in shapes]
            if not slots:
                continue
            cost = awake_w(group.type, clock) * self.problem.weight(group.zone)
            only = self.shape.layouts
            given = [o for o in group.options if only is not None and (index, o, clock) in only]
            for option in useful(group, slots) if only is None else given:
                variable = self.program.variable(cost if option.slices else 0.0, 0, number, not self.shape.best_rate)
                variables.append(variable)
                self.layouts.append((index, option, clock, variable))
                for name, count in option.slices:
                    if name in slots:
                        self._slots.setdefault((*group.place, name, clock), []).append((variable, -float(count)))
            for name in slots:
                most = most_slices(group, name)
                slot = (*group.place, name, clock)
                self._free[slot] = self._free.get(slot, 0) + number * most
        self.program.row([(v, 1.0) for v in variables], high=number)

    def _awake(self) -> None:
        """Whole numbers of devices: few, and most of what a plan costs depends on them."""
        for place in sorted({g.place for g in self.problem.groups if not g.must_stay}):
            terms = [(v, 1.0) for g, o, _, v in self.layouts if self.problem.groups[g].place == place and o.slices]
            number = sum(g.number for g in self.problem.groups if g.place == place and not g.must_stay)
            self.awake[place] = self.program.variable(0.0, 0, number, integer=True)
            self.program.row([*terms, (self.awake[place], -1.0)], low=0, high=0)

    def _class(self, column: Column) -> None:
        key, task = column.key, self._tasks[column.family]
        weight = self.problem.weight(key.zone)
        scale = self.problem.scale.get(key, 1.0)
        must, free = self._hosted[key], self._free.get(slot_of(key), 0)
        cost = request_j(self.problem, self.aim, column, self._best[key.family])
        self.counts[key] = []
        if not free:  # only as many as stay
            self.fixed[key] = must
            if column.running_w:
                self.program.variable(column.running_w * weight * must, 1.0, 1.0)
            self.traffic[key] = self.program.variable(cost, 0, column.capacity_per_s(must) * scale)
            return
        wanted = free if key.beside else enough(column, scale, task)  # a partner on them may need more
        limit = must + min(free, wanted, self.shape.counts.get(key, (0, free))[1])
        if self.shape.best_rate:
            count = self.program.variable(self._slice_w(column), must, limit)
            most = max(1, limit)
            self.counts[key].append(Part(count, 1, column.capacity_per_s(most) * scale / most))
        else:
            self._tiers(column, scale, must, limit)
        flow = self.program.variable(cost, 0, INFINITE)
        self.program.row([(flow, 1.0), *((p.variable, -p.rate_per_s) for p in self.counts[key])], high=0)
        self.traffic[key] = flow

    def _tiers(self, column: Column, scale: float, must: int, limit: int) -> None:
        key, slice_w, wanted = column.key, self._slice_w(column), self._tasks[column.family].demand.rate_p90_per_s
        low = self.shape.counts.get(key, (0, limit))[0]
        chosen: list[tuple[int, float]] = []
        tiers = self.tiers[key] = []
        for piece, following in zip_longest(column.pieces, column.pieces[1:]):
            size, most = piece.size, min(limit, following.size - 1 if following else limit)
            if size > limit or most < low:
                continue
            one = most == size
            tier = self.program.variable(slice_w * size if one else 0.0, 0, 1, integer=True)
            chosen.append((tier, 1.0))
            if size > max(must, replicas(self._tasks[column.family])) and not key.beside:
                self.needs[tier] = key, column.capacity_per_s(size - 1) * scale
            if one:
                full = min(column.capacity_per_s(size) * scale, wanted)
                self.counts[key].append(Part(tier, size, full))
                tiers.append(Tier(tier, None, size, most, column.capacity_per_s(most) * scale))
                continue
            count = self.program.variable(slice_w, 0, most, integer=True)
            tiers.append(Tier(tier, count, size, most, column.capacity_per_s(most) * scale))
            self.program.row([(count, 1.0), (tier, -float(most))], high=0)
            self.program.row([(count, 1.0), (tier, -float(size))], low=0)
            self.counts[key].append(Part(count, 1, piece.slope_per_s * scale))
            if piece.less_per_s > 0:
                self.counts[key].append(Part(tier, 0, -piece.less_per_s * scale))
        if len(chosen) > 1:
            self.program.row(chosen, high=1)
        if must:
            self.program.row([(p.variable, p.slices) for p in self.counts[key] if p.slices], low=must)

    def _fit(self) -> None:
        used: dict[Slot, list[tuple[int, float]]] = defaultdict(list)
        hosted: Counter[Slot] = Counter()
        for key, parts in self.counts.items():
            if not key.leads:
                continue
            used[slot_of(key)] += [(p.variable, p.slices) for p in parts if p.slices]
            hosted[slot_of(key)] += self._hosted[key] if parts else 0
        for slot, terms in used.items():
            if terms:
                self.program.row(terms + self._slots.get(slot, []), high=hosted[slot])

    def _share(self) -> None:
        """Classes that share slices have as many of them, and serve no more than these do together."""
        for column in self.columns:
            key, parts = column.key, self.counts[column.key]
            mine = [(p.variable, p.slices) for p in parts if p.slices]
            for partner in key.partners if key.leads else ():
                if mine:
                    theirs = [(p.variable, -p.slices) for p in self.counts[partner] if p.slices]
                    self.program.row([*mine, *theirs], low=0, high=0)
                for x, y in column.limits:
                    flows = [(self.traffic[key], x), (self.traffic[partner], y)]
                    slices = [(variable, -number) for variable, number in mine]
                    self.program.row([*flows, *slices], high=self.fixed.get(key, 0))

    def _family(self, task: Task) -> None:
        mine = [c for c in self.columns if c.family == task.family]
        flows = [(self.traffic[c.key], 1.0) for c in mine]
        wanted = task.demand.rate_p90_per_s
        if self.aim.shortage_allowed:
            self.short[task.family] = self.program.variable(SHORTAGE_J, 0, wanted)
            flows.append((self.short[task.family], 1.0))
        self.program.row(flows, low=wanted, high=wanted)
        floor, target = task.objective.hard_min_accuracy, self.aim.target.get(task.family, 0.0)
        lack_j = self.aim.lack_j.get(task.family)
        if lack_j is None:
            floor = max(floor, target)
        elif target > floor:
            lack = self.program.variable(lack_j * self.problem.mean_share(task.family), 0, INFINITE)
            self.program.row([(lack, 1.0), *((self.traffic[c.key], c.accuracy - target) for c in mine)], low=0)
        if floor > 0:
            self.program.row([(self.traffic[c.key], c.accuracy - floor) for c in mine], low=0)
        if self._covers and not any(self.fixed.get(c.key) for c in mine):
            self._cover(mine, wanted, floor)
        least = min(max(task.objective.replicas_min, task.objective.spread_min), _slices_most(self.problem))
        if least > 1:
            slices = [(p.variable, p.slices) for c in mine for p in self.counts[c.key] if p.slices]
            self.program.row(slices, low=least - sum(self.fixed.get(c.key, 0) for c in mine))
        if task.objective.spread_min > 1:
            self._spread(min(task.objective.spread_min, self.problem.number))

    def _spread(self, devices: int) -> None:
        """Devices that are awake at least, of the whole fleet."""
        staying = sum(n for g in self.problem.groups if g.must_stay for _, n in layouts_of(g))
        self.program.row([(v, 1.0) for _, o, _, v in self.layouts if o.slices], low=devices - staying)

    def _cap(self) -> None:
        """The fleet's watts: what sleeps, what is awake, and what requests take."""
        terms, left_w = awake_under_cap(self.problem, self.layouts)
        for column in self.columns:
            share = 1.0 if self.aim.shortage_allowed else self.problem.mean_share(column.family)
            terms.append((self.traffic[column.key], column.alone_j * share))
        self.program.row(terms, high=left_w)

    @property
    def _covers(self) -> bool:
        return self.shape.tight and not self.aim.shortage_allowed and self.problem.number <= COVER_DEVICES

    def _cover(self, mine: list[Column], wanted: float, floor: float) -> None:
        """Classes that a family has at least."""
        accurate, several = [], []
        for column in mine:
            reaches = column.accuracy >= floor - NEAR
            for tier in self.tiers.get(column.key, ()):
                alone = reaches and tier.capacity_per_s >= wanted * (1 - NEAR)
                several.append((tier.chosen, 2.0 if alone else 1.0))
                if reaches:
                    accurate.append((tier.chosen, 1.0))
        self.program.row(accurate, low=1)
        self.program.row(several, low=2)

    def _slice_w(self, column: Column) -> float:
        """What one more slice costs, loaded if nothing runs its model yet; `_moves` prices the load of others."""
        watts = column.running_w
        if self.aim.moves and self.problem.horizon_s > 0 and not loaded_models(self.problem, column.key.model):
            watts += column.load_j / self.problem.horizon_s
        return TIE_J + watts * self.problem.weight(column.key.zone)

    def _moves(self) -> None:
        horizon = self.problem.horizon_s
        by_model: dict[ClassKey, list[Column]] = defaultdict(list)
        by_shape: dict[tuple[Place, str], list[Column]] = defaultdict(list)
        for column in self.columns:
            if self.counts[column.key]:
                by_model[column.key.model].append(column)
                if column.key.leads:
                    by_shape[place_of(column.key), column.slice_type].append(column)
        for model, same in by_model.items():
            if loaded := loaded_models(self.problem, model):
                self._more(same, same[0].load_j / horizon, loaded)
        for ((kind, zone), shape), same in by_shape.items():
            self._more(same, same[0].start_j / horizon, standing_slices(self.problem, (kind, zone), shape))
        for place in sorted({g.place for g in self.problem.groups}):
            terms = [(v, 1.0) for g, o, _, v in self.layouts if self.problem.groups[g].place == place and o.slices]
            if terms:
                price_wakes(self.program, self.problem, place, terms)

    def _more(self, same: list[Column], cost_w: float, before: int) -> None:
        """Price what a group of classes has more than stands before."""
        before -= sum(self.fixed.get(c.key, 0) for c in same)
        more = self.program.variable(cost_w * self.problem.weight(same[0].key.zone), 0, INFINITE)
        terms = [(p.variable, p.slices) for c in same for p in self.counts[c.key] if p.slices]
        self.program.row([*terms, (more, -1.0)], high=before)


def loaded_models(problem: Problem, model: ClassKey) -> int:
    """Slices on which a model is loaded, where its class may be."""
    return sum(g.census.models.get(model, 0) for g in problem.groups if g.place == place_of(model))


def standing_slices(problem: Problem, place: Place, slice_type: str) -> int:
    """Slices of a type that stand in a place."""
    return sum(g.census.shapes.get(slice_type, 0) for g in problem.groups if g.place == place)


def price_wakes(program: Program, problem: Problem, place: Place, terms: Terms) -> None:
    """Price the devices awake in a place beyond those that are; `terms` count them, but for those that stay."""
    here = [g for g in problem.groups if g.place == place]
    cost = wake_j(here[0].type) / problem.horizon_s * problem.weight(place[1])
    staying = sum(n for g in here if g.must_stay for _, n in layouts_of(g))
    more = program.variable(cost, 0, INFINITE)
    program.row([*terms, (more, -1.0)], high=sum(g.census.awake for g in here) - staying)


def awake_under_cap(
    problem: Problem, layouts: Iterable[tuple[int, Configuration, int, int]]
) -> tuple[list[tuple[int, float]], float]:
    """What devices take of the fleet's cap, by variable [W], and what the cap leaves to them and to requests [W]."""
    fixed_w = sum(group.type.sleep_w * group.number for group in problem.groups)
    for group in problem.groups:
        if group.must_stay:
            fixed_w += sum(n for _, n in layouts_of(group)) * awake_w(group.type, group.clocks[0])
    terms = [(v, awake_w(problem.groups[g].type, clock)) for g, o, clock, v in layouts if o.slices]
    return terms, problem.max_watts - fixed_w


def most_slices(group: Group, slice_type: str) -> int:
    """The most slices of a type that a device of a group can have."""
    return max((dict(o.slices).get(slice_type, 0) for o in group.options), default=0)


def useful(group: Group, slots: list[str]) -> list[Configuration]:
    """Configurations that offer more than any other of some slice type that matters; of equals one that stands."""
    standing = group.census.layouts
    offers = [(tuple(dict(o.slices).get(s, 0) for s in slots), o) for o in group.options]
    kept: list[tuple[tuple[int, ...], Configuration]] = []
    for offer, option in sorted(offers, key=lambda o: (-sum(o[0]), o[1] not in standing)):
        if not any(all(a >= b for a, b in zip(other, offer, strict=True)) for other, _ in kept):
            kept.append((offer, option))
    return [option for option in group.options if any(option is o for _, o in kept)]


def enough(column: Column, scale: float, task: Task) -> int:
    """The fewest slices of one class that serve all of a family's demand, or its replicas: more are of no use."""
    least = replicas(task)
    wanted = task.demand.rate_p90_per_s / scale
    for piece in reversed(column.pieces):
        if column.capacity_per_s(piece.size) <= wanted:
            return max(least, math.ceil((wanted + piece.less_per_s) / piece.slope_per_s - 1e-9))
    return max(least, column.tiers[0][0])


def replicas(task: Task) -> int:
    """The fewest slices that a family has."""
    return max(1, task.objective.replicas_min, task.objective.spread_min)


def _slices_most(problem: Problem) -> int:
    return sum(g.number * max((sum(n for _, n in o.slices) for o in g.options), default=0) for g in problem.groups)
