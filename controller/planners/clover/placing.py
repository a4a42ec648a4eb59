"""From a configuration graph to devices: which GPU takes which configuration, which slice hosts which variant.

Source: CLOVER leaves it open, as it does not change the objective (section 4.2). Here: what keeps most of what runs.
Data: the devices of a pod and what stands on them, a deployed setup (`Space.deployed`).
Formulation: per device type a min-cost flow from classes of like devices to configurations, an arc costs the slices
that it does not keep; per device the legal placement that keeps most; per slice type, variants first where they run.
Deviations: the three steps are exact one after the other, not together.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import networkx as nx

from controller.planners.clover.space import Setup
from controller.planners.world import Device, Running
from trefoil.core.device_types import Placement, placements_of
from trefoil.core.fleet import Configuration, DeviceType, SliceKey


def hosting(devices: Sequence[Device], setup: Setup, family: str) -> dict[str, tuple[Running, ...]]:
    """What every device of the pod ought to host."""
    slots: list[tuple[Device, SliceKey]] = []
    for name in dict.fromkeys(d.type.name for d in devices):
        mine = [d for d in devices if d.type.name == name]
        wanted = [(c, n) for c, n in setup.layouts if c.device_type == name]
        for device, configuration in zip(mine, _assigned(mine, wanted), strict=True):
            slots += [(device, key) for key in _slices(device, configuration)]
    left = Counter(setup.graph.counter)
    runs = {r.key: r for d in devices for r in d.running if r.family == family}
    hosted: dict[str, list[Running]] = {d.name: [] for d in devices}
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
            hosted[device.name].append(Running(key, family, edge[0]))
    return {name: tuple(sorted(parts, key=lambda r: r.key)) for name, parts in hosted.items()}


def _assigned(devices: Sequence[Device], wanted: Sequence[tuple[Configuration, int]]) -> list[Configuration]:
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
