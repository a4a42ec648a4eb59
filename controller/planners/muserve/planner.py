"""ALPASERVE, MUSERVE: which whole GPU serves which families, or which of their stages; mu-Serve sorts by sensitivity.

Source: AlpaServe (OSDI 23) section 4.2, mu-Serve sections 3.1, 3.2 (alpaserve.py, bins.py). Clocks are the governor's.
Data: of each family its best variant's profile on a whole GPU (time, `clock_sensitivity`, memory), SLO and demand. A
    family that is split has such a profile of each stage (the profile's column `stage`).
Decision: the GPUs of each family, or of each of its stages; its requests are spread over them equally. As in the papers
    the decision is made offline, for the high quantile of the demand. It is made at the start, when an objective or a
    device comes or goes, and when a governor asks for capacity. It is also made when GPUs carry less than is asked;
    otherwise ticks and loads keep it. Whether a family is split is AlpaServe's selection: where pipelines attain more,
    the model fits no single GPU, or `group_size` says so. Which GPU gets which stage is mu-Serve's Algorithm 2, over
    all GPUs. An engine that already runs serves its own variant alone. Its family is placed on the engines that have
    the best variant of all its engines.
Deviations: stages are those that the repository has, all of them or none. All replicas of a family are split alike, as
    the first one is. They are whole where all stages of each end up on one GPU. A hop takes `transport_gap_ms`. All
    GPUs but engines are of one type.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from numpy.random import Generator
from pydantic import Field

from controller.planners.gpu_allocation import GpuSettings
from controller.planners.gpu_sharing import Gpu
from controller.planners.muserve.alpaserve import (
    GPUS_MAX,
    GROUP_SIZES,
    Arrivals,
    Cluster,
    Model,
    OperatorCluster,
    Placement,
    by_sensitivity,
    place,
)
from controller.planners.planning_input import Device, HostedSlice, PlanningInput, Task, read_view
from controller.planners.profile_rows import effective_row
from controller.planners.wattwiser import decision_of, serving_gpu
from trefoil.core.brains import Decision, PlanView
from trefoil.core.catalog import Variant
from trefoil.core.device_types import engine_of, slice_type
from trefoil.core.errors import Infeasible, InvalidInput
from trefoil.core.fleet import DeviceType, SliceType, stage_model
from trefoil.core.plan_check import CONTEXT_MIB
from trefoil.core.queueing import service_time
from trefoil.core.units import MS_PER_S

SAMPLE_REQUESTS: Final = 500
KEEPING: Final = ("tick", "load")
"""Triggers at which a placement that carries the load is kept."""
TOGETHER: Final = ("replicas_max", "group_size", "gpus_per_model_max")
"""Settings of all families together: the value of any objective holds for all."""


class AlpaServeSettings(GpuSettings):
    """Settings of AlpaServe and mu-Serve."""

    replicas_max: int = Field(default=0, ge=0)
    """Most replicas of a family; 0: one on each GPU."""
    group_size: int = Field(default=0, ge=0)
    """GPUs of each of AlpaServe's groups, where a family is split; 0: it chooses."""
    gpus_per_model_max: int = Field(default=0, ge=0)
    """mu-Serve's CT: most GPUs that a replica's stages may lie on; 0: any number."""


class Home(NamedTuple):
    """Where a family, or a stage of it, is hosted."""

    device: str
    stage: int = 0
    stages: int = 1


Homes = Mapping[str, Sequence[Home]]
Served = Mapping[str, Sequence[Gpu]]
"""Both by family."""


