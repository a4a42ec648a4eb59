"""Uniform plans, one variant on the same layout of every device: what `base` and `co2opt` share. No optimisation."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from numpy.random import Generator

from controller.planners.columns import ClassKey, Column, class_column, class_of, unprofiled
from controller.planners.plan_assembly import capacity_per_s, plan_of
from controller.planners.planner_settings import PlannerSettings
from controller.planners.planning_input import (
    Device,
    HostedSlice,
    PlanningInput,
    Task,
    pue_of,
)
from trefoil.core.brains import Decision
from trefoil.core.catalog import Variant
from trefoil.core.device_types import Placement, engine_of
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Expected
from trefoil.core.queueing import ServerClass, arrivals_s, serve_weighted
from trefoil.core.units import grams

KERNEL_REQUESTS = 5000


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform layout: which devices host what.

    Several families take the devices of each type in turn. A family whose best variant is served by an engine that
    already runs takes none of them. What engines serve is not chosen.
    """

    layout: Callable[[Device], Placement]
    variant: Callable[[PlanningInput, Task, Device, str], Variant]

    def host(self, inputs: PlanningInput) -> dict[str, tuple[HostedSlice, ...]]:
        """Hosted slices of every device."""
        hosted: dict[str, tuple[HostedSlice, ...]] = {}
        engines = {device.name: engine for device in inputs.devices if (engine := engine_of(device.type))}
        tasks = [t for t in inputs.tasks if (t.family, inputs.known.family(t.family).best.name) not in engines.values()]
        for device in (device for device in inputs.devices if device.name in engines):
            family, variant = engines[device.name]
            fixed = HostedSlice(device.type.largest.key(device.name), family, variant)
            served = (fixed,) if any(task.family == family for task in inputs.tasks) else ()
            hosted[device.name] = device.running if device.frozen else served
        others = [device for device in inputs.devices if device.name not in engines]
        for index, device in enumerate(sorted(others, key=lambda device: device.type.name)):
            if device.frozen or not tasks:
                hosted[device.name] = device.running
                continue
            task = tasks[index % len(tasks)]
            hosted[device.name] = tuple(
                HostedSlice(
                    SliceKey(device.name, n, start, size), task.family, self.variant(inputs, task, device, n).name
                )
                for n, start, size in self.layout(device)
            )
        return hosted


def columns_of(
    inputs: PlanningInput, hosted: Mapping[str, tuple[HostedSlice, ...]], settings: PlannerSettings
) -> tuple[dict[ClassKey, Column], Counter[ClassKey]]:
    """Columns and numbers of slices of every class that is hosted.

    Raises:
        CatalogError: something hosted has no profile.
    """
    devices, types = {d.name: d for d in inputs.devices}, {d.type.name: d.type for d in inputs.devices}
    counts: Counter[ClassKey] = Counter(class_of(devices[name], r) for name, parts in hosted.items() for r in parts)
    found = {}
    for key in sorted(counts):
        kind = types[key.device_type]
        column = class_column(inputs.known, inputs.task(key[0]), kind, key[2], key[3], counts[key], settings)
        if column is None:
            raise unprofiled(key[0], key[3], key[2], kind)
        found[key] = replace(column, key=key)
    return found, counts


def decide(
    inputs: PlanningInput,
    planner: str,
    hosted: Mapping[str, tuple[HostedSlice, ...]],
    settings: PlannerSettings,
    rng: Generator,
) -> Decision:
    """Decision for fixed slices: traffic in proportion to what each can serve, and honest expectations."""
    by_key, counts = columns_of(inputs, hosted, settings)
    columns = tuple(by_key.values())
    bare = [t.family for t in inputs.tasks if not any(c.family == t.family for c in columns)]
    if bare or not inputs.tasks:
        missing = f"no device is left for {', '.join(bare)}" if bare else "no family has an objective"
        return Decision(None, f"{planner}: {missing}", inputs.view.now_s + settings.tick_s, f"no_plan: {missing}")
    awake = {d.name for d in inputs.devices if hosted.get(d.name)}
    number = len(inputs.devices)
    how_many = f"all {number}" if len(awake) == number else f"{len(awake)} of {number}"
    traffic: dict[ClassKey, float] = {}
    expected: dict[str, Expected] = {}
    short, words = [], []
    for task in inputs.tasks:
        mine = {k: c for k, c in by_key.items() if c.family == task.family}
        parts = {k: counts[k] * c.saturation_per_s / (1 + len(k.beside)) for k, c in mine.items()}
        for k, part in parts.items():
            traffic[k] = task.mean_per_s * part / sum(parts.values())
        expected[task.family] = expectation(inputs, task, traffic, counts, columns, settings, rng, awake)
        e = expected[task.family]
        words.append(
            f"{task.family}: {', '.join(f'{k[3]} on {counts[k]}x{k[2]}' for k in mine)}, {how_many} GPUs awake; "
            f"{task.mean_per_s:.1f}/s at {inputs.view.carbon.intensity_g_per_kwh:.0f} g/kWh cost "
            f"{e.grams_per_request * 1e3:.3f} mg and {e.joules_per_request:.2f} J a request, accuracy {e.accuracy:.4f}"
        )
        if e.capacity_per_s < task.demand.rate_per_s:
            short.append(
                f"slo_missed: {planner} serves {e.capacity_per_s:.1f}/s of {task.family} within "
                f"{task.objective.slo_ms:g} ms, {task.demand.rate_per_s:.1f}/s are asked for"
            )
    why = f"{planner}: never looks at carbon or load. " + "; ".join(words)
    degraded = "; ".join(short)
    plan = plan_of(inputs, planner, hosted, traffic, columns, settings, expected, why, degraded=degraded)
    return Decision(plan, why, inputs.view.now_s + settings.tick_s, degraded)


def expectation(
    inputs: PlanningInput,
    task: Task,
    traffic: Mapping[ClassKey, float],
    counts: Mapping[ClassKey, int],
    columns: tuple[Column, ...],
    settings: PlannerSettings,
    rng: Generator,
    awake: Collection[str],
) -> Expected:
    """Expectation of one family; baseline power of all devices is shared by traffic."""
    mine = [c for c in columns if c.family == task.family and traffic.get(c.key, 0.0) > 0]
    rate = task.mean_per_s
    total = sum(traffic.values())
    idle = sum(d.type.idle_w if d.name in awake else d.type.sleep_w for d in inputs.devices) * (
        rate / total if total else 1.0
    )
    joules = (idle + sum(c.energy_j * traffic[c.key] + c.running_w * counts[c.key] for c in mine)) / rate
    if any(c.batch for c in mine):  # the kernel forms none
        p95_ms = max(c.unqueued_ms_p95 for c in mine)
    else:
        pools = [ServerClass(counts[c.key] * c.servers, c.service, traffic[c.key]) for c in mine]
        p95_ms = serve_weighted(pools, arrivals_s(rate, 1.0, KERNEL_REQUESTS, rng), rng).quantile_ms(0.95)
    return Expected(
        grams_per_request=grams(joules, inputs.view.carbon.intensity_g_per_kwh, pue_of(inputs.view, task)),
        joules_per_request=joules,
        latency_ms_p95=p95_ms + settings.of(task.objective).overhead_ms,
        accuracy=sum(c.accuracy * traffic[c.key] for c in mine) / rate,
        capacity_per_s=capacity_per_s(traffic, counts, columns, task.family),
    )
