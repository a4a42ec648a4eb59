"""Search for a plan of few devices: one mix per family (`mixes.py`) on the slices that the devices offer.

Formulation (Dantzig-Wolfe by family; branch and price):
  min awake power + sum(cost_m l_m) + moves / H, with l_m in {0, 1}: whether a family has mix m.
  sum l_m = 1 per family. Per slot: slices of chosen mixes <= slices of chosen configurations.
  Devices, wake-ups, starts, spread and the cap of watts are those of `program.py`.
A node is a linear program; its mixes are priced in by one look at all of them. Branches, in this order: devices awake
in a place, those at a clock, those in a configuration, slices of a class. The node with the lowest bound is next; from
it the search goes down the side that takes more. From some nodes a dive rounds all that is left. Where that leaves a
gap, an integer program chooses among the mixes of all families with the lowest reduced costs. Their prices are those of
the lowest node whose numbers of awake devices are whole.
Deviations: mixes have two classes at most, see `mixes.py`. Nodes bound the work, so that a decision replays.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from controller.planners.columns import ClassKey
from controller.planners.exact.milp import GrowingProgram, Limits, Point, Program
from controller.planners.exact.mixes import Mixes, mixes_of
from controller.planners.exact.model import Aim, Problem, awake_w
from controller.planners.exact.program import (
    Place,
    Slot,
    awake_under_cap,
    place_of,
    price_wakes,
    slot_of,
    standing_slices,
    useful,
)
from trefoil.core.fleet import Configuration

Layout = tuple[int, Configuration, int]  # group, configuration, clock

CHOICES_MAX: Final = 1500  # of a family; a fleet with more has no use for whole mixes: fractions say as much
MIXES_MAX: Final = 3_000_000  # of all families: their memory and the time of one look
ROUNDS_MAX: Final = 500  # of pricing in one branch
PRICED: Final = 8  # mixes of a family that one look takes
WHOLE: Final = 1e-5  # what is nearer to a whole number is one
BETTER_W: Final = 1e-6
PROVEN: Final = 1e-4  # of the objective: what pricing may still find
DEAR: Final = 10.0  # times the most expensive mix, on top of all devices awake: what a family without a mix costs
DIVES: Final = frozenset({0, 1, 2, 3, 5, 8, 13, 21, 34})  # nodes
NEAR_ENOUGH: Final = 5e-3  # of the objective: a bound so near leaves little to find
CHOICES: Final = ((500, Limits(nodes=150, gap=2e-3)), (1500, Limits(nodes=20, gap=2e-3)))  # mixes of all families
STEEP: Final = 5e-3  # of the bound: a side that costs more waits
ONE_MIX: Final = -1  # `Kept.column`: the mix of an index alone
OTHER_MIX: Final = -2  # `Kept.column`: every mix but that one
PRICING_NODES: Final = 2000  # of the program that bounds one family
PRICING_GAP: Final = 1e-6  # of the same
FLIPS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """A plan's counts: devices by (group, configuration, clock), slices by class.

    `bound`: lower bound of any plan; -inf: none is known. `useful`: what devices may have in a plan that is better by
    more than the gap.
    """

    layouts: Mapping[Layout, int]
    slices: Mapping[ClassKey, int]
    objective: float
    bound: float
    useful: frozenset[Layout]
    configurations: int  # of which `useful` are some


class Kept(NamedTuple):
    """What a branch keeps of a family's mixes: those with so many slices of one class (index in `columns`). With
    `ONE_MIX` for the class it keeps the mix of that index, with `OTHER_MIX` every other one."""

    family: int
    column: int
    least: int
    most: float


class Branch(NamedTuple):
    """Bounds of variables and restrictions of mixes."""

    bounds: Mapping[int, tuple[float, float]]
    kept: tuple[Kept, ...]

    def split(self, variable: int, below: int) -> "tuple[Branch, Branch]":
        """This branch with a variable of at most `below`, and with one above it."""
        low, high = self.bounds.get(variable, (0.0, math.inf))
        lower = {**self.bounds, variable: (low, float(below))}
        upper = {**self.bounds, variable: (below + 1.0, high)}
        return Branch(lower, self.kept), Branch(upper, self.kept)

    def keeping(self, kept: Kept) -> "Branch":
        """This branch with one more restriction."""
        return Branch(self.bounds, (*self.kept, kept))


class Node(NamedTuple):
    """A branch, solved: ordered by its bound, and then by age."""

    bound: float
    age: int
    branch: Branch
    point: Point


class Taken(NamedTuple):
    """A mix that the master program has as a variable: the family, the mix's index."""

    family: int
    mix: int


