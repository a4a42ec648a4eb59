"""Mixes of a family: one class of slices or two that serve its whole demand within its floor.

Data: a `Problem`, an `Aim`, one task. A choice is a class with a number of slices, which is a pool of known capacity. A
mix is one choice or two of different classes, with the cheapest split of the demand that keeps the floor.
A plan of few devices is one mix per family on slices that the devices offer, and only the devices couple families.
Everything that a pool does to a class is thus inside a mix, where it costs no integer variable: the pools' steps, the
split, the floor, replicas, models to load. All mixes of a family are a few ten thousand numbers.
Deviations: plans with three classes of one family are not among them, so that a bound of a search among mixes is not
proven. `Mixes.lowest_w` is a proven bound, with any number of classes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.planners.columns import Column
from controller.planners.exact.milp import Limits, NothingFound, Program
from controller.planners.exact.model import Aim, Problem, request_j
from controller.planners.exact.program import (
    TIE_J,
    Place,
    Slot,
    enough,
    loaded_models,
    most_slices,
    place_of,
    replicas,
    slot_of,
)
from controller.planners.planning_input import Task

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Mixes:
    """Mixes of one family, as arrays.

    By choice, the last of which is no choice at all: `column` (index in `columns`), `slices`, `slot` and `shape` (rows
    of the master program). By mix: its two choices, what it costs [W], and its most active power [W].
    """

    task: Task
    floor: float
    columns: tuple[Column, ...]
    choices: "Choices"
    column: Ints
    slices: Ints
    slot: Ints
    shape: Ints
    first: Ints
    second: Ints
    cost_w: Floats
    alone_w: Floats

    def counts(self, column: int) -> Ints:
        """Slices of one class, by mix."""
        of_choice = np.where(self.column == column, self.slices, 0)
        return of_choice[self.first] + of_choice[self.second]

    def prices(self, dual: Floats) -> Floats:
        """What the slices of each mix cost at these prices of rows."""
        of_choice = (dual[self.slot] + dual[self.shape]) * self.slices
        return of_choice[self.first] + of_choice[self.second]

    def lowest_w(self, dual: Floats, capped: float, limits: Limits) -> float:
        """Lower bound of what a plan of this family costs at these prices of slices [W], however many classes it has;
        -inf: none is known. A choice may be taken several times, as it stands for all that it is as good as.
        `capped`: price of a watt under the fleet's cap.
        """
        chosen, wanted = self.choices, self.task.demand.rate_p90_per_s
        prices = (dual[self.slot] + dual[self.shape])[:-1] * self.slices[:-1]
        fixed_w, capacity = np.maximum(0.0, chosen.cost_w - prices), np.minimum(chosen.capacity, wanted)
        energy_j = chosen.energy_j + capped * chosen.alone_j
        program, flows, gains = Program(), [], []
        for at in _undominated(fixed_w, capacity, energy_j, chosen.accuracy):
            times = program.variable(float(fixed_w[at]), 0, math.ceil(wanted / capacity[at]), integer=True)
            flow = program.variable(float(energy_j[at]), 0, wanted)
            program.row([(flow, 1.0), (times, -float(capacity[at]))], high=0)
            flows.append((flow, 1.0))
            gains.append((flow, float(chosen.accuracy[at] - self.floor)))
        program.row(flows, low=wanted, high=wanted)
        program.row(gains, low=0)
        try:
            found = program.solve(limits)
        except NothingFound:
            return -math.inf
        return math.inf if found is None else found.bound


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Choices of one family: a class (index in the family's columns) with so many slices, and what that serves."""

    column: Ints
    slices: Ints
    model: Ints  # index of the first column with the same model
    capacity: Floats
    load_w: Floats  # of each slice more than have the model
    loaded: Floats
    cost_w: Floats  # whatever the traffic
    energy_j: Floats  # of a request, with the price of its accuracy
    alone_j: Floats  # of a request by itself at the mean rate: what a cap counts
    accuracy: Floats


def mixes_of(
    problem: Problem,
    aim: Aim,
    task: Task,
    rows: Mapping[Slot, int],
    shapes: Mapping[tuple[Place, str], int],
    choices_max: int,
) -> Mixes | None:
    """All mixes of a task's family; None: there are none, or more choices than that."""
    columns = tuple(c for c in problem.columns if c.family == task.family)
    chosen = _choices(problem, aim, task, columns)
    if not 0 < len(chosen.column) <= choices_max:
        return None
    floor = max(task.objective.hard_min_accuracy, aim.target.get(task.family, 0.0))
    first, second, flow = _pairs(chosen, task, floor)
    alone = _alone(chosen, task, floor)
    none = len(chosen.column)
    first, second = np.concatenate((first, alone)), np.concatenate((second, np.full(len(alone), none)))
    if not len(first):
        return None
    wanted = task.demand.rate_p90_per_s
    flow = np.concatenate((flow, np.full(len(alone), wanted)))
    slices = np.append(chosen.slices, 0)
    cost_w, energy_j, alone_j = (np.append(of, 0.0) for of in (chosen.cost_w, chosen.energy_j, chosen.alone_j))
    return Mixes(
        task,
        floor,
        columns,
        chosen,
        np.append(chosen.column, -1),
        slices,
        np.append([rows[slot_of(columns[k].key)] for k in chosen.column], 0),
        np.append([shapes[place_of(columns[k].key), columns[k].slice_type] for k in chosen.column], 0),
        first,
        second,
        cost_w[first]
        + cost_w[second]
        + _loaded_twice_w(chosen, first, second)
        + energy_j[first] * flow
        + energy_j[second] * (wanted - flow),
        alone_j[first] * flow + alone_j[second] * (wanted - flow),
    )


