"""Model of the default planner's program: devices, columns, demand, an aim, and the counts that answer it.

Source: DESIGN section 4. MIG isolates slices, so that a plan's value depends on counts only. The program itself is
`program.py`, the way to solve it `search.py`.
Carbon: `weights` holds, per zone, its intensity over that of the dirtiest zone; watts are weighed with it wherever they
are compared. With one zone every weight is 1 and weighed watts are watts.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Final

from controller.planners.columns import ClassKey, Column, class_of
from controller.planners.planning_input import Device, PlanningInput, Task
from trefoil.core.device_types import configurations
from trefoil.core.fleet import Configuration, DeviceState, DeviceType
from trefoil.core.power import idle_w

WEIGHT_MIN: Final = 1e-3  # carbon-free power beside dirty power is cheap, not free: joules still break ties


@dataclass(frozen=True, slots=True)
class Census:
    """Census of what stands on the devices of a group."""

    models: Mapping[ClassKey, int]  # without clocks
    shapes: Mapping[str, int]
    layouts: Mapping[Configuration, int]  # of devices on which something stands
    awake: int


@dataclass(frozen=True, slots=True)
class Group:
    """Devices of one type and zone that may take the same configurations and clocks.

    `must_stay`: they keep exactly the slices and variants in `hosts` (silent nodes, or the question what staying is
    worth). `size` counts devices without names.
    """

    type: DeviceType
    options: tuple[Configuration, ...]
    devices: tuple[Device, ...]
    hosts: tuple[tuple[ClassKey, int], ...] = ()
    must_stay: bool = False
    clocks: tuple[int, ...] = (0,)
    zone: str = ""
    size: int = 0
    census: Census = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        models = Counter(class_of(d, r).model for d in self.devices for r in d.running)
        shapes = Counter(name for d in self.devices for name, _, _ in d.layout)
        cut = Counter(tuple(sorted(name for name, _, _ in d.layout)) for d in self.devices if d.running)
        layouts = {Configuration(self.type.name, tuple(sorted(Counter(names).items()))): n for names, n in cut.items()}
        census = Census(models, shapes, layouts, sum(d.awake for d in self.devices))
        object.__setattr__(self, "census", census)

    def __hash__(self) -> int:
        """Of what tells groups apart at the least cost: a group is part of many keys."""
        return hash((self.type.name, self.zone, self.clocks, self.number, self.must_stay, self.hosts))

    @property
    def number(self) -> int:
        """Number of devices."""
        return len(self.devices) or self.size

    @property
    def place(self) -> tuple[str, str]:
        """Place, type and zone: what devices have to share to serve one class."""
        return self.type.name, self.zone


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem without the mode. `scale` lowers the rate of classes that failed the request-level check.

    `max_watts` caps the power of these devices (`capped_w`): plain watts, whatever the carbon of their zones.
    `awake_min`: of these devices, those that are awake at least, whatever families they serve.
    """

    groups: tuple[Group, ...]
    columns: tuple[Column, ...]
    tasks: tuple[Task, ...]
    horizon_s: float
    scale: Mapping[ClassKey, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    max_watts: float = math.inf
    awake_min: int = 0

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices of all groups."""
        return tuple(d for g in self.groups for d in g.devices)

    @property
    def number(self) -> int:
        """Number of devices."""
        return sum(g.number for g in self.groups)

    def weight(self, zone: str) -> float:
        """Weight of a watt in a zone."""
        return self.weights.get(zone, 1.0)

    def mean_share(self, family: str) -> float:
        """Mean rate over the high quantile that capacity is planned for."""
        task = next(t for t in self.tasks if t.family == family)
        return task.mean_per_s / task.demand.rate_p90_per_s


@dataclass(frozen=True, slots=True)
class Aim:
    """Aim per family: the value of accuracy [J], a target for its mean, or shortage as last resort.

    `lack_j`: what each unit of accuracy below the target costs [J per request]; without it the target has to be met.
    """

    value_j: Mapping[str, float] = field(default_factory=dict)
    target: Mapping[str, float] = field(default_factory=dict)
    lack_j: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    shortage_allowed: bool = False
    moves: bool = True


@dataclass(frozen=True, slots=True)
class Solution:
    """Counts and traffic. `traffic` is at the demand's high quantile; power and accuracy are at its mean rate.

    `clocks` goes with `layouts` (missing: the highest clock); `weighed_w` is power by the carbon of its zone.
    """

    layouts: tuple[tuple[int, Configuration, int], ...]  # group index, configuration, devices
    slices: Mapping[ClassKey, int]
    traffic: Mapping[ClassKey, float]
    power_w: float
    accuracy: Mapping[str, float]
    objective: float
    gap: float
    shortage_per_s: float = 0.0
    clocks: tuple[int, ...] = ()
    weighed_w: float = 0.0

    def clocked(self) -> Iterable[tuple[int, Configuration, int, int]]:
        """Layouts with clocks: (group index, configuration, clock, devices)."""
        for (group, option, number), clock in zip_longest(self.layouts, self.clocks, fillvalue=0):  # type: ignore[misc]
            yield group, option, clock, number


def weights_of(inputs: PlanningInput) -> tuple[dict[str, float], float]:
    """Per zone its intensity over the highest one, and that one [g/kWh]."""
    found = {zone: max(0.0, inputs.intensity(zone)) for zone in {d.zone for d in inputs.devices} or {""}}
    most = max(found.values())
    if most <= 0 or len(found) == 1:
        return dict.fromkeys(found, 1.0), most
    return {zone: max(WEIGHT_MIN, ci / most) for zone, ci in found.items()}, most


def groups_of(devices: Sequence[Device], columns: Sequence[Column] = ()) -> tuple[Group, ...]:
    """Free devices by type and zone, at every clock that columns know; devices of silent nodes as they are."""
    free: dict[tuple[str, str], list[Device]] = defaultdict(list)
    for device in devices:
        if not device.frozen:
            free[device.type.name, device.zone].append(device)
    clocks: dict[str, set[int]] = defaultdict(set)
    for column in columns:
        clocks[column.device_type].add(column.key.clock_mhz)
    found = [
        Group(
            alike[0].type,
            configurations(alike[0].type),
            tuple(alike),
            clocks=tuple(sorted(clocks[name], key=lambda mhz: (mhz < 0, mhz))) or (0,),
            zone=zone,
        )
        for (name, zone), alike in sorted(free.items())
    ]
    return (*found, *frozen_groups([d for d in devices if d.frozen]))


def frozen_groups(devices: Sequence[Device]) -> tuple[Group, ...]:
    """Devices that keep what they host, by type, zone and clock."""
    alike: dict[tuple[str, str, int], list[Device]] = defaultdict(list)
    for device in devices:
        alike[device.type.name, device.zone, device.clock_mhz].append(device)
    found = []
    for (_, zone, clock), same in sorted(alike.items()):
        hosts = Counter(class_of(d, r) for d in same for r in d.running)
        options = sorted({layout_configuration(d) for d in same}, key=lambda c: c.slices)
        found.append(
            Group(same[0].type, tuple(options), tuple(same), tuple(sorted(hosts.items())), True, (clock,), zone)
        )
    return tuple(found)


def pinned(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The same devices, but those that serve keep their slices: only swaps, clocks, wakes and sleeps remain."""
    found: list[Group] = []
    for group in groups:
        if group.must_stay:
            found.append(group)
            continue
        by_layout: dict[Configuration | None, list[Device]] = defaultdict(list)
        for device in group.devices:
            by_layout[layout_configuration(device) if device.running else None].append(device)
        for layout, devices in sorted(by_layout.items(), key=lambda item: str(item[0])):
            options = group.options if layout is None else (layout,)
            found.append(replace(group, options=options, devices=tuple(devices)))
    return tuple(found)


def layout_configuration(device: Device) -> Configuration:
    """The multiset of what stands on a device."""
    counts = Counter(name for name, _, _ in device.layout)
    return Configuration(device.type.name, tuple(sorted(counts.items())))


def layouts_of(group: Group) -> list[tuple[Configuration, int]]:
    """The configurations in which a group stands."""
    return sorted(group.census.layouts.items(), key=lambda item: item[0].slices)


def value_lambda(task: Task, intensity: float, base_j: float, base_accuracy: float, base_intensity: float) -> float:
    """CLOVER Eq. 3 as a price of accuracy [J].

    Eq. 3 is max l * (1 - CI * e / C) + (1 - l) * (A / A_base - 1), with C = base_j * base_intensity. Times rate * C /
    (l * CI) it is min power - value * rate * A. Here value = (1 - l) * C / (l * CI * A_base).
    """
    weight = task.objective.lambda_weight
    assert 0 <= weight <= 1
    return (1 - weight) * base_j * base_intensity / (max(weight, 1e-9) * max(intensity, 1e-9) * base_accuracy)


def request_j(problem: Problem, aim: Aim, column: Column, best: float) -> float:
    """Cost of a class' request [J] at the mean rate: its energy, weighed with the carbon of its zone, and the price of
    the accuracy that it lacks of the `best`."""
    price_j = aim.value_j.get(column.family, 0.0) * (best - column.accuracy)
    return (column.energy_j * problem.weight(column.key.zone) + price_j) * problem.mean_share(column.family)


def awake_w(kind: DeviceType, clock_mhz: int) -> float:
    """What being awake draws more than sleeping [W]: baseline power belongs to the device and its clock."""
    return idle_w(kind, DeviceState.AWAKE, clock_mhz) - kind.sleep_w


def wake_j(kind: DeviceType) -> float:
    """Energy of waking one device, on which nothing serves meanwhile."""
    return kind.wake_s * kind.idle_w


def capped_w(problem: Problem, solution: Solution) -> float:
    """Power of a solution as its cap counts it [W]: at the mean rate, every request a batch by itself."""
    watts = sum(group.type.sleep_w * group.number for group in problem.groups)
    for index, option, clock, number in solution.clocked():
        watts += number * awake_w(problem.groups[index].type, clock) if option.slices else 0.0
    alone_j = {column.key: column.alone_j for column in problem.columns}
    return watts + sum(alone_j[k] * r * problem.mean_share(k.family) for k, r in solution.traffic.items())


def judged(problem: Problem, solution: Solution) -> Solution:
    """Clean the traffic (nothing below a millionth of the demand) and fill in power and accuracy at the mean rate."""
    counts = [(g, option, clock, float(n)) for g, option, clock, n in solution.clocked()]
    return judged_counts(problem, solution, counts, solution.slices)


def judged_counts(
    problem: Problem,
    solution: Solution,
    counts: Iterable[tuple[int, Configuration, int, float]],
    slices: Mapping[ClassKey, float],
) -> Solution:
    """`judged` for (group, configuration, clock, devices) and slices whose counts may be fractions."""
    columns = {c.key: c for c in problem.columns}
    traffic: dict[ClassKey, float] = {}
    accuracy = {}
    watts: dict[str, float] = defaultdict(float)  # by zone
    for group in problem.groups:
        watts[group.zone] += group.type.sleep_w * group.number
    for index, option, clock, number in counts:
        group = problem.groups[index]
        watts[group.zone] += number * awake_w(group.type, clock) if option.slices else 0.0
    by_family: dict[str, dict[ClassKey, float]] = defaultdict(dict)
    for key, rate in solution.traffic.items():
        by_family[key.family][key] = rate
    for task in problem.tasks:
        mine = by_family[task.family]
        total = sum(mine.values())
        kept = {k: r for k, r in mine.items() if r > 1e-6 * max(total, 1e-9)}
        share = total / sum(kept.values()) if kept else 0.0
        traffic |= {k: r * share for k, r in kept.items()}
        accuracy[task.family] = sum(columns[k].accuracy * r for k, r in kept.items()) * share / total if kept else 0.0
        mean = problem.mean_share(task.family)
        for k in kept:
            watts[k.zone] += mean * columns[k].energy_j * traffic[k]
    for k, number in slices.items():
        watts[k.zone] += columns[k].running_w * number
    weighed = sum(problem.weight(zone) * w for zone, w in watts.items())
    return replace(solution, traffic=traffic, power_w=sum(watts.values()), accuracy=accuracy, weighed_w=weighed)
