"""WATTWISER, SHARING_AWARE, PACKED_UNIFORM, UNIFORM: whole GPUs that families share, and how many serve each.

Source: WattWiser (Jahanshahi, Rezvani, Wong), Algorithm .1, Algorithm 2, section III, Table I; packed_uniform: there
called GPU-NEST; uniform: Triton as in Fig. 2(a), every family alone on its GPUs, all awake.
Data: each family's cur_rps, the profile of its best variant, the allocation (`gpu_allocation`), and the plan in force,
which is all of the state. cur_rps is `Demand.rate_per_s`: of `last_max` the largest mean of the last seconds, no
head-room.
Decision: of each family's allocated GPUs those that serve, and the weight of each (`gpu_sharing`); the others sleep.
Formulation: Algorithms .1 and 2, one step a decision, with:
  model_max_rps   what one GPU carries of the family within its SLO (`columns.operating_point`; with batches where they
                  form). A setting or an objective's parameter of this name goes first.
  weights         wattwiser: UpdateSharingLoadWeights; sharing_aware: UpdateSharingWeights; the other two: 1.
Weights are normalised by their sum. A GPU of weight 0 gets no request and stays awake until it is removed. A GPU is
awake while any family serves there, and hosts those alone.
Deviations: those of `gpu_sharing`. Preset `shared_left` (ours) has caps by what the other families leave, where the
paper's are equal parts. Preset `literal` decides nothing where Algorithm 2 as printed has no weights.
`wake_lookahead_s` > 0 (not in the paper): sets are chosen by the rate so far ahead, the forecast's growth being linear.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from numpy.random import Generator
from pydantic import Field

from controller.planners.columns import ClassKey, Column, class_column, class_of, unprofiled
from controller.planners.gpu_allocation import Allocation, AllocationSettings, GpuSettings, allocate
from controller.planners.gpu_sharing import (
    Gpu,
    WeightRule,
    literal_weights,
    serving_set,
    sharing_load_weights,
    sharing_weights,
    uniform_weights,
    with_left,
)
from controller.planners.plan_assembly import plan_of
from controller.planners.planning_input import (
    Device,
    HostedSlice,
    PlanningInput,
    Task,
    pue_of,
    read_view,
)
from trefoil.core.brains import Decision, PlanView
from trefoil.core.errors import InvalidInput
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Expected, Plan
from trefoil.core.units import grams


class WattWiserSettings(AllocationSettings):
    """Settings of `wattwiser`."""

    FLEET: ClassVar[frozenset[str]] = AllocationSettings.FLEET | {"literal", "share_left"}

    literal: bool = False
    """Use Algorithm 2 as the paper prints it."""
    share_left: bool = False
    """A family may count on what the others leave of a shared GPU, not only on an equal part."""


class UniformSettings(AllocationSettings):
    """Settings of `uniform`: no GPU is shared."""

    gpus_shared: int = Field(default=0, ge=0)
    """GPUs of a family that are shared with the next family in order."""


@dataclass(frozen=True, slots=True)
class WattWiserPlanner:
    """Planner of shared GPUs, with a rule for weights. Pure: its state is the plan in force."""

    settings: AllocationSettings = AllocationSettings()
    name: str = "wattwiser"
    rule: WeightRule = sharing_load_weights
    dynamic: bool = True

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan one step of the allocation, and the weights of now."""
        settings = self.settings
        inputs, next_s = read_view(view, settings.rate_floor_per_s, whole=True), view.now_s + settings.tick_s
        if not inputs.tasks:
            return Decision(None, f"{self.name}: no family has an objective", next_s, "no_plan: no objective")
        try:
            allocation, devices = allocate(inputs, settings), {device.name: device for device in inputs.devices}
            gpus = {task.family: available(inputs, devices, task, allocation, settings) for task in inputs.tasks}
        except InvalidInput as error:
            return Decision(None, f"{self.name}: {error}", math.inf, f"no_plan: {error}")
        if isinstance(settings, WattWiserSettings) and settings.share_left:
            gpus = with_left(gpus, {task.family: task.demand.rate_per_s for task in inputs.tasks})
        serves = _serving_now(view.current)
        served: dict[str, Sequence[Gpu]] = {}
        weights: dict[str, dict[SliceKey, float]] = {}
        words = []
        for task in inputs.tasks:
            mine, rate = gpus[task.family], task.demand.rate_per_s
            before = [gpu for gpu in mine if gpu.fixed or (task.family, gpu.slice.key.device) in serves]
            ahead = rate_ahead(task, settings.wake_lookahead_s)
            served[task.family], done = (
                serving_set(mine, before, ahead, settings.hysteresis) if self.dynamic else (mine, "")
            )
            try:
                shares = self._rule()(rate, served[task.family])
            except InvalidInput as error:
                return Decision(None, f"{self.name}: {task.family}: {error}", next_s, f"literal: {error}")
            total = sum(shares)
            weights[task.family] = {
                gpu.slice.key: share / total for gpu, share in zip(served[task.family], shares, strict=True)
            }
            split = ", ".join(f"{key.device} {share:.0%}" for key, share in weights[task.family].items())
            words.append(f"{task.family} {rate:.1f}/s on {split}" + (f" ({done})" if done else ""))
        return decision_of(inputs, self.name, served, weights, settings, "; ".join(words), next_s)

    def _rule(self) -> WeightRule:
        literal = isinstance(self.settings, WattWiserSettings) and self.settings.literal
        return literal_weights if literal else self.rule


