"""Assembly of a `Plan` from what every device ought to host: node plans, routes. Shared by every planner."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from controller.planners.columns import ClassKey, Column, class_of
from controller.planners.planner_settings import PlannerSettings
from controller.planners.planning_input import Device, HostedSlice, PlanningInput, Task
from trefoil.core.carbon import Series
from trefoil.core.device_types import slice_cores, slice_servers
from trefoil.core.fleet import DeviceState, Hosted, SliceKey
from trefoil.core.plan import Expected, InputStamp, NodePlan, Plan, PlannedDevice, PlannedSlice, Route, RouteTarget

Weights = Mapping[str, Mapping[SliceKey, float]]
"""Of single slices, by family."""
BATCHES_WAITING: Final = 2  # one batch is computed while the next one gathers
GAP_SHARE: Final = 0.2  # of a slice's time; a longer pause between two requests is worth a second credit


def plan_of(
    inputs: PlanningInput,
    planner: str,
    hosted: Mapping[str, Sequence[HostedSlice]],
    traffic: Mapping[ClassKey, float],
    columns: Sequence[Column],
    settings: PlannerSettings,
    expected: Mapping[str, Expected],
    why: str,
    gap: float = 0.0,
    degraded: str = "",
    pull: bool = False,
    clocks: Mapping[str, int] | None = None,
    clock_ranges: Mapping[str, tuple[int, int]] | None = None,
    weights: Weights | None = None,
) -> Plan:
    """Plan without what the policy's row says of it (`apply_policy_parts`); revision and decision id are the shell's.

    `pull` is CLOVER's: every slice weighs the same, whatever `traffic` says: pulling makes the mix.
    `clocks` [MHz] by device, below 0 power limits [-W]; the others run at their highest, unlocked. `clock_ranges`: what
    a governor may choose from; not named: the planned clock. `weights` of single slices go before `traffic`; a slice
    without any is not a target: a router may send requests to one of weight 0. Stages of a family count each by
    itself.
    """
    by_key = {c.key: c for c in columns}
    view, clocks = inputs.view, clocks or {}
    inputs = replace(inputs, devices=tuple(_clocked(d, clocks.get(d.name, 0)) for d in inputs.devices))
    targets, tiers = _targets(inputs, hosted), {d.name: d.type.tier for d in inputs.devices}
    return Plan(
        policy=planner,
        planner=planner,
        objectives=tuple(t.objective for t in inputs.tasks),
        nodes=_nodes(inputs, hosted, by_key, settings, clock_ranges or {}),
        routes=tuple(
            _route(tiers, task, targets.get(task.family, []), traffic, by_key, settings, pull, weights)
            for task in inputs.tasks
        ),
        why=why,
        expected=dict(expected),
        optimality_gap=gap,
        inputs=(
            InputStamp(f"carbon:now:{_series(view.carbon.series)}", view.carbon.observed_at_s, view.carbon.rung),
            *(InputStamp(f"node:{n.node}", n.observed_at_s, int(n.node in view.fleet.stale)) for n in view.fleet.nodes),
        ),
        created_at_s=view.now_s,
        degraded=degraded,
    )


def _clocked(device: Device, clock_mhz: int) -> Device:
    return device if device.clock_mhz == clock_mhz else replace(device, clock_mhz=clock_mhz)


def _series(series: Series) -> str:
    return f"{series.zone}:{series.method.name.lower()}:{series.factors.name.lower()}"


def _nodes(
    inputs: PlanningInput,
    hosted: Mapping[str, Sequence[HostedSlice]],
    columns: Mapping[ClassKey, Column],
    settings: PlannerSettings,
    clock_ranges: Mapping[str, tuple[int, int]],
) -> tuple[NodePlan, ...]:
    planned: dict[str, list[PlannedDevice]] = {n.node: [] for n in inputs.view.fleet.nodes}
    for device in inputs.devices:
        by_slice: dict[SliceKey, list[HostedSlice]] = {}
        for one in hosted.get(device.name, ()):
            by_slice.setdefault(one.key, []).append(one)
        parts = tuple(_slice(inputs, device, together, columns, settings) for together in by_slice.values())
        target = DeviceState.AWAKE if parts else DeviceState.ASLEEP
        clock = device.clock_mhz if parts else 0
        low, high = clock_ranges.get(device.name, (clock, clock)) if parts else (0, 0)
        limit_w = float(max(0, -high))
        held = max(0, low), max(0, high)
        planned[device.node].append(PlannedDevice(device.name, target, parts, *held, power_limit_w=limit_w))
    for node, device_name in inputs.lost:
        planned[node].append(PlannedDevice(device_name, DeviceState.ASLEEP, ()))
    return tuple(NodePlan(node=n, devices=tuple(d)) for n, d in sorted(planned.items()))


def _slice(
    inputs: PlanningInput,
    device: Device,
    together: Sequence[HostedSlice],
    columns: Mapping[ClassKey, Column],
    settings: PlannerSettings,
) -> PlannedSlice:
    """A slice with the families that share it, each of which has credits of its own there."""
    served, credits = [], 0
    for one in together:
        column, task = columns.get(class_of(device, one)), inputs.task(one.family)
        version = inputs.known.family(one.family).variant(one.variant).version
        batch = column.max_batch if column else max(1, math.ceil(task.demand.items_mean))
        servers = slice_servers(one.key.slice_type)  # a thread each
        served.append(Hosted(one.family, one.variant, version, one.stage, one.stages, servers, batch))
        credits += _credits(column, task, settings)
    return PlannedSlice(together[0].key, tuple(served), credits)


def _credits(column: Column | None, task: Task, settings: PlannerSettings) -> int:
    """Two hide the transport gap between requests; where service is long, one keeps the queue shared by the pool. Of a
    generative family as many as a slice decodes together, of one that forms batches those of two."""
    if task.streams:
        return task.streams
    if settings.credits > 0:
        return settings.credits
    if column is None:
        return 2
    if task.batching:
        return BATCHES_WAITING * column.max_batch
    gap_ms = settings.of(task.objective).transport_gap_ms
    if slice_cores(column.slice_type):  # one each, and as many as are on their ways meanwhile
        return column.servers + math.ceil(column.servers * gap_ms / column.service.mean_ms)
    return 2 if gap_ms > GAP_SHARE * column.service.mean_ms else 1


def _targets(
    inputs: PlanningInput, hosted: Mapping[str, Sequence[HostedSlice]]
) -> dict[str, list[tuple[HostedSlice, ClassKey]]]:
    """What is hosted of each family, and its class."""
    devices = {d.name: d for d in inputs.devices}
    found: dict[str, list[tuple[HostedSlice, ClassKey]]] = {}
    for name, parts in sorted(hosted.items()):
        for one in parts:
            found.setdefault(one.family, []).append((one, class_of(devices[name], one)))
    return found


def _route(
    tiers: Mapping[str, str],
    task: Task,
    targets: Sequence[tuple[HostedSlice, ClassKey]],
    traffic: Mapping[ClassKey, float],
    columns: Mapping[ClassKey, Column],
    settings: PlannerSettings,
    pull: bool,
    weights: Weights | None,
) -> Route:
    if weights is None:
        counts = Counter(key for _, key in targets)
        shares = {r.key: 1.0 if pull else traffic.get(key, 0.0) / counts[key] for r, key in targets}
    else:
        shares = {key: weight for key, weight in weights.get(task.family, {}).items() if weight > 0}
        targets = [(r, key) for r, key in targets if r.key in shares]
    total = dict.fromkeys((r.stage for r, _ in targets), 0.0)
    for r, _ in targets:
        total[r.stage] += shares[r.key]
    digits = max(9, 7 + len(str(len(targets))))  # what rounding loses must not add up
    return Route(
        family=task.family,
        targets=tuple(
            RouteTarget(
                slice=r.key,
                variant=r.variant,
                stage=r.stage,
                weight=round(shares[r.key] / total[r.stage], digits),
                credits=_credits(columns.get(key), task, settings),
                tier=tiers[r.key.device],
            )
            for r, key in sorted(targets, key=lambda t: (t[0].key, t[0].stage))
            if total[r.stage] > 0
        ),
        queue_requests_max=settings.of(task.objective).queue_requests_max,
        queue_bytes_max=settings.of(task.objective).queue_bytes_max,
    )


def capacity_per_s(
    traffic: Mapping[ClassKey, float], slices: Mapping[ClassKey, int], columns: Sequence[Column], family: str
) -> float:
    """Capacity of a plan for a family: the rate at which its first class is full, shares as planned [1/s]."""
    total = sum(rate for key, rate in traffic.items() if key[0] == family)
    limits = [
        total / traffic[c.key] * c.capacity_per_s(slices[c.key])
        for c in columns
        if c.family == family and traffic.get(c.key, 0.0) > 0
    ]
    return min(limits, default=0.0)