@dataclass(frozen=True, slots=True)
class AlpaServePlanner:
    """Planner of whole GPUs by AlpaServe; `sorts`: what feels the clock alike meets on a GPU. Its state is the plan."""

    settings: AlpaServeSettings = AlpaServeSettings()
    name: str = "alpaserve"
    sorts: bool = False

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan the placement, or keep it at a tick."""
        settings = self.settings.of_all(view.objectives, TOGETHER)
        inputs, next_s = read_view(view, settings.rate_floor_per_s, whole=True), view.now_s + settings.tick_s
        if not inputs.tasks:
            return Decision(None, f"{self.name}: no family has an objective", next_s, "no_plan: no objective")
        try:
            homes = _kept(view) if view.trigger in KEEPING else {}
            kept = _all_serving(inputs, homes, settings) if all(t.family in homes for t in inputs.tasks) else {}
            served = kept if kept and _carried(inputs, kept) >= 1.0 else self._placed(inputs, settings, rng)
            if kept and _carried(inputs, served) <= _carried(inputs, kept):
                served = kept
        except (InvalidInput, Infeasible) as error:
            return Decision(None, f"{self.name}: {error}", math.inf, f"no_plan: {error}")
        weights, words = {}, []
        for task in inputs.tasks:
            mine = served[task.family]
            alike = Counter(gpu.slice.stage for gpu in mine)
            weights[task.family] = {gpu.slice.key: 1 / alike[gpu.slice.stage] for gpu in mine}
            split = ", ".join(_words(gpu.slice, 1 / alike[gpu.slice.stage]) for gpu in mine)
            words.append(f"{task.family} {task.demand.rate_per_s:.1f}/s on {split}")
        return decision_of(inputs, self.name, served, weights, settings, "; ".join(words), next_s)

    def _placed(self, inputs: PlanningInput, settings: AlpaServeSettings, rng: Generator) -> Served:
        """GPUs that serve each family once all are placed again.

        Raises:
            InvalidInput, Infeasible: naming what cannot be placed, and the remedy.
        """
        own = _engine_homes(inputs, settings)
        tasks = [task for task in inputs.tasks if task.family not in own]
        if not tasks:
            return _all_serving(inputs, own, settings)
        # those of silent nodes stay as they are
        devices = [device for device in inputs.devices if not device.frozen and engine_of(device.type) is None]
        kinds = sorted({device.type.name for device in devices})
        if len(kinds) != 1:
            remedy = "plan a fleet of one type by this policy, with a node that reports"
            raise InvalidInput("families are placed on GPUs of one type", field="devices", value=kinds, remedy=remedy)
        kind = devices[0].type
        shape = kind.largest
        models = [_model(inputs, task, kind, shape, settings) for task in tasks]
        rates = {task.family: task.demand.rate_p90_per_s for task in tasks}
        memory_mib, transfer_s = shape.memory_mib - CONTEXT_MIB, settings.transport_gap_ms / MS_PER_S
        cluster = Cluster(min(len(devices), GPUS_MAX), memory_mib, max(kind.clocks_mhz, default=1), transfer_s)
        replicas_max = settings.replicas_max or cluster.gpus
        found = place(models, cluster, _sample(rates, rng), replicas_max, _group_sizes(models, settings, cluster.gpus))
        if self.sorts:
            whole_fleet = replace(found, groups=(tuple(range(cluster.gpus)),))
            limit = settings.gpus_per_model_max or cluster.gpus
            found = by_sensitivity(whole_fleet, models, cluster, rates, limit)
        homes = {**own, **_homes(found, models, [device.name for device in devices])}
        return _all_serving(inputs, homes, settings)


def muserve(settings: AlpaServeSettings) -> AlpaServePlanner:
    """mu-Serve's placement: AlpaServe's, sorted by sensitivity."""
    return AlpaServePlanner(settings, "muserve", sorts=True)


def _engine_homes(inputs: PlanningInput, settings: AlpaServeSettings) -> Homes:
    """Homes of the families that engines serve."""
    wanted = {(task.family, _variant(inputs, task.family)) for task in inputs.tasks}
    homes: dict[str, list[Home]] = {}
    for device in (device for device in inputs.devices if not device.frozen):
        if (engine := engine_of(device.type)) is not None and engine in wanted:
            homes.setdefault(engine[0], []).append(Home(device.name))
    return {family: mine[: settings.replicas_max or len(mine)] for family, mine in homes.items()}


def _variant(inputs: PlanningInput, family: str) -> str:
    """Variant that a family is served by: the best of those that its engines have, else its best."""
    variants = inputs.view.catalog.family(family).variants
    engines = {engine for device in inputs.devices if (engine := engine_of(device.type)) is not None}
    return max(variants, key=lambda one: ((family, one.name) in engines, one.accuracy)).name


def _kept(view: PlanView) -> Homes:
    """Homes of each family by the plan in force."""
    homes: dict[str, list[Home]] = {}
    for node in view.current.nodes if view.current else ():
        for device in node.devices:
            for hosted in (hosted for part in device.slices for hosted in part.hosted):
                homes.setdefault(hosted.family, []).append(Home(device.device, hosted.stage, hosted.stages or 1))
    return homes


def _all_serving(inputs: PlanningInput, homes: Homes, settings: AlpaServeSettings) -> Served:
    return {task.family: _serving(inputs, task, homes, settings) for task in inputs.tasks}


def _carried(inputs: PlanningInput, served: Served) -> float:
    """Least part of any family's demand, its high quantile, that the GPUs of it, or of one of its stages, carry."""
    parts = []
    for task in inputs.tasks:
        carried = dict.fromkeys((gpu.slice.stage for gpu in served[task.family]), 0.0)
        for gpu in served[task.family]:
            carried[gpu.slice.stage] += gpu.cap_rps
        parts.append(min(carried.values()) / task.demand.rate_p90_per_s)
    return min(parts)


