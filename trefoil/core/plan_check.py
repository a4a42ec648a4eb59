"""Checks of plans: what makes a plan legal.

Refused are:

- overlapping or illegal placements; a CPU cut both in cores and by quota
- a slice on a device that is LOST, or not planned AWAKE
- memory of cohosted variants above the slice's; a clock outside the supported list
- a route to a slice or variant that is not planned; weights that do not sum to 1 per (family, stage); a missing stage
- credits 0 on a live target, or beyond CREDITS_MAX
- what is named twice; numbers that are not finite
- capacity below demand unless `degraded` says so; an objective older than the stored one

`check_parts` refuses routers, queues and governors that are not known here.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, groupby
from typing import Final

from trefoil.core.catalog import Catalog, memory_mib
from trefoil.core.common import Revision
from trefoil.core.demand import Demand
from trefoil.core.device_types import ENGINE, cpu_quota, engine_slice, slice_type
from trefoil.core.errors import PlanError, SettingError, TrefoilError
from trefoil.core.fleet import (
    DeviceKind,
    DeviceState,
    DeviceStatus,
    DeviceType,
    FleetState,
    Hosted,
    SliceKey,
    SliceType,
)
from trefoil.core.objective import Objective
from trefoil.core.outside.ranges import complaint
from trefoil.core.parts import Kind, check_name
from trefoil.core.plan import NodePlan, Plan, PlannedDevice, PlannedSlice, Route, plain
from trefoil.core.policies import SHIPPED

WEIGHT_TOLERANCE: Final = 1e-6
CAPACITY_TOLERANCE: Final = 1e-6  # relative: a solver's feasibility tolerance is not a shortage
CREDITS_MAX: Final = 4096
"""Of a slice: workers deal them out one by one."""
SLICES_MAX: Final = 1000
"""Of a device, whose slices are compared pair by pair."""
HOSTED_MAX: Final = {"stages": 64, "instances": 1024, "max_batch": 65_536}
CONTEXT_MIB: Final = 400  # overhead of one Triton with a CUDA context; an assumption until it is measured


def sealed(node: NodePlan, revision: Revision) -> NodePlan:
    """Node plan with its revision and digest filled in."""
    return dataclasses.replace(node, revision=revision, digest=node.content_digest)


def check_parts(plan: Plan) -> None:
    """Check that routers, queues and governors of a plan ship or are parts of one's own that this service's settings
    name: a plan from outside must not choose what a service imports.

    Raises:
        PlanError: naming field, value and remedy.
    """
    for route in plan.routes:
        _check_part(Kind.ROUTER, route.router, f"route {route.family}.router")
        _check_part(Kind.QUEUE, route.queue, f"route {route.family}.queue")
    for device in (device for node in plan.nodes for device in node.devices):
        _check_part(Kind.GOVERNOR, device.governor, f"device {device.device}.governor")


def _check_part(kind: Kind, name: str, here: str) -> None:
    try:
        check_name(kind, name, SHIPPED[kind])
    except SettingError as error:
        raise _wrong(error.message, here, name, error.remedy) from error


def check(
    plan: Plan,
    fleet: FleetState,
    catalog: Catalog,
    demand: Sequence[Demand] = (),
    stored: Sequence[Objective] = (),
) -> None:
    """Refuse a plan that must not be rolled out.

    Raises:
        PlanError: the first rule broken, naming field, value and remedy.
    """
    observed = observations(fleet)
    _refuse_twice("nodes", [node.node for node in plan.nodes])
    for node in plan.nodes:
        check_node(node, fleet, catalog, observed)
        _check_quotas(node, observed)
    hosted = {
        (part.key, h.family, h.variant, h.stage): h
        for node in plan.nodes
        for d in node.devices
        for part in d.slices
        for h in part.hosted
    }
    _refuse_twice("routes", [route.family for route in plan.routes])
    for route in plan.routes:
        _check_route(route, hosted)
    if not plan.degraded:
        _check_capacity(plan, demand)
    newest = {o.family: o.number for o in stored}
    for objective in plan.objectives:
        if objective.number < newest.get(objective.family, 0):
            raise _wrong(
                f"decided on an old objective of {objective.family}; {newest[objective.family]} is stored",
                "objectives.number",
                objective.number,
                "plan again",
            )


def _refuse_twice(field: str, names: Sequence[object]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise _wrong("planned twice", field, twice, "name each once")


def observations(fleet: FleetState) -> dict[str, DeviceStatus]:
    """Status of devices by name; of two reports the first."""
    found: dict[str, DeviceStatus] = {}
    for node in fleet.nodes:
        for status in node.devices:
            found.setdefault(status.device, status)
    return found


def check_node(
    node: NodePlan, fleet: FleetState, catalog: Catalog, observed: Mapping[str, DeviceStatus] | None = None
) -> None:
    """Check the rules that need one node only; agents call this before they touch anything.

    `observed`: the fleet's `observations`, for a caller that checks many nodes.

    Raises:
        PlanError: the first rule broken.
    """
    observed = observations(fleet) if observed is None else observed
    _refuse_twice(f"nodes[{node.node}].devices", [device.device for device in node.devices])
    for device in node.devices:
        if not device.device.startswith(f"{node.node}/"):
            raise _wrong(
                "is not a device of this node",
                f"nodes[{node.node}].device",
                device.device,
                "name a device of the node's status",
            )
        status = observed.get(device.device)
        if status is None:
            raise _wrong("no node reports this device", "device", device.device, "plan on devices in `trefoil status`")
        _check_device(device, status.type, status.state, catalog)


def _check_device(device: PlannedDevice, kind: DeviceType, observed: DeviceState, catalog: Catalog) -> None:
    here = f"device {device.device}"
    if device.slices and device.target != DeviceState.AWAKE:
        raise _wrong(
            f"slices on a device planned {device.target.name}",
            f"{here}.target",
            device.target.name,
            "plan it AWAKE, or without slices",
        )
    if device.slices and observed == DeviceState.LOST:
        raise _wrong("slices on a LOST device", here, observed.name, "plan on the other devices")
    if kind.unknown:
        raise _wrong("a device of unknown type", here, kind.name, "leave it out of the plan")
    low_w, high_w = kind.power_limit_min_w, kind.power_limit_max_w
    if device.power_limit_w and not 0 < low_w <= device.power_limit_w <= high_w:
        remedy = f"{low_w:g} to {high_w:g} W, or 0 for the board's own" if low_w < high_w else "plan 0: it takes none"
        raise _wrong(f"not a power limit of a {kind.name}", f"{here}.power_limit_w", device.power_limit_w, remedy)
    clocks = (device.clock_min_mhz, device.clock_max_mhz)
    if any(clocks) and not kind.clock_lockable:
        raise _wrong(f"a {kind.name} cannot lock clocks", f"{here}.clock_mhz", clocks, "plan 0 and 0")
    for clock in clocks:
        if clock and clock not in kind.clocks_mhz:
            raise _wrong("not a supported clock", f"{here}.clock_mhz", clock, f"see {kind.name}")
    if len(device.slices) > SLICES_MAX:
        raise _wrong(f"more than {SLICES_MAX} slices", f"{here}.slices", len(device.slices), "plan fewer slices")
    shapes = []
    for part in device.slices:
        if part.key.device != device.device:
            raise _wrong("a slice of another device", f"{here}.slices", part.key.name, "name slices of this device")
        shapes.append(_check_slice(part, kind, catalog))
    cuts = {part.key.slice_type.partition(":")[0] for part in device.slices}
    if kind.kind == DeviceKind.CPU and len(cuts) > 1:
        raise _wrong(
            "pinned cores and quotas on one device",
            f"{here}.slices",
            [part.key.slice_type for part in device.slices],
            "cut all of its slices one way: cpu:<cores>, or quota:<cores with one decimal>",
        )
    for a, b in combinations(device.slices, 2):
        if a.key.overlaps(b.key):
            raise _wrong(
                "two slices overlap", f"{here}.slices", (a.key.name, b.key.name), "take places that do not overlap"
            )
    if kind.kind == DeviceKind.MIG_GPU:
        used = sum(shape.compute_slices for shape in shapes)
        if used > 7:
            raise _wrong("more than 7 compute slices", f"{here}.slices", used, "plan fewer or smaller slices")


def _check_quotas(node: NodePlan, observed: Mapping[str, DeviceStatus]) -> None:
    """Quotas of a plan are no more than the cores; only the steps of a rollout to it may be (`QUOTA_PLACES`)."""
    for device in node.devices:
        quotas = [cpu_quota(part.key.slice_type) or 0.0 for part in device.slices]
        if any(quotas) and sum(quotas) > (cores := observed[device.device].type.cores) + 1e-9:
            raise _wrong(
                f"quotas of more than {cores} cores",
                f"device {device.device}.slices",
                round(sum(quotas), 1),
                "plan smaller quotas",
            )


def _wrong(text: str, field: str, value: object, remedy: str) -> PlanError:
    return PlanError(text, field=field, value=value, remedy=remedy)


def _check_slice(part: PlannedSlice, kind: DeviceType, catalog: Catalog) -> SliceType:
    """Slice type of a slice that may be planned."""
    try:
        shape = slice_type(kind, part.key.slice_type)
    except TrefoilError as error:
        raise PlanError(str(error), field=f"slice {part.key.name}") from error
    if part.key.start not in shape.starts or part.key.size != shape.memory_slices:
        raise _wrong(
            f"a {shape.name} of {kind.name} starts at one of {shape.starts} with size {shape.memory_slices}",
            f"slice {part.key.name}",
            (part.key.start, part.key.size),
            "take one of these places",
        )
    if not part.hosted:
        raise _wrong(
            "a slice that hosts nothing",
            f"slice {part.key.name}.hosted",
            (),
            "name what it hosts, or leave the slice out",
        )
    if part.credits > CREDITS_MAX:
        here, remedy = f"slice {part.key.name}.credits", f"at most {CREDITS_MAX} requests at once"
        raise _wrong(f"more than {CREDITS_MAX}", here, part.credits, remedy)
    if shape.name.startswith(ENGINE) and [engine_slice(h.family, h.variant) for h in part.hosted] != [shape.name]:
        here, served = f"slice {part.key.name}.hosted", [h.variant for h in part.hosted]
        raise _wrong("an engine serves its own variant alone", here, served, f"plan {shape.name}")
    need_mib = CONTEXT_MIB
    for hosted in part.hosted:
        for name, most in HOSTED_MAX.items():
            if getattr(hosted, name) > most:
                found = getattr(hosted, name)
                raise _wrong(f"more than {most}", f"hosted.{name}", found, f"at most {most}")
        try:
            variant = catalog.family(hosted.family).variant(hosted.variant)
        except TrefoilError as error:
            raise PlanError(str(error), field=f"slice {part.key.name}.hosted") from error
        if hosted.version != variant.version:
            raise _wrong(
                f"{variant.name} is version {variant.version}", "hosted.version", hosted.version, "name that version"
            )
        need_mib += memory_mib(catalog, hosted)
    if need_mib > shape.memory_mib:
        raise _wrong(
            f"needs {need_mib} MiB, a {shape.name} has {shape.memory_mib}",
            f"slice {part.key.name}.hosted",
            [h.variant for h in part.hosted],
            "host less on it",
        )
    return shape


def _check_route(route: Route, hosted: Mapping[tuple[SliceKey, str, str, int], Hosted]) -> None:
    here = f"route {route.family}"
    _refuse_twice(f"{here}.targets", [(target.slice.name, target.stage) for target in route.targets])
    for target in route.targets:
        if (target.slice, route.family, target.variant, target.stage) not in hosted:
            raise _wrong(
                "routes to what is not planned",
                here,
                (target.slice.name, target.variant),
                "plan that slice and variant, or drop the target",
            )
        if not target.draining and target.credits < 1:
            raise _wrong("a live target without credits", f"{here}.credits", target.credits, "give it 1 or more")
        if target.credits > CREDITS_MAX:
            remedy = f"at most {CREDITS_MAX} requests at once"
            raise _wrong(f"more than {CREDITS_MAX}", f"{here}.credits", target.credits, remedy)
        if not 0 <= target.weight < math.inf:
            raise _wrong(
                "a negative weight, or no number", f"{here}.weight", target.weight, "give it a number of 0 or more"
            )
    for name, limit_ms in route.class_slo_ms.items():
        if why := complaint("slo_ms", limit_ms) or ("" if limit_ms > 0 else "no latency"):
            raise _wrong(why, f"{here}.class_slo_ms[{name}]", limit_ms, "correct it")
    for name, slo in route.class_token_slo.items():
        for field, value in plain(slo).items():
            if why := complaint(field, value) or ("" if value >= 0 else "negative"):
                raise _wrong(why, f"{here}.class_token_slo[{name}].{field}", value, "correct it")
    live = sorted((t for t in route.targets if not t.draining), key=lambda t: t.stage)
    for stage, targets in groupby(live, key=lambda t: t.stage):
        total = sum(t.weight for t in targets)
        if abs(total - 1) > WEIGHT_TOLERANCE:
            raise _wrong(
                f"weights of stage {stage} sum to {total:.6f}, not 1", f"{here}.weight", total, "make them sum to 1"
            )
    stages = {h.stages or 1 for h in hosted.values() if h.family == route.family}
    missing = set(range(max(stages, default=1))) - {t.stage for t in live}
    if missing and live:
        raise _wrong(
            "no live target for a stage",
            f"{here}.stage",
            sorted(missing),
            "give each stage a target with a weight above 0",
        )


def carries(capacity_per_s: float, demand: Demand) -> bool:
    """Whether a capacity is enough for a demand's rate."""
    return capacity_per_s >= demand.rate_per_s * (1 - CAPACITY_TOLERANCE)


def _check_capacity(plan: Plan, demand: Sequence[Demand]) -> None:
    for wanted in demand:
        expected = plan.expected.get(wanted.family)
        if expected is not None and not carries(expected.capacity_per_s, wanted):
            raise _wrong(
                f"capacity {expected.capacity_per_s:.1f}/s is below the demand {wanted.rate_per_s:.1f}/s",
                f"expected[{wanted.family}].capacity_per_s",
                expected.capacity_per_s,
                "raise capacity, or name the rung in `degraded`",
            )