def find_mixes(problem: Problem, aim: Aim, gap: float, nodes: int, proven: float = 0.0) -> MixedPlan | None:
    """The best plan of mixes within a gap and so many nodes; None: none was found, or this search is not for such a
    problem (shared slices, frozen devices, a shortage, a price of what lacks, large fleets).

    `proven`: the gap beyond which `MixedPlan.useful` leaves out; 0: no bound is looked for.
    """
    if aim.shortage_allowed or aim.lack_j or any(g.must_stay for g in problem.groups):
        return None
    if any(c.limits or c.key.beside or c.batch for c in problem.columns):
        return None
    master = _master(problem, aim)
    return None if master is None else _Search(master, gap, nodes, proven).run()


@dataclass(slots=True, eq=False)
class Master:
    """The master program, and which of its rows and variables mean what."""

    program: Program
    mixes: tuple[Mixes, ...]
    layouts: list[tuple[Layout, int]]
    levels: list[list[int]]  # variables to branch on, the coarsest first
    lacking: list[int]  # by family, the variable that stands for no mix at all
    serves: list[int]  # by family, the row that takes one mix
    cap: int  # row of the fleet's watts; -1: there is no cap


def _master(problem: Problem, aim: Aim) -> Master | None:
    program = Program()
    rows: dict[Slot, int] = {}
    offers: dict[Slot, list[tuple[int, float]]] = {slot_of(c.key): [] for c in problem.columns}
    layouts: list[tuple[Layout, int]] = []
    for index, group in enumerate(problem.groups):
        mine = []
        for clock in group.clocks:
            slots = [s.name for s in group.type.slice_types if (*group.place, s.name, clock) in offers]
            cost = awake_w(group.type, clock) * problem.weight(group.zone)
            for option in useful(group, slots) if slots else ():
                if not option.slices:
                    continue
                variable = program.variable(cost, 0, group.number)
                layouts.append(((index, option, clock), variable))
                mine.append(variable)
                for name, number in option.slices:
                    if name in slots:
                        offers[*group.place, name, clock].append((variable, -float(number)))
        program.row([(v, 1.0) for v in mine], high=group.number)
    for slot, terms in offers.items():
        rows[slot] = program.row(terms, high=0)
    shapes = _starts(program, problem, aim)
    families = [mixes_of(problem, aim, task, rows, shapes, CHOICES_MAX) for task in problem.tasks]
    if any(f is None for f in families):
        return None
    mixes = tuple(f for f in families if f is not None)
    if sum(len(f.cost_w) for f in mixes) > MIXES_MAX:
        return None
    levels, cap = _devices(program, problem, aim, layouts)
    awake = sum(g.number * max(awake_w(g.type, clock) for clock in g.clocks) for g in problem.groups)
    dear = awake + DEAR * max(float(f.cost_w.max()) for f in mixes)
    lacking = [program.variable(dear, 0, 1) for _ in mixes]
    serves = [program.row([(variable, 1.0)], low=1, high=1) for variable in lacking]
    return Master(program, mixes, layouts, levels, lacking, serves, cap)


def _starts(program: Program, problem: Problem, aim: Aim) -> dict[tuple[Place, str], int]:
    """Rows that price the slices of a type that a place has more than stand there."""
    rows = {}
    priced = problem.horizon_s if aim.moves else 0.0
    for column in problem.columns:
        shape = place_of(column.key), column.slice_type
        if shape in rows:
            continue
        cost = column.start_j / priced * problem.weight(column.key.zone) if priced > 0 else 0.0
        more = program.variable(cost, 0, math.inf)
        rows[shape] = program.row([(more, -1.0)], high=standing_slices(problem, *shape))
    return rows


def _devices(
    program: Program, problem: Problem, aim: Aim, layouts: Sequence[tuple[Layout, int]]
) -> tuple[list[list[int]], int]:
    """Rows of devices: awake in a place, at a clock, woken, spread, the cap.

    The answer: variables to branch on, level by level, and the cap's row.
    """
    awake, clocked = [], []
    everywhere: list[tuple[int, float]] = []
    for place in sorted({g.place for g in problem.groups}):
        number = sum(g.number for g in problem.groups if g.place == place)
        mine = [(clock, v) for (g, _, clock), v in layouts if problem.groups[g].place == place]
        terms = [(v, 1.0) for _, v in mine]
        everywhere += terms
        awake.append(program.variable(0.0, 0, number))
        program.row([*terms, (awake[-1], -1.0)], low=0, high=0)
        if aim.moves and problem.horizon_s > 0:
            price_wakes(program, problem, place, terms)
        for clock in sorted({clock for clock, _ in mine}):
            clocked.append(program.variable(0.0, 0, number))
            program.row([*((v, 1.0) for at, v in mine if at == clock), (clocked[-1], -1.0)], low=0, high=0)
    spread = max(problem.awake_min, *(t.objective.spread_min for t in problem.tasks))
    if spread > 1:
        program.row(everywhere, low=min(spread, problem.number))
    cap = -1
    if problem.max_watts < math.inf:
        terms, left_w = awake_under_cap(problem, ((*layout, v) for layout, v in layouts))
        cap = program.row(terms, high=left_w)
    return [awake, clocked, [v for _, v in layouts]], cap


