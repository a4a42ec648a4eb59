"""Counts become devices and placements, keeping what runs.

Source: DESIGN section 4. Devices that look alike (type, state, slices) form one class, so that the network has as many
nodes as there are classes and configurations, whatever the number of GPUs; inside a class the order of names decides.
Data: devices per configuration and slices per variant (`Solution`), what runs.
Decision: which devices take which configuration at which starts, which slice hosts which variant, who sleeps.
Formulation: 1 min-cost flow from device classes to configurations (and to sleep); an arc costs the joules of waking and
of what it fails to keep. 2 inside a device the position-aware placement that keeps most. 3 per slice type, variants go
first to slices that run them, then by device with the fewest slices, so that a family spreads.
Deviations: 2 and 3 are greedy inside the optimum of 1; both are exact where every load costs the same.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from controller.planners.columns import ClassKey, Column
from controller.planners.exact.model import Group, Problem, Solution, layout_configuration, wake_j
from controller.planners.world import Device, Running
from trefoil.core.device_types import Placement, placements
from trefoil.core.fleet import Configuration, SliceKey

MILLI = 1000  # joules become integers: min-cost flow is exact on integers only
SLEEP = Configuration("", ())


@dataclass(frozen=True, slots=True)
class Moves:
    """What a mapping changes: joules, and the longest it takes on one device [s]."""

    loads: int
    starts: int
    wakes: int
    sleeps: int
    energy_j: float
    longest_s: float

    @property
    def any(self) -> bool:
        return bool(self.loads or self.starts or self.wakes or self.sleeps)


def place(problem: Problem, solution: Solution) -> dict[str, tuple[Running, ...]]:
    """What every device ought to host; nothing = asleep."""
    chosen: dict[str, Configuration] = {}
    for index, group in enumerate(problem.groups):
        wanted = [(option, n) for g, option, n in solution.layouts if g == index]
        chosen |= _configure(group, wanted, {c.key: c for c in problem.columns})
    devices = {d.name: d for d in problem.devices}
    slots = [
        (devices[name], slot)
        for name, configuration in chosen.items()
        if not devices[name].frozen
        for slot in _starts(devices[name], configuration)
    ]
    hosted: dict[str, list[Running]] = {name: [] for name in devices}
    left = dict(solution.slices)
    for device in problem.devices:
        if device.frozen:
            hosted[device.name] = list(device.running)
            for r in device.running:
                key = (r.family, device.type.name, r.key.slice_type, r.variant)
                left[key] = left.get(key, 0) - 1
    awake = sum(n for _, option, n in solution.layouts if option.slices)
    _host(slots, {k: n for k, n in left.items() if n > 0}, hosted, awake)
    return {name: tuple(sorted(parts, key=lambda r: r.key)) for name, parts in hosted.items()}


def _configure(
    group: Group, wanted: Sequence[tuple[Configuration, int]], columns: Mapping[ClassKey, Column]
) -> dict[str, Configuration]:
    """Step 1: the configuration of each device of a group."""
    classes: dict[tuple[bool, tuple[tuple[str, int, str], ...]], list[Device]] = defaultdict(list)
    for device in group.devices:
        runs = tuple((r.key.slice_type, r.key.start, f"{r.family}/{r.variant}") for r in device.running)
        classes[(device.awake, runs)].append(device)
    asleep = len(group.devices) - sum(n for _, n in wanted)
    options = [(option, n) for option, n in [*wanted, (SLEEP, asleep)] if n]
    graph = nx.DiGraph()
    for i, alike in enumerate(classes.values()):
        graph.add_node(("class", i), demand=-len(alike))
        for j, (option, _) in enumerate(options):
            cost = _cost_j(alike[0], option, columns)
            graph.add_edge(("class", i), ("option", j), weight=round(cost * MILLI), capacity=len(alike))
    for j, (_, number) in enumerate(options):
        graph.add_node(("option", j), demand=number)
    flow = nx.min_cost_flow(graph)
    chosen: dict[str, Configuration] = {}
    for i, alike in enumerate(classes.values()):
        names = iter(_spread(alike))
        for j, (option, _) in enumerate(options):
            for _ in range(flow[("class", i)].get(("option", j), 0)):
                chosen[next(names)] = option
    return {d.name: chosen[d.name] for d in group.devices if chosen[d.name].slices}


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
    kept = {(n, start) for n, start, _ in _best_placement(device, option)} if option.slices else set()
    lost = 0.0
    for r in device.running:
        if (r.key.slice_type, r.key.start) not in kept:
            column = columns.get((r.family, device.type.name, r.key.slice_type, r.variant))
            lost += column.load_j + column.start_j if column else 1.0
    return wake + lost


def _best_placement(device: Device, option: Configuration) -> Placement:
    """Step 2: of the legal placements of a multiset the one that keeps most of what runs; the first of equals."""
    if option == layout_configuration(device):
        return device.layout
    running = {(r.key.slice_type, r.key.start) for r in device.running}
    wanted = Counter(dict(option.slices))
    legal = [p for p in placements(device.type) if Counter(name for name, _, _ in p) == wanted]
    return max(legal, key=lambda p: sum((n, s) in running for n, s, _ in p))


def _starts(device: Device, option: Configuration) -> list[SliceKey]:
    return [SliceKey(device.name, name, start, size) for name, start, size in _best_placement(device, option)]


def _host(
    slots: Sequence[tuple[Device, SliceKey]], left: dict[ClassKey, int], hosted: dict[str, list[Running]], awake: int
) -> None:
    """Step 3: variants to slices. `left` counts what is still to place."""
    runs = {r.key: r for device, _ in slots for r in device.running}
    free: list[tuple[Device, SliceKey]] = []
    for device, key in slots:
        mine = runs.get(key)
        kind = (mine.family, device.type.name, key.slice_type, mine.variant) if mine else None
        if mine and kind and left.get(kind, 0) > 0:
            left[kind] -= 1
            hosted[device.name].append(mine)
        else:
            free.append((device, key))
    place_of = {key: i for i, (_, key) in enumerate(slots)}
    queues: dict[tuple[str, str], list[tuple[int, bool, int]]] = defaultdict(list)
    for device, key in free:
        queues[(device.type.name, key.slice_type)].append((len(hosted[device.name]), key not in runs, place_of[key]))
    for queue in queues.values():
        heapq.heapify(queue)
    used = set()
    for kind in sorted(left):
        queue = queues[(kind[1], kind[2])]
        while left[kind]:
            assert queue, f"no slice left for {kind}"
            busy, new, at = heapq.heappop(queue)
            device, key = slots[at]
            if busy != len(hosted[device.name]):  # another slice of the device got work since
                heapq.heappush(queue, (len(hosted[device.name]), new, at))
                continue
            left[kind] -= 1
            used.add(key)
            hosted[device.name].append(Running(key, kind[0], kind[3]))
    _fill_empty([(d, k) for d, k in free if k not in used], hosted, awake)


def _fill_empty(free: Sequence[tuple[Device, SliceKey]], hosted: dict[str, list[Running]], awake: int) -> None:
    """Keep first may leave a planned device without work: give it one of a device that has several."""
    while sum(1 for parts in hosted.values() if parts) < awake:
        swaps = [
            (device, key, donor, part)
            for device, key in free
            if not hosted[device.name]
            for donor, parts in hosted.items()
            if len(parts) > 1
            for part in parts
            if part.key.slice_type == key.slice_type
        ]
        if not swaps:
            return
        device, key, donor, part = swaps[0]
        hosted[donor].remove(part)
        hosted[device.name].append(Running(key, part.family, part.variant))


def moves(problem: Problem, hosted: Mapping[str, tuple[Running, ...]]) -> Moves:
    """What it takes to get from what runs to what ought to."""
    columns = {c.key: c for c in problem.columns}
    loads = starts = wakes = sleeps = 0
    energy, longest = 0.0, 0.0
    for device in problem.devices:
        target = hosted.get(device.name, ())
        before = {r.key: r for r in device.running}
        changed = 0.0
        for part in target:
            if before.get(part.key) == part:
                continue
            column = columns[(part.family, device.type.name, part.key.slice_type, part.variant)]
            loads += 1
            energy += column.load_j
            changed = max(changed, column.load_s)
            if part.key not in before:
                starts += 1
                energy += column.start_j
        if target and not device.awake:
            wakes += 1
            energy += wake_j(device.type)
            changed += device.type.wake_s
        sleeps += device.awake and not target
        longest = max(longest, changed)
    return Moves(loads, starts, wakes, sleeps, energy, longest)
