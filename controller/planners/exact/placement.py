"""Mapping of counts to devices and placements, keeping what runs.

Source: DESIGN section 4. Devices that look alike (type, zone, clock, state, slices) form one class. So the network has
as many nodes as there are classes and configurations, whatever the number of GPUs. Inside a class the order of names
decides.
Data: devices per configuration and slices per variant (`Solution`), what runs.
Decision: which devices take which configuration at which starts, which slice hosts which variant, which devices sleep.
Formulation: 1 min-cost flow from device classes to configurations (and to sleep); an arc costs the joules of waking and
of what it fails to keep. 2 inside a device the position-aware placement that keeps most. 3 per slice type, variants go
first to slices that run them, then by device with the fewest slices, so that a family spreads.
Deviations: 2 and 3 are greedy inside the optimum of 1; both are exact where every load costs the same.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import networkx as nx

from controller.planners.columns import ClassKey, Column, class_of
from controller.planners.exact.model import Group, Problem, Solution, wake_j
from controller.planners.planning_input import Device, HostedSlice, sharing
from trefoil.core.common import IdentityKey
from trefoil.core.device_types import Placement, placements, slice_type
from trefoil.core.fleet import Configuration, DeviceType, SliceKey, split_model

MILLI = 1000  # joules become integers: min-cost flow is exact on integers only
SLEEP = Configuration("", ())
NEVER_J = 1e6


@dataclass(frozen=True, slots=True)
class Moves:
    """What a mapping changes: joules (also by the carbon of their zone), and the longest it takes on one device [s]."""

    loads: int
    starts: int
    wakes: int
    sleeps: int
    energy_j: float
    longest_s: float
    weighed_j: float = 0.0

    @property
    def any(self) -> bool:
        """Whether anything is started, loaded, woken or put to sleep."""
        return bool(self.loads or self.starts or self.wakes or self.sleeps)


def place(problem: Problem, solution: Solution) -> dict[str, tuple[HostedSlice, ...]]:
    """What every device ought to host; nothing = asleep."""
    return place_clocked(problem, solution)[0]


def place_clocked(problem: Problem, solution: Solution) -> tuple[dict[str, tuple[HostedSlice, ...]], dict[str, int]]:
    """What every device ought to host (nothing = asleep), and the clocks [MHz] of those that leave the highest one."""
    columns = {c.key.model: c for c in problem.columns}
    hosted: dict[str, list[HostedSlice]] = {d.name: [] for g in problem.groups for d in g.devices}
    clocks: dict[str, int] = {}
    slots: list[_Slot] = []
    left = dict(solution.slices)
    for index, group in enumerate(problem.groups):
        if group.must_stay:
            for device in group.devices:
                hosted[device.name] = [r for r in device.running if r.leads]
                clocks[device.name] = device.clock_mhz
                for r in device.running:
                    left[class_of(device, r)] = left.get(class_of(device, r), 0) - 1
            continue
        wanted = [(Layout(option, clock), n) for g, option, clock, n in solution.clocked() if g == index]
        for device, layout, placement in _configure(group, wanted, columns):
            clocks[device.name] = layout.clock_mhz
            at = (device.type.name, device.zone, layout.clock_mhz)
            slots += [_Slot(device, SliceKey(device.name, n, s, size), (*at, n)) for n, s, size in placement]
    awake = sum(n for _, option, n in solution.layouts if option.slices)
    _host(slots, {k: n for k, n in left.items() if n > 0 and k.leads}, hosted, awake)
    return (
        {name: tuple(sorted(_everyone(parts), key=lambda r: r.key)) for name, parts in hosted.items()},
        {name: clock for name, clock in clocks.items() if clock and hosted[name]},
    )


def _everyone(leading: Sequence[HostedSlice]) -> Iterator[HostedSlice]:
    """Every family of slices of which one is named."""
    for one in leading:
        models = ((split_model(model), variant) for model, variant in ((one.model, one.variant), *one.beside))
        yield from sharing(tuple(HostedSlice(one.key, f, variant, (), *stage) for (f, *stage), variant in models))


class Layout(NamedTuple):
    """Layout that a device is turned into."""

    option: Configuration
    clock_mhz: int


class _Slot(NamedTuple):
    """A slice that a variant may go to; `kind`: device type, zone, clock, slice type."""

    device: Device
    key: SliceKey
    kind: tuple[str, str, int, str]


def _configure(
    group: Group, wanted: Sequence[tuple[Layout, int]], columns: Mapping[ClassKey, Column]
) -> list[tuple[Device, Layout, Placement]]:
    """Step 1: configuration, clock and placement of each device of a group that is awake, in the group's order."""
    classes: dict[tuple[bool, int, tuple[tuple[str, int, str, str], ...]], list[Device]] = defaultdict(list)
    for device in group.devices:
        runs = tuple((r.key.slice_type, r.key.start, r.family, r.variant) for r in device.running)
        classes[(device.awake, device.clock_mhz, runs)].append(device)
    asleep = len(group.devices) - sum(n for _, n in wanted)
    options = [(layout, n) for layout, n in [*wanted, (Layout(SLEEP, 0), asleep)] if n]
    costs = []
    for alike in classes.values():
        row = []
        for layout, _ in options:
            cost = round(_cost_j(alike[0], layout.option, columns) * MILLI)
            turned = layout.option.slices and layout.clock_mhz != alike[0].clock_mhz  # of equals, who need not turn
            row.append(cost + bool(turned))
        costs.append(tuple(row))
    flow = _flow(tuple(map(len, classes.values())), tuple(n for _, n in options), tuple(costs))
    chosen: dict[str, tuple[Layout, Placement]] = {}
    for i, alike in enumerate(classes.values()):
        names = iter(_spread(alike))
        for (layout, _), number in zip(options, flow[i], strict=True):
            if number:
                placement = _best_placement(alike[0], layout.option) if layout.option.slices else ()
                chosen |= {next(names): (layout, placement) for _ in range(number)}
    return [(d, *chosen[d.name]) for d in group.devices if chosen[d.name][0].option.slices]


