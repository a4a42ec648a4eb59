"""The counts of a plan as a mixed-integer program.

Source: DESIGN section 4. MIG isolates slices, so that a plan's value depends on counts only.
Data: groups of devices with the configurations that they may take, columns (operating points), demand, what runs.
Decision: y[g, c] devices of group g in configuration c; x[k, t] slices of class k in pool tier t; r[k] traffic [1/s].
Formulation (watts): min idle and sleep power + sum(energy_k * r_k) + moves / H + value * sum((best - accuracy_k) * r_k)
so that
  sum_k x[k] <= sum_c y * count(c, s) per device type and slice type; sum_c y <= devices of g, the rest sleep
  n_t b[k, t] <= x[k, t] <= (n_t+1 - 1) b[k, t]; sum_t b[k, t] <= 1; r_k <= sum_t rate_kt * x[k, t]
  sum_k r_k = demand per family at its high quantile (energy and accuracy count at the mean)
  sum (accuracy_k - hard minimum) r_k >= 0; where asked: sum (accuracy_k - target) r_k >= 0
  sum x >= replicas, sum y >= spread
  moves: slices started, models loaded, devices woken beyond what runs now, each with its joules.
`value` is the price of accuracy [J per request and unit of accuracy]: intensity multiplies every joule alike, so all
modes reduce to it: budget: price / intensity; instant: 0 with a target; lambda: CLOVER Eq. 3 (`value_lambda`).
Deviations: moves are counted per class, a lower bound of what the physical mapping then needs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from controller.planners.columns import ClassKey, Column
from controller.planners.exact.milp import Limits, Program
from controller.planners.world import Device, Task
from trefoil.core.device_types import configurations
from trefoil.core.fleet import Configuration, DeviceType

TIE_J: Final = 1e-6  # equal plans: fewer slices


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that may take the same configurations. `hosts` pins slices and variants exactly (a silent node)."""

    type: DeviceType
    options: tuple[Configuration, ...]
    devices: tuple[Device, ...]
    hosts: tuple[tuple[ClassKey, int], ...] = ()
    must_stay: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything but the mode. `scale` lowers the rate of classes that failed the request-level check."""

    groups: tuple[Group, ...]
    columns: tuple[Column, ...]
    tasks: tuple[Task, ...]
    horizon_s: float
    scale: Mapping[ClassKey, float] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(d for g in self.groups for d in g.devices)


@dataclass(frozen=True, slots=True)
class Aim:
    """What to optimise, per family: the value of accuracy [J], a target for its mean, or shortage as last resort."""

    value_j: Mapping[str, float] = field(default_factory=dict)
    target: Mapping[str, float] = field(default_factory=dict)
    shortage_allowed: bool = False
    moves: bool = True


@dataclass(frozen=True, slots=True)
class Solution:
    """Counts and traffic. `traffic` is at the demand's high quantile; power and accuracy are at its mean rate."""

    layouts: tuple[tuple[int, Configuration, int], ...]  # group index, configuration, devices
    slices: Mapping[ClassKey, int]
    traffic: Mapping[ClassKey, float]
    power_w: float
    accuracy: Mapping[str, float]
    objective: float
    gap: float
    shortage_per_s: float = 0.0


def groups_of(devices: Sequence[Device]) -> tuple[Group, ...]:
    """Free devices by type; devices of silent nodes as they are."""
    found = []
    for name in sorted({d.type.name for d in devices}):
        free = tuple(d for d in devices if d.type.name == name and not d.frozen)
        if free:
            found.append(Group(free[0].type, configurations(free[0].type), free))
    return (*found, *(as_it_is(d) for d in devices if d.frozen))


def as_it_is(device: Device) -> Group:
    hosts = Counter((r.family, device.type.name, r.key.slice_type, r.variant) for r in device.running)
    return Group(device.type, (layout_configuration(device),), (device,), tuple(sorted(hosts.items())), True)