def _homes(found: Placement, models: Sequence[Model], devices: Sequence[str]) -> Homes:
    """Homes of each family by a placement: all replicas split alike, whole where the stages of each are together."""
    homes = {}
    for model in models:
        stages = len(found.replicas[model.name][0])
        replicas = [replica for replica in found.replicas[model.name] if len(replica) == stages]
        if model.whole is not None and all(len({stage.gpu for stage in replica}) == 1 for replica in replicas):
            replicas, stages = [replica[:1] for replica in replicas], 1
        own = [Home(devices[stage.gpu], n, stages) for replica in replicas for n, stage in enumerate(replica)]
        homes[model.name] = list(dict.fromkeys(own))
    return homes


def _serving(inputs: PlanningInput, task: Task, homes: Homes, settings: AlpaServeSettings) -> list[Gpu]:
    """GPUs that serve a family now: its homes but for those that are lost, and what runs on silent nodes.

    Raises:
        InvalidInput: of a stage none is left, or it has no profile there.
    """
    devices, variant = {device.name: device for device in inputs.devices}, _variant(inputs, task.family)
    sharing = Counter(home.device for each in homes.values() for home in each)

    def serving(device: Device, one: HostedSlice, sharing_factor: int) -> Gpu:
        within = _within_its_stage(inputs, task, device, one, settings)
        return serving_gpu(inputs, within, device, one, sharing_factor, settings)

    mine, found = homes[task.family], list[Gpu]()
    ways = {home.stages for home in mine}
    for home in mine:
        device = devices.get(home.device)
        if device is None or device.frozen:
            continue
        key = device.type.largest.key(device.name)
        one = HostedSlice(key, task.family, variant, (), home.stage, home.stages)
        found.append(serving(device, one, sharing[device.name]))
    for device in (device for device in inputs.devices if device.frozen):
        standing = [one for one in device.running if one.family == task.family and one.stages in ways]
        found += [serving(device, one, len(device.running)) for one in standing]
    if {gpu.slice.stage for gpu in found} != set(range(max(ways))):
        raise InvalidInput(
            "none of its devices can be used now" if max(ways) == 1 else "a stage of it has no device now",
            field=f"homes of {task.family}", value=[home.device for home in mine], remedy="bring one back",
        )  # fmt: skip
    return found