def decision_of(
    inputs: PlanningInput,
    planner: str,
    served: Mapping[str, Sequence[Gpu]],
    weights: Mapping[str, Mapping[SliceKey, float]],
    settings: GpuSettings,
    said: str,
    next_s: float,
) -> Decision:
    """Decision of what serves each family, and the weight of each slice."""
    hosted = {device.name: list(device.running) if device.frozen else [] for device in inputs.devices}
    columns: dict[ClassKey, Column] = {}
    for each in served.values():
        for gpu in each:
            columns[gpu.column.key] = gpu.column
            if not gpu.fixed:
                hosted[gpu.slice.key.device].append(gpu.slice)
    expected, short = expectations(inputs, served, weights, hosted, settings)
    why = f"{planner}: {said}"
    plan = plan_of(
        inputs, planner, hosted, {}, tuple(columns.values()), settings, expected, why,
        degraded="; ".join(short), weights=weights,
    )  # fmt: skip
    return Decision(plan, why, next_s, plan.degraded)


def sharing_aware(settings: AllocationSettings) -> WattWiserPlanner:
    """WATTWISER with UpdateSharingWeights."""
    return WattWiserPlanner(settings, "sharing_aware", sharing_weights)


def packed_uniform(settings: AllocationSettings) -> WattWiserPlanner:
    """GPU-NEST: the same allocation, requests spread alike."""
    return WattWiserPlanner(settings, "packed_uniform", uniform_weights)


def uniform(settings: UniformSettings) -> WattWiserPlanner:
    """Triton: no GPU is shared, all that are allocated serve."""
    return WattWiserPlanner(settings, "uniform", uniform_weights, dynamic=False)


def available(
    inputs: PlanningInput,
    devices: Mapping[str, Device],
    task: Task,
    allocation: Allocation,
    settings: GpuSettings,
) -> tuple[Gpu, ...]:
    """GPUs that a family may serve on now, in the order in which they are added.

    Raises:
        InvalidInput: there is none, or one has no profile of its best variant.
    """
    best = inputs.view.catalog.family(task.family).best.name
    found = []
    for name in allocation.gpus[task.family]:
        device = devices.get(name)
        if device is None:
            continue
        one = HostedSlice(device.type.largest.key(name), task.family, best)
        if device.frozen:
            standing = next((r for r in device.running if r.family == task.family), None)
            if standing is None:
                continue
            one = standing
        found.append(serving_gpu(inputs, task, device, one, allocation.sharing_factor[name], settings))
    if not found:
        raise InvalidInput(
            "none of its devices can be used now",
            field=f"allocation of {task.family}",
            value=allocation.gpus[task.family],
            remedy="bring one back, or allocate another",
        )
    return tuple(found)


