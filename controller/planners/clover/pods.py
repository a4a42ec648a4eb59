"""Pods: which devices serve which family, what stands on them as a configuration, and from setups to a plan.

Source: CLOVER section 5.1 (separate pods of servers, each serving one application), 4.2 (additivity).
Data: a `PlanningInput`. Decision: none. Families take the devices in turn, as BASE does, or as many as `pod_devices`
says. They keep the devices that they stand on, whatever comes or goes: a pod that changed hands would load every model
again.
Formulation: standardised, the centre is the graph of one device whose copies are nearest to what runs (graph edit
distance). So devices that join or leave change the number of copies only. On the fleet graph, a device that stands in a
legal configuration brings its edges. Every other device brings the edges of the most common legal device.
Placement of a setup (CLOVER leaves it open) has three steps. Per device type, a min-cost flow leads from classes of
like devices to configurations; an arc costs the slices that it does not keep. Per device, the legal placement that
keeps most is taken. Per slice type, variants go first where they run. Each of the three is exact, not all of them
together.
Deviations: devices of a silent node keep what they host and are not part of a pod.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx

from controller.planners.clover.graph import Edge, Graph
from controller.planners.clover.objective import Outcome
from controller.planners.clover.settings import CloverSettings
from controller.planners.clover.space import Setup, Space, distances, fitting_variants
from controller.planners.columns import Column, class_column
from controller.planners.plan_assembly import plan_of
from controller.planners.planning_input import Device, HostedSlice, PlanningInput, Task, pue_of
from trefoil.core.device_types import Placement, configurations, engine_of, placements_of
from trefoil.core.errors import Infeasible
from trefoil.core.fleet import Configuration, DeviceType, SliceKey
from trefoil.core.plan import Expected, Plan
from trefoil.core.units import grams


@dataclass(frozen=True)
class Pod:
    """Pod: the devices of one family and their space."""

    task: Task
    devices: tuple[Device, ...]
    space: Space

    @property
    def family(self) -> str:
        """Family that the pod serves."""
        return self.task.family

    @cached_property
    def base(self) -> Setup:
        """BASE: the most accurate variant, every device one largest slice."""
        best = max(self.space.variants, key=lambda v: (v.accuracy, v.name)).name
        layout = {}
        for kind, _ in self.space.kinds:
            _, own = engine_of(kind) or ("", "")
            options = [
                c
                for c in configurations(kind)
                if all((own or best) in fitting_variants(kind, self.space.variants)[name] for name, _ in c.slices)
            ]
            if not options:
                raise Infeasible(
                    f"{best} does not fit any slice of a {kind.name}", remedy="add a smaller variant, or larger devices"
                )
            layout[kind.name] = min(options, key=lambda c: (sum(n for _, n in c.slices), c.slices))
        return self.space.uniform(layout, best)

    def current_setup(self) -> Setup:
        """Setup that runs now; BASE where nothing does."""
        standing = [d for d in self.devices if any(r.family == self.family for r in d.running)]
        if not standing:
            return self.base
        found = [self._standing(kind.name, standing) for kind, _ in self.space.kinds]
        weights: Counter[Edge] = Counter()
        for setup in found:
            weights.update(setup.graph.counter)
        return Setup(tuple(layout for setup in found for layout in setup.layouts), Graph.from_weights(weights))

    def _standing(self, kind_name: str, standing: Sequence[Device]) -> Setup:
        kind, number = next((k, n) for k, n in self.space.kinds if k.name == kind_name)
        mine = [d for d in standing if d.type == kind]
        if not mine:
            return self._part(self.base, kind_name)
        if not self.space.standardised:
            return self._fleet_setup(kind_name, number, mine)
        total = Graph.from_weights(Counter(edge for d in mine for edge in _edges(d, self.family)))
        away = distances(kind, self.space.variants, total, len(mine))
        return self.space.units(kind)[int(away.argmin())]

    def _fleet_setup(self, kind_name: str, number: int, mine: Sequence[Device]) -> Setup:
        """The edges of every device that stands legally, and copies of the most common for the others."""
        legal = {c.slices: c for c in configurations(mine[0].type)}
        whole: Counter[tuple[Configuration, Graph]] = Counter()
        for device in mine:
            edges = Counter(_edges(device, self.family))
            shapes = tuple(sorted(Counter(e[2] for e in edges.elements()).items()))
            names = fitting_variants(device.type, self.space.variants)
            if shapes in legal and all(variant in names[shape] for variant, _, shape in edges):
                whole[(legal[shapes], Graph.from_weights(edges))] += 1
        if not whole:
            return self._part(self.base, kind_name)
        common = min(whole, key=lambda item: (-whole[item], item[1].key))
        whole[common] += number - sum(whole.values())
        layouts: Counter[Configuration] = Counter()
        weights: Counter[Edge] = Counter()
        for (configuration, graph), n in whole.items():
            layouts[configuration] += n
            weights.update((graph * n).counter)
        ordered = sorted(layouts.items(), key=lambda item: item[0].slices)
        return Setup(tuple(ordered), Graph.from_weights(weights))

    @staticmethod
    def _part(setup: Setup, kind_name: str) -> Setup:
        """The part of a setup on one device type."""
        return Setup(
            tuple((c, n) for c, n in setup.layouts if c.device_type == kind_name),
            Graph.from_weights({e: n for e, n in setup.graph.weights if e[1] == kind_name}),
        )


def _edges(device: Device, family: str) -> list[Edge]:
    return [(r.variant, device.type.name, r.key.slice_type) for r in device.running if r.family == family]


def pods_of(inputs: PlanningInput, standardised: bool) -> tuple[Pod, ...]:
    """Pods of a fleet, one per family that has an objective and at least one device.

    Devices with an engine go to the family that the engine serves. The others are dealt to families without an engine,
    or to all where each has one.
    """
    devices_ = sorted((d for d in inputs.devices if not d.frozen), key=lambda device: device.type.name)
    engines: dict[str, list[Device]] = {task.family: [] for task in inputs.tasks}
    for device in devices_:
        if (engine := engine_of(device.type)) is not None and engine[0] in engines:
            engines[engine[0]].append(device)
    without_engine = [task for task in inputs.tasks if not engines[task.family]] or inputs.tasks
    taken = _assign_devices([d for d in devices_ if engine_of(d.type) is None], without_engine)
    found = []
    for task in inputs.tasks:
        devices = engines[task.family] + taken.get(task.family, [])
        if devices:
            counts = Counter(d.type.name for d in devices)
            kinds = tuple((next(d.type for d in devices if d.type.name == n), counts[n]) for n in sorted(counts))
            variants = inputs.view.catalog.family(task.family).by_accuracy()
            known = inputs.known.family(task.family).by_accuracy()
            without = tuple(v.name for v in known if v not in variants)
            found.append(Pod(task, tuple(devices), Space(kinds, variants, standardised, without)))
    return tuple(found)


def unserved_families(inputs: PlanningInput, pods: Sequence[Pod]) -> str:
    """Families without any device, in words; "" where there is nothing to serve, or all can."""
    served = {pod.family for pod in pods}
    bare = [task.family for task in inputs.tasks if task.family not in served]
    return f"no device is left for {', '.join(bare)}" if bare and served else ""


def _assign_devices(devices: Sequence[Device], tasks: Sequence[Task]) -> dict[str, list[Device]]:
    """The devices of every family, in their order."""
    names = [t.family for t in tasks]
    owner = {d.name: _main_family(d, names) for d in devices}
    wanted = _devices_per_family(len(devices), tasks, Counter(owner.values()))
    taken: dict[str, list[Device]] = {name: [] for name in names}
    free = []
    for device in devices:
        family = owner[device.name]
        if family and len(taken[family]) < wanted[family]:
            taken[family].append(device)
        else:
            free.append(device)
    for task in tasks:
        if _pod_devices(task):
            missing = wanted[task.family] - len(taken[task.family])
            taken[task.family] += free[:missing]
            free = free[missing:]
    turn = 0
    for device in free:
        for step in range(len(names)):
            family = names[(turn + step) % len(names)]
            if len(taken[family]) < wanted[family]:
                taken[family].append(device)
                turn += step + 1
                break
    order = {d.name: i for i, d in enumerate(devices)}
    return {family: sorted(mine, key=lambda d: order[d.name]) for family, mine in taken.items()}


def _main_family(device: Device, families: Sequence[str]) -> str:
    """The family with most slices on a device; "" = none."""
    counts = Counter(r.family for r in device.running if r.family in families)
    return min(counts, key=lambda family: (-counts[family], families.index(family)), default="")


def _pod_devices(task: Task) -> int:
    return int(task.objective.params.get("pod_devices", 0))


def _devices_per_family(number: int, tasks: Sequence[Task], standing: Mapping[str, int]) -> dict[str, int]:
    """How many devices each family gets; of an uneven rest, first who stands on most."""
    wanted, left = {}, number
    for task in tasks:
        if _pod_devices(task):
            wanted[task.family] = min(left, _pod_devices(task))
            left -= wanted[task.family]
    open_to = sorted((t.family for t in tasks if not _pod_devices(t)), key=lambda family: -standing[family])
    for place, family in enumerate(open_to):
        wanted[family] = left // len(open_to) + (place < left % len(open_to))
    return wanted


def assembled_plan(
    inputs: PlanningInput,
    planner: str,
    chosen: Sequence[tuple[Pod, Setup, Outcome | None]],
    settings: CloverSettings,
    why: str,
    degraded: str = "",
    exploration: bool = False,
) -> Plan:
    """Plan of all pods: every slice, routes by pull; frozen devices as they are."""
    hosted: dict[str, tuple[HostedSlice, ...]] = {d.name: (d.running if d.frozen else ()) for d in inputs.devices}
    expected = {}
    for pod, setup, outcome in chosen:
        hosted |= place_setup(pod.devices, pod.space.deployed(setup), pod.family)
        if outcome is not None and not exploration:
            expected[pod.family] = expectation(inputs, pod.task, outcome)
    plan = plan_of(
        inputs,
        planner,
        hosted,
        {},
        _columns(inputs, chosen, settings),
        settings,
        expected,
        why,
        degraded=degraded,
        pull=True,
    )
    return replace(plan, exploration=exploration)


def _columns(
    inputs: PlanningInput, chosen: Sequence[tuple[Pod, Setup, Outcome | None]], settings: CloverSettings
) -> tuple[Column, ...]:
    """Operating points of what is hosted, as far as it is profiled: the largest batch that a slice accepts."""
    found = [
        class_column(inputs.known, pod.task, kind, shape, variant, 1, settings)
        for pod, setup, _ in chosen
        for kind, _ in pod.space.kinds
        for (variant, name, shape), _ in setup.graph.weights
        if name == kind.name
    ]
    return tuple(c for c in found if c is not None)


def expectation(inputs: PlanningInput, task: Task, outcome: Outcome) -> Expected:
    """Expectation of a plan by what was measured (or estimated). Capacity: the demand that it was measured for."""
    pue = pue_of(inputs.view, task)
    joules = outcome.joules or 0.0
    return Expected(
        grams_per_request=grams(joules, inputs.view.carbon.intensity_g_per_kwh, pue),
        joules_per_request=joules,
        latency_ms_p95=outcome.p95_ms,
        accuracy=outcome.accuracy,
        capacity_per_s=max(task.demand.rate_per_s, task.demand.rate_p90_per_s),
    )


def place_setup(devices: Sequence[Device], setup: Setup, family: str) -> dict[str, tuple[HostedSlice, ...]]:
    """Place a setup on the devices of a pod: what each ought to host."""
    slots: list[tuple[Device, SliceKey]] = []
    for name in dict.fromkeys(d.type.name for d in devices):
        mine = [d for d in devices if d.type.name == name]
        wanted = [(c, n) for c, n in setup.layouts if c.device_type == name]
        for device, configuration in zip(mine, _assign_configurations(mine, wanted), strict=True):
            slots += [(device, key) for key in _slices(device, configuration)]
    left = Counter(setup.graph.counter)
    runs = {r.key: r for d in devices for r in d.running if r.family == family}
    hosted: dict[str, list[HostedSlice]] = {d.name: [] for d in devices}
    free = defaultdict(list)
    for device, key in slots:
        mine_now = runs.get(key)
        edge = (mine_now.variant, device.type.name, key.slice_type) if mine_now else None
        if mine_now and edge and left[edge] > 0:
            left[edge] -= 1
            hosted[device.name].append(mine_now)
        else:
            free[(device.type.name, key.slice_type)].append((device, key))
    for edge in sorted(left):
        for _ in range(left[edge]):
            device, key = free[edge[1:]].pop(0)
            hosted[device.name].append(HostedSlice(key, family, edge[0]))
    return {name: tuple(sorted(parts, key=lambda r: r.key)) for name, parts in hosted.items()}


def _assign_configurations(
    devices: Sequence[Device], wanted: Sequence[tuple[Configuration, int]]
) -> list[Configuration]:
    """One configuration per device, in the order of the devices."""
    if len(wanted) == 1:
        return [wanted[0][0]] * len(devices)
    classes: dict[tuple[tuple[str, int, int], ...], list[int]] = defaultdict(list)
    for index, device in enumerate(devices):
        classes[device.layout].append(index)
    graph = nx.DiGraph()
    for i, (layout, members) in enumerate(classes.items()):
        graph.add_node(("class", i), demand=-len(members))
        for j, (configuration, _) in enumerate(wanted):
            lost = len(layout) - _kept(layout, _best(devices[members[0]].type, layout, configuration))
            graph.add_edge(("class", i), ("option", j), weight=lost, capacity=len(members))
    for j, (_, number) in enumerate(wanted):
        graph.add_node(("option", j), demand=number)
    flow: Mapping[object, Mapping[object, int]] = nx.min_cost_flow(graph)
    chosen: dict[int, Configuration] = {}
    for i, members in enumerate(classes.values()):
        waiting = iter(members)
        for j, (configuration, _) in enumerate(wanted):
            for _ in range(flow[("class", i)][("option", j)]):
                chosen[next(waiting)] = configuration
    return [chosen[index] for index in range(len(devices))]


def _slices(device: Device, configuration: Configuration) -> list[SliceKey]:
    placement = _best(device.type, device.layout, configuration)
    return [SliceKey(device.name, name, start, size) for name, start, size in placement]


def _best(kind: DeviceType, layout: Placement, configuration: Configuration) -> Placement:
    """Of the legal placements of a multiset the one that keeps most of what stands; the first of equals."""
    return max(placements_of(kind, configuration), key=lambda p: _kept(layout, p))


def _kept(layout: Placement, placement: Placement) -> int:
    return len(set(layout) & set(placement))
