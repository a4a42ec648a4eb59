"""Devices that are awake for jobs alone: what an item costs on one, and what the plan has there.

Source: ours. Data: what the plan of requests hosts, what jobs need in this slot (`PlanView.flexible`), the fleet's cap.
Decision: devices that requests leave asleep, each with a family whose jobs need it.
Formulation: such a device has its largest slice, with the variant that takes the fewest joules an item: what hours of
jobs are planned with (controller/jobs/core/slots.py). Families that lack most of their devices go first. Of devices,
those that host this already, then those that are awake. Requests get no share of these slices.
Deviations: devices of other zones and of silent nodes serve no jobs.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from controller.planners.exact.model import Problem
from controller.planners.exact.placement import best_placement
from controller.planners.planning_input import Device, HostedSlice, PlanningInput
from controller.planners.profile_rows import CatalogKey, fits
from trefoil.core.catalog import Variant
from trefoil.core.common import ProfileRow
from trefoil.core.fleet import Configuration, DeviceType, SliceKey
from trefoil.core.jobs.planned import ItemCost
from trefoil.core.units import MS_PER_S


def item_cost(family: str, variant: Variant, rows: Sequence[ProfileRow]) -> ItemCost:
    """Cost of an item in a batch of the largest size, and of a request in one of the smallest."""
    (request_s, request_j), (item_s, item_j) = (
        (row.latency_ms_p50 / MS_PER_S / row.batch, row.energy_active_j_per_batch / row.batch)
        for row in (rows[0], rows[-1])
    )
    return ItemCost(family, item_s, item_j, variant.accuracy, request_s, request_j, variant.name)


def whole_costs(inputs: PlanningInput, kind: DeviceType) -> Iterator[ItemCost]:
    """Costs of an item of each family and variant on the largest slice of a device."""
    for task in inputs.tasks:
        family = inputs.view.catalog.family(task.family)
        for variant in family.variants if not family.generative else ():
            rows = CatalogKey(inputs.view.catalog).rows(kind, kind.largest.name, family.name, variant.name, 0)
            if rows and fits(kind.largest, variant):
                yield item_cost(family.name, variant, rows)


def awake_cost(inputs: PlanningInput, kind: DeviceType) -> tuple[float, float]:
    """What a device that is awake for jobs alone draws above sleep [W], and what it takes to wake it [J]."""
    loading_s = max(v.load_s for f in inputs.view.catalog.families for v in f.variants)
    return max(0.0, kind.idle_w - kind.sleep_w), (kind.wake_s + loading_s) * kind.idle_w


def cheapest(costs: Iterable[ItemCost], family: str, floor: float, idle_w: float) -> ItemCost | None:
    """Cost of a family with the fewest joules an item, of variants with at least this accuracy; None: there is none."""
    fitting = (cost for cost in costs if cost.family == family and cost.accuracy >= floor)
    return min(fitting, key=lambda cost: (cost.active_j + idle_w * cost.device_s, cost.device_s), default=None)


def devices_for_jobs(
    inputs: PlanningInput, problem: Problem, hosted: Mapping[str, tuple[HostedSlice, ...]], room_w: float
) -> dict[str, tuple[HostedSlice, ...]]:
    """What devices host that are awake for jobs alone. `hosted`: by device, for requests; `room_w`: left of the cap."""
    flexible = inputs.view.flexible
    wanted = min(problem.number, max((one.devices for one in flexible), default=0))
    serving = Counter(family for parts in hosted.values() for family in {part.family for part in parts})
    lacks = {one.family: one.own_devices - serving[one.family] for one in flexible}
    floors = {one.family: one.accuracy_floor for one in flexible}
    free = [device for device in _whole_devices(problem) if not hosted.get(device.name)]
    idle_w = {device.type: awake_cost(inputs, device.type)[0] for device in free}
    costs = {kind: tuple(whole_costs(inputs, kind)) for kind in idle_w}
    found: dict[str, tuple[HostedSlice, ...]] = {}

    def best(family: str) -> tuple[Device, ItemCost] | None:
        """Device for a family, and the cost of its items there."""
        ranked = []
        for device in free:
            cost = cheapest(costs[device.type], family, floors[family], idle_w[device.type])
            if device.name in found or cost is None or _added_w(cost, idle_w[device.type]) > room_w:
                continue
            item_j = cost.active_j + idle_w[device.type] * cost.device_s
            moves = device.running != _parts(device, cost), not device.awake
            ranked.append((item_j, moves, device.name, device, cost))
        return min(ranked, key=lambda one: one[:3])[3:] if ranked else None

    for _ in range(wanted - sum(map(bool, hosted.values()))):
        in_turn = sorted(lacks, key=lambda name: (-lacks[name], name))
        chosen = next((one for family in in_turn if (one := best(family)) is not None), None)
        if chosen is None:
            break
        device, cost = chosen
        room_w -= _added_w(cost, idle_w[device.type])
        lacks[cost.family] -= 1
        found[device.name] = _parts(device, cost)
    return found


def _added_w(cost: ItemCost, idle_w: float) -> float:
    """What a device draws above sleep while it serves jobs [W]."""
    return idle_w + cost.active_j / cost.device_s


def _whole_devices(problem: Problem) -> Iterator[Device]:
    """Devices of this zone that may have their largest slice alone."""
    for group in problem.groups:
        if not group.must_stay and not group.zone and _whole(group.type) in group.options:
            yield from group.devices


def _whole(kind: DeviceType) -> Configuration:
    return Configuration(kind.name, ((kind.largest.name, 1),))


def _parts(device: Device, cost: ItemCost) -> tuple[HostedSlice, ...]:
    ((name, start, size),) = best_placement(device, _whole(device.type))
    return (HostedSlice(SliceKey(device.name, name, start, size), cost.family, cost.variant),)