def serving_gpu(
    inputs: PlanningInput, task: Task, device: Device, one: HostedSlice, sharing: int, settings: GpuSettings
) -> Gpu:
    """GPU that serves a family, or a stage of it, with its operating point.

    Raises:
        CatalogError: it is not profiled there, or does not fit.
    """
    objective = replace(task.objective, family=one.model)
    mine, kind = replace(task, objective=objective), device.type
    column = class_column(inputs.known.by_model, mine, kind, one.key.slice_type, one.variant, 1, settings)
    if column is None:
        raise unprofiled(one.model, one.variant, one.key.slice_type, kind)
    if device.zone:
        column = replace(column, key=class_of(device, one))
    max_rps = settings.of(objective).model_max_rps or column.capacity_per_s(1) or column.saturation_per_s
    return Gpu(one, column, max_rps, sharing, device.frozen)


def rate_ahead(task: Task, lookahead_s: float) -> float:
    """Rate of a family so far ahead: the growth that its forecast expects at its horizon, in proportion."""
    forecast, rate = task.demand.forecast, task.demand.rate_per_s
    if lookahead_s <= 0 or forecast is None or forecast.horizon_s <= 0:
        return rate
    return rate + max(0.0, forecast.p90_per_s - forecast.max_per_s) * min(1.0, lookahead_s / forecast.horizon_s)


def _serving_now(current: Plan | None) -> frozenset[tuple[str, str]]:
    """Families and the devices that they serve on by the plan in force."""
    devices = (device for node in (current.nodes if current else ()) for device in node.devices)
    return frozenset((h.family, d.device) for d in devices for part in d.slices for h in part.hosted)


def expectations(
    inputs: PlanningInput,
    served: Mapping[str, Sequence[Gpu]],
    weights: Mapping[str, Mapping[SliceKey, float]],
    hosted: Mapping[str, Sequence[HostedSlice]],
    settings: GpuSettings,
) -> tuple[dict[str, Expected], list[str]]:
    """Expectations from profiles, and what is not met. Requests share baseline power; the p95 is without queues.

    Capacity is what Algorithm .1 counts on, whatever the weights make of it. Of a family that is split each stage has
    its time and joules, and the slowest one the capacity.
    """
    awake_w = sum(d.type.idle_w for d in inputs.devices if hosted[d.name])
    baseline_j = awake_w / sum(task.demand.rate_per_s for task in inputs.tasks)
    expected, short = {}, []
    for task in inputs.tasks:
        parts = [(weights[task.family][gpu.slice.key], gpu) for gpu in served[task.family]]
        stages = sorted({gpu.slice.stage for _, gpu in parts})
        capacity = min(sum(gpu.cap_rps for _, gpu in parts if gpu.slice.stage == n) for n in stages)
        running_j = sum(g.column.running_w for _, g in parts) / task.demand.rate_per_s
        joules = baseline_j + running_j + sum(weight * gpu.column.energy_j for weight, gpu in parts)
        latency_ms = sum(max(g.column.unqueued_ms_p95 for _, g in parts if g.slice.stage == n) for n in stages)
        expected[task.family] = Expected(
            grams_per_request=grams(joules, inputs.view.carbon.intensity_g_per_kwh, pue_of(inputs.view, task)),
            joules_per_request=joules,
            latency_ms_p95=latency_ms + settings.of(task.objective).overhead_ms,
            accuracy=sum(weight * gpu.column.accuracy for weight, gpu in parts) / len(stages),
            capacity_per_s=capacity,
        )
        if not all(gpu.column.tiers for _, gpu in parts):
            short.append(f"slo_missed: {task.family} takes {latency_ms:.1f} ms alone, of {task.objective.slo_ms:g} ms")
        if capacity < task.demand.rate_per_s:
            short.append(f"short_of_capacity: {capacity:.1f}/s of {task.family}, {task.demand.rate_per_s:.1f}/s asked")
    return expected, short