@lru_cache(maxsize=4096)
def _flow(
    sizes: tuple[int, ...], numbers: tuple[int, ...], costs: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """How many devices of each class take each option, at the least cost."""
    graph = nx.DiGraph()
    for i, (size, row) in enumerate(zip(sizes, costs, strict=True)):
        graph.add_node(("class", i), demand=-size)
        for j, cost in enumerate(row):
            graph.add_edge(("class", i), ("option", j), weight=cost, capacity=size)
    for j, number in enumerate(numbers):
        graph.add_node(("option", j), demand=number)
    flow = nx.min_cost_flow(graph)
    return tuple(tuple(flow["class", i].get(("option", j), 0) for j in range(len(numbers))) for i in range(len(sizes)))


def _spread(devices: Sequence[Device]) -> list[str]:
    """Names so that neighbours in the list are on different nodes where there are several."""
    rank: Counter[str] = Counter()
    order = []
    for device in devices:
        order.append((rank[device.node], device.name))
        rank[device.node] += 1
    place_of = {d.name: i for i, d in enumerate(devices)}
    return [name for _, name in sorted(order, key=lambda o: (o[0], place_of[o[1]]))]


def _cost_j(device: Device, option: Configuration, columns: Mapping[ClassKey, Column]) -> float:
    """Joules of waking, and of replacing what this configuration cannot keep."""
    wake = wake_j(device.type) if option.slices and not device.awake else 0.0
    placement = _best_placement(device, option) if option.slices else ()
    kept = {(n, start) for n, start, _ in placement}
    lost = NEVER_J if option.slices and not placement else 0.0  # part of a configuration: for those that stand in it
    for r in device.running:
        if (r.key.slice_type, r.key.start) not in kept:
            column = columns.get(class_of(device, r).model)
            lost += column.load_j + column.start_j * r.leads if column else 1.0
    return wake + lost


def _best_placement(device: Device, option: Configuration) -> Placement:
    """Step 2: of the legal placements of a multiset the one that keeps most of what runs; the first of equals."""
    return _placement(IdentityKey(device.type), device.layout, option)


@lru_cache(maxsize=4096)
def _placement(kind: IdentityKey[DeviceType], layout: Placement, option: Configuration) -> Placement:
    wanted = Counter(dict(option.slices))
    if kind.value.name == option.device_type and wanted == Counter(name for name, _, _ in layout):
        return layout
    running = {(name, start) for name, start, _ in layout}
    legal = [p for p in placements(kind.value) if Counter(name for name, _, _ in p) == wanted]
    return max(legal, key=lambda p: sum((n, s) in running for n, s, _ in p), default=())


def _host(slots: Sequence[_Slot], left: dict[ClassKey, int], hosted: dict[str, list[HostedSlice]], awake: int) -> None:
    """Step 3: variants to slices. `left` counts what is still to place."""
    runs = {r.key: r for name in {s.device.name: s.device for s in slots}.values() for r in name.running if r.leads}
    free: list[_Slot] = []
    for slot in slots:
        mine = runs.get(slot.key)
        if mine is not None:
            kind, zone, clock, shape = slot.kind
            wanted = ClassKey(mine.model, kind, shape, mine.variant, clock, zone, mine.beside)
            if left.get(wanted, 0) > 0:
                left[wanted] -= 1
                hosted[slot.device.name].append(mine)
                continue
        free.append(slot)
    queues: dict[tuple[str, str, int, str], list[tuple[int, bool, int]]] = defaultdict(list)
    for at, slot in enumerate(free):
        queues[slot.kind].append((len(hosted[slot.device.name]), slot.key not in runs, at))
    for queue in queues.values():
        heapq.heapify(queue)
    used = set()
    for key in sorted(left):
        queue = queues[(key.device_type, key.zone, key.clock_mhz, key.slice_type)]
        while left[key]:
            assert queue, f"no slice left for {key}"
            busy, new, at = heapq.heappop(queue)
            parts = hosted[free[at].device.name]
            if busy != len(parts):  # another slice of the device got work since
                heapq.heappush(queue, (len(parts), new, at))
                continue
            left[key] -= 1
            used.add(at)
            parts.append(HostedSlice(free[at].key, key.family, key.variant, key.beside))
    _fill_empty([slot for at, slot in enumerate(free) if at not in used], slots, hosted, awake)


def _fill_empty(
    free: Sequence[_Slot], slots: Sequence[_Slot], hosted: dict[str, list[HostedSlice]], awake: int
) -> None:
    """Keep first may leave a planned device without work: give it one of a device that has several."""
    empty = awake - sum(1 for parts in hosted.values() if parts)
    if empty <= 0:
        return
    kinds = {slot.key: slot.kind for slot in slots}
    donors: dict[tuple[str, str, int, str], list[tuple[str, HostedSlice]]] = defaultdict(list)
    for name, parts in reversed(hosted.items()):
        if len(parts) > 1:
            for part in reversed(parts):
                if part.key in kinds:
                    donors[kinds[part.key]].append((name, part))
    for slot in free:
        givers = donors[slot.kind]
        while not hosted[slot.device.name] and givers:
            donor, part = givers.pop()
            if len(hosted[donor]) > 1:
                hosted[donor].remove(part)
                hosted[slot.device.name].append(replace(part, key=slot.key))
    _cut_anew(slots, hosted)


def _cut_anew(slots: Sequence[_Slot], hosted: dict[str, list[HostedSlice]]) -> None:
    """A device whose configuration offers no slice of a type that occurs twice takes a slice like another device's."""
    idle = [device for device in {s.device.name: s.device for s in slots}.values() if not hosted[device.name]]
    if not idle:
        return
    kinds = {slot.key: slot.kind for slot in slots}
    mine = {slot.device.name: slot.kind for slot in slots}
    for device in idle:
        for parts in hosted.values():
            kind = kinds.get(parts[0].key) if len(parts) > 1 else None
            if kind is not None and kind[:3] == mine[device.name][:3]:
                part = parts.pop()
                shape = slice_type(device.type, part.key.slice_type)
                key = SliceKey(device.name, shape.name, shape.starts[0], shape.memory_slices)
                hosted[device.name].append(replace(part, key=key))
                break


def moves(problem: Problem, hosted: Mapping[str, tuple[HostedSlice, ...]]) -> Moves:
    """What it takes to get from what runs to what ought to. A change of a clock is not a move."""
    columns = {c.key.model: c for c in problem.columns}
    loads = starts = wakes = sleeps = 0
    energy, weighed, longest = 0.0, 0.0, 0.0
    for device in problem.devices:
        target = hosted.get(device.name, ())
        before, slices = {(r.key, r.model): r.variant for r in device.running}, {r.key for r in device.running}
        changed, already = 0.0, energy
        for part in target:
            if before.get((part.key, part.model)) == part.variant:
                continue
            column = columns[class_of(device, part).model]
            loads += 1
            energy += column.load_j
            changed = max(changed, column.load_s)
            if part.key not in slices:
                slices.add(part.key)
                starts += 1
                energy += column.start_j
        if target and not device.awake:
            wakes += 1
            energy += wake_j(device.type)
            changed += device.type.wake_s
        sleeps += device.awake and not target
        weighed += (energy - already) * problem.weight(device.zone)
        longest = max(longest, changed)
    return Moves(loads, starts, wakes, sleeps, energy, longest, weighed)
