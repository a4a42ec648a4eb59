"""One variant on the same layout of every device: what `base` and `co2opt` share. No optimisation, no carbon."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from numpy.random import Generator

from controller.planners.assemble import capacity_per_s, plan_of
from controller.planners.columns import ClassKey, Column, class_column, class_of
from controller.planners.world import Device, HostedSlice, PlanningInput, Task, setting
from trefoil.core.brains import Decision, PlanView
from trefoil.core.catalog import Variant
from trefoil.core.device_types import Placement
from trefoil.core.errors import CatalogError
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Expected
from trefoil.core.queueing import ServerClass, arrivals_s, serve_weighted
from trefoil.core.units import grams

KERNEL_REQUESTS = 5000


@dataclass(frozen=True, slots=True)
class Uniform:
    """Which devices host what. Several families take the devices in turn."""

    layout: Callable[[Device], Placement]
    variant: Callable[[PlanningInput, Task, Device, str], Variant]

    def host(self, world: PlanningInput) -> dict[str, tuple[HostedSlice, ...]]:
        """What every device ought to host."""
        hosted: dict[str, tuple[HostedSlice, ...]] = {}
        for index, device in enumerate(world.devices):
            if device.frozen or not world.tasks:
                hosted[device.name] = device.running
                continue
            task = world.tasks[index % len(world.tasks)]
            hosted[device.name] = tuple(
                HostedSlice(
                    SliceKey(device.name, n, start, size), task.family, self.variant(world, task, device, n).name
                )
                for n, start, size in self.layout(device)
            )
        return hosted


def columns_of(
    world: PlanningInput, hosted: Mapping[str, tuple[HostedSlice, ...]], constants: Mapping[str, float]
) -> tuple[dict[ClassKey, Column], Counter[ClassKey]]:
    """The operating point and the number of slices of every class that is hosted.

    Raises:
        CatalogError: something hosted has no profile.
    """
    devices, types = {d.name: d for d in world.devices}, {d.type.name: d.type for d in world.devices}
    counts: Counter[ClassKey] = Counter(class_of(devices[name], r) for name, parts in hosted.items() for r in parts)
    found = {}
    for key in sorted(counts):
        kind = types[key.device_type]
        column = class_column(world.view.catalog, world.task(key[0]), kind, key[2], key[3], counts[key], constants)
        if column is None:
            raise CatalogError(
                f"no profile of {key[3]} on {key[2]} of {key[1]}, or it does not fit its memory",
                field=f"family {key[0]}",
                remedy="profile this class, or use another policy",
            )
        found[key] = replace(column, key=key)
    return found, counts


def decide(
    world: PlanningInput,
    planner: str,
    hosted: Mapping[str, tuple[HostedSlice, ...]],
    constants: Mapping[str, float],
    rng: Generator,
) -> Decision:
    """A plan with traffic in proportion to what every slice can serve, and honest expectations."""
    by_key, counts = columns_of(world, hosted, constants)
    columns = tuple(by_key.values())
    bare = [t.family for t in world.tasks if not any(c.family == t.family for c in columns)]
    if bare or not world.tasks:
        missing = f"no device is left for {', '.join(bare)}" if bare else "no family has an objective"
        return Decision(None, f"{planner}: {missing}", world.view.now_s + constants["tick_s"], f"no_plan: {missing}")
    traffic: dict[ClassKey, float] = {}
    expected: dict[str, Expected] = {}
    short, words = [], []
    for task in world.tasks:
        mine = {k: c for k, c in by_key.items() if c.family == task.family}
        full = sum(counts[k] * c.saturation_per_s for k, c in mine.items())
        for k, c in mine.items():
            traffic[k] = task.mean_per_s * counts[k] * c.saturation_per_s / full
        expected[task.family] = expectation(world, task, traffic, counts, columns, constants, rng)
        e = expected[task.family]
        words.append(
            f"{task.family}: {', '.join(f'{k[3]} on {counts[k]}x{k[2]}' for k in mine)}, all {len(world.devices)} GPUs "
            f"awake; {task.mean_per_s:.1f}/s at {world.view.carbon.intensity_g_per_kwh:.0f} g/kWh cost "
            f"{e.grams_per_request * 1e3:.3f} mg and {e.joules_per_request:.2f} J a request, accuracy {e.accuracy:.4f}"
        )
        if e.capacity_per_s < task.demand.rate_per_s:
            short.append(
                f"slo_missed: {planner} serves {e.capacity_per_s:.1f}/s of {task.family} within "
                f"{task.objective.slo_ms:g} ms, {task.demand.rate_per_s:.1f}/s are asked for"
            )
    why = f"{planner}: never looks at carbon or load. " + "; ".join(words)
    degraded = "; ".join(short)
    plan = plan_of(world, planner, hosted, traffic, columns, constants, expected, why, degraded=degraded)
    return Decision(plan, why, world.view.now_s + constants["tick_s"], degraded)


def expectation(
    world: PlanningInput,
    task: Task,
    traffic: Mapping[ClassKey, float],
    counts: Mapping[ClassKey, int],
    columns: tuple[Column, ...],
    constants: Mapping[str, float],
    rng: Generator,
) -> Expected:
    """Expectations of one family on devices that are all awake; baseline power is shared by traffic."""
    mine = [c for c in columns if c.family == task.family and traffic.get(c.key, 0.0) > 0]
    rate = task.mean_per_s
    total = sum(traffic.values())
    idle = sum(d.type.idle_w for d in world.devices) * (rate / total if total else 1.0)
    joules = idle / rate + sum(c.energy_j * traffic[c.key] for c in mine) / rate
    overhead_ms = setting(task.objective, constants, "overhead_ms")
    pools = [ServerClass(counts[c.key], c.service, traffic[c.key]) for c in mine]
    served = serve_weighted(pools, arrivals_s(rate, 1.0, KERNEL_REQUESTS, rng), rng)
    return Expected(
        grams_per_request=grams(joules, world.view.carbon.intensity_g_per_kwh, pue_of(world.view, task)),
        joules_per_request=joules,
        latency_ms_p95=served.quantile_ms(0.95) + overhead_ms,
        accuracy=sum(c.accuracy * traffic[c.key] for c in mine) / rate,
        capacity_per_s=capacity_per_s(traffic, counts, columns, task.family),
    )


def pue_of(view: PlanView, task: Task) -> float:
    """The objective's PUE, else the view's."""
    return task.objective.pue or view.pue or 1.0