def _choices(problem: Problem, aim: Aim, task: Task, columns: tuple[Column, ...]) -> Choices:
    best = max((c.accuracy for c in columns), default=0.0)
    found = []
    models = [column.key.model for column in columns]
    rooms: dict[tuple[Place, str], int] = {}  # slices of a type that a place can have
    for at, column in enumerate(columns):
        place, weight, scale = place_of(column.key), problem.weight(column.key.zone), problem.scale.get(column.key, 1.0)
        shape = place, column.slice_type
        if shape not in rooms:
            rooms[shape] = sum(g.number * most_slices(g, shape[1]) for g in problem.groups if g.place == place)
        loaded = loaded_models(problem, column.key.model)
        load_w = column.load_j / problem.horizon_s * weight if aim.moves and problem.horizon_s > 0 else 0.0
        each_j = request_j(problem, aim, column, best)
        model = models.index(column.key.model)
        for slices in range(1, min(rooms[shape], enough(column, scale, task)) + 1):
            capacity = column.capacity_per_s(slices) * scale
            if capacity > 0:
                cost_w = (TIE_J + column.running_w * weight) * slices + load_w * max(0, slices - loaded)
                joules = each_j, column.alone_j * problem.mean_share(task.family)
                found.append((at, slices, model, capacity, load_w, loaded, cost_w, *joules, column.accuracy))
    table = np.array(found, dtype=float).reshape(-1, 10)
    return Choices(*table[:, :3].T.astype(int), *table[:, 3:].T)


def _loaded_twice_w(chosen: Choices, first: Ints, second: Ints) -> Floats:
    """What two clocks of one model load more than each alone, by mix [W]: each counts the slices that have it."""
    one = first, np.minimum(second, len(chosen.column) - 1)
    same = (second < len(chosen.column)) & (chosen.model[one[0]] == chosen.model[one[1]])
    slices, loaded = (chosen.slices[one[0]], chosen.slices[one[1]]), chosen.loaded[one[0]]
    apart = sum(np.maximum(0.0, number - loaded) for number in slices)
    found: Floats = np.where(same, chosen.load_w[one[0]] * (np.maximum(0.0, sum(slices) - loaded) - apart), 0.0)
    return found


def _undominated(fixed_w: Floats, capacity: Floats, energy_j: Floats, accuracy: Floats) -> list[int]:
    """Choices of which no other one is as good in everything."""
    kept: list[int] = []
    for at in np.lexsort((-capacity, fixed_w)):
        before = np.array(kept, dtype=int)
        beaten = (
            (capacity[before] >= capacity[at]) & (energy_j[before] <= energy_j[at]) & (accuracy[before] >= accuracy[at])
        )
        if not beaten.any():
            kept.append(int(at))
    return kept


def _alone(chosen: Choices, task: Task, floor: float) -> Ints:
    """Choices that need no other one."""
    enough_capacity = chosen.capacity >= task.demand.rate_p90_per_s * (1 - 1e-9)
    return np.flatnonzero(enough_capacity & (chosen.accuracy >= floor - 1e-9) & (chosen.slices >= replicas(task)))


def _pairs(chosen: Choices, task: Task, floor: float) -> tuple[Ints, Ints, Floats]:
    """Pairs of choices that serve the demand [1/s] together, and what the first one, the cheaper, serves of it."""
    wanted = task.demand.rate_p90_per_s
    order = np.argsort(chosen.energy_j, kind="stable")
    upper = np.triu_indices(len(order), 1)
    i, j = order[upper[0]], order[upper[1]]
    kept = (
        (chosen.column[i] != chosen.column[j])
        & (chosen.capacity[i] + chosen.capacity[j] >= wanted)
        & (np.maximum(chosen.accuracy[i], chosen.accuracy[j]) >= floor)
        & (chosen.slices[i] + chosen.slices[j] >= replicas(task))
    )
    i, j = i[kept], j[kept]
    most, least = np.minimum(chosen.capacity[i], wanted), np.maximum(0.0, wanted - chosen.capacity[j])
    gain, lack = chosen.accuracy[i] - chosen.accuracy[j], (floor - chosen.accuracy[j]) * wanted
    with np.errstate(divide="ignore", invalid="ignore"):
        reached = lack / gain
    most = np.where(gain < 0, np.minimum(most, reached), most)
    least = np.where(gain > 0, np.maximum(least, reached), least)
    works = (most >= least - 1e-9 * wanted) & (most >= 0) & ((gain != 0) | (lack <= 1e-9 * wanted))
    return i[works], j[works], most[works]