@dataclass(slots=True, eq=False)
class _Search:
    master: Master
    gap: float
    nodes: int
    proven: float
    best: float = math.inf
    best_values: NDArray[np.float64] | None = None
    program: GrowingProgram = field(init=False)
    taken: list[Taken] = field(default_factory=list)
    known: set[Taken] = field(default_factory=set)
    at: Branch = Branch({}, ())
    allowed: list[NDArray[np.bool_]] = field(default_factory=list)
    ages: "count[int]" = field(default_factory=count)
    near: Node | None = None  # the lowest with whole numbers of devices awake
    chosen: bool = False  # the best plan is from a choice of mixes
    first: int = 0  # variable of the first mix that was taken

    def __post_init__(self) -> None:
        self.program = GrowingProgram(self.master.program)
        self.first = self.program.variables
        self.allowed = [np.ones(len(m.cost_w), dtype=bool) for m in self.master.mixes]

    def run(self) -> MixedPlan | None:
        """Search until the bound is within the gap or the nodes are spent; then the best of the nearest mixes."""
        root = self._solved(self.at, -math.inf)
        if root is None:
            return None
        lowest = self._tree(root)
        near = self.near.point if self.near else root.point
        for number, limits in CHOICES:
            if self.best < math.inf and self.best - lowest <= NEAR_ENOUGH * abs(self.best):
                break
            self._choose(near, number, limits)
        return self._found(root.point)

    def _tree(self, root: Node) -> float:
        """Search; the answer is a lower bound of what mixes can reach."""
        heap = [root]
        down: Node | None = None
        for number in range(self.nodes):
            if down is None and not heap:
                break
            node = down or heapq.heappop(heap)
            down = None
            if node.bound >= self._cutoff:
                continue
            if number in DIVES:
                self._dive(node)
            children = self._children(node)
            if children and children[-1].bound <= children[0].bound + STEEP * abs(children[0].bound):
                down = children.pop()
            for child in children:
                heapq.heappush(heap, child)
        return min((node.bound for node in (*heap, *([down] if down else []))), default=self._cutoff)

    def _choose(self, point: Point, number: int, limits: Limits) -> None:
        """Best plan from a number of mixes: those of all families with the least extra cost at a point's prices. Also
        the configurations with no more extra cost."""
        reduced = [self._reduced(family, point) for family in range(len(self.master.mixes))]
        together = np.concatenate(reduced)
        room = float(together[_lowest(together, number)].max())
        for family, costs in enumerate(reduced):
            for mix in np.flatnonzero(costs <= room):
                self._take(Taken(family, int(mix)))
        self._enter(Branch({}, ()))
        upper = self.master.program.upper
        most = {v: upper[v] if point.reduced[v] <= room else 0.0 for _, v in self.master.layouts}
        most |= dict.fromkeys(self.master.lacking, 0.0)
        most |= {
            self.first + at: math.inf if reduced[t.family][t.mix] <= room else 0.0 for at, t in enumerate(self.taken)
        }
        self.program.bound(list(most), [0.0] * len(most), list(most.values()))
        whole = [v for level in self.master.levels for v in level] + list(range(self.first, self.program.variables))
        start = None
        if self.chosen and self.best_values is not None:
            start = np.pad(self.best_values, (0, self.program.variables - len(self.best_values)))
        found = self.program.whole(whole, limits, start)
        if found is not None:
            self._accept(found)
            self.chosen = True

    @property
    def _cutoff(self) -> float:
        return self.best - self.gap * abs(self.best) if self.best < math.inf else math.inf

    def _children(self, node: Node) -> list[Node]:
        """What is left of both sides; the side that takes more is last. A whole point is the best so far instead."""
        sides = self._sides(node)
        if not sides:
            self._accept(node.point)
            return []
        solved = [self._solved(side, node.bound) for side in sides]
        return [child for child in solved if child is not None and child.bound < self._cutoff]

    def _accept(self, point: Point) -> None:
        if point.objective < self.best - BETTER_W:
            self.best, self.best_values = point.objective, point.values

    def _sides(self, node: Node) -> list[Branch]:
        """Both sides of the most fractional number, the lower one first; none: all are whole."""
        values = node.point.values
        for level in self.master.levels:
            parts = [(abs(values[v] - round(values[v])), -v) for v in level]
            part, variable = max(parts)
            if part > WHOLE:
                return list(node.branch.split(-variable, math.floor(values[-variable])))
        return [node.branch.keeping(kept) for kept in self._class_sides(values)]

    def _class_sides(self, values: NDArray[np.float64]) -> list[Kept]:
        """The class whose number of slices differs most between the mixes that a family has parts of."""
        best: tuple[float, list[Kept]] = (WHOLE, [])
        for family, parts in self._parts(values).items():
            mixes, total = self.master.mixes[family], sum(part for _, part in parts)
            for column in sorted({int(c) for m, _ in parts for c in self._columns(mixes, m)}):
                numbers = [(int(self._slices(mixes, m, column)), part / total) for m, part in parts]
                mean = sum(number * part for number, part in numbers)
                scatter = sum(abs(number - mean) * part for number, part in numbers)
                if scatter > best[0]:
                    at = math.floor(mean + WHOLE)
                    best = scatter, [Kept(family, column, 0, at), Kept(family, column, at + 1, math.inf)]
        return best[1]

    def _parts(self, values: NDArray[np.float64]) -> dict[int, list[tuple[int, float]]]:
        """By family its mixes (index) with their parts."""
        found: dict[int, list[tuple[int, float]]] = defaultdict(list)
        chosen = values[self.first :]
        for at in np.flatnonzero(chosen > WHOLE):
            found[self.taken[at].family].append((self.taken[at].mix, float(chosen[at])))
        return found

    @staticmethod
    def _columns(mixes: Mixes, mix: int) -> list[int]:
        return [c for c in (mixes.column[mixes.first[mix]], mixes.column[mixes.second[mix]]) if c >= 0]

    @staticmethod
    def _slices(mixes: Mixes, mix: int, column: int) -> int:
        choices = mixes.first[mix], mixes.second[mix]
        return sum(int(mixes.slices[choice]) for choice in choices if mixes.column[choice] == column)

    def _dive(self, node: Node) -> None:
        """Round up what is nearest to the next whole number, level by level, until all is whole or nothing is left."""
        flips = 0
        current: Node | None = node
        while current is not None:
            rounded = self._rounded(current)
            if rounded is None:
                self._accept(current.point)
                return
            following = self._solved(rounded[0], current.bound)
            if following is None and flips < FLIPS_MAX:
                flips += 1
                following = self._solved(rounded[1], current.bound)
            current = following

    def _rounded(self, node: Node) -> tuple[Branch, Branch] | None:
        """A branch with one number rounded up, and the same without that; None: all are whole."""
        values = node.point.values
        for level in self.master.levels:
            part, variable = max((values[v] - math.floor(values[v] + WHOLE), -v) for v in level)
            if part > WHOLE:
                lower, upper = node.branch.split(-variable, math.ceil(values[-variable] - WHOLE) - 1)
                return upper, lower
        parts = [(p, -f, -m) for f, of in self._parts(values).items() for m, p in of if p < 1 - WHOLE]
        if not parts:
            return None
        _, family, mix = max(parts)
        one, other = (Kept(-family, kind, -mix, -mix) for kind in (ONE_MIX, OTHER_MIX))
        return node.branch.keeping(one), node.branch.keeping(other)

    def _solved(self, branch: Branch, above: float) -> Node | None:
        """A branch's optimum, with every mix that makes it better; None: nothing in it is better than the best."""
        self._enter(branch)
        bound = above
        for _ in range(ROUNDS_MAX):
            point = self.program.solve()
            if point is None:
                return None
            lower, new = self._priced(point)
            bound = max(bound, lower)
            if bound >= self._cutoff:
                return None
            lacks = any(point.values[v] > WHOLE for v in self.master.lacking)
            if not lacks and (not new or point.objective - bound < PROVEN * abs(point.objective)):
                node = Node(bound, next(self.ages), branch, point)
                awake = [point.values[v] for v in self.master.levels[0]]
                if max(abs(n - round(n)) for n in awake) <= WHOLE and (self.near is None or bound < self.near.bound):
                    self.near = node
                return node
            if not new:
                return None
        return None

    def _priced(self, point: Point) -> tuple[float, int]:
        """A bound of the branch, and how many mixes were taken in."""
        bound, new = point.objective, 0
        for family in range(len(self.master.mixes)):
            reduced = np.where(self.allowed[family], self._reduced(family, point), math.inf)
            nearest = _lowest(reduced, PRICED)
            bound += min(0.0, float(reduced[nearest].min()))
            new += sum(self._take(Taken(family, int(m))) for m in nearest if reduced[m] < -BETTER_W)
        return bound, new

    def _reduced(self, family: int, point: Point) -> NDArray[np.float64]:
        """What one more of each mix costs."""
        mixes, dual = self.master.mixes[family], point.dual
        reduced: NDArray[np.float64] = mixes.cost_w - mixes.prices(dual) - dual[self.master.serves[family]]
        return reduced if self.master.cap < 0 else reduced - mixes.alone_w * dual[self.master.cap]

    def _take(self, taken: Taken) -> bool:
        if taken in self.known:
            return False
        mixes, terms = self.master.mixes[taken.family], defaultdict[int, float](float)
        for choice in (mixes.first[taken.mix], mixes.second[taken.mix]):
            if mixes.slices[choice]:
                terms[int(mixes.slot[choice])] += float(mixes.slices[choice])
                terms[int(mixes.shape[choice])] += float(mixes.slices[choice])
        terms[self.master.serves[taken.family]] = 1.0
        if self.master.cap >= 0:
            terms[self.master.cap] = float(mixes.alone_w[taken.mix])
        self.program.add(float(mixes.cost_w[taken.mix]), terms)
        self.taken.append(taken)
        self.known.add(taken)
        return True

    def _enter(self, branch: Branch) -> None:
        """Give the program the bounds of a branch."""
        changed = [v for v in {**self.at.bounds, **branch.bounds} if self.at.bounds.get(v) != branch.bounds.get(v)]
        whole = [branch.bounds.get(v, (0.0, self.master.program.upper[v])) for v in changed]
        self.program.bound(changed, [low for low, _ in whole], [high for _, high in whole])
        if self.at.kept != branch.kept:
            for family in {k.family for k in (*self.at.kept, *branch.kept)}:
                mixes, allowed = self.master.mixes[family], self.allowed[family]
                allowed[:] = True
                for kept in branch.kept:
                    if kept.family == family:
                        named = kept.column < 0
                        number = np.arange(len(allowed)) if named else mixes.counts(kept.column)
                        within = (number >= kept.least) & (number <= kept.most)
                        allowed &= ~within if kept.column == OTHER_MIX else within
            most = [math.inf if self.allowed[t.family][t.mix] else 0.0 for t in self.taken]
            self.program.bound(range(self.first, self.first + len(most)), [0.0] * len(most), most)
        self.at = branch

    def _found(self, root: Point) -> MixedPlan | None:
        values = self.best_values
        if values is None:
            return None
        slices: dict[ClassKey, int] = defaultdict(int)
        for family, parts in self._parts(values).items():
            mixes, mix = self.master.mixes[family], parts[0][0]
            for column in self._columns(mixes, mix):
                slices[mixes.columns[column].key] += self._slices(mixes, mix, column)
        layouts = {layout: n for layout, v in self.master.layouts if (n := round(values[v]))}
        bound, useful = self._bound_and_useful(root)
        return MixedPlan(layouts, dict(slices), self.best, bound, useful, len(self.master.layouts))

    def _bound_and_useful(self, root: Point) -> tuple[float, frozenset[Layout]]:
        """Lower bound of any plan, whatever its classes, by the prices of the root; and `MixedPlan.useful`."""
        if not self.proven:
            return -math.inf, frozenset(layout for layout, _ in self.master.layouts)
        limits, bound, dual = Limits(PRICING_NODES, PRICING_GAP), root.objective, root.dual
        capped = -float(dual[self.master.cap]) if self.master.cap >= 0 else 0.0
        for mixes, row in zip(self.master.mixes, self.master.serves, strict=True):
            bound += min(0.0, mixes.lowest_w(dual, capped, limits) - float(dual[row]))
        room, reduced = self.best - self.proven * abs(self.best) - bound, root.reduced
        return bound, frozenset(layout for layout, v in self.master.layouts if reduced[v] < room)


def _lowest(values: NDArray[np.float64], number: int) -> NDArray[np.int64]:
    """Indices of so many of the lowest values, or of all."""
    return np.argpartition(values, min(number, len(values)) - 1)[:number]