def _within_its_stage(
    inputs: PlanningInput, task: Task, device: Device, one: HostedSlice, settings: AlpaServeSettings
) -> Task:
    """The task, its SLO what the other stages leave of it: behind the slowest stage requests do not wait again."""
    catalog, shape, others_ms = inputs.known.by_model, slice_type(device.type, one.key.slice_type), 0.0
    for stage in set(range(one.stages)) - {one.stage}:
        family = catalog.family(stage_model(task.family, stage, one.stages))
        variant, items = family.variant(one.variant), task.demand.items_mean
        row = effective_row(catalog, device.type, shape, family, variant, items)
        if row is not None:
            others_ms += service_time(row).mean_ms + settings.of(task.objective).transport_gap_ms
    return replace(task, objective=replace(task.objective, slo_ms=task.objective.slo_ms - others_ms))


def _words(one: HostedSlice, share: float) -> str:
    return f"{one.key.device} {share:.0%}" + (f" of stage {one.stage + 1}" if one.stages > 1 else "")


def _model(inputs: PlanningInput, task: Task, kind: DeviceType, shape: SliceType, settings: AlpaServeSettings) -> Model:
    """A family as AlpaServe has it: one unit, or the stages that it is profiled in, and the whole where that is.

    Raises:
        InvalidInput: it is profiled on that type neither whole nor in all of its stages.
    """
    catalog = inputs.known.by_model
    variant = inputs.view.catalog.family(task.family).best
    stages = catalog.stages.get((task.family, variant.name), 1)
    names = [stage_model(task.family, stage, stages) for stage in range(stages)] if stages > 1 else []

    def unit(model: str) -> OperatorCluster | None:
        known = next((f.variant(variant.name) for f in catalog.families if f.name == model), None)
        return None if known is None else _unit(inputs, task, kind, shape, model, known)

    one, parts = unit(task.family), [unit(name) for name in names]
    slo_s = (task.objective.slo_ms - settings.of(task.objective).overhead_ms) / MS_PER_S
    own = tuple(part for part in parts if part is not None)
    if own and len(own) == len(parts):
        return Model(task.family, own, slo_s, cut=True, whole=one)
    if one is None:
        raise InvalidInput(
            f"no profile of {variant.name} on {shape.name} of {kind.name}, or it does not fit its memory",
            field="family", value=task.family, remedy="profile this class, or use another policy",
        )  # fmt: skip
    return Model(task.family, (one,), slo_s)


def _unit(
    inputs: PlanningInput, task: Task, kind: DeviceType, shape: SliceType, model: str, variant: Variant
) -> OperatorCluster | None:
    catalog = inputs.known.by_model
    row = effective_row(catalog, kind, shape, catalog.family(model), variant, task.demand.items_mean)
    if row is None:
        return None
    return OperatorCluster(service_time(row).mean_ms / MS_PER_S, row.clock_sensitivity, float(variant.memory_mib))


def _group_sizes(models: Sequence[Model], settings: AlpaServeSettings, gpus: int) -> tuple[int, ...]:
    """Sizes of groups to try, no larger than the number of GPUs.

    Single GPUs where no family is split. Else the size that is asked for, or all up to the first that has room for all
    stages.

    Raises:
        InvalidInput: the size that is asked for is not in `GROUP_SIZES`.
    """
    stages, wanted = max(len(model.units) for model in models), settings.group_size
    if stages == 1:
        return (1,)
    if wanted and wanted not in GROUP_SIZES:
        remedy = f"one of {', '.join(map(str, GROUP_SIZES))}, or 0: as AlpaServe chooses"
        raise InvalidInput("is not a size of a group", field="group_size", value=wanted, remedy=remedy)
    most = next((size for size in GROUP_SIZES if size >= stages), max(GROUP_SIZES))
    sizes = tuple(size for size in GROUP_SIZES if size <= min(wanted or most, gpus))
    return sizes[-1:] if wanted else sizes


def _sample(rates: Mapping[str, float], rng: Generator) -> Arrivals:
    total = sum(rates.values())
    at = rng.exponential(1.0 / total, SAMPLE_REQUESTS).cumsum().tolist()
    families = rng.choice(len(rates), SAMPLE_REQUESTS, p=[rate / total for rate in rates.values()]).tolist()
    return list(zip(at, (list(rates)[one] for one in families), strict=True))