def pinned(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The same devices, but those that serve keep their slices: only swaps, wakes and sleeps remain."""
    found: list[Group] = []
    for group in groups:
        if group.hosts or group.must_stay:
            found.append(group)
            continue
        by_layout: dict[Configuration | None, list[Device]] = defaultdict(list)
        for device in group.devices:
            by_layout[layout_configuration(device) if device.running else None].append(device)
        for layout, devices in sorted(by_layout.items(), key=lambda item: str(item[0])):
            options = group.options if layout is None else (layout,)
            found.append(Group(group.type, options, tuple(devices)))
    return tuple(found)


def layout_configuration(device: Device) -> Configuration:
    """The multiset of what stands on a device."""
    counts = Counter(name for name, _, _ in device.layout)
    return Configuration(device.type.name, tuple(sorted(counts.items())))


def value_lambda(task: Task, intensity: float, base_j: float, base_accuracy: float, base_intensity: float) -> float:
    """CLOVER Eq. 3 as a price of accuracy [J].

    max l * (1 - CI * e / C) + (1 - l) * (A / A_base - 1), C = base_j * base_intensity, is, times rate * C / (l * CI),
    min power - value * rate * A with value = (1 - l) * C / (l * CI * A_base).
    """
    weight = task.objective.lambda_weight
    assert 0 <= weight <= 1
    return (1 - weight) * base_j * base_intensity / (max(weight, 1e-9) * max(intensity, 1e-9) * base_accuracy)


@dataclass(slots=True)
class _Builder:
    problem: Problem
    aim: Aim
    program: Program = field(default_factory=Program)
    layouts: list[tuple[int, Configuration, int]] = field(default_factory=list)  # group, configuration, variable
    counts: dict[ClassKey, list[tuple[int, float]]] = field(default_factory=dict)  # (variable, rate of one slice)
    traffic: dict[ClassKey, int] = field(default_factory=dict)
    short: dict[str, int] = field(default_factory=dict)

    def build(self) -> None:
        for index, group in enumerate(self.problem.groups):
            self._devices(index, group)
        for column in self.problem.columns:
            self._class(column)
        self._fit()
        for task in self.problem.tasks:
            self._family(task)
        if self.aim.moves and self.problem.horizon_s > 0:
            self._moves()

    def _devices(self, index: int, group: Group) -> None:
        number = len(group.devices)
        variables = []
        for option in group.options:
            fixed = number if group.must_stay else 0
            cost = group.type.idle_w - group.type.sleep_w if option.slices else 0.0
            variables.append(self.program.variable(cost, fixed, number, integer=True))
            self.layouts.append((index, option, variables[-1]))
        self.program.row([(v, 1.0) for v in variables], high=number)

    def _class(self, column: Column) -> None:
        limit = _most(self.problem, column)
        mean = _mean_share(self.problem, column.family)
        value = self.aim.value_j.get(column.family, 0.0)
        scale = self.problem.scale.get(column.key, 1.0)
        must = sum(n for g in self.problem.groups for key, n in g.hosts if key == column.key)
        sizes = [size for size, _ in column.tiers if size <= limit]
        self.counts[column.key] = []
        chosen = []
        for size, rate in column.tiers:
            if size > limit:
                continue
            above = [s for s in sizes if s > size]
            most = min(above) - 1 if above else limit
            count = self.program.variable(TIE_J, 0, most, integer=True)
            tier = self.program.variable(0.0, 0, 1, integer=True)
            self.program.row([(count, 1.0), (tier, -float(most))], high=0)
            self.program.row([(count, 1.0), (tier, -float(size))], low=0)
            self.counts[column.key].append((count, rate * scale))
            chosen.append(tier)
        if len(chosen) > 1:
            self.program.row([(t, 1.0) for t in chosen], high=1)
        if must:
            self.program.row([(c, 1.0) for c, _ in self.counts[column.key]], low=must)
        lacking = max(c.accuracy for c in self.problem.columns if c.family == column.family) - column.accuracy
        flow = self.program.variable((column.energy_j + value * lacking) * mean, 0, INFINITE)
        self.program.row([(flow, 1.0), *((c, -rate) for c, rate in self.counts[column.key])], high=0)
        self.traffic[column.key] = flow

    def _fit(self) -> None:
        for kind in sorted({g.type.name for g in self.problem.groups}):
            for shape in sorted({c.slice_type for c in self.problem.columns if c.device_type == kind}):
                used = [
                    (variable, 1.0)
                    for key, parts in self.counts.items()
                    if key[1] == kind and key[2] == shape
                    for variable, _ in parts
                ]
                offered = [(v, -float(self._offered(g, o, shape))) for g, o, v in self.layouts if o.device_type == kind]
                self.program.row(used + [(v, n) for v, n in offered if n], high=0)

    def _offered(self, group: int, option: Configuration, shape: str) -> int:
        hosts = self.problem.groups[group].hosts
        if hosts:  # what a silent node hosts without a column is nobody's to use
            return sum(n for key, n in hosts if key[2] == shape and key in self.counts)
        return dict(option.slices).get(shape, 0)

    def _family(self, task: Task) -> None:
        mine = [c for c in self.problem.columns if c.family == task.family]
        flows = [(self.traffic[c.key], 1.0) for c in mine]
        wanted = task.demand.rate_p90_per_s
        if self.aim.shortage_allowed:
            self.short[task.family] = self.program.variable(SHORTAGE_J, 0, wanted)
            flows.append((self.short[task.family], 1.0))
        self.program.row(flows, low=wanted, high=wanted)
        for floor in (task.objective.hard_min_accuracy, self.aim.target.get(task.family, 0.0)):
            if floor > 0:
                self.program.row([(self.traffic[c.key], c.accuracy - floor) for c in mine], low=0)
        slices = [(v, 1.0) for c in mine for v, _ in self.counts[c.key]]
        least = max(task.objective.replicas_min, task.objective.spread_min)
        if least > 1:
            self.program.row(slices, low=min(least, _slices_most(self.problem)))
        if task.objective.spread_min > 1:
            spread = min(task.objective.spread_min, len(self.problem.devices))
            self.program.row([(v, 1.0) for _, o, v in self.layouts if o.slices], low=spread)

    def _moves(self) -> None:
        horizon = self.problem.horizon_s
        loaded = Counter(
            (r.family, d.type.name, r.key.slice_type, r.variant) for d in self.problem.devices for r in d.running
        )
        for column in self.problem.columns:
            more = self.program.variable(column.load_j / horizon, 0, INFINITE)
            terms = [(v, 1.0) for v, _ in self.counts[column.key]]
            self.program.row([*terms, (more, -1.0)], high=loaded[column.key])
        starts = {(c.device_type, c.slice_type): c.start_j for c in self.problem.columns}
        standing = Counter((d.type.name, r.key.slice_type) for d in self.problem.devices for r in d.running)
        for (kind, shape), start_j in starts.items():
            more = self.program.variable(start_j / horizon, 0, INFINITE)
            terms = [(v, 1.0) for k, parts in self.counts.items() if k[1:3] == (kind, shape) for v, _ in parts]
            self.program.row([*terms, (more, -1.0)], high=standing[(kind, shape)])
        for kind in sorted({g.type.name for g in self.problem.groups}):
            some = next(g.type for g in self.problem.groups if g.type.name == kind)
            more = self.program.variable(wake_j(some) / horizon, 0, INFINITE)
            terms = [(v, 1.0) for _, o, v in self.layouts if o.device_type == kind and o.slices]
            awake = sum(1 for d in self.problem.devices if d.type.name == kind and d.awake)
            self.program.row([*terms, (more, -1.0)], high=awake)


INFINITE: Final = float("inf")
SHORTAGE_J: Final = 1e6  # a request that nothing can serve in time outweighs every joule


def wake_j(kind: DeviceType) -> float:
    """Energy of waking one device, on which nothing serves meanwhile."""
    return kind.wake_s * kind.idle_w


def solve(problem: Problem, aim: Aim, limits: Limits) -> Solution | None:
    """The best counts, or None when the constraints leave no plan.

    Raises:
        WallLimitHit: see `Program.solve`.
    """
    builder = _Builder(problem, aim)
    builder.build()
    result = builder.program.solve(limits)
    if result is None:
        return None
    values = result.values
    layouts = tuple(
        (g, option, round(values[v])) for g, option, v in builder.layouts if round(values[v]) and option.slices
    )
    slices = {k: n for k, parts in builder.counts.items() if (n := sum(round(values[v]) for v, _ in parts))}
    traffic = {k: max(0.0, values[v]) for k, v in builder.traffic.items() if k in slices}
    short = sum(values[v] for v in builder.short.values())
    return judged(problem, Solution(layouts, slices, traffic, 0.0, {}, result.objective, result.gap, max(0.0, short)))


def estimate(problem: Problem, aim: Aim, limits: Limits) -> tuple[Mapping[str, float], float] | None:
    """Accuracy per family and power [W] of the best plan when counts may be fractions; None when there is no plan.

    Raises:
        WallLimitHit: see `Program.solve`.
    """
    builder = _Builder(problem, aim)
    builder.build()
    builder.program.relax_counts()
    result = builder.program.solve(limits)
    if result is None:
        return None
    traffic = {k: result.values[v] for k, v in builder.traffic.items()}
    flat = judged(
        problem, Solution((), {}, {k: r for k, r in traffic.items() if r > 0}, 0.0, {}, result.objective, 0.0)
    )
    counts = [(g, option, result.values[v]) for g, option, v in builder.layouts]
    return flat.accuracy, flat.power_w + _awake_w(problem, counts)


def judged(problem: Problem, solution: Solution) -> Solution:
    """Clean the traffic (nothing below a millionth of the demand) and fill in power and accuracy at the mean rate."""
    columns = {c.key: c for c in problem.columns}
    traffic: dict[ClassKey, float] = {}
    accuracy = {}
    power = sum(g.type.sleep_w * len(g.devices) for g in problem.groups) + _awake_w(problem, solution.layouts)
    for task in problem.tasks:
        mine = {k: r for k, r in solution.traffic.items() if k[0] == task.family}
        total = sum(mine.values())
        kept = {k: r for k, r in mine.items() if r > 1e-6 * max(total, 1e-9)}
        share = total / sum(kept.values()) if kept else 0.0
        traffic |= {k: r * share for k, r in kept.items()}
        accuracy[task.family] = sum(columns[k].accuracy * r for k, r in kept.items()) * share / total if kept else 0.0
        mean = _mean_share(problem, task.family)
        power += mean * sum(columns[k].energy_j * traffic[k] for k in kept)
    return replace(solution, traffic=traffic, power_w=power, accuracy=accuracy)


def _awake_w(problem: Problem, counts: Iterable[tuple[int, Configuration, float]]) -> float:
    """Power [W] of being awake instead of asleep, for (group, option, devices); fractions of devices count."""
    types = [g.type for g in problem.groups]
    return sum(n * (types[g].idle_w - types[g].sleep_w) for g, option, n in counts if option.slices)


def _mean_share(problem: Problem, family: str) -> float:
    task = next(t for t in problem.tasks if t.family == family)
    return task.mean_per_s / task.demand.rate_p90_per_s


def _most(problem: Problem, column: Column) -> int:
    return sum(
        len(g.devices) * max((dict(o.slices).get(column.slice_type, 0) for o in g.options), default=0)
        for g in problem.groups
        if g.type.name == column.device_type
    )


def _slices_most(problem: Problem) -> int:
    return sum(
        len(g.devices) * max((sum(n for _, n in o.slices) for o in g.options), default=0) for g in problem.groups
    )
